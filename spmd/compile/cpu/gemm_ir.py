"""The innermost code of matrix products: register tiles and packing, as LLVM IR.

The one idea is the classic one (Goto): a tile of C lives in registers while the processor streams
one column of A and one row of B per step, both from packed blocks or, where that is as good, from
where they lie. Edges need no padding: columns beyond the end are masked, rows are taken in steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spmd.compile.cpu.reduce import round_to_bfloat
from spmd.compile.cpu.runtime_ir import Function, Value, Variable

STORED = {"float16": "half", "bfloat16": "i16", "float32": "float", "float64": "double"}
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
        return STORED[self.source] != self.carried

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


def declarations(shape: Shape) -> list[str]:
    lanes, mask = shape.lanes, f"<{shape.lanes} x i1>"
    lines = [f"declare {shape.carried} @llvm.vector.reduce.fadd.{mangled(shape)}"]
    lines[0] += f"({shape.carried}, {shape.vector})"
    for type in dict.fromkeys((shape.vector, f"<{lanes} x {STORED[shape.source]}>")):
        lines.append(f"declare {type} @{_masked('load', type)}(ptr, i32, {mask}, {type})")
    lines.append(f"declare void @{_masked('store', shape.vector)}")
    lines[-1] += f"({shape.vector}, ptr, i32, {mask})"
    return lines


def mangled(shape: Shape) -> str:
    return f"v{shape.lanes}{'f64' if shape.carried == 'double' else 'f32'}"


def _masked(operation: str, type: str) -> str:
    lanes, element = type.strip("<>").split(" x ")
    names = {"float": "f32", "double": "f64", "half": "f16"}
    return f"llvm.masked.{operation}.v{lanes}{names.get(element, element)}.p0"


def function_attributes(shape: Shape) -> str:
    return f'nounwind "prefer-vector-width"="{8 * shape.vector_bytes}"'


# ---- vectors ---------------------------------------------------------------------------------


def lane_mask(f: Function, shape: Shape, count: Value) -> Value:
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


def load_vector(
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


def multiply_add(f: Function, a: Value, b: Value, total: Variable) -> None:
    """total += a * b, fused where the processor can."""
    type = total.type
    product = f.emit(type, f"fmul contract {type} {a.text}, {b.text}")
    summed = f.emit(type, f"fadd contract {type} {total.get().text}, {product.text}")
    total.set(summed)


# ---- the register tile -----------------------------------------------------------------------


def micro_name(shape: Shape, rows: int, vectors: int, masked: bool, packed: bool) -> str:
    kind = "packed" if packed else "masked" if masked else "full"
    return f"micro_{rows}x{vectors}_{kind}"


# a, bytes between its rows, bytes between its k; b, bytes between its k; k; c, bytes between its
# rows; columns; whether to add to c.
MICRO_PARAMS = ["ptr", "i64", "i64", "ptr", "i64", "i64", "ptr", "i64", "i64", "i64"]


def micro(shape: Shape, rows: int, vectors: int, masked: bool, packed: bool = False) -> Function:
    """One tile: C[rows, columns] (+)= A[rows, k] B[k, columns], C in registers throughout."""
    name = micro_name(shape, rows, vectors, masked, packed)
    f = Function(name, "void", MICRO_PARAMS, internal=True, attributes=function_attributes(shape))
    a, a_row, a_k, b, b_k, k, c, c_row, columns, accumulate = f.params
    if packed:
        a_row, a_k = f.value("i64", shape.nbytes), f.value("i64", shape.nbytes * shape.rows)
        b_k = f.value("i64", 2 * shape.vector_bytes)
    starts = range(0, vectors * shape.lanes, shape.lanes)
    masks = [lane_mask(f, shape, columns - start) if masked else None for start in starts]
    totals = [[f.var(shape.vector, 0) for _ in range(vectors)] for _ in range(rows)]
    b_now = f.var("ptr", b)
    a_now = [f.var("ptr", f.at(a, a_row * row)) for row in range(1 if packed else rows)]
    with f.range(0, k):
        b_rows = [
            load_vector(f, shape, f.at(b_now.get(), v * shape.vector_bytes), masks[v])
            for v in range(vectors)
        ]
        for row in range(rows):
            if packed:
                element = f.load(shape.carried, a_now[0].get(), row * shape.nbytes)
            else:
                element = f.load(shape.carried, a_now[row].get())
            spread = _splat(f, element, shape.lanes)
            for v in range(vectors):
                multiply_add(f, spread, b_rows[v], totals[row][v])
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
            total.set(total.get() + load_vector(f, shape, place, mask))
    for place, mask, total in places:
        if mask is None:
            f.store(total.get(), place, align=shape.nbytes)
        else:
            _store_masked(f, shape, total.get(), place, mask)
    return f


# ---- packing ---------------------------------------------------------------------------------


def pack(shape: Shape) -> Function:
    """pack(source, i_stride, k_stride, width, depth, target, target_stride).

    target[k * target_stride + i] = source[i * i_stride + k * k_stride], in the carried type, for
    i < width and k < depth. One function for both operands: i are rows of A or columns of B.
    """
    params = ["ptr", "i64", "i64", "i64", "i64", "ptr", "i64"]
    f = Function("pack", "void", params, internal=True, attributes=function_attributes(shape))
    source, i_stride, k_stride, width, depth, target, target_stride = f.params
    stored = STORED[shape.source]
    with f.if_(i_stride.equals(shape.source_bytes)):
        with f.range(0, width, shape.lanes) as i:
            mask = lane_mask(f, shape, width - i)
            with f.range(0, depth) as k:
                origin = f.at(source, k * k_stride + i * shape.source_bytes)
                value = load_vector(f, shape, origin, mask, stored)
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
        rows.append(load_vector(f, shape, origin, None, STORED[shape.source]))
    mask = lane_mask(f, shape, width - i)
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


def merge(shape: Shape) -> Function:
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
            before = f.load(STORED[shape.result], place)
            value.set(value.get() + _widen(f, before, shape.carried))
        f.store(narrow(f, shape, value.get()), place)
    return f


def narrow(f: Function, shape: Shape, value: Value) -> Value:
    """A carried value as the result stores it."""
    stored = STORED[shape.result]
    if stored == value.type:
        return value
    if stored == "i16":
        return round_to_bfloat(f, value, 1)
    return f.convert("fptrunc" if stored == "half" else "fpext", value, stored)
