"""Putting arrays on devices: `device_put`, and its replicated and sharded relatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.base.config import config
from spmd.base.device import Device, MemorySpace, default_device, process_index
from spmd.base.dtypes import canonical
from spmd.base.errors import ArgumentError, ShapeError, ShardingError
from spmd.base.source import current_source
from spmd.base.transfers import DEVICE_TO_DEVICE, HOST_TO_DEVICE, report_transfer
from spmd.base.tree import (
    broadcast_prefix,
    keystr,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from spmd.compile.lazy import cuda_backend, redistribute, replicas
from spmd.core.argument_names import check_arrays
from spmd.core.aval import ShapedArray, typeof
from spmd.core.explicit import hooks
from spmd.core.jvp import JVPTracer
from spmd.core.primitive import Primitive, Zero, dims, linear
from spmd.core.trace import Tracer, to_numpy
from spmd.core.vmap import BatchTracer
from spmd.sharding.abstract_mesh import AxisType
from spmd.sharding.array import (
    Array,
    alias,
    filled_up,
    from_memory,
    from_numpy,
    from_shards,
    shard_value,
)
from spmd.sharding.call_cache import is_evaluated
from spmd.sharding.constraint import as_sharding, constrain, sharding_constraint_p
from spmd.sharding.explicit_layouts import to_auto_p
from spmd.sharding.named import NamedSharding, PmapSharding, Sharding, SingleDeviceSharding
from spmd.sharding.operand_layouts import guards_moves, spec_over
from spmd.sharding.spec import Mesh, PartitionSpec
from spmd.sharding.xla.layout import Format, Layout, without_layout
from spmd.transport import world


def device_put(
    x: Any,
    device: Any = None,
    *,
    src: Any = None,
    donate: Any = False,
    may_alias: Any = None,
) -> Any:
    """Put an array, or a pytree of them, on a device, or lay it out by a sharding.

    `device` is a `Device`, a `Sharding`, a `PartitionSpec` over the mesh in scope (`set_mesh`),
    None (the default device), or a pytree prefix of those. Global shapes and dtypes stay, and
    numbers become arrays. An array that lies over the same devices already is moved by one
    exchange, in which each of them receives what it lacks, over processes too. Inside a jitted
    function a sharding is a constraint, as that of `lax.with_sharding_constraint`, and a device
    moves nothing: the program runs where its arguments are. `src` is where
    the arrays are, which they know themselves; `donate` is accepted for JAX's sake.
    `may_alias=False` asks for new arrays, which stay when those of `x` are donated.

    Raises `ShardingError` that names the leaf if its shape cannot be cut evenly, if there is no
    mesh for a spec or if it is traced and `device` is a sharding without a mesh, and
    `ArgumentError` if a leaf is no array or `device` no place.

    >>> spmd.device_put(np.arange(3.0))
    Array([0., 1., 2.], dtype=float32)
    >>> mesh = spmd.make_mesh((4,), ("x",))
    >>> y = spmd.device_put(np.arange(8.0), spmd.NamedSharding(mesh, spmd.P("x")))
    >>> y.addressable_shards[3].data
    Array([6., 7.], dtype=float32)
    """
    pairs, tree = tree_flatten_with_path(x)
    leaves = [leaf for _, leaf in pairs]
    names = [f"x{keystr(path)}" for path, _ in pairs]
    check_arrays("device_put", names, leaves)
    if may_alias is True and donate is True:
        raise ArgumentError(
            f"{current_source()}: device_put: may_alias=True and donate=True: the result cannot "
            "share memory that is given away; give one of them"
        )
    places = broadcast_prefix(device, x, "device_put: device", _is_place)
    if src is not None:
        broadcast_prefix(src, x, "device_put: src", _is_place)
    for leaf, place in zip(leaves, places, strict=True):
        if isinstance(place, Format) and isinstance(place.layout, Layout):
            place.layout.check_compatible_aval(typeof(leaf).shape)
    places = [without_layout(place) for place in places]
    if not isinstance(donate, bool):
        broadcast_prefix(donate, x, "device_put: donate")
    placed = [_put(n, v, p) for n, v, p in zip(names, leaves, places, strict=True)]
    for y in placed:
        if type(y) is Array:
            _begin_move(y)
    if may_alias is False:
        pairs = zip(leaves, placed, strict=True)
        placed = [alias(y) if y is x and isinstance(y, Array) else y for x, y in pairs]
    return tree_unflatten(tree, placed)


hooks.put = device_put


def _is_place(x: Any) -> bool:
    return x is None or isinstance(x, (Device, Sharding, PartitionSpec, Format, MemorySpace))


def _put(name: str, x: Any, place: Any) -> Any:
    """Put a leaf on its place: as it is if it is there, else by a program or from the host."""
    if isinstance(place, PartitionSpec):
        place = as_sharding(f"device_put: {name}", place)
    if isinstance(place, MemorySpace):
        place = _in_memory(x, place)
    if isinstance(x, Tracer):
        return _traced(name, x, place)
    if guards_moves():
        _guard(name, x, place)
    if place is None:
        return x if isinstance(x, Array) else from_numpy(x)
    if isinstance(place, Device):
        if isinstance(x, Array) and x.shards is None and x.committed and x.device is place:
            return x
        if place.platform == "gpu" and isinstance(x, Array) and not x.ptr:
            if x.shards is None:
                return cuda_backend.moved(x, place)
            moved = redistribute.between_gpus(x, SingleDeviceSharding(place))
            if moved is not None:
                return moved
        return from_numpy(to_numpy(x), typeof(x), place)
    if isinstance(place, Sharding):
        if isinstance(x, Array) and x.sharding == place and x.committed:
            return x
        aval = typeof(x)
        _check_placing(f"device_put: {name}", aval.shape, place)
        moved = _moved(x, place)
        if moved is not None:
            return moved
        if "collectives" in config.debug and not place.is_fully_addressable:
            what = f"{current_source()}: device_put"
            replicas.compare_host_values(world.world(), {name: x}, what)
        return shard_value(to_numpy(x), aval, place, process_index())
    advice = "; a NamedSharding says how to split over it" if isinstance(place, Mesh) else ""
    raise ArgumentError(
        f"{current_source()}: device_put: {name}: device must be a Device, a Sharding, a "
        f"PartitionSpec or None, got {place!r}{advice}"
    )


def _in_memory(x: Any, space: MemorySpace) -> Any:
    """The sharding of `x` in memory of a kind; None for a traced value, which has one already."""
    if isinstance(x, Tracer) or space is MemorySpace.Any:
        return None
    now = x.sharding if isinstance(x, Array) else SingleDeviceSharding(default_device())
    return now.with_memory_kind(space.value)


def _begin_move(x: Array) -> None:
    """Let values of the host move to their GPUs now, beside what these compute."""
    for shard in x.shards or (x,):
        if shard.ptr and shard.device.platform == "gpu":
            cuda_backend.BACKEND.operand(shard, shard.aval, shard.device)


def _guard(name: str, x: Any, place: Any) -> None:
    """Report a value's explicit transfer to the transfer guards, if it is one."""
    if not isinstance(x, Array):
        what = f"device_put: {name} ({typeof(x).short()}) is of the host"
        report_transfer(HOST_TO_DEVICE, what, "make it on the device", explicit=True)
    elif isinstance(place, Device | Sharding):
        # In JAX, to keep what one of its devices has of an array is no move.
        stays = place in x.sharding.device_set if isinstance(place, Device) else x.sharding == place
        if not stays:
            what = f"device_put: {name} ({x.aval.short()}) lies otherwise than {place}"
            report_transfer(DEVICE_TO_DEVICE, what, "compute it there", explicit=True)


