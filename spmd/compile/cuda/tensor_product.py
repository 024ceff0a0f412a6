"""Products of 16-bit floats and of TF32 on tensor cores: blocks compute tiles of C with `mma.sync`.

A block owns a tile of C, a warp a part of it, whose sums (f32) are in registers. Slabs of A and B,
64 bytes along the depth, go through shared memory by `cp.async`, up to three of them ahead of the
one that is multiplied: a step waits for its slab, meets at one barrier, begins the copy of the slab
that takes the place of the last one, and multiplies. `tensor.cuh` has the functions of a warp.

A slab lies as its operand does in global memory: `ldmatrix` transposes elements of 16 bits on the
way to the registers, and lanes read those of 32 bits one by one where that is needed. Elements of
32 bits are rounded to TF32 in registers. A copy is as wide as strides and addresses allow, 16 bytes
at best; an operand that allows not even 4 is copied element by element, in the same order of steps.
Elements outside of the operands are zero.

C is not in global memory. The sums of a block go through its shared memory, where the slabs were,
so that the epilogue's neighbouring threads have neighbouring elements: lanes hold their sums in
pieces of 8 bytes, and storing those would move each sector several times.
"""

from __future__ import annotations

import math

from spmd.base.record import record
from spmd.compile.cuda.launch import Launch
from spmd.compile.cuda.matmul import ProductText
from spmd.compile.cuda.text import Text
from spmd.compile.kernel.dtypes import itemsize
from spmd.compile.kernel.ir import Load, Store
from spmd.compile.kernel.matmul import Operand, Product

# The dtypes that tensor cores multiply, with sums in f32; f32 where it may be rounded to TF32.
DTYPES = ("bf16", "f16")
DEPTH_BYTES = 64  # of a slab
STAGES = 4  # slabs in shared memory
CHUNK = 16  # bytes that shared memory moves together
GAP = 32  # bytes behind the rows of a slab whose elements of f32 lanes read one by one
FRAGMENT_BYTES = 32  # of the depth that one `mma.sync` multiplies
WARP = 32
# Rows and columns of a tile of C, and its warps down and across.
SHAPES = ((128, 128, 2, 4), (64, 64, 2, 2), (32, 32, 2, 2))
# Prefer smaller tiles until the grid has this many blocks: one for each multiprocessor.
ENOUGH_BLOCKS = 132
# Blocks that run at the same time are of this many rows of tiles, so that they share slabs.
ROWS_TOGETHER = 8
# Elements between neighbouring rows (columns, where C lies by columns) of the sums in shared
# memory are so many more than there are: lanes then store to different banks.
PADDING, PADDING_BY_COLUMNS = 8, 4


def takes(product: Product) -> bool:
    """Say whether tensor cores compute a product."""
    p = product
    dtypes = (*DTYPES, "f32") if p.tf32 else DTYPES
    return p.carried == "f32" and p.a.dtype == p.b.dtype and p.a.dtype in dtypes


@record
class Tiling:
    """A tile of C, the warps of its block, tiles of the grid, and slabs in shared memory."""

    tall: int
    wide: int
    down: int
    across: int
    grid: tuple[int, ...]
    stages: int
    depth: int
    element: int  # bytes

    @property
    def threads(self) -> int:
        """The threads of a block."""
        return WARP * self.down * self.across

    @property
    def slab_bytes(self) -> int:
        """The bytes of a slab of A and one of B."""
        return self.bytes_of(self.tall) + self.bytes_of(self.wide)

    def bytes_of(self, tile: int) -> int:
        """The bytes of a slab of so many rows of A, or columns of B."""
        return DEPTH_BYTES * tile + (GAP * self.depth if self.element == 4 else 0)


