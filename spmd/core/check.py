"""The law of jaxprs: every variable is defined once and before it is used, and has the right type.

Run between all passes when `SPMD_CHECK=1`, always on in the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd.base.errors import JaxprTypeError
from spmd.base.record import record
from spmd.core.aval import ShapedArray
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, Var, subjaxprs


@record
class _Place:
    """An equation and the pass that wrote it; its text is made for errors only."""

    eqn: Eqn
    where: str

    def __str__(self) -> str:
        return f"{self.eqn}{self.where} (from {self.eqn.source})"


def check_jaxpr(closed: ClosedJaxpr | Jaxpr, after: str = "") -> None:
    """Raise a JaxprTypeError that names the first equation breaking the law."""
    jaxpr = closed.jaxpr if isinstance(closed, ClosedJaxpr) else closed
    where = f" after {after}" if after else ""
    defined: set[Var] = set()
    _define((*jaxpr.constvars, *jaxpr.invars), defined, f"the inputs{where}")
    for eqn in jaxpr.eqns:
        here = _Place(eqn, where)
        for atom in eqn.invars:
            _check_read(atom, defined, here)
        _check_types(eqn, here)
        if eqn.prim.inline is not None:
            check_operands(eqn.prim.inline(eqn.params).in_avals, [v.aval for v in eqn.invars], here)
        _define(eqn.outvars, defined, here)
        for _, inner in subjaxprs(eqn.params):
            check_jaxpr(inner, after)
    for atom in jaxpr.outvars:
        _check_read(atom, defined, f"the outputs{where}")


def _define(variables: Sequence[Var], defined: set[Var], where: str | _Place) -> None:
    for var in variables:
        if var in defined:
            raise JaxprTypeError(f"jaxpr: a variable is defined twice: {where}")
        defined.add(var)


def _check_read(atom: Atom, defined: set[Var], where: str | _Place) -> None:
    if isinstance(atom, Literal):
        if atom.aval.shape:
            raise JaxprTypeError(f"jaxpr: a literal must be a scalar: {where}")
    elif atom not in defined:
        raise JaxprTypeError(f"jaxpr: {atom} is read before it is defined: {where}")


def check_operands(
    wanted: Sequence[ShapedArray], given: Sequence[ShapedArray], where: str | _Place
) -> None:
    """Raise a JaxprTypeError if a nested jaxpr is not given the inputs that it takes."""
    if len(wanted) != len(given):
        raise JaxprTypeError(f"jaxpr: {len(given)} operands for {len(wanted)} inputs: {where}")
    for k, (want, have) in enumerate(zip(wanted, given, strict=True)):
        if not _agree(want, have):
            raise JaxprTypeError(f"jaxpr: operand {k} is {have}, the input is {want}: {where}")


def _check_types(eqn: Eqn, where: _Place) -> None:
    found: Any = eqn.prim.abstract(*[v.aval for v in eqn.invars], **eqn.params)
    outs = list(found) if eqn.prim.multiple else [found]
    if len(outs) != len(eqn.outvars):
        raise JaxprTypeError(
            f"jaxpr: {len(eqn.outvars)} results written, the rule gives {len(outs)}: {where}"
        )
    for var, aval in zip(eqn.outvars, outs, strict=True):
        if not _agree(var.aval, aval):
            raise JaxprTypeError(f"jaxpr: {var.aval} written, the rule gives {aval}: {where}")


def _agree(a: ShapedArray, b: ShapedArray) -> bool:
    # Weak types and varying axes are the tracer's business and may be widened by passes.
    return a.shape == b.shape and a.dtype == b.dtype