def _moved(x: Any, place: Sharding) -> Array | None:
    """An array laid out otherwise over the same devices, or GPUs; None where it must be whole.

    A program moves it, so that it may lie over processes: one of its mesh, or one exchange.
    """
    if type(x) is not Array or not is_evaluated():
        return None
    if x.shards is None:
        return redistribute.between_gpus(x, place) if x.device.platform == "gpu" else None
    now, spec = x.sharding, None
    if isinstance(now, NamedSharding) and isinstance(place, NamedSharding):
        same = now.mesh.flat_devices() == place.mesh.flat_devices()
        in_order = same and not now.uneven and not place.uneven
        spec = spec_over(now.mesh, place) if in_order else None
    if spec is None:
        return redistribute.redistributed(x, place)
    free = to_auto_p.bind(x, axes=None)  # along automatic axes a constraint moves
    out = sharding_constraint_p.bind(free, mesh=free.sharding.mesh, spec=spec)
    return from_shards(x.aval, place, out.shards)


def _traced(name: str, x: Tracer, place: Any) -> Tracer:
    """A traced value is where its program runs; a sharding constrains it.

    One that is differentiated outside of `jit` is an array: it is moved, and its cotangent back.
    """
    source = _differentiated(x, place)
    if source is not None and isinstance(place, Device | Sharding) and not _has_type(x, place):
        return device_put_p.bind(x, place=place, back=source)
    if isinstance(place, NamedSharding):
        return constrain(f"device_put: {name}", x, place, moves=True)
    devices = {place} if isinstance(place, Device) else getattr(place, "device_set", set())
    if place is None or devices == {default_device()}:
        return x
    if len(devices) == 1:
        if isinstance(x, BatchTracer):
            return BatchTracer(x._trace, _put(name, x.val, place), x.dim)
        if isinstance(x, JVPTracer):
            tangent = x.tangent if isinstance(x.tangent, Zero) else _put(name, x.tangent, place)
            return JVPTracer(x._trace, _put(name, x.primal, place), tangent)
        return x  # a staged program runs where its arguments are, as in JAX
    raise ShardingError(
        f"{current_source()}: device_put: {name} is traced ({x.aval.short()}), and inside jit, "
        f"grad, vmap or a map a value cannot be moved to {place}. Call device_put on the argument "
        "before the transformed function, or on its result after it; lay a value out over devices "
        "with a NamedSharding."
    )


