"""The table of elementwise primitives: the computation of each for one element, in kernel IR.

An entry is a function (builder, values, params, out) of the operands' kernel values that makes the
result's value; `out` is the kernel dtype of the result. An entry serves all dtypes for which its
kernel operations exist; `can_lower` asks whether they do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.compile.expressions.random_bits import RANDOM_ENTRIES
from spmd.compile.kernel.builder import Builder
from spmd.compile.kernel.dtypes import kernel_dtype, kind
from spmd.compile.kernel.ir import Op
from spmd.compile.kernel.ops import OPS, result_dtype, supports
from spmd.core.ir import Eqn

Entry = Callable[[Builder, Sequence[int], dict[str, Any], str], int]


class NoKernelError(Exception):
    """There is no kernel for these dtypes or parameters; the step falls back to `impl`."""


def apply(b: Builder, op: str, *operands: int) -> int:
    """A kernel operation; a NoKernelError if it does not take the operands' dtypes."""
    made = b.op_if_supported(op, *operands)
    if made is None:
        raise NoKernelError(f"{op} of {b.dtypes(operands)}")
    return made


# ---- one operation each ------------------------------------------------------------------------


def _op(name: str) -> Entry:
    return lambda b, xs, params, out: apply(b, name, *xs)


_SAME_NAME = (
    "add sub mul div rem max min neg abs floor ceil sign exp exp2 expm1 log log1p sin cos tan asin "
    "acos atan atan2 sinh cosh tanh asinh acosh atanh logistic sqrt rsqrt cbrt erf erfc erf_inv "
    "lgamma digamma real imag conj complex and or xor not clz is_finite "
    "eq ne lt le gt ge"
).split()

_RENAMED = {
    "add_any": "add",
    "population_count": "popcount",
    "shift_left": "shl",
    "shift_right_logical": "shr_logical",
    "shift_right_arithmetic": "shr_arith",
}


# ---- the others --------------------------------------------------------------------------------


def _integer_pow(b: Builder, xs: Sequence[int], params: dict[str, Any], out: str) -> int:
    exponent = params["y"]
    x = xs[0]
    if exponent == 2:
        return apply(b, "mul", x, x)
    if kind(b.dtype(x)) not in OPS["integer_pow"].kinds:
        raise NoKernelError(f"integer_pow of {b.dtype(x)}")
    return b.op("integer_pow", x, attr=exponent)


def _square(b: Builder, xs: Sequence[int], params: dict[str, Any], out: str) -> int:
    return apply(b, "mul", xs[0], xs[0])


def _round(b: Builder, xs: Sequence[int], params: dict[str, Any], out: str) -> int:
    method = params["rounding_method"]
    return apply(b, "round_even" if int(getattr(method, "value", method)) else "round", xs[0])


def _pow(b: Builder, xs: Sequence[int], params: dict[str, Any], out: str) -> int:
    x, exponent = xs
    known = b.number(exponent)
    if known in KNOWN_POWERS and out in ("f32", "f64"):
        return _known_power(b, x, known, out)
    if b.dtype(exponent) != b.dtype(x):  # an integer; `impl` converts it too
        exponent = b.convert(exponent, b.dtype(x))
    return apply(b, "pow", x, exponent)


# Exponents whose powers are products, quotients and roots with an error of less than 2 ulp: tried
# with all significands, the largest is 1.92 (of 2.5). That of -2.5 would be 2.5.
KNOWN_POWERS = frozenset((-2.0, -1.5, -1.0, -0.5, 0.5, 1.5, 2.0, 2.5, 3.0))


def _known_power(b: Builder, x: int, exponent: float, dtype: str) -> int:
    """x to a power of `KNOWN_POWERS`, in an order in which no step leaves the range too early."""
    one = b.const(1.0, dtype)
    match exponent:
        case 2.0:
            return b.op("mul", x, x)
        case 3.0:
            return b.op("mul", b.op("mul", x, x), x)
        case -1.0:
            return b.op("div", one, x)
        case -2.0:
            return b.op("div", b.op("div", one, x), x)
    # C's pow takes -inf for inf here and -0 for 0, where a root of them would be NaN and -0.
    ends = [b.op("eq", x, b.const(end, dtype)) for end in (-np.inf, 0.0)]
    x = b.op("select", b.op("or", *ends), b.op("abs", x), x)
    if exponent == -1.5:
        return b.op("div", b.op("sqrt", b.op("div", one, x)), x)
    root = b.op("sqrt", x)
    match exponent:
        case -0.5:
            return b.op("div", one, root)
        case 1.5:
            return b.op("mul", x, root)
        case 2.5:
            return b.op("mul", b.op("mul", x, x), root)
    return root


