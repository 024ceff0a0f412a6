"""The register tile of matrix products, as LLVM IR.

The one idea is the classic one (Goto): a tile of C lives in registers while the processor streams
one column of A and one row of B per step. A product needs one or two (for whole and last columns);
each is a text of its own that is compiled when some product first needs it, so the first product of
a machine does not wait for tiles of other shapes. How A lies is said by run-time numbers, so that
one tile serves all layouts and all the products of a program that are large enough for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from spmd.base.record import record
from spmd.compile.cpu.matmul.tile_asm import Shape
from spmd.compile.native.llvm.function_builder import Function, Value, Variable
from spmd.compile.native.llvm.vectors import (
    Vectors,
    lane_mask,
    load_vector,
    multiply_add,
    splat,
    store_vector,
)

# ---- vectors ---------------------------------------------------------------------------------


# ---- the register tile -----------------------------------------------------------------------

# a, bytes between its rows, bytes between its k; b, bytes between its k; k; c, bytes between its
# rows; rows; columns; whether to add to c.
TILE_PARAMS = ["ptr", "i64", "i64", "ptr", "i64", "i64", "ptr", "i64", "i64", "i64", "i64"]


@record
class Tile:
    """C[rows, columns] (+)= A[rows, k] B[k, columns] for up to `rows` rows and `width` vectors.

    A `masked` tile takes fewer columns: its last vector is cut. Where there are fewer rows the last
    is computed again in place of those that are missing, so one text serves a whole product. Each
    iteration of its loop takes `steps` elements along k, which must be a multiple of that. An
    `assembled` one is written as assembly.
    """

    vectors: Vectors
    rows: int
    width: int
    masked: bool
    steps: int = 1
    assembled: bool = False

    @property
    def symbol(self) -> str:
        """The name of the function."""
        kind = "masked" if self.masked else "whole"
        name = f"tile_{self.vectors.symbol}_{self.rows}x{self.width}_{kind}"
        return name if self.steps == 1 else f"{name}_by{self.steps}"

    def text(self) -> str:
        """The module."""
        return _tile_text(self)

    def written(self) -> str:
        """The module, written anew."""
        if self.assembled:
            v, given = self.vectors, (self.rows, self.width, self.masked, self.steps)
            return Shape(self.symbol, v.nbytes, v.nbytes_of_vector, *given).text()
        prefetch = "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)"
        return f"{self.vectors.declarations()}\n{prefetch}\n{self._function().text()}"

    def _function(self) -> Function:
        v = self.vectors
        f = Function(self.symbol, "void", TILE_PARAMS, attributes=v.attributes)
        *_, c, c_row, rows, columns, accumulate = f.params
        masks: list[Value | None] = [None] * self.width
        if self.masked:
            masks[-1] = lane_mask(f, v.lanes, columns - (self.width - 1) * v.lanes)
        totals = [[f.var(v.vector, 0) for _ in masks] for _ in range(self.rows)]
        places = [
            (f.at(line, i * v.nbytes_of_vector), mask, total)
            for line, sums in zip(self._lines(f, c, c_row, rows), totals, strict=True)
            for i, (mask, total) in enumerate(zip(masks, sums, strict=True))
        ]
        # C is on its way while the sums are made: at the end all of it is wanted at once.
        for place, _, _ in places:
            write, keep, data = (f.value("i32", flag) for flag in (1, 3, 1))
            f.call("llvm.prefetch.p0", "void", place, write, keep, data)
        self._sum(f, masks, totals)
        store_tile(f, v, places, accumulate)
        return f

    def _lines(self, f: Function, first: Value, stride: Value, rows: Value) -> list[Value]:
        """The addresses of the tile's rows; the last one again for those that are missing."""
        lines = [first]
        for row in range(1, self.rows):
            lines.append(f.select(rows > row, f.at(lines[-1], stride), lines[-1]))
        return lines

    def _sum(
        self, f: Function, masks: Sequence[Value | None], totals: list[list[Variable]]
    ) -> None:
        """The loop along k."""
        v = self.vectors
        a, a_row, a_k, b, b_k, k, _, _, rows, *_ = f.params
        lines = self._lines(f, a, a_row, rows)
        along, b_now, left = f.var("i64", 0), f.var("ptr", b), f.var("i64", k)

        def step(place: Value, b_line: Value) -> None:
            b_row = [
                load_vector(f, v, f.at(b_line, i * v.nbytes_of_vector), mask)
                for i, mask in enumerate(masks)
            ]
            for line, sums in zip(lines, totals, strict=True):
                spread = splat(f, f.load(v.element, line, place), v.lanes)
                for b_part, total in zip(b_row, sums, strict=True):
                    multiply_add(f, spread, b_part, total)

        with f.loop():
            f.break_if(left.get().equals(0))
            # One register that moves along all rows of A; LLVM would have one for each of them.
            place = f.opaque(along.get())
            for number in range(self.steps):
                step(place, f.at(b_now.get(), b_k * number if number else 0))
                place = place + a_k
            along.set(place)
            b_now.set(f.at(b_now.get(), b_k * self.steps))
            left.set(left.get() - self.steps)


@cache
def _tile_text(tile: Tile) -> str:
    """The products of a program share a few tiles: each is written once."""
    return tile.written()


def store_tile(
    f: Function,
    v: Vectors,
    places: Sequence[tuple[Value, Value | None, Variable]],
    accumulate: Value,
) -> None:
    """Write the (address, mask, sums) of a tile, added to C if `accumulate` is set.

    All are read before any is written, so that several rows may have the same place.
    """
    with f.if_(accumulate.differs(0)):
        for place, mask, total in places:
            total.set(total.get() + load_vector(f, v, place, mask))
    for place, mask, total in places:
        store_vector(f, v, total.get(), place, mask)
