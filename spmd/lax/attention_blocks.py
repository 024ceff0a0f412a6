"""Attention by blocks of queries: nothing of the size queries x keys ever exists.

For each batch element and key head (rounds that may run at the same time) the keys are turned
around once; then a block of queries at a time is multiplied with all of them, its scores become
weights while they are in the cache, and the weights are multiplied with the values. The backward
pass computes its part of them again from each query's logsumexp (Dao et al.,
FlashAttention, 2022). In causal attention, blocks of keys behind all of a chunk's queries are left
out.

Dims: B batch, K key heads, G query heads for each, T queries, S keys, H features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.base.record import record
from spmd.base.util import merge_lists, partition_list
from spmd.core.aval import typeof
from spmd.core.structural import broadcast_in_dim, permute_dims, reduce_sum, reshape
from spmd.lax.arithmetic import add, div, log, mul, sub
from spmd.lax.array import broadcasted_iota, full
from spmd.lax.concatenate import concatenate
from spmd.lax.control_scan import scan
from spmd.lax.convert import convert_element_type
from spmd.lax.dot import dot_general
from spmd.lax.elementwise import exp
from spmd.lax.logic import bitwise_and, ge, le, select
from spmd.lax.reduce import reduce_max
from spmd.lax.slicing import index_in_dim, pad, slice_in_dim

FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)
# The score of a key that is not seen: finite, so that a query that sees none takes an average.
HIDDEN = np.float32(-0.7 * float(np.finfo(np.float32).max))
# Bytes of the scores of one block, which should stay in a core's own cache; and its rows.
_BLOCK_BYTES = 1 << 19
_MOST_ROWS, _FEWEST_ROWS = 128, 16
# Chunks of queries with their own number of keys, where later keys are not seen.
_CHUNKS, _LEAST_CHUNK = 4, 128


@record
class Attention:
    """The scores: `scale * q k + bias`, where all masks and both conditions hold.

    `causal`: a query sees the keys up to its own position. `window`: it sees so many keys before
    and behind its position. `bias` and the number of `masks` say which operands follow.
    """

    scale: float
    causal: bool = False
    window: tuple[int, int] | None = None
    bias: bool = False
    masks: int = 0
    shifted: bool = False

    def scored(
        self, products: Any, extras: Sequence[Any], queries: Any, keys: Any
    ) -> tuple[Any, Any]:
        """Scores of q k products, in their dtype, and which are seen (None: all).

        `extras` are bias and masks, `queries` and `keys` positions, all in the products' shape.
        """
        dtype = typeof(products).dtype
        scores = mul(products, dtype.type(self.scale))
        masks = list(extras)
        shift = masks.pop() if self.shifted else None
        if self.bias:
            scores = add(scores, convert_element_type(masks.pop(0), dtype))
        if self.causal or self.window is not None:
            at = queries() if shift is None else add(queries(), shift)
            if self.causal:
                masks.append(ge(at, keys()))
            if self.window is not None:
                left, right = self.window
                masks.append(le(at, add(keys(), np.int32(left))))
                masks.append(ge(at, sub(keys(), np.int32(right))))
        seen = None
        for mask in masks:
            seen = mask if seen is None else bitwise_and(seen, mask)
        if seen is not None:
            scores = select(seen, scores, full(typeof(scores).shape, HIDDEN, dtype))
        return scores, seen

    def chunks(self, queries: int, keys: int) -> list[tuple[int, int, int]]:
        """(first query, last query, keys that any of them sees), for all queries."""
        # A query that sees nothing averages over all keys: only without masks does each see one.
        alone = self.causal and self.window is None and not self.masks and not self.shifted
        count = min(_CHUNKS, queries // _LEAST_CHUNK) if alone else 1
        rows = -(-queries // count) if count > 1 else queries
        rows = -(-rows // _MOST_ROWS) * _MOST_ROWS if count > 1 else rows
        starts = range(0, queries, rows) if rows else ()
        ends = [min(start + rows, queries) for start in starts]
        limit = [min(end, keys) if alone else keys for end in ends]
        return list(zip(starts, ends, limit, strict=True))


# ---- forward -----------------------------------------------------------------------------------


def attend(spec: Attention, *operands: Any) -> list[Any]:
    """`[out, top, rest]` of query (B, K, G, T, H), key and value (B, K, S, H), and extras.

    `top`, each query's largest score, and `rest`, the log of the sum of exp(score - top), make up
    the logsumexp. They are kept apart because the scores of a query that sees nothing are so
    large that their sum would lose `rest`.
    """
    return _over(lambda *row: _over(lambda *head: _attend_head(spec, *head), row, 3), operands, 3)


def _attend_head(spec: Attention, q: Any, k: Any, v: Any, *extras: Any) -> list[Any]:
    """One key head: query (G, T, H), key and value (S, H), extras (G or 1, T or 1, S or 1)."""
    parts = []
    for first, last, keys in spec.chunks(typeof(q).shape[1], typeof(k).shape[0]):
        near = [slice_in_dim(x, 0, keys) for x in (k, v)]
        chunk = [slice_in_dim(q, first, last, axis=1), *_cut(extras, first, last, keys)]
        parts.append(_attend_chunk(spec, first, near, chunk))
    return [_joined(p, 1) for p in zip(*parts, strict=True)]


def _attend_chunk(spec: Attention, first: int, near: Any, chunk: Sequence[Any]) -> list[Any]:
    """Queries (G, T, H) and extras, from position `first` on, with all keys and values given."""
    k, v = near
    turned = permute_dims(k, (1, 0))
    narrow = typeof(v).dtype

    def block(rows: Any, at: Any, *given: Any) -> list[Any]:
        scores, _ = _scores(spec, rows, turned, at, given)
        top = reduce_max(scores, (1,))
        weights = exp(sub(scores, _beside(top, scores)))
        total = reduce_sum(weights, (1,))
        out = _dot(convert_element_type(weights, narrow), v)
        out = convert_element_type(div(out, _beside(total, out)), narrow)
        return [out, top, log(total)]

    size = _rows(typeof(chunk[0]).shape[1], typeof(k).shape[0])
    return _over(lambda rows, *given: _blocks(block, first, rows, given, size), chunk, 1)


def _blocks(
    block: Callable[..., list[Any]], first: int, rows: Any, given: Sequence[Any], size: int
) -> list[Any]:
    """Apply `block(rows, positions, *extras)` to blocks of queries and join the results."""
    count = typeof(rows).shape[0]
    along = [typeof(x).shape[0] > 1 for x in given]
    xs = [_in_blocks(x, size) for x in (rows, *_where(along, given))]
    rest = _where([not a for a in along], given)

    def step(_: Any, x: Any) -> Any:
        return (), block(x[0], x[1], *merge_lists(along, rest, x[2:]))

    positions = _positions(first, typeof(xs[0]).shape[0], size)
    _, outs = scan(step, (), [xs[0], positions, *xs[1:]])
    return [slice_in_dim(_flat(out), 0, count) for out in outs]


# ---- backward ----------------------------------------------------------------------------------


def attend_grad(spec: Attention, *operands: Any) -> list[Any]:
    """Cotangents of query, key and value.

    Operands: query, key, value; then top, rest and delta (B, K, G, T) and the result's cotangent
    (B, K, G, T, H); then the extras. `delta` is the sum of result times cotangent.
    """
    return _over(lambda *row: _over(lambda *head: _grad_head(spec, *head), row, 7), operands, 7)


def _grad_head(spec: Attention, q: Any, k: Any, v: Any, *given: Any) -> list[Any]:
    """Cotangents of one key head, block by block of queries; those of keys and values add up."""
    per_query, extras = given[:4], given[4:]
    sums = [full(typeof(x).shape, 0, wide(x)) for x in (k, v)]
    parts = []
    for first, last, keys in spec.chunks(typeof(q).shape[1], typeof(k).shape[0]):
        near, values = slice_in_dim(k, 0, keys), slice_in_dim(v, 0, keys)
        turned, values_turned = permute_dims(near, (1, 0)), permute_dims(values, (1, 0))

        def block(carry: Any, x: Any, near=near, turned=turned, values_turned=values_turned):
            (dk, dv), (rows, at, rest, top, delta, ct, *given) = carry, x
            scores, seen = _scores(spec, rows, turned, at, given)
            weights = weigh(scores, _beside(top, scores), _beside(rest, scores))
            dv = add(dv, _dot(convert_element_type(weights, typeof(ct).dtype), ct, over=0))
            slope = mul(weights, sub(_dot(ct, values_turned), _beside(delta, scores)))
            slope = mul(slope, typeof(slope).dtype.type(spec.scale))
            if seen is not None:
                slope = select(seen, slope, full(typeof(slope).shape, 0, typeof(slope).dtype))
            slope = convert_element_type(slope, typeof(rows).dtype)
            dk = add(dk, _dot(slope, rows, over=0))
            return (dk, dv), convert_element_type(_dot(slope, near), typeof(rows).dtype)

        chunk = [slice_in_dim(x, first, last, axis=1) for x in (q, *per_query)]
        chunk += _cut(extras, first, last, keys)
        start = tuple(full((keys, *typeof(x).shape[1:]), 0, wide(x)) for x in (k, v))
        carry, dq = _carried(block, start, first, chunk, _rows(last - first, keys))
        missing = typeof(k).shape[0] - keys
        zero = typeof(carry[0]).dtype.type(0)
        grown = [pad(x, zero, ((0, missing, 0), (0, 0, 0))) for x in carry]
        sums = [add(total, x) for total, x in zip(sums, grown, strict=True)]
        parts.append(dq)
    dk, dv = (convert_element_type(x, typeof(k).dtype) for x in sums)
    return [_joined(parts, 1), dk, dv]


def _carried(
    block: Callable[..., Any], start: Any, first: int, chunk: Sequence[Any], size: int
) -> tuple[Any, Any]:
    """Fold `block` over the query heads and, for each, its blocks of queries."""
    groups, count = typeof(chunk[0]).shape[:2]
    by_group = [typeof(x).shape[0] > 1 or groups == 1 for x in chunk]

    def group(carry: Any, mine: Any) -> Any:
        given = merge_lists(by_group, _where([not b for b in by_group], shared), mine)
        along = [typeof(x).shape[0] > 1 or count == 1 for x in given]
        rows, top, rest, *more = given
        more = [top, *more]
        # Rows that fill up the last block have no weight, whatever their scores.
        blocks = [_in_blocks(rows, size), _in_blocks(rest, size, np.inf)]
        along = [along[1], *along[3:]]
        blocks += [_in_blocks(x, size) for x in _where(along, more)]
        whole = _where([not a for a in along], more)

        def step(carry: Any, x: Any) -> Any:
            rows, at, rest, *xs = x
            return block(carry, (rows, at, rest, *merge_lists(along, whole, xs)))

        positions = _positions(first, typeof(blocks[0]).shape[0], size)
        carry, out = scan(step, carry, [blocks[0], positions, *blocks[1:]])
        return carry, slice_in_dim(_flat(out), 0, count)

    shared = [index_in_dim(x, 0, 0, keepdims=False) for x in chunk]
    if groups == 1:
        carry, out = group(start, shared)
        return carry, reshape(out, (1, *typeof(out).shape))
    return scan(group, start, _where(by_group, chunk))


def wide(x: Any) -> np.dtype:
    """The dtype of scores, weights and sums of x: float32, or float64 if x is."""
    return FLOAT64 if typeof(x).dtype == FLOAT64 else FLOAT32


def weigh(scores: Any, top: Any, rest: Any) -> Any:
    """The weights of scores: exp(score - logsumexp)."""
    return exp(sub(sub(scores, top), rest))


# ---- parts -------------------------------------------------------------------------------------


def _scores(
    spec: Attention, rows: Any, turned: Any, at: Any, extras: Sequence[Any]
) -> tuple[Any, Any]:
    """Scores of a block of queries, and which are seen; extras are (rows or 1, S or 1)."""
    products = _dot(rows, turned)
    shape = typeof(products).shape
    given = [broadcast_in_dim(x, shape, (0, 1)) for x in extras]
    return spec.scored(
        products,
        given,
        lambda: broadcast_in_dim(at, shape, (0,)),
        lambda: broadcasted_iota(np.dtype(np.int32), shape, 1),
    )


def _dot(x: Any, y: Any, over: int = 1) -> Any:
    """x y, or x^T y for `over=0`, summed in float32, or float64 if they are."""
    return dot_general(x, y, (((over,), (0,)), ((), ())), preferred_element_type=wide(x))


def _beside(row: Any, like: Any) -> Any:
    """A value for each row in every column."""
    return broadcast_in_dim(row, typeof(like).shape, (0,))


def _rows(queries: int, keys: int) -> int:
    """Rows of a block: as many as the cache likes, in blocks of equal size."""
    most = np.clip(_BLOCK_BYTES // (4 * keys) or 1, _FEWEST_ROWS, _MOST_ROWS)
    blocks = -(-queries // int(most)) or 1
    return -(-queries // blocks) or 1


def _positions(first: int, blocks: int, size: int) -> Any:
    return first + np.arange(blocks * size, dtype=np.int32).reshape(blocks, size)


def _in_blocks(x: Any, size: int, filler: float = 0) -> Any:
    """The leading dim in blocks, the last filled up."""
    count, *rest = typeof(x).shape
    blocks = -(-count // size)
    if blocks * size != count:
        fill = np.asarray(filler, typeof(x).dtype)
        x = pad(x, fill, ((0, blocks * size - count, 0), *((0, 0, 0) for _ in rest)))
    return reshape(x, (blocks, size, *rest))


def _flat(x: Any) -> Any:
    blocks, size, *rest = typeof(x).shape
    return reshape(x, (blocks * size, *rest))


def _joined(parts: Sequence[Any], axis: int) -> Any:
    return parts[0] if len(parts) == 1 else concatenate(list(parts), axis)


def _cut(extras: Sequence[Any], first: int, last: int, keys: int) -> list[Any]:
    """The part of each extra (G, T, S) that belongs to some queries and keys."""
    cut = []
    for x in extras:
        if typeof(x).shape[1] > 1:
            x = slice_in_dim(x, first, last, axis=1)
        if typeof(x).shape[2] > 1:
            x = slice_in_dim(x, 0, keys, axis=2)
        cut.append(x)
    return cut


def _where(flags: Sequence[bool], items: Sequence[Any]) -> list[Any]:
    return partition_list(flags, items)[1]


def _over(f: Callable[..., list[Any]], operands: Sequence[Any], main: int) -> list[Any]:
    """Apply `f` to each slice along the leading dim and stack.

    The first `main` operands have that dim; the others have it or are 1 there, for all slices.
    """
    size = typeof(operands[0]).shape[0]
    sliced = [k < main or typeof(x).shape[0] > 1 for k, x in enumerate(operands)]
    if size == 1:
        outs = f(*(index_in_dim(x, 0, 0, keepdims=False) for x in operands))
        return [reshape(out, (1, *typeof(out).shape)) for out in outs]
    whole = [
        index_in_dim(x, 0, 0, keepdims=False) for x in _where([not s for s in sliced], operands)
    ]
    _, outs = scan(
        lambda _, xs: ((), f(*merge_lists(sliced, whole, xs))), (), _where(sliced, operands)
    )
    return outs
