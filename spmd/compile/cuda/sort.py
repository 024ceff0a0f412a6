"""Stable sorts of rows: launches of the two functions of `sort.cuh`.

A block sorts a tile of keys in shared memory; short rows share a block. Rows of more than a tile
are sorted tile by tile, then sorted runs are merged, twice as long with each launch. Where only the
least few words are wanted, each tile gives its own, and they are sorted in the same way.
"""

from __future__ import annotations

from spmd.compile.cuda.body import LARGEST_INT
from spmd.compile.cuda.kernel import as_function
from spmd.compile.cuda.launch import Function, Launch, Rendered
from spmd.compile.cuda.text import Text
from spmd.compile.kernel.dtypes import itemsize
from spmd.compile.lower.steps import Sort, SortRows

# Keys of a tile: the most that a block sorts, and what it merges.
TILE = 1024
THREADS = 256


def render_sort(step: Sort | SortRows) -> Rendered:
    """Render a sort as functions to launch in order; its arguments are the step's refs.

    Scratch arrays are numbered behind them.
    """
    if not step.rows * step.size:
        return Rendered(())
    if isinstance(step, SortRows):
        sorts = _Sorts(step.dtype, "Numbers", step.rows, first_scratch=len(step.refs))
        return sorts.whole(step.size, source=0, target=1)
    if step.kept is None:
        sorts = _Sorts("u64", "UpperHalves", step.rows, first_scratch=len(step.refs))
        return sorts.whole(step.size, source=0, target=0)
    sorts = _Sorts("u64", "WholeWords", step.rows, first_scratch=len(step.refs))
    return sorts.least(step.size, step.kept)


class _Sorts:
    """The launches of one sort; arrays go by number."""

    def __init__(self, dtype: str, order: str, rows: int, first_scratch: int):
        self.dtype = dtype
        self.order = order
        self.rows = rows
        self.first_scratch = first_scratch
        self.functions: list[Function] = []

    def whole(self, size: int, source: int, target: int) -> Rendered:
        """Sort all of each row."""
        runs = [TILE << k for k in range(_doublings(size))]
        arrays = (target, self.first_scratch)
        # Each merging goes from one array to the other; the last one writes the target.
        at = len(runs) % 2
        self._tiles(size, source, arrays[at])
        for run in runs:
            self._merge(size, run, arrays[at], arrays[1 - at])
            at = 1 - at
        scratch = ((self.dtype, self.rows * size),) if runs else ()
        return Rendered(tuple(self.functions), scratch)

    def least(self, size: int, kept: int) -> Rendered:
        """Put the least words of each row at its begin."""
        scratch: list[tuple[str, int]] = []
        source, pitch = 0, size
        while size > TILE:
            tiles = -(-size // TILE)
            last = size - (tiles - 1) * TILE
            left = (tiles - 1) * kept + min(kept, last)
            target = self.first_scratch + len(scratch)
            scratch.append((self.dtype, self.rows * left))
            self._tiles(size, source, target, kept, left)
            source, size = target, left
        self._tiles(size, source, 0, kept, pitch)
        return Rendered(tuple(self.functions), tuple(scratch))

    def _tiles(
        self, size: int, source: int, target: int, kept: int = TILE, pitch: int | None = None
    ) -> None:
        """Sort tiles of rows of `size` keys; the first `kept` go to rows of `pitch`."""
        width = min(TILE, _power_of_two(size))
        slots = min(TILE, width * _power_of_two(self.rows))
        pitch = size if pitch is None else pitch
        tiles = self.rows * -(-size // width)
        index = self._index(max(self.rows * size, self.rows * pitch) + slots)
        kept = min(kept, width)
        self._call(
            f"sort tiles of {width} of {self.rows} x {size}, of which {kept} are kept",
            f"sort_tiles<{self.order}, {width}, {slots}, {self.dtype}, {index}>"
            f"(source, target, {self.rows}, {size}, {kept}, {pitch}, ({self.dtype} *)shared);",
            Launch(
                -(-tiles * width // slots),
                (min(THREADS, max(slots, 32)), 1),
                2 * slots * itemsize(self.dtype),
            ),
            (source, target),
        )

    def _merge(self, size: int, run: int, source: int, target: int) -> None:
        index = self._index(self.rows * size + 2 * run)
        self._call(
            f"merge runs of {run} of {self.rows} x {size}",
            f"merge_runs<{self.order}, {TILE}, {self.dtype}, {index}>"
            f"(source, target, {size}, {run}, ({self.dtype} *)shared);",
            Launch(
                self.rows * -(-size // TILE),
                (THREADS, 1),
                2 * TILE * itemsize(self.dtype) + 2 * itemsize("i64"),
            ),
            (source, target),
        )

    def _index(self, most: int) -> str:
        return "int" if most <= LARGEST_INT else "i64"

    def _call(self, comment: str, call: str, launch: Launch, arrays: tuple[int, int]) -> None:
        """Add a function that is one call; the two arrays, its source and target, may be one."""
        text = Text()
        text.depth = 1
        text.add(call)
        parameters = [f"const {self.dtype} *source", f"{self.dtype} *target"]
        self.functions.append(as_function(comment, parameters, text, launch, arrays, True))


def _doublings(size: int) -> int:
    """How often runs of a tile are merged until one is the row."""
    return (-(-size // TILE) - 1).bit_length()


def _power_of_two(size: int) -> int:
    """The least power of two that is no smaller."""
    return 1 << (size - 1).bit_length()