def _differentiated(x: Any, place: Any) -> Sharding | None:
    """The sharding of the array that is differentiated, if a cotangent has to go back to it.

    None if `x` is no such array, if it may lie anywhere, or if it has a batch dim that a spec would
    have to name.
    """
    is_differentiated = is_batched = False
    while isinstance(x, JVPTracer | BatchTracer):
        is_differentiated |= isinstance(x, JVPTracer)
        is_batched |= isinstance(x, BatchTracer)
        x = x.primal if isinstance(x, JVPTracer) else x.val
    if not is_differentiated or type(x) is not Array or not x.committed:
        return None
    if is_batched and any(isinstance(s, NamedSharding) for s in (x.sharding, place)):
        return None
    return x.sharding


def _has_type(x: Tracer, place: Any) -> bool:
    """Whether types say how the value lies, or will."""
    is_named = isinstance(place, NamedSharding)
    return x.aval.explicit is not None or (is_named and AxisType.Explicit in place.mesh.axis_types)


def _device_put_transpose(ct: Any, x: Any, *, place: Any, back: Any) -> list[Any]:
    is_staged = isinstance(ct, Tracer) and not isinstance(ct, JVPTracer | BatchTracer)
    return [ct if is_staged else device_put_p.bind(ct, place=back, back=place)]


# Moves tangents with the arrays that are differentiated, and cotangents `back`.
device_put_p = Primitive(
    "device_put",
    abstract=lambda x, *, place, back: x,
    impl=lambda xp, x, *, place, back: x,
    eager=lambda x, *, place, back: device_put(x, place),
    jvp=linear,
    transpose=_device_put_transpose,
    batch=lambda axis, operands, at, **params: (device_put_p.bind(*operands, **params), at[0]),
    dims=lambda x, *, place, back: dims([range(x.ndim)], [range(x.ndim)]),
)


def _check_placing(what: str, shape: Sequence[int], sharding: Any) -> None:
    """Raise a ShardingError unless an array of `shape` can be laid out by a sharding."""
    if isinstance(sharding, NamedSharding):
        sharding.check_placing(shape, f"{current_source()}: {what}")


def device_put_sharded(shards: Sequence[Any], devices: Sequence[Device]) -> Any:
    """Stack one pytree for each device along a new leading dim, each row on its device.

    `shards` are pytrees of arrays of equal shapes `S`; the result has global shape (n, *S) over the
    n `devices`, and the dtype of the shards. Raises `ShapeError` if there is not one for each
    device.

    >>> spmd.device_put_sharded([1.0, 2.0], spmd.devices()[:2])
    Array([1., 2.], dtype=float32)
    """
    if len(shards) != len(devices):
        raise ShapeError(
            f"{current_source()}: device_put_sharded: {len(shards)} shards for {len(devices)} "
            "devices; there must be one for each"
        )

    def one(*rows: Any) -> Array:
        shards = [_as_row(r, d) for r, d in zip(rows, devices, strict=True)]
        aval = shards[0].aval.update(shape=(len(rows), *shards[0].shape[1:]))
        return from_shards(aval, PmapSharding(devices), shards)

    return tree_map(one, *shards)


