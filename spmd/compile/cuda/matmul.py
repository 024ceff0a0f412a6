"""Products of matrices: blocks of threads compute tiles of C, and run the epilogue on them.

A block of 16 × 16 threads owns a tile; each thread holds up to 8 × 8 of its sums in registers, 16
rows and columns apart, so that neighbours store neighbouring elements. In steps of 16 along the
depth the block brings a slab of A and one of B into shared memory, converted to the dtype of the
sums, reading each along its own memory. C is never in memory: the epilogue's load of it is a
register. Integers wrap. Those of 8 bits stay as they are: four neighbours along the depth are one
word of a slab, which is four times as deep, and `dp4a` multiplies two of them.

Where one side is too narrow for tiles (a matrix times a vector), the product is a row kernel: a
team of threads sums along the depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from spmd.base.record import record
from spmd.compile.cuda.body import LARGEST_INT, Body
from spmd.compile.cuda.launch import Launch
from spmd.compile.cuda.scalar_ops import convert
from spmd.compile.cuda.text import Text, digits, linear
from spmd.compile.kernel.builder import Builder
from spmd.compile.kernel.check import affine_range
from spmd.compile.kernel.dtypes import from_bits, itemsize, kind
from spmd.compile.kernel.ir import Const, Kernel, Load, Map, Op, Pass, Store
from spmd.compile.kernel.matmul import Operand, Product

SIDE = 16  # threads along either side of a tile, and the depth of a slab
THREADS = SIDE * SIDE
# Sums of a thread along either side, by their bytes; a tile is SIDE times as wide.
WIDEST = {4: 8, 8: 4}
# Prefer smaller tiles until the grid has this many blocks: a few for each multiprocessor.
ENOUGH_BLOCKS = 264
# Sides narrower than this are not worth a tile.
NARROW = 8
# Columns of slabs are this much longer than the tile: stores across them then touch all banks.
PADDING = 2


def is_narrow(product: Product) -> bool:
    """Say whether a product is better summed row by row than in tiles."""
    strides = (product.a.row, product.a.column, product.b.row, product.b.column)
    forward = min(*strides, *product.a.batch, *product.b.batch) >= 0
    return min(product.m, product.n) < NARROW and forward


# ---- a narrow product as a row kernel ---------------------------------------------------------


def as_rows(product: Product) -> Kernel:
    """Return the loop nest of a product: for each element of C a sum along the depth.

    Its arguments are the product's: A, B, and the epilogue's without the first.
    """
    p, epilogue = product, product.epilogue
    b = Builder((*p.batch, p.m, p.n), (p.k,))
    sizes = (*p.batch, p.m, p.n, p.k)
    maps = (
        (p.a, (*p.a.batch, p.a.row, 0, p.a.column)),
        (p.b, (*p.b.batch, 0, p.b.column, p.b.row)),
    )
    args = [
        b.arg(operand.dtype, 0 if 0 in sizes else affine_range(Map(strides), sizes)[1] + 1)
        for operand, strides in maps
    ]
    args += [b.arg(arg.dtype, arg.size, arg.role) for arg in epilogue.args[1:]]
    with b.row():
        loaded = [b.load(a, strides) for a, (_, strides) in zip(args, maps, strict=False)]
        left, right = (b.convert(value, p.carried) for value in loaded)
        total = b.reduce("add", b.op("mul", left, right))
    with b.point():
        replay(b, epilogue, total, args[1:], lambda where: where.strides)
    return b.build()


def replay(
    b: Builder,
    epilogue: Kernel,
    total: int,
    args: Sequence[int],
    strides: Callable[[Map], Sequence[int]],
) -> None:
    """Write an epilogue into a kernel: `total` is the element of C.

    `args` are the kernel's arguments for the epilogue's, and `strides` are those of a map of it
    along the kernel's dims.
    """
    values: dict[int, int] = {}
    for instr in epilogue.passes[0].instrs:
        match instr:
            case Load(arg=0):
                made = total
            case Load(arg=arg, map=where):
                made = b.load(args[arg], strides(where), where.offset)
            case Const(bits=bits, dtype=dtype):
                made = b.const(from_bits(bits, dtype), dtype)
            case Op(op=op, dtype=dtype, operands=operands, attr=attr):
                made = _operation(b, op, [values[value] for value in operands], dtype, attr)
            case _:
                raise AssertionError(f"no epilogue has {instr}")
        values[instr.out] = made
    for store in epilogue.passes[0].stores:
        assert isinstance(store, Store)
        where, value = store.map, values[store.value]
        b.store(args[store.arg], strides(where), value, where.offset, combine=store.combine)


def _operation(b: Builder, op: str, operands: Sequence[int], dtype: str, attr: int | None) -> int:
    if op == "convert":
        return b.convert(operands[0], dtype)
    if op == "bitcast":
        return b.bitcast(operands[0], dtype)
    return b.op(op, *operands, attr=attr)


# ---- tiles -------------------------------------------------------------------------------------


@record
class Tiling:
    """Sums of a thread along m and n, tiles of the grid, elements between columns of slabs."""

    rows: int
    columns: int
    grid: tuple[int, ...]

    @property
    def tall(self) -> int:
        """Rows of a tile."""
        return SIDE * self.rows

    @property
    def wide(self) -> int:
        """Columns of a tile."""
        return SIDE * self.columns


def plan_tiles(product: Product) -> Tiling:
    """Choose the largest tile with which the grid still has enough blocks."""
    p, widest = product, WIDEST[itemsize(product.carried)]
    sizes = [size for size in (8, 4, 2, 1) if size <= widest]
    shapes = [(s, s) for s in sizes]
    for rows, columns in shapes:
        tiles = (-(-p.m // (SIDE * rows)), -(-p.n // (SIDE * columns)))
        fits = SIDE * rows < 2 * p.m and SIDE * columns < 2 * p.n
        enough = math.prod((*p.batch, *tiles)) >= ENOUGH_BLOCKS
        # Below 2 x 2 sums a thread reads more from shared memory than it computes.
        if (fits and (enough or rows <= 2)) or rows == 1:
            return Tiling(rows, columns, (*p.batch, *tiles))
    raise AssertionError("the last shape fits everything")


def takes_bytes(product: Product) -> bool:
    """Say whether four factors are multiplied at once."""
    p = product
    return p.a.dtype == p.b.dtype and p.a.dtype in ("i8", "u8") and p.carried in ("i32", "u32")


class ProductText:
    """Writes the body of a tiled product."""

    # The element of C in the loops of the epilogue.
    element = "sums[i][j]"
    # Of the tables that addresses need, in shared memory behind the slabs.
    table_bytes = 0
    # The depth of a slab, and the elements in a word of it.
    deep = SIDE
    packed = 1

    def __init__(self, product: Product, text: Text, alignment: int = 1):
        self.product = product
        self.text = text
        self.alignment = alignment
        if takes_bytes(product):
            self.packed, self.deep = 4, 4 * SIDE
        self.tiling = self.plan()
        self.body = Body(product.epilogue, text)
        self.index = "int" if self.fits() and self.body.index == "int" else "i64"
        self.body.index = self.index

    def plan(self) -> Any:
        """How the product is cut into tiles."""
        return plan_tiles(self.product)

    def write(self) -> Launch:
        """Write everything; returns how to launch it."""
        p, t, text, carried = self.product, self.tiling, self.text, self.product.carried
        left = SIDE * (t.tall + PADDING) * itemsize(carried)
        shared = left + SIDE * (t.wide + PADDING) * itemsize(carried)
        text.add(f"// {t.tall} x {t.wide} of C a block, {t.rows} x {t.columns} sums a thread.")
        word = self._word
        text.add(f"{word} *left = ({word} *)shared, *right = left + {left // itemsize(carried)};")
        text.add(f"const int thread = threadIdx.y * {SIDE} + threadIdx.x;")
        text.add(f"const {self.index} tile = blockIdx.x;")
        *batch, row, column = digits("tile", t.grid)
        text.add(f"const {self.index} row = {row} * {t.tall}, column = {column} * {t.wide};")
        self.body.index_of(range(len(p.batch)), batch)
        text.add(f"{carried} sums[{t.rows}][{t.columns}] = {{}};")
        self.tables(f"shared + {shared}")
        with text.block(f"for ({self.index} first = 0; first < {p.k}; first += {self.deep})"):
            self._slab("left", p.a, "row", p.m, t.tall)
            self._slab("right", p.b.transposed, "column", p.n, t.wide)
            text.add("__syncthreads();")
            self.next_tables()
            self._multiply()
            text.add("__syncthreads();")
        self._epilogue()
        return Launch(math.prod(t.grid), (SIDE, SIDE), shared + self.table_bytes)

    def fits(self) -> bool:
        """Say whether the addresses of both operands fit in an int."""
        return _fits(self.product, self.deep)

    def tables(self, after: str) -> None:
        """Write the tables that addresses need; they begin at the address `after`."""

    def next_tables(self) -> None:
        """Write those of the next slabs, while this one is multiplied."""

    def _slab(self, name: str, operand: Operand, start: str, size: int, tile: int) -> None:
        """Bring SIDE columns of `tile` elements into shared memory; zeros where there are none."""
        p, text = self.product, self.text
        source = "a" if name == "left" else "b"
        along_rows = abs(operand.row) == 1
        fast, slow = (f"t % {tile}", f"t / {tile}"), (f"t / {SIDE}", f"t % {SIDE}")
        i, k = fast if along_rows else slow
        text.add("#pragma unroll")
        with text.block(f"for (int t = thread; t < {tile * SIDE}; t += {THREADS})"):
            inside = f"{start} + i < {size} && first + k < {p.k}"
            address = self.address(name, operand, start)
            if self.packed == 1:
                text.add(f"const int i = {i}, k = {k};")
                read = convert(f"load(&{source}[{address}])", operand.dtype, p.carried)
                text.add(f"{name}[k * {tile + PADDING} + i] = {inside} ? {read} : 0;")
                return
            text.add(f"const int i = {i}, place = {k}, k = {self.packed} * place;")
            steps = (operand.row, *operand.batch, p.k, self.alignment)
            if operand.column == 1 and all(n % self.packed == 0 for n in steps):
                read = f"{inside} ? *(const u32 *)&{source}[{address}] : 0"
            else:
                text.add("u32 bytes = 0;")
                text.add("#pragma unroll")
                byte = f"(u32)(u8){source}[{address} + q * {operand.column}] << 8 * q"
                text.add(
                    f"for (int q = 0; q < {self.packed}; q++) if ({inside} - q) bytes |= {byte};"
                )
                read = "bytes"
            text.add(f"{name}[place * {tile + PADDING} + i] = {read};")

    @property
    def _word(self) -> str:
        """The type of the elements of slabs."""
        return self.product.carried if self.packed == 1 else "u32"

    def address(self, name: str, operand: Operand, start: str) -> str:
        """The offset of the element (start + i, first + k) of an operand."""
        batch = [(self.body.dims[d], stride) for d, stride in enumerate(operand.batch)]
        terms = [(f"({start} + i)", operand.row), ("(first + k)", operand.column)]
        return linear(0, [*batch, *terms])

    def _multiply(self) -> None:
        t, text, carried = self.tiling, self.text, self.product.carried
        text.add("#pragma unroll")
        with text.block(f"for (int k = 0; k < {SIDE}; k++)"):
            text.add(f"{self._word} x[{t.rows}], y[{t.columns}];")
            for name, count, slab, tile, place in (
                ("x", t.rows, "left", t.tall, "threadIdx.y"),
                ("y", t.columns, "right", t.wide, "threadIdx.x"),
            ):
                text.add("#pragma unroll")
                text.add(
                    f"for (int i = 0; i < {count}; i++) "
                    f"{name}[i] = {slab}[k * {tile + PADDING} + {place} + {SIDE} * i];"
                )
            text.add("#pragma unroll")
            with text.block(f"for (int i = 0; i < {t.rows}; i++)"):
                text.add("#pragma unroll")
                total = "sums[i][j]"
                if self.packed > 1:
                    more = f"= dot_of_{self.product.a.dtype}(x[i], y[j], {total})"
                elif kind(carried) == "f":
                    more = "+= x[i] * y[j]"
                else:
                    more = f"= add({total}, mul(x[i], y[j]))"
                text.add(f"for (int j = 0; j < {t.columns}; j++) {total} {more};")

    def _epilogue(self) -> None:
        """Run the epilogue on the tile, with C's elements from the sums."""
        p, t, text, body = self.product, self.tiling, self.text, self.body
        count = len(p.batch)
        step = p.epilogue.passes[0]
        for instr in step.instrs:
            if isinstance(instr, Load) and instr.arg == 0:
                body.tiles[instr] = self.element
        text.add("#pragma unroll")
        with text.block(f"for (int i = 0; i < {t.rows}; i++)"):
            text.add("#pragma unroll")
            with text.block(f"for (int j = 0; j < {t.columns}; j++)"), body.scope():
                rows, columns = (
                    f"row + threadIdx.y + {SIDE} * i",
                    f"column + threadIdx.x + {SIDE} * j",
                )
                body.index_of((count, count + 1), (rows, columns))
                text.add(f"if (d{count} >= {p.m} || d{count + 1} >= {p.n}) continue;")
                self.results(step)

    def results(self, step: Pass) -> None:
        """Write the epilogue of one element of C."""
        self.body.instrs(step)
        self.body.stores(step)


def _fits(product: Product, deep: int) -> bool:
    """Say whether the addresses of both operands fit in an int."""
    p = product
    if 0 in (*p.batch, p.m, p.n, p.k):
        return True
    # A slab may compute addresses one tile past the end before it is told not to read there.
    sizes = (*p.batch, p.m + 128, p.k + deep), (*p.batch, p.k + deep, p.n + 128)
    ranges = [
        affine_range(Map((*operand.batch, operand.row, operand.column)), size)
        for operand, size in zip((p.a, p.b), sizes, strict=True)
    ]
    return all(-LARGEST_INT < low and high < LARGEST_INT for low, high in ranges)
