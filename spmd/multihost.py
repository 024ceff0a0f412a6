"""Values between processes: gathering, broadcasting, comparing, and parts of global arrays.

The functions of JAX's `multihost_utils`, over the transport that joins the processes of a job. The
first message of a call compares the pytrees' names, shapes and dtypes, so that processes that
disagree get an error instead of each other's bytes. **Every process of the job must make the
call**, or the others wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from spmd.base.device import Device, process_index
from spmd.base.dtypes import long_name
from spmd.base.errors import ArgumentError, CollectiveError, ReplicaError, ShardingError
from spmd.base.source import current_source
from spmd.base.tree import (
    broadcast_prefix,
    keystr,
    tree_flatten_with_path,
    tree_unflatten,
)
from spmd.core.argument_names import check_arrays
from spmd.core.aval import typeof
from spmd.core.trace import to_numpy
from spmd.sharding.array import Array, filled_up, from_shards, shard_value
from spmd.sharding.named import NamedSharding
from spmd.sharding.spec import Mesh, PartitionSpec
from spmd.transport import world as bootstrap
from spmd.transport.origin import Origin

__all__ = [
    "assert_equal",
    "broadcast_one_to_all",
    "global_array_to_host_local_array",
    "host_local_array_to_global_array",
    "live_devices",
    "process_allgather",
    "sync_global_devices",
]

# ---- values of every process -------------------------------------------------------------------


def process_allgather(in_tree: Any, tiled: bool = False) -> Any:
    """Gather the arrays of every process, as NumPy arrays on each of them.

    `in_tree` is a pytree of arrays of equal shapes `S` and dtypes on all n processes. A leaf
    becomes an array of shape (n, *S), in the order of the processes; with `tiled` they are joined
    along the first dim instead, to (n * S[0], ...). Scalars become shape (n,) either way. A global
    array with shards on other processes is gathered whole, in its own shape, and needs
    `tiled=True`.

    Raises `CollectiveError` if the processes give other pytrees, shapes or dtypes, and
    `ArgumentError` if a leaf is no array, or global without `tiled`.

    >>> process_allgather({"loss": np.array([1.5, 2.5])})
    {'loss': array([[1.5, 2.5]])}
    >>> process_allgather(np.array([1.5, 2.5]), tiled=True)
    array([1.5, 2.5])
    """
    names, leaves, tree = _leaves("process_allgather", in_tree)
    for name, x in zip(names, leaves, strict=True):
        if _is_spread(x) and not tiled:
            raise ArgumentError(
                f"{current_source()}: process_allgather: {name} ({x.aval.short()}) is one global "
                "array with shards on other processes: there is nothing to stack. Pass tiled=True"
            )
    _agree("process_allgather", names, leaves)
    return tree_unflatten(tree, [_gathered(x, tiled) for x in leaves])


def _gathered(x: Any, tiled: bool) -> np.ndarray:
    if _is_spread(x):
        return _whole(x)
    rows = _rows(np.asarray(x))
    return rows.reshape(-1, *rows.shape[2:]) if tiled and rows.ndim > 1 else rows


def broadcast_one_to_all(in_tree: Any, is_source: bool | None = None) -> Any:
    """Give every process the arrays of one, as NumPy arrays.

    `in_tree` is a pytree of arrays; the others' values do not count, but shapes and dtypes must be
    those of the source. `is_source` says whether this process is the one, by default process 0.

    Raises `CollectiveError` if the processes give other pytrees, shapes or dtypes or if not exactly
    one is the source, and `ArgumentError` if a leaf is no array.

    >>> broadcast_one_to_all({"seed": np.array([7, 8])})
    {'seed': array([7, 8])}
    """
    what = "broadcast_one_to_all"
    names, leaves, tree = _leaves(what, in_tree)
    world = bootstrap.world()
    mine = world.rank == 0 if is_source is None else bool(is_source)
    told = world.all_gather_object(mine, _origin(what))
    sources = [rank for rank, is_one in enumerate(told) if is_one]
    if len(sources) != 1:
        raise CollectiveError(
            f"{what}: is_source must be True on one process; it is on {len(sources)} "
            f"({sources}) of {world.size}"
        )
    _agree(what, names, leaves)
    outs = []
    for x in leaves:
        out = np.array(_own(x), order="C")
        if out.nbytes:
            world.broadcast(_bytes(out), sources[0])
        outs.append(out)
    return tree_unflatten(tree, outs)


def assert_equal(in_tree: Any, fail_message: str = "") -> None:
    """Check that every process has the same arrays.

    `in_tree` is a pytree of arrays; of an array that is replicated over processes each compares its
    own copy. NaN equals nothing, as in NumPy. Raises `ReplicaError`, an `AssertionError`, on every
    process if elements differ: it starts with `fail_message` and names the leaf and the processes.
    Raises `CollectiveError` if pytrees, shapes or dtypes differ, and `ShardingError` if processes
    hold different shards of one array.

    >>> assert_equal({"step": 3}, "the processes are at different steps")
    """
    names, leaves, _ = _leaves("assert_equal", in_tree)
    values = [_own(x) for x in leaves]
    _agree("assert_equal", names, values)
    for name, value in zip(names, values, strict=True):
        rows = _rows(value)
        other = [rank for rank, row in enumerate(rows) if not np.all(rows[0] == row)]
        if other:
            raise ReplicaError(
                f"{fail_message or 'assert_equal'}: {name} is not equal on all processes: process "
                f"{other[0]} has {_text(rows[other[0]])}, process 0 has {_text(rows[0])}"
                + (f"; processes {other} differ from process 0" if len(other) > 1 else "")
            )


def sync_global_devices(name: str) -> None:
    """Wait until every process has made this call.

    `name` says which meeting it is, and must be the same everywhere: raises `ReplicaError`, an
    `AssertionError`, on every process if it is not.

    >>> sync_global_devices("checkpoint written")
    """
    told = bootstrap.world().all_gather_object(name, _origin("sync_global_devices"))
    for rank, other in enumerate(told):
        if other != told[0]:
            raise ReplicaError(
                f"sync_global_devices: process 0 is at {told[0]!r} and process {rank} at "
                f"{other!r}; all must pass the same name, in the same order"
            )


@contextlib.contextmanager
def live_devices(devices: Sequence[Device]) -> Iterator[list[Device]]:
    """Run a block on the devices of processes that are alive, in the order of their ids.

    These are all of `devices`: spmd ends a job of which a process has died. Entering and leaving
    the block are meetings of all processes, so that all leave it alike: where it raises on one
    process, the others raise `CollectiveError`. Raises `ArgumentError` without devices.

    >>> with live_devices(spmd.devices()[:2]) as alive:
    ...     print([d.id for d in alive])
    [0, 1]
    """
    found = sorted(devices, key=lambda d: d.id)
    if not found:
        raise ArgumentError(
            f"{current_source()}: live_devices: no devices are given; pass spmd.devices()"
        )
    sync_global_devices(f"live_devices({[d.id for d in found]})")
    failure = None
    try:
        yield found
    except Exception as error:
        failure = error
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    told = bootstrap.world().all_gather_object(text, _origin("live_devices"))
    if failure is not None:
        raise failure
    for rank, other in enumerate(told):
        if other is not None:
            raise CollectiveError(f"live_devices: the block has failed on process {rank}: {other}")


# ---- parts of global arrays --------------------------------------------------------------------


def host_local_array_to_global_array(local_inputs: Any, global_mesh: Mesh, pspecs: Any) -> Any:
    """Make global arrays, of which each process gives the part for its own devices.

    `local_inputs` is a pytree of arrays and `pspecs` a pytree prefix of `PartitionSpec`s over
    `global_mesh`, in which the devices of a process must be a box. Along a dim that is split over
    axes with devices of several processes, the parts are put side by side, and the global size is
    the sum of theirs; other dims and the dtype stay, and values there must be equal on all
    processes. Arrays that have shards on other processes already are returned as they are.

    Raises `ShardingError` if a part cannot be split evenly or the devices are no box, and
    `ArgumentError` if `pspecs` holds something else.

    >>> mesh = spmd.make_mesh((4,), ("x",))
    >>> host_local_array_to_global_array(np.arange(8), mesh, spmd.P("x")).addressable_shards[1].data
    Array([2, 3], dtype=int32)
    """
    what = "host_local_array_to_global_array"
    return _each(what, "local_inputs", local_inputs, global_mesh, pspecs, _global_of)


def _global_of(what: str, x: Any, local: NamedSharding, whole: NamedSharding) -> Array:
    if _is_spread(x):
        return x
    aval = typeof(x)
    local.check_placing(aval.shape, f"{what}, this process's part,")
    shards = x.shards if isinstance(x, Array) else None
    if shards is None or not x.sharding.is_equivalent_to(local, aval.ndim):
        shards = shard_value(to_numpy(x), aval, local, process_index()).shards or ()
    return from_shards(aval.update(shape=_scaled(aval.shape, local, whole)), whole, shards)


def global_array_to_host_local_array(global_inputs: Any, global_mesh: Mesh, pspecs: Any) -> Any:
    """Make arrays of this process's parts of global ones, without a copy.

    `global_inputs` is a pytree of arrays that lie over `global_mesh` as `pspecs`, a pytree prefix
    of `PartitionSpec`s, say. Each becomes an array over the process's own devices: a dim that is
    split over other processes has the size of this one's shards, and the dtype stays. Arrays that
    are on this process's devices only are returned as they are.

    Raises `ShardingError` if an array is laid out otherwise or the devices are no box in the mesh,
    and `ArgumentError` if `pspecs` holds something else.

    >>> mesh = spmd.make_mesh((4,), ("x",))
    >>> x = host_local_array_to_global_array(np.arange(8), mesh, spmd.P("x"))
    >>> global_array_to_host_local_array(x, mesh, spmd.P("x")).shape
    (8,)
    """
    what = "global_array_to_host_local_array"
    return _each(what, "global_inputs", global_inputs, global_mesh, pspecs, _local_of)


def _local_of(what: str, x: Any, local: NamedSharding, whole: NamedSharding) -> Any:
    if not _is_spread(x):
        return x
    whole.check(x.shape, what)
    if not x.sharding.is_equivalent_to(whole, x.ndim):
        raise ShardingError(
            f"{what} ({x.aval.short()}) is laid out by {x.sharding}, not by {whole}; pass the mesh "
            "and the spec that it has"
        )
    return from_shards(x.aval.update(shape=_scaled(x.shape, whole, local)), local, x.shards)


def _each(
    what: str,
    name: str,
    inputs: Any,
    mesh: Mesh,
    pspecs: Any,
    convert: Callable[[str, Any, NamedSharding, NamedSharding], Any],
) -> Any:
    """Convert each array between its part on this process's devices and the whole over a mesh."""
    names, leaves, tree = _leaves(what, inputs, name)
    made = [
        convert(
            f"{current_source()}: {what}: {name}",
            x,
            NamedSharding(mesh.local_mesh, spec),
            NamedSharding(mesh, spec),
        )
        for name, x, spec in zip(names, leaves, _specs(what, pspecs, inputs), strict=True)
    ]
    return tree_unflatten(tree, made)


