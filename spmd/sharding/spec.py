"""`Mesh` and `PartitionSpec`: a grid of devices with named axes, and how dims lie on it."""

from __future__ import annotations

import contextlib
import enum
import math
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from spmd.base.context import set_state_mesh, state
from spmd.base.device import Device, devices, process_index, too_few_devices
from spmd.base.errors import ArgumentError, DeviceError, ShardingError
from spmd.sharding.abstract_mesh import (
    AbstractMesh,
    AxisType,
    NamedAxes,
    meshes_of_types,
    types_of_axes,
)

# ---- specs -------------------------------------------------------------------------------------


class Unconstrained(enum.Enum):
    """The entry of a dim whose layout is left to the compiler."""

    UNCONSTRAINED = "UNCONSTRAINED"

    def __repr__(self) -> str:
        return self.name

    __str__ = __repr__


_NO_AXES: frozenset[Any] = frozenset()


class PartitionSpec(tuple):
    """For each dim of an array, the mesh axis (or tuple of axes) that it is split over, or None.

    `entries` may be fewer than the array has dims: the others are not split. The global shape must
    be a multiple of the sizes of the axes; specs do not depend on the dtype. The entry
    `P.UNCONSTRAINED` leaves a dim to the compiler. Along the axes of the set `unreduced` the value
    is the sum of what the devices hold; along those of `reduced` each device holds the value, and
    cotangents are unreduced. Specs are joined by `+`, and no spec equals a plain tuple.

    Raises `ArgumentError` if `unreduced` or `reduced` is no set, and `ShardingError` if an axis is
    in both, or also splits a dim.

    >>> spmd.P("data", None, ("x", "y"))
    P('data', None, ('x', 'y'))
    >>> spmd.P("x") + spmd.P(spmd.P.UNCONSTRAINED)
    P('x', UNCONSTRAINED)
    """

    UNCONSTRAINED = Unconstrained.UNCONSTRAINED

    unreduced: frozenset[Any] = _NO_AXES
    reduced: frozenset[Any] = _NO_AXES

    def __new__(
        cls, *entries: Any, unreduced: Any = _NO_AXES, reduced: Any = _NO_AXES
    ) -> PartitionSpec:
        self = super().__new__(cls, map(_entry, entries))
        if unreduced is not _NO_AXES or reduced is not _NO_AXES:
            self.unreduced = _axis_set("unreduced", unreduced)
            self.reduced = _axis_set("reduced", reduced)
            self._check_sets()
        return self

    def _check_sets(self) -> None:
        """Raise unless each axis has one use."""
        for name, axes in ("unreduced", self.unreduced), ("reduced", self.reduced):
            other = {*self.all_axes(), *(self.reduced if name == "unreduced" else ())}
            for axis in sorted(axes & other, key=repr):
                raise ShardingError(
                    f"PartitionSpec: {self!r} has axis {axis!r} in {name} and in another place; "
                    "each axis may have one use"
                )

    @property
    def partitions(self) -> tuple[Any, ...]:
        """The entries as a plain tuple."""
        return tuple(self)

    def index(self, value: Any, *bounds: int) -> int:
        """The first dim with an entry, which may be written in any way that `P` takes."""
        return super().index(_entry(value), *bounds)

    def count(self, value: Any) -> int:
        """The number of dims with an entry, which may be written in any way that `P` takes."""
        return super().count(_entry(value))

    def to_ct_spec(self) -> PartitionSpec:
        """The spec of a cotangent: axes of `reduced` are unreduced in it, and the reverse."""
        return self.update(unreduced=self.reduced, reduced=self.unreduced)

    def to_tangent_spec(self) -> PartitionSpec:
        """The spec of a tangent, which is this one."""
        return self

    def update(
        self, partitions: Any = None, unreduced: Any = None, reduced: Any = None
    ) -> PartitionSpec:
        """Make a spec with other entries or sets of axes, and the rest of this one's."""
        return PartitionSpec(
            *(self if partitions is None else partitions),
            unreduced=self.unreduced if unreduced is None else unreduced,
            reduced=self.reduced if reduced is None else reduced,
        )

    def without_trailing(self) -> PartitionSpec:
        """The same without entries of None at its end, which say nothing."""
        count = len(self)
        while count and self[count - 1] is None:
            count -= 1
        return self if count == len(self) else self.update(self[:count])

    def cotangent(self) -> PartitionSpec:
        """How the cotangent of a value is laid out: `reduced` and `unreduced` change places."""
        if not self.unreduced and not self.reduced:
            return self
        return self.update(unreduced=self.reduced, reduced=self.unreduced)

    def varying_axes(self) -> tuple[Any, ...]:
        """Every mesh axis along which devices hold different shards or terms."""
        return (*self.all_axes(), *sorted(self.unreduced, key=repr))

    def axes_of(self, dim: int) -> tuple[Any, ...]:
        """The mesh axes that split one dim, major first."""
        entry = self[dim] if dim < len(self) else None
        if entry is None or entry is Unconstrained.UNCONSTRAINED:
            return ()
        return entry if isinstance(entry, tuple) else (entry,)

    def all_axes(self) -> tuple[Any, ...]:
        """Every mesh axis that the spec names, in order."""
        return tuple(a for d in range(len(self)) for a in self.axes_of(d))

    def __add__(self, other: Any) -> PartitionSpec:
        if isinstance(other, PartitionSpec):
            return PartitionSpec(
                *self,
                *other,
                unreduced=self.unreduced | other.unreduced,
                reduced=self.reduced | other.reduced,
            )
        return self._joined(other, (*self, *other)) if type(other) is tuple else NotImplemented

    def __radd__(self, other: Any) -> PartitionSpec:
        return self._joined(other, (*other, *self)) if type(other) is tuple else NotImplemented

    def _joined(self, other: Any, entries: tuple[Any, ...]) -> PartitionSpec:
        if self.unreduced or self.reduced:
            raise ArgumentError(
                f"PartitionSpec: {self!r} has unreduced or reduced axes and cannot be joined with "
                f"the tuple {other!r}; write P{other!r}"
            )
        return PartitionSpec(*entries)

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, PartitionSpec)
            and tuple.__eq__(self, other)
            and self.unreduced == other.unreduced
            and self.reduced == other.reduced
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    # That of the entries: specs are keys of every cache, and few differ by their sets alone.
    __hash__ = tuple.__hash__

    def __repr__(self) -> str:
        parts = [repr(entry) for entry in self]
        sets = [
            f"{name}={{{', '.join(sorted(map(repr, axes)))}}}"
            for name, axes in (("unreduced", self.unreduced), ("reduced", self.reduced))
            if axes
        ]
        comma = "," if len(parts) == 1 and not sets else ""  # as of a tuple with one entry
        return f"P({', '.join(parts + sets)}{comma})"

    def __reduce__(self) -> Any:
        return _spec_of, (tuple(self), self.unreduced, self.reduced)