def _as_row(x: Any, device: Device) -> Array:
    """A value on a device, behind a dim of size 1; one of a GPU is copied from there."""
    if type(x) is Array and device.platform == "gpu" and not x.ptr:
        row = _put("shards", x, device)
        return from_memory(
            row.ptr, row.owner, row.aval.update(shape=(1, *row.shape)), row._sharding
        )
    return from_numpy(np.asarray(to_numpy(x))[None], device=device)


def device_put_replicated(x: Any, devices: Sequence[Device]) -> Any:
    """Put one copy of `x` on each device, stacked along a new leading dim.

    `x` is an array or a pytree of them, of shape `S`; the result has global shape (n, *S) over the
    n `devices`, and the same dtype.

    >>> spmd.device_put_replicated(7, spmd.devices()[:2])
    Array([7, 7], dtype=int32)
    """
    return device_put_sharded([x] * len(devices), devices)


def _real_sharding(what: str, sharding: Any) -> Any:
    """The sharding that is given, or that of a format; raises an ArgumentError for another."""
    found = without_layout(sharding)
    if not isinstance(found, Sharding):
        raise ArgumentError(
            f"{current_source()}: {what}: sharding must be a Sharding, got {sharding!r} of type "
            f"{type(sharding).__name__}"
        )
    return found


def make_array_from_callback(
    shape: Sequence[int], sharding: Sharding, data_callback: Any, dtype: Any = None
) -> Array:
    """Make a global array whose local shards are `data_callback(index)` for each device's slices.

    `shape` is the global one; `sharding` says which slices each device holds, and the callback is
    called for this process's devices only. `dtype`, if given, must be that of the shards. Raises
    `ShardingError` if the shape cannot be cut so, `ShapeError` if a shard has another shape, and
    `ArgumentError` if its dtype differs or `sharding` is none.

    >>> layout = spmd.NamedSharding(spmd.make_mesh((4,), ("x",)), spmd.P("x"))
    >>> spmd.make_array_from_callback((4,), layout, lambda index: np.arange(4)[index] ** 2)
    Array([0, 1, 4, 9], dtype=int32)
    """
    what = "make_array_from_callback"
    sharding = _real_sharding(what, sharding)
    _check_placing(f"{what}: the array", shape, sharding)
    wanted = None if dtype is None else canonical(dtype)
    places = sharding.addressable_devices_indices_map(tuple(shape))
    shards = [
        from_numpy(np.asarray(data_callback(index)), device=device)
        for device, index in places.items()
    ]
    for shard in shards:
        part = np.empty(tuple(shape), np.void)[places[shard.device]].shape
        if shard.shape != part:
            raise ShapeError(
                f"{current_source()}: {what}: data_callback gave shape {shard.shape} for "
                f"{shard.device}; of a {tuple(shape)} laid out by {sharding} it holds {part}"
            )
        if shard.dtype != (wanted or shards[0].dtype):
            raise ArgumentError(
                f"{current_source()}: {what}: data_callback gave {shard.dtype.name} for "
                f"{shard.device}, and {'dtype=' if wanted else 'the first shard '}"
                f"{(wanted or shards[0].dtype).name}; convert with .astype"
            )
    shards = _filled(shards, tuple(shape), sharding)
    return from_shards(shards[0].aval.update(shape=tuple(shape)), sharding, shards)


def _filled(shards: list[Array], shape: tuple[int, ...], sharding: Sharding) -> list[Array]:
    """The shards of an array of `shape` as it holds them: uneven ones have the first's rows."""
    if not (isinstance(sharding, NamedSharding) and sharding.uneven):
        return shards
    part = sharding.shard_shape(shape)
    return [
        x if x.shape == part else from_numpy(filled_up(np.asarray(x), part), device=x.device)
        for x in shards
    ]