def _select_n(b: Builder, xs: Sequence[int], params: dict[str, Any], out: str) -> int:
    which, *cases = xs
    if b.dtype(which) == "bool":
        return apply(b, "select", which, cases[1], cases[0]) if len(cases) == 2 else cases[0]
    result = cases[-1]
    for k in range(len(cases) - 2, -1, -1):
        below = apply(b, "le", which, b.const(k, b.dtype(which)))
        result = apply(b, "select", below, cases[k], result)
    return result


def _clamp(b: Builder, xs: Sequence[int], params: dict[str, Any], out: str) -> int:
    low, x, high = xs
    return apply(b, "min", apply(b, "max", x, low), high)


def _convert(b: Builder, xs: Sequence[int], params: dict[str, Any], out: str) -> int:
    return b.convert(xs[0], out)


def _bitcast(b: Builder, xs: Sequence[int], params: dict[str, Any], out: str) -> int:
    if result_dtype("bitcast", (b.dtype(xs[0]),), out) is None:
        raise NoKernelError(f"bitcast of {b.dtype(xs[0])} to {out}")
    return b.bitcast(xs[0], out)


# Of floats: the bits of the exponent and of the mantissa.
_EXPONENT_AND_MANTISSA = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52)}


class _Bits:
    """The bits of a float, and arithmetic on them as on an unsigned number."""

    def __init__(self, b: Builder, x: int):
        self.b, self.dtype = b, b.dtype(x)
        if self.dtype not in _EXPONENT_AND_MANTISSA:
            raise NoKernelError(f"bits of {self.dtype}")
        self.exponent_bits, self.mantissa_bits = _EXPONENT_AND_MANTISSA[self.dtype]
        self.width = 1 + self.exponent_bits + self.mantissa_bits
        self.word = f"u{self.width}"
        self.bits = b.bitcast(x, self.word)
        self.top = 1 << (self.width - 1)
        self.infinity = ((1 << self.exponent_bits) - 1) << self.mantissa_bits

    def do(self, op: str, x: int, number: int) -> int:
        """An operation whose second operand is a number."""
        return apply(self.b, op, x, self.b.const(number, self.word))

    def of_float(self, bits: int) -> int:
        return self.b.bitcast(bits, self.dtype)


def _reduce_precision(b: Builder, xs: Sequence[int], params: dict[str, Any], out: str) -> int:
    """Round to even on the bits, then flush numbers beyond the narrower exponent."""
    (x,), it = xs, _Bits(b, xs[0])
    exponent_bits, mantissa_bits = params["exponent_bits"], params["mantissa_bits"]
    bits = it.bits
    if mantissa_bits < it.mantissa_bits:
        drop = it.mantissa_bits - mantissa_bits
        last = it.do("and", it.do("shr_logical", bits, drop), 1)
        bits = it.do("add", apply(b, "add", bits, last), (1 << (drop - 1)) - 1)
        bits = it.do("and", bits, (1 << it.width) - (1 << drop))
    if exponent_bits < it.exponent_bits:
        bias, wide = (1 << (exponent_bits - 1)) - 1, (1 << (it.exponent_bits - 1)) - 1
        sign = it.do("and", bits, it.top)
        exponent = it.do("and", bits, it.infinity)
        above = it.do("gt", exponent, (wide + bias) << it.mantissa_bits)
        bits = apply(b, "select", above, it.do("or", sign, it.infinity), bits)
        below = it.do("le", exponent, (wide - bias) << it.mantissa_bits)
        bits = apply(b, "select", below, sign, bits)
    return apply(b, "select", apply(b, "ne", x, x), x, it.of_float(bits))


