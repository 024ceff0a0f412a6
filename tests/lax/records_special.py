"""The table of op records, continued: Bessel functions, incomplete ones, integrals."""

from __future__ import annotations

import numpy as np
import pytest

from spmd.lax.special_integrals import dawsn_p, exp1_p, expi_p, expn_p, spence_p
from tests.lax.records import FLOAT, WIDE_FLOAT, Operand, between, record, unary


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
]
