"""`jax.api_util`: functions of pytrees as functions of flat lists."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from spmd.as_jax.jax.extend.linear_util import (
    Store,
    WrappedFun,
    transformation2,
    transformation_with_aux2,
)
from spmd.as_jax.refuse import missing
from spmd.base.record import record
from spmd.base.tree import TreeDef, broadcast_prefix, tree_flatten, tree_unflatten
from spmd.core.aval import typeof

__all__ = [
    "argnums_partial",
    "debug_info",
    "donation_vector",
    "flatten_axes",
    "flatten_fun",
    "flatten_fun_nokwargs",
    "rebase_donate_argnums",
    "safe_map",
    "shaped_abstractify",
]
__getattr__ = missing("jax.api_util")

shaped_abstractify = typeof


@record
class DebugInfo:
    """The traced function, for messages."""

    traced_for: str = ""
    func_src_info: str = ""
    arg_names: tuple[str, ...] | None = None
    result_paths: Any = None


def debug_info(
    traced_for: str,
    fun: Any,
    args: Any,
    kwargs: Any,
    *,
    static_argnums: Sequence[int] = (),
    static_argnames: Sequence[str] = (),
    result_paths_thunk: Any = None,
    sourceinfo: str | None = None,
    signature: Any = None,
) -> DebugInfo:
    """The names of a function that is about to be traced."""
    return DebugInfo(traced_for, getattr(fun, "__name__", str(fun)))


def safe_map(f: Callable[..., Any], *args: Any) -> list[Any]:
    """`map` over lists of one length."""
    lists = list(map(list, args))
    if len({len(found) for found in lists}) > 1:
        raise ValueError(f"safe_map: lengths differ: {[len(found) for found in lists]}")
    return list(map(f, *lists))


@transformation_with_aux2
def flatten_fun(f: Any, store: Store, in_tree: Any, *flat: Any) -> Any:
    """A function of the leaves of `(args, kwargs)`; the store gets the structure of its result."""
    args, kwargs = tree_unflatten(in_tree, flat)
    leaves, tree = tree_flatten(f(*args, **kwargs))
    store.store(tree)
    return leaves


@transformation_with_aux2
def flatten_fun_nokwargs(f: Any, store: Store, in_tree: Any, *flat: Any) -> Any:
    """A function of the leaves of its arguments; the store gets the structure of its result."""
    leaves, tree = tree_flatten(f(*tree_unflatten(in_tree, flat)))
    store.store(tree)
    return leaves


@transformation2
def _with_fixed(f: Any, where: tuple[int, ...], fixed: tuple[Any, ...], *dynamic: Any, **kw: Any):
    args: list[Any] = list(fixed)
    for k, x in zip(where, dynamic, strict=True):
        args[k] = x
    return f(*args, **kw)


def argnums_partial(
    f: WrappedFun,
    dyn_argnums: int | Sequence[int],
    args: Sequence[Any],
    require_static_args_hashable: bool = True,
) -> tuple[WrappedFun, tuple[Any, ...]]:
    """A function of some of the arguments, with the values of these; the others are fixed."""
    wanted = (dyn_argnums,) if isinstance(dyn_argnums, int) else tuple(dyn_argnums)
    where = tuple(k % len(args) for k in wanted)
    fixed = tuple(None if k in where else x for k, x in enumerate(args))
    return _with_fixed(f, where, fixed), tuple(args[k] for k in where)


def flatten_axes(
    name: str, treedef: TreeDef, axis_tree: Any, *, kws: bool = False, tupled_args: bool = False
) -> list[Any]:
    """One entry of `axis_tree` for each leaf of the tree; it is a prefix of it, None an entry.

    `kws` and `tupled_args` say what the trees are; JAX's messages depend on them.
    """
    return broadcast_prefix(
        axis_tree, tree_unflatten(treedef, [0] * treedef.num_leaves), name, lambda x: x is None
    )


def donation_vector(
    donate_argnums: Any, donate_argnames: Any, in_tree: TreeDef, kws: bool = True
) -> tuple[bool, ...]:
    """Whether each leaf of `(args, kwargs)` is donated; without `kws`, of the arguments alone."""
    args, kwargs = in_tree.children() if kws else (in_tree, None)
    out: list[bool] = []
    for k, arg in enumerate(args.children()):
        out += [k in donate_argnums] * arg.num_leaves
    if kwargs is not None:
        _, names = kwargs.node_data() or (dict, ())
        for name, value in zip(names, kwargs.children(), strict=True):
            out += [name in donate_argnames] * value.num_leaves
    return tuple(out)


def rebase_donate_argnums(donate_argnums: Any, static_argnums: Any) -> tuple[int, ...]:
    """The positions of donated arguments among those that are not static.

    >>> rebase_donate_argnums((3, 4), (0, 1))
    (1, 2)
    """
    static = sorted(set(static_argnums))
    if both := set(donate_argnums) & set(static):
        raise ValueError(
            f"static_argnums {static} and donate_argnums {sorted(set(donate_argnums))} must "
            f"not intersect; both have {sorted(both)}"
        )
    return tuple(k - sum(s < k for s in static) for k in sorted(set(donate_argnums)))


def infer_argnums_and_argnames(
    sig: inspect.Signature,
    argnums: int | Sequence[int] | None,
    argnames: str | Sequence[str] | None,
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The positions and names of arguments of which one of the two is given."""
    by_position = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = list(sig.parameters.items())
    nums = () if argnums is None else (argnums,) if isinstance(argnums, int) else tuple(argnums)
    names = (
        () if argnames is None else (argnames,) if isinstance(argnames, str) else tuple(argnames)
    )
    if argnums is not None and argnames is None:
        names = tuple(parameters[k][0] for k in nums if parameters[k][1].kind in by_name)
    elif argnames is not None and argnums is None:
        nums = tuple(
            k for k, (n, p) in enumerate(parameters) if p.kind in by_position and n in names
        )
    return nums, names