def _scaled(shape: Sequence[int], have: NamedSharding, want: NamedSharding) -> tuple[int, ...]:
    """The shape of an array over other axes' sizes, whose shards are those of another array."""
    axes = map(have.spec.axes_of, range(len(shape)))
    return tuple(
        size // have.mesh.axis_size(own) * want.mesh.axis_size(own)
        for size, own in zip(shape, axes, strict=True)
    )


# ---- helpers -----------------------------------------------------------------------------------


def _leaves(what: str, tree: Any, name: str = "in_tree") -> tuple[list[str], list[Any], Any]:
    """The names of a pytree's leaves, the leaves, which must be arrays, and its structure."""
    pairs, structure = tree_flatten_with_path(tree)
    names = [f"{name}{keystr(path)}" for path, _ in pairs]
    leaves = [leaf for _, leaf in pairs]
    check_arrays(what, names, leaves)
    return names, leaves, structure


def _specs(what: str, pspecs: Any, inputs: Any) -> list[PartitionSpec]:
    """The spec of each leaf."""
    found = broadcast_prefix(pspecs, inputs, f"{what}: pspecs", lambda s: s is None or _is_spec(s))
    for spec in found:
        if not _is_spec(spec):
            raise ArgumentError(
                f"{current_source()}: {what}: pspecs must hold PartitionSpecs, got {spec!r}; P() "
                "is for what is the same on all devices"
            )
    return found


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _is_spread(x: Any) -> bool:
    """Whether a value has shards on other processes."""
    return isinstance(x, Array) and not x.is_fully_addressable


