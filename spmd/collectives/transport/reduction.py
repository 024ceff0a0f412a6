"""The arithmetic of reductions: combine the ranks' parts from rank 0 upwards.

All transports reduce through `combine`, so they agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmd.collectives.transport.base import ReduceOp
from spmd.core.errors import CollectiveError

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
    The itemsize test is by name because ml_dtypes' types report different kinds.
    """
    if op in ROUNDING and dtype.itemsize <= 2 and "float" in dtype.name:
        return np.dtype(np.float32)
    return dtype


def combine(op: ReduceOp, parts: Sequence[np.ndarray], out: np.ndarray) -> None:
    """Write `parts[0] op parts[1] op ...`, associated from the left, to `out`.

    `out` may be `parts[0]` itself; it must not overlap any other part.
    """
    ufunc = UFUNCS[op]
    wide = accumulator(op, out.dtype)
    with np.errstate(all="ignore"):  # an overflow is the user's number, not a warning of ours
        if wide != out.dtype:
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
