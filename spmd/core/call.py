"""Calls of jaxprs: `jit_p`, and the base of call-like primitives.

A call's rules are those of its jaxpr: differentiate, batch or transpose the jaxpr, and call that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import compress
from operator import itemgetter
from typing import Any

from spmd.base.context import state
from spmd.base.errors import RefusedError
from spmd.base.source import current_source
from spmd.base.util import split_list
from spmd.core.ir import ClosedJaxpr, Eqn, Literal, Names
from spmd.core.jvp import jvp_jaxpr
from spmd.core.linearize import LinearizeTrace, linearize_jaxpr
from spmd.core.mutable.cells import TouchedCells
from spmd.core.primitive import Linear, Primitive, Refused, Zero
from spmd.core.transpose import backward_pass, transpose_jaxpr
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
    if any({"IO", "OrderedIO"} & closed.effects for closed in parts):
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


def call_primitive(
    name: str, body: Callable[[dict[str, Any]], ClosedJaxpr] = itemgetter("jaxpr"), **rules: Any
) -> Primitive:
    """A primitive that means its parameter `jaxpr`; `rules` are its derivatives and batching.

    `body` gives what is compiled in its place, of the parameters.
    """
    return Primitive(
        name,
        abstract=lambda *avals, jaxpr, **_: jaxpr.out_avals,
        impl=lambda xp, *args, jaxpr, **_: impl_jaxpr(xp, jaxpr, *args),
        dims=Refused("a call is inlined before it is partitioned"),
        multiple=True,
        vma="given",
        axes=jaxpr_axes,
        effects=lambda params: params["jaxpr"].effects,
        inline=body,
        **rules,
    )


def transpose_call(
    prim: Primitive,
    cts: Any,
    operands: Any,
    params: dict[str, Any],
    change: Callable[..., dict[str, Any]] | None = None,
) -> list[Any]:
    """The transpose rule of any call: call the transposed jaxpr.

    `change` gives the parameters, of the jaxpr, its name and the flags of its results.
    """
    jaxpr = params["jaxpr"]
    linear = [isinstance(x, Linear) for x in operands]
    flags = nonzero(cts)
    make = lambda: transpose_jaxpr(jaxpr, linear, flags)  # noqa: E731
    try:
        backward, in_flags = derived(jaxpr, ("transpose", tuple(linear), tuple(flags)), make)
    except TouchedCells:  # a rule in it writes to a mutable array, here at the array's own level
        return backward_pass(jaxpr.jaxpr, jaxpr.consts, operands, cts)
    residuals = [x for x in operands if not isinstance(x, Linear)]
    given = [ct for ct in cts if not isinstance(ct, Zero)]
    name = f"transpose_{params['name']}"
    changes = change(backward, name, in_flags) if change else {"jaxpr": backward, "name": name}
    outs = prim.bind(*residuals, *given, **(params | changes))
    avals = [x.aval for x in operands if isinstance(x, Linear)]
    found = iter(spread(in_flags, outs, avals))
    return [next(found) if lin else None for lin in linear]


def batch_call(
    prim: Primitive,
    axis: Any,
    operands: Any,
    at: Any,
    params: dict[str, Any],
    change: Callable[..., dict[str, Any]] | None = None,
) -> tuple[list[Any], list[int | None]]:
    """The batch rule of any call: call the batched jaxpr.

    `change` gives the parameters, of the jaxpr and the flags of its results.
    """
    jaxpr = params["jaxpr"]
    flags = [d is not None for d in at]
    make = lambda: batch_jaxpr(jaxpr, axis, flags)  # noqa: E731
    batched, out_flags = derived(jaxpr, ("batch", axis, tuple(flags)), make)
    changes = change(batched, out_flags) if change else {"jaxpr": batched}
    outs = prim.bind(*fronts(axis, operands, at), **(params | changes))
    return outs, [0 if b else None for b in out_flags]


def jaxpr_axes(params: dict[str, Any]) -> tuple[Any, ...]:
    """The axis names used by collectives inside a call's jaxpr."""
    jaxpr: ClosedJaxpr = params["jaxpr"]
    found: dict[Any, None] = {}
    for eqn in jaxpr.eqns:
        found.update(dict.fromkeys(eqn.prim.axes(eqn.params)))
    return tuple(found)


# ---- jit ---------------------------------------------------------------------------------------


class UnspecifiedValue:
    """The class of `UNSPECIFIED`, which stands for a sharding that is not given."""

    def __repr__(self) -> str:
        return "UnspecifiedValue"


UNSPECIFIED = UnspecifiedValue()


class PlacingHooks:
    """The functions of `sharding/` for the shardings of jitted functions.

    `at_edges` gives a jaxpr that lays inputs and outputs out as shardings say, and `batched` the
    sharding of a value with a new first dim.
    """

    at_edges: Callable[[ClosedJaxpr, Sequence[Any], Sequence[Any]], ClosedJaxpr]
    batched: Callable[[Any, Any, int], Any]


placing = PlacingHooks()


def jit_params(jaxpr: ClosedJaxpr, name: str, **given: Any) -> dict[str, Any]:
    """The parameters of `jit_p`, with JAX's names; shardings and layouts are one a value."""
    ins, outs = len(jaxpr.jaxpr.invars), len(jaxpr.jaxpr.outvars)
    return {
        "jaxpr": jaxpr,
        "in_shardings": (UNSPECIFIED,) * ins,
        "out_shardings": (UNSPECIFIED,) * outs,
        "in_layouts": (None,) * ins,
        "out_layouts": (None,) * outs,
        "donated_invars": (False,) * ins,
        "ctx_mesh": None,
        "name": name,
        "keep_unused": False,
        "inline": False,
        "compiler_options_kvs": (),
        **given,
    }


