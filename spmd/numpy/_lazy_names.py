"""Names of `spmd.numpy` that few programs use: imported when the first of them is asked for."""

# ruff: noqa: F401

from spmd.numpy.concatenators import c_, r_
from spmd.numpy.files import (
    array_repr,
    array_str,
    frombuffer,
    fromfile,
    fromiter,
    fromstring,
    load,
    save,
    savez,
)
from spmd.numpy.histograms import histogram2d, histogramdd
from spmd.numpy.integers import gcd, lcm, packbits, unpackbits
from spmd.numpy.numerical import (
    diag_indices,
    diag_indices_from,
    gradient,
    i0,
    interp,
    mask_indices,
    polyval,
    ravel_multi_index,
    trapezoid,
    tril_indices,
    tril_indices_from,
    triu_indices,
    triu_indices_from,
    unravel_index,
    unwrap,
    vander,
)
from spmd.numpy.placing import place, put
from spmd.numpy.polynomial import (
    poly,
    polyadd,
    polyder,
    polydiv,
    polyfit,
    polyint,
    polymul,
    polysub,
    roots,
)
from spmd.numpy.sets import (
    intersect1d,
    setdiff1d,
    setxor1d,
    union1d,
    unique_all,
    unique_counts,
    unique_inverse,
)
from spmd.numpy.signal import (
    bartlett,
    blackman,
    convolve,
    correlate,
    hamming,
    hanning,
    kaiser,
)
