"""A program before it is partitioned: calls are written out, and equal equations are one.

What a program computes twice is computed, moved and added up once: two sums of one value would be
terms that two readers finish, each by a collective of its own.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any, cast

from spmd.base.source import Source
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, Var
from spmd.core.rewrite import dce
from spmd.core.rewriting.equations import Merging, Walk, finish, map_subjaxprs, start
from spmd.core.structural import add_any_p, broadcast_in_dim_p
from spmd.lax.concatenate import concatenate_p
from spmd.lax.control_cond import cond_p
from spmd.lax.control_scan import scan_p
from spmd.lax.control_while import while_p
from spmd.lax.dynamic import dynamic_slice_p
from spmd.lax.slicing import pad_p, slice_p
from spmd.partition.rules import called_jaxpr
from spmd.sharding.shard_map_rules import shard_map_p

_LOOPS = (scan_p, while_p, cond_p)


def without_repeats(closed: ClosedJaxpr) -> ClosedJaxpr:
    """An equal program without calls, equal equations, and equations that nothing reads."""
    writer = start(closed, _Merged)
    _Opener(writer).run(closed.jaxpr)
    made = finish(writer, closed)
    jaxpr = _with_joins(made.jaxpr)
    smaller, _ = dce(jaxpr, (True,) * len(jaxpr.outvars))
    return ClosedJaxpr(smaller, made.consts)


def _with_joins(jaxpr: Jaxpr) -> Jaxpr:
    """A jaxpr with one concatenation where rows padded with zeros are added up to a whole.

    The derivative of sections, as of the gates of an LSTM, is such a sum. One exchange joins them.
    """
    # Of each sum, and of each of its terms: the padded rows, by the first, and their dim.
    terms: dict[Any, tuple[int, dict[int, Atom]]] = {}
    for _, eqn in jaxpr.eqns_of(pad_p):
        if (found := _padded_rows(eqn)) is not None:
            terms[eqn.outvars[0]] = found
    adds = jaxpr.eqns_of(add_any_p) if terms else []
    if not any(terms.keys() >= set(eqn.invars) for _, eqn in adds):
        return jaxpr
    uses = Counter(chain(*[eqn.invars for eqn in jaxpr.eqns], jaxpr.outvars))
    eqns = list(jaxpr.eqns)
    for k, eqn in adds:
        one, other = [terms.get(a) if uses[a] == 1 else None for a in eqn.invars]
        if one is None or other is None or one[0] != other[0] or one[1].keys() & other[1].keys():
            continue
        out, (d, rows) = eqn.outvars[0], (one[0], one[1] | other[1])
        terms[out] = d, rows
        first, parts = 0, []
        while first in rows:
            parts.append(rows[first])
            first += rows[first].aval.shape[d]
        if len(parts) == len(rows) and first == out.aval.shape[d]:
            params = {"dimension": d}
            eqns[k] = Eqn(concatenate_p, tuple(parts), (out,), params, source=eqn.source)
    return jaxpr.replace(eqns=tuple(eqns))


def _padded_rows(eqn: Eqn) -> tuple[int, dict[int, Atom]] | None:
    """The dim along which rows are padded with zeros, and the rows by the place of the first."""
    (rows, zero), config = eqn.invars, eqn.params["padding_config"]
    dims = [d for d, entry in enumerate(config) if entry != (0, 0, 0)]
    if len(dims) != 1 or type(zero) is not Literal or zero.val != 0:
        return None
    low, high, inside = config[dims[0]]
    if inside or min(low, high) < 0 or not rows.aval.size or rows.aval.explicit is not None:
        return None
    return dims[0], {low: rows}


class _Opener(Walk):
    """A walk over a jaxpr and the calls in it."""

    def replaces(self, eqn: Eqn, ins: tuple[Atom, ...], source: Source) -> bool:
        """Write the body of a call, or a slice whose start is fixed as one."""
        if eqn.prim is dynamic_slice_p:
            return self._fixed(eqn, ins, source)
        if eqn.prim.inline is None and eqn.prim.expand is None:
            self.kept.add(eqn.prim)
            return False
        body = called_jaxpr(eqn)
        if body is not None:
            self.call(body, eqn, ins, source)
        return body is not None

    def _fixed(self, eqn: Eqn, ins: tuple[Atom, ...], source: Source) -> bool:
        operand, *starts = ins
        if operand.aval.explicit is not None or not all(type(a) is Literal for a in starts):
            return False
        sizes = eqn.params["slice_sizes"]
        rows = zip(starts, operand.aval.shape, sizes, strict=True)
        first = [min(max(int(cast(Literal, a).val), 0), n - size) for a, n, size in rows]
        stops = tuple([a + size for a, size in zip(first, sizes, strict=True)])
        params = {"start_indices": tuple(first), "limit_indices": stops, "strides": None}
        outs = tuple([Var(v.aval) for v in eqn.outvars])
        self.define(eqn, self.writer.write(Eqn(slice_p, (operand,), outs, params, source=source)))
        return True

    def params_of(self, eqn: Eqn) -> dict[str, Any]:
        """The parameters of what has jaxprs that are partitioned, with equations in these merged.

        The body of a map along all axes is not.
        """
        is_in_part = eqn.prim is shard_map_p and eqn.params.get("manual") is not None
        if eqn.prim in _LOOPS or is_in_part:
            return map_subjaxprs(eqn, without_repeats)
        return eqn.params


class _Merged(Merging):
    """Equations, equal ones once.

    The results of those that are `free` can be made anew, in any layout, without a move.
    """

    def __init__(self) -> None:
        super().__init__()
        self.free: set[Any] = set()

    def keeps(self, eqn: Eqn) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Keep what is made of no variable, and what is repeated along new dims: it moves nothing.

        Each reader has its own, laid out as it is wanted there, and the readers may be equal.
        """
        free = self.free
        if eqn.prim is not broadcast_in_dim_p:
            for a in eqn.invars:
                if type(a) is not Literal and a not in free:
                    return False
            if _shrinks(eqn):
                return False
        free.update(eqn.outvars)
        return True

    def is_equal(self, eqn: Eqn, first: Eqn) -> bool:
        """Whether two equations are the same one, of the same types."""
        pairs = zip(eqn.outvars, first.outvars, strict=True)
        return super().is_equal(eqn, first) and all(a.aval == b.aval for a, b in pairs)


def _shrinks(eqn: Eqn) -> bool:
    """Whether it has fewer elements than an operand: a reduction may have to be added up."""
    return any(a.aval.size > v.aval.size for a in eqn.invars for v in eqn.outvars)
