"""Shardings: which slice of a global array each device holds.

`NamedSharding` says it with a mesh and a spec; `SingleDeviceSharding` and `PmapSharding` are the
two special cases that results of `device_put` and `pmap` have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.base.device import (
    MEMORY_KINDS,
    Device,
    as_device,
    check_memory_kind,
    process_index,
)
from spmd.base.errors import (
    ArgumentError,
    DuplicateSpecError,
    FrozenError,
    IndivisibleError,
    ShardingError,
)
from spmd.base.lazy_import import Deferred
from spmd.sharding.abstract_mesh import AbstractMesh, AxisType, NamedAxes
from spmd.sharding.spec import PartitionSpec, Unconstrained, check_platforms

if TYPE_CHECKING:
    from spmd.core.aval import ShapedArray

Index = tuple[slice, ...]

_hlo: Any = Deferred("spmd.sharding.xla.hlo_sharding")


class Sharding:
    """How a global array is cut over devices."""

    def devices_indices_map(self, global_shape: Sequence[int]) -> dict[Device, Index]:
        """For each device, the slices of the global array that it holds."""
        raise NotImplementedError

    def shard_shape(self, global_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one device's shard."""
        first = next(iter(self.devices_indices_map(global_shape).values()))
        pairs = zip(first, global_shape, strict=True)
        return tuple(len(range(*s.indices(size))) for s, size in pairs)

    @property
    def layout(self) -> Any:
        """Equal for shardings that put the same shards in the same order on the same devices.

        Names do not count: rows over axis "i" of one map lie as rows over axis "batch" of another.
        """
        raise NotImplementedError

    @property
    def device_set(self) -> set[Device]:
        raise NotImplementedError

    @property
    def is_fully_replicated(self) -> bool:
        return False

    @property
    def has_addressable_devices(self) -> bool:
        """Whether a device of this process holds a shard."""
        return bool(self.addressable_devices)

    @property
    def is_fully_addressable(self) -> bool:
        return True

    def in_full(self, ndim: int) -> Sharding:
        """The same as results of `ndim` dims have it."""
        return self

    def over_mesh(self) -> Sharding:
        """The same over a mesh, where it can only be said so to a compiled program; else itself."""
        return self

    @property
    def num_devices(self) -> int:
        """The number of devices that hold a shard, those of other processes included."""
        return len(self.device_set)

    # Libraries ask JAX's shardings for these.

    @property
    def _device_assignment(self) -> tuple[Device, ...]:
        """The devices in their order."""
        return tuple(self.devices_indices_map(()))

    @property
    def _internal_device_list(self) -> tuple[Device, ...]:
        return self._device_assignment

    @property
    def _is_concrete(self) -> bool:
        """Whether it is over devices."""
        return True

    def _to_xla_hlo_sharding(self, num_dimensions: int) -> Any:
        """The same in XLA's words, for arrays of a number of dims."""
        return _hlo.HloSharding.replicate()

    @property
    def _addressable_device_assignment(self) -> tuple[Device, ...]:
        """This process's devices in order, as orbax asks for them."""
        return tuple(sorted(self.addressable_devices, key=lambda d: d.id))

    @property
    def addressable_devices(self) -> set[Device]:
        """This process's devices that hold a shard."""
        mine = process_index()
        return {d for d in self.device_set if d.process_index == mine}

    @property
    def memory_kind(self) -> str | None:
        """The kind of memory that holds the shards."""
        return MEMORY_KINDS[0]

    def with_memory_kind(self, kind: str) -> Sharding:
        """The same sharding in memory of another kind: a label, since CPUs have one memory.

        Raises `ArgumentError` if devices have none of the kind.
        """
        check_memory_kind("with_memory_kind", kind)
        if kind != self.memory_kind:
            raise ArgumentError(f"with_memory_kind: {self!r} is always in {self.memory_kind!r}")
        return self

    def check_compatible_aval(self, aval_shape: Sequence[int]) -> None:
        """Raise a `ShardingError` if arrays of a shape have too few dims to be laid out so."""

    def is_equivalent_to(self, other: Sharding, ndim: int) -> bool:
        """Whether both put the same shards of arrays of `ndim` dims on the same devices.

        The devices count in their order, and names do not count: rows over one axis of size 4 lie
        as rows over two of size 2. Raises a ShardingError if a spec has more than `ndim` entries.

        >>> a, b = spmd.make_mesh((4,), ("a",)), spmd.make_mesh((2, 2), ("x", "y"))
        >>> rows = spmd.NamedSharding(a, spmd.P("a"))
        >>> rows.is_equivalent_to(spmd.NamedSharding(b, spmd.P(("x", "y"))), 2)
        True
        """
        same_memory = self.memory_kind == other.memory_kind
        return same_memory and self._places(ndim) == other._places(ndim)

    def typed(self, aval: ShapedArray) -> ShapedArray:
        """The aval of an array that is laid out like this: only explicit axes are part of it."""
        return aval if aval.explicit is None else aval.update(sharding=None)

    def _places(self, ndim: int) -> list[Any]:
        """Each device with its part of an array of `ndim` dims, which can be cut in any way."""
        size = self.num_devices
        indices = self.devices_indices_map((size,) * ndim)
        return [(d, _spans(index, size)) for d, index in indices.items()]

    def addressable_devices_indices_map(self, global_shape: Sequence[int]) -> dict[Device, Index]:
        """`devices_indices_map` of this process's devices."""
        mine = process_index()
        every_device = self.devices_indices_map(global_shape)
        return {d: index for d, index in every_device.items() if d.process_index == mine}


