"""Sums: what is added up before it is read, and carries of loops that only add up."""

from __future__ import annotations

from collections.abc import Mapping

from spmd.base import dtypes
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Jaxpr, Var
from spmd.core.structural import add_any_p, permute_dims_p, reshape_p
from spmd.lax.arithmetic import add_p, neg_p, sub_p
from spmd.lax.array import squeeze_p
from spmd.lax.convert import convert_element_type_p

_ADDS = (add_any_p, add_p)
# Of these, a result of a term is a term of the result: they move, convert or negate elements.
_KEEPS = frozenset(
    {*_ADDS, convert_element_type_p, neg_p, permute_dims_p, reshape_p, squeeze_p, sub_p}
)

# ---- sums ----------------------------------------------------------------------------------------


def added_up(jaxpr: Jaxpr, uses: Mapping[Var, int]) -> list[list[int]]:
    """The equations whose results are added up and not read otherwise, by number, for each sum.

    A sum of sums is one. `uses` counts the readers of each variable.
    """
    found: dict[Var, list[int]] = {}  # the terms of the sum to which a variable belongs
    sums: list[list[int]] = []
    k = len(jaxpr.eqns)
    for eqn in reversed(jaxpr.eqns):
        k -= 1
        if eqn.prim not in _KEEPS:
            if found and eqn.outvars and (made := eqn.outvars[0]) in found:
                found[made].append(k)
            continue
        terms = found.get(eqn.outvars[0])
        if terms is None:
            if not _adds_up(eqn):
                continue
            terms = []
            sums.append(terms)
        for atom in eqn.invars:
            if type(atom) is Var and uses[atom] == 1:
                found[atom] = terms
    return [terms for terms in sums if len(terms) > 1]


def _adds_up(eqn: Eqn) -> bool:
    """Whether it adds two values of one shape."""
    return len(eqn.invars) == 2 and eqn.invars[0].aval.shape == eqn.invars[1].aval.shape


# ---- carries -------------------------------------------------------------------------------------


def addends(closed: ClosedJaxpr, first: int, count: int) -> tuple[ClosedJaxpr, frozenset[int]]:
    """The body of a scan with the addends of sums in place of the sums, and which carries are sums.

    Of the `count` carries, inputs from `first` on, those are sums that the body reads in nothing
    but additions, the last of which gives their next value. So iterations do not depend on them.
    """
    jaxpr = closed.jaxpr
    readers = _readers(jaxpr)
    renamed: dict[Var, Atom] = {}
    dropped: set[int] = set()
    sums = []
    for n in range(count):
        carry = jaxpr.invars[first + n]
        start = None if dtypes.is_bool(carry.aval.dtype) else _chain(jaxpr, readers, carry, n)
        if start is None:
            continue
        eqn = jaxpr.eqns[start]
        renamed[eqn.outvars[0]] = eqn.invars[1 if eqn.invars[0] is carry else 0]
        dropped.add(start)
        sums.append(n)
    if not sums:
        return closed, frozenset()

    def named(atom: Atom) -> Atom:
        return renamed.get(atom, atom) if isinstance(atom, Var) else atom

    eqns = [
        e.replace(invars=tuple(map(named, e.invars)))
        for k, e in enumerate(jaxpr.eqns)
        if k not in dropped
    ]
    outs = tuple(map(named, jaxpr.outvars))
    return ClosedJaxpr(jaxpr.replace(eqns=eqns, outvars=outs), closed.consts), frozenset(sums)


def _readers(jaxpr: Jaxpr) -> dict[Var, list[int]]:
    """The equations that read each variable, by number; -1 - k is the k-th result."""
    found: dict[Var, list[int]] = {}
    for k, eqn in enumerate(jaxpr.eqns):
        for atom in eqn.invars:
            if type(atom) is not Var:
                continue
            if atom in found:
                found[atom].append(k)
            else:
                found[atom] = [k]
    for k, atom in enumerate(jaxpr.outvars):
        if isinstance(atom, Var):
            found.setdefault(atom, []).append(-1 - k)
    return found


def _chain(jaxpr: Jaxpr, readers: dict[Var, list[int]], carry: Var, n: int) -> int | None:
    """The first of the additions that make carry n of itself; None if it is read otherwise."""
    var, start = carry, None
    while True:
        found = readers.get(var, [])
        if len(found) != 1:
            return None
        (k,) = found
        if k < 0:
            return start if k == -1 - n else None
        eqn = jaxpr.eqns[k]
        if eqn.prim not in _ADDS or any(a.aval is not carry.aval for a in eqn.invars):
            return None
        if start is None:
            other = eqn.invars[1 if eqn.invars[0] is var else 0]
            if not isinstance(other, Var):
                return None
            start = k
        var = eqn.outvars[0]
