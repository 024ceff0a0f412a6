"""The code of matrix products: micro-kernels, packing, and the loops around them, as LLVM IR.

The one idea is the classic one (Goto): a block of A is packed so that a tile of C lives in
registers while the processor streams one column of A and one row of B per step. All sizes, strides
and blockings are run-time numbers (`SIZES`), so one module per dtype serves every product.

Edges need no padding: columns beyond the end are masked, rows are taken in steps of powers of two.
Each element of C is one chain of multiply-adds over k, in blocks of `kc`, whatever tile or thread
it falls to, so the result does not depend on how the work was split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spmd.compile.cpu.reduce import round_to_bfloat
from spmd.compile.cpu.runtime_ir import Function, Value, Variable

# The run-time numbers of a product, in the order in which the code finds them. Strides in bytes.
SIZES = (
    "m n k a_row a_k b_k b_col c_row c_col mc nc kc nr pack_a pack_b direct_c m_blocks n_blocks "
    "batch1 batch2 a_batch0 a_batch1 a_batch2 b_batch0 b_batch1 b_batch2 c_batch0 c_batch1 c_batch2"
).split()

_STORED = {"float16": "half", "bfloat16": "i16", "float32": "float", "float64": "double"}
_NBYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True)
class Shape:
    """The dtypes of a product and the register tile that the processor affords."""

    source: str  # dtype of A and B
    result: str  # dtype of C
    vector_bytes: int
    rows: int  # rows of the register tile; it is two vectors wide

    @property
    def carried(self) -> str:
        """The LLVM type in which products are summed."""
        return "double" if self.source == "float64" else "float"

    @property
    def nbytes(self) -> int:
        """The size of that type."""
        return 8 if self.source == "float64" else 4

    @property
    def lanes(self) -> int:
        """Elements in a vector."""
        return self.vector_bytes // self.nbytes

    @property
    def source_bytes(self) -> int:
        """The size of an element of A and B."""
        return _NBYTES[self.source]

    @property
    def result_bytes(self) -> int:
        """The size of an element of C."""
        return _NBYTES[self.result]

    @property
    def converts(self) -> bool:
        """Whether A and B must be packed to be computed with."""
        return _STORED[self.source] != self.carried

    @property
    def vector(self) -> str:
        """The LLVM type of a vector."""
        return f"<{self.lanes} x {self.carried}>"

    @property
    def symbol(self) -> str:
        """The name that goes into all symbols."""
        return f"{self.source}_{self.result}_{self.vector_bytes}"

    def steps(self) -> tuple[tuple[int, int], ...]:
        """(rows, vectors) of the micro-kernels, largest first: few rows afford more vectors."""
        tall = [rows for rows in (self.rows, 8, 4) if rows <= self.rows]
        return (*((rows, 2) for rows in tall), (2, 4), (1, 8))

    def narrow_steps(self) -> tuple[tuple[int, int], ...]:
        """The same for panels that are at most one vector wide."""
        return tuple((rows, 1) for rows, _ in self.steps())


def product_symbol(shape: Shape) -> str:
    """The kernel that computes C = A B."""
    return f"gemm_{shape.symbol}"


def gemv_symbol(shape: Shape) -> str:
    """The kernel that computes y = A x with the rows of A contiguous."""
    return f"gemv_{shape.symbol}"


def gemm_text(shape: Shape) -> str:
    """The module of one shape."""
    functions = [
        *(_micro(shape, rows, vectors, masked=True) for rows, vectors in shape.steps()),
        *(_micro(shape, rows, vectors, masked=True) for rows, vectors in shape.narrow_steps()),
        _micro(shape, shape.rows, 2, masked=False),
        _micro(shape, shape.rows, 2, masked=False, packed=True),
        _pack(shape),
        _merge(shape),
        _tile(shape),
        _product(shape),
        _gemv(shape),
    ]
    return "\n".join([*_declarations(shape), *(f.text() for f in functions)])


def _declarations(shape: Shape) -> list[str]:
    lanes, mask = shape.lanes, f"<{shape.lanes} x i1>"
    lines = [f"declare {shape.carried} @llvm.vector.reduce.fadd.{_mangled(shape)}"]
    lines[0] += f"({shape.carried}, {shape.vector})"
    for type in dict.fromkeys((shape.vector, f"<{lanes} x {_STORED[shape.source]}>")):
        lines.append(f"declare {type} @{_masked('load', type)}(ptr, i32, {mask}, {type})")
    lines.append(f"declare void @{_masked('store', shape.vector)}")
    lines[-1] += f"({shape.vector}, ptr, i32, {mask})"
    return lines


def _mangled(shape: Shape) -> str:
    return f"v{shape.lanes}{'f64' if shape.carried == 'double' else 'f32'}"


def _masked(operation: str, type: str) -> str:
    lanes, element = type.strip("<>").split(" x ")
    names = {"float": "f32", "double": "f64", "half": "f16"}
    return f"llvm.masked.{operation}.v{lanes}{names.get(element, element)}.p0"


def _attributes(shape: Shape) -> str:
    return f'nounwind "prefer-vector-width"="{8 * shape.vector_bytes}"'


# ---- vectors ---------------------------------------------------------------------------------


def _mask(f: Function, shape: Shape, count: Value) -> Value:
    """Lanes below `count`."""
    lanes = shape.lanes
    iota = ", ".join(f"i32 {i}" for i in range(lanes))
    bound = _splat(f, f.convert("trunc", count, "i32"), lanes)
    type = f"<{lanes} x i32>"
    return f.emit(f"<{lanes} x i1>", f"icmp slt {type} <{iota}>, {bound.text}")


def _splat(f: Function, value: Value, lanes: int) -> Value:
    type = f"<{lanes} x {value.type}>"
    one = f.emit(type, f"insertelement {type} poison, {value.type} {value.text}, i64 0")
    zeros = f"<{lanes} x i32> zeroinitializer"
    return f.emit(type, f"shufflevector {type} {one.text}, {type} poison, {zeros}")


def _load(
    f: Function, shape: Shape, address: Value, mask: Value | None, stored: str | None = None
) -> Value:
    """A vector of `stored` elements (default: carried ones), converted to the carried type."""
    type = f"<{shape.lanes} x {stored or shape.carried}>"
    align = shape.nbytes if stored is None else shape.source_bytes
    if mask is None:
        value = f.load(type, address, align=align)
    else:
        operands = (address, f.value("i32", align), mask, f.value(type, 0))
        value = f.call(_masked("load", type), type, *operands)
    return _widen(f, value, shape.vector)


def _widen(f: Function, value: Value, carried: str) -> Value:
    """A value as read from memory, in the type that is computed with."""
    if value.type == carried:
        return value
    if "half" in value.type:
        return f.convert("fpext", value, carried)
    words = carried.replace("float", "i32")
    return f.convert("bitcast", f.convert("zext", value, words) << 16, carried)


def _store_masked(f: Function, shape: Shape, value: Value, address: Value, mask: Value) -> None:
    align = f.value("i32", shape.nbytes)
    f.call(_masked("store", shape.vector), "void", value, address, align, mask)


def _multiply_add(f: Function, a: Value, b: Value, total: Variable) -> None:
    """total += a * b, fused where the processor can."""
    type = total.type
    product = f.emit(type, f"fmul contract {type} {a.text}, {b.text}")
    summed = f.emit(type, f"fadd contract {type} {total.get().text}, {product.text}")
    total.set(summed)


# ---- the register tile -----------------------------------------------------------------------


def _micro_name(shape: Shape, rows: int, vectors: int, masked: bool, packed: bool) -> str:
    kind = "packed" if packed else "masked" if masked else "full"
    return f"micro_{rows}x{vectors}_{kind}"


# a, bytes between its rows, bytes between its k; b, bytes between its k; k; c, bytes between its
# rows; columns; whether to add to c.
_MICRO_PARAMS = ["ptr", "i64", "i64", "ptr", "i64", "i64", "ptr", "i64", "i64", "i64"]


def _micro(shape: Shape, rows: int, vectors: int, masked: bool, packed: bool = False) -> Function:
    """One tile: C[rows, columns] (+)= A[rows, k] B[k, columns], C in registers throughout."""
    name = _micro_name(shape, rows, vectors, masked, packed)
    f = Function(name, "void", _MICRO_PARAMS, internal=True, attributes=_attributes(shape))
    a, a_row, a_k, b, b_k, k, c, c_row, columns, accumulate = f.params
    if packed:
        a_row, a_k = f.value("i64", shape.nbytes), f.value("i64", shape.nbytes * shape.rows)
        b_k = f.value("i64", 2 * shape.vector_bytes)
    starts = range(0, vectors * shape.lanes, shape.lanes)
    masks = [_mask(f, shape, columns - start) if masked else None for start in starts]
    totals = [[f.var(shape.vector, 0) for _ in range(vectors)] for _ in range(rows)]
    b_now = f.var("ptr", b)
    a_now = [f.var("ptr", f.at(a, a_row * row)) for row in range(1 if packed else rows)]
    with f.range(0, k):
        b_rows = [
            _load(f, shape, f.at(b_now.get(), v * shape.vector_bytes), masks[v])
            for v in range(vectors)
        ]
        for row in range(rows):
            if packed:
                element = f.load(shape.carried, a_now[0].get(), row * shape.nbytes)
            else:
                element = f.load(shape.carried, a_now[row].get())
            spread = _splat(f, element, shape.lanes)
            for v in range(vectors):
                _multiply_add(f, spread, b_rows[v], totals[row][v])
        for pointer in a_now:
            pointer.set(f.at(pointer.get(), a_k))
        b_now.set(f.at(b_now.get(), b_k))
    places = [
        (f.at(f.at(c, c_row * row), v * shape.vector_bytes), masks[v], totals[row][v])
        for row in range(rows)
        for v in range(vectors)
    ]
    with f.if_(accumulate.differs(0)):
        for place, mask, total in places:
            total.set(total.get() + _load(f, shape, place, mask))
    for place, mask, total in places:
        if mask is None:
            f.store(total.get(), place, align=shape.nbytes)
        else:
            _store_masked(f, shape, total.get(), place, mask)
    return f


# ---- packing ---------------------------------------------------------------------------------


def _pack(shape: Shape) -> Function:
    """pack(source, i_stride, k_stride, width, depth, target, target_stride).

    target[k * target_stride + i] = source[i * i_stride + k * k_stride], in the carried type, for
    i < width and k < depth. One function for both operands: i are rows of A or columns of B.
    """
    params = ["ptr", "i64", "i64", "i64", "i64", "ptr", "i64"]
    f = Function("pack", "void", params, internal=True, attributes=_attributes(shape))
    source, i_stride, k_stride, width, depth, target, target_stride = f.params
    stored = _STORED[shape.source]
    with f.if_(i_stride.equals(shape.source_bytes)):
        with f.range(0, width, shape.lanes) as i:
            mask = _mask(f, shape, width - i)
            with f.range(0, depth) as k:
                origin = f.at(source, k * k_stride + i * shape.source_bytes)
                value = _load(f, shape, origin, mask, stored)
                place = f.at(target, k * target_stride + i * shape.nbytes)
                _store_masked(f, shape, value, place, mask)
        f.ret()
    whole = f.var("i64", 0)
    with f.if_(k_stride.equals(shape.source_bytes)):
        whole.set(depth - depth % shape.lanes)
        with f.range(0, width, shape.lanes) as i, f.range(0, whole.get(), shape.lanes) as k:
            _pack_transposed(f, shape, i, k)
    with f.range(whole.get(), depth) as k, f.range(0, width) as i:
        element = f.load(stored, source, k * k_stride + i * i_stride)
        value = _widen(f, element, shape.carried)
        f.store(value, target, k * target_stride + i * shape.nbytes)
    return f


def _pack_transposed(f: Function, shape: Shape, i: Value, k: Value) -> None:
    """Pack a square of `lanes` rows that are contiguous along k, through registers."""
    source, i_stride, _, width, _, target, target_stride = f.params
    lanes = shape.lanes
    rows = []
    for lane in range(lanes):
        # Rows beyond the last are read as the last; the mask keeps them out of the target.
        row = f.smaller(i + lane, width - 1)
        origin = f.at(source, row * i_stride + k * shape.source_bytes)
        rows.append(_load(f, shape, origin, None, _STORED[shape.source]))
    mask = _mask(f, shape, width - i)
    for lane, column in enumerate(_transpose(f, shape, rows)):
        place = f.at(target, (k + lane) * target_stride + i * shape.nbytes)
        _store_masked(f, shape, column, place, mask)


def _transpose(f: Function, shape: Shape, rows: Sequence[Value]) -> list[Value]:
    """Transpose a square of vectors: log2(lanes) rounds of interleaving row i with i + half."""
    lanes, type = shape.lanes, shape.vector
    half = lanes // 2
    low = [index for i in range(half) for index in (i, lanes + i)]
    high = [index for i in range(half, lanes) for index in (i, lanes + i)]

    def interleave(a: Value, b: Value, order: Sequence[int]) -> Value:
        picks = ", ".join(f"i32 {index}" for index in order)
        text = f"shufflevector {type} {a.text}, {type} {b.text}, <{lanes} x i32> <{picks}>"
        return f.emit(type, text)

    values = list(rows)
    for _ in range(half.bit_length()):
        pairs = [(values[i], values[i + half]) for i in range(half)]
        values = [interleave(a, b, order) for a, b in pairs for order in (low, high)]
    return values


# ---- the result ------------------------------------------------------------------------------


def _merge(shape: Shape) -> Function:
    """merge(tile, tile_stride, c, c_row, c_col, rows, columns, accumulate): store a tile anywhere.

    For results that the micro-kernels cannot write themselves: narrow dtypes and columns that are
    not contiguous.
    """
    params = ["ptr", "i64", "ptr", "i64", "i64", "i64", "i64", "i64"]
    f = Function("merge", "void", params, internal=True)
    tile, tile_stride, c, c_row, c_col, rows, columns, accumulate = f.params
    with f.range(0, rows) as i, f.range(0, columns) as j:
        value = f.var(
            shape.carried, f.load(shape.carried, tile, i * tile_stride + j * shape.nbytes)
        )
        place = f.at(c, i * c_row + j * c_col)
        with f.if_(accumulate.differs(0)):
            before = f.load(_STORED[shape.result], place)
            value.set(value.get() + _widen(f, before, shape.carried))
        f.store(_narrow(f, shape, value.get()), place)
    return f


def _narrow(f: Function, shape: Shape, value: Value) -> Value:
    """A carried value as the result stores it."""
    stored = _STORED[shape.result]
    if stored == value.type:
        return value
    if stored == "i16":
        return round_to_bfloat(f, value, 1)
    return f.convert("fptrunc" if stored == "half" else "fpext", value, stored)


# ---- the loops -------------------------------------------------------------------------------


def _tile(shape: Shape) -> Function:
    """Compute the next rows of a column panel; give their number.

    tile(a, a_row, a_k, b, b_k, k, c, c_row, columns, accumulate, rows left, packed).
    """
    params = [*_MICRO_PARAMS, "i64", "i64"]
    f = Function("tile", "i64", params, internal=True, attributes=_attributes(shape))
    operands, (left, packed) = f.params[:10], f.params[10:]
    columns = operands[8]
    full = (left >= shape.rows) & columns.equals(2 * shape.lanes)
    with f.if_(full & packed.differs(0)):
        f.call(_micro_name(shape, shape.rows, 2, False, True), "void", *operands)
        f.ret(shape.rows)
    with f.if_(full):
        f.call(_micro_name(shape, shape.rows, 2, False, False), "void", *operands)
        f.ret(shape.rows)
    narrow = columns <= shape.lanes
    for steps, fits in ((shape.narrow_steps(), narrow), (shape.steps(), narrow.equals(0))):
        with f.if_(fits):
            for rows, vectors in steps:
                with f.if_(left >= rows):
                    f.call(_micro_name(shape, rows, vectors, True, False), "void", *operands)
                    f.ret(rows)
    f.ret(0)
    return f


def _named_sizes(f: Function, sizes: Value) -> dict[str, Value]:
    return {name: f.load("i64", sizes, 8 * i) for i, name in enumerate(SIZES)}


def _batch_addresses(f: Function, of: dict[str, Value], batch: Value) -> list[Value]:
    """The addresses of A, B and C of one product of the batch."""
    args = f.params[0]
    rest = batch // of["batch2"]
    index2 = batch - rest * of["batch2"]
    index0 = rest // of["batch1"]
    index1 = rest - index0 * of["batch1"]
    addresses = []
    for i, name in enumerate("abc"):
        offset = (
            index0 * of[f"{name}_batch0"]
            + index1 * of[f"{name}_batch1"]
            + index2 * of[f"{name}_batch2"]
        )
        addresses.append(f.at(f.load("ptr", args, 8 * i), offset))
    return addresses


def _product(shape: Shape) -> Function:
    """The kernel: unit = (product of the batch, block of columns, block of rows)."""
    f = Function(
        product_symbol(shape), "void", ["ptr", "ptr", "i64", "i64"], attributes=_attributes(shape)
    )
    args, sizes, begin, end = f.params
    of = _named_sizes(f, sizes)
    scratch = f.load("ptr", args, 24)
    tile = f.stack(shape.vector, max(2 * shape.rows, 8), align=64)
    packed_a = f.at(scratch, of["kc"] * of["nr"] * shape.nbytes)
    with f.range(begin, end) as unit:
        blocks = unit // of["m_blocks"]
        m_first = (unit - blocks * of["m_blocks"]) * of["mc"]
        batch = blocks // of["n_blocks"]
        n_first = (blocks - batch * of["n_blocks"]) * of["nc"]
        a, b, c = _batch_addresses(f, of, batch)
        a = f.at(a, m_first * of["a_row"])
        b = f.at(b, n_first * of["b_col"])
        c = f.at(c, m_first * of["c_row"] + n_first * of["c_col"])
        rows = f.smaller(of["m"] - m_first, of["mc"])
        columns = f.smaller(of["n"] - n_first, of["nc"])
        # At least once: a product over nothing is zero.
        with f.range(0, f.larger(of["k"], 1), of["kc"]) as k_first:
            depth = f.smaller(of["k"] - k_first, of["kc"])
            a_block = f.at(a, k_first * of["a_k"])
            b_block = f.at(b, k_first * of["b_k"])
            with f.if_(of["pack_a"].differs(0)):
                _pack_rows(f, shape, of, a_block, rows, depth, packed_a)
            _panels(
                f, shape, of, (a_block, b_block, c), (rows, columns, depth, k_first), scratch, tile
            )
    return f


def _pack_rows(
    f: Function,
    shape: Shape,
    of: dict[str, Value],
    a: Value,
    rows: Value,
    depth: Value,
    target: Value,
) -> None:
    """Pack a block of A into panels of as many rows as the register tile has."""
    height = shape.rows
    with f.range(0, rows, height) as i:
        width = f.smaller(rows - i, height)
        place = f.at(target, i * depth * shape.nbytes)
        stride = f.value("i64", height * shape.nbytes)
        origin = f.at(a, i * of["a_row"])
        f.call("pack", "void", origin, of["a_row"], of["a_k"], width, depth, place, stride)


def _panels(
    f: Function,
    shape: Shape,
    of: dict[str, Value],
    operands: tuple[Value, Value, Value],
    extents: tuple[Value, Value, Value, Value],
    scratch: Value,
    tile: Value,
) -> None:
    """Multiply a block of A with all column panels of a block of B."""
    a, b, c = operands
    rows, columns, depth, k_first = extents
    packed_a = f.at(scratch, of["kc"] * of["nr"] * shape.nbytes)
    panel_stride = of["nr"] * shape.nbytes
    accumulate = f.convert("zext", k_first > 0, "i64")
    with f.range(0, columns, of["nr"]) as j:
        width = f.smaller(columns - j, of["nr"])
        b_now, b_k = f.var("ptr", f.at(b, j * of["b_col"])), f.var("i64", of["b_k"])
        with f.if_(of["pack_b"].differs(0)):
            strides = of["b_col"], of["b_k"]
            f.call("pack", "void", b_now.get(), *strides, width, depth, scratch, panel_stride)
            b_now.set(scratch)
            b_k.set(panel_stride)
        row = f.var("i64", 0)
        with f.loop():
            i = row.get()
            f.break_if(i >= rows)
            a_now, a_row = f.var("ptr", f.at(a, i * of["a_row"])), f.var("i64", of["a_row"])
            a_k = f.var("i64", of["a_k"])
            with f.if_(of["pack_a"].differs(0)):
                inside = i % shape.rows
                a_now.set(f.at(packed_a, ((i - inside) * depth + inside) * shape.nbytes))
                a_row.set(shape.nbytes)
                a_k.set(shape.rows * shape.nbytes)
            c_now = f.at(c, i * of["c_row"] + j * of["c_col"])
            left = rows - i
            both_packed = of["pack_a"] & of["pack_b"]
            shared = (a_now.get(), a_row.get(), a_k.get(), b_now.get(), b_k.get(), depth)
            with f.if_else(of["direct_c"].differs(0)) as it:
                place = (c_now, of["c_row"], width, accumulate)
                row.set(i + f.call("tile", "i64", *shared, *place, left, both_packed))
                it.otherwise()
                place = (tile, panel_stride, width, f.value("i64", 0))
                done = f.call("tile", "i64", *shared, *place, left, both_packed)
                target = (c_now, of["c_row"], of["c_col"], done, width, accumulate)
                f.call("merge", "void", tile, panel_stride, *target)
                row.set(i + done)


# ---- matrix times vector ---------------------------------------------------------------------

# Rows of A that share a pass over x, to have several loads in flight.
GEMV_ROWS = 4


def _gemv(shape: Shape) -> Function:
    """The kernel y = A x, A contiguous along k: unit = (product of the batch, block of rows)."""
    f = Function(
        gemv_symbol(shape), "void", ["ptr", "ptr", "i64", "i64"], attributes=_attributes(shape)
    )
    args, sizes, begin, end = f.params
    of = _named_sizes(f, sizes)
    scratch = f.load("ptr", args, 24)
    nbytes, k = f.value("i64", shape.nbytes), of["k"]
    with f.range(begin, end) as unit:
        batch = unit // of["m_blocks"]
        first = (unit - batch * of["m_blocks"]) * of["mc"]
        a, x, y = _batch_addresses(f, of, batch)
        # x as a contiguous vector of the carried type, whatever it was.
        f.call(
            "pack", "void", x, f.value("i64", 0), of["b_k"], f.value("i64", 1), k, scratch, nbytes
        )
        last = f.smaller(first + of["mc"], of["m"])
        grouped = last - (last - first) % GEMV_ROWS
        for rows, begin_row, end_row in (
            (GEMV_ROWS, first, grouped),
            (1, grouped, last),
        ):
            with f.range(begin_row, end_row, rows) as i:
                origin = f.at(a, i * of["a_row"])
                for row, total in enumerate(_dot_rows(f, shape, of, origin, scratch, rows)):
                    target = f.at(y, (i + row) * of["c_row"])
                    f.store(_narrow(f, shape, total), target)
    return f


def _dot_rows(
    f: Function, shape: Shape, of: dict[str, Value], a: Value, x: Value, rows: int
) -> list[Value]:
    """The dot products of `rows` rows of A with x: a vector of partial sums each, then the rest."""
    stored, lanes = _STORED[shape.source], shape.lanes
    k = of["k"]
    totals = [f.var(shape.vector, 0) for _ in range(rows)]

    def step(at: Value, mask: Value | None) -> None:
        x_now = _load(f, shape, f.at(x, at * shape.nbytes), mask)
        for row, total in enumerate(totals):
            origin = f.at(f.at(a, of["a_row"] * row), at * shape.source_bytes)
            _multiply_add(f, _load(f, shape, origin, mask, stored), x_now, total)

    whole = k - k % lanes
    with f.range(0, whole, lanes) as at:
        step(at, None)
    with f.if_(whole < k):
        step(whole, _mask(f, shape, k - whole))
    name = f"llvm.vector.reduce.fadd.{_mangled(shape)}"
    sums = []
    for total in totals:
        operands = f"{shape.carried} -0.0, {shape.vector} {total.get().text}"
        sums.append(f.emit(shape.carried, f"call reassoc {shape.carried} @{name}({operands})"))
    return sums
