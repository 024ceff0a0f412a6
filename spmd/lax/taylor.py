"""Taylor mode's own rules: products by Leibniz, quotients and exponentials by recurrences.

Every primitive with a jvp rule goes through `jet` (`core/jet.py`); these here go at less cost. A
series is the list of a value and its derivatives, `[x, x', x'', ...]`, in which None is zero. If
`y' = u(y) x'`, the derivatives of y follow from those of x and from the ones of y that are known
already (Griewank and Walther, Evaluating Derivatives, section 13.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.core.aval import typeof
from spmd.core.call import jit_p
from spmd.core.custom_vjp import custom_vjp_call_p
from spmd.core.jet import Terms, by_derivative, by_output, is_constant, jet_flat, rules
from spmd.core.jvp import apply_jvp, is_float0
from spmd.core.primitive import Primitive, Zero
from spmd.core.remat import checkpoint_p
from spmd.core.rewrite import eval_closed
from spmd.core.structural import add_any
from spmd.lax import arithmetic as a
from spmd.lax import elementwise as e
from spmd.lax.array import full_like
from spmd.lax.conv import conv_general_dilated_p
from spmd.lax.convert import convert_element_type_p, stop_gradient_p
from spmd.lax.cumulative import cummax_p, cummin_p
from spmd.lax.dot import dot_general_p
from spmd.lax.dynamic import dynamic_slice_p, dynamic_update_slice_p
from spmd.lax.families import const, spread
from spmd.lax.gather import gather_p, scatter_add_p
from spmd.lax.logic import clamp_p, select_n_p
from spmd.lax.reduce import reduce_max_p, reduce_min_p
from spmd.lax.reduce_window import reduce_window_max_p, reduce_window_min_p
from spmd.lax.scatter import scatter_max_p, scatter_min_p, scatter_p
from spmd.lax.sort import sort_p, top_k_p

Series = Sequence[Any]
Product = Callable[[Any, Any], Any]

# ---- sums of products --------------------------------------------------------------------------


def leibniz(x: Series, y: Series, order: int, times: Product, first: int = 0, last: int = 0) -> Any:
    """The derivative of a product: the sum of `C(order, j) x[j] y[order - j]`; None is zero.

    `first` and `last` terms are left out at the ends of the sum.
    """
    total = None
    for j in range(first, order + 1 - last):
        if x[j] is None or y[order - j] is None:
            continue
        term = times(x[j], y[order - j])
        ways = math.comb(order, j)
        term = term if ways == 1 else a.mul(term, const(term, ways))
        total = term if total is None else add_any(total, term)
    return total


def _minus(x: Any, y: Any) -> Any:
    """x - y, where None is zero."""
    if y is None:
        return x
    return a.neg(y) if x is None else a.sub(x, y)


def _shaped(terms: Sequence[Any], out: Any) -> Terms:
    """Terms of the shape of the result: a scalar operand has scalar terms."""
    shape = typeof(out).shape
    return [None if t is None else spread(t, shape) for t in terms]


def _by_leibniz(prim: Primitive, primals: Any, series: Any, params: Any) -> tuple[Any, Terms]:
    """A product of any kind: linear in each of its two operands."""
    times = lambda x, y: prim.bind(x, y, **params)  # noqa: E731
    x, y = ([p, *terms] for p, terms in zip(primals, series, strict=True))
    out = times(*primals)
    return out, _terms(out, lambda k: leibniz(x, y, k, times), len(x))


def _terms(out: Any, term: Callable[[int], Any], count: int) -> Terms:
    return _shaped([term(k) for k in range(1, count)], out)


for _prim in (a.mul_p, dot_general_p, conv_general_dilated_p):
    rules[_prim] = _by_leibniz

# ---- arithmetic --------------------------------------------------------------------------------


def _add(prim: Primitive, primals: Any, series: Any, params: Any) -> tuple[Any, Terms]:
    out = prim.bind(*primals)
    negative = prim is a.sub_p
    terms: Terms = []
    for x, y in zip(*series, strict=True):
        if x is not None and y is not None:
            terms.append(prim.bind(x, y))
        elif y is not None and negative:
            terms.append(a.neg(y))
        else:
            terms.append(y if x is None else x)
    return out, _shaped(terms, out)


def _quotient(x: Series, y: Series) -> list[Any]:
    """The series of x / y: those of `q y = x`, solved for the last term of q."""
    q: list[Any] = [a.div(x[0], y[0])]
    for k in range(1, len(x)):
        rest = _minus(x[k], leibniz(q, y, k, a.mul, last=1))
        q.append(None if rest is None else a.div(rest, y[0]))
    return q


def _div(prim: Primitive, primals: Any, series: Any, params: Any) -> tuple[Any, Terms]:
    x, y = ([p, *terms] for p, terms in zip(primals, series, strict=True))
    out, *terms = _quotient(x, y)
    return out, _shaped(terms, out)


def _square(prim: Primitive, primals: Any, series: Any, params: Any) -> tuple[Any, Terms]:
    x = [primals[0], *series[0]]
    return prim.bind(x[0]), [leibniz(x, x, k, a.mul) for k in range(1, len(x))]


def _times(x: Series, y: Series) -> list[Any]:
    return [leibniz(x, y, k, a.mul) for k in range(len(x))]


def _integer_pow(prim: Primitive, primals: Any, series: Any, params: Any) -> tuple[Any, Terms]:
    """Repeated multiplication of whole series, which is right at zero too."""
    x, power = [primals[0], *series[0]], params["y"]
    one = [full_like(x[0], 1), *[None] * len(series[0])]
    left, out, factor = abs(power), one, x
    while left:
        if left & 1:
            out = factor if out is one else _times(out, factor)
        left >>= 1
        if left:
            factor = _times(factor, factor)
    if power < 0:
        out = _quotient(one, out)
    return prim.bind(x[0], y=power), out[1:]


def _sqrt(prim: Primitive, primals: Any, series: Any, params: Any) -> tuple[Any, Terms]:
    x = [primals[0], *series[0]]
    y = [prim.bind(x[0])]
    twice = a.mul(y[0], const(y[0], 2))
    for k in range(1, len(x)):
        rest = _minus(x[k], leibniz(y, y, k, a.mul, 1, 1) if k > 1 else None)
        y.append(None if rest is None else a.div(rest, twice))
    return y[0], y[1:]


rules[a.add_p] = rules[a.sub_p] = _add
rules[a.div_p] = _div
rules[a.square_p] = _square
rules[a.integer_pow_p] = _integer_pow
rules[a.sqrt_p] = _sqrt

# ---- functions that solve y' = u(y) x' ---------------------------------------------------------


def _autonomous(slope: Callable[[Series, int], Any]) -> Callable[..., Any]:
    """The rule of a function whose derivative is given by its value: `slope(y, k)` is u's k-th."""

    def rule(prim: Primitive, primals: Any, series: Any, params: Any) -> tuple[Any, Terms]:
        moved = series[0]
        y, u = [prim.bind(*primals, **params)], []
        for k in range(len(moved)):
            u.append(slope(y, k))
            y.append(leibniz(moved, u, k, a.mul))
        return y[0], y[1:]

    return rule


