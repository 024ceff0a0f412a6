"""How the operands of a call are laid out over a mesh, and on which devices they meet."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.base.config import config
from spmd.base.context import state
from spmd.base.device import Device, default_device, gpus
from spmd.base.errors import DeletedError, DeviceError, ShardingError
from spmd.base.source import current_source
from spmd.sharding.abstract_mesh import AxisType
from spmd.sharding.array import Array, check_alive, from_shards, replicated
from spmd.sharding.named import NamedSharding, Sharding, SingleDeviceSharding
from spmd.sharding.spec import Mesh, PartitionSpec

Layouts = tuple[NamedSharding | None, ...]


def guards_moves() -> bool:
    """Whether there are moves of operands that are not allowed, or are told of."""
    return (
        config.transfer_guard_host_to_device != "allow"
        or config.transfer_guard_device_to_device != "allow"
    )


def layouts_of(leaves: Sequence[Any]) -> Layouts | None:
    """The shardings of those arguments that lie over a mesh; None if none does."""
    for x in leaves:
        if type(x) is Array and x.shards is not None:
            break
    else:
        return None
    named = tuple(
        [
            found
            if type(x) is Array
            and x.shards is not None
            and isinstance(found := x.sharding.over_mesh(), NamedSharding)
            else None
            for x in leaves
        ]
    )
    return named if any(named) else None


def device_of(operands: Sequence[Any]) -> Device | None:
    """The device that is no CPU on which a program of one device runs; None if there is none.

    That is the one which an operand is committed to, else the default device.
    """
    if not gpus.in_use:
        return None
    for x in operands:
        if type(x) is Array and type(x._sharding) is SingleDeviceSharding:
            device = x._sharding.device
            return None if device.platform == "cpu" else device
    device = default_device()
    return None if device.platform == "cpu" else device


def strays(leaves: Sequence[Any]) -> bool:
    """Whether arrays that are committed lie over several meshes or devices, or beside free ones.

    Only then it matters which of them a program reads: they say where it runs.
    """
    first, is_free = None, False
    for x in leaves:
        now = x._sharding if type(x) is Array else None
        if now is None:
            is_free = True
            continue
        place = now.mesh if isinstance(now, NamedSharding) else now
        if first is None:
            first = place
        elif place is not first and place != first:
            return True
    return first is not None and (is_free or len(leaves) == 1)


def layout_texts(*shardings: Sharding) -> list[str]:
    """The shardings as errors write them: with their devices, if these differ."""
    devices = [sharding.layout[0] for sharding in shardings]
    is_same = len(set(devices)) == 1
    return [
        str(sharding.device)
        if isinstance(sharding, SingleDeviceSharding)
        else f"{sharding}{'' if is_same else f' over devices {list(ids)}'}"
        for sharding, ids in zip(shardings, devices, strict=True)
    ]


def check_on_devices(
    devices: tuple[int, ...],
    operands: Sequence[Any],
    describe: Callable[[int], tuple[str, str, str, str]],
    in_order: bool = False,
) -> None:
    """Raise a DeviceError if an operand is committed to other devices than those with these ids.

    If they must be `in_order`, another order is an error too. `describe` gives of an operand the
    function, what a user calls the operand, what is over the devices, and the fix.
    """
    for k, x in enumerate(operands):
        if type(x) is not Array or x._sharding is None:
            continue
        own = x._sharding.layout[0]
        if own == devices or (not in_order and set(own) == set(devices)):
            continue
        what, name, cause, fix = describe(k)
        place = f"devices {list(own)}" if len(own) > 1 else next(iter(x.sharding.device_set))
        raise DeviceError(
            f"{current_source()}: {what}: {name} ({x.aval.short()}) is committed to {place}, and "
            f"{cause} is over devices {list(devices)}; nothing is moved silently. Pass {fix}"
        )


def check_in_scope(
    mesh: Mesh, leaves: Sequence[Any], name_of: Callable[[int], str], strict: bool = False
) -> None:
    """Raise a DeviceError if an operand is committed to other devices than the mesh in scope.

    `name_of` gives what the user calls an operand. Raises a ShardingError if an operand or the mesh
    in scope has `Explicit` axes and the other has not the same; types may differ if not `strict`.
    """
    for k, x in enumerate(leaves):
        if type(x) is not Array or x._sharding is None:
            continue
        sharding = x._sharding
        if isinstance(sharding, NamedSharding) and sharding.mesh is mesh:
            continue
        if sharding.layout[0] != NamedSharding(mesh, PartitionSpec()).layout[0]:
            raise DeviceError(
                f"{current_source()}: {name_of(k)} ({x.aval.short()}) is committed to {sharding}, "
                f"and set_mesh has set {mesh}, which has other devices, or the same in another "
                f"order. Move it: device_put({name_of(k)}, P(...)); or leave the mesh's block"
            )
        other = sharding.mesh if isinstance(sharding, NamedSharding) else mesh
        types = {*mesh.axis_types, *other.axis_types}
        alike = other.abstract_mesh == mesh.abstract_mesh if strict else other.has_grid_of(mesh)
        if AxisType.Explicit in types and not alike:
            raise ShardingError(
                f"{current_source()}: {name_of(k)} ({x.aval.short()}) is laid out by {sharding}, "
                f"and set_mesh has set {mesh}; along Explicit axes both must be one mesh. "
                f"Lay it out over that one: device_put({name_of(k)}, P(...))"
            )


def call_named(
    what: str,
    mesh: Mesh | None,
    executable: Any,
    leaves: Sequence[Any],
    names: Callable[[], Sequence[str]],
    wanted: Sequence[Any],
) -> list[Any]:
    """Call an executable, in the scope of a mesh if there is one; a DeletedError has names.

    `what` is the function for users, `names()` are what they call the operands.
    """
    try:
        if mesh is None:
            return executable(leaves)
        return call_in_scope(mesh, executable, leaves, names, wanted)
    except DeletedError:
        check_alive(what, leaves, names)
        raise


def call_in_scope(
    mesh: Mesh,
    executable: Any,
    leaves: Sequence[Any],
    names: Callable[[], Sequence[str]],
    wanted: Sequence[Any],
) -> list[Any]:
    """Call an executable while `set_mesh` has set a mesh; results lie over it then.

    `names()` are what the user calls the operands. Results that have a `wanted` sharding keep it.
    """
    check_in_scope(mesh, leaves, lambda k: names()[k], strict=True)
    before, state.mesh = state.mesh, None  # for what runs inside; `busy` counts scopes, not values
    try:
        outs = executable(leaves)
    finally:
        state.mesh = before
    found = in_scope_mesh(mesh, outs, _computed(executable))
    return [x if s is not None else y for x, y, s in zip(outs, found, wanted, strict=True)]


def _computed(executable: Any) -> list[bool] | None:
    return None if executable.is_map else [r is None for r in executable.results]


def output_shardings_in_scope(mesh: Mesh | None, executable: Any) -> list[Any]:
    """The shardings of an executable's results if `set_mesh` has set a mesh, or none."""
    found = executable.output_shardings
    if mesh is None or executable.is_map:
        return found
    whole = NamedSharding(mesh, PartitionSpec())
    pairs = zip(executable.out_avals, _computed(executable) or (), strict=True)
    return [whole.in_full(a.ndim) if computed else whole for a, computed in pairs]