class SingleDeviceSharding(Sharding):
    """Lay an array of any shape and dtype out on one device, whole.

    `device` is a `Device`, and `memory_kind` one of its kinds of memory, by default "device".
    Raises `DeviceError` if `device` is none, and `ArgumentError` if there is no such kind.

    >>> layout = spmd.sharding.SingleDeviceSharding(spmd.devices()[1])
    >>> layout
    SingleDeviceSharding(device=CpuDevice(id=1), memory_kind=device)
    >>> spmd.device_put(np.ones((2, 3)), layout).device
    CpuDevice(id=1)
    """

    __slots__ = ("_memory_kind", "device")

    def __init__(self, device: Device, *, memory_kind: str | None = None):
        self.device = as_device(device)
        if memory_kind is not None:
            check_memory_kind("SingleDeviceSharding", memory_kind)
        self._memory_kind = memory_kind or MEMORY_KINDS[0]

    @property
    def memory_kind(self) -> str:
        return self._memory_kind

    def with_memory_kind(self, kind: str) -> SingleDeviceSharding:
        return SingleDeviceSharding(self.device, memory_kind=kind)

    def devices_indices_map(self, global_shape: Sequence[int]) -> dict[Device, Index]:
        return {self.device: tuple(slice(None) for _ in global_shape)}

    @property
    def layout(self) -> Any:
        return (self.device.id,), (), ()

    @property
    def device_set(self) -> set[Device]:
        return {self.device}

    @property
    def is_fully_replicated(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, SingleDeviceSharding)
            and self.device is other.device
            and self._memory_kind == other._memory_kind
        )

    def __hash__(self) -> int:
        return hash(self.device)

    def __repr__(self) -> str:
        kind = self._memory_kind
        return f"SingleDeviceSharding(device={self.device!r}, memory_kind={kind})"


def make_single_device_sharding(
    device: Device, *, memory_kind: str | None = None
) -> SingleDeviceSharding:
    """Make the sharding of arrays of any shape and dtype that are on one device.

    `device` and `memory_kind` are those of `SingleDeviceSharding`, as are the errors.

    >>> spmd.sharding.make_single_device_sharding(spmd.devices()[1]).device_set
    {CpuDevice(id=1)}
    """
    return SingleDeviceSharding(device, memory_kind=memory_kind)


