"""Every elementwise primitive on the numbers at the edges, on one number, and on none.

Evaluated and compiled must agree there, too: infinities, NaN, zeros of both signs, denormals, the
smallest and largest of a dtype. The rules for whole arrays are tested at size zero.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.base import dtypes
from tests.lax import records, records_fft, records_indexing, records_windows
from tests.lax import test_records as suite

ELEMENTWISE = [
    r
    for r in (*records.ARITHMETIC, *records.ELEMENTWISE, *records.LOGIC, *records.CONVERT)
    if {o.shape for o in r.operands} <= {(2, 3), ()} and r.operands
]
DTYPES = tuple(
    np.dtype(d) for d in (np.float32, np.float64, dtypes.bfloat16, np.int32, np.int8, np.uint8)
)
# How many units of the last place evaluated and compiled may differ, where not by none: NumPy's
# own functions and ours are both within a few.
UNITS = 16


@pytest.fixture(autouse=True)
def wide_dtypes():
    with spmd.enable_x64(True):
        yield


def edges(dtype: np.dtype) -> np.ndarray:
    """Numbers at the edges of a dtype, and some ordinary ones."""
    if dtypes.is_bool(dtype):
        return np.array([False, True])
    if dtypes.is_integer(dtype):
        info = np.iinfo(dtype)
        return np.array([info.min, info.min + 1, -1 % (info.max + 1), 0, 1, 2, 3, info.max], dtype)
    info = dtypes.finfo(dtype)
    small = [float(info.tiny), float(info.smallest_subnormal)]
    large = [float(info.max), 1e3, np.inf]
    plain = [0.0, 0.25, 1.0, 1.5, 2.0, 3.0]
    numbers = np.array([*plain, *small, *large], np.float64)
    return np.concatenate([numbers, -numbers, [np.nan]]).astype(dtype)


def at_edges(record: records.Record, dtype: np.dtype) -> list[np.ndarray]:
    """Operands whose elements are all combinations of edges; scalars keep their own values."""
    made = record.make(dtype)
    whole = [k for k, o in enumerate(record.operands) if o.shape]
    if record.primitive == "select_n":  # its first operand counts branches
        whole = [k for k in whole if k or dtypes.is_bool(made[0].dtype)]
    columns = [edges(made[k].dtype) for k in whole]
    grids = np.meshgrid(*columns, indexing="ij")
    for k, grid in zip(whole, grids, strict=True):
        made[k] = grid.ravel()
    size = grids[0].size if grids else 1
    return [x if k in whole or not x.ndim else np.resize(x, size) for k, x in enumerate(made)]


def assert_same(record, operands, found, wanted):
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    if dtypes.is_complex(found.dtype):
        assert_same(record, operands, found.real, wanted.real)
        assert_same(record, operands, found.imag, wanted.imag)
        return
    if not dtypes.is_float(found.dtype):
        wrong = found != wanted
    else:
        info = dtypes.finfo(found.dtype)
        x, y = found.astype(np.float64), wanted.astype(np.float64)
        with np.errstate(all="ignore"):
            room = UNITS * (float(info.eps) * np.abs(y) + float(info.smallest_subnormal))
            near = (np.abs(x - y) <= room) | (x == y)
        signs = (np.signbit(x) == np.signbit(y)) | (x != 0)
        wrong = ~((np.isnan(x) & np.isnan(y)) | (near & signs))
    at = np.flatnonzero(wrong)[:5]
    cases = [(*(x[k] if x.ndim else x for x in operands), found[k], wanted[k]) for k in at]
    assert not cases, f"{record}: (operands, compiled, evaluated): {cases}"


def compiled_together(chosen, operands):
    """The values of many records from one compiled program: kernels of their own, one compile."""

    def f(operands):
        return [r.function(lax, *xs) for r, xs in zip(chosen, operands, strict=True)]

    return spmd.jit(f)(operands)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtypes.short_name)
def test_edges(dtype):
    chosen = [r for r in ELEMENTWISE if dtype in r.dtypes]
    operands = [at_edges(r, dtype) for r in chosen]
    outs = compiled_together(chosen, operands)
    with np.errstate(all="ignore"):
        for r, xs, out in zip(chosen, operands, outs, strict=True):
            assert_same(r, xs, out, suite.computed(r, xs))


# ---- one number, and none ----------------------------------------------------------------------


def resized(record, shape):
    operands = tuple(replace(o, shape=shape) if o.shape else o for o in record.operands)
    return replace(record, operands=operands)


@pytest.mark.parametrize("shape", [(), (0, 3)], ids=str)
def test_one_number_and_none(shape):
    chosen = [resized(r, shape) for r in ELEMENTWISE]
    operands = [r.make(r.dtypes[-1]) for r in chosen]
    outs = compiled_together(chosen, operands)
    for r, xs, out in zip(chosen, operands, outs, strict=True):
        wanted = suite.computed(r, xs)
        (aval,) = suite.traced(r, xs).out_avals
        assert (np.shape(wanted), np.asarray(wanted).dtype) == (aval.shape, aval.dtype), r
        suite.assert_close(out, wanted, r.tolerance)
        with spmd.disable_jit():
            suite.assert_close(r.function(lax, *xs), wanted, r.tolerance)


EMPTY = np.zeros((0, 3), np.float32)
OF_NOTHING = {
    "reduce_sum": lambda x: lax.reduce_sum(x, (0,)),
    "reduce_prod": lambda x: lax.reduce_prod(x, (0, 1)),
    "reduce_max": lambda x: lax.reduce_max(x, (1,)),
    "argmax": lambda x: lax.argmax(x, 1, np.int32),
    "cumsum": lambda x: lax.cumsum(x, 0),
    "cumlogsumexp": lambda x: lax.cumlogsumexp(x, 1),
    "dot_general": lambda x: lax.dot(x.T, x),
    "outer": lambda x: lax.dot(x, x.T),
    "concatenate": lambda x: lax.concatenate([x, x], 1),
    "pad": lambda x: lax.pad(x, np.float32(7), ((1, 1, 0), (0, 0, 1))),
    "slice": lambda x: lax.slice(x, (0, 1), (0, 3)),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (0, 1), (0, 2)),
    "gather": lambda x: x[:, np.array([2, 0])],
    "scatter": lambda x: lax.concatenate([x, x], 0).T.at[1].set(2.0),
    "sort": lambda x: lax.sort(x, dimension=0),
    "top_k": lambda x: lax.top_k(x, 2)[0],
    "reduce_window_sum": lambda x: lax.reduce_window(
        x, 0.0, lax.add, (1, 2), (1, 1), ((0, 0), (0, 0))
    ),
    "reshape": lambda x: lax.reshape(x, (3, 0, 2)),
    "broadcast": lambda x: lax.broadcast(x, (2,)),
    "rev": lambda x: lax.rev(x, (0, 1)),
    "fft": lambda x: lax.fft(x, "FFT", (3,)),
    "cholesky": lambda x: lax.linalg.cholesky(lax.broadcast_in_dim(x, (0, 3, 3), (0, 1))),
    "map": lambda x: lax.map(lambda row: row * 2, x),
    "select": lambda x: lax.select(x > 0, x, -x),
}


@pytest.mark.parametrize("name", OF_NOTHING)
def test_arrays_of_size_zero(name):
    f = OF_NOTHING[name]
    x = EMPTY.astype(np.complex64) if name == "fft" else EMPTY
    wanted = spmd.eval_shape(f, x)
    for out in (spmd.jit(f)(x), f(x)):
        assert (out.shape, out.dtype) == (wanted.shape, wanted.dtype)
        if out.size:
            neutral = {"reduce_sum": 0, "dot_general": 0, "reduce_prod": 1, "pad": 7}[name]
            np.testing.assert_array_equal(out, np.full(out.shape, neutral))
    if name not in ("argmax", "fft", "cholesky"):
        gradient = spmd.jit(spmd.grad(lambda x: f(x).sum()))(x)
        assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)
    stacked = spmd.vmap(f)(np.zeros((2, *x.shape), x.dtype))
    assert stacked.shape == (2, *wanted.shape)


# ---- jit = disable_jit ---------------------------------------------------------------------------


OTHERS = (*records_indexing.RECORDS, *records_fft.RECORDS, *records_windows.RECORDS)


@pytest.mark.parametrize(
    "dtype", [*DTYPES[:4], np.dtype(np.bool_), np.dtype(np.complex64)], ids=str
)
def test_compiled_is_evaluated(dtype):
    chosen = [r for r in OTHERS if dtype in r.dtypes]
    assert len(chosen) > 10
    operands = [r.make(dtype) for r in chosen]
    outs = compiled_together(chosen, operands)
    for r, xs, out in zip(chosen, operands, outs, strict=True):
        with spmd.disable_jit():
            wanted = np.asarray(r.function(lax, *xs))
        suite.assert_close(out, wanted, r.tolerance)