def _spec_of(entries: Any, unreduced: Any, reduced: Any) -> PartitionSpec:
    """The spec that was pickled."""
    return PartitionSpec(*entries, unreduced=unreduced, reduced=reduced)


def _entry(entry: Any) -> Any:
    """An entry in the one form that equal specs share: a tuple has at least two axes."""
    if not isinstance(entry, (tuple, list)):
        return entry
    return tuple(entry) if len(entry) > 1 else entry[0] if entry else None


def _axis_set(name: str, axes: Any) -> frozenset[Any]:
    if not isinstance(axes, (set, frozenset)):
        raise ArgumentError(
            f"PartitionSpec: {name}={axes!r} must be a set of axis names, got a "
            f"{type(axes).__name__}"
        )
    if None in axes:
        raise ShardingError(f"PartitionSpec: {name}={axes!r} must hold axis names, got None")
    return frozenset(axes)


# ---- meshes ------------------------------------------------------------------------------------


def check_platforms(what: str, devices: Iterable[Any]) -> None:
    """Raise a ShardingError if devices are of several platforms: no program runs on both."""
    first: dict[str, Any] = {}
    for device in devices:
        first.setdefault(getattr(device, "platform", ""), device)
    if len(first) > 1:
        one, other = list(first.values())[:2]
        raise ShardingError(
            f"{what}: {one} and {other} are of two platforms, and a program runs on the devices of "
            f"one; give those of spmd.devices({one.platform!r}) or of "
            f"spmd.devices({other.platform!r}) only"
        )


