"""Wrapped padding: an array between rows of its own other ends, of which slices are rolls.

Where the rows are split, a roll sends the rows that leave a device. The padded array has parts of
other sizes than the array, and would be moved whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Jaxpr, Var
from spmd.core.primitive import Primitive
from spmd.core.rewrite import dce
from spmd.core.rewriting.equations import map_subjaxprs
from spmd.lax.concatenate import concatenate_p
from spmd.lax.control_cond import cond_p
from spmd.lax.control_scan import scan_p
from spmd.lax.control_while import while_p
from spmd.lax.slicing import slice_p
from spmd.partition.propagate import Plan

_LOOPS = (scan_p, while_p, cond_p)


def has_split_wraps(plan: Plan) -> bool:
    """Whether an array is padded with its own ends along a dim that mesh axes split."""
    for scope in plan.scopes:
        for eqn, whole in wraps_of(scope.closed.jaxpr).values():
            if scope.of(whole).axes[eqn.params["dimension"]]:
                return True
    return False


def wraps_of(jaxpr: Jaxpr) -> dict[Var, tuple[Eqn, Atom]]:
    """The results of equations that pad an array with its own ends, with these and the arrays."""
    makers: dict[Atom, Eqn] = {eqn.outvars[0]: eqn for _, eqn in jaxpr.eqns_of(slice_p)}
    found = {}
    for _, eqn in jaxpr.eqns_of(concatenate_p) if makers else ():
        if eqn.outvars[0].aval.explicit is not None:
            continue
        d, atoms = eqn.params["dimension"], eqn.invars
        for k, whole in enumerate(atoms):
            if not 1 < len(atoms) <= 3 or k > 1 or len(atoms) > k + 2:
                continue
            ends = [(atoms[n], n < k) for n in range(len(atoms)) if n != k]
            if all(_is_end(makers.get(end), whole, d, is_last) for end, is_last in ends):
                found[eqn.outvars[0]] = eqn, whole
                break
    return found


def _is_end(cut: Eqn | None, whole: Atom, d: int, is_last: bool) -> bool:
    """Whether a slice takes the last, or the first, rows of an array."""
    if cut is None or cut.invars[0] is not whole:
        return False
    shape, rows = whole.aval.shape, cut.outvars[0].aval.shape[d]
    own = (shape[d] - rows, shape[d]) if is_last else (0, rows)
    return _bounds(cut) == [own if k == d else (0, n) for k, n in enumerate(shape)]


def _bounds(eqn: Eqn) -> list[tuple[int, int]] | None:
    """The rows along each dim that a slice takes; None if it leaves some out between."""
    params = eqn.params
    if set(params["strides"] or (1,)) != {1}:
        return None
    return list(zip(params["start_indices"], params["limit_indices"], strict=True))


def with_rolls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """An equal program in which slices of wrapped paddings are joined of slices of the arrays."""
    jaxpr = closed.jaxpr
    if jaxpr.nested:
        eqns = [
            e.replace(params=map_subjaxprs(e, with_rolls)) if e.prim in _LOOPS else e
            for e in jaxpr.eqns
        ]
        jaxpr = jaxpr.replace(eqns=tuple(eqns))
    wraps = wraps_of(jaxpr)
    if wraps:
        jaxpr, _ = dce(_Rolls(jaxpr, wraps).run(), (True,) * len(jaxpr.outvars))
    return ClosedJaxpr(jaxpr, closed.consts)


class _Rolls:
    """Writes a jaxpr without slices of wrapped paddings.

    Such a slice is made of slices along one dim each, lower dims first, so that equal ones are met.
    """

    def __init__(self, jaxpr: Jaxpr, wraps: dict[Var, tuple[Eqn, Atom]]):
        self.jaxpr = jaxpr
        self.wraps = wraps
        self.ends = {a for eqn, whole in wraps.values() for a in eqn.invars if a is not whole}
        self.slices = {e.outvars[0]: e for _, e in jaxpr.eqns_of(slice_p)}
        self.eqns: list[Eqn] = []
        self.known: dict[Any, Atom] = {}
        self.names: dict[Any, Atom] = {}

    def run(self) -> Jaxpr:
        """The new jaxpr; what nothing reads any more is in it."""
        names = self.names
        for eqn in self.jaxpr.eqns:
            out = eqn.outvars[0] if eqn.outvars else None
            bounds = _bounds(eqn) if eqn.prim is slice_p and out not in self.ends else None
            if bounds is not None and eqn.invars[0] in self.wraps:
                made = eqn.invars[0]
                for d, (start, stop) in enumerate(bounds):
                    made = self.cut(made, d, start, stop, eqn)
                names[out] = made
                continue
            self.eqns.append(eqn.replace(invars=tuple([names.get(a, a) for a in eqn.invars])))
        outs = tuple([names.get(a, a) for a in self.jaxpr.outvars])
        return self.jaxpr.replace(eqns=tuple(self.eqns), outvars=outs)

    def cut(self, atom: Atom, d: int, start: int, stop: int, like: Eqn) -> Atom:
        """Rows of a value along one dim."""
        atom = self.names.get(atom, atom)
        if (start, stop) == (0, atom.aval.shape[d]):
            return atom
        key = atom, d, start, stop
        if key not in self.known:
            self.known[key] = self._cut(atom, d, start, stop, like)
        return self.known[key]

    def _cut(self, atom: Atom, d: int, start: int, stop: int, like: Eqn) -> Atom:
        if isinstance(atom, Var) and atom in self.wraps:
            eqn, _ = self.wraps[atom]
            dim, parts, first = eqn.params["dimension"], [], 0
            for part in eqn.invars:
                if dim != d:
                    parts.append(self.cut(part, d, start, stop, like))
                    continue
                size = part.aval.shape[d]
                low, high = max(start - first, 0), min(stop - first, size)
                if low < high:
                    parts.append(self.cut(part, d, low, high, like))
                first += size
            if len(parts) == 1:
                return parts[0]
            rows = sum(part.aval.shape[dim] for part in parts)
            out = self._written(concatenate_p, parts, {"dimension": dim}, dim, rows, like)
            if dim != d:  # of what is still wrapped there are more slices
                self.wraps[out] = self.eqns[-1], parts[0]
            return out
        maker = self.slices.get(atom) if isinstance(atom, Var) else None
        if maker is not None and atom in self.ends:
            bounds = _bounds(maker) or []
            (other,) = [k for k, b in enumerate(bounds) if b != (0, maker.invars[0].aval.shape[k])]
            low, high = bounds[other]
            if other == d:
                return self.cut(maker.invars[0], d, low + start, low + stop, like)
            return self.cut(self.cut(maker.invars[0], d, start, stop, like), other, low, high, like)
        shape = atom.aval.shape
        bounds = [(start, stop) if k == d else (0, n) for k, n in enumerate(shape)]
        params = {
            "start_indices": tuple(low for low, _ in bounds),
            "limit_indices": tuple(high for _, high in bounds),
            "strides": None,
        }
        return self._written(slice_p, [atom], params, d, stop - start, like)

    def _written(
        self,
        prim: Primitive,
        ins: Sequence[Atom],
        params: dict[str, Any],
        d: int,
        rows: int,
        like: Eqn,
    ) -> Var:
        shape = list(ins[0].aval.shape)
        shape[d] = rows
        out = Var(ins[0].aval.update(shape=tuple(shape)))
        self.eqns.append(Eqn(prim, tuple(ins), (out,), params, source=like.source))
        return out