def _own(x: Any) -> np.ndarray:
    """This process's value; raises a ShardingError if it holds only a part."""
    return np.asarray(x)


def _agree(what: str, names: Sequence[str], leaves: Sequence[Any]) -> None:
    """Raise a CollectiveError, on all ranks alike, unless the ranks gave leaves of one kind."""
    kinds = []
    for name, x in zip(names, leaves, strict=True):
        own = x if isinstance(x, Array) else np.asarray(x)
        kinds.append((name, f"{long_name(own.dtype)}{list(own.shape)}"))
    told = bootstrap.world().all_gather_object(kinds, _origin(what))
    for rank, other in enumerate(told):
        if [name for name, _ in other] != [name for name, _ in told[0]]:
            raise CollectiveError(
                f"{what}: process 0 gave the leaves {[name for name, _ in told[0]]} and process "
                f"{rank} gave {[name for name, _ in other]}; all must give the same pytree"
            )
        for (name, first), (_, second) in zip(told[0], other, strict=True):
            if first != second:
                raise CollectiveError(
                    f"{what}: {name} is {first} on process 0 and {second} on process {rank}; all "
                    "must give the same shapes and dtypes"
                )


def _origin(what: str) -> Origin:
    """The text that ranks compare, and the source line, which may differ between ranks."""
    return Origin(what, source=str(current_source()))