def _self(y: Series, k: int) -> Any:
    return y[k]


def _self_and_one(y: Series, k: int) -> Any:
    return y[k] if k else a.add(y[0], const(y[0], 1))


def _self_times_ln2(y: Series, k: int) -> Any:
    return None if y[k] is None else a.mul(y[k], const(y[k], np.log(2.0)))


def _one_minus_square(y: Series, k: int) -> Any:
    squares = leibniz(y, y, k, a.mul)
    return _minus(None if k else const(y[0], 1), squares)


def _one_and_square(y: Series, k: int) -> Any:
    squares = leibniz(y, y, k, a.mul)
    return squares if k else a.add(squares, const(y[0], 1))


def _self_minus_square(y: Series, k: int) -> Any:
    if k == 0:
        return a.mul(y[0], a.sub(const(y[0], 1), y[0]))
    return _minus(y[k], leibniz(y, y, k, a.mul))


rules[e.exp_p] = _autonomous(_self)
rules[e.expm1_p] = _autonomous(_self_and_one)
rules[e.exp2_p] = _autonomous(_self_times_ln2)
rules[e.tanh_p] = _autonomous(_one_minus_square)
rules[e.tan_p] = _autonomous(_one_and_square)
rules[e.logistic_p] = _autonomous(_self_minus_square)