class Mesh(NamedAxes, contextlib.ContextDecorator):
    """An n-dimensional grid of devices whose dims, the axes, have names.

    `devices` is an array of devices of that shape, of dtype object, and `axis_names` holds one name
    for each of its dims. `axis_types` is an `AxisType` for all axes or holds one for each, by
    default `Auto`: the compiler decides how values are laid out. `with mesh:` makes it the mesh of
    each `shard_map` inside that names none, as the decorator `@mesh` does for a function's calls.
    A mesh cannot be changed, and meshes that are made alike are one object.

    Raises `ShardingError` if the numbers of dims, names and types differ, a name occurs twice or is
    None, or the devices are of two platforms, and `ArgumentError` if `axis_types` holds something
    else.

    >>> mesh = spmd.Mesh(np.array(spmd.devices()).reshape(2, 2), ("x", "y"))
    >>> mesh.shape["x"]
    2
    >>> mesh is spmd.Mesh(mesh.devices, mesh.axis_names)
    True
    """

    __slots__ = ("__weakref__", "_hash", "axis_names", "axis_types", "devices")

    axis_names: tuple[Any, ...]
    axis_types: tuple[AxisType, ...]
    devices: np.ndarray
    _hash: int

    def __new__(cls, devices: Any, axis_names: Any, axis_types: Any = None) -> Mesh:
        grid = np.array(devices, dtype=object)
        names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
        if None in names:
            raise ShardingError(f"Mesh: axis names {names} must be names, got None")
        if grid.ndim != len(names):
            raise ShardingError(
                f"Mesh: {len(names)} axis names {names} for a grid of {grid.ndim} dims "
                f"(shape {grid.shape}); each dim needs one name"
            )
        if len(set(names)) != len(names):
            raise ShardingError(f"Mesh: axis names {names} must be different")
        types = types_of_axes("Mesh", names, axis_types)
        key = names, grid.shape, tuple(grid.flat), types
        made = _meshes.get(key)
        if made is None:
            check_platforms("Mesh", grid.flat)
            grid.flags.writeable = False
            made = object.__new__(cls)
            fields = {"devices": grid, "axis_names": names, "axis_types": types, "_hash": hash(key)}
            for field, value in fields.items():
                object.__setattr__(made, field, value)
            _meshes[key] = made
        return made

    @property
    def axis_sizes(self) -> tuple[int, ...]:
        """The sizes of the axes, in the order of their names."""
        return self.devices.shape

    @property
    def size(self) -> int:
        """The number of devices there are."""
        return 0 if self.empty else self.devices.size

    @property
    def empty(self) -> bool:
        """Whether there are no devices: `get_mesh()` gives such a mesh where none is set."""
        grid = self.devices
        return grid.size == 0 or (grid.ndim == 0 and grid.item() is None)

    @property
    def abstract_mesh(self) -> AbstractMesh:
        """The axes without the devices."""
        found = AbstractMesh(self.axis_sizes, self.axis_names, self.axis_types)
        meshes_of_types[found] = self
        return found

    @property
    def device_ids(self) -> np.ndarray:
        """The ids of the devices, in an array of the mesh's shape."""
        ids = [-1 if d is None else d.id for d in self.devices.flat]
        return np.array(ids, int).reshape(self.devices.shape)

    @property
    def local_devices(self) -> list[Device]:
        """This process's devices, in row-major order."""
        mine = process_index()
        return [d for d in self.flat_devices() if d.process_index == mine]

    @property
    def is_multi_process(self) -> bool:
        """Whether other processes have devices of the mesh."""
        return len(self.local_devices) != self.size

    @property
    def local_mesh(self) -> Mesh:
        """The mesh of this process's devices, with the same axes.

        Raises `ShardingError` if they are no box in the grid: rows, columns, or parts of both.
        """
        if self.empty:
            return self
        mine = {d.id for d in self.local_devices}
        held = np.isin(self.device_ids, list(mine))
        places = np.argwhere(held)
        box = tuple(slice(k.min(), k.max() + 1) for k in places.T) if mine else ()
        if not held[box].all():
            raise ShardingError(
                f"local_mesh: this process's devices {sorted(mine)} are no box in the grid of "
                f"{self}, whose device ids are {self.device_ids.tolist()}; order the devices so "
                "that those of a process are neighbours along each axis"
            )
        return Mesh(self.devices[box], self.axis_names, self.axis_types)

    def update(self, devices: Any = None, axis_names: Any = None, axis_types: Any = None) -> Mesh:
        """Make a mesh with other devices, names or types, and the rest of this one's."""
        return Mesh(
            self.devices if devices is None else devices,
            self.axis_names if axis_names is None else axis_names,
            self.axis_types if axis_types is None else axis_types,
        )

    def with_axes_of(self, axes: AbstractMesh) -> Mesh | None:
        """Make the mesh of the same devices that has these axes; None if there are none."""
        if axes.empty:
            return None
        return Mesh(self.devices.reshape(axes.axis_sizes), axes.axis_names, axes.axis_types)

    def has_grid_of(self, other: NamedAxes) -> bool:
        """Whether another mesh has the same axes and, if any, devices; types do not count."""
        same = self.shape_tuple == other.shape_tuple
        return same and (not isinstance(other, Mesh) or self.flat_devices() == other.flat_devices())

    def flat_devices(self) -> list[Device]:
        """The devices in row-major order."""
        return [] if self.empty else list(self.devices.flat)

    def coordinates(self) -> Iterator[tuple[Device, dict[Any, int]]]:
        """Each device with its position along every axis, in row-major order."""
        for device, index in zip(self.devices.flat, np.ndindex(*self.devices.shape), strict=True):
            yield device, dict(zip(self.axis_names, index, strict=True))

    def __enter__(self) -> Mesh:
        scope.outer.append(self)
        return self

    def __exit__(self, *_: Any) -> bool:
        scope.outer.pop()
        return False

    # There is one object of each mesh, so that identity is equality.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        """By the ids of the devices, which are the same on every process."""
        flat = self.flat_devices()
        platform = flat[0].platform if flat else None
        return _mesh_of, (platform, self.device_ids, self.axis_names, self.axis_types)

    def __repr__(self) -> str:
        if self.empty:
            return "Mesh(axis_sizes=(), axis_names=())"
        return (
            f"Mesh(axis_sizes={self.axis_sizes}, axis_names={self.axis_names!r}, "
            f"axis_types={self.axis_types!r})"
        )

    def __str__(self) -> str:
        return "Mesh()" if self.empty else self._shown()


