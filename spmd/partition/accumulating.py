"""Carries of loops that only add up: which they are, and the body without their additions."""

from __future__ import annotations

from spmd.base import dtypes
from spmd.core.ir import Atom, ClosedJaxpr, Jaxpr, Var
from spmd.core.structural import add_any_p
from spmd.lax.arithmetic import add_p

_ADDS = (add_any_p, add_p)


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
            if isinstance(atom, Var):
                found.setdefault(atom, []).append(k)
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