def _pair(other: Primitive, sign: int, back: int) -> Callable[..., Any]:
    """Two functions that are each other's derivative: `y' = sign z x'`, `z' = back y x'`."""

    def rule(prim: Primitive, primals: Any, series: Any, params: Any) -> tuple[Any, Terms]:
        moved = series[0]
        y, z = [prim.bind(*primals)], [other.bind(*primals)]
        for k in range(len(moved)):
            from_z, from_y = leibniz(moved, z, k, a.mul), leibniz(moved, y, k, a.mul)
            y.append(from_z if sign > 0 else _minus(None, from_z))
            z.append(from_y if back > 0 else _minus(None, from_y))
        return y[0], y[1:]

    return rule


rules[e.sin_p] = _pair(e.cos_p, 1, -1)
rules[e.cos_p] = _pair(e.sin_p, -1, 1)
rules[e.sinh_p] = _pair(e.cosh_p, 1, 1)
rules[e.cosh_p] = _pair(e.sinh_p, 1, 1)

# ---- functions without a second derivative -----------------------------------------------------


def _by_pieces(prim: Primitive, primals: Any, series: Any, params: Any) -> tuple[Any, Any]:
    """A function that is linear around almost every point: each order by the jvp rule."""
    out: Any = None
    columns = []
    for column in zip(*series, strict=True):
        if is_constant(list(column)):
            columns.append(None)
            continue
        pairs = zip(column, primals, strict=True)
        tangents = [Zero(typeof(x).tangent()) if t is None else t for t, x in pairs]
        out, found = apply_jvp(prim, primals, tangents, params)
        columns.append([_term(t) for t in found] if prim.multiple else _term(found))
    if not prim.multiple:
        return out, columns
    return out, by_output([[None] * len(out) if c is None else c for c in columns])


def _term(tangent: Any) -> Any:
    return None if isinstance(tangent, Zero) or is_float0(tangent) else tangent


def _abs(prim: Primitive, primals: Any, series: Any, params: Any) -> tuple[Any, Any]:
    curved = dtypes.is_complex(typeof(primals[0]).dtype)
    return (by_derivative if curved else _by_pieces)(prim, primals, series, params)


rules[a.abs_p] = _abs
for _prim in (
    *(a.max_p, a.min_p, a.rem_p, a.sign_p, a.floor_p, a.ceil_p, a.round_p, select_n_p, clamp_p),
    *(convert_element_type_p, stop_gradient_p, gather_p, dynamic_slice_p, dynamic_update_slice_p),
    *(scatter_p, scatter_add_p, scatter_min_p, scatter_max_p, sort_p, top_k_p),
    *(reduce_max_p, reduce_min_p, cummax_p, cummin_p, reduce_window_max_p, reduce_window_min_p),
):
    rules[_prim] = _by_pieces

# ---- calls -------------------------------------------------------------------------------------


def _inlined(prim: Primitive, primals: Any, series: Any, params: Any) -> tuple[Any, Any]:
    """A call is its body. A custom_vjp's rule is one for reverse mode: its body is used."""
    body = prim.stands_for((), params)
    return jet_flat(lambda *xs: eval_closed(body, *xs), primals, series, len(series[0]))


for _prim in (jit_p, checkpoint_p, custom_vjp_call_p):
    rules[_prim] = _inlined
