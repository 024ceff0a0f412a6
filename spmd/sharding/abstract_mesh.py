"""`AbstractMesh` and `AxisType`: the named axes of a mesh, without its devices.

`NamedAxes` is what a mesh knows by its axes alone; `Mesh` adds the grid of devices to it.
"""

from __future__ import annotations

import enum
import functools
import math
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from spmd.base.errors import ArgumentError, FrozenError, ShardingError
from spmd.base.record import record


class AxisType(enum.Enum):
    """The ways in which values are laid out along a mesh axis.

    Along an `Auto` axis the compiler decides. Along an `Explicit` axis the types of values say how
    they are laid out, each operation gives its result a layout, and `reshard` changes it. Along a
    `Manual` one the per-device code of `shard_map` sees shards.

    >>> spmd.make_mesh((4,), ("x",)).axis_types
    (Explicit,)
    """

    Auto = enum.auto()
    Explicit = enum.auto()
    Manual = enum.auto()

    def __repr__(self) -> str:
        return self.name


def types_of_axes(what: str, names: tuple[Any, ...], given: Any) -> tuple[AxisType, ...]:
    """One type for each axis: those that are given, or one for all, or Auto."""
    if given is None:
        return (AxisType.Auto,) * len(names)
    types = (given,) * len(names) if isinstance(given, AxisType) else tuple(given)
    for t in types:
        if not isinstance(t, AxisType):
            raise ArgumentError(
                f"{what}: axis_types={given!r} must hold members of AxisType (Auto, Explicit, "
                f"Manual), got {t!r} of type {type(t).__name__}"
            )
    if len(types) != len(names):
        raise ShardingError(
            f"{what}: {len(types)} axis_types {types} for {len(names)} axis names {names}; "
            "each axis needs one type"
        )
    return types


class NamedAxes:
    """The axes of a mesh: their names, sizes and types."""

    __slots__ = ()

    axis_names: tuple[Any, ...]
    axis_types: tuple[AxisType, ...]

    @property
    def axis_sizes(self) -> tuple[int, ...]:
        """The sizes of the axes, in the order of their names."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenError(
            f"cannot assign to {name} of {self}: a mesh cannot be changed; "
            f"update({name}=...) makes another one"
        )

    @property
    def shape(self) -> OrderedDict[Any, int]:
        """The size of each axis."""
        return OrderedDict(zip(self.axis_names, self.axis_sizes, strict=True))

    @property
    def auto_axes(self) -> tuple[Any, ...]:
        """The names of the axes that are `Auto`."""
        return self._axes_of(AxisType.Auto)

    @property
    def explicit_axes(self) -> tuple[Any, ...]:
        """The names of the axes that are `Explicit`."""
        return self._axes_of(AxisType.Explicit)

    @property
    def manual_axes(self) -> tuple[Any, ...]:
        """The names of the axes that are `Manual`."""
        return self._axes_of(AxisType.Manual)

    def _axes_of(self, kind: AxisType) -> tuple[Any, ...]:
        pairs = zip(self.axis_names, self.axis_types, strict=True)
        return tuple(name for name, t in pairs if t is kind)

    @property
    def are_all_axes_auto(self) -> bool:
        """Whether there are axes, and all are `Auto`."""
        return bool(self.axis_names) and self.has_only(AxisType.Auto)

    @property
    def are_all_axes_explicit(self) -> bool:
        """Whether there are axes, and all are `Explicit`."""
        return bool(self.axis_names) and self.has_only(AxisType.Explicit)

    @property
    def are_all_axes_manual(self) -> bool:
        """Whether there are axes, and all are `Manual`."""
        return bool(self.axis_names) and self.has_only(AxisType.Manual)

    @property
    def shape_tuple(self) -> tuple[tuple[Any, int], ...]:
        """Pairs of each axis's name and size."""
        return tuple(zip(self.axis_names, self.axis_sizes, strict=True))

    def axis_size(self, axes: Sequence[Any]) -> int:
        """The product of the sizes of some axes."""
        shape = self.shape
        for a in axes:
            if a not in shape:
                known = ", ".join(map(repr, self.axis_names))
                raise ShardingError(f"mesh axis {a!r} does not exist; the mesh has {known}")
        return math.prod(shape[a] for a in axes)

    def has_only(self, kind: AxisType) -> bool:
        """Whether all axes are of one type."""
        return all(t is kind for t in self.axis_types)

    def types_with(self, kind: AxisType, names: Sequence[Any] | None = None) -> list[AxisType]:
        """The types of the axes if some, or all, are of another kind; `Manual` ones stay."""
        return [
            kind if (names is None or name in names) and old is not AxisType.Manual else old
            for name, old in zip(self.axis_names, self.axis_types, strict=True)
        ]

    def _shown(self) -> str:
        """The axes with their sizes, and their types."""
        axes = [f"{name!r}: {size}" for name, size in self.shape.items()] or ["()"]
        return f"{type(self).__name__}({', '.join(axes)}, axis_types={self.axis_types!r})"


def _of_devices(name: str) -> Any:
    """An attribute that only a mesh with devices has."""

    def read(self: AbstractMesh) -> Any:
        raise ShardingError(
            f"{self!r} has no {name}: an AbstractMesh has axes and no devices; "
            "use a Mesh of the same axes"
        )

    return property(read)


