"""Functions made explicit: closed-over values as arguments, and a gradient beside a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from spmd.api.flat import FlatFunction
from spmd.base.dtypes import is_inexact
from spmd.base.errors import GradError, PytreeError
from spmd.base.source import current_source
from spmd.base.tree import TreeDef, register_pytree_node_class, tree_flatten, tree_unflatten
from spmd.base.util import api_boundary, function_name, wraps
from spmd.core.argument_names import check_arrays, debug_info, leaf_names
from spmd.core.aval import typeof
from spmd.core.custom_vjp import custom_vjp
from spmd.core.ir import Jaxpr
from spmd.core.rewrite import eval_jaxpr
from spmd.core.stage import trace_to_jaxpr
from spmd.core.trace import Tracer
from spmd.core.trace_once import trace_once

P = ParamSpec("P")
R = TypeVar("R")

# ---- closure_convert ---------------------------------------------------------------------------


@api_boundary
def closure_convert(
    fun: Callable[..., Any], *example_args: Any
) -> tuple[Callable[..., Any], list[Any]]:
    """Turn the values that `fun` closes over into further arguments of it.

    The result is a pair: the function, and the list of these values. Only traced floating-point
    values are moved out: a derivative may be taken with respect to them. `fun` is traced at
    the shapes and dtypes of `example_args`; the result accepts those only, and raises `PytreeError`
    for another structure. Use it in a function with a custom rule (`custom_vjp`) that takes
    functions as arguments.

    >>> def outer(y):
    ...     g, consts = spmd.closure_convert(lambda x: snp.sin(x) * y, 0.0)
    ...     return len(consts), g(1.0, *consts)
    >>> spmd.grad(lambda y: outer(y)[1])(2.0).round(4)
    Array(0.8415, dtype=float32, weak_type=True)
    """
    flat, in_tree = tree_flatten((example_args, {}))
    check_arrays(f"closure_convert({function_name(fun)})", leaf_names(fun, example_args), flat)
    avals = [typeof(x) for x in flat]
    flat_f = FlatFunction(fun, in_tree)

    def flat_with_tree(*xs: Any) -> tuple[list[Any], Any]:
        return flat_f(*xs), flat_f.out_tree

    key = "closure_convert", in_tree
    closed, out_tree = trace_once(fun, key, flat_with_tree, avals, debug_info(fun, example_args))
    moves = [isinstance(c, Tracer) and is_inexact(typeof(c).dtype) for c in closed.consts]
    hoisted = [c for c, m in zip(closed.consts, moves, strict=True) if m]

    @wraps(fun)
    def converted(*args: Any) -> Any:
        count = len(args) - len(hoisted)
        leaves, tree = tree_flatten((args[:count], {}))
        if count < 0 or tree != in_tree:
            raise PytreeError(
                f"{current_source()}: closure_convert({function_name(fun)}): the arguments must "
                f"have the structure of the example arguments, {in_tree}, followed by the "
                f"{len(hoisted)} values it closed over, got {tree}"
            )
        given = iter(args[count:])
        consts = [next(given) if m else c for c, m in zip(closed.consts, moves, strict=True)]
        return tree_unflatten(out_tree, eval_jaxpr(closed.jaxpr, consts, *leaves))

    return converted, hoisted


# ---- custom_gradient ---------------------------------------------------------------------------


@register_pytree_node_class
class _Rule:
    """A vjp function as residuals: its jaxpr, and the values it closes over."""

    def __init__(self, jaxpr: Jaxpr, consts: Sequence[Any], out_tree: TreeDef):
        self.jaxpr, self.consts, self.out_tree = jaxpr, tuple(consts), out_tree

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        return self.consts, (self.jaxpr, self.out_tree)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> _Rule:
        jaxpr, out_tree = aux
        return cls(jaxpr, children, out_tree)

    def __call__(self, ct: Any) -> Any:
        leaves, _ = tree_flatten(ct)
        outs = eval_jaxpr(self.jaxpr, self.consts, *leaves)
        return tree_unflatten(self.out_tree, outs)


def custom_gradient(fun: Callable[P, tuple[R, Any]]) -> Callable[P, R]:
    """Give `fun` its own reverse derivative, which it returns beside its value.

    `fun(*args)` returns `(value, vjp)`, where `vjp(cotangent)` returns one cotangent for each
    argument, of its shape and dtype (a tuple if there are several), and may use anything that `fun`
    computed. As with `custom_vjp`, there is no forward derivative. Raises `GradError` if `fun`
    returns no such pair.

    >>> @spmd.custom_gradient
    ... def f(x):
    ...     return x**2, lambda ct: ct * x
    >>> f(3.0), spmd.grad(f)(3.0)
    (9.0, Array(3., dtype=float32, weak_type=True))
    """

    call: Callable[..., Any] = fun

    def pair(*args: Any) -> tuple[Any, Callable[..., Any]]:
        found = call(*args)
        if not (isinstance(found, tuple) and len(found) == 2 and callable(found[1])):
            raise GradError(
                f"custom_gradient({function_name(fun)}): the function must return a pair "
                f"(value, vjp), the second a function, got {found!r}"
            )
        return found

    @api_boundary
    @wraps(fun)
    def value(*args: Any) -> Any:
        return pair(*args)[0]

    wrapped: Any = custom_vjp(value)

    def forward(*args: Any) -> tuple[Any, _Rule]:
        out, rule = pair(*args)
        leaves, out_tree = tree_flatten(out)
        trees: list[TreeDef] = []

        def flat(*cts: Any) -> list[Any]:
            found, tree = tree_flatten(rule(tree_unflatten(out_tree, cts)))
            trees.append(tree)
            return found

        closed = trace_to_jaxpr(flat, [typeof(x).tangent() for x in leaves])
        return out, _Rule(closed.jaxpr, closed.consts, trees[0])

    def backward(rule: _Rule, ct: Any) -> tuple[Any, ...]:
        found = rule(ct)
        return found if isinstance(found, tuple) else (found,)

    wrapped.defvjp(forward, backward)
    return wrapped
