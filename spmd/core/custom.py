"""`custom_jvp`: a function with the user's own forward derivative.

The rule replaces the function wherever it is differentiated; reverse mode transposes the rule's
map of tangents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from spmd.base import dtypes
from spmd.base.context import attributed_to, state
from spmd.base.errors import GradError, MissingRuleError, VaryingTypeError
from spmd.base.tree import tree_flatten, tree_unflatten
from spmd.base.util import api_boundary, function_name, split_list
from spmd.core.aval import is_arraylike, typeof
from spmd.core.call import call_primitive, nonzero, spread
from spmd.core.custom_common import (
    Call,
    CustomFunction,
    P,
    R,
    SymbolicZero,
    check_closure,
    inline_transpose,
    is_users,
    positional,
    shown,
    sorted_axes,
    varying_as,
)
from spmd.core.jvp import instantiate
from spmd.core.mutable.cells import put_cells
from spmd.core.primitive import Zero
from spmd.core.trace import EVAL, unchanged
from spmd.core.vmap import BatchAxis, batch_flat, batch_jaxpr, fronts, to_front


class custom_jvp(CustomFunction[P, R]):
    """Give `fun` its own forward derivative, set with `defjvp` or `defjvps`.

    The rule gets tuples of primals and tangents of equal shapes and dtypes, and returns the value
    and its tangent. Reverse mode transposes the rule's map of tangents. Arguments
    `nondiff_argnums` or `nondiff_argnames` are not differentiated; the rule gets them first. A call
    without a rule raises `GradError`, and so does a rule that returns no such pair or a tangent of
    another shape or dtype than its value.

    >>> @spmd.custom_jvp
    ... def f(x, y):
    ...     return x * y
    >>> @f.defjvp
    ... def f_jvp(primals, tangents):
    ...     (x, y), (tx, ty) = primals, tangents
    ...     return f(x, y), tx * y + x * ty
    >>> spmd.grad(f, argnums=(0, 1))(2.0, 3.0)
    (Array(3., dtype=float32, weak_type=True), Array(2., dtype=float32, weak_type=True))
    """

    jvp: Callable[..., Any] | None = None

    def defjvp(self, jvp: Callable[..., Any], symbolic_zeros: bool = False) -> Callable[..., Any]:
        """Set the rule: `jvp(*nondiff_args, primals, tangents) -> (out, tangent_out)`.

        With `symbolic_zeros` the tangents of arguments that are not differentiated are
        `spmd.custom_derivatives.SymbolicZero`s instead of arrays of zeros.
        """
        self.jvp, self.symbolic_zeros = jvp, symbolic_zeros
        return jvp

    def defjvps(self, *jvps: Callable[..., Any] | None) -> None:
        """Set one rule per argument, `jvp(tangent, out, *args)`, None for a zero derivative."""

        call = cast("Callable[..., Any]", self)

        def jvp(primals: Any, tangents: Any) -> Any:
            out = call(*primals)
            terms = [rule(t, out, *primals) for rule, t in zip(jvps, tangents, strict=True) if rule]
            total = terms[0] if terms else instantiate(Zero(typeof(out).tangent()))
            for term in terms[1:]:
                total = total + term
            return out, total

        self.defjvp(jvp)

    @api_boundary
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.jvp is None:
            raise MissingRuleError(
                f"custom_jvp: {function_name(self.fun)} has no rule; set one with .defjvp"
            )
        if state.trace is EVAL:
            return self.fun(*args, **kwargs)
        given = positional(self.fun, self._signature, args, kwargs)
        call = Call(self.fun, given, self.nondiff_argnums)
        return self._bind(custom_jvp_call_p, call, {"_jvp": self._flat_rule(call)})

    def _flat_rule(self, call: Call) -> Callable[..., Any]:
        """The user's jvp rule on flat primals and tangents, whose results are checked."""
        jvp = self.jvp
        assert jvp is not None
        nondiff = [call.nondiff[i] for i in sorted(call.nondiff)]
        symbolic = self.symbolic_zeros

        def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            # Literals of a jaxpr are numbers: a rule gets arrays, as it does of a traced function.
            ins = call.unflatten(list(map(unchanged, primals)))
            moves = [shown(t, symbolic) for t in tangents]
            if state.axes and is_users(jvp):
                moves = [varying_as(t, typeof(x)) for t, x in zip(moves, primals, strict=True)]
            moves = tree_unflatten(call.in_tree, put_cells(dict.fromkeys(call.cells), moves))
            with attributed_to(None):
                pair = jvp(*nondiff, ins, moves)
            if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
                raise GradError(
                    f"the custom jvp rule of {call.name} must return a pair "
                    f"(primal_out, tangent_out), got {pair!r}"
                )
            out, tangent = pair
            outs, tree = tree_flatten(out)
            call.set_out_tree(tree, "custom jvp rule")
            out_tangents = [
                Zero(typeof(x).tangent()) if t is None or isinstance(t, SymbolicZero) else t
                for x, t in zip(outs, tree.flatten_up_to(tangent, "tangent_out"), strict=True)
            ]
            _match_tangents(call.name, outs, out_tangents)
            if state.axes and is_users(jvp):
                _check_varies(call.name, outs, out_tangents)
            return outs, out_tangents

        rule.__name__ = function_name(jvp)
        vars(rule)["symbolic_zeros"] = symbolic
        return rule


