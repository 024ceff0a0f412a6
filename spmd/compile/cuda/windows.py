"""Contractions over windows: tiles as of products, with tables of where rows and depths lie.

A block keeps the offset of each row of its tile of A, and those of each depth of a slab in both
operands, in shared memory: a division for each dim, once a row and once a depth. The offsets of the
next slab are written while this one is multiplied, so they need no barrier of their own. On tensor
cores the table is of the rows only.

Where one side is too narrow for tiles, each element of the result is a row kernel's sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from spmd.compile.cuda.body import LARGEST_INT
from spmd.compile.cuda.matmul import NARROW, SIDE, ProductText, replay
from spmd.compile.cuda.tensor_product import CHUNK, Slab, TensorText
from spmd.compile.cuda.text import Text, digits, linear
from spmd.compile.kernel.builder import Builder
from spmd.compile.kernel.check import affine_range
from spmd.compile.kernel.dtypes import itemsize
from spmd.compile.kernel.ir import Kernel, Map, Pass
from spmd.compile.kernel.matmul import Operand, Product, c_strides, store_epilogue
from spmd.compile.kernel.window_contraction import Contraction, Dims


def takes_result(given: Contraction) -> bool:
    """Whether the result itself is written; behind an epilogue, C is only in registers."""
    return given.epilogue is None


# ---- a narrow contraction as a row kernel ------------------------------------------------------


def is_narrow(given: Contraction) -> bool:
    """Say whether a contraction is better summed element by element than in tiles."""
    strides = (*given.rows.first, *given.rows.second, *given.depth.first, *given.depth.second)
    forward = min((*strides, *given.batch), default=0) >= 0
    return min(given.rows.count, given.columns) < NARROW and forward


def as_rows(given: Contraction) -> Kernel:
    """Return the loop nest of a contraction: for each element of the result a sum over the depth.

    Its arguments are A, B, and the result or, where there is one, the epilogue's without the first.
    """
    count, *steps = given.batch
    rows, depth = given.rows, given.depth
    outer = (count, *rows.sizes, given.columns)
    inner = depth.sizes or (1,)
    b = Builder(outer, inner)
    none = () if depth.sizes else (0,)
    places = [
        (steps[0], *rows.first, 0, *depth.first, *none),
        (steps[1], *(0 for _ in rows.sizes), 1, *depth.second, *none),
    ]
    sizes = (*outer, *inner)
    args = [
        b.arg(given.dtype, 0 if 0 in sizes else affine_range(Map(place), sizes)[1] + 1)
        for place in places
    ]
    epilogue = given.epilogue
    if epilogue is not None:
        args += [b.arg(arg.dtype, arg.size, arg.role) for arg in epilogue.args[1:]]
    out = (steps[2], *rows.second, 1)
    if epilogue is None:
        args.append(b.arg(given.dtype, affine_range(Map(out), outer)[1] + 1, "out"))
    with b.row():
        left, right = (b.load(arg, place) for arg, place in zip(args, places, strict=False))
        total = b.reduce("add", b.op("mul", left, right))
    with b.point():
        if epilogue is None:
            b.store(args[2], out, total)
        else:
            # A row number of the epilogue is the row-major index along the dims of the rows.
            along = c_strides(rows.sizes, 1, 1)[:-2]
            replay(
                b,
                epilogue,
                total,
                args[1:],
                lambda where: (0, *(where.strides[0] * s for s in along), where.strides[1]),
            )
    return b.build()


# ---- tiles -------------------------------------------------------------------------------------


def as_product(given: Contraction) -> Product:
    """The product that is tiled alike: its strides are only those along the innermost dims."""
    count, *steps = given.batch
    batch = (count,) if count > 1 else ()
    m, n, k, dtype = given.rows.count, given.columns, given.depth.count, given.dtype
    a, b = (
        Operand(dtype, row, column, tuple(step for _ in batch))
        for row, column, step in (
            (_last(given.rows.first), _last(given.depth.first), steps[0]),
            (_last(given.depth.second), 1, steps[1]),
        )
    )
    epilogue = given.epilogue
    if epilogue is None:
        epilogue = store_epilogue(batch, m, n, dtype, dtype, c_strides(batch, m, n))
    return Product(m, n, k, a, b, dtype, epilogue, batch, given.tf32)


def _last(strides: tuple[int, ...]) -> int:
    return strides[-1] if strides else 0


class _Windows(ProductText):
    """The common part of tiles of a contraction: the offsets of rows, and where results go."""

    given: Contraction

    def fits(self) -> bool:
        given = self.given
        count, *steps = given.batch
        reach = [
            sum((size - 1) * abs(stride) for size, stride in zip(dims.sizes, strides, strict=True))
            for dims in (given.rows, given.depth)
            for strides in (dims.first, dims.second)
        ]
        largest = sum(reach) + (count - 1) * max(map(abs, steps)) + given.columns
        # Index arithmetic may step one block past the end before it is compared.
        return largest < LARGEST_INT - 2**20

    def rows_table(self, after: str, threads: int) -> None:
        """Write the offset of each row of the tile of A, from the address `after` on."""
        text, tall, index = self.text, self.tiling.tall, self.index
        text.add(f"{index} *rows_at = ({index} *)({after});")
        with text.block(f"for (int t = thread; t < {tall}; t += {threads})"):
            text.add(f"const {index} r = row + t;")
            offset = _offset("r", self.given.rows, self.given.rows.first)
            text.add(f"rows_at[t] = r < {self.product.m} ? {offset} : 0;")

    def batches(self, operand: Operand) -> list[tuple[str, int]]:
        """The terms of an address that are those of its member of the batch."""
        return [(self.body.dims[d], stride) for d, stride in enumerate(operand.batch)]

    def results(self, step: Pass) -> None:
        if not takes_result(self.given):
            super().results(step)
            return
        *batch, row, column = (self.body.dims[d] for d in range(len(self.product.batch) + 2))
        members = [(name, self.given.batch[3]) for name in batch]
        rows = self.given.rows
        terms = zip(digits(row, rows.sizes), rows.second, strict=True)
        place = linear(0, [*members, *terms, (column, 1)])
        self.text.add(f"out[{place}] = {self.element};")


class WindowsText(_Windows):
    """Writes the body of a tiled contraction."""

    def __init__(self, given: Contraction, text: Text):
        self.given = given
        super().__init__(as_product(given), text)
        entries = self.tiling.tall + 2 * SIDE
        self.table_bytes = entries * _bytes_of(self.index)

    def tables(self, after: str) -> None:
        text, tall = self.text, self.tiling.tall
        self.rows_table(after, SIDE * SIDE)
        text.add(f"{self.index} *left_at = rows_at + {tall}, *right_at = left_at + {SIDE};")
        self._depths("thread")
        text.add("__syncthreads();")

    def next_tables(self) -> None:
        self._depths(f"first + {SIDE} + thread")

    def _depths(self, at: str) -> None:
        """Write where the depths of a slab lie, from that of the first thread on."""
        text, depth = self.text, self.given.depth
        with text.block(f"if (thread < {SIDE})"):
            text.add(f"const {self.index} q = {at};")
            for name, strides in (("left_at", depth.first), ("right_at", depth.second)):
                text.add(f"{name}[thread] = {_offset('q', depth, strides)};")

    def address(self, name: str, operand: Operand, start: str) -> str:
        if name == "left":
            return linear(0, [*self.batches(operand), ("rows_at[i]", 1), ("left_at[k]", 1)])
        return linear(0, [*self.batches(operand), ("right_at[k]", 1), (f"({start} + i)", 1)])


class TensorWindowsText(_Windows, TensorText):
    """Writes the body of a contraction on tensor cores.

    A thread copies few depths of a slab, whose offsets it computes.
    """

    def __init__(self, given: Contraction, text: Text, alignment: int):
        self.given = given
        super().__init__(as_product(given), text, alignment)
        self.table_bytes = self.tiling.tall * _bytes_of(self.index)

    def tables(self, after: str) -> None:
        self.rows_table(after, self.tiling.threads)
        self.text.add("__syncthreads();")

    def slab(self, name: str, operand: Operand, start: str, size: int, tile: int) -> Slab:
        depth, rows, steps = self.given.depth, self.given.rows, self.given.batch[1:3]
        kind = name, operand, start, size, tile
        most = math.gcd(self.alignment // 4, CHUNK // 4)
        if name == "b":  # whose columns are contiguous
            copied = math.gcd(most, *depth.second, steps[1])
            return Slab(*kind, True, copied, 4)
        along_side = _together(rows.sizes, rows.first, (*depth.first, steps[0]), most)
        along_depth = _together(depth.sizes, depth.first, (*rows.first, steps[0]), most)
        # Where no elements are copied together, neighbouring threads still read neighbours.
        by_side = (along_side, _last(rows.first) == 1) > (along_depth, _last(depth.first) == 1)
        return Slab(*kind, by_side, max(along_side, along_depth), 4)

    def address(self, name: str, operand: Operand, start: str) -> str:
        depth, batch = self.given.depth, self.batches(operand)
        at = digits("(first + k)", depth.sizes)
        strides = depth.first if name == "a" else depth.second
        place = ("rows_at[i]", 1) if name == "a" else (f"({start} + i)", 1)
        return linear(0, [*batch, place, *zip(at, strides, strict=True)])


def takes_tensor_cores(given: Contraction) -> bool:
    """Say whether tensor cores compute a contraction."""
    return given.tf32 and given.dtype == "f32"


def _together(
    sizes: Sequence[int], strides: Sequence[int], others: Sequence[int], most: int
) -> int:
    """So many elements along the last of some dims are neighbours, aligned wherever they begin."""
    if _last(tuple(strides)) != 1:
        return 1
    return math.gcd(most, sizes[-1], *strides[:-1], *others)


def _bytes_of(index: str) -> int:
    return 4 if index == "int" else itemsize("i64")


def _offset(position: str, dims: Dims, strides: tuple[int, ...]) -> str:
    """The offset of a point in one array, from its number in row-major order."""
    return linear(0, zip(digits(position, dims.sizes), strides, strict=True))
