"""Matrix products as kernel steps: orientation, packing, blocking, and which code is needed.

The one idea: a `Product` of the kernel IR says by sizes and strides what is multiplied, so
transposes, broadcast batches and slices cost nothing; here it becomes one `KernelStep`. The kernel
itself is in `loops_ir`; here are only the decisions, all of them taken from sizes and
strides, and only the block sizes from the number of threads, so that no bit depends on it.

    plan = plan_product(product)                    # decisions, and the texts to compile
    addresses = compile_texts(plan.texts, optimize=True) | compile_texts(plan.epilogues)
    step = product_step(plan, addresses, slots)     # slots: A, B, the epilogue's arguments
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache

from spmd.base.record import field, record, replace
from spmd.compile.cpu.codegen.kernel import Rendered, render
from spmd.compile.cpu.matmul.functions_ir import (
    ALL_PANELS,
    AS_ROWS,
    BY_PANELS,
    FINISH,
    LAY_A,
    LAY_B,
    SIZES,
    finish_text,
    lay_a_text,
    lay_b_text,
    tiles_symbol,
    tiles_text,
)
from spmd.compile.cpu.matmul.loops_ir import (
    combine_symbol,
    combine_text,
    dots_symbol,
    dots_text,
    product_symbol,
    product_text,
)
from spmd.compile.cpu.matmul.packing_ir import (
    PANEL_SIZES,
    pack_symbol,
    pack_text,
    panels_symbol,
    panels_text,
)
from spmd.compile.cpu.matmul.partition import (
    PACKED_BYTES_PER_NS,
    SHARED_FROM,
    Cut,
    flops_per_ns,
    packing_ns,
)
from spmd.compile.cpu.matmul.tile_asm import can_assemble
from spmd.compile.cpu.matmul.tile_ir import Tile
from spmd.compile.kernel.dtypes import itemsize
from spmd.compile.kernel.ir import Map, Store
from spmd.compile.kernel.matmul import Operand, Product, argument_maps, block_epilogue, plain_store
from spmd.compile.kernel.packing import Packing
from spmd.compile.native.llvm.compiler import Host, available_cores, host
from spmd.compile.native.llvm.vector_emitter import Target
from spmd.compile.native.llvm.vectors import NBYTES, Vectors, vectors
from spmd.compile.native.program.steps import KernelStep, Slot

MOST_BATCH_DIMS = 3

# Bytes of a column in a panel of B. Panels four vectors wide of half this depth stay in the L1
# cache beside rows of A; deeper ones come from the L2 as fast, and sums go to C less often.
_DEPTH_BYTES = 1024
# Few rows of A read B where it lies, once, and wait for nothing else if it lies in no near cache.
# Of that many rows of B at a time, whole ones as far as threads leave them whole, processors fetch
# the next ones; of more, of which a tile reads a few columns each, they do not (8 x 2048 x 2048:
# 1.0 ms, 2.8 in blocks of 256). Twice as many where several tiles read them.
_STREAMED_ROWS = 32
# So many rows of A are few: more gain little, and balance threads less well.
_MOST_STREAMING = 32
# C is added to all the time, and stays in a cache.
_STREAMED_C = 2**18
# The bytes that stay in the L2 cache.
_NEAR_BYTES = 2**20
# A product as shallow as this, in bytes of a row of A, mostly writes C: in whole rows, a few tiles
# of them at a time, which suits the memory (1024 x 16 x 1024 on a core: 315 us, 365 in columns).
_SHALLOW = 256
_SHALLOW_TILES = 2
_LONG_ROW = 2048
# Rows of A per block, about: with the depth above a block fills a tenth of the L2 cache.
_BLOCK_ROWS = 192
# A is packed if more columns than this are multiplied with it, B if more rows are.
_PACK_FROM = 96
# From this many multiply-adds on an iteration of a tile takes two elements along k, where their
# number is even: some percent faster, and a fifth more to compile. Few products are shorter, so
# that most of a program's share one tile.
LONG_PRODUCT = 2**17
# Below this many a product of a batch takes no longer than the loops around its tiles.
TINY_PRODUCT = 2**13
# Rows of A are streams that need no packing, unless they spread over more memory than this: then
# they meet each other in the same places of the L2 cache, and their pages are too many.
_SPREAD = 2**20
# Elements of a column of A, if it lies transposed, are such streams too where its rows in memory
# are no further apart (measured: a gain of 5 to 20 % up to 3136 bytes, none from 4000).
_NEAR = 3500
# A B that spreads over no more than this stays in the L1 cache as it lies, its rows in different
# places of it (32 products of 128 x 64 x 128 on a core: 644 us, 675 packed).
_COMPACT = 2**15
# An estimate for the decision to use threads, per core.
_BYTES_PER_NS = 12.0
# From here on a matrix is not in the caches when it comes again, but the data read last is: as
# every second call goes through the units backwards, small ones find more of it.
_BEYOND_CACHES_NS = 300_000
# The bytes that a vector's store may write behind the end of a panel.
_SLACK = 64


@record
class Plan:
    """A product ready to be compiled: the kernel, its run-time numbers and their targets."""

    symbol: str
    sizes: dict[str, int]
    # Names of SIZES whose value is the address of a symbol.
    functions: dict[str, str]
    strides: tuple[int, ...]  # of the epilogue's arguments, see SIZES
    texts: tuple[str, ...]
    epilogues: tuple[Rendered, ...]
    swapped: bool  # whether A and B changed places
    offsets: tuple[int, ...]  # bytes to add to the slots of the epilogue's arguments
    units: int
    cost_ns: float
    scratch: int


def product_step(
    plan: Plan,
    addresses: Mapping[str, int],
    slots: Sequence[Slot],
    name: str = "dot",
    words: tuple[int, ...] | None = None,
) -> KernelStep:
    """The step of a planned product whose texts are compiled; `words` are its `product_words`."""
    a, b, *rest = slots
    if plan.swapped:
        a, b = b, a
    moved = [
        Slot(slot.base, slot.offset + offset, slot.strides) if offset else slot
        for slot, offset in zip(rest, plan.offsets, strict=True)
    ]
    return KernelStep(
        addresses[plan.symbol],
        (a, b, *moved),
        plan.units,
        plan.cost_ns,
        sizes=product_words(plan, addresses) if words is None else words,
        scratch=plan.scratch,
        name=name,
    )


def product_words(plan: Plan, addresses: Mapping[str, int]) -> tuple[int, ...]:
    """The numbers that the kernel of a planned product is given, functions among them."""
    sizes = plan.sizes | {key: addresses[symbol] for key, symbol in plan.functions.items()}
    return (*[sizes[key] for key in SIZES], *plan.strides)


def plan_product(product: Product) -> Plan:
    """Decide how a product is computed."""
    if len(product.batch) > MOST_BATCH_DIMS:
        raise ValueError(f"a product takes up to {MOST_BATCH_DIMS} batch dims: {product.batch}")
    oriented = orient(product)
    planner = _planner(oriented, host())
    return planner.plan(oriented is not product)


# ---- orientation -----------------------------------------------------------------------------

# So few rows are multiplied with contiguous columns of B without packing these.
_FEW_ROWS = 4


def orient(p: Product) -> Product:
    """The product or its transpose: vectors want to run along the columns of C."""
    if p.b.panel:
        return p
    if p.n == 1 or p.m == 1:
        return p.transposed if p.m > 1 else p
    along_k = p.a.column == 1 and p.k >= 64
    if p.n <= _FEW_ROWS < p.m and along_k:
        return p.transposed
    row, column = _stored(p).strides[-2:]
    return p.transposed if row == 1 and column != 1 else p


def _stored(p: Product) -> Map:
    """The address map of the first result of a product."""
    first = p.epilogue.passes[0].stores[0]
    assert isinstance(first, Store)
    return first.map


# Instructions of a tile's step along k, beside its loads and multiply-adds.
_STEP_INSTRUCTIONS = 3
# The cost factor of a tile that a program has for one of its products only.
_WORTH_ANOTHER = 1.06


def tile_shape(machine: Host, m: int, vectors: int) -> tuple[int, int]:
    """The rows and the width in vectors of a register tile, for m rows and so many vectors of C.

    Wide tiles take the fewest loads: a vector of B for each vector of a row, and an element of A
    for each row. That leaves a core free for its other hardware thread, or a neighbour's.
    """
    # The sums of a tile, and its width where C has it. AVX-512 has 32 registers, NEON too, the
    # others 16: for the sums, for a row of B and an element of A. A pointer to each row of A takes
    # half of the 16 other registers.
    sums, widest, most = (24, 4, 8) if machine.vector_bytes == 64 else (12, 2, 6)
    if m <= most:
        # Few rows are one tile, which reads B once, and the fewer they are, the wider it is.
        rows = max(m, 1)
        return rows, min(sums // rows, 8, vectors)
    width = min(vectors, widest)
    tallest = min(sums // width, most)

    def instructions(rows: int) -> float:
        """The instructions of a step along k for all rows; the last tile has rows to spare."""
        each = (rows + 1) * (width + 1) + _STEP_INSTRUCTIONS
        # Most products of a program share the tallest tile: others must be worth compiling.
        return -(-m // rows) * each * (1 if rows == tallest else _WORTH_ANOTHER)

    return min(range(tallest, max(tallest // 2, 1), -1), key=instructions), width


# ---- B packed by itself ------------------------------------------------------------------------

# Below this many multiply-adds a step that packs would take longer than it saves.
_PACKED_FROM = 2**22
# The part of a product's time that it may take with B packed by a step before it.
PACKED_TIME_RATIO = 0.9
# Larger operands stay as they are: their panels would take as much memory again.
_MOST_PACKED = 2**27
# Elements of B that are packed at a time: by rows where these are read from end to end.
_PACKED_ELEMENTS = 2**14


@cache
def prefers_packed(p: Product, iterations: int) -> tuple[Product, Packing, bool] | None:
    """The product that reads panels, the packing, and whether A and B change places.

    None if the product had better stay as it is. It runs `iterations` times with the same B.
    """
    oriented = orient(p)
    if iterations == 1 and (any(oriented.b.batch) or p.multiply_adds < _PACKED_FROM):
        return None
    planner = _planner(oriented, host())
    plan = planner.plan(False, epilogue=False)
    size = oriented.k * oriented.n * NBYTES[p.carried]
    tiled = plan.symbol == product_symbol(planner.vectors)
    packs = "pack_b" in plan.functions or (tiled and oriented.m >= _PACK_FROM)
    if not packs or size > _MOST_PACKED:
        return None
    sizes = plan.sizes
    if iterations == 1:
        cut = planner.cut(sizes["mr"], sizes["nr"])
        apart = replace(cut, packs_b=False)
        least = PACKED_TIME_RATIO * cut.time(*cut.best())
        if apart.time(*apart.best()) + packing_ns(size, cut.cores) > least:
            return None
    o = oriented
    repeated = tuple(n for n, stride in zip(o.batch, o.b.batch, strict=True) if stride)
    strides = tuple(stride for stride in o.b.batch if stride)
    source = replace(o.b, batch=strides)
    packing = Packing(o.k, o.n, source, o.carried, sizes["nr"], repeated)
    made = iter(packing.target.batch)
    batch = tuple(next(made) if stride else 0 for stride in o.b.batch)
    return replace(o, b=replace(packing.target, batch=batch)), packing, oriented is not p


def plan_packing(p: Packing) -> Plan:
    """Decide how B is packed: the plan of a kernel with the arguments B and its panels."""
    v = vectors(p.carried, host().vector_bytes)
    way = _way(p.source)
    batch = (1,) * (MOST_BATCH_DIMS - len(p.batch)) + p.batch
    columns, depth = -(-p.n // p.panel) * p.panel, max(p.k, 1)
    if way == "copy":
        depth = min(depth, max(_PACKED_ELEMENTS // max(columns, 1), 8))
    else:
        columns = p.panel
    nbytes = NBYTES[p.source.dtype]
    sizes = {
        "whole": int(way == "copy"),
        "n": p.n,
        "k": p.k,
        "columns": columns,
        "depth": depth,
        "column_blocks": -(-p.n // columns),
        "depth_blocks": -(-p.k // depth),
        "panel": p.panel,
        "batch1": batch[1],
        "batch2": batch[2],
        "b_k": p.source.row * nbytes,
        "b_col": p.source.column * nbytes,
        "target_batch": p.panels * p.panel * p.k * v.nbytes,
    }
    sizes |= {f"b_batch{i}": s * nbytes for i, s in enumerate(_three(p.source.batch))}
    units = sizes["column_blocks"] * sizes["depth_blocks"] * math.prod(p.batch)
    return Plan(
        symbol=panels_symbol(v),
        sizes=sizes,
        functions={"pack": pack_symbol(v, p.source.dtype, way)},
        strides=(),
        texts=(panels_text(v), pack_text(v, p.source.dtype, way)),
        epilogues=(),
        swapped=False,
        offsets=(),
        units=units,
        cost_ns=max(columns * depth * v.nbytes / PACKED_BYTES_PER_NS, 5.0),
        scratch=0,
    )


def packing_step(
    plan: Plan, addresses: Mapping[str, int], slots: Sequence[Slot], name: str = "pack"
) -> KernelStep:
    """The step of a planned packing whose texts are compiled."""
    sizes = plan.sizes | {key: addresses[symbol] for key, symbol in plan.functions.items()}
    numbers = tuple(sizes[key] for key in PANEL_SIZES)
    address = addresses[plan.symbol]
    return KernelStep(address, tuple(slots), plan.units, plan.cost_ns, sizes=numbers, name=name)


# ---- the plan ----------------------------------------------------------------------------------


def _planner(p: Product, machine: Host) -> _Planner:
    where, work = plain_store(p.epilogue), p.multiply_adds
    return _Planner(
        p,
        machine,
        vectors(p.carried, machine.vector_bytes),
        direct=where is not None and (where.strides[-1] == 1 or p.n == 1),
        steps=2 if work >= LONG_PRODUCT and not p.k % 2 else 1,
        is_hot=math.prod(p.batch) > 1 and work < TINY_PRODUCT,
    )


@record(frozen=False)
class _Planner:
    """Collects the decisions on one oriented product."""

    p: Product
    machine: Host
    vectors: Vectors
    direct: bool  # whether tiles write C where it is wanted
    steps: int  # elements along k that an iteration of a tile takes
    is_hot: bool  # whether the loops around tiles take part of the time: many, next to no size
    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SIZES, 0))
    functions: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    epilogues: list[Rendered] = field(default_factory=list)
    scratch: int = 0

    def plan(self, swapped: bool, epilogue: bool = True) -> Plan:
        """The whole plan; without an epilogue it is only to be looked at."""
        p, sizes = self.p, self.sizes
        batches = math.prod(p.batch)
        self.put_layout()
        if p.b.panel:
            symbol, cost = self.put_tiles()
        elif p.m == 1 and p.b.column == 1 and p.n > 1:
            symbol, cost = self.put_combine(batches)
        elif p.m <= _FEW_ROWS and p.b.row == 1 and p.k >= 16:
            symbol, cost = self.put_dots(batches)
        else:
            symbol, cost = self.put_tiles()
        if epilogue:
            cost += self.put_epilogue()
        maps, nbytes = self.arguments()
        strides = [
            (where.strides[-2], where.strides[-1], *_three(where.strides[:-2])) for where in maps
        ]
        return Plan(
            symbol=symbol,
            sizes=sizes,
            functions=self.functions,
            strides=tuple(s * n for each, n in zip(strides, nbytes, strict=True) for s in each),
            texts=tuple(self.texts.values()),
            epilogues=tuple(self.epilogues),
            swapped=swapped,
            offsets=tuple(m.offset * n for m, n in zip(maps, nbytes, strict=True)),
            units=sizes["m_blocks"] * sizes["n_blocks"] * batches,
            cost_ns=cost,
            scratch=self.scratch,
        )

    def arguments(self) -> tuple[tuple[Map, ...], list[int]]:
        """The maps of the epilogue's arguments but C, and the bytes of their elements."""
        kernel = self.p.epilogue
        return argument_maps(kernel)[1:], [itemsize(a.dtype) for a in kernel.args[1:]]

    # ---- numbers ----

    def put_layout(self) -> None:
        """Note the sizes and strides that are given by the product itself."""
        p, sizes = self.p, self.sizes
        a_bytes, b_bytes = NBYTES[p.a.dtype], NBYTES[p.b.dtype]
        batch = (1,) * (MOST_BATCH_DIMS - len(p.batch)) + p.batch
        sizes |= {"m": p.m, "n": p.n, "k": p.k}
        sizes |= {"batch1": max(batch[1], 1), "batch2": max(batch[2], 1)}
        sizes |= {"a_row": p.a.row * a_bytes, "a_k": p.a.column * a_bytes}
        sizes |= {"b_k": p.b.row * b_bytes, "b_col": p.b.column * b_bytes}
        for i in range(MOST_BATCH_DIMS):
            sizes[f"a_batch{i}"] = _three(p.a.batch)[i] * a_bytes
            sizes[f"b_batch{i}"] = _three(p.b.batch)[i] * b_bytes
        sizes["arguments"] = len(p.epilogue.args) - 1

    def put_blocks(self, mb: int, nb: int) -> None:
        """Note the extents of a unit, and where it writes C."""
        p, sizes = self.p, self.sizes
        nb = min(nb, max(p.n, 1))
        sizes |= {"mb": mb, "nb": nb}
        sizes |= {"m_blocks": -(-p.m // mb), "n_blocks": -(-p.n // nb)}
        if self.direct:
            where = _stored(p)
            nbytes = itemsize(p.carried)
            sizes["c_row"] = where.strides[-2] * nbytes
            for i, stride in enumerate(_three(where.strides[:-2])):
                sizes[f"c_batch{i}"] = stride * nbytes
        else:
            sizes["c_row"] = self.c_row * itemsize(p.carried)
            sizes["at_c"] = self.reserve(mb * sizes["c_row"])

    @property
    def c_row(self) -> int:
        """Elements between the rows of a unit's own block of C: a vector more than it has."""
        lanes = self.vectors.lanes
        return (-(-self.sizes["nb"] // lanes) + 1) * lanes

    def reserve(self, nbytes: int) -> int:
        """Scratch memory of a thread: the offset of so many bytes."""
        offset = self.scratch
        self.scratch += (nbytes + _SLACK + 63) // 64 * 64
        return offset

    def use(self, key: str, symbol: str, text: str) -> None:
        """Note that a number is the address of a function."""
        self.functions[key] = symbol
        self.texts[symbol] = text

    def pack(self, key: str, source: str, way: str) -> None:
        v = self.vectors
        self.use(key, pack_symbol(v, source, way), pack_text(v, source, way))

    # ---- the epilogue ----

    def put_epilogue(self) -> float:
        """Note the kernels that run on finished blocks of C; gives their time for a unit."""
        p, sizes = self.p, self.sizes
        if self.direct or not p.m * p.n * math.prod(p.batch):
            return 0.0
        target = Target.from_features(self.machine.features)
        rows = min(sizes["mb"], p.m)
        widths = dict.fromkeys((sizes["nb"], p.n % sizes["nb"] or sizes["nb"]))
        made = [
            render(block_epilogue(p.epilogue, rows, width, self.c_row), target, tiles=False)
            for width in widths
        ]
        self.use("finish", FINISH, finish_text(self.vectors.attributes))
        self.functions["epilogue_0"] = made[0].symbol
        self.functions["epilogue_1"] = made[-1].symbol
        self.epilogues += made
        assert all(r.units == rows for r in made), "each row of an epilogue is a unit"
        return made[0].cost_ns * rows

    # ---- few rows ----

    def columns_for(self, row_ns: float, batches: int, least: int) -> int:
        """Columns of a unit of few rows, of which all columns take so long."""
        p = self.p
        if row_ns * batches < 5000:
            return p.n
        each = 16 if row_ns > _BEYOND_CACHES_NS else 2 if row_ns > 50_000 else 1
        parts = -(-available_cores() * each // batches)
        lanes = self.vectors.lanes
        return max(-(-p.n // (parts * lanes)) * lanes, least)

    def put_combine(self, batches: int) -> tuple[str, float]:
        """C as a combination of the rows of B."""
        p, v = self.p, self.vectors
        self.put_row_of_a(carried=p.a.dtype == p.carried)
        whole = p.k * p.n * NBYTES[p.b.dtype] / _BYTES_PER_NS
        nb = min(self.columns_for(whole, batches, 256), 2048)
        self.put_blocks(1, max(nb, 1))
        symbol = combine_symbol(v, p.b.dtype)
        self.texts[symbol] = combine_text(v, p.b.dtype)
        return symbol, max(whole * min(nb, p.n) / max(p.n, 1), 5.0)

    def put_dots(self, batches: int) -> tuple[str, float]:
        """C as dot products of rows of A and columns of B."""
        p, v = self.p, self.vectors
        rows = max(p.m, 1)
        self.put_row_of_a(carried=p.a.dtype == p.carried and p.a.column == 1)
        whole = p.k * p.n * NBYTES[p.b.dtype] / _BYTES_PER_NS
        nb = self.columns_for(whole, batches, 16)
        self.put_blocks(rows, max(nb, 1))
        symbol = dots_symbol(v, p.b.dtype, rows)
        self.texts[symbol] = dots_text(v, p.b.dtype, rows)
        return symbol, max(whole * min(nb, p.n) / max(p.n, 1), 5.0)

    def put_row_of_a(self, carried: bool) -> None:
        """Pack the few rows of A unless they can be read as they are."""
        p, sizes = self.p, self.sizes
        sizes["tile_a_row"] = sizes["a_row"]
        if not carried:
            self.pack("pack_a", p.a.dtype, "copy" if p.a.column == 1 else "gather")
            nbytes = self.vectors.nbytes
            sizes["tile_a_row"] = (p.k * nbytes + _SLACK) // 64 * 64 + 64
            sizes["at_a"] = self.reserve(p.m * sizes["tile_a_row"])

    # ---- tiles ----

    def put_tiles(self) -> tuple[str, float]:
        """C in register tiles."""
        p, v, sizes = self.p, self.vectors, self.sizes
        mr, width = tile_shape(self.machine, p.m, -(-p.n // v.lanes) or 1)
        nr = p.b.panel or width * v.lanes
        width = nr // v.lanes
        if self.streams_b:
            deep = _STREAMED_ROWS * (1 if p.m <= mr else 2)
            mb, nb = -(-p.m // mr) * mr, self.columns_of_rows(nr)
        else:
            deep = _DEPTH_BYTES // v.nbytes
            mb, nb = self.cut(mr, nr).best()
        parts = -(-p.k // deep) or 1
        kc = max(-(-p.k // (parts * self.steps)), 1) * self.steps
        mc = min(_SHALLOW_TILES * mr if self.is_shallow else _block_rows(mr), mb)
        sizes |= {"mc": mc, "kc": kc, "mr": mr, "nr": nr}
        self.put_blocks(mb, nb)
        self.put_a(mc, kc, mr)
        self.put_b(nb, kc, nr, mb)
        hot = self.is_hot
        self.use("tiles", tiles_symbol(v, hot), tiles_text(v, hot))
        self.put_tile_functions(mr, width)
        symbol = product_symbol(v, hot)
        self.texts[symbol] = product_text(v, hot)
        flops = 2.0 * min(mb, p.m) * min(nb, p.n) * p.k
        return symbol, max(flops / flops_per_ns(v.nbytes_of_vector, v.nbytes), 5.0)

    @property
    def streams_b(self) -> bool:
        """Whether few rows of A meet a B that lies in no near cache, and is read where it lies."""
        p = self.p
        plain = p.b.dtype == p.carried and p.b.column == 1 and not p.b.panel
        far = p.k * p.n * self.vectors.nbytes > _NEAR_BYTES
        return plain and far and p.m <= _MOST_STREAMING

    @property
    def is_compact(self) -> bool:
        """Whether B is so small, where it lies, that packing it brings nothing."""
        b = self.p.b
        plain = b.dtype == self.p.carried and b.column == 1 and not b.panel
        return plain and self.p.k * abs(b.row) * self.vectors.nbytes <= _COMPACT

    @property
    def is_shallow(self) -> bool:
        """Whether C is written row by row: it is most of the bytes moved, and B stays near."""
        p, nbytes = self.p, self.vectors.nbytes
        near, long = p.k * p.n * nbytes <= _STREAMED_C, p.n * nbytes >= _LONG_ROW
        return self.direct and near and long and p.k * nbytes <= _SHALLOW

    def columns_of_rows(self, nr: int) -> int:
        """Columns of a unit that reads whole rows of B, or a thread's part of them."""
        batches = math.prod(self.p.batch)
        shared = batches * self.p.multiply_adds >= SHARED_FROM
        parts = -(-available_cores() // max(batches, 1)) if shared else 1
        most = _STREAMED_C // (max(self.p.m, 1) * self.vectors.nbytes)
        parts = max(parts, -(-self.p.n // most))
        return -(-self.p.n // (parts * nr)) * nr

    def cut(self, mr: int, nr: int) -> Cut:
        """The facts that decide on the rows and columns of a unit."""
        p, v = self.p, self.vectors
        return Cut(
            p,
            mr,
            nr,
            nbytes=v.nbytes,
            vector_bytes=v.nbytes_of_vector,
            cores=available_cores(),
            direct=self.direct,
            packs_a=self.reads_a(_block_rows(mr)) is None,
            packs_b=not (p.b.panel or self.is_compact),
            whole_rows=self.is_shallow,
        )

    def reads_a(self, mc: int) -> dict[str, int] | None:
        """How tiles find the rows of A as they are; None if a block of so many is packed."""
        p, sizes, nbytes = self.p, self.sizes, self.vectors.nbytes
        plain = p.a.dtype == p.carried
        spread = min(mc, p.m) * abs(sizes["a_row"]) > _SPREAD and p.n >= 2 * _PACK_FROM
        if plain and p.a.column == 1 and not spread:
            return {"tile_a": sizes["a_row"], "tile_a_row": sizes["a_row"], "tile_a_k": nbytes}
        near = p.n < _PACK_FROM or abs(sizes["a_k"]) <= _NEAR
        if plain and p.a.row == 1 and near:
            return {"tile_a": nbytes, "tile_a_row": nbytes, "tile_a_k": sizes["a_k"]}
        return None

    def put_a(self, mc: int, kc: int, mr: int) -> None:
        """Note how tiles find the rows of A, and the packing that this takes."""
        p, sizes, nbytes = self.p, self.sizes, self.vectors.nbytes
        found = self.reads_a(mc)
        if found is not None:
            sizes |= found
        elif p.a.column == 1:
            row = (kc * nbytes + _SLACK) // 64 * 64 + 64
            self.use("lay_a", LAY_A, lay_a_text(self.vectors.attributes))
            self.pack("pack_a", p.a.dtype, "copy")
            sizes["at_a"] = self.reserve(mc * row)
            sizes |= {"whole_a": AS_ROWS, "tile_a": row, "tile_a_row": row, "tile_a_k": nbytes}
        else:
            self.use("lay_a", LAY_A, lay_a_text(self.vectors.attributes))
            self.pack("pack_a", p.a.dtype, "copy" if p.a.row == 1 else "gather")
            sizes["whole_a"] = ALL_PANELS if p.a.row == 1 else BY_PANELS
            sizes["at_a"] = self.reserve(mc * kc * nbytes)
            sizes |= {"tile_a": kc * nbytes, "tile_a_row": nbytes, "tile_a_k": mr * nbytes}

    def put_b(self, nb: int, kc: int, nr: int, mb: int) -> None:
        """The same for the columns of B."""
        p, sizes, nbytes = self.p, self.sizes, self.vectors.nbytes
        plain = p.b.dtype == p.carried and p.b.column == 1
        if p.b.panel or self.is_compact or (plain and min(mb, p.m) < _PACK_FROM):
            sizes |= {"tile_b": sizes["b_col"], "tile_b_k": sizes["b_k"]}
            return
        way = _way(p.b)
        self.use("lay_b", LAY_B, lay_b_text(self.vectors.attributes))
        self.pack("pack_b", p.b.dtype, way)
        sizes["whole_b"] = int(way == "copy")
        sizes["at_b"] = self.reserve(-(-nb // nr) * nr * kc * nbytes)
        sizes |= {"tile_b": kc * nbytes, "tile_b_k": nr * nbytes}

    def put_tile_functions(self, mr: int, width: int) -> None:
        """Choose the tiles for whole and last columns."""
        p, v = self.p, self.vectors
        rest = p.n % (width * v.lanes)
        narrow = -(-rest // v.lanes) or width
        steps = self.steps
        assembled = can_assemble(self.machine)
        whole = Tile(v, mr, width, False, steps, assembled)
        last = Tile(v, mr, narrow, rest % v.lanes > 0, steps, assembled)
        # Masks cost nothing where they are part of an instruction: then one tile can do both.
        both = narrow == width and v.nbytes_of_vector == 64
        if p.n < width * v.lanes or both:
            whole = last
        self.use("tile_whole", whole.symbol, whole.text())
        self.use("tile_last", last.symbol, last.text())


def _way(b: Operand) -> str:
    """The name of the function that packs columns of this layout."""
    return "copy" if b.column == 1 else "turn" if b.row == 1 else "gather"


def _block_rows(mr: int) -> int:
    """The rows of a block of A in tiles of so many rows."""
    return _BLOCK_ROWS // mr * mr


def _three(strides: Sequence[int]) -> tuple[int, ...]:
    return (*(0,) * (MOST_BATCH_DIMS - len(strides)), *strides)
