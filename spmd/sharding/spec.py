"""`Mesh` and `PartitionSpec`: a grid of devices with named axes, and how dims lie on it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from spmd.base.device import Device, devices, too_few_devices
from spmd.base.errors import ShardingError


class PartitionSpec(tuple):
    """For each dim of an array, the mesh axis (or tuple of axes) that it is split over, or None.

    `entries` may be fewer than the array has dims: the others are not split. The global shape must
    be a multiple of the sizes of the axes; specs do not depend on the dtype.

    >>> spmd.P("data", None, ("x", "y"))
    PartitionSpec('data', None, ('x', 'y'))
    """

    def __new__(cls, *entries: Any) -> PartitionSpec:
        return super().__new__(cls, [tuple(e) if isinstance(e, list) else e for e in entries])

    def __repr__(self) -> str:
        return f"PartitionSpec({', '.join(map(repr, self))})"

    def __reduce__(self) -> Any:
        return PartitionSpec, tuple(self)

    def axes_of(self, dim: int) -> tuple[Any, ...]:
        """The mesh axes that split one dim, major first."""
        entry = self[dim] if dim < len(self) else None
        if entry is None:
            return ()
        return entry if isinstance(entry, tuple) else (entry,)

    def all_axes(self) -> tuple[Any, ...]:
        """Every mesh axis that the spec names, in order."""
        return tuple(a for d in range(len(self)) for a in self.axes_of(d))


class Mesh:
    """An n-dimensional grid of devices whose dims, the axes, have names.

    `devices` is an array of devices of that shape, of dtype object, and `axis_names` holds one name
    for each of its dims. `with mesh:` makes it the mesh of each `shard_map` inside that names none.
    Raises `ShardingError` if the numbers of dims and names differ or a name occurs twice.

    >>> spmd.Mesh(np.array(spmd.devices()).reshape(2, 2), ("x", "y")).shape
    {'x': 2, 'y': 2}
    """

    __slots__ = ("_before", "_hash", "axis_names", "devices")

    def __init__(self, devices: Any, axis_names: Any):
        grid = np.asarray(devices, dtype=object)
        names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
        if grid.ndim != len(names):
            raise ShardingError(
                f"Mesh: {len(names)} axis names {names} for a grid of {grid.ndim} dims "
                f"(shape {grid.shape}); each dim needs one name"
            )
        if len(set(names)) != len(names):
            raise ShardingError(f"Mesh: axis names {names} must be different")
        self.devices = grid
        self.axis_names = names
        self._hash = hash((names, grid.shape, tuple(d.id for d in grid.flat)))
        self._before: list[Any] = []

    @property
    def shape(self) -> dict[Any, int]:
        """The size of each axis."""
        return dict(zip(self.axis_names, self.devices.shape, strict=True))

    @property
    def axis_sizes(self) -> tuple[int, ...]:
        return self.devices.shape

    @property
    def size(self) -> int:
        return self.devices.size

    @property
    def empty(self) -> bool:
        return self.devices.size == 0

    def flat_devices(self) -> list[Device]:
        """The devices in row-major order."""
        return list(self.devices.flat)

    def axis_size(self, axes: Sequence[Any]) -> int:
        """The product of the sizes of some axes."""
        shape = self.shape
        for a in axes:
            if a not in shape:
                known = ", ".join(map(repr, self.axis_names))
                raise ShardingError(f"mesh axis {a!r} does not exist; the mesh has {known}")
        return math.prod(shape[a] for a in axes)

    def coordinates(self) -> Iterator[tuple[Device, dict[Any, int]]]:
        """Each device with its position along every axis, in row-major order."""
        for device, index in zip(self.devices.flat, np.ndindex(*self.devices.shape), strict=True):
            yield device, dict(zip(self.axis_names, index, strict=True))

    def __enter__(self) -> Mesh:
        self._before.append(_current_mesh[0])
        _current_mesh[0] = self
        return self

    def __exit__(self, *_: Any) -> None:
        _current_mesh[0] = self._before.pop()

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Mesh)
            and self._hash == other._hash
            and self.axis_names == other.axis_names
            and self.devices.shape == other.devices.shape
            and all(a is b for a, b in zip(self.devices.flat, other.devices.flat, strict=True))
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        axes = ", ".join(f"{n!r}: {s}" for n, s in self.shape.items())
        return f"Mesh({axes})"


# The mesh of the innermost `with mesh:` block.
_current_mesh: list[Mesh | None] = [None]


def current_mesh() -> Mesh | None:
    """The mesh of the surrounding `with mesh:` block, if any."""
    return _current_mesh[0]


def make_mesh(
    axis_shapes: Sequence[int], axis_names: Sequence[Any], *, devices: Any = None
) -> Mesh:
    """Make a mesh of shape `axis_shapes` whose axes are called `axis_names`.

    It covers the first of all devices, or of `devices`, in row-major order. Each of `axis_shapes`
    is an int. Raises `DeviceError` if there are too few devices, and `ShardingError` if the numbers
    of sizes and names differ or a name occurs twice.

    >>> spmd.make_mesh((2, 2), ("data", "model"))
    Mesh('data': 2, 'model': 2)
    """
    shape = tuple(int(s) for s in axis_shapes)
    pool = list(all_devices() if devices is None else devices)
    wanted = math.prod(shape)
    if wanted > len(pool):
        raise too_few_devices(f"make_mesh({shape}, {tuple(axis_names)})", wanted, len(pool))
    return Mesh(np.asarray(pool[:wanted], dtype=object).reshape(shape), tuple(axis_names))


def all_devices() -> list[Device]:
    """All devices of the default platform."""
    return devices()
