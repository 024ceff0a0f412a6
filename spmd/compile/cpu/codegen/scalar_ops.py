"""Scalar operations of kernel IR as LLVM instructions on virtual vectors.

One function per family (bools, integers, floats, complex pairs live in `complex_ops.py`). The
meaning of each operation is `kernel/ops.py`'s; cases that LLVM leaves undefined (division by zero,
shifts by too much, saturating conversions) are written out here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spmd.base.record import record
from spmd.compile.cpu.codegen import complex_ops
from spmd.compile.cpu.codegen.conversions import (
    convert,
    element_of,
    from_memory,
    memory_element,
    to_memory,
)
from spmd.compile.cpu.codegen.division import Inverse, divide, inverse_of_constant
from spmd.compile.cpu.math.floats import Floats
from spmd.compile.cpu.math.table import call_function
from spmd.compile.kernel.dtypes import kind
from spmd.compile.native.llvm.vector_emitter import Emitter


@record
class Value:
    """A rendered value: its kernel dtype, its operands (re and im if complex), its lanes.

    `constant` is the Python number of a real constant that is not NaN: constant divisors and shift
    amounts need no guards. `inverse` is known of divisors that a loop divides by again and again.
    """

    dtype: str
    parts: tuple[str, ...]
    width: int
    constant: int | float | None = None
    inverse: Inverse | None = None


def render_op(
    e: Emitter, op: str, values: Sequence[Value], dtype: str, attr: int | None
) -> tuple[str, ...]:
    """Write one operation on values of the emitter's width; returns the result's parts."""
    source = values[-1].dtype
    parts = [value.parts for value in values]
    if op == "convert":
        return convert(e, parts[0], source, dtype)
    if op == "bitcast":
        raw = to_memory(e, parts[0][0], source)
        raw = e.cast("bitcast", memory_element(source), memory_element(dtype), raw)
        return (from_memory(e, raw, dtype),)
    if op == "select":
        element, chosen = element_of(dtype), zip(parts[1], parts[2], strict=True)
        return tuple(e.select(parts[0][0], element, x, y) for x, y in chosen)
    if "c" in (kind(dtype), kind(source)):
        return complex_ops.render(e, op, parts, element_of(source), attr)
    operands = [part[0] for part in parts]
    match kind(source):
        case "b":
            return (_bool_op(e, op, *operands),)
        case "f":
            if op == "div" and e.width > 1:
                by = _inverse(Floats(e, element_of(source)), values[1])
                if by is not None:
                    return (divide(Floats(e, element_of(source)), operands[0], by),)
            constant = [value.constant is not None for value in values]
            return (_float_op(e, op, operands, element_of(source), attr, constant),)
    last = values[-1].constant
    known = None if last is None else int(last)
    return (_integer_op(e, op, operands, source, attr, known),)


def _inverse(m: Floats, divisor: Value) -> Inverse | None:
    """The factor that replaces the division, if there is one."""
    if not m.has_fma or divisor.constant is None:
        return divisor.inverse
    return inverse_of_constant(m, float(divisor.constant))


# ---- bools ----------------------------------------------------------------------------------


def _bool_op(e: Emitter, op: str, x: str, y: str = "") -> str:
    true = e.int(1, "i1")

    def invert(value: str) -> str:
        return e.binary("xor", "i1", value, true)

    match op:
        case "not":
            return invert(x)
        case "and" | "min":
            return e.binary("and", "i1", x, y)
        case "or" | "max":
            return e.binary("or", "i1", x, y)
        case "xor" | "ne":
            return e.binary("xor", "i1", x, y)
        case "eq":
            return invert(e.binary("xor", "i1", x, y))
        case "lt":
            return e.binary("and", "i1", invert(x), y)
        case "le":
            return e.binary("or", "i1", invert(x), y)
        case "gt":
            return e.binary("and", "i1", x, invert(y))
        case "ge":
            return e.binary("or", "i1", x, invert(y))
    raise AssertionError(op)


# ---- integers -------------------------------------------------------------------------------

_PLAIN_INTEGER = {"add", "sub", "mul", "and", "or", "xor"}
_COMPARISONS = {"eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge"}


def _integer_op(
    e: Emitter,
    op: str,
    operands: Sequence[str],
    dtype: str,
    attr: int | None,
    constant: int | None,
) -> str:
    """Write an operation on integers; undefined cases of LLVM's instructions are written out."""
    element, signed = element_of(dtype), kind(dtype) == "i"
    x, y = operands[0], operands[-1]
    if op in _PLAIN_INTEGER:
        return e.binary(op, element, x, y)
    if op in _COMPARISONS:
        prefix = "" if op in ("eq", "ne") else "s" if signed else "u"
        return e.compare(prefix + op, element, x, y)
    if op in ("max", "min"):
        return e.intrinsic(("s" if signed else "u") + op, element, x, y)
    if op in ("div", "rem"):
        return _divide(e, op, x, y, element, signed, constant)
    if op in ("shl", "shr_logical", "shr_arith"):
        return _shift(e, op, x, y, element, constant)
    match op:
        case "neg":
            return e.binary("sub", element, e.int(0, element), x)
        case "not":
            return e.binary("xor", element, x, e.int(-1, element))
        case "abs":
            return e.intrinsic("abs", element, x, extra="i1 false") if signed else x
        case "sign":
            one = e.int(1, element)
            if not signed:
                return e.intrinsic("umin", element, x, one)
            bounded = e.intrinsic("smin", element, x, one)
            return e.intrinsic("smax", element, bounded, e.int(-1, element))
        case "clz":
            return e.intrinsic("ctlz", element, x, extra="i1 false")
        case "popcount":
            return e.intrinsic("ctpop", element, x)
        case "integer_pow":
            power = integer_power(
                x, abs(attr or 0), e.int(1, element), lambda a, b: e.binary("mul", element, a, b)
            )
            if (attr or 0) >= 0:
                return power
            return _divide(e, "div", e.int(1, element), power, element, signed, None)
    raise AssertionError(op)


