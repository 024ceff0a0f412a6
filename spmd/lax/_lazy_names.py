"""Names of `spmd.lax` that few programs use: imported when the first of them is asked for."""

# ruff: noqa: F401

from spmd.lax.callback import after_all, create_token, dce_sink, shape_as_value, stage
from spmd.lax.control_platform import composite, platform_dependent
from spmd.lax.control_solve import custom_linear_solve, custom_root, linear_solve_p
from spmd.lax.conv_derived import (
    conv_general_dilated_local,
    conv_general_dilated_patches,
    conv_general_shape_tuple,
    conv_shape_tuple,
    conv_transpose,
    conv_transpose_shape_tuple,
)
from spmd.lax.conv_dims import ConvGeneralDilatedDimensionNumbers
from spmd.lax.dot import DotDimensionNumbers
from spmd.lax.keys.rng import RandomAlgorithm, rng_bit_generator, rng_bit_generator_p, rng_uniform
from spmd.lax.precision import (
    AccuracyMode,
    DotAlgorithm,
    DotAlgorithmPreset,
    Precision,
    PrecisionLike,
    Tolerance,
)
from spmd.lax.ragged import (
    RaggedDotDimensionNumbers,
    ragged_dot,
    ragged_dot_general,
    scaled_dot,
)
from spmd.lax.special import (
    digamma,
    digamma_p,
    erf,
    erf_inv,
    erf_inv_p,
    erf_p,
    erfc,
    erfc_p,
    igamma,
    igamma_grad_a,
    igamma_grad_a_p,
    igamma_p,
    igammac,
    igammac_p,
    lgamma,
    lgamma_p,
    polygamma,
    polygamma_p,
    random_gamma_grad,
    random_gamma_grad_p,
    zeta,
    zeta_p,
)
from spmd.lax.special_beta import (
    bessel_i0e,
    bessel_i0e_p,
    bessel_i1e,
    bessel_i1e_p,
    betainc,
    regularized_incomplete_beta_p,
)
