"""Choice of a schedule's parallel loops that run on several threads, and of their lanes.

The outermost loop that has enough iterations for all threads is chosen; those inside of it run in
order. A loop with fewer iterations runs in order too, and the steps inside it share their own work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from spmd.base.record import field, record
from spmd.compile.lower.steps import TEMP, Parallel, Step, accesses_inside, blocks, walk

ALIGNMENT = 64
# The most memory of a loop's lanes in all; with more it runs in order.
MOST_BYTES = 1 << 28


@record
class Lanes:
    """The chosen loops, by number; and for these and all parallel loops in them the chosen one.

    A buffer of a loop in `roots` needs a place for each of the `count` lanes.
    """

    count: int = 1
    chosen: frozenset[int] = frozenset()
    roots: Mapping[int | None, int] = field(default_factory=dict)


def rounded(nbytes: int) -> int:
    """A size as a multiple of the alignment of all places."""
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT


def choose_lanes(steps: Sequence[Step], threads: int) -> Lanes:
    """Choose the loops that run on several threads."""
    roots: dict[int | None, int] = {}
    if threads > 1:
        for loop in _outermost(steps, threads):
            for inner in walk((loop,)):
                if isinstance(inner, Parallel):
                    roots[inner.number] = loop.number
    return Lanes(threads if roots else 1, frozenset(roots.values()), roots)


def _outermost(steps: Sequence[Step], threads: int) -> Iterator[Parallel[Step]]:
    """The loops to choose among some steps and the steps nested in them."""
    for step in steps:
        if isinstance(step, Parallel) and math.prod(step.trips) >= threads and _fits(step, threads):
            yield step
            continue
        for block in blocks(step):
            yield from _outermost(block, threads)


def _fits(loop: Parallel[Step], threads: int) -> bool:
    kept = dict.fromkeys(ref.buffer for ref, _ in accesses_inside(loop.body))
    owned = [b for b in kept if b.kind == TEMP and b.owner is not None]
    return threads * sum(rounded(b.nbytes) for b in owned) <= MOST_BYTES
