"""What `cond`, `while_loop` and `scan` share: staging their functions, and matching types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spmd.core.aval import ShapedArray, typeof
from spmd.core.axis import cast_to_vma
from spmd.core.errors import PytreeError, ShapeError
from spmd.core.ir import ClosedJaxpr
from spmd.core.names import function_source
from spmd.core.rewrite import close, eval_closed, hoist_tracers
from spmd.core.source import current_source
from spmd.core.stage import Debug, trace_to_jaxpr
from spmd.core.trace import Tracer
from spmd.core.tree import TreeDef, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten
from spmd.core.util import function_name
from spmd.lax.convert import convert_element_type


class Staged:
    """A function of pytrees as a jaxpr; values it closes over that are traced come in `consts`."""

    def __init__(self, f: Callable[..., Any], in_tree: TreeDef, avals: Sequence[ShapedArray]):
        self.out_tree: TreeDef | None = None
        self.name = function_name(f)

        def flat(*leaves: Any) -> list[Any]:
            outs, self.out_tree = tree_flatten(f(*tree_unflatten(in_tree, leaves)))
            return outs

        debug = Debug(self.name, (), function_source(f))
        closed = trace_to_jaxpr(flat, avals, debug)
        self.closed, self.consts = hoist_tracers(closed)

    @property
    def out_avals(self) -> list[ShapedArray]:
        return self.closed.out_avals


def is_concrete(x: Any) -> bool:
    """Whether `x` has a value now."""
    return not isinstance(x, Tracer) or x.concrete() is not None


def same_type(a: ShapedArray, b: ShapedArray) -> bool:
    """Whether two avals agree in shape and dtype."""
    return a.shape == b.shape and a.dtype == b.dtype


def leaf_paths(tree: Any) -> list[str]:
    """The path of each leaf as text."""
    return [keystr(path) for path, _ in tree_flatten_with_path(tree)[0]]


def check_carry(
    what: str, in_tree: TreeDef, ins: Sequence[ShapedArray], out_tree: Any, outs: Sequence[Any]
) -> None:
    """Raise an error if a loop body's output carry has not the type of its input carry."""
    if in_tree != out_tree:
        raise PytreeError(
            f"{current_source()}: {what}: the body must return a carry of the structure it is "
            f"given: given {in_tree}, returned {out_tree}"
        )
    paths = leaf_paths(tree_unflatten(in_tree, list(range(len(ins)))))
    wrong = [
        f"  carry{path}: given {i.dtype}{list(i.shape)}, returned {o.dtype}{list(o.shape)}"
        for path, i, o in zip(paths, ins, outs, strict=True)
        if not same_type(i, o)
    ]
    if wrong:
        raise ShapeError(
            f"{current_source()}: {what}: the body must return a carry of the shapes and dtypes "
            "it is given:\n" + "\n".join(wrong) + "\n"
            "Convert the initial value or the result, e.g. with .astype(...)."
        )


def widen(x: Any, target: ShapedArray) -> Any:
    """`x` with the weak type and varying axes of `target` (same shape and dtype)."""
    aval = typeof(x)
    if aval.weak_type and not target.weak_type:
        x = convert_element_type(x, target.dtype)
    return cast_to_vma(x, target.vma, aval.vma)


def join_avals(rows: Sequence[Sequence[ShapedArray]]) -> list[ShapedArray]:
    """Position by position: weak only if all are, varying over what any varies over."""
    out = []
    for column in zip(*rows, strict=True):
        vma = frozenset().union(*(a.vma for a in column))
        weak = all(a.weak_type for a in column)
        out.append(column[0].update(weak_type=weak, vma=vma))
    return out


def retype_outputs(closed: ClosedJaxpr, target: Sequence[ShapedArray]) -> ClosedJaxpr:
    """The jaxpr with casts appended so that its outputs have the target avals."""
    if all(a is t for a, t in zip(closed.out_avals, target, strict=True)):
        return closed

    def widened(*args: Any) -> list[Any]:
        return [widen(x, t) for x, t in zip(eval_closed(closed, *args), target, strict=True)]

    return close(widened, closed.in_avals, closed.jaxpr.name)


def inner_axes(*names: str) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """The `axes` slot of a primitive whose parameters `names` hold jaxprs (or tuples of them)."""

    def axes(params: dict[str, Any]) -> tuple[Any, ...]:
        found: dict[Any, None] = {}
        for name in names:
            held = params[name]
            for closed in held if isinstance(held, tuple) else (held,):
                for eqn in closed.eqns:
                    found.update(dict.fromkeys(eqn.prim.axes(eqn.params)))
        return tuple(found)

    return axes


def inner_effects(*names: str) -> Callable[[dict[str, Any]], frozenset[str]]:
    """The `effects` slot of a primitive whose parameters `names` hold jaxprs."""

    def effects(params: dict[str, Any]) -> frozenset[str]:
        out: frozenset[str] = frozenset()
        for name in names:
            held = params[name]
            for closed in held if isinstance(held, tuple) else (held,):
                out = out | closed.effects
        return out

    return effects
