"""Vectors as wide as the registers, in the IR of `function_builder`: elements, masks, memory.

Products, contractions over windows, sorts and reductions over devices are written with them.
"""

from __future__ import annotations

from functools import cache

from spmd.base.record import record
from spmd.compile.native.llvm.function_builder import Function, Value, Variable
from spmd.compile.native.llvm.vector_emitter import attributes_of

# How kernel dtypes lie in memory.
STORED = {"f16": "half", "bf16": "i16", "f32": "float", "f64": "double"}
NBYTES = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}
# How inline assembly names "any vector register", by processor.
VECTOR_REGISTER = {"x86_64": "v", "AMD64": "v", "aarch64": "w", "arm64": "w"}


class FullVectors:
    """The common part of vectors as wide as the registers, whatever their elements are."""

    __slots__ = ()
    nbytes_of_vector: int
    element: str  # the LLVM type of an element
    nbytes: int  # of an element
    lanes: int  # elements in a vector
    attributes: str  # of functions that compute with these vectors: those of kernels

    @property
    def vector(self) -> str:
        """The LLVM type of a vector."""
        return f"<{self.lanes} x {self.element}>"

    @property
    def mask(self) -> str:
        """The LLVM type of a choice of lanes."""
        return f"<{self.lanes} x i1>"

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
    element: str
    nbytes: int
    lanes: int
    attributes: str
    symbol: str  # the name that goes into all symbols


@cache
def vectors(carried: str, nbytes_of_vector: int) -> Vectors:
    """The vectors of a dtype on a machine whose registers have so many bytes."""
    nbytes = NBYTES[carried]
    return Vectors(
        carried,
        nbytes_of_vector,
        element=STORED[carried],
        nbytes=nbytes,
        lanes=nbytes_of_vector // nbytes,
        attributes=attributes_of(8 * nbytes_of_vector),
        symbol=f"{carried}_{nbytes_of_vector}",
    )


def masked_name(operation: str, type: str) -> str:
    lanes, element = type.strip("<>").split(" x ")
    names = {"float": "f32", "double": "f64", "half": "f16"}
    return f"llvm.masked.{operation}.v{lanes}{names.get(element, element)}.p0"


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


def multiply_add(f: Function, a: Value, b: Value, total: Variable) -> None:
    """total += a * b, fused where the processor can."""
    type = total.type
    product = f.emit(type, f"fmul contract {type} {a.text}, {b.text}")
    summed = f.emit(type, f"fadd contract {type} {total.get().text}, {product.text}")
    total.set(summed)


def vector_type(element: str, lanes: int) -> str:
    """The LLVM type of some lanes; of one, that of a scalar."""
    return f"<{lanes} x {element}>" if lanes > 1 else element


def round_to_bfloat(f: Function, value: Value, lanes: int) -> Value:
    """The 16 bits of f32 lanes rounded to bfloat16, to nearest even; NaNs stay NaNs.

    By integer arithmetic: LLVM's own conversion flushes denormals where the processor has an
    instruction for it, and calls a library that may not be there where it has none.
    """
    words = vector_type("i32", lanes)
    bits = f.convert("bitcast", value, words)
    high = f.emit(words, f"lshr {words} {bits.text}, {f.value(words, 16).text}")
    rounded = bits + ((high & 1) + 0x7FFF)
    quiet = bits | 0x00400000
    kept = f.select(value.differs(value), quiet, rounded)
    shifted = f.emit(words, f"lshr {words} {kept.text}, {f.value(words, 16).text}")
    return f.convert("trunc", shifted, vector_type("i16", lanes))
