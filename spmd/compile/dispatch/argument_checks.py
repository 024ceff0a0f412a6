"""Checks of a jitted call's arguments: their types, and the devices and shardings they lie on.

Most calls need none of them, so the module is imported by the first that does. `names()` gives what
the user calls each leaf of the arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from spmd.base.context import state
from spmd.base.errors import ArgumentError, DeviceError, ShardingError
from spmd.base.source import current_source
from spmd.base.transfers import DEVICE_TO_DEVICE, HOST_TO_DEVICE, report_transfer
from spmd.base.tree import tree_flatten
from spmd.compile.dispatch.signature import Signature
from spmd.core.aval import ShapedArray, ShapeDtypeStruct, is_arraylike, typeof
from spmd.sharding.array import Array
from spmd.sharding.constraint import as_sharding, is_placement
from spmd.sharding.named import Sharding, SingleDeviceSharding
from spmd.sharding.operand_layouts import layout_texts

Names = Callable[[], Sequence[str]]


def not_an_array(
    signature: Signature, leaves: Sequence[Any], names: Sequence[str]
) -> ArgumentError:
    """The error for the first leaf that is no array, with the way to pass such a value."""
    name, bad = next(p for p in zip(names, leaves, strict=True) if not is_arraylike(p[1]))
    root = name.split("[")[0].split(".")[0]
    inside = f"take it out of {root} and " if root != name else ""
    advice = (
        f"If it belongs to the program rather than to its data, {inside}mark it static: "
        f"jit({signature.name}, static_argnames={root if not inside else '...'!r}); "
        "or close over it."
    )
    if getattr(bad, "__dict__", None) and not isinstance(bad, type):
        kind = type(bad).__name__
        advice += f" If it holds arrays, register {kind} with spmd.tree_util.register_dataclass."
    return ArgumentError(
        f"{signature.what}: argument {name} is {bad!r} of type {type(bad).__name__}, "
        f"which is not an array.\n{advice}"
    )


# ---- shardings and devices ---------------------------------------------------------------------


def check_placed(what: str, names: Names, leaves: Sequence[Any], places: Sequence[Any]) -> None:
    """Raise if an argument that is over a mesh is not laid out as `in_shardings` says."""
    what = f"{what}: in_shardings"
    for k, (x, place) in enumerate(zip(leaves, places, strict=True)):
        if place is None:
            continue
        is_struct = isinstance(x, ShapeDtypeStruct)
        lies = x.sharding if is_struct or (type(x) is Array and x.committed) else None
        wanted = as_sharding(what, place)
        if state.mesh is not None and wanted.device_set != set(state.mesh.flat_devices()):
            raise DeviceError(
                f"{current_source()}: {what}: entry {k} is {wanted}, and set_mesh has set "
                f"{state.mesh}, of other devices; give a sharding over that mesh, or call it "
                "outside"
            )
        if isinstance(lies, Sharding) and lies.memory_kind != wanted.memory_kind:
            name = names()[k]
            raise ShardingError(
                f"{current_source()}: {what}: {name} ({typeof(x).short()}) is in the memory "
                f"{lies.memory_kind!r}, and in_shardings says {wanted.memory_kind!r}; an argument "
                f"is not moved silently. Pass device_put({name}, sharding)"
            )
        # Over an abstract mesh a structure says nothing of devices.
        if isinstance(lies, Sharding) and lies.layout[0] and lies.layout != wanted.layout:
            name, (own, other) = names()[k], layout_texts(lies, wanted)
            raise ShardingError(
                f"{current_source()}: {what}: {name} ({typeof(x).short()}) is committed to "
                f"{own}, and in_shardings says {other}; an argument is not moved "
                f"silently. Leave its entry None, or pass device_put({name}, sharding)"
            )


def check_meets_results(what: str, names: Names, leaves: Sequence[Any], out_shardings: Any) -> None:
    """Raise if an argument is committed to one device and `out_shardings` name others."""
    placed = [k for k, x in enumerate(leaves) if type(x) is Array and x.committed]
    one = next((k for k in placed if leaves[k].shards is None), None)
    if one is None:
        return
    for place in tree_flatten(out_shardings, is_placement)[0]:
        x = leaves[one]
        if isinstance(place, Sharding) and place.device_set != x.sharding.device_set:
            name = names()[one]
            raise DeviceError(
                f"{current_source()}: {what}: {name} ({x.aval.short()}) is committed to "
                f"{x.device!r}, and out_shardings names {place}; leave {name} where it was "
                f"computed, or pass device_put({name}, sharding)"
            )


def check_only(what: str, names: Names, leaves: Sequence[Any], only: SingleDeviceSharding) -> None:
    """Raise if an argument is committed to another device than that of all shardings."""
    for k, x in enumerate(leaves):
        if type(x) is Array and x.committed and x.sharding.device_set != only.device_set:
            name = names()[k]
            raise DeviceError(
                f"{current_source()}: {what}: {name} ({x.aval.short()}) is committed to "
                f"{x.sharding}, and the shardings name {only.device}; pass "
                f"device_put({name}, {only.device!r})"
            )


def guard_transfers(what: str, names: Names, leaves: Sequence[Any], is_placed: bool) -> None:
    """Report the implicit transfers of a call: host arguments, and those on other devices.

    `is_placed` says that the function has `in_shardings` or `out_shardings`.
    """
    arrays = [x for x in leaves if type(x) is Array]
    over_mesh = is_placed or any(x.shards is not None for x in arrays)
    device = next((x.device for x in arrays if x.shards is None and x.committed), None)
    for k, x in enumerate(leaves):
        if type(x) is not Array:
            direction, moves = HOST_TO_DEVICE, "is of the host"
        elif x.shards is None and (over_mesh or (device is not None and x.device != device)):
            direction, moves = DEVICE_TO_DEVICE, f"lies on {x.device!r} alone"
        else:
            continue
        name = names()[k]
        text = f"{what}: argument {name} ({typeof(x).short()}) {moves}"
        report_transfer(direction, text, f"pass device_put({name}) with its place")


# ---- why a call is compiled --------------------------------------------------------------------


def explain_compile(
    name: str,
    names: Sequence[str],
    entries: Iterable[Any],
    key: Any,
    avals: Sequence[ShapedArray],
) -> None:
    """Say on stderr how the key of this call differs from the newest one of like structure."""
    reason = "its first call"
    tree, _, static, context = key
    for old_tree, before, old_static, old_context in reversed([*entries]):
        if old_tree != tree:
            reason = f"the arguments' structure changed from {old_tree} to {tree}"
            continue
        changed = [
            f"{leaf} was {old}, is {new}"
            for leaf, old, new in zip(names, before, avals, strict=True)
            if old is not new
        ]
        if old_static != static:
            old, new = _static_text(old_static), _static_text(static)
            changed.append(f"the static values were {old}, are {new}")
        if old_context != context:
            changed.append("the mesh or the axis names in scope, or a setting changed")
        reason = "; ".join(changed)
        break
    inputs = ", ".join(map(str, avals))
    print(f"spmd: compiling {name} for ({inputs}): {reason}", file=sys.stderr)


def _static_text(key: Any) -> str:
    """Static values as a user would write them."""
    given, named, _ = key
    parts = [f"argument {k}: {v!r}" for k, v in given] + [f"{k}={v!r}" for k, v in named]
    return "(" + ", ".join(parts) + ")"
