"""Attention, `softmax(scale * query @ key.T + bias) @ value`, by blocks that never hold all scores.

The one idea: the derivative of attention can be computed from its result and each query's
logsumexp, so the three primitives here (the function, its tangent, and the transpose of that)
know each other, and two of them have programs that go by blocks (`attention_blocks`). Derivatives
of higher order, and of the bias, are those of the formula.

Dims: B batch, K key heads, G query heads for each, T queries, S keys, H features. A bias and masks
have these five without the features, each either whole or 1: (B, K, G, T, S).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from spmd.base.config import config
from spmd.base.util import split_list
from spmd.core.aval import ShapedArray, typeof
from spmd.core.axis import cast_to_vma
from spmd.core.call import impl_jaxpr
from spmd.core.explicit import typed_results
from spmd.core.ir import ClosedJaxpr
from spmd.core.jvp import instantiate, jvp_flat
from spmd.core.primitive import Linear, Primitive, Refused, Zero
from spmd.core.rewrite import close
from spmd.core.structural import broadcast_in_dim, reduce_sum, reshape, to_front
from spmd.lax.arithmetic import add, div, log, mul, sub
from spmd.lax.array import broadcasted_iota, full
from spmd.lax.attention_blocks import Attention, attend, attend_grad, weigh, wide
from spmd.lax.convert import convert_element_type
from spmd.lax.dot import dot_general
from spmd.lax.elementwise import exp
from spmd.lax.logic import select
from spmd.lax.reduce import reduce_max

_NO_DIMS = Refused("attention is expanded before it is partitioned")


def attention_and_residual(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    masks: Sequence[Any] = (),
    *,
    scale: float,
    causal: bool = False,
    window: tuple[int, int] | None = None,
) -> tuple[Any, Any]:
    """Attention of query (B, K, G, T, H) to key and value (B, K, S, H), in value's dtype.

    The second result is the logsumexp of each query's scores (B, K, G, T).

    Scores and weights are float32, or float64 for such queries. A query sees the keys where all
    `masks` (bool) are true, those up to its own position if `causal`, and in a `window` so many
    positions before and behind it; if it sees none, it takes the average of all values.
    """
    extras = [*([] if bias is None else [bias]), *masks]
    spec = Attention(float(scale), causal, window, bias is not None, len(masks))
    out, top, rest = bind_attention(attention_p, query, key, value, *extras, spec=spec)
    return out, add(top, rest)


def bind_attention(prim: Primitive, *operands: Any, spec: Attention) -> Any:
    """Apply one of the primitives below; the jaxpr that is compiled for it follows from types."""
    # All vary over the mesh axes that any varies over; the casts' transposes add cotangents up.
    axes = frozenset().union(*(typeof(x).vma for x in operands))
    operands = tuple(cast_to_vma(x, axes, typeof(x).vma) for x in operands)
    avals = tuple(typeof(x).strip_weak().strip_sharding() for x in operands)
    jaxpr = _program(prim.name, spec, avals, config.default_matmul_precision)
    return prim.bind(*operands, spec=spec, jaxpr=jaxpr)


@lru_cache(maxsize=256)
def _program(
    name: str, spec: Attention, avals: tuple[ShapedArray, ...], precision: str | None
) -> ClosedJaxpr:
    """The jaxpr that is compiled for one of the primitives, whose products have the precision that
    is set."""
    return close(partial(_PROGRAMS[name], spec), avals, name)


# ---- the formula -------------------------------------------------------------------------------


def _formula(spec: Attention, q: Any, k: Any, v: Any, *extras: Any) -> list[Any]:
    """`[out, top, rest]` by way of all scores; top + rest is the logsumexp."""
    scores, _ = _scores(spec, q, k, extras)
    top = reduce_max(scores, (4,))
    weights = exp(sub(scores, _beside(top, scores)))
    total = reduce_sum(weights, (4,))
    weights = convert_element_type(div(weights, _beside(total, weights)), typeof(v).dtype)
    return [_dot(weights, v, 4, 2, typeof(v).dtype), top, log(total)]


def _tangent_formula(spec: Attention, *operands: Any) -> list[Any]:
    """Tangents of out and of the logsumexp; the operands are those of `attention_tangent`."""
    (q, k, v, top, rest, _, dq, dk, dv), extras = split_list(operands, [9])
    scores, seen = _scores(spec, q, k, extras)
    weights = weigh(scores, _beside(top, scores), _beside(rest, scores))
    moved = add(_dot(dq, k, 4, 3), _dot(q, dk, 4, 3))
    moved = _if_seen(seen, mul(moved, typeof(moved).dtype.type(spec.scale)))
    dlse = reduce_sum(mul(weights, moved), (4,))
    slope = mul(weights, sub(moved, _beside(dlse, moved)))
    narrow = typeof(v).dtype
    parts = [(slope, v), (weights, dv)]
    out = [_dot(convert_element_type(w, narrow), x, 4, 2) for w, x in parts]
    return [convert_element_type(add(*out), narrow), dlse]


def _grad_formula(spec: Attention, *operands: Any) -> list[Any]:
    """Cotangents of query, key and value; the operands are those of `attention_grad`."""
    (q, k, v, top, rest, delta, ct), extras = split_list(operands, [7])
    scores, seen = _scores(spec, q, k, extras)
    weights = weigh(scores, _beside(top, scores), _beside(rest, scores))
    slope = mul(weights, sub(_dot(ct, v, 4, 3), _beside(delta, scores)))
    slope = _if_seen(seen, mul(slope, typeof(slope).dtype.type(spec.scale)))
    slope = convert_element_type(slope, typeof(q).dtype)
    weights = convert_element_type(weights, typeof(ct).dtype)
    # (B, K, H, S): over query heads and queries at once.
    dk, dv = (_over_queries(x, y) for x, y in ((slope, q), (weights, ct)))
    narrow = typeof(q).dtype
    return [convert_element_type(x, narrow) for x in (_dot(slope, k, 4, 2), dk, dv)]


def _scores(spec: Attention, q: Any, k: Any, extras: Sequence[Any]) -> tuple[Any, Any]:
    products = _dot(q, k, 4, 3)
    shape = typeof(products).shape
    given = [broadcast_in_dim(x, shape, range(5)) for x in extras]
    index = np.dtype(np.int32)
    return spec.scored(
        products,
        given,
        lambda: broadcasted_iota(index, shape, 3),
        lambda: broadcasted_iota(index, shape, 4),
    )


def _dot(x: Any, y: Any, left: int, right: int, dtype: Any = None) -> Any:
    """(B, K, G, T, *) by (B, K, *, *), summed over one dim of each; wide by default."""
    numbers = (((left,), (right,)), ((0, 1), (0, 1)))
    out = dot_general(x, y, numbers, preferred_element_type=wide(x))
    return out if dtype is None else convert_element_type(out, dtype)


def _over_queries(x: Any, y: Any) -> Any:
    """(B, K, G, T, S) and (B, K, G, T, H) to (B, K, S, H)."""
    numbers = (((2, 3), (2, 3)), ((0, 1), (0, 1)))
    return dot_general(x, y, numbers, preferred_element_type=wide(x))


def _beside(rows: Any, like: Any) -> Any:
    return broadcast_in_dim(rows, typeof(like).shape, range(4))


def _if_seen(seen: Any, x: Any) -> Any:
    return x if seen is None else select(seen, x, full(typeof(x).shape, 0, typeof(x).dtype))


# ---- rules -------------------------------------------------------------------------------------


def _batch(prim: Primitive, batched: int, outs: int) -> Callable[..., Any]:
    """vmap joins its dim with the batch dim; the first `batched` operands have that dim whole."""

    def rule(axis: Any, operands: Any, at: Any, *, spec: Attention, jaxpr: ClosedJaxpr) -> Any:
        joined = []
        for k, (x, d) in enumerate(zip(operands, at, strict=True)):
            whole = d is not None or k < batched or typeof(x).shape[0] > 1
            joined.append(_join(to_front(x, d, axis.size)) if whole else x)
        size = typeof(joined[0]).shape[0]
        # An extra that is 1 along the batch, but differs along the new dim, is repeated there.
        for k, x in enumerate(joined):
            if k >= batched and typeof(x).shape[0] not in (1, size):
                joined[k] = _repeated(x, size)
        found = bind_attention(prim, *joined, spec=spec)
        shapes = [(axis.size, size // axis.size, *typeof(x).shape[1:]) for x in found]
        return [reshape(x, s) for x, s in zip(found, shapes, strict=True)], [0] * outs

    return rule


def _join(x: Any) -> Any:
    first, second, *rest = typeof(x).shape
    return reshape(x, (first * second, *rest))


def _repeated(x: Any, size: int) -> Any:
    count, *rest = typeof(x).shape
    wide = broadcast_in_dim(x, (count, size // count, *rest), (0, *range(2, 2 + len(rest))))
    return reshape(wide, (size, *rest))


def _along(formula: Callable[..., list[Any]]) -> Callable[..., Any]:
    """The jvp rule of the formula itself."""

    def rule(primals: Any, tangents: Any, *, spec: Attention, jaxpr: ClosedJaxpr) -> Any:
        return jvp_flat(partial(formula, spec), primals, tangents)

    return rule


def _jvp(primals: Any, tangents: Any, *, spec: Attention, jaxpr: ClosedJaxpr) -> Any:
    if not all(isinstance(t, Zero) for t in tangents[3:]):  # the bias has one
        return jvp_flat(partial(_formula, spec), primals, tangents)
    (q, k, v), extras = split_list(primals, [3])
    out, top, rest = attention_p.bind(*primals, spec=spec, jaxpr=jaxpr)
    moving = [instantiate(t) for t in tangents[:3]]
    operands = [q, k, v, top, rest, out, *moving, *extras]
    dout, dlse = bind_attention(attention_tangent_p, *operands, spec=spec)
    # Only the sum of top and rest is ever used, so all of its tangent may be that of rest.
    return [out, top, rest], [dout, Zero(typeof(top)), dlse]


def _transpose(cts: Any, *operands: Any, spec: Attention, jaxpr: ClosedJaxpr) -> list[Any]:
    (q, k, v, top, rest, out, *moving), extras = split_list(operands, [9])
    ct, ct_lse = cts
    ct = instantiate(ct)
    delta = reduce_sum(mul(*(convert_element_type(x, wide(x)) for x in (ct, out))), (4,))
    if not isinstance(ct_lse, Zero):
        delta = sub(delta, ct_lse)
    found = bind_attention(attention_grad_p, q, k, v, top, rest, delta, ct, *extras, spec=spec)
    wanted = [x if isinstance(m, Linear) else None for x, m in zip(found, moving, strict=True)]
    return [*[None] * 6, *wanted, *[None] * len(extras)]


def _primitive(name: str, formula: Callable[..., Any], jvp: Any, transpose: Any) -> Primitive:
    def results(*avals: ShapedArray, spec: Attention, jaxpr: ClosedJaxpr) -> list[ShapedArray]:
        return typed_results(prim, avals, jaxpr.out_avals, {})

    prim = Primitive(
        name,
        abstract=results,
        impl=lambda xp, *operands, spec, jaxpr: impl_jaxpr(
            xp, _formula_program(formula, spec, tuple(map(typeof, operands))), *operands
        ),
        jvp=jvp,
        transpose=transpose,
        batch=lambda axis, operands, at, **params: _BATCH[name](axis, operands, at, **params),
        dims=_NO_DIMS,
        multiple=True,
        vma="given",
        expand=lambda avals, params: params["jaxpr"],
    )
    return prim


@lru_cache(maxsize=256)
def _formula_program(formula: Any, spec: Attention, avals: tuple[ShapedArray, ...]) -> ClosedJaxpr:
    return close(partial(formula, spec), avals, "attention")


def attention_formula(spec: Attention, avals: tuple[ShapedArray, ...]) -> ClosedJaxpr:
    """The definition of `attention`, by way of all scores: for exports, which need no blocks."""
    return _formula_program(_formula, spec, avals)


_NOT_LINEAR = Refused("attention is not linear; differentiate it with grad, which uses its jvp")

# query, key, value, extras... -> out (B, K, G, T, H), top and rest (B, K, G, T)
attention_p = _primitive("attention", _formula, _jvp, _NOT_LINEAR)

# query, key, value, top, rest, out, tangents of the first three, extras... -> tangents
attention_tangent_p = _primitive(
    "attention_tangent", _tangent_formula, _along(_tangent_formula), _transpose
)

# query, key, value, top, rest, delta, cotangent of out, extras... -> cotangents of the first three
attention_grad_p = _primitive("attention_grad", _grad_formula, _along(_grad_formula), _NOT_LINEAR)

_PROGRAMS = {
    "attention": attend,
    "attention_tangent": _tangent_formula,
    "attention_grad": attend_grad,
}
_BATCH = {
    "attention": _batch(attention_p, 3, 3),
    "attention_tangent": _batch(attention_tangent_p, 9, 2),
    "attention_grad": _batch(attention_grad_p, 7, 3),
}