def stays_in_scope(mesh: Mesh, executable: Any, layouts: Layouts | None) -> bool:
    """Whether calls with operands of these layouts need nothing of what `call_in_scope` does."""
    given = [s for s in layouts or () if s is not None]
    shardings = [*given, *(executable.output_shardings if executable.is_map else [None])]
    return all(isinstance(s, NamedSharding) and s.mesh is mesh for s in shardings)


def in_scope_mesh(
    mesh: Mesh, outs: Sequence[Any], computed: Sequence[bool] | None = None
) -> list[Any]:
    """Results over the mesh in scope: replicated if no mesh has touched them.

    An operand that was not `computed` is laid out by P(), else the spec is in full where types say
    all. Those over another mesh of the same devices are told in axes of this one if they can.
    """
    found = []
    for k, x in enumerate(outs):
        if type(x) is Array and x.shards is not None:
            now = x._sharding
            if isinstance(now, NamedSharding) and not now.mesh.has_grid_of(mesh):
                spec = None if x.aval.explicit is not None else spec_over(mesh, now)
                if spec is not None:
                    sharding = NamedSharding(mesh, spec, uneven=now.uneven)
                    x = from_shards(x.aval, sharding, x.shards)
        elif type(x) is Array:
            x = replicated(x, mesh, computed is None or computed[k])
        found.append(x)
    return found