def make_array_from_single_device_arrays(
    shape: Sequence[int], sharding: Sharding, arrays: Sequence[Any], *, dtype: Any = None
) -> Array:
    """Make a global array from the shards that are on this process's devices already.

    `shape` is the global one. `arrays` holds one array for each local device of `sharding`, in any
    order, of the shape that the device holds; `dtype`, if given, must be theirs. No data moves.
    Raises `ShapeError` that names a shard of another shape, and `ArgumentError` if the devices or
    the dtype differ.

    >>> layout = spmd.NamedSharding(spmd.make_mesh((2,), ("x",)), spmd.P("x"))
    >>> shards = [spmd.device_put(np.array([k]), spmd.devices()[k]) for k in range(2)]
    >>> spmd.make_array_from_single_device_arrays((2,), layout, shards)
    Array([0, 1], dtype=int32)
    """
    shape, mine = tuple(shape), process_index()
    sharding = _real_sharding("make_array_from_single_device_arrays", sharding)
    _check_placing("make_array_from_single_device_arrays: the array", shape, sharding)
    for k, x in enumerate(arrays):
        if not isinstance(x, Array):
            raise ArgumentError(
                f"{current_source()}: make_array_from_single_device_arrays: arrays[{k}] is of type "
                f"{type(x).__name__}, and must be an array on a device; device_put(x, device) "
                "makes one"
            )
    # An array over a mesh of one device is the one that it has there.
    arrays = [x.shards[0] if x.shards is not None and len(x.shards) == 1 else x for x in arrays]
    given = {x.device: x for x in arrays}
    places = sharding.devices_indices_map(shape)
    local = [d for d in places if d.process_index == mine]
    if set(given) != set(local) or len(arrays) != len(local):
        raise ArgumentError(
            f"{current_source()}: make_array_from_single_device_arrays: needs one array on each of "
            f"{[str(d) for d in local]}, got arrays on {[str(x.device) for x in arrays]}"
        )
    for device in local:
        wanted = np.empty(shape, np.void)[places[device]].shape
        if given[device].shape != wanted:
            raise ShapeError(
                f"{current_source()}: make_array_from_single_device_arrays: the array on {device} "
                f"has shape {given[device].shape}; of a {shape} laid out by {sharding} it holds "
                f"{wanted}"
            )
    shards = [given[d] for d in local]
    aval = shards[0].aval.update(shape=shape)
    other = next((x for x in shards if x.dtype != aval.dtype), None)
    if other is not None:
        raise ArgumentError(
            f"{current_source()}: make_array_from_single_device_arrays: the array on "
            f"{other.device} is {other.dtype.name}, that on {shards[0].device} {aval.dtype.name}; "
            "convert with .astype"
        )
    shards = _filled(shards, shape, sharding)
    if dtype is not None and aval.dtype != canonical(dtype):
        raise ArgumentError(
            f"{current_source()}: make_array_from_single_device_arrays: dtype={dtype} but the "
            f"arrays are {aval.dtype.name}"
        )
    return from_shards(aval, sharding, shards)


def copy_to_host_async(x: Any) -> Any:
    """Begin to copy the arrays of the pytree `x` to the host, and return it as it is.

    The copies run beside what the devices compute, and a later `np.asarray` finds them done. Arrays
    on CPU devices are in the host's memory already.

    >>> spmd.copy_to_host_async(snp.ones(2))
    Array([1., 1.], dtype=float32)
    """
    for leaf in tree_leaves(x):
        if isinstance(leaf, Array):
            leaf.copy_to_host_async()
    return x


