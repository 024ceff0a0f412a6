"""The user's names for things: parameters and pytree paths of a function's flat arguments.

Shared by jit, vmap, pmap, shard_map and grad, so that every error about an argument names it the
same way: `params['w'][0]`, not "argument 7".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from spmd.base.errors import ArgumentError, AxisError, PytreeError, ShapeError
from spmd.base.source import UNKNOWN, Source, current_source
from spmd.base.tree import broadcast_prefix, keystr, tree_leaves, tree_leaves_with_path
from spmd.base.util import function_name
from spmd.core.aval import ShapedArray, is_arraylike
from spmd.core.stage import Debug

SHOWN = 5  # how many offending leaves an error lists


def parameter_names(f: Callable[..., Any], count: int) -> list[str]:
    """The names of the first `count` positional parameters."""
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):
        return [f"args[{k}]" for k in range(count)]
    names: list[str] = []
    for p in parameters:
        if p.kind is p.VAR_POSITIONAL:
            names += [f"{p.name}[{k}]" for k in range(count - len(names))]
            break
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            names.append(p.name)
    names += [f"args[{k}]" for k in range(len(names), count)]
    return names[:count]


def leaf_names(
    f: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None = None
) -> list[str]:
    """One name for each leaf of (args, kwargs), as the user would write it."""
    out: list[str] = []
    for name, arg in zip(parameter_names(f, len(args)), args, strict=True):
        out += [name + keystr(path) for path, _ in tree_leaves_with_path(arg)]
    for name in sorted(kwargs or ()):
        out += [name + keystr(path) for path, _ in tree_leaves_with_path((kwargs or {})[name])]
    return out


def function_source(f: Callable[..., Any]) -> Source:
    """The source location of a function."""
    code = getattr(inspect.unwrap(f) if callable(f) else f, "__code__", None)
    if code is None:
        return UNKNOWN
    return Source(code.co_filename, code.co_firstlineno, code.co_name)


def debug_info(
    f: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None = None
) -> Debug:
    """The texts about a traced function and its arguments, for errors inside of it."""
    names = tuple(leaf_names(f, args, kwargs))
    return Debug(function_name(f), names, function_source(f))


def check_arrays(what: str, names: Sequence[str], leaves: Sequence[Any]) -> None:
    """Raise an ArgumentError that names the first leaf that is no array."""
    for name, x in zip(names, leaves, strict=True):
        if not is_arraylike(x):
            raise ArgumentError(
                f"{current_source()}: {what}: argument {name} is {_brief(x)} of type "
                f"{type(x).__name__}, which is not an array or number. {_how_to_bind(what, name)}"
            )


def _how_to_bind(what: str, name: str) -> str:
    """The advice for an argument that belongs to the program and not to its data."""
    if what.startswith("pmap"):
        return "Name its position in static_broadcasted_argnums, or bind it with functools.partial."
    if what.startswith("device_put"):
        return "Devices hold arrays and numbers only: keep other values beside them."
    if what == "with_sharding_constraint":
        return "Only arrays and numbers have layouts: leave other values out."
    kind = what.partition("(")[0]
    root = name.partition("[")[0].partition(".")[0]
    if root != name:
        return f"Take it out of {root}, or register its class as a pytree (spmd.tree_util)."
    return f"Bind it before: {kind}(functools.partial(f, {root}=...)), or close over it."


def spread_over_arguments(
    what: str, option: str, given: Any, named: Sequence[tuple[str, Any]], is_leaf: Any = None
) -> list[Any]:
    """One entry of a per-argument option (in_axes, in_specs) for each leaf of the arguments.

    `named` holds the name and value of each positional argument, `()` for one without leaves to
    give entries to (a static one).
    """
    whole = not isinstance(given, tuple) or (is_leaf is not None and is_leaf(given))
    if not whole and len(given) != len(named):
        names = ", ".join(name for name, _ in named)
        raise PytreeError(
            f"{what}: {option}={given} has {len(given)} entries, but the call has {len(named)} "
            f"positional arguments ({names}); give one entry for each, or one for all"
        )
    try:
        if whole:
            values = tuple(value for _, value in named)
            return broadcast_prefix(given, values, option, is_leaf, "the tuple of arguments")
        out: list[Any] = []
        for k, (entry, (name, value)) in enumerate(zip(given, named, strict=True)):
            out += broadcast_prefix(entry, value, f"{option}[{k}]", is_leaf, name)
        return out
    except PytreeError as error:
        raise PytreeError(f"{what}: {error.text}") from None


def _brief(x: Any) -> str:
    text = repr(x)
    return text if len(text) < 60 else text[:57] + "..."


def mapped_size(
    what: str,
    names: Sequence[str],
    avals: Sequence[ShapedArray],
    axes: Sequence[Any],
    given: int | None = None,
) -> int:
    """The size of the axis mapped over; an error names the arguments that disagree.

    `axes[k]` is the dim of leaf k that is mapped, or None.
    """
    sizes: dict[int, list[str]] = {}
    for name, aval, axis in zip(names, avals, axes, strict=True):
        if axis is None:
            continue
        if not isinstance(axis, int):
            raise ArgumentError(
                f"{current_source()}: {what}: in_axes for {name} is {axis!r}; each entry must be "
                "an integer dim or None"
            )
        if not -aval.ndim <= axis < aval.ndim:
            dims = "no dims" if aval.ndim == 0 else f"{aval.ndim} dims (shape {aval.shape})"
            raise ShapeError(
                f"{current_source()}: {what}: in_axes asks to map dim {axis} of argument {name}, "
                f"which has {dims}. Give in_axes=None for arguments that are not mapped."
            )
        size = aval.shape[axis]
        sizes.setdefault(size, []).append(f"{name} has shape {aval.shape}, dim {axis} is {size}")
    if given is not None:
        sizes.setdefault(given, []).append(f"axis_size is {given}")
    if not sizes:
        raise ArgumentError(
            f"{current_source()}: {what}: no argument is mapped (every in_axes entry is None) and "
            "axis_size is not given; map at least one argument or pass axis_size"
        )
    if len(sizes) > 1:
        raise ShapeError(f"{current_source()}: {_disagreement(what, sizes)}")
    return next(iter(sizes))


def _disagreement(what: str, sizes: dict[int, list[str]]) -> str:
    lines = []
    for size, who in sorted(sizes.items(), key=lambda item: -len(item[1])):
        shown = [f"  {line}" for line in who[:SHOWN]]
        if len(who) > SHOWN:
            shown.append(f"  ... and {len(who) - SHOWN} more of size {size}")
        lines += shown
    common = max(sizes, key=lambda s: len(sizes[s]))
    text = "\n".join(lines)
    return (
        f"{what}: mapped arguments must agree about the size of the mapped dim:\n{text}\n"
        f"Make them all {common}, or give in_axes=None for those that are shared."
    )


def check_axes(what: str, option: str, axes: Any) -> None:
    """Raise an ArgumentError if an in_axes or out_axes holds what is neither a dim nor None."""
    for axis in tree_leaves(axes):
        if not isinstance(axis, int) or isinstance(axis, bool):
            raise ArgumentError(
                f"{current_source()}: {what}: {option}={axes!r} holds {axis!r} of type "
                f"{type(axis).__name__}; each entry must be an integer dim or None"
            )


def check_axis_name_free(what: str, name: Any, bound: Sequence[Any]) -> None:
    """Raise an AxisError if an axis of that name is already in scope."""
    if name is not None and name in bound:
        raise AxisError(
            f"{current_source()}: {what}: axis name {name!r} is already in use by an enclosing "
            "map; choose another"
        )