def _divide(
    e: Emitter, op: str, x: str, y: str, element: str, signed: bool, constant: int | None
) -> str:
    opcode = ("s" if signed else "u") + op
    if constant is not None and constant not in (0, -1):
        return e.binary(opcode, element, x, y)
    zero = e.compare("eq", element, y, e.int(0, element))
    trap = zero
    if signed:
        # lowest / -1 traps; lowest / 1 and lowest % 1 are the right results.
        lowest = e.int(1 << (int(element[1:]) - 1), element)
        minus_one = e.compare("eq", element, y, e.int(-1, element))
        at_lowest = e.compare("eq", element, x, lowest)
        trap = e.binary("or", "i1", trap, e.binary("and", "i1", minus_one, at_lowest))
    result = e.binary(opcode, element, x, e.select(trap, element, e.int(1, element), y))
    return e.select(zero, element, e.int(-1, element) if op == "div" else x, result)


def _shift(e: Emitter, op: str, x: str, by: str, element: str, constant: int | None) -> str:
    bits = int(element[1:])
    opcode = {"shl": "shl", "shr_logical": "lshr", "shr_arith": "ashr"}[op]
    if constant is not None and 0 <= constant < bits:
        return e.binary(opcode, element, x, by)
    inside = e.compare("ult", element, by, e.int(bits, element))
    safe = bits - 1 if op == "shr_arith" else 0
    result = e.binary(opcode, element, x, e.select(inside, element, by, e.int(safe, element)))
    if op == "shr_arith":
        return result
    return e.select(inside, element, result, e.int(0, element))


def integer_power(x: str, exponent: int, one: str, mul: Callable[[str, str], str]) -> str:
    """Write x**exponent by repeated squaring, for any product."""
    result = None
    while exponent:
        if exponent & 1:
            result = x if result is None else mul(result, x)
        exponent >>= 1
        x = mul(x, x) if exponent else x
    return one if result is None else result


# ---- floats ---------------------------------------------------------------------------------

_FLOAT_COMPARISONS = {"eq": "oeq", "ne": "une", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge"}
_ROUNDINGS = {"round_even": "roundeven", "abs": "fabs"} | {
    name: name for name in ("floor", "ceil", "trunc", "round", "sqrt")
}


def _float_op(
    e: Emitter,
    op: str,
    operands: Sequence[str],
    element: str,
    attr: int | None,
    constant: Sequence[bool],
) -> str:
    """Write an operation on real floats; `constant` tells which operands are constants."""
    m = Floats(e, element)
    x, y = operands[0], operands[-1]
    if op in _FLOAT_COMPARISONS:
        return m.is_(_FLOAT_COMPARISONS[op], x, y)
    if op in _ROUNDINGS:
        return e.intrinsic(_ROUNDINGS[op], element, x)
    match op:
        case "add":
            return m.add(x, y)
        case "sub":
            return m.sub(x, y)
        case "mul":
            return m.mul(x, y)
        case "div":
            return m.div(x, y)
        case "neg":
            return m.neg(x)
        case "max" | "min":
            return _extreme(m, op, x, y, constant)
        case "rsqrt":
            return m.div(m.const(1.0), m.sqrt(x))
        case "sign":
            zero = m.const(0.0)
            below = m.select(m.is_("olt", x, zero), m.const(-1.0), x)
            return m.select(m.is_("ogt", x, zero), m.const(1.0), below)
        case "is_finite":
            return m.is_("olt", m.abs(x), m.const(float("inf")))
        case "integer_pow":
            power = integer_power(x, abs(attr or 0), m.const(1.0), m.mul)
            return power if (attr or 0) >= 0 else m.div(m.const(1.0), power)
    return call_function(e, op, element, *operands)


def _extreme(m: Floats, op: str, x: str, y: str, constant: Sequence[bool]) -> str:
    """The larger or smaller, NaN if either is.

    `x > y ? x : y` is one instruction and gives y when unordered. With a constant (never NaN here:
    the caller says so) as its first operand that is all; otherwise a NaN in x is put back.
    """
    predicate = "ogt" if op == "max" else "olt"
    if constant[-1]:
        return m.select(m.is_(predicate, y, x), y, x)
    result = m.select(m.is_(predicate, x, y), x, y)
    return result if constant[0] else m.select(m.is_("uno", x, x), x, result)


# ---- reductions -----------------------------------------------------------------------------


def combine(e: Emitter, op: str, dtype: str, x: Sequence[str], y: Sequence[str]) -> tuple[str, ...]:
    """Write one step of a reduction or scan of `dtype`."""
    if kind(dtype) == "f" and op in ("add", "mul"):
        # The order of a sum is the renderer's, so the accumulator may be part of an FMA.
        flags = "fadd contract" if op == "add" else "fmul"
        return (e.binary(flags, element_of(dtype), x[0], y[0]),)
    values = [Value(dtype, tuple(part), e.width) for part in (x, y)]
    return render_op(e, op, values, dtype, None)
