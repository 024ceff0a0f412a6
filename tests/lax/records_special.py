"""The table of op records, continued: Bessel functions, incomplete ones, integrals."""

from __future__ import annotations

import numpy as np
import pytest

from spmd.lax.special_beta import bessel_over_power_p
from spmd.lax.special_hypergeometric import (
    hyp1f1_p,
    hyp1f1_slope_p,
    hyp2f1_p,
    hyp2f1_slope_p,
)
from spmd.lax.special_integrals import dawsn_p, exp1_p, expi_p, expn_p, spence_p
from spmd.lax.special_oscillating import (
    cosine_integral_p,
    erfcx_p,
    fresnel_c_p,
    fresnel_s_p,
    owens_t_p,
    sine_integral_p,
    wofz_p,
)
from tests.lax.records import COMPLEX, FLOAT, WIDE_FLOAT, Operand, between, record, unary


def _scipy(name):
    def reference(*arrays):
        special = pytest.importorskip("scipy.special")
        wide = [np.asarray(x, np.float64) for x in arrays]
        return getattr(special, name)(*wide).astype(arrays[-1].dtype)

    return reference


def _integral(prim, low, high):
    return record(
        prim.name,
        lambda lax, x: prim.bind(x),
        between(low, high, 2, 3),
        dtypes=WIDE_FLOAT,
        reference=_scipy(prim.name),
    )


def _part(name, index):
    """One of the results of a SciPy function that has two."""

    def reference(x):
        special = pytest.importorskip("scipy.special")
        return getattr(special, name)(np.asarray(x, np.float64))[index].astype(x.dtype)

    return reference


def _half(prim, name, index, low, high):
    operand = between(low, high, 2, 3)
    call = lambda lax, x: prim.bind(x)  # noqa: E731
    return record(
        prim.name, call, operand, dtypes=WIDE_FLOAT, reference=_part(name, index), tolerance=64
    )


def _slope(name, which):
    """A derivative in a parameter, by central differences of SciPy's function."""

    def reference(*arrays):
        special = pytest.importorskip("scipy.special")
        wide = [np.asarray(x, np.float64) for x in arrays]
        ends = []
        for step in (1e-5, -1e-5):
            moved = [x + step * (k == which) for k, x in enumerate(wide)]
            ends.append(getattr(special, name)(*moved))
        return ((ends[0] - ends[1]) / 2e-5).astype(arrays[0].dtype)

    return reference


A = between(0.5, 4, 2, 3)

RECORDS = [
    unary("bessel_i0e", 0.3, 3, FLOAT),
    unary("bessel_i1e", -3, -0.3, FLOAT),
    record(
        "regularized_incomplete_beta",
        lambda lax, a, b, x: lax.betainc(a, b, x),
        A,
        A,
        between(0.1, 0.9, 2, 3),
        dtypes=WIDE_FLOAT,
        differentiable=(2,),
        tolerance=512,
    ),
    _integral(exp1_p, 0.3, 4),
    _integral(expi_p, 0.5, 4),
    _integral(dawsn_p, -3, 3),
    _integral(spence_p, 0.2, 3),
    record(
        "expn",
        lambda lax, n, x: expn_p.bind(n, x),
        Operand((), 2, 2),
        between(0.3, 3, 2, 3),
        dtypes=WIDE_FLOAT,
        differentiable=(1,),
        reference=_scipy("expn"),
    ),
    record(
        "bessel_over_power",
        lambda lax, x: bessel_over_power_p.bind(x, order=1),
        between(0.3, 3, 2, 3),
        dtypes=WIDE_FLOAT,
        reference=lambda x: (pytest.importorskip("scipy.special").iv(1, x) / x).astype(x.dtype),
    ),
    _integral(erfcx_p, -2, 8),
    record(
        "wofz",
        lambda lax, z: wofz_p.bind(z),
        between(-2, 3, 2, 3),
        dtypes=COMPLEX,
        reference=lambda z: pytest.importorskip("scipy.special").wofz(z).astype(z.dtype),
        tolerance=64,
    ),
    _half(fresnel_s_p, "fresnel", 0, 0.3, 3),
    _half(fresnel_c_p, "fresnel", 1, -3, -0.3),
    _half(sine_integral_p, "sici", 0, -6, 6),
    _half(cosine_integral_p, "sici", 1, 1, 8),
    record(
        "owens_t",
        lambda lax, h, a: owens_t_p.bind(h, a),
        between(-2, 2, 2, 3),
        between(0.2, 3, 2, 3),
        dtypes=WIDE_FLOAT,
        reference=_scipy("owens_t"),
        tolerance=64,
    ),
    record(
        "hyp1f1",
        lambda lax, a, b, x: hyp1f1_p.bind(a, b, x),
        A,
        A,
        between(-3, 3, 2, 3),
        dtypes=WIDE_FLOAT,
        differentiable=(2,),
        reference=_scipy("hyp1f1"),
        tolerance=1024,
    ),
    record(
        "hyp2f1",
        lambda lax, a, b, c, x: hyp2f1_p.bind(a, b, c, x),
        A,
        A,
        between(1, 4, 2, 3),
        between(-0.8, 0.8, 2, 3),
        dtypes=WIDE_FLOAT,
        differentiable=(3,),
        reference=_scipy("hyp2f1"),
        tolerance=1024,
    ),
    record(
        "hyp1f1_slope",
        lambda lax, a, b, x: hyp1f1_slope_p.bind(a, b, x, which=1),
        A,
        A,
        between(-3, 3, 2, 3),
        dtypes=(np.float32,),
        differentiable=(),
        reference=_slope("hyp1f1", 1),
        tolerance=2048,
    ),
    record(
        "hyp2f1_slope",
        lambda lax, a, b, c, x: hyp2f1_slope_p.bind(a, b, c, x, which=2),
        A,
        A,
        between(1, 4, 2, 3),
        between(-0.8, 0.8, 2, 3),
        dtypes=(np.float32,),
        differentiable=(),
        reference=_slope("hyp2f1", 2),
        tolerance=2048,
    ),
]
