"""Calls of jaxprs: `jit_p`, and the base of call-like primitives.

A call's rules are those of its jaxpr: differentiate, batch or transpose the jaxpr, and call that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from spmd.base.context import state
from spmd.base.errors import RefusedError
from spmd.base.source import current_source
from spmd.base.util import split_list
from spmd.core.ir import ClosedJaxpr, Eqn, Literal, Names
from spmd.core.jvp import jvp_jaxpr
from spmd.core.linearize import LinearizeTrace, linearize_jaxpr
from spmd.core.primitive import Linear, Primitive, Refused, Zero
from spmd.core.transpose import transpose_jaxpr
from spmd.core.vmap import batch_jaxpr, fronts

# ---- derived jaxprs, kept as long as the jaxpr they come from ----------------------------------

_derived: weakref.WeakKeyDictionary[ClosedJaxpr, dict[Any, Any]] = weakref.WeakKeyDictionary()


def derived(closed: ClosedJaxpr, kind: Any, make: Callable[[], Any]) -> Any:
    """`make()`, remembered for this jaxpr, this kind and the axis names in scope."""
    entries = _derived.setdefault(closed, {})
    key = (kind, state.axes)
    if key not in entries:
        entries[key] = make()
    return entries[key]


def nonzero(values: Sequence[Any]) -> list[bool]:
    """Flags of the tangents or cotangents that are not `Zero`."""
    return [not isinstance(t, Zero) for t in values]


def spread(flags: Sequence[bool], values: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """Values where the flag is set, `Zero`s elsewhere."""
    given = iter(values)
    return [next(given) if f else Zero(a) for f, a in zip(flags, avals, strict=True)]


def refuse_io(where: str, fix: str, *parts: ClosedJaxpr) -> None:
    """Raise if a part calls `io_callback`, whose calls would be other than the program says."""
    if any({"io", "ordered io"} & closed.effects for closed in parts):
        raise RefusedError(f"{current_source()}: io_callback is not possible in {where}; {fix}")


def impl_jaxpr(xp: Any, closed: ClosedJaxpr, *args: Any) -> list[Any]:
    """Evaluate a jaxpr with every primitive's `impl`: the oracle of all compiled programs."""
    jaxpr = closed.jaxpr
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        operands = [
            xp.asarray(a.val if isinstance(a, Literal) else env[a], dtype=a.aval.dtype)
            for a in eqn.invars
        ]
        outs = eqn.prim.rule("impl")(xp, *operands, **eqn.params)
        env.update(zip(eqn.outvars, outs if eqn.prim.multiple else [outs], strict=True))
    return [
        xp.asarray(a.val if isinstance(a, Literal) else env[a], dtype=a.aval.dtype)
        for a in jaxpr.outvars
    ]


def call_primitive(name: str, **rules: Any) -> Primitive:
    """A primitive that means its parameter `jaxpr`; `rules` are its derivatives and batching."""
    return Primitive(
        name,
        abstract=lambda *avals, jaxpr, **_: jaxpr.out_avals,
        impl=lambda xp, *args, jaxpr, **_: impl_jaxpr(xp, jaxpr, *args),
        dims=Refused("a call is inlined before it is partitioned"),
        multiple=True,
        vma="given",
        axes=jaxpr_axes,
        effects=lambda params: params["jaxpr"].effects,
        inline=lambda params: params["jaxpr"],
        **rules,
    )


# ---- jit ---------------------------------------------------------------------------------------


def _jit_jvp(primals: Any, tangents: Any, *, jaxpr: ClosedJaxpr, name: str) -> Any:
    flags = nonzero(tangents)
    make = lambda: jvp_jaxpr(jaxpr, flags)  # noqa: E731
    jvp, out_flags = derived(jaxpr, ("jvp", tuple(flags)), make)
    given = [t for t in tangents if not isinstance(t, Zero)]
    outs = jit_p.bind(*primals, *given, jaxpr=jvp, name=f"jvp_{name}")
    outs, out_tangents = split_list(outs, [len(jaxpr.out_avals)])
    return outs, spread(out_flags, out_tangents, [a.tangent() for a in jaxpr.out_avals])


def _jit_linearize(
    trace: LinearizeTrace, primals: Any, tangents: Any, *, jaxpr: ClosedJaxpr, name: str
) -> Any:
    cut = linearize_jaxpr(jaxpr, nonzero(tangents))
    outs = jit_p.bind(*primals, jaxpr=cut.primal, name=name)
    outs, residuals = split_list(outs, [len(jaxpr.out_avals)])
    given = [t for t in tangents if not isinstance(t, Zero)]
    params = {"jaxpr": cut.linear, "name": f"linear_{name}"}
    out_tangents = trace.bind_linear(jit_p, [*residuals, *given], params)
    return outs, spread(cut.out_nonzero, out_tangents, [a.tangent() for a in jaxpr.out_avals])


def transpose_call(prim: Primitive, cts: Any, operands: Any, params: dict[str, Any]) -> list[Any]:
    """The transpose rule of any call: call the transposed jaxpr."""
    jaxpr = params["jaxpr"]
    linear = [isinstance(x, Linear) for x in operands]
    flags = nonzero(cts)
    make = lambda: transpose_jaxpr(jaxpr, linear, flags)  # noqa: E731
    backward, in_flags = derived(jaxpr, ("transpose", tuple(linear), tuple(flags)), make)
    residuals = [x for x in operands if not isinstance(x, Linear)]
    given = [ct for ct in cts if not isinstance(ct, Zero)]
    changes = {"jaxpr": backward, "name": f"transpose_{params['name']}"}
    outs = prim.bind(*residuals, *given, **(params | changes))
    avals = [x.aval for x in operands if isinstance(x, Linear)]
    found = iter(spread(in_flags, outs, avals))
    return [next(found) if lin else None for lin in linear]


def batch_call(
    prim: Primitive, axis: Any, operands: Any, at: Any, params: dict[str, Any]
) -> tuple[list[Any], list[int | None]]:
    """The batch rule of any call: call the batched jaxpr."""
    jaxpr = params["jaxpr"]
    flags = [d is not None for d in at]
    make = lambda: batch_jaxpr(jaxpr, axis, flags)  # noqa: E731
    batched, out_flags = derived(jaxpr, ("batch", axis, tuple(flags)), make)
    outs = prim.bind(*fronts(axis, operands, at), **(params | {"jaxpr": batched}))
    return outs, [0 if b else None for b in out_flags]


def jaxpr_axes(params: dict[str, Any]) -> tuple[Any, ...]:
    """The axis names used by collectives inside a call's jaxpr."""
    jaxpr: ClosedJaxpr = params["jaxpr"]
    found: dict[Any, None] = {}
    for eqn in jaxpr.eqns:
        found.update(dict.fromkeys(eqn.prim.axes(eqn.params)))
    return tuple(found)


def _jit_text(eqn: Eqn, names: Names) -> tuple[str, dict[str, Any]]:
    """As in JAX, inputs and outputs of the jaxpr have the names of the operands and results."""
    closed = eqn.params["jaxpr"]
    names.share(closed.jaxpr.outvars, eqn.outvars)
    names.share(closed.jaxpr.invars, eqn.invars)
    return "jit", {"name": eqn.params["name"], "jaxpr": closed}


jit_p = call_primitive(
    "jit",
    text=_jit_text,
    jvp=_jit_jvp,
    linearize=_jit_linearize,
    transpose=lambda cts, *operands, **params: transpose_call(jit_p, cts, operands, params),
    batch=lambda axis, operands, at, **params: batch_call(jit_p, axis, operands, at, params),
)
