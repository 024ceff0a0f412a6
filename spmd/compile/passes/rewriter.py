"""The base of passes: a jaxpr under construction, and a walk into nested jaxprs.

A pass reads the old equations in order and writes new ones; old variables that changed stand for
new atoms through an environment, all others for themselves. `JaxprBuilder` holds both. An unchanged
equation costs a pass next to nothing: the new jaxpr has the very object that the old one had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from spmd.base.source import UNKNOWN, Source
from spmd.core.aval import ShapedArray
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Jaxpr, Var
from spmd.core.primitive import Primitive, Refused

Pass = Callable[[ClosedJaxpr], ClosedJaxpr]

# Primitives that stand for one kernel or product.
_FINISHED = frozenset(("fused", "product"))


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


class JaxprBuilder:
    """Collects the equations and constants of a new jaxpr, and the atoms for old variables."""

    def __init__(self) -> None:
        self.eqns: list[Eqn] = []
        self.consts: dict[int, tuple[Any, Var]] = {}
        self._atoms: dict[Var, Atom] = {}

    def read(self, atom: Atom) -> Atom:
        """The new jaxpr's atom for an atom of the old one."""
        return self._atoms.get(atom, atom)  # type: ignore[arg-type]

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

    def keep(self, eqn: Eqn, params: dict[str, Any] | None = None) -> None:
        """Write an old equation with its operands replaced; its results stay the same variables."""
        ins = self.read_all(eqn.invars)
        if ins is not eqn.invars or not (params is None or params is eqn.params):
            changed = eqn.params if params is None else params
            eqn = Eqn(eqn.prim, ins, eqn.outvars, changed, eqn.effects, eqn.source)
        self.eqns.append(eqn)

    def read_all(self, atoms: tuple[Atom, ...]) -> tuple[Atom, ...]:
        """The new jaxpr's atoms for atoms of the old one; the same tuple if nothing changed."""
        found = self._atoms
        if not found:
            return atoms
        for atom in atoms:
            if atom in found:
                return tuple([found.get(a, a) for a in atoms])  # type: ignore[arg-type]
        return atoms

    def copy(self, eqn: Eqn, params: dict[str, Any] | None = None) -> None:
        """Write an old equation with its operands replaced and its results renamed.

        An equation that is written twice, as in a body that is called twice, has to have new names.
        """
        outs = tuple([Var(v.aval) for v in eqn.outvars])
        ins = self.read_all(eqn.invars)
        changed = eqn.params if params is None else params
        self.eqns.append(Eqn(eqn.prim, ins, outs, changed, eqn.effects, eqn.source))
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
        self.note(self.eqns[-1])
        return out

    def note(self, eqn: Eqn) -> None:
        """Hear of a new equation of one result: for writers that are asked about these."""

    def close(self, invars: Sequence[Var], outvars: Sequence[Atom], name: str) -> ClosedJaxpr:
        """The finished jaxpr."""
        pairs = list(self.consts.values())
        jaxpr = Jaxpr([var for _, var in pairs], invars, self.eqns, outvars, name)
        return ClosedJaxpr(jaxpr, [value for value, _ in pairs])


W = TypeVar("W", bound=JaxprBuilder)


def start(closed: ClosedJaxpr, kind: type[W] = JaxprBuilder) -> W:
    """A writer for the rewriting of `closed`, with the same inputs and constants."""
    writer = kind()
    for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        _, first = writer.consts.setdefault(id(value), (value, var))
        if first is not var:
            writer.define(var, first)
    return writer


def finish(writer: JaxprBuilder, closed: ClosedJaxpr) -> ClosedJaxpr:
    """The rewritten form of `closed`, once its equations are written."""
    jaxpr = closed.jaxpr
    return writer.close(jaxpr.invars, writer.read_all(jaxpr.outvars), jaxpr.name)


def with_bodies(closed: ClosedJaxpr) -> frozenset[Eqn]:
    """The equations whose jaxprs are run step by step, so that a pass goes through these, too.

    A group or a product has one as well, which gives its meaning and is finished.
    """
    nested = closed.jaxpr.nested
    return frozenset([e for e in nested if e.prim.name not in _FINISHED]) if nested else nested


def map_subjaxprs(eqn: Eqn, step: Pass) -> dict[str, Any]:
    """The parameters of an equation with `step` applied to the closed jaxprs among them.

    `Jaxpr.nested` says which equations have any.
    """
    changed = {}
    for name, value in eqn.params.items():
        if isinstance(value, ClosedJaxpr):
            changed[name] = step(value)
        elif isinstance(value, tuple) and any(isinstance(v, ClosedJaxpr) for v in value):
            changed[name] = tuple(step(v) if isinstance(v, ClosedJaxpr) else v for v in value)
    return eqn.params | changed if changed else eqn.params
