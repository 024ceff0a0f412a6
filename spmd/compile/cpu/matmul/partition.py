"""How the work of a product is cut into units for threads, and when B is packed by itself.

The one idea: a unit's time is estimated from its products and its own packing, and
the cut is taken under which the last thread is done first. Threads take units in runs, as the
executor does. Only the extents of units come from here, so no bit of a result depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from spmd.base.record import record
from spmd.compile.kernel.matmul import Product
from spmd.compile.native.program.run_layout import COARSE_PS

# Columns of a unit that packs B for itself: its block stays in the L2 cache.
UNIT_COLUMNS = 512
# Rows of a unit whose block of C lies in scratch memory.
UNIT_ROWS = 384
# Below this many multiply-adds a product is one unit: sharing it would cost more than it brings.
SHARED_FROM = 2**17
# More units a thread than this balance nothing.
_MOST_UNITS = 8
# A job of some length is cut into so many runs of units a thread; the executor's may be shorter.
_PIECES = 4
# The part of a run of units by which threads end apart.
_WAITED = 0.25
# The cost of a unit before it computes, in nanoseconds.
_UNIT_NS = 200.0
# Estimates, per core: operations by bytes of a vector; bytes that are packed, or read on the way.
_FLOPS_PER_NS = {64: 150.0, 32: 75.0, 16: 25.0}
PACKED_BYTES_PER_NS = 14.0
_READ_BYTES_PER_NS = 30.0
# The numbers of parts of a product's rows and columns, in multiples of the fewest blocks.
_ROW_FACTORS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_COLUMN_FACTORS = (1, 2, 3, 4, 6, 8, 12, 16)


def flops_per_ns(vector_bytes: int, nbytes: int) -> float:
    """The operations of a core in a nanosecond, of numbers of so many bytes."""
    return _FLOPS_PER_NS[vector_bytes] * 4 / nbytes


@record
class Cut:
    """The facts that decide on the cut of a product into units."""

    p: Product
    mr: int
    nr: int
    nbytes: int
    vector_bytes: int
    cores: int
    direct: bool  # C is written where it is wanted
    packs_a: bool
    packs_b: bool
    whole_rows: bool = False  # a unit has all columns

    @property
    def batches(self) -> int:
        """Products of the batch."""
        return math.prod(self.p.batch)

    def best(self) -> tuple[int, int]:
        """Rows and columns of a unit."""
        # A product is asked about when it may be packed, and again when it is planned.
        found = _found.get(self)
        if found is None:
            found = _found[self] = self._best()
        return found

    def _best(self) -> tuple[int, int]:
        least = self._least()
        if self.cores == 1 or self.batches * self.p.multiply_adds < SHARED_FROM:
            return self._extents(*least)
        return min(self._candidates(*least), key=lambda extents: self.time(*extents))

    def _least(self) -> tuple[int, int]:
        """The fewest blocks of rows and columns that the caches like."""
        rows = self.p.m if self.direct else min(self.p.m, UNIT_ROWS)
        narrow = (self.packs_b or not self.direct) and not self.whole_rows
        columns = UNIT_COLUMNS if narrow else self.p.n
        return -(-self.p.m // max(rows, 1)) or 1, -(-self.p.n // max(columns, 1)) or 1

    def _extents(self, m_blocks: int, n_blocks: int) -> tuple[int, int]:
        return _extent(self.p.m, m_blocks, self.mr), _extent(self.p.n, n_blocks, self.nr)

    def _candidates(self, m_least: int, n_least: int) -> Iterator[tuple[int, int]]:
        """Extents from the largest on, until there are enough units for all threads."""
        most, m, n = _MOST_UNITS * self.cores, self.p.m, self.p.n
        heights = dict.fromkeys(_extent(m, m_least * k, self.mr) for k in _ROW_FACTORS)
        factors = (1,) if self.whole_rows else _COLUMN_FACTORS
        widths = dict.fromkeys(_extent(n, n_least * k, self.nr) for k in factors)
        batches, largest = self.batches, self._extents(m_least, n_least)
        for mb in heights:
            rows = -(-m // mb) * batches
            for nb in widths:
                if rows * -(-n // nb) <= most or (mb, nb) == largest:
                    yield mb, nb

    def time(self, mb: int, nb: int) -> float:
        """Nanoseconds until the last thread is done."""
        m_blocks, n_blocks = -(-self.p.m // mb) or 1, -(-self.p.n // nb) or 1
        batches = self.batches
        count = m_blocks * n_blocks * batches
        inside = self.unit_ns(mb, nb)
        pieces = self.cores if inside * count * 1000 < COARSE_PS else self.cores * _PIECES
        chunk = -(-count // pieces)
        if count <= _MOST_UNITS * self.cores:
            times = self._columns(mb, nb, m_blocks) * (n_blocks - 1)
            times += self._columns(mb, self.p.n - (n_blocks - 1) * nb, m_blocks)
            times *= batches
        else:
            times = [inside] * count
        busy = [0.0] * self.cores
        for first in range(0, count, chunk):
            at = min(range(self.cores), key=busy.__getitem__)
            busy[at] += sum(times[first : first + chunk])
        # Threads are not equally fast: the last run may have to be waited for.
        return max(busy) + _WAITED * inside * chunk * (self.cores > 1)

    def _columns(self, mb: int, width: int, m_blocks: int) -> list[float]:
        """The times of units above each other; of the last, the rows that are left."""
        whole, last = self.unit_ns(mb, width), self.p.m - (m_blocks - 1) * mb
        return [whole] * (m_blocks - 1) + [whole if last == mb else self.unit_ns(last, width)]

    def unit_ns(self, rows: int, columns: int) -> float:
        """The time of a unit of so many rows and columns."""
        p, nbytes = self.p, self.nbytes
        height = -(-rows // self.mr) * self.mr
        width = -(-columns // self.nr) * self.nr
        rate = flops_per_ns(self.vector_bytes, nbytes)
        packed = self.packs_a * rows + self.packs_b * columns
        # Operands come from far away, whether they are packed then or not.
        moved = packed / PACKED_BYTES_PER_NS + (rows + columns) / _READ_BYTES_PER_NS
        return 2 * height * width * p.k / rate + moved * p.k * nbytes + _UNIT_NS


def _extent(size: int, blocks: int, step: int) -> int:
    """The least multiple of a step of which so many cover a size."""
    return max(-(-size // (blocks * step)), 1) * step


# The cuts of this process.
_found: dict[Cut, tuple[int, int]] = {}

# ---- packing by itself -------------------------------------------------------------------------

# The least cost of a separate step: threads meet once more.
_STEP_NS = 4000.0


def packing_ns(nbytes: int, cores: int) -> float:
    """The time of a step that packs so many bytes."""
    return nbytes / PACKED_BYTES_PER_NS / cores + _STEP_NS
