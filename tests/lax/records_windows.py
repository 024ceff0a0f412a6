"""The table of op records, continued: convolutions and windowed reductions."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.lax.conv_dims import Windows
from spmd.lax.reduce_window_select import select_and_gather_add, select_and_scatter_add
from tests.lax.records import (
    FLOAT,
    INEXACT,
    INTEGER,
    NUMERIC,
    ORDERED,
    Operand,
    Record,
    distinct,
    record,
    some,
)

# ---- convolutions ------------------------------------------------------------------------------


def _conv(case: str, lhs: Operand, rhs: Operand, *how: Any, accepted: Any, **more: Any) -> Record:
    return record(
        "conv_general_dilated",
        lambda lax, x, w: lax.conv_general_dilated(x, w, *how, **more),
        lhs,
        rhs,
        dtypes=accepted,
        case=case,
        # The oracle rounds each partial sum of narrow floats.
        tolerance=256,
    )


WIDE = (np.dtype(np.float32), np.dtype(np.float64))
NHWC = ("NHWC", "HWIO", "NHWC")

CONV = [
    _conv("line", some(2, 3, 5), some(4, 3, 2), (1,), "VALID", accepted=NUMERIC),
    _conv(
        "same",
        some(2, 4, 5, 3),
        some(3, 2, 3, 4),
        (1, 1),
        "SAME",
        dimension_numbers=NHWC,
        accepted=INEXACT,
    ),
    _conv(
        "strided",
        some(1, 2, 6, 7),
        some(2, 2, 3, 2),
        (2, 3),
        ((1, 2), (0, -1)),
        accepted=WIDE,
    ),
    _conv(
        "dilated",
        some(2, 4, 5, 2),
        some(2, 3, 2, 3),
        (1, 2),
        ((1, 1), (2, 0)),
        (2, 1),
        (1, 2),
        dimension_numbers=NHWC,
        accepted=WIDE,
    ),
    _conv(
        "grouped",
        some(2, 4, 3, 4),
        some(2, 2, 2, 6),
        (1, 1),
        "SAME",
        dimension_numbers=NHWC,
        feature_group_count=2,
        accepted=WIDE,
    ),
    _conv(
        "depthwise",
        some(2, 4, 4, 3),
        some(3, 2, 1, 6),
        (2, 1),
        "SAME",
        dimension_numbers=NHWC,
        feature_group_count=3,
        accepted=WIDE,
    ),
    _conv(
        "batch groups",
        some(4, 2, 3, 3),
        some(4, 2, 2, 2),
        (1, 1),
        "SAME_LOWER",
        batch_group_count=2,
        accepted=WIDE,
    ),
    _conv("no space", some(2, 3), some(4, 3), (), (), accepted=WIDE),
    _conv(
        "volume",
        some(1, 2, 3, 3, 3),
        some(2, 2, 2, 1, 2),
        (1, 1, 2),
        "SAME",
        accepted=WIDE,
    ),
    record(
        "conv_general_dilated",
        lambda lax, x, w: lax.conv(x, w, (1,), "SAME", preferred_element_type=np.float32),
        some(2, 3, 5),
        some(4, 3, 2),
        dtypes=[dtypes.bfloat16, np.dtype(np.float16), np.dtype(np.int8)],
        case="preferred",
    ),
]

# ---- windowed reductions -----------------------------------------------------------------------

# (sizes, strides, padding, base dilation, window dilation)
_WINDOWS = {
    "plain": ((1, 2, 2), (1, 2, 2), "VALID", None, None),
    "overlapping": ((1, 3, 2), (1, 2, 1), ((0, 0), (1, 1), (1, 0)), None, None),
    "dilated": ((2, 2, 2), (1, 1, 2), ((1, 0), (0, 2), (1, 1)), (1, 2, 1), (1, 1, 2)),
}
_IDENTITY = {
    "add": lambda dtype: dtype.type(0),
    "max": lambda dtype: dtypes.min_value(dtype)[()],
    "min": lambda dtype: dtypes.max_value(dtype)[()],
    "mul": lambda dtype: dtype.type(1),
}


def _window(name: str, primitive: str, operand: Operand, accepted: Any) -> list[Record]:
    def function(how: Any) -> Any:
        def f(lax: Any, x: Any) -> Any:
            init = _IDENTITY[name](np.dtype(x.dtype))
            return lax.reduce_window(x, init, getattr(lax, name), *how)

        return f

    return [
        record(primitive, function(how), operand, dtypes=accepted, case=case)
        for case, how in _WINDOWS.items()
    ]


REDUCE_WINDOW = [
    # The oracle rounds narrow floats after each step, ours at the end.
    *_window("add", "reduce_window_sum", some(2, 5, 4), WIDE + INTEGER + dtypes.COMPLEX),
    *_window("max", "reduce_window_max", distinct(2, 5, 4), ORDERED),
    *_window("min", "reduce_window_min", distinct(2, 5, 4), ORDERED),
]


def _selecting(select: str, windows: Windows, case: str) -> list[Record]:
    shape = (2, 5, 4)
    counts = windows.counts(shape)
    return [
        record(
            "select_and_gather_add",
            lambda lax, t, x: select_and_gather_add(t, x, select, windows),
            some(*shape),
            distinct(*shape),
            dtypes=FLOAT,
            case=case,
        ),
        record(
            "select_and_scatter_add",
            lambda lax, s, x: select_and_scatter_add(s, x, select, windows),
            some(*counts),
            distinct(*shape),
            dtypes=FLOAT,
            case=case,
        ),
    ]


PLAIN = Windows((1, 2, 2), (1, 2, 2), ((0, 0),) * 3, (1, 1, 1), (1, 1, 1))
OVERLAPPING = Windows((1, 3, 2), (1, 2, 1), ((0, 0), (1, 1), (1, 0)), (1, 1, 1), (1, 1, 1))
DILATED = Windows((2, 2, 2), (1, 1, 2), ((1, 0), (0, 2), (1, 1)), (1, 2, 1), (1, 1, 2))

SELECT = [
    *_selecting("max", PLAIN, "plain"),
    *_selecting("max", OVERLAPPING, "overlapping"),
    *_selecting("min", DILATED, "dilated"),
]

RECORDS = [*CONV, *REDUCE_WINDOW, *SELECT]