def _nextafter(b: Builder, xs: Sequence[int], params: dict[str, Any], out: str) -> int:
    """The number next to x on the way to y; by its bits if it has 16 of them."""
    x, y = xs
    if b.dtype(x) not in ("f16", "bf16"):
        return apply(b, "nextafter", x, y)
    it = _Bits(b, x)
    zero = b.const(0.0, it.dtype)
    outwards = apply(b, "eq", apply(b, "lt", x, y), apply(b, "gt", x, zero))
    step = apply(b, "select", outwards, it.do("add", it.bits, 1), it.do("sub", it.bits, 1))
    least = it.do("or", it.do("and", _Bits(b, y).bits, it.top), 1)
    bits = apply(b, "select", apply(b, "eq", x, zero), least, step)
    found = apply(b, "select", apply(b, "eq", x, y), y, it.of_float(bits))
    for given in (x, y):
        found = apply(b, "select", apply(b, "ne", given, given), given, found)
    return found


def _identity(b: Builder, xs: Sequence[int], params: dict[str, Any], out: str) -> int:
    return xs[0]


# Primitives that are one kernel operation.
_SINGLE = {**{name: name for name in _SAME_NAME}, **_RENAMED}

ENTRIES: dict[str, Entry] = {
    **{name: _op(op) for name, op in _SINGLE.items()},
    "integer_pow": _integer_pow,
    "square": _square,
    "round": _round,
    "pow": _pow,
    "select_n": _select_n,
    "clamp": _clamp,
    "convert_element_type": _convert,
    "bitcast_convert_type": _bitcast,
    "reduce_precision": _reduce_precision,
    "nextafter": _nextafter,
    "copy": _identity,
    "stop_gradient": _identity,
    **RANDOM_ENTRIES,
}

# Operations so expensive that their result is kept, in a row buffer or memory, not recomputed.
EXPENSIVE = frozenset(
    "div rem sqrt rsqrt cbrt pow exp exp2 expm1 log log1p sin cos tan asin acos atan atan2 sinh "
    "cosh tanh asinh acosh atanh logistic erf erfc erf_inv lgamma digamma threefry2x32".split()
)


@functools.cache
def storage_dtype(dtype: np.dtype) -> str | None:
    """The kernel dtype in which elements are moved.

    Typed keys travel as words of their size, and elements of small dtypes as bytes. Keys of more
    than 64 bits have no kernel: the host moves them.
    """
    if dtypes.is_small(dtype):
        return "u8"
    found = kernel_dtype(dtype)
    if found is None and dtypes.is_key(dtype):
        return {4: "u32", 8: "u64"}.get(dtype.itemsize)
    return found


def is_elementwise(name: str) -> bool:
    """Whether a primitive computes each result element from the operands' elements there."""
    return name in ENTRIES


def can_lower(eqn: Eqn) -> bool:
    """Whether an elementwise equation has kernel operations for its dtypes and parameters."""
    if eqn.prim.name not in ENTRIES:
        return False
    shapes = {v.aval.shape for v in eqn.invars if v.aval.shape}
    if len(shapes) > 1 or len(eqn.outvars) != 1:
        return False
    if eqn.prim.name == "convert_element_type" and _is_small_conversion(eqn):
        return False
    given = tuple(storage_dtype(v.aval.dtype) for v in eqn.invars)
    out = storage_dtype(eqn.outvars[0].aval.dtype)
    if out is None or None in given:
        return False
    params = tuple(sorted((k, v) for k, v in eqn.params.items() if not k.startswith("_")))
    return _can_lower(eqn.prim.name, given, params, out)


def _is_small_conversion(eqn: Eqn) -> bool:
    """Whether a conversion is from or to a dtype that kernels only move."""
    return any(dtypes.is_small(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars))


@functools.lru_cache(maxsize=4096)
def _can_lower(name: str, given: tuple[str, ...], params: tuple[Any, ...], out: str) -> bool:
    op = _SINGLE.get(name)
    if op is not None:
        return result_dtype(op, given, "") == out and supports(op, given, out)
    b = Builder((1,), ())
    result = b.arg(out, 1, "out")
    with b.row():
        values = [b.const(0, dtype) for dtype in given]
        try:
            made = ENTRIES[name](b, values, dict(params), out)
        except NoKernelError:
            return False
        if b.dtype(made) != out:
            return False
        b.store(result, (1,), made)
    (step,) = b.build().passes
    dtypes = {instr.out: instr.dtype for instr in step.instrs}
    return all(
        supports(instr.op, [dtypes[v] for v in instr.operands], instr.dtype)
        for instr in step.instrs
        if isinstance(instr, Op)
    )
