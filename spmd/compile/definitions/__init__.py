"""Definitions: primitives that have no kernel, as programs of primitives that have one.

The one idea: a GPU that waits for the host loses more than a longer program costs it. So there the
first pass writes the definition in the place of an equation that the host would compute; on CPUs
the library that the primitive's `impl` calls is the faster way, but for special functions, small
matrices, and Fourier transforms of sizes with large primes.
"""

# Special functions that are series and fractions, by the names of their primitives. `pipeline.py`
# reads this in every program, so it must not import the functions.
SERIES = frozenset(
    "bessel_i0e bessel_i1e bessel_over_power cosine_integral dawsn erfcx exp1 expi expn fresnel_c "
    "fresnel_s igamma igamma_grad_a igammac owens_t polygamma random_gamma_grad "
    "regularized_incomplete_beta sine_integral spence zeta".split()
)

# Those in complex numbers, for GPUs only: NumPy has these as fast as kernels of CPUs.
COMPLEX_SERIES = frozenset("hyp1f1 hyp1f1_slope hyp2f1 hyp2f1_slope wofz".split())

# Factorizations of which stacks of small matrices have a program.
OF_SMALL_MATRICES = frozenset(
    "cholesky lu lu_pivots_to_permutation qr solve triangular_solve".split()
)
