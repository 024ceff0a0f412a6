"""Traffic of a launch: sectors of global memory, wavefronts of shared memory, line by line.

The accesses of a warp's lanes at the same instruction, in its same round, are one request. Global
memory moves in sectors of 32 bytes: the least is the bytes that differ, in whole sectors. A GPU
whose L2 cache holds what a launch touches moves each sector of memory once: `touched`. Shared
memory has 32 banks of 4 bytes, and serves words of different banks in one wavefront: the least is
what its bytes take at 128 a wavefront. Accesses of 16 bytes are served eight lanes at a time, as
requests of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from spmd.base.record import record
from spmd.compile.cuda.emulator.code import Kernel, described

SECTOR, BANK, BANKS = 32, 4, 32
_WARP_SHIFT = 5
# Accesses of so many bytes are served in parts of the warp.
_WIDE = 16


@record
class Line:
    """The requests of one access in a kernel: `moved` sectors or wavefronts, and the least."""

    place: str
    space: str
    writes: bool
    nbytes: int
    requests: int
    moved: int
    least: int


@record
class Traffic:
    """The traffic of a launch; `counted` of its `accesses` are in the lines.

    `touched` are the different sectors of global memory.
    """

    kernel: str
    lines: tuple[Line, ...]
    counted: int
    accesses: int
    touched: int = 0

    @classmethod
    def of(cls, kernel: Kernel, records: np.ndarray, accesses: int) -> Traffic:
        """Count a trace: rows of (number of the access, address, thread, block)."""
        lines, touched = tuple(_lines(kernel, records)), _touched(kernel, records)
        return cls(kernel.symbol, lines, len(records), accesses, touched)

    def total(self, space: str) -> tuple[int, int]:
        """The units that moved in a space, and the least."""
        lines = [line for line in self.lines if line.space == space]
        return sum(line.moved for line in lines), sum(line.least for line in lines)

    def __str__(self) -> str:
        rows = [
            f"{line.space:6} {'write' if line.writes else 'read':5} {line.nbytes:2} bytes "
            f"{line.requests:7} requests {line.moved:8} moved {line.least:8} least  {line.place}"
            for line in self.lines
        ]
        return "\n".join([self.kernel, *rows])


def _lines(kernel: Kernel, records: np.ndarray) -> Iterator[Line]:
    for number, (space, writes, nbytes, place) in enumerate(kernel.accesses):
        rows = records[records[:, 0] == number]
        if not len(rows):
            continue
        requests, address = _requests(rows), rows[:, 1]
        if space == "global":
            moved = _distinct(requests, address, nbytes, SECTOR)
            least = _least(requests, address, nbytes, SECTOR)
        else:
            if nbytes >= _WIDE:
                served = _paired(requests, (rows[:, 2] & 31) * nbytes // (BANK * BANKS))
                requests = np.unique(served, return_inverse=True)[1].reshape(-1)
            moved = _wavefronts(requests, address, nbytes)
            least = _least(requests, address, nbytes, BANK * BANKS)
        text = described(kernel, place)
        yield Line(text, space, writes, nbytes, int(requests.max()) + 1, moved, least)


def _touched(kernel: Kernel, records: np.ndarray) -> int:
    """The different sectors of global memory; no access reaches into two."""
    spaces = np.array([access[0] == "global" for access in kernel.accesses], bool)
    return len(np.unique(records[spaces[records[:, 0]], 1] // SECTOR))


def _requests(rows: np.ndarray) -> np.ndarray:
    """For each access the number of its request: of its block, its warp, and its round."""
    thread, block = rows[:, 2], rows[:, 3]
    owner = block << 10 | thread
    order = np.argsort(owner, kind="stable")
    ordered = owner[order]
    begins = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    rounds = np.empty(len(rows), np.int64)
    lengths = np.diff(np.r_[begins, len(rows)])
    rounds[order] = np.arange(len(rows)) - np.repeat(begins, lengths)
    warp = block << 5 | thread >> _WARP_SHIFT
    return np.unique(_paired(warp, rounds), return_inverse=True)[1].reshape(-1)


def _paired(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """One number for each pair; they are ordered as the pairs are."""
    return x * (int(y.max()) + 1) + y


def _units(
    requests: np.ndarray, address: np.ndarray, nbytes: int, unit: int
) -> tuple[np.ndarray, np.ndarray]:
    """All different (request, unit of memory) pairs."""
    count = max(-(-nbytes // unit), 1)
    first = address // unit
    each = np.concatenate([first + k for k in range(count)])
    lowest = int(each.min()) // BANKS * BANKS
    pairs = np.unique(_paired(np.tile(requests, count), each - lowest))
    span = int(each.max()) - lowest + 1
    return pairs // span, pairs % span


def _distinct(requests: np.ndarray, address: np.ndarray, nbytes: int, unit: int) -> int:
    return len(_units(requests, address, nbytes, unit)[0])


def _least(requests: np.ndarray, address: np.ndarray, nbytes: int, unit: int) -> int:
    """For each request the bytes that differ, in whole units."""
    owner, _ = _units(requests, address, nbytes, nbytes)
    return int((-(-np.bincount(owner) * nbytes // unit)).sum())


def _wavefronts(requests: np.ndarray, address: np.ndarray, nbytes: int) -> int:
    """For each request the most words of one bank."""
    owner, word = _units(requests, address, nbytes, BANK)
    pairs, counts = np.unique(owner * BANKS + word % BANKS, return_counts=True)
    most = np.zeros(int(requests.max()) + 1, np.int64)
    np.maximum.at(most, pairs // BANKS, counts)
    return int(most.sum())
