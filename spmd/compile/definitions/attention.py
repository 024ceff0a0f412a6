"""Attention by blocks, as steps whose scores are never in memory: one forward, two backward.

The steps see arrays as `dot_product_attention` has them, queries (B, T, K, G, H) and keys
(B, S, K, H): the permutations here cancel with those around the primitives of `lax/attention.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.base.util import split_list
from spmd.compile.definitions.product_precision import factors_of
from spmd.compile.definitions.table import defines
from spmd.compile.kernel.attention import (
    DTYPES,
    FORWARD,
    KEY_GRAD,
    MOST_FEATURES,
    QUERY_GRAD,
    READS,
)
from spmd.compile.kernel.dtypes import kernel_dtype, kind
from spmd.core.aval import ShapedArray, typeof
from spmd.core.ir import ClosedJaxpr, all_eqns
from spmd.core.primitive import internal_primitive
from spmd.core.structural import permute_dims
from spmd.lax.attention import attention_grad_p, attention_p
from spmd.lax.attention_blocks import Attention, attend, attend_grad
from spmd.lax.dot import dot_general_p
from spmd.lax.precision import DotAlgorithmPreset

# (B, T, K, G, H) to (B, K, G, T, H) and back; (B, S, K, H) to (B, K, S, H), and back.
_QUERIES_INSIDE, _QUERIES_OUTSIDE = (0, 2, 3, 1, 4), (0, 3, 1, 2, 4)
_TURNED = (0, 2, 1, 3)
_TF32 = DotAlgorithmPreset.TF32_TF32_F32


def _abstract(
    *avals: ShapedArray, part: str, spec: Attention, results: tuple[ShapedArray, ...], tf32: bool
) -> list[ShapedArray]:
    axes = frozenset().union(*(aval.vma for aval in avals))
    return [aval.update(vma=axes) for aval in results]


def _impl(
    xp: Any, *operands: Any, part: str, spec: Attention, results: Any, tf32: bool
) -> list[Any]:
    """The formulas of `lax/attention.py`, on arrays in their order."""
    named, extras = split_list(operands, [len(READS[part])])
    given = [
        xp.transpose(x, _QUERIES_INSIDE if name in ("q", "ct") else _TURNED) if x.ndim > 3
        and name not in ("top", "rest", "delta") else x
        for name, x in zip(READS[part], named, strict=True)
    ]  # fmt: skip
    prim = attention_p if part == FORWARD else attention_grad_p
    found = prim.rule("impl")(xp, *given, *extras, spec=spec, jaxpr=None)
    if part == FORWARD:
        return [xp.transpose(found[0], _QUERIES_OUTSIDE), *found[1:]]
    if part == QUERY_GRAD:
        return [xp.transpose(found[0], _QUERIES_OUTSIDE)]
    return [xp.transpose(x, _TURNED) for x in found[1:]]


# Operands as `READS` of its part says, then extras; `results` are the types of what it writes.
# `tf32`: whether factors may be rounded.
attention_block_p = internal_primitive("attention_block", _abstract, _impl)


def _has_tiles(avals: Sequence[ShapedArray]) -> bool:
    """Operands for which there is a kernel; the others are expanded."""
    q, k, v = avals[:3]
    dtype = kernel_dtype(q.dtype)
    same = dtype in DTYPES and q.dtype == k.dtype == v.dtype
    return same and q.shape[-1] <= MOST_FEATURES


def _is_regular(spec: Attention, extras: Sequence[Any]) -> bool:
    dtypes = [kernel_dtype(typeof(x).dtype) for x in extras]
    bias = not spec.bias or (dtypes[0] is not None and kind(dtypes[0]) == "f")
    shift = not spec.shifted or dtypes[-1] == "i32"
    return math.isfinite(spec.scale) and bias and shift


def _rounds(q: ShapedArray, program: ClosedJaxpr) -> bool:
    """Whether factors of float32 may be rounded to TF32: both products of the formula say so."""
    asked = [e.params["precision"] for e in all_eqns(program.jaxpr) if e.prim is dot_general_p]
    return q.dtype == np.float32 and all(factors_of(p) is _TF32 for p in asked)


def _block(
    part: str,
    spec: Attention,
    operands: Sequence[Any],
    results: Sequence[ShapedArray],
    program: ClosedJaxpr,
) -> Any:
    types = tuple([aval.update(vma=frozenset()) for aval in results])
    tf32 = _rounds(typeof(operands[0]), program)
    return attention_block_p.bind(*operands, part=part, spec=spec, results=types, tf32=tf32)


@defines("attention", when=_has_tiles)
def attention(*operands: Any, spec: Attention, jaxpr: ClosedJaxpr) -> list[Any]:
    """`[out, top, rest]`, in one launch."""
    (q, k, v), extras = split_list(operands, [3])
    if not _is_regular(spec, extras):
        return attend(spec, *operands)
    q, (k, v) = permute_dims(q, _QUERIES_OUTSIDE), (permute_dims(x, _TURNED) for x in (k, v))
    numbers = jaxpr.out_avals[1:]
    out, top, rest = _block(FORWARD, spec, [q, k, v, *extras], [typeof(q), *numbers], jaxpr)
    return [permute_dims(out, _QUERIES_INSIDE), top, rest]


@defines("attention_grad", when=_has_tiles)
def attention_grad(*operands: Any, spec: Attention, jaxpr: ClosedJaxpr) -> list[Any]:
    """Cotangents of query, key and value, in two launches."""
    (q, k, v, *numbers, ct), extras = split_list(operands, [7])
    if not _is_regular(spec, extras) or typeof(ct).dtype != typeof(q).dtype:
        return attend_grad(spec, *operands)
    q, ct = (permute_dims(x, _QUERIES_OUTSIDE) for x in (q, ct))
    k, v = (permute_dims(x, _TURNED) for x in (k, v))
    given = [q, k, v, *numbers, ct, *extras]
    (dq,) = _block(QUERY_GRAD, spec, given, [typeof(q)], jaxpr)
    dk, dv = _block(KEY_GRAD, spec, given, [typeof(k), typeof(v)], jaxpr)
    return [permute_dims(dq, _QUERIES_INSIDE), permute_dims(dk, _TURNED), permute_dims(dv, _TURNED)]