def spec_over(mesh: Mesh, sharding: NamedSharding) -> PartitionSpec | None:
    """The spec by which a mesh lays arrays out as a sharding does; None if there is none.

    The sharding may be over another mesh of the same devices, in another order.
    """
    other, spec = sharding.mesh, sharding.spec
    if other == mesh:
        return spec
    if not isinstance(other, Mesh):
        return None
    entries: list[Any] = []
    for d, entry in enumerate(spec):
        if entry is PartitionSpec.UNCONSTRAINED:
            entries.append(entry)
            continue
        axes = _along(mesh, other, spec.axes_of(d))
        if axes is None:
            return None
        entries.append(axes or None)
    terms = [_along(mesh, other, (a,)) for a in spec.unreduced]
    if any(axes is None or len(axes) > 1 for axes in terms):
        return None  # terms along one axis are terms along that axis
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries, unreduced={a for axes in terms for a in axes or ()})


def is_reordered(mesh: Mesh, sharding: Any) -> bool:
    """Whether a sharding is over a mesh's devices in an order that no spec over the mesh can say.

    Each of its parts has one size.
    """
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return False
    spec = sharding.spec
    if sharding.mesh.has_grid_of(mesh) or sharding.uneven or spec.unreduced:
        return False
    if PartitionSpec.UNCONSTRAINED in spec:
        return False
    same = {d.id for d in mesh.flat_devices()} == {d.id for d in sharding.mesh.flat_devices()}
    return same and spec_over(mesh, sharding) is None


def similar_spec(mesh: Mesh, sharding: NamedSharding) -> PartitionSpec:
    """A spec over a mesh that cuts dims into as many parts as a sharding over another mesh.

    Of axes that do not fit, none are named.
    """
    other, spec = sharding.mesh, sharding.spec
    if other.shape_tuple == mesh.shape_tuple:
        return spec
    left = dict(mesh.shape)
    entries: list[Any] = []
    for d, entry in enumerate(spec):
        if entry is PartitionSpec.UNCONSTRAINED:
            entries.append(entry)
            continue
        axes = _axes_of_size(left, other.axis_size(spec.axes_of(d)))
        entries.append(axes or None)
        for axis in axes:
            del left[axis]
    return PartitionSpec(*entries).without_trailing()


def _axes_of_size(sizes: dict[Any, int], count: int) -> tuple[Any, ...]:
    """The fewest axes that are so many devices together, the first of such; none if none are."""
    for n in range(1, len(sizes) + 1):
        for axes in itertools.combinations(sizes, n):
            if math.prod(sizes[a] for a in axes) == count > 1:
                return axes
    return ()


def axes_over(mesh: Mesh, other: Mesh) -> dict[Any, tuple[Any, ...]]:
    """Those axes of a mesh of the same devices along which devices lie as along axes of this one.

    Position `k` along an axis of `other` is position `k`, row-major, along the axes given for it.
    """
    found = {name: _along(mesh, other, (name,)) for name in other.axis_names}
    return {name: axes for name, axes in found.items() if axes is not None}


@functools.lru_cache(maxsize=1024)
def _along(mesh: Mesh, other: Mesh, axes: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The axes of a mesh along which devices lie as along some of another mesh, row-major."""
    place = {
        d.id: at for d, at in zip(other.flat_devices(), np.ndindex(*other.axis_sizes), strict=True)
    }
    if {d.id for d in mesh.flat_devices()} != set(place):
        return None
    along = np.zeros(mesh.size, np.int64)
    for axis in axes:
        k = other.axis_names.index(axis)
        own = [place[d.id][k] for d in mesh.flat_devices()]
        along = along * other.axis_sizes[k] + np.array(own, np.int64)
    along = along.reshape(mesh.axis_sizes)
    strides = {}
    for n, (axis, size) in enumerate(mesh.shape.items()):
        stride = int(along.take(1, n).flat[0] - along.flat[0]) if size > 1 else 0
        if stride:
            strides[axis] = stride
    order = sorted(strides, key=lambda axis: -strides[axis])
    sizes = [mesh.shape[a] for a in order]
    if [strides[a] for a in order] != [math.prod(sizes[n + 1 :]) for n in range(len(order))]:
        return None
    steps = dict(zip(mesh.axis_names, np.indices(mesh.axis_sizes), strict=True))
    expected = sum((steps[a] * strides[a] for a in order), np.zeros_like(along))
    return tuple(order) if np.array_equal(along, expected) else None
