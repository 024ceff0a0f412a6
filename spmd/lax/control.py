"""The base of `cond`, `while_loop` and `scan`: staging their functions, and matching types."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from spmd.base.dtypes import promote
from spmd.base.errors import PytreeError, ShapeError, VaryingTypeError
from spmd.base.source import current_source, is_called_by_user
from spmd.base.tree import TreeDef, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten
from spmd.base.util import function_name
from spmd.core.argument_names import function_source
from spmd.core.aval import ShapedArray, typeof
from spmd.core.explicit import joined_sharding, match_type
from spmd.core.ir import ClosedJaxpr
from spmd.core.rewrite import close, eval_closed, hoist_tracers
from spmd.core.stage import Debug
from spmd.core.trace import Tracer
from spmd.core.trace_once import trace_once
from spmd.lax.convert import convert_element_type


class Staged:
    """A function of pytrees as a jaxpr; values it closes over that are traced come in `consts`.

    A function is traced once for its operands' types (`trace_once`). Each `caller` has jaxprs of
    its own, as in JAX.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        in_tree: TreeDef,
        avals: Sequence[ShapedArray],
        caller: str = "",
        carried: int = 0,
    ):
        self.name = function_name(f)

        def flat(*leaves: Any) -> tuple[list[Any], TreeDef]:
            return tree_flatten(f(*tree_unflatten(in_tree, leaves)))

        # A function of ours around a user's is made anew for each call; the user's is not.
        owner, role = getattr(f, "stands_for", (f, ""))
        debug = Debug(self.name, (), function_source(f))
        key = caller, role, in_tree, carried
        finish = functools.partial(_strong_where_returned, carried) if carried else None
        closed, self.out_tree = trace_once(owner, key, flat, avals, debug, finish)
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


def settle_carry(
    what: str,
    tree: TreeDef,
    carry: list[Any],
    stage: Callable[[list[ShapedArray]], tuple[Staged, TreeDef, list[ShapedArray]]],
    inside: int | None = None,
) -> tuple[list[Any], Staged, list[bool]]:
    """Change the initial carry (weak types, varying axes) until the body gives back its type.

    `stage` traces the body at the carry's avals and tells the structure and avals of the carry it
    returns. `inside` is the position of the user's carry in ours, if ours counts too. The flags
    say which results have a weak type: those of the body at the weak types that the user gave.

    As in JAX, a body is not traced again because a weak type is all that it does not give back:
    inside, the carry is what the user gave. `_strong_where_returned` has made it of one type.
    """
    weak: list[bool] = []
    dtypes: list[Any] | None = None
    while True:
        avals = [typeof(x) for x in carry]
        staged, out_tree, outs = stage(avals)
        if dtypes != [a.dtype for a in avals]:
            dtypes = [a.dtype for a in avals]
            weak = [a.weak_type for a in staged.out_avals]
        if tree != out_tree:
            raise PytreeError(
                f"{current_source()}: {what}: the body must return a carry of the structure it is "
                f"given: given {_user_tree(tree, inside)}, "
                f"returned {_user_tree(out_tree, inside)}"
            )
        _check_varies(what, tree, avals, outs, inside)
        wanted = [_carry_type(a, o) for a, o in zip(avals, outs, strict=True)]
        # A weak type that is returned as it was must not be lost by another trace.
        wanted = [a if w is a.strip_weak() else w for a, w in zip(avals, wanted, strict=True)]
        if all(a is w for a, w in zip(avals, wanted, strict=True)):
            _check_carry(what, tree, avals, outs, inside)
            taken = staged.closed.in_avals[len(staged.consts) :]
            return [widen(x, a) for x, a in zip(carry, taken, strict=False)], staged, weak
        carry = [widen(x, w) for x, w in zip(carry, wanted, strict=True)]


def _strong_where_returned(carried: int, closed: ClosedJaxpr) -> ClosedJaxpr:
    """The body with inputs that have no weak type where the result in their place has none."""
    ins = list(closed.in_avals)
    for k, out in enumerate(closed.out_avals[:carried]):
        if ins[k] is not out and ins[k].strip_weak() is out:
            ins[k] = out
    if ins == closed.in_avals:
        return closed
    outs = closed.out_avals

    def strong(*args: Any) -> list[Any]:
        return [widen(x, a) for x, a in zip(eval_closed(closed, *args), outs, strict=True)]

    return close(strong, ins, closed.jaxpr.name)


def _user_tree(tree: TreeDef, inside: int | None) -> TreeDef:
    return tree if inside is None else tree.parts[inside]