def _bytes(x: np.ndarray) -> np.ndarray:
    """A contiguous array as bytes, which a transport moves whatever the dtype is."""
    return x.reshape(-1).view(np.uint8)


def _rows(x: np.ndarray) -> np.ndarray:
    """The arrays of all ranks, which have one shape and dtype, stacked."""
    world = bootstrap.world()
    out = np.empty((world.size, *x.shape), x.dtype)
    if out.nbytes:
        own = np.ascontiguousarray(x)
        world.all_gather(_bytes(own), _bytes(out), _origin("all_gather"))
    return out


def _whole(x: Array) -> np.ndarray:
    """A global array of which every rank sends the shards that it is the first to hold."""
    if x.is_fully_replicated:
        return np.array(x)
    held: dict[Any, Any] = {}  # by slices: the first device that has them
    for shard in x.global_shards:
        held.setdefault(tuple((s.start, s.stop) for s in shard.index), shard)
    world = bootstrap.world()
    sent = [[s for s in held.values() if s.device.process_index == k] for k in range(world.size)]
    shape = x.sharding.shard_shape(x.shape)
    mine = np.zeros((max(map(len, sent)), *shape), x.dtype)
    for place, shard in zip(mine, sent[world.rank], strict=False):
        part = np.asarray(shard.data)
        place[...] = filled_up(part, shape).reshape(shape)
    out = np.empty(x.shape, x.dtype)
    for rows, shards in zip(_rows(mine), sent, strict=True):
        for row, shard in zip(rows, shards, strict=False):
            place = out[shard.index]  # of an uneven part, the rows that mean something
            place[...] = row.reshape(shape)[tuple(map(slice, place.shape))]
    return out


def _text(x: np.ndarray) -> str:
    return np.array2string(x, threshold=8, edgeitems=3, separator=", ")