def plan_tiles(product: Product) -> Tiling:
    """Choose the largest tile with which the grid still has enough blocks."""
    p, element = product, itemsize(product.a.dtype)
    depth = DEPTH_BYTES // element
    stages = min(STAGES, max(-(-p.k // depth), 2))
    for shape in SHAPES:
        tall, wide, _, _ = shape
        tiles = (-(-p.m // tall), -(-p.n // wide))
        enough = math.prod((*p.batch, *tiles)) >= ENOUGH_BLOCKS
        if (tall < 2 * p.m and wide < 2 * p.n and enough) or shape == SHAPES[-1]:
            return Tiling(*shape, (*p.batch, *tiles), stages, depth, element)
    raise AssertionError("the last shape fits everything")


@record
class Slab:
    """How an operand comes into shared memory: elements of a copy, and along what its rows lie."""

    name: str
    operand: Operand
    start: str
    size: int
    tile: int
    along_side: bool
    copied: int
    element: int

    @property
    def width(self) -> int:
        """Chunks of a row in shared memory."""
        return self.tile * self.element // CHUNK if self.along_side else DEPTH_BYTES // CHUNK

    @property
    def in_one_access(self) -> bool:
        """Whether `cp.async` copies: it takes no less than 4 bytes."""
        return self.copied * self.element >= 4


class TensorText(ProductText):
    """Writes the body of a product on tensor cores.

    `alignment` divides the addresses of A and B, in bytes.
    """

    tiling: Tiling

    def __init__(self, product: Product, text: Text, alignment: int = CHUNK):
        self.deep = DEPTH_BYTES // itemsize(product.a.dtype)
        super().__init__(product, text, alignment)

    def plan(self) -> Tiling:
        return plan_tiles(self.product)

    def write(self) -> Launch:
        p, t, text = self.product, self.tiling, self.text
        steps = -(-p.k // t.depth)
        side, other = t.tall // t.down, t.wide // t.across
        text.add(f"// {t.tall} x {t.wide} of C a block, {side} x {other} a warp on tensor cores.")
        text.add("const int thread = threadIdx.x, warp = thread / 32;")
        text.add(
            f"const int down = warp / {t.across} * {side}, across = warp % {t.across} * {other};"
        )
        self._place()
        needed = t.stages * t.slab_bytes if steps else 0
        self.tables(f"shared + {max(needed, self._bytes_of_sums)}")
        text.add(f"f32 sums[{side // 16}][{other // 8}][4] = {{}};")
        if steps:
            self._steps(steps)
        self._sums_to_shared(steps)
        self._epilogue()
        shared = max(needed, self._bytes_of_sums) + self.table_bytes
        return Launch(math.prod(t.grid), (t.threads, 1), shared)

    def _place(self) -> None:
        """Write which tile a block has."""
        p, t, text, index = self.product, self.tiling, self.text, self.index
        *batch, down, across = t.grid
        text.add(f"const {index} block = blockIdx.x, tile = block % {down * across};")
        text.add(f"const {index} above = tile / {ROWS_TOGETHER * across} * {ROWS_TOGETHER};")
        text.add(f"const {index} together = smaller(({index}){ROWS_TOGETHER}, {down} - above);")
        text.add(f"const {index} inside = tile - above * {across};")
        text.add(f"const {index} row = (above + inside % together) * {t.tall};")
        text.add(f"const {index} column = inside / together * {t.wide};")
        step, names = down * across, []
        for size in reversed(batch):
            names.append(f"block / {step} % {size}" if size > 1 else "0")
            step *= size
        self.body.index_of(range(len(p.batch)), names[::-1])

    # ---- slabs ----

    def slab(self, name: str, operand: Operand, start: str, size: int, tile: int) -> Slab:
        """How an operand comes into shared memory; its rows are those of A or the columns of B."""
        element = self.tiling.element
        along_side = abs(operand.row) == 1
        fast, slow = (operand.row, operand.column) if along_side else (operand.column, operand.row)
        copied = math.gcd(slow, *operand.batch, self.alignment // element, CHUNK // element)
        if fast != 1 or copied * element < 4:
            copied = 1
        return Slab(name, operand, start, size, tile, along_side, copied, element)

    def _steps(self, steps: int) -> None:
        """Write the loop over the depth; the steps before the first only begin copies."""
        p, t, text = self.product, self.tiling, self.text
        left = self.slab("a", p.a, "row", p.m, t.tall)
        right = self.slab("b", p.b.transposed, "column", p.n, t.wide)
        ahead, left_bytes = t.stages - 1, t.bytes_of(t.tall)
        # Elements that are copied one by one are there when the threads meet.
        waits = left.in_one_access or right.in_one_access
        text.add("const u32 slabs = shared_address(shared);")
        with text.block(f"for (int step = -{ahead}; step < {steps}; step++)"):
            with text.block("if (step >= 0)"):
                if waits:
                    text.add(f"wait_for_copies<{ahead - 1}>();")
                text.add("__syncthreads();")
            with text.block(f"if (step + {ahead} < {steps})"):
                text.add(f"const {self.index} first = ({self.index})(step + {ahead}) * {t.depth};")
                text.add(f"const int to = (step + {ahead}) % {t.stages} * {t.slab_bytes};")
                self._copy(left, "to")
                self._copy(right, f"to + {left_bytes}")
            if waits:
                text.add("commit_copies();")
            text.add("if (step < 0) continue;")
            text.add(f"const u32 slab = slabs + step % {t.stages} * {t.slab_bytes};")
            self._multiply_slabs(left, right, left_bytes)

    def _copy(self, slab: Slab, to: str) -> None:
        """Write the copy of a slab to its place in shared memory."""
        p, text, threads = self.product, self.text, self.tiling.threads
        depth, element = self.tiling.depth, self.tiling.element
        row = (slab.tile if slab.along_side else depth) // slab.copied
        fast = f"t % {row}" if slab.copied == 1 else f"t % {row} * {slab.copied}"
        i, k = (fast, f"t / {row}") if slab.along_side else (f"t / {row}", fast)
        units = slab.tile * depth // slab.copied
        whole = slab.size % slab.tile == 0, p.k % depth == 0
        text.add("#pragma unroll")
        with text.block(f"for (int t = thread; t < {units}; t += {threads})"):
            text.add(f"const int i = {i}, k = {k};")
            bounds = (f"{slab.start} + i < {slab.size}", f"first + k < {p.k}")
            needed = [text for text, full in zip(bounds, whole, strict=True) if not full]
            if needed:
                text.add(f"const bool inside = {' && '.join(needed)};")
            places = ("k", "i") if slab.along_side else ("i", "k")
            elements = CHUNK // element
            chunk = f"chunk_at<{slab.width}>({places[0]}, {places[1]} / {elements})"
            place = f"{CHUNK} * {chunk} + {element} * ({places[1]} % {elements})"
            if slab.along_side and element == 4:
                place = f"{slab.width * CHUNK + GAP} * k + 4 * i"
            elif slab.copied == elements:
                place = f"{CHUNK} * {chunk}"
            address = self.address(slab.name, slab.operand, slab.start)
            if not slab.in_one_access:
                read = f"{slab.name}[{address}].bits"
                value = f"inside ? {read} : (u16)0" if needed else read
                text.add(f"*(u16 *)(shared + {to} + {place}) = {value};")
                return
            nbytes = slab.copied * element
            size, at = (slab.size, f"{slab.start} + i") if slab.along_side else (p.k, "first + k")
            valid = str(nbytes)
            if size % slab.copied:
                # The compiler knows no difference that is too large for a copy.
                rest = f"smaller({size} - ({at}), ({self.index}){slab.copied})"
                valid = f"(int){rest} * {element}"
            if needed:
                valid = f"inside ? {valid} : 0"
            source = f"&{slab.name}[{address}]"
            text.add(f"copy_async<{nbytes}>(slabs + {to} + {place}, {source}, {valid});")

    def _multiply_slabs(self, left: Slab, right: Slab, left_bytes: int) -> None:
        """Write the product of the slabs in shared memory."""
        t, text = self.tiling, self.text
        rows, columns = t.tall // t.down // 16, t.wide // t.across // 16
        text.add("#pragma unroll")
        along = FRAGMENT_BYTES // t.element
        load = "load_fragment" if t.element == 2 else "load_tf32_fragment"
        with text.block(f"for (int k = 0; k < {t.depth}; k += {along})"):
            text.add(f"u32 x[{rows}][4], y[{columns}][4];")
            for name, count, slab, at, start, is_left in (
                ("x", rows, left, "slab", "down", "true"),
                ("y", columns, right, f"slab + {left_bytes}", "across", "false"),
            ):
                kind = f"{slab.width}, {str(slab.along_side).lower()}, {is_left}"
                text.add("#pragma unroll")
                text.add(
                    f"for (int i = 0; i < {count}; i++) "
                    f"{load}<{kind}>({name}[i], {at}, {start} + 16 * i, k);"
                )
            text.add("#pragma unroll")
            with text.block(f"for (int i = 0; i < {rows}; i++)"):
                text.add("#pragma unroll")
                with text.block(f"for (int j = 0; j < {2 * columns}; j++)"):
                    pair = "y[j / 2][j % 2 * 2], y[j / 2][j % 2 * 2 + 1]"
                    kind = f"{self.product.a.dtype}()"
                    text.add(f"multiply_tiles(sums[i][j], x[i], {pair}, {kind});")

    # ---- the epilogue ----

    @property
    def _by_columns(self) -> bool:
        """Whether the first result lies by columns."""
        store = self.product.epilogue.passes[0].stores[0]
        assert isinstance(store, Store)
        row, column = store.map.strides[-2:]
        return row == 1 and column != 1

    @property
    def _length(self) -> int:
        """Elements between rows of the sums in shared memory, or columns."""
        t = self.tiling
        return t.tall + PADDING_BY_COLUMNS if self._by_columns else t.wide + PADDING

    @property
    def _bytes_of_sums(self) -> int:
        t = self.tiling
        return 4 * self._length * (t.wide if self._by_columns else t.tall)

    def _sums_to_shared(self, steps: int) -> None:
        """Write the move of the sums to shared memory."""
        t, text = self.tiling, self.text
        # Behind the last barrier only the last slab is read.
        if steps and (steps - 1) % t.stages * t.slab_bytes < self._bytes_of_sums:
            text.add("__syncthreads();")
        text.add("f32 *c = (f32 *)shared;")
        if not self._by_columns:
            text.add("const u32 at = shared_address(c);")
        text.add("const int lane = thread % 32;")
        text.add("#pragma unroll")
        with text.block(f"for (int i = 0; i < {t.tall // t.down // 16}; i++)"):
            text.add("#pragma unroll")
            with text.block(f"for (int j = 0; j < {t.wide // t.across // 8}; j++)"):
                text.add("#pragma unroll")
                with text.block("for (int half = 0; half < 2; half++)"):
                    text.add("const int r = down + 16 * i + 8 * half + lane / 4;")
                    text.add("const int q = across + 8 * j + lane % 4 * 2;")
                    first, second = "sums[i][j][2 * half]", "sums[i][j][2 * half + 1]"
                    if self._by_columns:
                        text.add(f"c[q * {self._length} + r] = {first};")
                        text.add(f"c[(q + 1) * {self._length} + r] = {second};")
                    else:
                        place = f"at + 4 * (r * {self._length} + q)"
                        text.add(f"store_two({place}, {first}, {second});")
        text.add("__syncthreads();")

    def _epilogue(self) -> None:
        p, t, text, body = self.product, self.tiling, self.text, self.body
        count, step = len(p.batch), p.epilogue.passes[0]
        length, by_columns = self._length, self._by_columns
        self.element = f"c[j * {length} + i]" if by_columns else f"c[i * {length} + j]"
        for instr in step.instrs:
            if isinstance(instr, Load) and instr.arg == 0:
                body.tiles[instr] = self.element
        along = t.tall if by_columns else t.wide
        i, j = (f"t % {along}", f"t / {along}") if by_columns else (f"t / {along}", f"t % {along}")
        text.add("#pragma unroll 4")
        loop = f"for (int t = thread; t < {t.tall * t.wide}; t += {t.threads})"
        with text.block(loop), body.scope():
            text.add(f"const int i = {i}, j = {j};")
            body.index_of((count, count + 1), ("row + i", "column + j"))
            sizes = ((count, p.m, t.tall), (count + 1, p.n, t.wide))
            outside = [f"d{dim} >= {size}" for dim, size, tile in sizes if size % tile]
            if outside:
                text.add(f"if ({' || '.join(outside)}) continue;")
            self.results(step)
