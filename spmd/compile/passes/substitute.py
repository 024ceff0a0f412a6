"""What passes share: a jaxpr under construction, and a walk into nested jaxprs.

A pass reads the old equations in order and writes new ones; old variables stand for new atoms
through an environment. `Writer` holds both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spmd.core.aval import ShapedArray
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, Var
from spmd.core.primitive import Primitive, Refused
from spmd.core.source import UNKNOWN, Source

Pass = Callable[[ClosedJaxpr], ClosedJaxpr]


def internal_primitive(
    name: str, abstract: Callable[..., Any], impl: Callable[..., Any]
) -> Primitive:
    """A primitive that only passes write: it has a meaning, but no rules of transformations."""
    why = Refused(f"`{name}` exists only inside the compiler, below all transformations")
    return Primitive(
        name,
        abstract=abstract,
        impl=impl,
        jvp=why,
        transpose=why,
        batch=why,
        dims=why,
        multiple=True,
        vma="given",
    )


class Writer:
    """Collects the equations and constants of a new jaxpr, and what old variables became."""

    def __init__(self) -> None:
        self.eqns: list[Eqn] = []
        self.consts: dict[int, tuple[Any, Var]] = {}
        self._atoms: dict[Var, Atom] = {}

    def read(self, atom: Atom) -> Atom:
        """What an atom of the old jaxpr is in the new one."""
        return atom if isinstance(atom, Literal) else self._atoms[atom]

    def define(self, old: Var, new: Atom) -> None:
        """Let an old variable stand for a new atom from now on."""
        self._atoms[old] = new

    def const(self, value: Any, aval: ShapedArray) -> Var:
        """The variable of a constant; the same object gets the same variable."""
        return self.consts.setdefault(id(value), (value, Var(aval)))[1]

    def define_consts(self, closed: ClosedJaxpr) -> None:
        """Take over the constants of a closed jaxpr."""
        for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            self.define(var, self.const(value, var.aval))

    def copy(self, eqn: Eqn, params: dict[str, Any] | None = None) -> None:
        """Write an old equation with its operands replaced and its results renamed."""
        outs = tuple([Var(v.aval) for v in eqn.outvars])
        ins = tuple([self.read(v) for v in eqn.invars])
        changed = eqn.params if params is None else params
        self.eqns.append(eqn.replace(invars=ins, outvars=outs, params=changed))
        for old, new in zip(eqn.outvars, outs, strict=True):
            self.define(old, new)

    def emit(
        self,
        prim: Primitive,
        operands: Sequence[Atom],
        params: dict[str, Any],
        source: Source = UNKNOWN,
    ) -> Var:
        """Write a new equation of one result, whose type the primitive's abstract rule gives."""
        out = Var(prim.rule("abstract")(*[a.aval for a in operands], **params))
        effects = prim.effects(params)
        self.eqns.append(Eqn(prim, tuple(operands), (out,), params, effects, source))
        return out

    def close(self, invars: Sequence[Var], outvars: Sequence[Atom], name: str) -> ClosedJaxpr:
        """The finished jaxpr."""
        pairs = list(self.consts.values())
        jaxpr = Jaxpr([var for _, var in pairs], invars, self.eqns, outvars, name)
        return ClosedJaxpr(jaxpr, [value for value, _ in pairs])


def start(closed: ClosedJaxpr) -> tuple[Writer, list[Var]]:
    """A writer for the rewriting of `closed`, with fresh inputs and the same constants."""
    writer = Writer()
    invars = [Var(v.aval) for v in closed.jaxpr.invars]
    for old, new in zip(closed.jaxpr.invars, invars, strict=True):
        writer.define(old, new)
    writer.define_consts(closed)
    return writer, invars


def finish(writer: Writer, closed: ClosedJaxpr, invars: Sequence[Var]) -> ClosedJaxpr:
    """The rewritten form of `closed`, once its equations are written."""
    outvars = [writer.read(v) for v in closed.jaxpr.outvars]
    return writer.close(invars, outvars, closed.jaxpr.name)


def map_subjaxprs(eqn: Eqn, step: Pass) -> dict[str, Any]:
    """The parameters of an equation with `step` applied to the closed jaxprs among them."""
    changed = {}
    for name, value in eqn.params.items():
        if isinstance(value, ClosedJaxpr):
            changed[name] = step(value)
        elif isinstance(value, tuple) and any(isinstance(v, ClosedJaxpr) for v in value):
            changed[name] = tuple(step(v) if isinstance(v, ClosedJaxpr) else v for v in value)
    return eqn.params | changed if changed else eqn.params