# Every mesh that is in use, by what it is made of.
_meshes: weakref.WeakValueDictionary[Any, Mesh] = weakref.WeakValueDictionary()


def _mesh_of(platform: str | None, ids: np.ndarray, names: Any, types: Any) -> Mesh:
    """The mesh that was pickled, of the devices that have these ids here."""
    grid = np.empty(ids.shape, dtype=object)
    if platform is None:
        return Mesh(grid, names, types)
    known = {d.id: d for d in devices(platform)}
    missing = [int(k) for k in ids.flat if k not in known]
    if missing:
        raise DeviceError(
            f"a pickled mesh has the {platform} devices {ids.tolist()}, and there is no device "
            f"{missing[0]} here: this job has {len(known)}"
        )
    for place, k in np.ndenumerate(ids):
        grid[place] = known[k]
    return Mesh(grid, names, types)


# ---- the mesh in scope -------------------------------------------------------------------------


_Before = tuple["Mesh | None", "AbstractMesh | None", "Mesh | None"]


class _Scope(threading.local):
    """The mesh in scope on one thread: what `set_mesh`, `use_abstract_mesh` and maps set.

    `abstract` are the axes of `use_abstract_mesh`; it is None where they are those of `mesh`.
    Where none of them has set a mesh, specs refer to that of the innermost `with mesh:`.
    """

    def __init__(self) -> None:
        self.mesh: Mesh | None = None
        self.abstract: AbstractMesh | None = None
        self.outer: list[Mesh] = []  # of each `with mesh:`

    def enter(
        self, mesh: Mesh | None, abstract: AbstractMesh | None = None, places: bool = False
    ) -> _Before:
        """Set both, and return what `leave` takes to set them back.

        If the mesh `places` results, those that no mesh has touched lie over it from now on.
        """
        before = self.mesh, self.abstract, state.mesh
        self.mesh, self.abstract = mesh, abstract
        if places:
            set_state_mesh(
                mesh if abstract is None or mesh is None else mesh.with_axes_of(abstract)
            )
        return before

    def leave(self, before: _Before) -> None:
        """Set back what `enter` replaced."""
        self.mesh, self.abstract, placing = before
        set_state_mesh(placing)


scope = _Scope()


def current_mesh() -> Mesh | AbstractMesh | None:
    """The mesh in scope on this thread, if any: that of `set_mesh`, else of `with mesh:`.

    Where `use_abstract_mesh` has set other axes than those of that mesh, it is the abstract one.
    """
    mesh, abstract = scope.mesh, scope.abstract
    if mesh is None and abstract is None and scope.outer:
        return scope.outer[-1]
    if abstract is None or (mesh is not None and mesh.abstract_mesh == abstract):
        return mesh
    return None if abstract.empty else abstract


def make_mesh(
    axis_shapes: Sequence[int],
    axis_names: Sequence[Any],
    axis_types: Any = None,
    *,
    devices: Any = None,
) -> Mesh:
    """Make a mesh of shape `axis_shapes` whose axes are called `axis_names`.

    It covers the first of all devices, or of `devices`, in row-major order. Each of `axis_shapes`
    is an int. `axis_types` is an `AxisType` for all axes or holds one for each, by default
    `Explicit`: types say how values are laid out. Raises `DeviceError` if there are too few
    devices, `ShardingError` if the numbers of sizes, names and types differ or a name occurs twice,
    and `ArgumentError` if `axis_types` holds something else.

    >>> print(spmd.make_mesh((2, 2), ("data", "model")))
    Mesh('data': 2, 'model': 2, axis_types=(Explicit, Explicit))
    """
    shape = tuple(int(s) for s in axis_shapes)
    if min(shape, default=1) < 0:
        raise ShardingError(f"make_mesh: sizes of axes are 0 or more, got {shape}")
    pool = list(all_devices() if devices is None else devices)
    wanted = math.prod(shape)
    if wanted > len(pool):
        raise too_few_devices(f"make_mesh({shape}, {tuple(axis_names)})", wanted, len(pool))
    grid = np.asarray(pool[:wanted], dtype=object).reshape(shape)
    return Mesh(grid, tuple(axis_names), axis_types or AxisType.Explicit)


def all_devices() -> list[Device]:
    """All devices of the default platform."""
    return devices()