def make_array_from_process_local_data(
    sharding: Any, local_data: Any, global_shape: Any = None
) -> Any:
    """Make a global array of which each process gives the part that its own devices hold.

    `sharding` lays the array out. Each dim of `local_data` has the size of the global dim, or of
    those shards along it that this process's devices hold, in their order; the dtype stays. Without
    `global_shape` the parts of all processes are put side by side. `local_data` may be a pytree,
    the others prefixes of it. Raises `ShapeError` that names the dim and the sizes that fit, and
    `ArgumentError` if `sharding` is none.

    >>> layout = spmd.NamedSharding(spmd.make_mesh((4,), ("x",)), spmd.P("x"))
    >>> y = spmd.make_array_from_process_local_data(layout, np.arange(8))
    >>> y.addressable_shards[1].data
    Array([2, 3], dtype=int32)
    """
    pairs, tree = tree_flatten_with_path(local_data)
    names = [f"local_data{keystr(path)}" for path, _ in pairs]
    leaves = [leaf for _, leaf in pairs]
    check_arrays("make_array_from_process_local_data", names, leaves)
    what = "make_array_from_process_local_data"
    shardings = broadcast_prefix(sharding, local_data, f"{what}: sharding", _is_place)
    shapes = broadcast_prefix(global_shape, local_data, f"{what}: global_shape", _is_shape)
    shardings = [SingleDeviceSharding(s) if isinstance(s, Device) else s for s in shardings]
    for place in shardings:
        if not isinstance(place, Sharding):
            raise ArgumentError(f"{current_source()}: {what}: {place!r} is not a sharding")
    made = [
        _of_parts(f"{current_source()}: {what}: {name}", to_numpy(x), typeof(x), place, shape)
        for name, x, place, shape in zip(names, leaves, shardings, shapes, strict=True)
    ]
    return tree_unflatten(tree, made)


def _is_shape(x: Any) -> bool:
    return x is None or (isinstance(x, (tuple, list)) and all(isinstance(n, int) for n in x))


def _of_parts(
    what: str, part: np.ndarray, aval: ShapedArray, sharding: Sharding, given: Any
) -> Array:
    """The global array of which `part` is this process's."""
    shape = _whole_shape(what, part, sharding, given)
    places = sharding.addressable_devices_indices_map(shape)
    if isinstance(sharding, NamedSharding) and sharding.uneven:
        raise ShardingError(
            f"{what}: {sharding} has uneven parts, of which a process's data does not say where "
            "they start; use make_array_from_callback"
        )
    sizes = sharding.shard_shape(shape)
    # Along each dim: where this process's shards start in the whole.
    starts = [sorted({index[d].start or 0 for index in places.values()}) for d in range(part.ndim)]
    for d, (size, whole) in enumerate(zip(part.shape, shape, strict=True)):
        held = len(starts[d]) * sizes[d]
        if size not in (whole, held):
            raise ShapeError(
                f"{what} has shape {part.shape}; of global_shape={shape} this process's devices "
                f"hold {held} along dim {d}, so the part must have {held} there, or all {whole}"
            )

    def inside(d: int, index: slice) -> slice:
        """A slice of the whole, counted from the start of the part."""
        if part.shape[d] == shape[d]:
            return index
        start = starts[d].index(index.start or 0) * sizes[d]
        return slice(start, start + sizes[d])

    shards = [
        from_numpy(
            part[tuple(map(inside, range(part.ndim), index))], aval.update(shape=sizes), device
        )
        for device, index in places.items()
    ]
    return from_shards(aval.update(shape=shape), sharding, shards)


def _whole_shape(what: str, part: np.ndarray, sharding: Sharding, given: Any) -> tuple[int, ...]:
    """The global shape that is given, or that follows from one part."""
    if given is None:
        counts = [_groups(sharding, d, part.ndim) for d in range(part.ndim)]
        if None in counts:
            raise ShapeError(
                f"{what} has shape {part.shape}; along dim {counts.index(None)} the processes hold "
                f"shards of {sharding} that overlap or differ in number, so the global shape does "
                "not follow: pass global_shape="
            )
        given = [size * (count or 1) for size, count in zip(part.shape, counts, strict=True)]
    shape = tuple(given)
    if len(shape) != part.ndim:
        raise ShapeError(
            f"{what} has shape {part.shape} ({part.ndim} dims), global_shape={shape} has "
            f"{len(shape)}; both must have as many"
        )
    if isinstance(sharding, NamedSharding):
        sharding.check_placing(shape, f"{what} is part of an array that")
    return shape


def _groups(sharding: Sharding, dim: int, ndim: int) -> int | None:
    """The number of parts that the processes have along a dim: 1 where all hold the same shards.

    None if shards of two processes overlap without being the same, or differ in number.
    """
    devices = len(sharding.device_set)
    held: dict[int, set[int]] = {}
    for device, index in sharding.devices_indices_map((devices,) * ndim).items():
        held.setdefault(device.process_index, set()).add(index[dim].start or 0)
    parts = set(map(frozenset, held.values()))
    is_even = len(set(map(len, parts))) == 1
    is_apart = sum(map(len, parts)) == len(set().union(*parts))
    return len(parts) if is_even and is_apart else None
