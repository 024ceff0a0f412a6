"""Python integers that don't fit: what each way to make an array of them does, beside JAX.

Where JAX raises an OverflowError, so does spmd, unless spmd has the very number asked for. Where
JAX has a number, spmd has the same one, or raises where the number lies outside both the dtype and
the integers that an array without a dtype could have.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import spmd
from spmd.base import dtypes
from spmd.base.errors import IntegerRangeError

jax = pytest.importorskip("jax", reason="JAX is the oracle")

INTEGERS = [d.name for d in dtypes.INTEGER if not dtypes.is_small(d)]
BOUNDS = sorted({s for b in (7, 8, 15, 16, 31, 32, 63, 64) for s in (2**b - 1, 2**b, -(2**b))})
VALUES = [*BOUNDS, -1, 300, -300, 2**40, -(2**31) - 1, -(2**63) - 1, 2**70]

# By the value alone.
PLAIN = {
    "array": lambda lib, v: lib.numpy.array(v),
    "asarray": lambda lib, v: lib.numpy.asarray(v),
    "device_put": lambda lib, v: lib.device_put(v),
    "in a list": lambda lib, v: lib.numpy.array([[v, 1]]),
    "argument": lambda lib, v: lib.jit(lambda x: x)(v),
    "result": lambda lib, v: lib.jit(lambda: v)(),
    "operand": lambda lib, v: lib.numpy.add(v, 1),
    "operand of one": lambda lib, v: lib.numpy.sum(v),
    "full": lambda lib, v: lib.numpy.full(2, v),
    "bool": lambda lib, v: lib.numpy.bool_(v),
    "float": lambda lib, v: lib.numpy.float32(v),
}

# By a value and a dtype, which the value must fit.
MADE = {
    "name": lambda lib, v, d: getattr(lib.numpy, d)(v),
    "array": lambda lib, v, d: lib.numpy.array(v, d),
    "asarray": lambda lib, v, d: lib.numpy.asarray(v, dtype=d),
    "in a list": lambda lib, v, d: lib.numpy.array([1, v], d),
}

# Beside an array of a dtype, or converted to it: the value wraps around.
BESIDE = {
    "convert": lambda lib, v, d: lib.lax.convert_element_type(v, d),
    "lax.full": lambda lib, v, d: lib.lax.full((2,), v, d),
    "full": lambda lib, v, d: lib.numpy.full((), v, d),
    "full_like": lambda lib, v, d: lib.numpy.full_like(np.ones(2, d), v),
    "add": lambda lib, v, d: lib.numpy.ones(2, d) + v,
    "reflected": lambda lib, v, d: v - lib.numpy.ones((), d),
    "where": lambda lib, v, d: lib.numpy.where(np.array([True, False]), v, np.ones(2, d)),
    "set": lambda lib, v, d: lib.numpy.ones(2, d).at[0].set(v),
    "less": lambda lib, v, d: lib.numpy.ones(2, d) < v,
}


OVERFLOW = "overflow"


def outcome(f, *args):
    """The result's dtype and values, or that it raised an OverflowError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            out = f(*args)
        except OverflowError:
            return OVERFLOW
    return out.dtype.name, np.asarray(out).tolist()


def expected(f, v, d, wraps):
    """What JAX gives; where it refuses a number of the dtype itself, what it has for NumPy's.

    `wraps` says whether JAX takes numbers that no dtype holds; spmd raises for these.
    """
    limits, natural = (np.iinfo(dtypes.canonical(kind)) for kind in (d, int))
    fits = limits.min <= v <= limits.max
    if wraps and not fits and not natural.min <= v <= natural.max:
        return OVERFLOW
    found = outcome(f, jax, v, d)
    return (
        outcome(f, jax, limits.dtype.type(v), d) if wraps and fits and found == OVERFLOW else found
    )


@pytest.fixture(params=[False, True], ids=["x32", "x64"])
def x64(request):
    with jax.enable_x64(request.param), spmd.enable_x64(request.param):
        yield request.param


CASES = [
    *[
        (f"plain {name}", lambda lib, v, _, f=f: f(lib, v), [int], name == "full")
        for name, f in PLAIN.items()
    ],
    *[(f"made {name}", f, INTEGERS, False) for name, f in MADE.items()],
    *[(f"beside {name}", f, INTEGERS, True) for name, f in BESIDE.items()],
]


@pytest.mark.parametrize(("f", "kinds", "wraps"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_integers_that_do_not_fit(f, kinds, wraps, x64):
    wrong, good = [], {}
    for d in kinds:
        for v in VALUES:
            theirs, ours = expected(f, v, d, wraps), outcome(f, spmd, v, d)
            if repr(ours) != repr(theirs):
                wrong.append(f"{v} and {d}: {ours}, JAX has {theirs}")
            if ours != OVERFLOW:
                good[v, d] = ours
            elif outcome(spmd.eval_shape, lambda v=v, d=d: f(spmd, v, d)) != OVERFLOW:
                wrong.append(f"{v} and {d}: raises, but not while tracing")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = spmd.jit(lambda: [f(spmd, v, d) for v, d in good])()
    for (case, ours), out in zip(good.items(), traced, strict=True):
        if repr(outcome(lambda out=out: out)) != repr(ours):
            wrong.append(f"{case}: {ours}, under jit {out}")
    assert not wrong, "\n".join(wrong)


def test_the_error_names_the_number_and_the_range():
    with pytest.raises(IntegerRangeError, match=r"300 does not fit uint8, which holds 0 to 255"):
        spmd.numpy.uint8(300)
    with pytest.raises(IntegerRangeError, match=r"3000000000 does not fit int32"):
        spmd.numpy.array([1, 3_000_000_000])
