"""The operations: primitives with all their rules, under the names of `jax.lax`.

This file and `_lazy_names.py` only list the public names, file by file.
"""

# ruff: noqa: F401

import typing as _typing

from spmd.base.lazy_import import attach as _attach
from spmd.core.remat import optimization_barrier, optimization_barrier_p
from spmd.core.structural import (
    broadcast_in_dim,
    broadcast_in_dim_p,
    permute_dims,
    permute_dims_p,
    reduce_sum,
    reduce_sum_p,
    reshape,
    reshape_p,
)
from spmd.lax.arithmetic import (
    RoundingMethod,
    abs,
    abs_p,
    add,
    add_p,
    cbrt,
    cbrt_p,
    ceil,
    ceil_p,
    complex,
    complex_p,
    conj,
    conj_p,
    div,
    div_p,
    floor,
    floor_p,
    imag,
    imag_p,
    integer_pow,
    integer_pow_p,
    is_finite,
    is_finite_p,
    log,
    log_p,
    max,
    max_p,
    min,
    min_p,
    mul,
    mul_p,
    neg,
    neg_p,
    nextafter,
    nextafter_p,
    pow,
    pow_p,
    real,
    real_p,
    reciprocal,
    rem,
    rem_p,
    round,
    round_p,
    rsqrt,
    rsqrt_p,
    sign,
    sign_p,
    sqrt,
    sqrt_p,
    square,
    square_p,
    sub,
    sub_p,
)
from spmd.lax.array import (
    broadcast,
    broadcast_like,
    broadcast_shapes,
    broadcast_to_rank,
    broadcasted_iota,
    collapse,
    empty,
    expand_dims,
    eye,
    full,
    full_like,
    iota,
    iota_p,
    rev,
    rev_p,
    squeeze,
    squeeze_p,
    stack,
    tile,
    transpose,
    tri,
    unstack,
    zeros_like_array,
)
from spmd.lax.concatenate import (
    concatenate,
    concatenate_p,
    split,
    split_p,
)
from spmd.lax.control_cond import cond, cond_p, switch
from spmd.lax.control_maps import associative_scan, map
from spmd.lax.control_scan import scan, scan_p
from spmd.lax.control_while import fori_loop, while_loop, while_p
from spmd.lax.conv import (
    conv,
    conv_general_dilated,
    conv_general_dilated_p,
    conv_with_general_padding,
)
from spmd.lax.conv_dims import (
    ConvDimensionNumbers,
    conv_dimension_numbers,
    conv_general_permutations,
    padtype_to_pads,
)
from spmd.lax.convert import (
    bitcast_convert_type,
    bitcast_convert_type_p,
    convert_element_type,
    convert_element_type_p,
    copy,
    copy_p,
    dtype,
    reduce_precision,
    reduce_precision_p,
    stop_gradient,
    stop_gradient_p,
)
from spmd.lax.cumulative import (
    cumlogsumexp,
    cumlogsumexp_p,
    cummax,
    cummax_p,
    cummin,
    cummin_p,
    cumprod,
    cumprod_p,
    cumsum,
    cumsum_p,
)
from spmd.lax.dot import (
    batch_matmul,
    dot,
    dot_general,
    dot_general_p,
)
from spmd.lax.dynamic import (
    dynamic_index_in_dim,
    dynamic_slice,
    dynamic_slice_in_dim,
    dynamic_slice_p,
    dynamic_update_index_in_dim,
    dynamic_update_slice,
    dynamic_update_slice_in_dim,
    dynamic_update_slice_p,
)
from spmd.lax.elementwise import (
    acos,
    acos_p,
    acosh,
    acosh_p,
    asin,
    asin_p,
    asinh,
    asinh_p,
    atan,
    atan2,
    atan2_p,
    atan_p,
    atanh,
    atanh_p,
    cos,
    cos_p,
    cosh,
    cosh_p,
    exp,
    exp2,
    exp2_p,
    exp_p,
    expm1,
    expm1_p,
    log1p,
    log1p_p,
    logistic,
    logistic_p,
    sin,
    sin_p,
    sinh,
    sinh_p,
    tan,
    tan_p,
    tanh,
    tanh_p,
)
from spmd.lax.fft import FftType, fft, fft_p
from spmd.lax.gather import (
    gather,
    gather_p,
    index_take,
    scatter_add,
    scatter_add_p,
)
from spmd.lax.integer import (
    mulhi,
)
from spmd.lax.logic import (
    and_p,
    bitwise_and,
    bitwise_not,
    bitwise_or,
    bitwise_xor,
    clamp,
    clamp_p,
    clz,
    clz_p,
    eq,
    eq_p,
    ge,
    ge_p,
    gt,
    gt_p,
    le,
    le_p,
    lt,
    lt_p,
    ne,
    ne_p,
    not_p,
    or_p,
    population_count,
    population_count_p,
    select,
    select_n,
    select_n_p,
    shift_left,
    shift_left_p,
    shift_right_arithmetic,
    shift_right_arithmetic_p,
    shift_right_logical,
    shift_right_logical_p,
    xor_p,
)
from spmd.lax.reduce import (
    argmax,
    argmax_p,
    argmin,
    argmin_p,
    logsumexp,
    reduce,
    reduce_and,
    reduce_and_p,
    reduce_max,
    reduce_max_p,
    reduce_min,
    reduce_min_p,
    reduce_or,
    reduce_or_p,
    reduce_prod,
    reduce_prod_p,
    reduce_xor,
    reduce_xor_p,
)
from spmd.lax.reduce_window import (
    reduce_window,
    reduce_window_max_p,
    reduce_window_min_p,
    reduce_window_shape_tuple,
    reduce_window_sum_p,
)
from spmd.lax.reduce_window_select import (
    select_and_gather_add_p,
    select_and_scatter_add_p,
)
from spmd.lax.scatter import (
    scatter,
    scatter_apply,
    scatter_max,
    scatter_max_p,
    scatter_min,
    scatter_min_p,
    scatter_mul,
    scatter_mul_p,
    scatter_p,
    scatter_sub,
)
from spmd.lax.slicing import (
    index_in_dim,
    pad,
    pad_p,
    slice,
    slice_in_dim,
    slice_p,
)
from spmd.lax.sort import (
    approx_max_k,
    approx_min_k,
    argsort,
    sort,
    sort_key_val,
    sort_p,
    top_k,
    top_k_p,
)
from spmd.lax.windows import (
    GatherDimensionNumbers,
    GatherScatterMode,
    ScatterDimensionNumbers,
)

# JAX's name.
transpose_p = permute_dims_p

if _typing.TYPE_CHECKING:
    from spmd.lax import linalg
    from spmd.lax._lazy_names import *  # noqa: F403

__getattr__, __dir__ = _attach(__name__, ("linalg",), "_lazy_names")