def _changed(
    params: dict[str, Any], jaxpr: ClosedJaxpr, name: str, ins: Sequence[Any], outs: Sequence[Any]
) -> dict[str, Any]:
    """The parameters of a call that is derived from another, whose values lie as these do."""
    kept = {n: params[n] for n in ("ctx_mesh", "keep_unused", "inline", "compiler_options_kvs")}
    return jit_params(jaxpr, name, in_shardings=tuple(ins), out_shardings=tuple(outs), **kept)


def _with_layouts(params: dict[str, Any]) -> ClosedJaxpr:
    """The jaxpr of a call, in which its shardings are constraints."""
    closed: ClosedJaxpr = params["jaxpr"]
    ins, outs = params["in_shardings"], params["out_shardings"]
    if all(s is UNSPECIFIED for s in (*ins, *outs)):
        return closed
    return derived(closed, ("layouts", ins, outs), lambda: placing.at_edges(closed, ins, outs))


def _jit_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    jaxpr, ins, outs = params["jaxpr"], params["in_shardings"], params["out_shardings"]
    flags = nonzero(tangents)
    make = lambda: jvp_jaxpr(jaxpr, flags)  # noqa: E731
    jvp, out_flags = derived(jaxpr, ("jvp", tuple(flags)), make)
    given = [t for t in tangents if not isinstance(t, Zero)]
    ins, more = (*ins, *compress(ins, flags)), (*outs, *compress(outs, out_flags))
    changed = _changed(params, jvp, f"jvp_{params['name']}", ins, more)
    found = jit_p.bind(*primals, *given, **changed)
    found, out_tangents = split_list(found, [len(outs)])
    return found, spread(out_flags, out_tangents, [a.tangent() for a in jaxpr.out_avals])


def _jit_linearize(trace: LinearizeTrace, primals: Any, tangents: Any, **params: Any) -> Any:
    jaxpr, ins, outs = params["jaxpr"], params["in_shardings"], params["out_shardings"]
    flags = nonzero(tangents)
    cut = linearize_jaxpr(jaxpr, flags)
    free = (UNSPECIFIED,) * (len(cut.primal.out_avals) - len(outs))
    found = jit_p.bind(*primals, **_changed(params, cut.primal, params["name"], ins, outs + free))
    found, residuals = split_list(found, [len(outs)])
    given = [t for t in tangents if not isinstance(t, Zero)]
    ins, moved = (*free, *compress(ins, flags)), compress(outs, cut.out_nonzero)
    changed = _changed(params, cut.linear, f"linear_{params['name']}", ins, tuple(moved))
    out_tangents = trace.bind_linear(jit_p, [*residuals, *given], changed)
    return found, spread(cut.out_nonzero, out_tangents, [a.tangent() for a in jaxpr.out_avals])


def _jit_transpose(cts: Any, *operands: Any, **params: Any) -> list[Any]:
    ins, outs = params["in_shardings"], params["out_shardings"]
    linear = [isinstance(x, Linear) for x in operands]
    residuals = [s for s, lin in zip(ins, linear, strict=True) if not lin]

    def of_transposed(backward: ClosedJaxpr, name: str, flags: list[bool]) -> dict[str, Any]:
        given = [*residuals, *compress(outs, nonzero(cts))]
        back = compress(compress(ins, linear), flags)
        return _changed(params, backward, name, given, tuple(back))

    return transpose_call(jit_p, cts, operands, params, of_transposed)


def _jit_batch(axis: Any, operands: Any, at: Any, **params: Any) -> Any:
    def of_batched(batched: ClosedJaxpr, out_flags: Sequence[bool]) -> dict[str, Any]:
        def lies(s: Any, flag: bool, var: Any) -> Any:
            return placing.batched(s, axis, var.aval.ndim) if flag and s is not UNSPECIFIED else s

        jaxpr = params["jaxpr"].jaxpr
        flags = [d is not None for d in at]
        ins = map(lies, params["in_shardings"], flags, jaxpr.invars)
        outs = map(lies, params["out_shardings"], out_flags, jaxpr.outvars)
        return _changed(params, batched, params["name"], tuple(ins), tuple(outs)) | {
            "donated_invars": params["donated_invars"]
        }

    return batch_call(jit_p, axis, operands, at, params, of_batched)


def _jit_text(eqn: Eqn, names: Names) -> tuple[str, dict[str, Any]]:
    """As in JAX, inputs and outputs of the jaxpr have the names of the operands and results.

    Parameters that say nothing are left out.
    """
    params = eqn.params
    closed = params["jaxpr"]
    names.share(closed.jaxpr.outvars, eqn.outvars)
    names.share(closed.jaxpr.invars, eqn.invars)
    shown = {"name": params["name"]}
    for name in sorted(params.keys() - shown.keys()):
        value = params[name]
        if name == "ctx_mesh":
            is_said = value is not None and not value.empty
        elif type(value) is tuple:
            is_said = any(v and v is not UNSPECIFIED for v in value)
        else:
            is_said = bool(value)
        if name == "jaxpr" or is_said:
            shown[name] = value
    return "jit", shown


jit_p = call_primitive(
    "jit",
    body=_with_layouts,
    text=_jit_text,
    jvp=_jit_jvp,
    linearize=_jit_linearize,
    transpose=_jit_transpose,
    batch=_jit_batch,
)
