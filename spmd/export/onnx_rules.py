"""Elementwise operations, shapes and reductions as ONNX operators.

Most are one operator of another name. Operations that ONNX lacks are written with others, as
exactly (`log1p`, `expm1`); dtypes that an operator does not take go through a wider one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.core.ir import Eqn
from spmd.export.onnx_graph import BEFORE_START, RULES, Graph, Rule, refused, rule
from spmd.lax.arithmetic import RoundingMethod

# ---- one operator each -------------------------------------------------------------------------

_SAME = {
    "sign": "Sign", "abs": "Abs", "floor": "Floor", "ceil": "Ceil", "sqrt": "Sqrt",
    "exp": "Exp", "log": "Log", "sin": "Sin", "cos": "Cos", "tan": "Tan", "asin": "Asin",
    "acos": "Acos", "atan": "Atan", "sinh": "Sinh", "cosh": "Cosh", "tanh": "Tanh",
    "asinh": "Asinh", "acosh": "Acosh", "atanh": "Atanh", "logistic": "Sigmoid", "erf": "Erf",
    "add": "Add", "add_any": "Add", "sub": "Sub", "mul": "Mul", "pow": "Pow",
    "eq": "Equal", "copy": "Identity", "stop_gradient": "Identity",
}  # fmt: skip
_ORDER = {"lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual"}
_LOGIC = {"and": ("And", "BitwiseAnd"), "or": ("Or", "BitwiseOr"), "xor": ("Xor", "BitwiseXor")}


def _operator(op: str) -> Rule:
    return lambda g, eqn, xs: g.op(op, *xs)


RULES.update({name: _operator(op) for name, op in _SAME.items()})


def _dtype(eqn: Eqn, k: int = 0) -> np.dtype:
    return eqn.invars[k].aval.dtype


def _number(g: Graph, eqn: Eqn, value: float) -> str:
    return g.scalar(value, _dtype(eqn))


@rule("ne")
def _ne(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    return g.op("Not", g.op("Equal", *xs))


@rule(*_ORDER)
def _order(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    if dtypes.is_bool(_dtype(eqn)):
        xs = [g.cast(x, np.int32) for x in xs]
    return g.op(_ORDER[eqn.prim.name], *xs)


@rule(*_LOGIC)
def _logic(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    return g.op(_LOGIC[eqn.prim.name][not dtypes.is_bool(_dtype(eqn))], *xs)


@rule("not")
def _not(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    return g.op("Not" if dtypes.is_bool(_dtype(eqn)) else "BitwiseNot", *xs)


@rule("max", "min")
def _extreme(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    largest = eqn.prim.name == "max"
    if dtypes.is_bool(_dtype(eqn)):
        return g.op("Or" if largest else "And", *xs)
    return g.op("Max" if largest else "Min", *xs)


@rule("clamp")
def _clamp(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    low, x, high = xs
    return g.op("Min", g.op("Max", x, low), high)


@rule("div", "rem")
def _divide(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    def divided(x: str, y: str) -> str:
        return g.op("Div", x, y) if eqn.prim.name == "div" else g.op("Mod", x, y, fmod=1)

    if dtypes.is_inexact(_dtype(eqn)):
        return divided(*xs)
    # An integer divided by zero has all bits set; the remainder is the integer itself.
    x, y = xs
    zero = g.op("Equal", y, _number(g, eqn, 0))
    whole = divided(x, g.op("Where", zero, _number(g, eqn, 1), y))
    bits = g.scalar(-1 if _dtype(eqn).kind == "i" else np.iinfo(_dtype(eqn)).max, _dtype(eqn))
    return g.op("Where", zero, bits if eqn.prim.name == "div" else x, whole)


@rule("shift_left", "shift_right_logical", "shift_right_arithmetic")
def _shift(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    dtype = _dtype(eqn)
    left = eqn.prim.name == "shift_left"
    unsigned = np.dtype(f"u{dtype.itemsize}")
    x, amount = xs
    down = None
    if eqn.prim.name == "shift_right_arithmetic" and dtype.kind == "i":
        # A negative number is complemented, shifted, and complemented again.
        down = g.op("Less", x, _number(g, eqn, 0))
        x = g.op("Where", down, g.op("BitwiseNot", x), x)
    bits = [g.cast(x, unsigned), g.cast(amount, unsigned)]
    out = g.cast(g.op("BitShift", *bits, direction="LEFT" if left else "RIGHT"), dtype)
    over = g.op("GreaterOrEqual", bits[1], g.scalar(8 * dtype.itemsize, unsigned))
    out = g.op("Where", over, _number(g, eqn, 0), out)
    return out if down is None else g.op("Where", down, g.op("BitwiseNot", out), out)


# ---- a formula each ----------------------------------------------------------------------------


@rule("select_n")
def _select_n(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    which, first, *others = xs
    dtype = eqn.outvars[0].aval.dtype
    if dtypes.is_bool(_dtype(eqn)):
        return chosen(g, dtype, which, others[0], first)
    out = first
    for k, x in enumerate(others, 1):
        here = g.op("GreaterOrEqual", which, g.scalar(k, np.int32))
        out = chosen(g, dtype, here, x, out)
    return out


def chosen(g: Graph, dtype: Any, condition: str, x: str, y: str) -> str:
    """x where the condition holds and y elsewhere; runtimes have no `Where` of bools."""
    if not dtypes.is_bool(dtype):
        return g.op("Where", condition, x, y)
    return g.op("Or", g.op("And", condition, x), g.op("And", g.op("Not", condition), y))


@rule("neg")
def _neg(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    if _dtype(eqn).kind == "u":
        return g.op("Sub", _number(g, eqn, 0), *xs)
    return g.op("Neg", *xs)


@rule("square")
def _square(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    return g.op("Mul", xs[0], xs[0])


@rule("integer_pow")
def _integer_pow(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    exponent, power, out = abs(eqn.params["y"]), xs[0], None
    while exponent:
        if exponent & 1:
            out = power if out is None else g.op("Mul", out, power)
        exponent >>= 1
        power = g.op("Mul", power, power) if exponent else power
    if out is None:
        return g.expand(_number(g, eqn, 1), eqn.outvars[0].aval.shape)
    return g.op("Reciprocal", out) if eqn.params["y"] < 0 else out


@rule("rsqrt")
def _rsqrt(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    return g.op("Reciprocal", g.op("Sqrt", *xs))


@rule("cbrt")
def _cbrt(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    root = g.op("Pow", g.op("Abs", *xs), _number(g, eqn, 1 / 3))
    return g.op("Mul", g.op("Sign", *xs), root)


@rule("exp2")
def _exp2(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    return g.op("Pow", _number(g, eqn, 2), *xs)


@rule("expm1")
def _expm1(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    # tanh(x/2) (exp(x) + 1) loses no digit near zero.
    half = g.op("Tanh", g.op("Mul", *xs, _number(g, eqn, 0.5)))
    return g.op("Mul", half, g.op("Add", g.op("Exp", *xs), _number(g, eqn, 1)))


@rule("log1p")
def _log1p(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    # Kahan's: the quotient puts the rounding error of 1 + x back.
    (x,) = xs
    one = _number(g, eqn, 1)
    above = g.op("Add", x, one)
    quotient = g.op("Div", x, g.op("Sub", above, one))
    value = g.op("Mul", g.op("Log", above), quotient)
    endless = g.op("Equal", x, _number(g, eqn, np.inf))
    return g.op("Where", g.op("Or", endless, g.op("Equal", above, one)), x, value)


@rule("erfc")
def _erfc(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    return g.op("Sub", _number(g, eqn, 1), g.op("Erf", *xs))


@rule("atan2")
def _atan2(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    y, x = xs
    zero = _number(g, eqn, 0)
    turn = g.op("Where", g.op("Less", y, zero), _number(g, eqn, -np.pi), _number(g, eqn, np.pi))
    angle = g.op("Atan", g.op("Div", y, x))
    angle = g.op("Where", g.op("Less", x, zero), g.op("Add", angle, turn), angle)
    undefined = g.op("And", g.op("Equal", x, zero), g.op("Equal", y, zero))
    return g.op("Where", undefined, zero, angle)


@rule("round")
def _round(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    if eqn.params["rounding_method"] == RoundingMethod.TO_NEAREST_EVEN:
        return g.op("Round", *xs)
    up = g.op("Floor", g.op("Add", g.op("Abs", *xs), _number(g, eqn, 0.5)))
    return g.op("Mul", g.op("Sign", *xs), up)


@rule("is_finite")
def _is_finite(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    return g.op("Equal", g.op("Sub", *xs, *xs), _number(g, eqn, 0))


@rule("convert_element_type")
def _convert(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    source, target = _dtype(eqn), eqn.outvars[0].aval.dtype
    if source == target:
        return g.op("Identity", *xs)
    if target.kind == "u" and dtypes.is_float(source):  # negative ones wrap, as integers do
        xs = [g.cast(xs[0], np.int64)]
    return g.cast(xs[0], target)


@rule("optimization_barrier")
def _barrier(g: Graph, eqn: Eqn, xs: list[str]) -> list[str]:
    return xs


# ---- shapes ------------------------------------------------------------------------------------


@rule("broadcast_in_dim")
def _broadcast(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    shape = eqn.outvars[0].aval.shape
    old = eqn.invars[0].aval.shape
    x = g.spread(xs[0], eqn.params["broadcast_dimensions"], shape, old)
    return g.expand(x, shape)


@rule("reshape")
def _reshape(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    return g.reshape(xs[0], eqn.outvars[0].aval.shape)


@rule("squeeze")
def _squeeze(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    return g.op("Squeeze", xs[0], g.ints(*eqn.params["dimensions"]))


@rule("permute_dims")
def _permute_dims(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    return g.op("Transpose", xs[0], perm=[int(d) for d in eqn.params["permutation"]])


@rule("rev")
def _rev(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    return reversed_along(g, xs[0], eqn.params["dimensions"])


def reversed_along(g: Graph, x: str, dims: Sequence[int]) -> str:
    """x backwards along some dims."""
    n = len(dims)
    ends = g.ints(*[BEFORE_START] * n)
    return g.op("Slice", x, g.ints(*[-1] * n), ends, g.ints(*dims), g.ints(*[-1] * n))


@rule("slice")
def _slice(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(starts)
    rows = [g.ints(*row) for row in (starts, limits, range(len(starts)), strides)]
    return g.op("Slice", *xs, *rows)


@rule("concatenate")
def _concatenate(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    return g.op("Concat", *xs, axis=int(eqn.params["dimension"]))


@rule("split")
def _split(g: Graph, eqn: Eqn, xs: list[str]) -> list[str]:
    sizes, axis = g.ints(*eqn.params["sizes"]), int(eqn.params["axis"])
    return g.several("Split", [xs[0], sizes], len(eqn.outvars), axis=axis)


@rule("iota")
def _iota(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    aval, d = eqn.outvars[0].aval, eqn.params["dimension"]
    numbers = g.count(aval.shape[d], aval.dtype)
    return g.expand(g.spread(numbers, (d,), aval.shape, (aval.shape[d],)), aval.shape)


@rule("pad")
def _pad(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    return padded(g, xs[0], eqn.invars[0].aval.shape, xs[1], eqn.params["padding_config"])


def padded(
    g: Graph, x: str, shape: Sequence[int], value: str, config: Sequence[tuple[int, int, int]]
) -> str:
    """x with (low, high, interior) padding of each dim; negative padding cuts."""
    sizes = list(shape)
    for d, (_, _, interior) in enumerate(config):
        if interior and sizes[d]:
            # Each element with its followers becomes a row; the last row's end is cut.
            x = g.reshape(x, [*sizes[: d + 1], 1, *sizes[d + 1 :]])
            ends = [0] * (2 * len(sizes) + 2)
            ends[len(sizes) + 1 + d + 1] = interior
            x = g.op("Pad", x, g.ints(*ends), value)
            x = g.reshape(x, [*sizes[:d], sizes[d] * (1 + interior), *sizes[d + 1 :]])
            x = g.op("Slice", x, g.ints(0), g.ints(-interior), g.ints(d))
            sizes[d] = sizes[d] * (1 + interior) - interior
    lows, highs = [low for low, _, _ in config], [high for _, high, _ in config]
    if any(n > 0 for n in (*lows, *highs)):
        grown = [max(n, 0) for n in (*lows, *highs)]
        x = g.op("Pad", x, g.ints(*grown), value)
    cut = [d for d, (low, high, _) in enumerate(config) if low < 0 or high < 0]
    for d in cut:
        end = min(highs[d], 0) or 2**62
        x = g.op("Slice", x, g.ints(max(-lows[d], 0)), g.ints(end), g.ints(d))
    return x


# ---- reductions --------------------------------------------------------------------------------

_REDUCE = {
    "reduce_sum": "ReduceSum", "reduce_prod": "ReduceProd", "reduce_max": "ReduceMax",
    "reduce_min": "ReduceMin", "reduce_and": "ReduceMin", "reduce_or": "ReduceMax",
    "reduce_xor": "ReduceSum",
}  # fmt: skip


def in_wider(
    g: Graph, dtype: np.dtype, x: str, f: Callable[[str], str], narrow: str = "bi1i2u1u2"
) -> str:
    """f(x), computed in int32 for dtypes that the operator does not take."""
    if dtype.kind == "b" or dtype.str[1:] in narrow:
        return g.cast(f(g.cast(x, np.int32)), dtype)
    return f(x)


@rule(*_REDUCE)
def _reduce(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    name, axes, dtype = eqn.prim.name, eqn.params["axes"], _dtype(eqn)
    if name in ("reduce_and", "reduce_or", "reduce_xor") and not dtypes.is_bool(dtype):
        raise refused(eqn, "of integers has no form in ONNX; of bools it has")
    if not axes:
        return g.op("Identity", *xs)

    def reduce(x: str) -> str:
        out = g.op(_REDUCE[name], x, g.ints(*axes), keepdims=0)
        return g.op("Mod", out, g.scalar(2, np.int32)) if name == "reduce_xor" else out

    return in_wider(g, dtype, xs[0], reduce)


@rule("argmax", "argmin")
def _argument(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    (axis,) = eqn.params["axes"]
    op = "ArgMax" if eqn.prim.name == "argmax" else "ArgMin"
    x = g.cast(xs[0], np.int32) if dtypes.is_bool(_dtype(eqn)) else xs[0]
    found = g.op(op, x, axis=int(axis), keepdims=0)
    return g.cast(found, eqn.outvars[0].aval.dtype)


@rule("cumsum")
def _cumsum(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    axis = g.scalar(int(eqn.params["axis"]), np.int64)
    backwards = int(eqn.params["reverse"])
    return in_wider(g, _dtype(eqn), xs[0], lambda x: g.op("CumSum", x, axis, reverse=backwards))


@rule("cummax", "cummin", "cumprod")
def _cumulative(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    """By doubling: after k steps an element has seen 2^k of those before it."""
    aval, axis = eqn.invars[0].aval, eqn.params["axis"]
    op = {"cummax": "Max", "cummin": "Min", "cumprod": "Mul"}[eqn.prim.name]
    x = reversed_along(g, xs[0], (axis,)) if eqn.params["reverse"] else xs[0]
    step = 1
    while step < aval.shape[axis]:
        head = g.op("Slice", x, g.ints(0), g.ints(step), g.ints(axis))
        late = g.op("Slice", x, g.ints(step), g.ints(2**62), g.ints(axis))
        early = g.op("Slice", x, g.ints(0), g.ints(-step), g.ints(axis))
        x = g.op("Concat", head, g.op(op, late, early), axis=int(axis))
        step *= 2
    return reversed_along(g, x, (axis,)) if eqn.params["reverse"] else x


# ---- order -------------------------------------------------------------------------------------


@rule("sort")
def _sort(g: Graph, eqn: Eqn, xs: list[str]) -> list[str]:
    if eqn.params["num_keys"] != 1:
        raise refused(eqn, f"by {eqn.params['num_keys']} keys has no form in ONNX; by one it has")
    axis = int(eqn.params["dimension"])
    first, *others = xs
    values, order = _largest(g, eqn, first, eqn.invars[0].aval.shape[axis], axis, 0)
    moved = [g.op("GatherElements", x, order, axis=axis) for x in others]
    return [values, *moved]


@rule("top_k")
def _top_k(g: Graph, eqn: Eqn, xs: list[str]) -> list[str]:
    values, order = _largest(g, eqn, xs[0], eqn.params["k"], int(eqn.params["axis"]), 1)
    return [values, g.cast(order, eqn.outvars[1].aval.dtype)]


def _largest(g: Graph, eqn: Eqn, x: str, k: int, axis: int, largest: int) -> list[str]:
    dtype = _dtype(eqn)
    x = g.cast(x, np.int32) if dtypes.is_bool(dtype) else x
    values, order = g.several("TopK", [x, g.ints(k)], 2, axis=axis, largest=largest, sorted=1)
    return [g.cast(values, dtype) if dtypes.is_bool(dtype) else values, order]