class NamedSharding(Sharding):
    """Lay an array out by a mesh, and a spec that splits its dims over the mesh's axes.

    `mesh` is a `Mesh` (or an `AbstractMesh`, for shapes alone) and `spec` a `PartitionSpec`. Global
    shape (8, 4) with `P("x")` over an axis of size 4 gives shards of shape (2, 4); any dtype can be
    laid out. A dim of `P.UNCONSTRAINED` is left to the compiler, which `with_sharding_constraint`
    may do, and no data can be placed by such a sharding. `memory_kind` is one of the devices' kinds
    of memory, by default "device". A sharding cannot be changed.

    A dim must be a multiple of its parts, unless the sharding is `uneven`: then, along `Auto` axes,
    the n rows of a dim in p parts are pieces of ceil(n/p), of which the last are shorter or empty.

    Raises `ShardingError` if `spec` names an unknown axis or one axis twice, or has `unreduced` or
    `reduced` axes that are not `Explicit`, and `ArgumentError` if `mesh` is no mesh or `spec` no
    spec.

    >>> mesh = spmd.make_mesh((4,), ("x",))
    >>> spmd.NamedSharding(mesh, spmd.P("x")).shard_shape((8, 4))
    (2, 4)
    >>> layout = spmd.NamedSharding(spmd.sharding.Mesh(mesh.devices, "x"), spmd.P("x"), uneven=True)
    >>> [shard.data.shape for shard in spmd.device_put(np.arange(10), layout).addressable_shards]
    [(3,), (3,), (3,), (1,)]
    """

    __slots__ = ("_explicit", "_layout", "_memory_kind", "mesh", "spec", "uneven")

    mesh: Any  # a Mesh; an AbstractMesh has no devices, and raises where they are asked for
    spec: PartitionSpec
    uneven: bool

    def __init__(
        self,
        mesh: NamedAxes,
        spec: PartitionSpec,
        *,
        memory_kind: str | None = None,
        uneven: bool = False,
    ):
        if not isinstance(mesh, NamedAxes):
            advice = "; the mesh comes first" if isinstance(spec, NamedAxes) else ""
            raise ArgumentError(f"NamedSharding: mesh must be a Mesh, got {mesh!r}{advice}")
        if not isinstance(spec, PartitionSpec):
            raise ArgumentError(
                f"NamedSharding: spec must be a PartitionSpec, got {spec!r}; P(...) makes one, and "
                "P() splits no dim"
            )
        named = spec.all_axes()
        for axis in named:
            if axis not in mesh.axis_names:
                known = ", ".join(map(repr, mesh.axis_names))
                raise ShardingError(
                    f"NamedSharding: {spec}: mesh axis {axis!r} does not exist; the mesh has "
                    f"{known}"
                )
        if spec.unreduced or spec.reduced:
            _check_sets_of_mesh(mesh, spec)
        if len(set(named)) != len(named):
            twice = next(a for a in named if named.count(a) > 1)
            error = DuplicateSpecError(
                f"NamedSharding: {spec} uses mesh axis {twice!r} more than once; an axis can split "
                "one dim, once"
            )
            error.mesh, error.pspec = mesh, spec
            raise error
        if memory_kind is not None:
            check_memory_kind("NamedSharding", memory_kind)
        elif not isinstance(mesh, AbstractMesh):
            memory_kind = MEMORY_KINDS[0]
        set_field = object.__setattr__
        set_field(self, "mesh", mesh)
        set_field(self, "spec", spec)
        self._memory_kind = memory_kind
        self.uneven = bool(uneven)
        self._layout: Any = None
        # By the number of dims, what types say.
        self._explicit: dict[int, NamedSharding | None] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("mesh", "spec"):
            raise FrozenError(
                f"cannot assign to {name} of {self}: a sharding cannot be changed; "
                f"update({name}=...) makes another one"
            )
        object.__setattr__(self, name, value)

    @property
    def memory_kind(self) -> str | None:
        """The kind of memory that holds the shards; None of an abstract mesh, if not given."""
        return self._memory_kind

    def with_memory_kind(self, kind: str) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec, memory_kind=kind, uneven=self.uneven)

    def check_compatible_aval(self, aval_shape: Sequence[int]) -> None:
        if len(self.spec) > len(aval_shape):
            raise ShardingError(
                f"{self} has a spec of {len(self.spec)} entries, and arrays of shape "
                f"{tuple(aval_shape)} have {len(aval_shape)} dims; a spec may have at most one "
                "entry for each"
            )

    def explicit_part(self, ndim: int) -> NamedSharding | None:
        """The sharding along `Explicit` axes, as types of arrays of `ndim` dims have it, or None.

        It is over the abstract mesh, and its spec has an entry for each dim.
        """
        if ndim not in self._explicit:
            self._explicit[ndim] = self._make_explicit(ndim)
        return self._explicit[ndim]

    def of_type(self, ndim: int) -> NamedSharding | None:
        """The sharding as types hold it: itself, if it is made so, else its explicit part."""
        says = AxisType.Explicit in self.mesh.axis_types or self.spec.unreduced or self.spec.reduced
        is_made_so = says and len(self.spec) == ndim and isinstance(self.mesh, AbstractMesh)
        return self if is_made_so else self.explicit_part(ndim)

    def _make_explicit(self, ndim: int) -> NamedSharding | None:
        mesh = self.mesh
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        has_sums = self.spec.unreduced or self.spec.reduced
        if AxisType.Explicit not in mesh.axis_types and not has_sums:
            return None
        entries = [
            tuple(a for a in self.spec.axes_of(d) if kinds[a] is AxisType.Explicit)
            for d in range(ndim)
        ]
        return NamedSharding(mesh.abstract_mesh, self.spec.update(entries))

    def in_full(self, ndim: int) -> NamedSharding:
        """The same as results have it: if types say all, its spec has an entry for each dim."""
        if len(self.spec) == ndim or not self.mesh.are_all_axes_explicit:
            return self
        if ~ndim not in self._explicit:
            entries = (*self.spec, *[None] * (ndim - len(self.spec)))
            self._explicit[~ndim] = self.update(spec=self.spec.update(entries))
        return self._explicit[~ndim] or self

    def cotangent(self) -> NamedSharding:
        """How the cotangent of a value is laid out that is laid out like this."""
        spec = self.spec.cotangent()
        return self if spec is self.spec else NamedSharding(self.mesh, spec, uneven=self.uneven)

    def with_mesh(self, mesh: NamedAxes) -> NamedSharding:
        """The same over a mesh with other types of axes; only `Explicit` ones are unreduced."""
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        spec = self.spec
        if spec.unreduced or spec.reduced:
            sets = spec.unreduced, spec.reduced
            spec = spec.update(
                None, *({a for a in axes if kinds[a] is AxisType.Explicit} for axes in sets)
            )
        return NamedSharding(mesh, spec, uneven=self.uneven)

    def manual_sets(self) -> tuple[frozenset[Any], frozenset[Any]]:
        """The `unreduced` and the `reduced` axes that are those of a map around."""
        spec, mesh = self.spec, self.mesh
        if not spec.unreduced and not spec.reduced:
            return spec.unreduced, spec.reduced
        pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
        manual = frozenset(a for a, kind in pairs if kind is AxisType.Manual)
        return spec.unreduced & manual, spec.reduced & manual

    def check_has_axes(self, what: str) -> None:
        """Raise a ShardingError for the sharding of a type that is over no mesh."""
        if self.mesh.empty:
            raise ShardingError(
                f"{what}: the mesh of {self} has no axes: it is the type of a value over no mesh. "
                "Give a sharding over a mesh with devices, or leave the value as it is"
            )

    @property
    def _device_assignment(self) -> tuple[Device, ...]:
        return tuple(self.mesh.flat_devices())

    @property
    def _is_concrete(self) -> bool:
        return not isinstance(self.mesh, AbstractMesh)

    def _to_xla_hlo_sharding(self, num_dimensions: int) -> Any:
        kinds = _hlo.OpShardingType
        types = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        special = {axis: kinds.MANUAL for axis, kind in types if kind is AxisType.Manual}
        special |= dict.fromkeys(self.spec.unreduced, kinds.UNREDUCED)
        axes = [self.spec.axes_of(dim) for dim in range(num_dimensions)]
        return _hlo.of_axes(dict(self.mesh.shape), axes, special)

    @property
    def replicated_axes(self) -> frozenset[Any]:
        """The axes of the mesh along which all devices hold the same."""
        used = {*self.spec.all_axes(), *self.spec.unreduced, *self.spec.reduced}
        return frozenset(self.mesh.axis_names) - used

    @property
    def unreduced_axes(self) -> tuple[Any, ...]:
        """The axes along which devices hold terms of a sum, in the order of the mesh."""
        return tuple(a for a in self.mesh.axis_names if a in self.spec.unreduced)

    def typed(self, aval: ShapedArray) -> ShapedArray:
        part = self.explicit_part(aval.ndim)
        return aval if part is aval.explicit else aval.update(sharding=part)

    def update(
        self,
        *,
        mesh: NamedAxes | None = None,
        spec: Any = None,
        memory_kind: str | None = None,
    ) -> NamedSharding:
        """Make a sharding with another mesh, spec (or tuple of entries), or kind of memory."""
        wanted = self.spec if spec is None else spec
        return NamedSharding(
            self.mesh if mesh is None else mesh,
            wanted if isinstance(wanted, PartitionSpec) else PartitionSpec(*wanted),
            memory_kind=self._memory_kind if memory_kind is None else memory_kind,
            uneven=self.uneven,
        )

    @property
    def layout(self) -> Any:
        if self._layout is None:
            self._layout = self._make_layout()
        return self._layout

    def _make_layout(self) -> Any:
        """Devices, sizes of the axes, for each dim the positions of the axes that split it, and
        those of the axes along which devices hold terms of a sum."""
        real = [a for a, size in self.mesh.shape.items() if size > 1]
        no_devices = isinstance(self.mesh, AbstractMesh)
        ids = () if no_devices else tuple(d.id for d in self.mesh.flat_devices())
        dims = [
            tuple(real.index(a) for a in self.spec.axes_of(d) if a in real)
            for d in range(len(self.spec))
        ]
        while dims and not dims[-1]:
            dims.pop()
        unreduced = tuple(real.index(a) for a in self.unreduced_axes if a in real)
        return ids, tuple(self.mesh.shape[a] for a in real), tuple(dims), unreduced

    def check(self, shape: Sequence[int], what: str, uneven: bool = False) -> None:
        """Raise a ShardingError if an array of `shape` cannot be cut like this.

        If `uneven` is true, dims along automatic axes need not be multiples of their parts.
        """
        if len(self.spec) > len(shape):
            raise self._too_long(shape, what)
        self._check_sizes(shape, what, uneven)

    def _check_parts(self, shape: Sequence[int]) -> None:
        """Raise if there are no parts of a shape; entries of None beyond its dims do not matter."""
        if any(entry is not None for entry in self.spec[len(shape) :]):
            raise self._too_long(shape, "the array")
        self._check_sizes(shape, "the array")

    def _too_long(self, shape: Sequence[int], what: str) -> ShardingError:
        advice = f"shorten it to {self.spec.update(self.spec[: len(shape)])}"
        if not shape:
            advice = "a scalar cannot be split, so leave it out, or use P()"
        return ShardingError(
            f"{what} has shape {tuple(shape)} ({len(shape)} dims), but {self.spec} has "
            f"{len(self.spec)} entries; it may have at most one for each dim: {advice}"
        )

    def _check_sizes(self, shape: Sequence[int], what: str, uneven: bool = False) -> None:
        for d, size in enumerate(shape):
            axes = self.spec.axes_of(d)
            parts = self.mesh.axis_size(axes)
            if size % parts and not ((uneven or self.uneven) and self._are_auto(axes)):
                up = -(-size // parts) * parts
                advice = " Parts may differ in size along Auto axes only." if self.uneven else ""
                raise IndivisibleError(
                    f"{what} has shape {tuple(shape)}, and {self.spec} splits dim {d} (size "
                    f"{size}) over mesh axis {_axes_text(axes)} (size {parts}); {size} is not a "
                    f"multiple of {parts}.\nPad dim {d} to {up}, or leave it whole with None."
                    f"{advice}"
                )

    def _are_auto(self, axes: Sequence[Any]) -> bool:
        kinds = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        return all(kinds[a] is AxisType.Auto for a in axes)

    def check_placing(self, shape: Sequence[int], what: str) -> None:
        """Raise a ShardingError if a user cannot put an array of `shape` on devices like this."""
        self.check(shape, what)
        if self.spec.unreduced:
            raise ShardingError(
                f"{what} has shape {tuple(shape)}, and {self.spec} wants terms of a sum along "
                f"{_axes_text(self.unreduced_axes)}; place the value without them, then call "
                f"reshard(x, {self.spec})"
            )
        if Unconstrained.UNCONSTRAINED in self.spec:
            dim = self.spec.index(Unconstrained.UNCONSTRAINED)
            raise ShardingError(
                f"{what} has shape {tuple(shape)}, and {self.spec} leaves dim {dim} to the "
                "compiler, so it does not say where data lies. Name a mesh axis there, or None; "
                "UNCONSTRAINED is for with_sharding_constraint inside jit"
            )

    def devices_indices_map(self, global_shape: Sequence[int]) -> dict[Device, Index]:
        self._check_parts(global_shape)
        return dict(zip(self.mesh.flat_devices(), self._indices(global_shape), strict=True))

    def _indices(self, global_shape: Sequence[int]) -> Iterator[Index]:
        """The slices of each device, in row-major order; a dim left to the compiler is whole."""
        sizes = self.mesh.shape
        axes_of = [self.spec.axes_of(d) for d in range(len(global_shape))]
        for place in np.ndindex(*self.mesh.axis_sizes):
            position = dict(zip(self.mesh.axis_names, place, strict=True))
            index = []
            for size, axes in zip(global_shape, axes_of, strict=True):
                part, parts = 0, 1
                for a in axes:
                    part = part * sizes[a] + position[a]
                    parts *= sizes[a]
                step = -(-size // parts)
                whole = parts == 1
                start, stop = min(part * step, size), min((part + 1) * step, size)
                index.append(slice(None) if whole else slice(start, stop))
            yield tuple(index)

    def _places(self, ndim: int) -> list[Any]:
        size = self.mesh.size
        self._check_parts((size,) * ndim)
        no_devices = isinstance(self.mesh, AbstractMesh)
        devices = range(size) if no_devices else self.mesh.flat_devices()
        indices = self._indices((size,) * ndim)
        return [(d, _spans(index, size)) for d, index in zip(devices, indices, strict=True)]

    def shard_shape(self, global_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one device's shard; a dim left to the compiler counts as not split.

        Of uneven parts it is that of the first, the largest.
        """
        self._check_parts(global_shape)
        axes = map(self.spec.axes_of, range(len(global_shape)))
        pairs = zip(global_shape, axes, strict=True)
        return tuple(-(-n // self.mesh.axis_size(a)) for n, a in pairs)

    @property
    def num_devices(self) -> int:
        return self.mesh.size

    @property
    def device_set(self) -> set[Device]:
        return set(self.mesh.flat_devices())

    @property
    def is_fully_replicated(self) -> bool:
        return self.mesh.axis_size(self.spec.varying_axes()) == 1

    @property
    def is_fully_addressable(self) -> bool:
        return len({d.process_index for d in self.mesh.flat_devices()}) == 1

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, NamedSharding)
            and self.mesh is other.mesh
            and self.spec == other.spec
            and self._memory_kind == other._memory_kind
            and self.uneven == other.uneven
        )

    def __hash__(self) -> int:
        return hash((self.mesh, self.spec))

    def __reduce__(self) -> Any:
        return _named_of, (self.mesh, self.spec, self._memory_kind, self.uneven)

    def __repr__(self) -> str:
        kind = f", memory_kind={self._memory_kind}" if self._memory_kind else ""
        uneven = ", uneven=True" if self.uneven else ""
        return f"NamedSharding(mesh={self.mesh}, spec={self.spec}{kind}{uneven})"


def _named_of(
    mesh: NamedAxes, spec: PartitionSpec, memory_kind: str | None, uneven: bool = False
) -> NamedSharding:
    """The sharding that was pickled."""
    return NamedSharding(mesh, spec, memory_kind=memory_kind, uneven=uneven)


class PmapSharding(Sharding):
    """One leading row a device, as `pmap` takes and returns."""

    __slots__ = ("devices", "sharded_dim")

    def __init__(self, devices: Sequence[Device], sharded_dim: int | None = 0):
        self.devices = tuple(devices)
        check_platforms("PmapSharding", self.devices)
        self.sharded_dim = sharded_dim

    def devices_indices_map(self, global_shape: Sequence[int]) -> dict[Device, Index]:
        out = {}
        for k, device in enumerate(self.devices):
            index = [slice(None) for _ in global_shape]
            if self.sharded_dim is not None:
                index[self.sharded_dim] = slice(k, k + 1)
            out[device] = tuple(index)
        return out

    @property
    def layout(self) -> Any:
        ids = tuple(d.id for d in self.devices)
        if len(ids) == 1 or self.sharded_dim is None:
            return ids, (len(ids),) if len(ids) > 1 else (), (), ()
        return ids, (len(ids),), (*[()] * self.sharded_dim, (0,)), ()

    @property
    def device_set(self) -> set[Device]:
        return set(self.devices)

    @property
    def is_fully_replicated(self) -> bool:
        return self.sharded_dim is None

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, PmapSharding)
            and self.devices == other.devices
            and self.sharded_dim == other.sharded_dim
        )

    def __hash__(self) -> int:
        return hash((self.devices, self.sharded_dim))

    def __repr__(self) -> str:
        return f"PmapSharding(devices={list(self.devices)}, sharded_dim={self.sharded_dim})"


def _check_sets_of_mesh(mesh: NamedAxes, spec: PartitionSpec) -> None:
    """Raise unless all unreduced and reduced axes are such that types can speak of them."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    for name, axes in ("unreduced", spec.unreduced), ("reduced", spec.reduced):
        for axis in sorted(axes, key=repr):
            mesh.axis_size((axis,))
            if kinds[axis] is AxisType.Auto:
                raise ShardingError(
                    f"NamedSharding: {spec} has axis {axis!r} of {mesh} in {name}, and it is an "
                    "Auto axis: there the compiler decides when sums are made; make the mesh with "
                    "AxisType.Explicit, or leave the set out"
                )


def _spans(index: Index, size: int) -> tuple[Any, ...]:
    """The starts and ends of slices of dims that all have one size."""
    return tuple(s.indices(size)[:2] for s in index)


def _axes_text(axes: Sequence[Any]) -> str:
    return " and ".join(repr(a) for a in axes)
