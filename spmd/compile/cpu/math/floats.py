"""Float arithmetic on an emitter, in one element type: the language vector math is written in.

Only the `contract` flag is given (a product and a sum may become one FMA), and only by `mul`, `add`
and `sub`. Nothing may assume that NaNs, infinities or signed zeros do not occur.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spmd.compile.native.llvm.vector_emitter import Emitter


def _binary(opcode: str) -> Callable[[Floats, str, str], str]:
    """The operation of an LLVM instruction."""
    return lambda m, x, y: m.emitter.binary(opcode, m.element, x, y)


class Floats:
    """Lane-wise operations on `float` or `double` operands of one emitter.

    `wanted` are the bits of the type that results are rounded to in the end: an f64
    computation of an f32 result does with shorter polynomials.
    """

    def __init__(self, emitter: Emitter, element: str, wanted: int | None = None):
        self.emitter = emitter
        self.element = element
        self.bits = 32 if element == "float" else 64
        self.wanted = wanted or self.bits
        self.mantissa = 23 if element == "float" else 52
        self.bias = 127 if element == "float" else 1023
        self.integer = f"i{self.bits}"
        self.has_fma = emitter.module.target.fma
        # Whether the machine looks numbers of the element up in tables (`register_tables.py`).
        self.has_tables = self.bits == 32 and emitter.module.target.vector_bits == 512
        # The integers behind the whole floats that `nearest` made.
        self._integers: dict[str, str] = {}

    def const(self, value: float) -> str:
        """Write a constant."""
        return self.emitter.float(value, self.element)

    def int(self, value: int) -> str:
        """Write an integer constant as wide as the element."""
        return self.emitter.int(value, self.integer)

    # ---- arithmetic ----

    add = _binary("fadd contract")
    sub = _binary("fsub contract")
    mul = _binary("fmul contract")
    div = _binary("fdiv")

    # Rounded: never part of an FMA.
    exact_add = _binary("fadd")
    exact_sub = _binary("fsub")
    exact_mul = _binary("fmul")

    def fma(self, x: str, y: str, z: str) -> str:
        """x * y + z, in one rounding where the machine has FMA, else in two."""
        return self.emitter.intrinsic("fma" if self.has_fma else "fmuladd", self.element, x, y, z)

    def poly(self, x: str, coefficients: Sequence[float]) -> str:
        """Evaluate a polynomial by Horner's rule, highest coefficient first."""
        result, *others = self.emitter.floats(coefficients, self.element)
        for coefficient in others:
            result = self.fma(result, x, coefficient)
        return result

    def neg(self, x: str) -> str:
        kind = self.emitter.type(self.element)
        return self.emitter.set(f"fneg {kind} {x}")

    def abs(self, x: str) -> str:
        return self.emitter.intrinsic("fabs", self.element, x)

    def copysign(self, magnitude: str, sign: str) -> str:
        return self.emitter.intrinsic("copysign", self.element, magnitude, sign)

    def sqrt(self, x: str) -> str:
        return self.emitter.intrinsic("sqrt", self.element, x)

    def in_double(
        self, function: Callable[..., str], *operands: str, wanted: int | None = None
    ) -> str:
        """Apply a function of (Floats, operands) in f64 and round its result to this type once."""
        if self.bits == 64:
            return function(self, *operands)
        e, wide = self.emitter, Floats(self.emitter, "double", wanted or 32)
        given = [e.cast("fpext", "float", "double", operand) for operand in operands]
        return e.cast("fptrunc", "double", "float", function(wide, *given))

    def in_float(self, function: Callable[..., str], operand: str) -> str:
        """Apply a function of (Floats, operand) in f32: slow instructions take half the time."""
        narrow = Floats(self.emitter, "float")
        given = self.emitter.cast("fptrunc", "double", "float", operand)
        return self.emitter.cast("fpext", "float", "double", function(narrow, given))

    def reciprocal(self, x: str) -> str:
        """1 / x, to 45 bits or so where the result is rounded to f32; x is not near overflow."""
        one = self.const(1.0)
        if self.wanted == self.bits:
            return self.div(one, x)
        start = self.in_float(lambda m, x: m.div(m.const(1.0), x), x)
        return self.fma(start, self.fma(self.neg(x), start, one), start)

    # ---- comparing and choosing ----

    def is_(self, predicate: str, x: str, y: str) -> str:
        """Compare with one of LLVM's float predicates: olt, oeq, une, uno, ..."""
        return self.emitter.compare(predicate, self.element, x, y)

    def select(self, condition: str, x: str, y: str) -> str:
        return self.emitter.select(condition, self.element, x, y)

    def clamp(self, x: str, low: float, high: float) -> str:
        """Bring x into [low, high]; a NaN stays a NaN."""
        least, most = self.const(low), self.const(high)
        x = self.select(self.is_("olt", x, least), least, x)
        return self.select(self.is_("ogt", x, most), most, x)

    # ---- bits ----

    def to_bits(self, x: str) -> str:
        return self.emitter.cast("bitcast", self.element, self.integer, x)

    def of_bits(self, x: str) -> str:
        return self.emitter.cast("bitcast", self.integer, self.element, x)

    def int_op(self, opcode: str, x: str, y: str) -> str:
        """Apply an integer instruction to operands as wide as the element."""
        return self.emitter.binary(opcode, self.integer, x, y)

    def of_int(self, x: str) -> str:
        """Convert a signed integer as wide as the element."""
        return self.emitter.cast("sitofp", self.integer, self.element, x)

    def nearest(self, x: str, factor: float) -> tuple[str, str]:
        """Round x * factor to an integer: (as float, as int). Garbage, but no trap, for NaN.

        Adding 1.5 * 2**mantissa leaves the integer in the low bits: no conversion instruction,
        which would be undefined for NaN. |x * factor| must be less than 2**(mantissa - 1).
        """
        magic = 1.5 * 2.0**self.mantissa
        shifted = self.fma(x, self.const(factor), self.const(magic))
        whole = self.exact_sub(shifted, self.const(magic))
        bits = self.to_bits(shifted)
        offset = self.to_bits(self.const(magic))
        self._integers[whole] = self.int_op("sub", bits, offset)
        return whole, self._integers[whole]

    def integer_of(self, whole: str) -> str:
        """The integer behind a whole float that `nearest` made."""
        return self._integers[whole]

    def of_small_int(self, x: str) -> str:
        """Convert an integer of fewer bits than the mantissa: the inverse of `nearest`.

        Converting 64-bit integers takes AVX-512; adding bits does not.
        """
        magic = self.const(1.5 * 2.0**self.mantissa)
        return self.exact_sub(self.of_bits(self.int_op("add", x, self.to_bits(magic))), magic)

    def power_of_two(self, exponent: str) -> str:
        """Make 2**exponent of an integer exponent in the normal range."""
        biased = self.int_op("add", exponent, self.int(self.bias))
        return self.of_bits(self.int_op("shl", biased, self.int(self.mantissa)))

    def scale(self, x: str, whole: str, normal: bool = False) -> str:
        """x * 2**whole for a `whole` of `nearest`, right also where 2**whole alone is no normal.

        `normal` promises that it is.
        """
        full = self.emitter.width % (512 // self.bits) == 0
        if self.emitter.module.target.vector_bits == 512 and full:
            return self.scale_floor(x, whole)
        exponent = self.integer_of(whole)
        if normal or self.wanted < self.bits:
            return self.exact_mul(x, self.power_of_two(exponent))
        half = self.int_op("ashr", exponent, self.int(1))
        rest = self.int_op("sub", exponent, half)
        return self.exact_mul(self.exact_mul(x, self.power_of_two(half)), self.power_of_two(rest))

    def scale_floor(self, x: str, exponent: str) -> str:
        """x * 2**floor(exponent), for registers of 512 bits."""
        lanes = 512 // self.bits
        return self.emitter.in_registers(self._scale_register, self.element, lanes, x, exponent)

    def _scale_register(self, x: str, whole: str) -> str:
        """AVX-512 has an instruction for it."""
        e, kind = self.emitter, self.emitter.type(self.element)
        letter = "s" if self.bits == 32 else "d"
        mask = f"i{e.width}"
        name = f"@llvm.x86.avx512.mask.scalef.p{letter}.512"
        e.module.declare(name, f"declare {kind} {name}({kind}, {kind}, {kind}, {mask}, i32)")
        given = f"{kind} {x}, {kind} {whole}, {kind} zeroinitializer, {mask} -1, i32 4"
        return e.set(f"call {kind} {name}({given})")