def _check_varies(name: str, outs: Sequence[Any], tangents: Sequence[Any]) -> None:
    """Raise if in a `shard_map` a tangent varies over other axes than its value."""
    for k, (x, t) in enumerate(zip(outs, tangents, strict=True)):
        if isinstance(t, Zero):
            continue
        want, got = typeof(x), typeof(t)
        if want.vma != got.vma and got.dtype != dtypes.float0:
            lacking = want.vma - got.vma
            advice = "let out depend on it alike, or make the sum with lax.psum"
            if lacking:
                advice = f"use lax.pcast(tangent, {sorted_axes(lacking)}, to='varying')"
            raise VaryingTypeError(
                f"the custom jvp rule of {name} returned a tangent {got.short()} for output {k}, "
                f"which is {want.short()}: both must vary over the same axes of the shard_map; "
                f"{advice}"
            )


def _match_tangents(name: str, outs: Sequence[Any], tangents: Sequence[Any]) -> None:
    if len(outs) != len(tangents):
        raise GradError(
            f"the custom jvp rule of {name} returned {len(outs)} outputs but {len(tangents)} "
            "output tangents; it must return (primal_out, tangent_out) of the same structure"
        )
    for k, (x, t) in enumerate(zip(outs, tangents, strict=True)):
        if isinstance(t, Zero):
            continue
        if not is_arraylike(t):
            raise GradError(
                f"the custom jvp rule of {name} returned {t!r} as the tangent of output {k}: "
                "tangent_out must have the structure of primal_out"
            )
        want, got = typeof(x).tangent(), typeof(t)
        if want.dtype != dtypes.float0 and (want.shape, want.dtype) != (got.shape, got.dtype):
            raise GradError(
                f"the custom jvp rule of {name} returned a tangent {got} for output {k}, which is "
                f"{typeof(x)}: shape and dtype must be the same"
            )


def _custom_jvp_jvp(
    primals: Any, tangents: Any, *, num_consts: int, _jvp: Any, name: str, **_: Any
):
    check_closure(name, tangents[:num_consts])
    return _jvp(primals[num_consts:], tangents[num_consts:])


def _custom_jvp_batch(
    axis: BatchAxis, operands: Any, at: Any, *, jaxpr: Any, num_consts: int, _jvp: Any, name: str
) -> Any:
    """Batch the function, and the rule: it is run under `vmap` when it is asked for."""
    flags = [d is not None for d in at]
    batched, _ = batch_jaxpr(jaxpr, axis, flags, force_out=True)
    in_dims = [0 if f else None for f in flags[num_consts:]]

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        n, moved = len(primals), nonzero(tangents)
        # Of one example: a tangent that is zero has no batch dim.
        pairs = zip([typeof(x).tangent() for x in primals], in_dims, strict=True)
        zeros = [a if d is None else a.update(shape=a.shape[1:]) for a, d in pairs]
        out_moved: list[bool] = []

        def flat(*xs: Any) -> list[Any]:
            outs, ts = _jvp(xs[:n], spread(moved, xs[n:], zeros))
            out_moved.extend(nonzero(ts))
            return [*outs, *(t for t in ts if not isinstance(t, Zero))]

        given = [t for t in tangents if not isinstance(t, Zero)]
        dims_of_given = [d for d, m in zip(in_dims, moved, strict=True) if m]
        outs, dims = batch_flat(flat, axis, [*primals, *given], [*in_dims, *dims_of_given])
        outs = [to_front(x, d, axis.size) for x, d in zip(outs, dims, strict=True)]
        outs, found = split_list(outs, [len(out_moved)])
        return outs, spread(out_moved, found, [typeof(x).tangent() for x in outs])

    outs = custom_jvp_call_p.bind(
        *fronts(axis, operands, at), jaxpr=batched, name=name, num_consts=num_consts, _jvp=rule
    )
    return outs, [0] * len(outs)


def _text(eqn: Any, names: Any) -> tuple[str, dict[str, Any]]:
    params = eqn.params
    shown = {"name": params["name"], "call_jaxpr": params["jaxpr"], "jvp": params["_jvp"]}
    return "custom_jvp_call", shown | {
        "symbolic_zeros": getattr(params["_jvp"], "symbolic_zeros", False)
    }


custom_jvp_call_p = call_primitive(
    "custom_jvp_call",
    text=_text,
    jvp=_custom_jvp_jvp,
    transpose=inline_transpose,
    custom=True,
    batch=_custom_jvp_batch,
)
