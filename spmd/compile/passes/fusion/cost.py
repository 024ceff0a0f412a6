"""The cost model of fusion: the savings and the costs of a fused kernel.

The unit is one cheap operation (an add) on one element in vector registers, about 0.01 ns.

**Bytes moved.** A value that is not fused is written by one kernel and read by another. For an
element of four bytes that round trip takes as long as `ROUND_TRIP` operations while it stays in the
caches, several times that from memory. Fusing a value into its only reader saves it and costs
nothing, so it is always done; all rules below are about the other cases.

**Recomputation.** A stencil reads one value at several places, and the reader of a pad or a
concatenation computes both sides of each edge and selects. Fused, the value is computed more often
than it has elements. That pays if the additional operations, an `EXPENSIVE` one counted as
`EXPENSIVE_COST`, take no longer than the round trip: an exp is never computed twice to save one,
an add may be up to nine times, and around a narrow border anything is.

**The cache.** Rows that one kernel sweeps several times must still be there the second time. Along
memory a row may have `MAX_ROW` elements. Where the lanes of a vector run across the rows (a softmax
over columns), a row is as wide as the lanes, so that it may be only `MAX_COLUMN` long.

**Parallelism.** Threads share the points outside of the rows. A kernel over columns needs
`LEAST_COLUMNS` of them to make more than a few blocks of lanes, unless it is small anyway. A long
sum with few results is cut in parts instead (`kernel.split_reduction`), and such a kernel does
nothing else.
"""

from __future__ import annotations

from spmd.compile.expressions.expression import EXPENSIVE_COST
from spmd.compile.expressions.scalar_ops import EXPENSIVE
from spmd.compile.kernel.split_reduction import CHUNK_ELEMENTS, ENOUGH_POINTS

ROUND_TRIP = 8
MAX_ROW = 1 << 16
MAX_COLUMN = 2048
LEAST_COLUMNS, SMALL_SPACE = 256, 1 << 15


def repeating_pays(name: str, elements: int, evaluations: int) -> bool:
    """Whether computing a value of `elements` so often costs less than a round trip to memory.

    >>> repeating_pays("mul", 1000, 4000), repeating_pays("exp", 1000, 2000)
    (True, False)
    >>> repeating_pays("exp", 1000, 1100)
    True
    """
    cost = EXPENSIVE_COST if name in EXPENSIVE else 1
    return (evaluations - elements) * cost <= ROUND_TRIP * elements


def rows_fit(points: int, row: int, along_memory: bool) -> bool:
    """Whether rows of `row` elements may be swept more than once, for each of `points`."""
    if along_memory:
        return row <= MAX_ROW
    return row <= MAX_COLUMN and (points >= LEAST_COLUMNS or points * row <= SMALL_SPACE)


def is_one_sum(points: int, row: int) -> bool:
    """Whether work can be shared only by cutting long rows in parts, in a kernel of its own."""
    return points < ENOUGH_POINTS and row >= 2 * CHUNK_ELEMENTS
