"""Attention along split sequences: keys come to the queries, or the queries' terms are joined.

Each device has some of the queries. It gathers keys and values, or, where these are large, sees
them block by block while they go round a ring of the devices, and joins what it has found by each
query's logsumexp. Queries that are few, as of a sequence that is being written, go to the keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spmd.base.record import replace
from spmd.collectives.all_gather import all_gather
from spmd.collectives.axis import axis_index
from spmd.collectives.ppermute import ppermute
from spmd.collectives.psum import pmax, psum
from spmd.collectives.psum_scatter import psum_scatter
from spmd.core.aval import typeof
from spmd.core.ir import Eqn
from spmd.core.primitive import Dims, Primitive, dims
from spmd.core.structural import broadcast_in_dim
from spmd.lax.arithmetic import add, div, log, max, mul, sub
from spmd.lax.array import full
from spmd.lax.attention import attention_grad_p, attention_p, attention_tangent_p, bind_attention
from spmd.lax.attention_blocks import Attention, wide
from spmd.lax.control_cond import cond
from spmd.lax.control_scan import scan
from spmd.lax.convert import convert_element_type
from spmd.lax.dynamic import dynamic_slice_in_dim
from spmd.lax.elementwise import exp
from spmd.lax.logic import eq, gt, select
from spmd.partition.seconds import BYTE, EXCHANGE, MULTIPLY_ADD

Axes = tuple[Any, ...]
Sizes = Mapping[Any, int]

ATTENTION = (attention_p, attention_tangent_p, attention_grad_p)
# The labels of batch, key heads and query heads of each, and of the sequences: queries and keys of
# one length are split alike (TIME); else QUERIES and KEYS may be split. No larger label is theirs.
BATCH, HEADS, GROUP = range(3)
TIME, QUERIES, KEYS = 600, 601, 602
_SEQUENCES = (TIME, QUERIES, KEYS)
_FEATURES = -1

# Keys and values of so many bytes go round a ring instead of being gathered.
RING_BYTES = 64 << 20

# How many operands each primitive has before bias and masks: of these, which have keys.
_MAIN = {attention_p: 3, attention_tangent_p: 9, attention_grad_p: 7}
_WITH_KEYS = {attention_p: (1, 2), attention_tangent_p: (1, 2, 7, 8), attention_grad_p: (1, 2)}


# ---- which dims --------------------------------------------------------------------------------


def attention_rule(eqn: Eqn) -> Dims:
    """Batch, heads and sequences may be split; a bias or a mask may have size 1 along any.

    A result that lacks a dim is a sum over it, the derivative of keys over the queries.
    """
    avals = [atom.aval for atom in eqn.invars]
    (*heads, queries, _), keys = avals[0].shape, avals[1].shape[2]
    same = queries == keys
    apart = -2 if eqn.prim is attention_tangent_p else KEYS  # which needs all keys' sum first
    times = (TIME, TIME) if same else (QUERIES, apart)
    of_queries = (BATCH, HEADS, GROUP, times[0], _FEATURES)
    of_keys = (BATCH, HEADS, times[1], _FEATURES)
    # Of an extra each device takes the keys that it sees: of one length all of them.
    scores = list(
        zip((*of_queries[:4], -3 if same else times[1]), (*heads, queries, keys), strict=True)
    )
    main, with_keys = _MAIN[eqn.prim], _WITH_KEYS[eqn.prim]
    operands = [of_keys if k in with_keys else of_queries[: a.ndim] for k, a in enumerate(avals)]
    operands[main:] = [
        tuple(n if size == most else -4 for size, (n, most) in zip(a.shape, scores, strict=True))
        for a in avals[main:]
    ]
    results = [
        of_keys if eqn.prim is attention_grad_p and k else of_queries[: v.aval.ndim]
        for k, v in enumerate(eqn.outvars)
    ]
    reduces = {attention_p: "pick", attention_grad_p: "add"}.get(eqn.prim)
    return dims(operands, results, reduces=reduces)


def seconds_inside(eqn: Eqn, label: int, count: int, parts: int) -> float:
    """The cost of bringing keys to queries if a sequence is split in `count` parts.

    The other dims are in `parts`. Of queries that see no later key, each device computes all
    scores of its own, where otherwise half of them are left out.
    """
    if label not in _SEQUENCES:
        return 0.0
    query, key, value = (atom.aval for atom in eqn.invars[:3])
    seconds = 0.0
    if eqn.params["spec"].causal:
        seconds += MULTIPLY_ADD * query.size * key.shape[2] / parts / count
    if label == TIME:
        share = BYTE * (key.nbytes + value.nbytes) / parts * (count - 1) / count
        times = 1 if eqn.prim is attention_p else 2
        seconds += times * (2 * EXCHANGE + share)
    return seconds


# ---- writing -----------------------------------------------------------------------------------


def write_attention(
    prim: Primitive,
    parts: Sequence[Any],
    spec: Attention,
    axes: Mapping[int, Axes],
    sizes: Sizes,
) -> list[Any]:
    """Attention on parts of its operands; `axes` are those of its labels."""
    own = _Part(prim, spec, axes, sizes)
    if axes.get(TIME):
        keys = [parts[k] for k in _WITH_KEYS[prim]]
        nbytes = sum(typeof(x).nbytes for x in keys[:2]) * own.count
        if nbytes >= RING_BYTES and prim is attention_p:
            return own.ring(parts)
        if nbytes >= RING_BYTES and prim is attention_grad_p:
            return own.ring_of_derivatives(parts)
        return own.gathered(parts)
    if axes.get(KEYS) and prim is attention_p:
        return own.joined(parts)
    return own.bound(parts)


class _Part:
    """One device's part of an attention whose sequences are split over some axes."""

    def __init__(self, prim: Primitive, spec: Attention, axes: Mapping[int, Axes], sizes: Sizes):
        self.prim = prim
        self.spec = spec
        self.axes: Axes = axes.get(TIME, ())
        self.queries: Axes = self.axes or axes.get(QUERIES, ())
        self.keys: Axes = axes.get(KEYS, ())
        self.count = math.prod(sizes[a] for a in self.axes)

    def bound(self, parts: Sequence[Any], source: Any = None) -> list[Any]:
        """The primitive on parts; the keys are a device's own, all, or those of device `source`."""
        spec = self.spec
        if (spec.causal or spec.window is not None) and (self.queries or self.keys):
            spec = replace(spec, shifted=True)
            shift = np.int32(0)
            if self.queries:
                shift = axis_index(self.queries) * np.int32(typeof(parts[0]).shape[3])
            if self.keys or source is not None:
                position = axis_index(self.keys) if source is None else source
                shift = sub(shift, mul(position, np.int32(typeof(parts[1]).shape[2])))
            parts = [*parts, broadcast_in_dim(shift, (1,) * 5, ())]
        return bind_attention(self.prim, *parts, spec=spec)

    def gathered(self, parts: Sequence[Any]) -> list[Any]:
        """A device's queries with all keys; it keeps its rows of the keys' derivatives."""
        with_keys = _WITH_KEYS[self.prim]
        given = [
            all_gather(x, self.axes, axis=2, tiled=True) if k in with_keys else x
            for k, x in enumerate(parts)
        ]
        outs = self.bound(given)
        if self.prim is not attention_grad_p:
            return outs
        dq, *others = outs
        kept = [psum_scatter(x, self.axes, scatter_dimension=2, tiled=True) for x in others]
        return [dq, *kept]

    def joined(self, parts: Sequence[Any]) -> list[Any]:
        """All queries with a device's keys; what the devices have found is joined."""
        out, top, rest = self.bound(parts)
        best = pmax(top, self.keys)
        weight = mul(_weight(top, best), _total(top, rest))
        total, out = psum((weight, _weighted(out, weight)), self.keys)
        return [_divided(out, total, parts[2]), best, log(total)]

    # ---- a ring ----

    def ring(self, parts: Sequence[Any]) -> list[Any]:
        """A device's queries with one block of keys after the other, which go round."""
        query, key, value, *extras = parts
        position = axis_index(self.axes)

        def attend(k: Any, v: Any, source: Any) -> list[Any]:
            out, top, rest = self._with_block(source, [query, k, v], extras)
            total = _total(top, rest)
            return [_weighted(out, total), top, total]

        def step(carry: Any, distance: Any) -> tuple[Any, None]:
            k, v, *found = carry
            k, v = (self._next(x) for x in (k, v))
            source = self._source(position, distance)

            def joined(found: Sequence[Any]) -> list[Any]:
                out, top, total = found
                more, highest, weight = attend(k, v, source)
                best = max(top, highest)
                scales = _weight(top, best), _weight(highest, best)
                outs = [_weighted(x, s) for x, s in zip((out, more), scales, strict=True)]
                totals = [mul(x, s) for x, s in zip((total, weight), scales, strict=True)]
                return [add(*outs), best, add(*totals)]

            return (k, v, *self._unless_hidden(source, position, joined, found)), None

        start = (key, value, *attend(key, value, position))
        (_, _, out, top, total), _ = scan(step, start, np.arange(1, self.count, dtype=np.int32))
        return [_divided(out, total, value), top, log(total)]

    def ring_of_derivatives(self, parts: Sequence[Any]) -> list[Any]:
        """The keys' derivatives go round with the keys, until they are back."""
        query, key, value, *rest = parts
        per_query, extras = rest[:4], rest[4:]
        position = axis_index(self.axes)
        dtypes = [typeof(x).dtype for x in (query, key, value)]

        def slopes(k: Any, v: Any, source: Any) -> list[Any]:
            found = self._with_block(source, [query, k, v, *per_query], extras)
            return [convert_element_type(x, wide(x)) for x in found]

        def step(carry: Any, distance: Any) -> tuple[Any, None]:
            k, v, dq, *sums = carry
            k, v, *sums = (self._next(x) for x in (k, v, *sums))
            source = self._source(position, distance)

            def added(found: Sequence[Any]) -> list[Any]:
                return [add(x, y) for x, y in zip(found, slopes(k, v, source), strict=True)]

            return (k, v, *self._unless_hidden(source, position, added, [dq, *sums])), None

        start = (key, value, *slopes(key, value, position))
        (_, _, dq, *sums), _ = scan(step, start, np.arange(1, self.count, dtype=np.int32))
        outs = [dq, *(self._next(x) for x in sums)]
        return [convert_element_type(x, dtype) for x, dtype in zip(outs, dtypes, strict=True)]

    def _next(self, x: Any) -> Any:
        """The value that the device before has."""
        return ppermute(x, self.axes, [(k, (k + 1) % self.count) for k in range(self.count)])

    def _source(self, position: Any, distance: Any) -> Any:
        """The device whose keys have come so far."""
        source = sub(position, distance)
        return select(gt(np.int32(0), source), add(source, np.int32(self.count)), source)

    def _with_block(self, source: Any, parts: Sequence[Any], extras: Sequence[Any]) -> list[Any]:
        """The primitive on a device's queries and the keys of another."""
        keys = typeof(parts[1]).shape[2]
        first = mul(source, np.int32(keys))
        cut = [
            dynamic_slice_in_dim(x, first, keys, 4) if typeof(x).shape[4] > 1 else x for x in extras
        ]
        return self.bound([*parts, *cut], source)

    def _unless_hidden(
        self, source: Any, position: Any, joined: Any, found: Sequence[Any]
    ) -> Sequence[Any]:
        """`joined(found)`, or `found` where all keys are behind all queries, which sees itself."""
        if not self.spec.causal or self.spec.masks:
            return joined(found)
        return cond(gt(source, position), lambda found: list(found), joined, list(found))


def _total(top: Any, rest: Any) -> Any:
    """The sum of exp(score - top); 0 where the scores of all keys are -inf."""
    dtype = typeof(top).dtype
    return select(eq(top, dtype.type(-np.inf)), _zeros(top), exp(rest))


def _weight(top: Any, best: Any) -> Any:
    """exp(top - best); 0 where that is -inf, whatever the best is."""
    dtype = typeof(top).dtype
    return select(eq(top, dtype.type(-np.inf)), _zeros(top), exp(sub(top, best)))


def _zeros(x: Any) -> Any:
    return full(typeof(x).shape, 0, typeof(x).dtype)


def _beside(rows: Any, like: Any) -> Any:
    return broadcast_in_dim(rows, typeof(like).shape, range(4))


def _weighted(out: Any, weight: Any) -> Any:
    """Rows by their weights; what has none is 0, be it NaN."""
    out = convert_element_type(out, typeof(weight).dtype)
    none = _beside(eq(weight, typeof(weight).dtype.type(0)), out)
    return select(none, _zeros(out), mul(out, _beside(weight, out)))


def _divided(out: Any, total: Any, value: Any) -> Any:
    return convert_element_type(div(out, _beside(total, out)), typeof(value).dtype)
