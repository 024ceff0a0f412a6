"""Op records of the primitives that move and select elements: slices, gathers, scatters, sorts.

The same class and the same use as tests/lax/records.py. Where a primitive has several results the
record's function returns one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spmd.base import dtypes
from tests.lax.records import (
    ANY,
    INTEGER,
    NUMERIC,
    ORDERED,
    Operand,
    Record,
    between,
    distinct,
    record,
    some,
)

INT32 = np.int32


def index(low: int, high: int, *shape: int) -> Operand:
    """Random int32 positions."""
    return between(low, high, *shape, dtype=INT32)


# ---- static ------------------------------------------------------------------------------------

STATIC = [
    record("slice", lambda lax, x: lax.slice(x, (1, 0), (3, 4)), some(4, 4), dtypes=ANY),
    record(
        "slice",
        lambda lax, x: lax.slice(x, (0, 0, 1), (2, 5, 2), (1, 2, 1)),
        some(2, 5, 3),
        dtypes=NUMERIC,
        case="strided",
    ),
    record(
        "pad",
        lambda lax, x, v: lax.pad(x, v, ((1, -1, 1), (-1, 2, 0), (0, 0, 0))),
        some(3, 3, 2),
        some(),
        dtypes=ANY,
    ),
    record(
        "concatenate",
        lambda lax, x, y: lax.concatenate([x, y, x], 1),
        some(2, 3),
        some(2, 1),
        dtypes=ANY,
    ),
    record("split", lambda lax, x: lax.split(x, (1, 0, 3), 1)[2], some(3, 4), dtypes=ANY),
]

# ---- dynamic -----------------------------------------------------------------------------------

DYNAMIC = [
    record(
        "dynamic_slice",
        lambda lax, x, i, j: lax.dynamic_slice(x, (i, j), (2, 4)),
        some(5, 4),
        index(-6, 6),
        index(-2, 2),
        dtypes=ANY,
    ),
    record(
        "dynamic_update_slice",
        lambda lax, x, u, i, j: lax.dynamic_update_slice(x, u, (i, j)),
        some(5, 4),
        some(2, 4),
        index(-6, 6),
        index(-2, 2),
        dtypes=ANY,
    ),
]

# ---- gather and scatter ------------------------------------------------------------------------

# Rows of a matrix; and, along a walking first dim, pairs of neighbours.
ROWS = ((1,), (0,), (0,))
PAIRS = ((2,), (), (1,), (0,), (0,))


def gathered(lax: Any, x: Any, i: Any, numbers: Any, sizes: Any, **how: Any) -> Any:
    """lax.gather with plain tuples as dimension numbers."""
    return lax.gather(x, i, lax.GatherDimensionNumbers(*numbers), sizes, **how)


def scattered(name: str, numbers: Any, **how: Any) -> Any:
    """The scatter called `name` in lax, with plain tuples as dimension numbers."""

    def f(lax: Any, x: Any, i: Any, u: Any) -> Any:
        return getattr(lax, name)(x, i, u, lax.ScatterDimensionNumbers(*numbers), **how)

    return f


GATHER = [
    record(
        "gather",
        lambda lax, x, i: gathered(lax, x, i, ROWS, (1, 3), mode="clip"),
        some(4, 3),
        index(-2, 5, 2, 2, 1),
        dtypes=ANY,
        case="rows",
    ),
    record(
        "gather",
        lambda lax, x, i: gathered(lax, x, i, ROWS, (1, 3), mode="fill"),
        some(4, 3),
        index(0, 6, 5, 1),
        dtypes=INTEGER + dtypes.BOOL,
        case="filled rows",
    ),
    record(
        "gather",
        lambda lax, x, i: gathered(lax, x, i, PAIRS, (1, 2), mode="fill", fill_value=1),
        some(3, 5),
        index(-1, 5, 3, 4, 1),
        dtypes=ANY,
        case="batched pairs",
    ),
]


def scatter_records(
    name: str, accepted: Any, make: Callable[..., Operand] = some, **more: Any
) -> list[Record]:
    """Rows that may repeat and miss the operand, and pairs along a walking dim."""
    rows = (make(4, 3), index(-1, 5, 5, 1), make(5, 3))
    pairs = (make(3, 5), index(-1, 5, 3, 4, 1), make(3, 4, 2))
    clipped = scattered(name, PAIRS, mode="clip")
    return [
        record(name, scattered(name, ROWS), *rows, dtypes=accepted, case="rows", **more),
        record(name, clipped, *pairs, dtypes=accepted, case="batched pairs", **more),
    ]


SCATTER = [
    *scatter_records("scatter", ANY),
    # Sums of 16-bit floats are rounded once here, and after each addition in XLA.
    *scatter_records("scatter_add", NUMERIC, skip_oracle=(dtypes.bfloat16, np.dtype("f2"))),
    *scatter_records("scatter_mul", NUMERIC, differentiable=(0,), skip_oracle=(dtypes.bfloat16,)),
    record(
        "scatter_mul",
        scattered("scatter_mul", ROWS, unique_indices=True),
        some(4, 3),
        index(1, 1, 1, 1),
        some(1, 3),
        dtypes=NUMERIC,
        case="unique rows",
    ),
    *scatter_records("scatter_min", ORDERED, distinct),
    *scatter_records("scatter_max", ORDERED, distinct),
]

# ---- sorting -----------------------------------------------------------------------------------

SORT = [
    record("sort", lambda lax, x: lax.sort(x, 0), distinct(4, 3), dtypes=ANY),
    record(
        "sort",
        lambda lax, x, y: lax.sort((x, y), 1)[1],
        distinct(3, 4),
        some(3, 4),
        dtypes=ANY,
        case="payload",
    ),
    record(
        "sort",
        lambda lax, x, y: lax.sort((x, y), 1, num_keys=2)[1],
        between(0, 1, 3, 6, dtype=INT32),
        distinct(3, 6),
        dtypes=ANY,
        case="two keys",
    ),
    record("top_k", lambda lax, x: lax.top_k(x, 2)[0], distinct(3, 4), dtypes=ORDERED),
    record(
        "top_k",
        lambda lax, x: lax.top_k(x, 2, axis=0)[1],
        distinct(4, 3),
        dtypes=ORDERED,
        case="positions",
        order=0,
    ),
]

RECORDS = [*STATIC, *DYNAMIC, *GATHER, *SCATTER, *SORT]