def _carry_type(given: ShapedArray, returned: ShapedArray) -> ShapedArray:
    """The type that a carry must start with, if the body turns `given` into `returned`.

    A Python number adapts: `total = 0` that grows by floats starts as a float.
    """
    if given is returned:
        return given
    weak, vma = given.weak_type and returned.weak_type, given.vma | returned.vma
    given = given.update(sharding=joined_sharding([given, returned]) or given.explicit)
    if given.weak_type and given.dtype != returned.dtype:
        pairs = ((given.dtype, True), (returned.dtype, returned.weak_type))
        dtype, _ = promote(pairs)
        if dtype != given.dtype:
            return given.update(dtype=dtype, weak_type=False, vma=vma)
    return given.update(weak_type=weak, vma=vma)


def _check_carry(
    what: str, tree: TreeDef, ins: Sequence[ShapedArray], outs: Sequence[ShapedArray], inside: Any
) -> None:
    """Raise an error if a loop body's output carry has not the type of its input carry."""
    if all([i is o for i, o in zip(ins, outs, strict=True)]):
        return
    paths = leaf_paths(tree_unflatten(tree, list(range(len(ins)))))
    outer = "" if inside is None else f"[{inside}]"
    wrong = [
        f"  carry{path.removeprefix(outer)}: given {i.dtype}{list(i.shape)}, "
        f"returned {o.dtype}{list(o.shape)}"
        for path, i, o in zip(paths, ins, outs, strict=True)
        if not same_type(i, o)
    ]
    split = [
        f"  carry{path.removeprefix(outer)}: given {i.short()}, returned {o.short()}"
        for path, i, o in zip(paths, ins, outs, strict=True)
        if o.explicit is not None and joined_sharding([i, o]) is None
    ]
    if split and not wrong:
        raise VaryingTypeError(
            f"{current_source()}: {what}: the body must return a carry laid out as it is given:\n"
            + "\n".join(split)
            + "\nLay the initial value or the result out with reshard."
        )
    if wrong:
        grows = any(i.shape != o.shape for i, o in zip(ins, outs, strict=True))
        raise ShapeError(
            f"{current_source()}: {what}: the body must return a carry of the shapes and dtypes "
            "it is given:\n" + "\n".join(wrong) + "\n" + (_FIXED_SHAPE if grows else _FIXED_DTYPE)
        )


def _check_varies(
    what: str, tree: TreeDef, ins: Sequence[ShapedArray], outs: Sequence[ShapedArray], inside: Any
) -> None:
    """Raise if a carry of a user's loop in a `shard_map` comes back with other varying axes."""
    wrong = [k for k, (i, o) in enumerate(zip(ins, outs, strict=True)) if i.vma != o.vma]
    if not wrong:
        return
    paths = leaf_paths(tree_unflatten(tree, list(range(len(ins)))))
    outer = "" if inside is None else f"[{inside}]"
    wrong = [k for k in wrong if paths[k].startswith(outer)]  # what we count, or keep, adapts
    if not wrong or any(not same_type(ins[k], outs[k]) for k in wrong) or not is_called_by_user():
        return
    lines = []
    for k in wrong:
        path = paths[k].removeprefix(outer)
        more, fewer = outs[k].vma - ins[k].vma, ins[k].vma - outs[k].vma
        advice = [f"pcast(init{path}, {_axes(more)}, to='varying') before the loop"] * bool(more)
        advice += [f"pcast(result, {_axes(fewer)}, to='varying') in the body"] * bool(fewer)
        types = f"given {ins[k].short()}, returned {outs[k].short()}"
        lines.append(f"  carry{path}: {types}; use lax.{' and lax.'.join(advice)}")
    raise VaryingTypeError(
        f"{current_source()}: {what}: the body must return a carry that varies over the axes of "
        "the shard_map over which it is given:\n" + "\n".join(lines)
    )


def _axes(names: frozenset[Any]) -> str:
    return repr(tuple(sorted(names, key=str)))


_FIXED_DTYPE = "Convert the initial value or the result, e.g. with .astype(...)."
_FIXED_SHAPE = (
    "A loop is compiled once, so its carry keeps its shape: start with an array of the final size "
    "and write into it, x.at[i].set(value), or return the parts as the ys of a scan."
)


def widen(x: Any, target: ShapedArray) -> Any:
    """`x` with the weak type, varying axes and sharding of `target` (same shape and dtype)."""
    aval = typeof(x)
    if aval.weak_type != target.weak_type:
        x = convert_element_type(x, target.dtype, target.weak_type)
    return match_type(x, target)


def with_weak_types(values: Sequence[Any], weak: Sequence[bool]) -> list[Any]:
    """The values, of weak types where the flags say so."""
    avals = [typeof(x) for x in values]
    return [widen(x, a.update(weak_type=w)) for x, a, w in zip(values, avals, weak, strict=True)]


def join_avals(rows: Sequence[Sequence[ShapedArray]]) -> list[ShapedArray]:
    """Position by position: the first, varying over the axes of any; laid out."""
    out = []
    for column in zip(*rows, strict=True):
        vma = frozenset().union(*(a.vma for a in column))
        out.append(column[0].update(vma=vma, sharding=joined_sharding(column)))
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
