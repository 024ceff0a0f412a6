"""`custom_vmap`: a function with the user's own batching rule.

Evaluated, compiled or differentiated it is just the function; a derivative of it is batched by the
derivative of the rule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from spmd.base.context import attributed_to, state
from spmd.base.errors import ArgumentError, MissingRuleError, PytreeError, ShapeError
from spmd.base.source import current_source
from spmd.base.tree import tree_flatten, tree_map, tree_unflatten
from spmd.base.util import api_boundary, function_name, present_as, split_list
from spmd.core.aval import typeof
from spmd.core.call import call_primitive, nonzero, spread
from spmd.core.custom_common import Call, inline_transpose, positional, signature_of
from spmd.core.jvp import instantiate, jvp_flat, jvp_jaxpr
from spmd.core.mutable.cells import put_cells
from spmd.core.primitive import Zero
from spmd.core.structural import broadcast_leading
from spmd.core.trace import EVAL, unchanged
from spmd.core.vmap import BatchAxis, fronts


class custom_vmap:
    """Give a function its own rule for `vmap`: `rule(axis_size, in_batched, *args)`.

    `in_batched` has the structure of the arguments, with True where a leaf has a batched dim, which
    is its first. The rule returns `(out, out_batched)`, the second with the structure of the first.

    >>> import spmd.numpy as snp
    >>> @custom_vmap
    ... def f(x, y):
    ...     return x + y
    >>> @f.def_vmap
    ... def rule(axis_size, in_batched, x, y):
    ...     return x * 10 + y, True
    >>> spmd.vmap(f, (0, None))(snp.arange(3.0), 1.0)
    Array([ 1., 11., 21.], dtype=float32)
    """

    def __init__(self, fun: Callable[..., Any]):
        present_as(self, fun)
        self.fun = fun
        self.vmap_rule: Callable[..., Any] | None = None
        self._signature = signature_of(fun)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def def_vmap(self, vmap_rule: Callable[..., Any]) -> Callable[..., Any]:
        """Set the rule: `rule(axis_size, in_batched, *args) -> (out, out_batched)`."""
        self.vmap_rule = vmap_rule
        return vmap_rule

    @api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.vmap_rule is None:
            raise MissingRuleError(
                f"{current_source()}: custom_vmap: {function_name(self.fun)} has no rule; set one "
                "with .def_vmap"
            )
        if state.trace is EVAL:
            args, kwargs = tree_map(unchanged, (args, kwargs))
            return self.fun(*args, **kwargs)
        call = Call(self.fun, positional(self.fun, self._signature, args, kwargs), ())
        jaxpr, consts = call.stage()
        outs = custom_vmap_call_p.bind(
            *consts,
            *call.release(),
            jaxpr=jaxpr,
            name=call.name,
            num_consts=len(consts),
            _rule=self._flat_rule(call),
        )
        return call.rebuild(outs)

    def _flat_rule(self, call: Call) -> Callable[..., Any]:
        """The user's rule as a function of flat lists: (outs, which are batched)."""
        user_rule = self.vmap_rule
        assert user_rule is not None

        def rule(size: int, flags: Sequence[bool], xs: Sequence[Any]) -> tuple[Any, list[bool]]:
            in_batched = tree_unflatten(
                call.in_tree, put_cells(dict.fromkeys(call.cells, False), flags)
            )
            with attributed_to(None):
                pair = user_rule(size, list(in_batched), *call.unflatten(xs))
            if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
                raise ArgumentError(
                    f"the vmap rule of {call.name} must return a pair (out, out_batched), "
                    f"got {pair!r}"
                )
            outs, tree = tree_flatten(pair[0])
            marks, marked = tree_flatten(pair[1])
            if tree != call.out_tree or marked != tree:
                raise PytreeError(
                    f"the vmap rule of {call.name} returned an output of structure {tree} and "
                    f"out_batched of structure {marked}; both must be {call.out_tree}, that of "
                    f"{call.name}"
                )
            return outs, [bool(m) for m in marks]

        return rule


def _batch(
    axis: BatchAxis, operands: Any, at: Any, *, jaxpr: Any, num_consts: int, name: str, _rule: Any
) -> Any:
    flags = [d is not None for d in at]
    if any(flags[:num_consts]):
        raise ArgumentError(
            f"{current_source()}: {name} has a custom vmap rule and closes over a value that is "
            "batched; pass that value as an argument instead"
        )
    xs = fronts(axis, operands, at)[num_consts:]
    outs, marks = _rule(axis.size, flags[num_consts:], xs)
    for k, (x, batched, aval) in enumerate(zip(outs, marks, jaxpr.out_avals, strict=True)):
        wanted = (axis.size, *aval.shape) if batched else aval.shape
        if typeof(x).shape != wanted:
            raise ShapeError(
                f"the vmap rule of {name} returned output {k} of shape {typeof(x).shape} and "
                f"out_batched={batched}; it must have shape {wanted}"
            )
    return outs, [0 if m else None for m in marks]


def _jvp(primals: Any, tangents: Any, *, jaxpr: Any, num_consts: int, name: str, _rule: Any) -> Any:
    """The same call on primals and tangents; its batching rule is the derivative of the rule."""
    given = nonzero(tangents)
    both, out_given = jvp_jaxpr(jaxpr, given)
    if any(given[:num_consts]):
        # The rule cannot be told of the tangents of values that it closes over.
        raise ArgumentError(
            f"{current_source()}: {name} has a custom vmap rule and closes over a value that is "
            "being differentiated; pass that value as an argument instead"
        )
    n = len(primals) - num_consts
    moved = given[num_consts:]

    def rule(size: int, flags: Sequence[bool], xs: Sequence[Any]) -> tuple[Any, list[bool]]:
        """The derivative of the rule, on primals and tangents that are batched together."""
        ts = iter(zip(xs[n:], flags[n:], strict=True))
        pairs = [
            (x, b, *next(ts)) if moves else (x, b, Zero(typeof(x).tangent()), b)
            for x, b, moves in zip(xs[:n], flags[:n], moved, strict=True)
        ]
        batched = [b or tb for _, b, _, tb in pairs]
        firsts = [_lift(x, b, w, size) for (x, b, _, _), w in zip(pairs, batched, strict=True)]
        seconds = [_lift(t, b, w, size) for (_, _, t, b), w in zip(pairs, batched, strict=True)]
        marks: list[bool] = []

        def run(*args: Any) -> list[Any]:
            outs, found = _rule(size, batched, args)
            marks.extend(found)
            return outs

        outs, out_tangents = jvp_flat(run, firsts, seconds)
        kept = [k for k, nz in enumerate(out_given) if nz]
        outs += [instantiate(out_tangents[k]) for k in kept]
        return outs, [*marks, *(marks[k] for k in kept)]

    outs = custom_vmap_call_p.bind(
        *primals,
        *[t for t in tangents if not isinstance(t, Zero)],
        jaxpr=both,
        name=f"jvp_{name}",
        num_consts=num_consts,
        _rule=rule,
    )
    outs, found = split_list(outs, [len(jaxpr.out_avals)])
    return outs, spread(out_given, found, [a.tangent() for a in jaxpr.out_avals])


def _lift(x: Any, batched: bool, wanted: bool, size: int) -> Any:
    """A value with a leading batched dim, where its partner has one."""
    if batched or not wanted or isinstance(x, Zero):
        return x
    return broadcast_leading(x, size)


custom_vmap_call_p = call_primitive(
    "custom_vmap_call",
    jvp=_jvp,
    transpose=inline_transpose,
    custom=True,
    batch=_batch,
)