@record
class AbstractDevice:
    """The kind of a mesh's devices, where the mesh itself has none.

    >>> spmd.sharding.AbstractDevice(device_kind="cpu", num_cores=None, platform="cpu")
    AbstractDevice(device_kind=cpu, num_cores=None, platform=cpu)
    """

    device_kind: str
    num_cores: int | None
    platform: str

    def __repr__(self) -> str:
        return (
            f"AbstractDevice(device_kind={self.device_kind}, num_cores={self.num_cores}, "
            f"platform={self.platform})"
        )


class AbstractMesh(NamedAxes):
    """The axes of a mesh, without devices.

    `axis_sizes` holds an int for each of `axis_names`, and `axis_types` an `AxisType` for each, by
    default `Auto`. `abstract_device` says of what kind its devices would be. A
    `NamedSharding` of it gives the shapes of shards, and places no data. Raises `ShardingError` if
    the numbers of sizes, names and types differ or a name occurs twice.

    >>> mesh = spmd.sharding.AbstractMesh((2, 4), ("x", "y"))
    >>> mesh, mesh.size
    (AbstractMesh('x': 2, 'y': 4, axis_types=(Auto, Auto)), 8)
    >>> spmd.NamedSharding(mesh, spmd.P("y")).shard_shape((8, 3))
    (2, 3)
    """

    __slots__ = ("__weakref__", "_sizes", "abstract_device", "axis_names", "axis_types")

    abstract_device: AbstractDevice | None
    axis_names: tuple[Any, ...]
    axis_types: tuple[AxisType, ...]
    _sizes: tuple[int, ...]

    def __new__(
        cls,
        axis_sizes: Any,
        axis_names: Any,
        axis_types: Any = None,
        *,
        abstract_device: AbstractDevice | None = None,
    ) -> AbstractMesh:
        names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
        sizes = tuple(int(s) for s in axis_sizes)
        if len(sizes) != len(names):
            raise ShardingError(
                f"AbstractMesh: {len(sizes)} axis sizes {sizes} for {len(names)} axis names "
                f"{names}; each axis needs one of both"
            )
        if len(set(names)) != len(names):
            raise ShardingError(f"AbstractMesh: axis names {names} must be different")
        key = sizes, names, types_of_axes("AbstractMesh", names, axis_types), abstract_device
        made = _abstract_meshes.get(key)
        if made is None:
            made = object.__new__(cls)
            fields = "_sizes", "axis_names", "axis_types", "abstract_device"
            for field, value in zip(fields, key, strict=True):
                object.__setattr__(made, field, value)
            _abstract_meshes[key] = made
        return made

    @property
    def axis_sizes(self) -> tuple[int, ...]:
        """The sizes of the axes, in the order of their names."""
        return self._sizes

    @property
    def size(self) -> int:
        """The number of devices such a mesh has; 0 without axes."""
        return math.prod(self._sizes) if self._sizes else 0

    @property
    def empty(self) -> bool:
        """Whether there are no devices in such a mesh."""
        return self.size == 0

    @property
    def abstract_mesh(self) -> AbstractMesh:
        """The mesh itself, as `Mesh.abstract_mesh` is that of its axes."""
        return self

    devices = _of_devices("devices")
    device_ids = _of_devices("device_ids")
    local_devices = _of_devices("local_devices")
    local_mesh = _of_devices("local_mesh")
    is_multi_process = _of_devices("is_multi_process")
    flat_devices = _of_devices("devices")
    coordinates = _of_devices("devices")

    def update(
        self, axis_sizes: Any = None, axis_names: Any = None, axis_types: Any = None
    ) -> AbstractMesh:
        """Make a mesh with other sizes, names or types, and the rest of this one's."""
        return AbstractMesh(
            self._sizes if axis_sizes is None else axis_sizes,
            self.axis_names if axis_names is None else axis_names,
            self.axis_types if axis_types is None else axis_types,
            abstract_device=self.abstract_device,
        )

    def update_axis_types(self, name_to_type: dict[Any, AxisType]) -> AbstractMesh:
        """Make a mesh in which the named axes have other types."""
        pairs = zip(self.axis_names, self.axis_types, strict=True)
        return self.update(axis_types=[name_to_type.get(name, t) for name, t in pairs])

    def __enter__(self) -> None:
        raise ShardingError(
            f"{self!r} is no context manager: an AbstractMesh has no devices; "
            "use_abstract_mesh(mesh) sets the axes for a block, and set_mesh(mesh) a Mesh"
        )

    def __exit__(self, *_: object) -> None:
        pass

    # There is one object of each mesh, so that identity is equality.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return hash((self._sizes, self.axis_names, self.axis_types))

    def __reduce__(self) -> Any:
        make = functools.partial(AbstractMesh, abstract_device=self.abstract_device)
        return make, (self._sizes, self.axis_names, self.axis_types)

    def __repr__(self) -> str:
        return self._shown()


# Every abstract mesh that is in use, by what it is made of.
_abstract_meshes: weakref.WeakValueDictionary[Any, AbstractMesh] = weakref.WeakValueDictionary()

# The mesh with devices that each abstract one was last made from: types and traces have no other.
meshes_of_types: dict[AbstractMesh, Any] = {}
