"""Jaxpr to jaxpr: evaluate, remove dead code, hoist constants; shared by the transformations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any

from spmd.base.context import state
from spmd.base.source import UNKNOWN
from spmd.core.aval import ShapedArray
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, Var
from spmd.core.primitive import Primitive, is_refused
from spmd.core.stage import Debug, trace_to_jaxpr
from spmd.core.trace import Tracer


def eval_jaxpr(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    *args: Any,
    inline: Callable[[Eqn], bool] | None = None,
) -> list[Any]:
    """Run a jaxpr by binding its equations one by one under the current trace.

    The new equations keep their source lines. The calls that `inline` names are run like this too.
    """
    env: dict[Var, Any] = {}

    def read(atom: Atom) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    env.update(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    last_use = last_uses(jaxpr)
    before = state.source
    try:
        for k, eqn in enumerate(jaxpr.eqns):
            state.source = before if eqn.source is UNKNOWN else eqn.source
            operands = [read(a) for a in eqn.invars]
            if inline is not None and eqn.prim.inline is not None and inline(eqn):
                body = eqn.prim.inline(eqn.params)
                outs = eval_jaxpr(body.jaxpr, body.consts, *operands, inline=inline)
            else:
                outs = eqn.prim.bind(*operands, **eqn.params)
            env.update(zip(eqn.outvars, outs if eqn.prim.multiple else [outs], strict=True))
            for var in last_use[k]:
                del env[var]
    finally:
        state.source = before
    return [read(a) for a in jaxpr.outvars]


def eval_closed(closed: ClosedJaxpr, *args: Any) -> list[Any]:
    """`eval_jaxpr` of a closed jaxpr."""
    return eval_jaxpr(closed.jaxpr, closed.consts, *args)


def last_uses(jaxpr: Jaxpr) -> list[list[Var]]:
    """For each equation, the variables that nothing after it reads."""
    seen: set[Any] = {v for v in jaxpr.outvars if isinstance(v, Var)}
    out: list[list[Var]] = []
    for eqn in reversed(jaxpr.eqns):
        dead: list[Var] = []
        for v in (*eqn.outvars, *eqn.invars):
            if isinstance(v, Var) and v not in seen:
                seen.add(v)
                dead.append(v)
        out.append(dead)
    return out[::-1]


def close(
    f: Callable[..., Sequence[Any]],
    avals: Sequence[ShapedArray],
    name: str,
    arg_names: tuple[str, ...] = (),
) -> ClosedJaxpr:
    """Trace `f` of flat arguments to a closed jaxpr called `name`."""
    return trace_to_jaxpr(f, avals, Debug(name, arg_names))


def any_call(eqn: Eqn) -> bool:
    """Select all calls for `inline_calls`: nothing differentiates or batches the result."""
    return True


def plain_call(eqn: Eqn) -> bool:
    """Select the calls for `inline_calls` in a program that is transformed further.

    A function with custom rules must stay whole: its jaxpr says what it computes, and a derivative
    of that is not the one that its user gave.
    """
    return not eqn.prim.custom


def opens(prim: Primitive) -> bool:
    """Whether a call that is about to be transposed may be replaced by its body."""
    return prim.inline is not None and not is_refused(prim.transpose)


def inline_calls(closed: ClosedJaxpr, which: Callable[[Eqn], bool] = any_call) -> ClosedJaxpr:
    """The same program with its calls, those of `which`, replaced by their bodies."""
    if not any(eqn.prim.inline is not None and which(eqn) for eqn in closed.eqns):
        return closed

    def flat(*args: Any) -> list[Any]:
        return eval_jaxpr(closed.jaxpr, closed.consts, *args, inline=which)

    return close(flat, closed.in_avals, closed.jaxpr.name)


def dependents(jaxpr: Jaxpr, sources: Iterable[Var]) -> set[Any]:
    """The variables whose values depend on any of `sources`, which are among them."""
    found: set[Any] = set(sources)
    for eqn in jaxpr.eqns:
        if any(v in found for v in eqn.invars):
            found.update(eqn.outvars)
    return found


def known_part(closed: ClosedJaxpr, unknown: Sequence[bool]) -> tuple[ClosedJaxpr, list[bool]]:
    """The part of a program that follows from the inputs not marked `unknown`.

    Returns the jaxpr from those inputs to the outputs that depend on no other, and which these are.
    """
    closed = inline_calls(closed, plain_call)
    jaxpr = closed.jaxpr
    moved = {v for v, u in zip(jaxpr.invars, unknown, strict=True) if u}
    eqns: list[Eqn] = []
    for eqn in jaxpr.eqns:
        flags = [v in moved for v in eqn.invars]
        if not any(flags):
            eqns.append(eqn)
            continue
        if eqn.prim.known is None:
            moved.update(eqn.outvars)
            continue
        given, known, params = eqn.prim.known(flags, eqn.params)
        moved.update(v for v, k in zip(eqn.outvars, known, strict=True) if not k)
        ins = [v for v, keep in zip(eqn.invars, given, strict=True) if keep]
        outs = [v for v, k in zip(eqn.outvars, known, strict=True) if k]
        effects = eqn.prim.effects(params)
        eqns.append(Eqn(eqn.prim, tuple(ins), tuple(outs), params, effects, eqn.source))
    ins = [v for v, u in zip(jaxpr.invars, unknown, strict=True) if not u]
    found = [v not in moved for v in jaxpr.outvars]
    smaller, _ = dce(jaxpr.replace(invars=ins, eqns=eqns), found)
    return ClosedJaxpr(smaller, closed.consts), found


def hoist_consts(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Any]]:
    """Turn all constants into leading inputs; give them back."""
    jaxpr = closed.jaxpr
    if not closed.consts:
        return closed, []
    hoisted = jaxpr.replace(constvars=(), invars=(*jaxpr.constvars, *jaxpr.invars))
    return ClosedJaxpr(hoisted, ()), list(closed.consts)


def hoist_tracers(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Any]]:
    """Turn those constants that are tracers into leading inputs; give them back.

    A jaxpr inside an equation may not hold tracers: they would outlive their trace.
    """
    if not any(isinstance(c, Tracer) for c in closed.consts):
        return closed, []
    jaxpr = closed.jaxpr
    pairs = list(zip(jaxpr.constvars, closed.consts, strict=True))
    moved = [(v, c) for v, c in pairs if isinstance(c, Tracer)]
    kept = [(v, c) for v, c in pairs if not isinstance(c, Tracer)]
    hoisted = jaxpr.replace(
        constvars=[v for v, _ in kept], invars=(*(v for v, _ in moved), *jaxpr.invars)
    )
    return ClosedJaxpr(hoisted, [c for _, c in kept]), [c for _, c in moved]


def dce(
    jaxpr: Jaxpr, used_outs: Sequence[bool], keeps_effects: bool = True
) -> tuple[Jaxpr, list[bool]]:
    """Keep only what the used outputs need, and the effects unless `keeps_effects` is False.

    Returns the smaller jaxpr, with unused outputs gone but all inputs kept, and which inputs it
    still uses.
    """
    outvars = [v for v, used in zip(jaxpr.outvars, used_outs, strict=True) if used]
    live: set[Any] = set(outvars)  # literals among them do no harm
    kept: list[Eqn] = []
    for eqn in reversed(jaxpr.eqns):
        if (keeps_effects and eqn.effects) or not live.isdisjoint(eqn.outvars):
            kept.append(eqn)
            live.update(eqn.invars)
    smaller = jaxpr.replace(eqns=kept[::-1], outvars=outvars)
    return smaller, [v in live for v in jaxpr.invars]


def prune_eqn(eqn: Eqn, used: Sequence[bool]) -> Eqn:
    """An equation whose primitive has a `dce` rule, without the parts for unused results only."""
    assert eqn.prim.dce is not None
    operands, results, params = eqn.prim.dce(used, eqn.params)
    if all(operands) and all(results):
        return eqn
    return eqn.replace(
        invars=tuple(compress(eqn.invars, operands)),
        outvars=tuple(compress(eqn.outvars, results)),
        params=params,
    )


def prune_consts(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Drop constants that no equation and no output reads."""
    if not closed.consts:
        return closed
    jaxpr = closed.jaxpr
    used: set[Any] = {v for e in jaxpr.eqns for v in e.invars}
    used.update(jaxpr.outvars)
    pairs = [p for p in zip(jaxpr.constvars, closed.consts, strict=True) if p[0] in used]
    if len(pairs) == len(closed.consts):
        return closed
    return ClosedJaxpr(jaxpr.replace(constvars=[v for v, _ in pairs]), [c for _, c in pairs])


def drop_inputs(closed: ClosedJaxpr, keep: Sequence[bool]) -> ClosedJaxpr:
    """Remove inputs that nothing reads."""
    jaxpr = closed.jaxpr
    invars = [v for v, k in zip(jaxpr.invars, keep, strict=True) if k]
    return ClosedJaxpr(jaxpr.replace(invars=invars), closed.consts)
