"""Special functions at zeros, ends, infinities and NaN: values are those of JAX or of SciPy.

Where both agree, they are theirs.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import spmd
from spmd.scipy import special

their_special = pytest.importorskip("jax.scipy.special")
oracle = pytest.importorskip("scipy.special")

INF, NAN = np.inf, np.nan
LINE = [-INF, -2.0, -1.0, -0.5, -0.0, 0.0, 0.25, 1.0, 1.5, 30.0, INF, NAN]
SHORT = [-INF, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, INF, NAN]
ONE = (
    "dawsn", "digamma", "entr", "erf", "erfc", "erfcx", "erfinv", "exp1", "expi", "expit",
    "gamma", "gammaln", "gammasgn", "loggamma", "i0", "i0e", "i1", "i1e", "log_ndtr", "logit",
    "ndtr", "ndtri", "spence",
)  # fmt: skip
TWO = (
    "beta", "betaln", "boxcox", "boxcox1p", "comb", "gammainc", "gammaincc", "kl_div", "rel_entr",
    "xlogy", "xlog1py", "poch", "owens_t",
)  # fmt: skip
POINTS = (
    {name: [LINE] for name in ONE}
    | {name: [SHORT, SHORT] for name in TWO}
    | {
        "betainc": [SHORT, SHORT, [-0.5, 0.0, 0.5, 1.0, 2.0, NAN]],
        "zeta": [[1.5, 2.0, INF, NAN], [0.0, 0.5, 1.0, 2.0, INF, -1.0]],
    }
)


def grid(lists):
    return [np.array(c, np.float32) for c in zip(*itertools.product(*lists), strict=True)]


def same(a, b, rtol=5e-4):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    close = np.abs(a - b) <= rtol * np.maximum(2e-3, np.abs(b))
    return (np.isnan(a) & np.isnan(b)) | (a == b) | close


def assert_all(fine, name, points, *values):
    wrong = [
        (*(float(p[i]) for p in points), *(float(np.asarray(v)[i]) for v in values))
        for i in np.flatnonzero(~fine)
    ]
    assert not wrong, f"{name}, points, then ours and theirs: {wrong[:8]}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", POINTS)
def test_values_of_special_functions(name):
    points = grid(POINTS[name])
    ours = np.asarray(getattr(special, name)(*points))
    theirs = np.asarray(getattr(their_special, name)(*points))
    assert ours.dtype == theirs.dtype
    scipy = getattr(oracle, name)(*(p.astype(np.float64) for p in points))
    fine = same(ours, theirs) | same(ours, scipy)
    assert_all(fine, name, points, ours, theirs, scipy)


def test_bessel_functions_have_all_their_derivatives_at_zero():
    for name, expected in {"i0": [1, 0, 0.5, 0, 0.375], "i1": [0, 0.5, 0, 0.375, 0]}.items():
        f = getattr(special, name)
        for value in expected:
            assert float(f(0.0)) == pytest.approx(value)
            f = spmd.grad(f)
    assert float(spmd.grad(spmd.numpy.i0)(0.0)) == 0


@pytest.mark.parametrize("x", [-32768.0, -1000.0, 800.0])
def test_bessel_functions_are_infinite_where_they_overflow(x):
    assert float(special.i0(x)) == np.inf
    assert float(special.i1(x)) == np.copysign(np.inf, x)
