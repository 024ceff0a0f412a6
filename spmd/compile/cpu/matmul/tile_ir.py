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
from spmd.compile.native.llvm.vector_emitter import attributes_of
from spmd.compile.native.program.reduction_kernels import round_to_bfloat

# How kernel dtypes lie in memory.
STORED = {"f16": "half", "bf16": "i16", "f32": "float", "f64": "double"}
NBYTES = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}


class FullVectors:
    """What vectors as wide as the registers have in common, whatever their elements are."""

    __slots__ = ()
    nbytes_of_vector: int

    @property
    def element(self) -> str:
        """The LLVM type of an element."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """The bytes of an element."""
        raise NotImplementedError

    @property
    def lanes(self) -> int:
        """Elements in a vector."""
        return self.nbytes_of_vector // self.nbytes

    @property
    def vector(self) -> str:
        """The LLVM type of a vector."""
        return f"<{self.lanes} x {self.element}>"

    @property
    def mask(self) -> str:
        """The LLVM type of a choice of lanes."""
        return f"<{self.lanes} x i1>"

    @property
    def attributes(self) -> str:
        """Attributes of functions that compute with these vectors: those of kernels."""
        return attributes_of(8 * self.nbytes_of_vector)

    def declarations(self, *stored: str) -> str:
        """Declarations of the masked operations on vectors of these stored types."""
        lines = []
        for type in dict.fromkeys((self.element, *stored)):
            vector = f"<{self.lanes} x {type}>"
            load, store = (masked_name(kind, vector) for kind in ("load", "store"))
            lines.append(f"declare {vector} @{load}(ptr, i32, {self.mask}, {vector})")
            lines.append(f"declare void @{store}({vector}, ptr, i32, {self.mask})")
        return "\n".join(lines)


@record
class Vectors(FullVectors):
    """The arithmetic of a product: vectors of `carried` (f32 or f64), as wide as the registers."""

    carried: str
    nbytes_of_vector: int

    @property
    def element(self) -> str:
        """The LLVM type of an element."""
        return STORED[self.carried]

    @property
    def nbytes(self) -> int:
        """The bytes of an element."""
        return NBYTES[self.carried]

    @property
    def symbol(self) -> str:
        """The name that goes into all symbols."""
        return f"{self.carried}_{self.nbytes_of_vector}"


def masked_name(operation: str, type: str) -> str:
    lanes, element = type.strip("<>").split(" x ")
    names = {"float": "f32", "double": "f64", "half": "f16"}
    return f"llvm.masked.{operation}.v{lanes}{names.get(element, element)}.p0"


# ---- vectors ---------------------------------------------------------------------------------


def lane_mask(f: Function, lanes: int, count: Value) -> Value:
    """Lanes below `count`."""
    iota = ", ".join(f"i32 {i}" for i in range(lanes))
    bound = splat(f, f.convert("trunc", count, "i32"), lanes)
    type = f"<{lanes} x i32>"
    return f.emit(f"<{lanes} x i1>", f"icmp slt {type} <{iota}>, {bound.text}")


def splat(f: Function, value: Value, lanes: int) -> Value:
    """A vector of equal elements."""
    type = f"<{lanes} x {value.type}>"
    one = f.emit(type, f"insertelement {type} poison, {value.type} {value.text}, i64 0")
    zeros = f"<{lanes} x i32> zeroinitializer"
    return f.emit(type, f"shufflevector {type} {one.text}, {type} poison, {zeros}")


def load_vector(
    f: Function, v: Vectors, address: Value, mask: Value | None = None, stored: str | None = None
) -> Value:
    """A vector of elements stored as the LLVM type `stored` (default: carried ones), widened."""
    type = f"<{v.lanes} x {stored or v.element}>"
    align = 2 if stored in ("half", "i16") else v.nbytes if stored is None else 4
    if mask is None:
        return widen(f, f.load(type, address, align=align), v.vector)
    operands = (address, f.value("i32", align), mask, f.value(type, 0))
    return widen(f, f.call(masked_name("load", type), type, *operands), v.vector)


def store_vector(f: Function, v: Vectors, value: Value, address: Value, mask: Value | None) -> None:
    """Store a vector of carried elements, where the mask holds."""
    if mask is None:
        f.store(value, address, align=v.nbytes)
    else:
        align = f.value("i32", v.nbytes)
        f.call(masked_name("store", v.vector), "void", value, address, align, mask)


def widen(f: Function, value: Value, carried: str) -> Value:
    """A value as read from memory, in the type that is computed with."""
    if value.type == carried:
        return value
    if "half" in value.type or "float" in value.type:
        return f.convert("fpext", value, carried)
    words = carried.replace("double", "float").replace("float", "i32")
    wide = f.convert(
        "bitcast", f.convert("zext", value, words) << 16, words.replace("i32", "float")
    )
    return wide if wide.type == carried else f.convert("fpext", wide, carried)


def narrow(f: Function, value: Value, stored: str) -> Value:
    """A carried scalar as it is stored."""
    if stored == value.type:
        return value
    if stored == "i16":
        return round_to_bfloat(f, value, 1)
    return f.convert("fptrunc" if stored == "half" else "fpext", value, stored)


def multiply_add(f: Function, a: Value, b: Value, total: Variable) -> None:
    """total += a * b, fused where the processor can."""
    type = total.type
    product = f.emit(type, f"fmul contract {type} {a.text}, {b.text}")
    summed = f.emit(type, f"fadd contract {type} {total.get().text}, {product.text}")
    total.set(summed)


# ---- the register tile -----------------------------------------------------------------------

# a, bytes between its rows, bytes between its k; b, bytes between its k; k; c, bytes between its
# rows; rows; columns; whether to add to c.
TILE_PARAMS = ["ptr", "i64", "i64", "ptr", "i64", "i64", "ptr", "i64", "i64", "i64", "i64"]


@record
class Tile:
    """C[rows, columns] (+)= A[rows, k] B[k, columns] for up to `rows` rows and `width` vectors.

    A `masked` tile takes fewer columns: its last vector is cut. Where there are fewer rows the last
    is computed again in place of those that are missing, so one text serves a whole product. Each
    round of its loop takes `steps` elements along k, which must be a multiple of that. An
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
        """Where the rows of the tile begin; the last one again for those that are missing."""
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
    """Write the (address, mask, sums) of a tile, added to what is there if `accumulate` is set.

    All are read before any is written, so that several rows may have the same place.
    """
    with f.if_(accumulate.differs(0)):
        for place, mask, total in places:
            total.set(total.get() + load_vector(f, v, place, mask))
    for place, mask, total in places:
        store_vector(f, v, total.get(), place, mask)
