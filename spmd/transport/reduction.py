"""The arithmetic of reductions: combine the ranks' parts from rank 0 upwards.

All transports reduce through `combine`, so they agree to the last bit.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Sequence

import numpy as np

from spmd.base.errors import CollectiveError
from spmd.transport.communicator import ReduceOp

UFUNCS = {
    ReduceOp.SUM: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MAX: np.maximum,
    ReduceOp.MIN: np.minimum,
    ReduceOp.AND: np.bitwise_and,
    ReduceOp.OR: np.bitwise_or,
    ReduceOp.XOR: np.bitwise_xor,
}
BITWISE = (ReduceOp.AND, ReduceOp.OR, ReduceOp.XOR)
FLOAT32 = np.dtype(np.float32)
ROUNDING = (ReduceOp.SUM, ReduceOp.PROD)


def check_op(op: ReduceOp, dtype: np.dtype) -> None:
    """Raise unless `op` has a meaning for `dtype`."""
    if not isinstance(op, ReduceOp):
        known = ", ".join(f"ReduceOp.{known.name}" for known in ReduceOp)
        raise CollectiveError(f"a reduction's op must be one of {known}; got {op!r}")
    if op in BITWISE and dtype.kind not in "biu":
        raise CollectiveError(
            f"ReduceOp.{op.name} is for bool and integers; the buffer is {dtype.name}"
        )


def accumulator(op: ReduceOp, dtype: np.dtype) -> np.dtype:
    """The dtype in which a reduction is carried out.

    Sums of narrow floats lose a bit at almost every step; in float32 they round once, at the end.
    The test is by name because ml_dtypes' types report a kind of their own.
    """
    if dtype.itemsize <= 2 and op in ROUNDING and "float" in dtype.name:
        return FLOAT32
    return dtype


class _Quiet(threading.local):
    """A context per thread in which NumPy does not warn: an overflow is the user's number.

    Running in a prepared context costs a tenth of entering `np.errstate` at every call.
    """

    def __init__(self) -> None:
        self.context = contextvars.Context()
        self.context.run(np.seterr, all="ignore")


_quiet = _Quiet()


def combine(op: ReduceOp, parts: Sequence[np.ndarray], out: np.ndarray) -> None:
    """Write `parts[0] op parts[1] op ...`, associated from the left, to `out`.

    `out` may be `parts[0]` itself; it must not overlap any other part.
    """
    _quiet.context.run(_combine, UFUNCS[op], accumulator(op, out.dtype), parts, out)


def _combine(ufunc: np.ufunc, wide: np.dtype, parts: Sequence[np.ndarray], out: np.ndarray) -> None:
    if wide is not out.dtype:
        total = parts[0].astype(wide)
        for part in parts[1:]:
            ufunc(total, part.astype(wide), out=total)
        out[...] = total
    elif len(parts) == 1:
        np.copyto(out, parts[0])
    else:
        ufunc(parts[0], parts[1], out=out)
        for part in parts[2:]:
            ufunc(out, part, out=out)
