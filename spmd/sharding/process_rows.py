"""`pmap` over several processes inside traced code: one process's rows and the rows of all.

Code around such a `pmap` runs in each process on values of its own. To compile it, that code is
vectorised over the processes; then every value is one of the whole job, and a program over the mesh
of all devices partitions it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.base.device import process_index
from spmd.base.errors import ShardingError
from spmd.base.record import record
from spmd.base.source import current_source
from spmd.collectives.axis import axis_index_p
from spmd.core.aval import ShapedArray, typeof
from spmd.core.ir import ClosedJaxpr, all_eqns
from spmd.core.primitive import Primitive, Refused, linear
from spmd.core.rewrite import close, eval_closed
from spmd.core.structural import broadcast_leading, reshape, to_front
from spmd.core.trace import Tracer, to_numpy
from spmd.core.vmap import BatchAxis, batch_jaxpr
from spmd.lax.dynamic import dynamic_slice_in_dim
from spmd.sharding.array import Array, from_numpy, from_shards
from spmd.sharding.call_cache import is_evaluated
from spmd.sharding.constraint import sharding_constraint_p
from spmd.sharding.named import NamedSharding
from spmd.sharding.operand_layouts import Layouts, spec_over
from spmd.sharding.shard_map_rules import untyped_map
from spmd.sharding.spec import Mesh, PartitionSpec


class _Processes:
    """The name of the axis of processes, which is no name of a user's."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<processes>"

    def __lt__(self, other: Any) -> bool:
        return True


PROCESSES = _Processes()

# ---- the primitives ----------------------------------------------------------------------------


def rows_of_all(x: Any, mesh: Mesh, rows: int, dim: int | None) -> Any:
    """The array of all processes' rows, of which `x` has this process's, along a dim.

    Without a dim, `x` is a value that is the same on all processes.
    """
    if is_evaluated() and not isinstance(x, Tracer):
        return _rows_of_all(x, mesh, dim)
    return rows_of_all_p.bind(x, mesh=mesh, rows=rows, dim=dim)


def own_rows(x: Any, mesh: Mesh, rows: int, dim: int | None) -> Any:
    """This process's rows, along a dim, of an array over the devices of several processes."""
    if is_evaluated() and not isinstance(x, Tracer):
        return _own_rows(x, mesh, dim)
    return own_rows_p.bind(x, mesh=mesh, rows=rows, dim=dim)


def _spec(mesh: Mesh, dim: int | None) -> PartitionSpec:
    return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, *mesh.axis_names)


def _rows_of_all(x: Any, mesh: Mesh, dim: int | None) -> Array:
    """This process's rows as its shards of the global array."""
    aval, local, spec = typeof(x), mesh.local_mesh, _spec(mesh, dim)
    whole = aval if dim is None else _resized(aval, dim, mesh.size)
    sharding = NamedSharding(mesh, spec)
    if isinstance(x, Array) and x.shards is not None:
        if x.sharding.layout == NamedSharding(local, spec).layout:
            return from_shards(whole, sharding, x.shards)
    value = to_numpy(x)
    shards = []
    for k, device in enumerate(local.flat_devices()):
        shard = value if dim is None else np.take(value, [k], dim)
        shards.append(from_numpy(shard, aval.update(shape=shard.shape), device))
    return from_shards(whole, sharding, shards)


def _own_rows(x: Array, mesh: Mesh, dim: int | None) -> Array:
    """This process's shards of a global result as an array of local rows."""
    spec, local = _spec(mesh, dim), mesh.local_mesh
    wanted = NamedSharding(mesh, spec)
    if x.shards is None or x.sharding.layout != wanted.layout:
        value = np.asarray(x)
        whole = NamedSharding(local, spec)
        shards = [
            from_numpy(value[wanted.devices_indices_map(value.shape)[d]], device=d)
            for d in local.flat_devices()
        ]
        shape = value.shape if dim is None else _resized(x.aval, dim, local.size).shape
        return from_shards(x.aval.update(shape=shape), whole, shards)
    shape = x.shards[0].shape
    if dim is not None:
        shape = _resized(x.shards[0].aval, dim, local.size).shape
    return from_shards(x.aval.update(shape=shape), NamedSharding(local, spec), x.shards)


def _resized(aval: ShapedArray, dim: int, size: int) -> ShapedArray:
    return aval.update(shape=(*aval.shape[:dim], size, *aval.shape[dim + 1 :]))


def _abstract(x: ShapedArray, *, mesh: Mesh, rows: int, dim: int | None) -> ShapedArray:
    return x if dim is None else _resized(x, dim, mesh.size)


def _own_abstract(x: ShapedArray, *, mesh: Mesh, rows: int, dim: int | None) -> ShapedArray:
    return x if dim is None else _resized(x, dim, rows)


def _batch(axis: BatchAxis, operands: Any, at: Any, prim: Primitive, params: Any) -> Any:
    """Batch one of the two primitives; over the axis of processes, values become those of all."""
    (x,), (d,) = operands, at
    if axis.name is PROCESSES:
        convert = _joined if prim is rows_of_all_p else _parted
        return convert(x, d, axis, **params)
    own = params["dim"]
    if d is not None and own is not None and d <= own:
        params = params | {"dim": own + 1}
    return prim.bind(x, **params), d


rows_of_all_p = Primitive(
    "rows_of_all",
    abstract=_abstract,
    impl=Refused("rows of other processes are not to be had on one"),
    eager=lambda x, *, mesh, rows, dim: _rows_of_all(x, mesh, dim),
    jvp=linear,
    transpose=lambda ct, x, **params: [own_rows_p.bind(ct, **params)],
    batch=lambda axis, xs, at, **params: _batch(axis, xs, at, rows_of_all_p, params),
    dims=Refused("it is a map before its program is partitioned"),
    axes=lambda params: (PROCESSES,),
)


own_rows_p = Primitive(
    "own_rows",
    abstract=_own_abstract,
    impl=Refused("rows of other processes are not to be had on one"),
    eager=lambda x, *, mesh, rows, dim: _own_rows(x, mesh, dim),
    jvp=linear,
    transpose=lambda ct, x, **params: [rows_of_all_p.bind(ct, **params)],
    batch=lambda axis, xs, at, **params: _batch(axis, xs, at, own_rows_p, params),
    dims=Refused("it is a map before its program is partitioned"),
    axes=lambda params: (PROCESSES,),
)

# ---- programs over all processes ---------------------------------------------------------------


def mesh_of_processes(mesh: Mesh, rows: int) -> Mesh:
    """The devices of a `pmap` by process, and by row in it."""
    grid = mesh.devices.reshape(-1, rows)
    owners = [{d.process_index for d in row} for row in grid]
    if any(len(own) > 1 for own in owners) or len({min(own) for own in owners}) < len(owners):
        raise ShardingError(
            f"{current_source()}: a pmap inside of jit goes over devices of several processes that "
            f"are not together: {[d.process_index for d in mesh.flat_devices()]} are their "
            "processes. Give devices= with those of each process side by side, or call the pmap "
            "outside of jit"
        )
    (own,) = mesh.axis_names
    return Mesh(grid, ("process" if own != "process" else "processes", own))


def _joined(
    x: Any, d: int | None, batch: BatchAxis, *, mesh: Mesh, rows: int, dim: int | None
) -> tuple[Any, None]:
    """The array of all rows, of values by process; a map without communication."""
    grid = mesh_of_processes(mesh, rows)
    process, own = grid.axis_names
    x = to_front(x, d, batch.size)
    if dim is None:
        given, made = PartitionSpec(process), PartitionSpec()
    else:
        given = PartitionSpec(process, *[None] * dim, own)
        made = PartitionSpec(*[None] * dim, (process, own))
    return untyped_map(_without_first, x, grid, given, made, "rows"), None


def _parted(
    x: Any, d: int | None, batch: BatchAxis, *, mesh: Mesh, rows: int, dim: int | None
) -> tuple[Any, int | None]:
    """The values by process, of the array of all rows."""
    if dim is None:
        return x, d
    grid = mesh_of_processes(mesh, rows)
    process, own = grid.axis_names
    made = PartitionSpec(process, *[None] * dim, own)
    if d is None:
        given = PartitionSpec(*[None] * dim, (process, own))
        return untyped_map(_with_first, x, grid, given, made, "rows"), 0
    given = PartitionSpec(None, *[None] * dim, (process, own))

    def mine(part: Any) -> Any:
        index = axis_index_p.bind(axis_name=process)
        return dynamic_slice_in_dim(part, index, 1, 0)

    return untyped_map(mine, to_front(x, d, batch.size), grid, given, made, "rows"), 0


def _without_first(part: Any) -> Any:
    return reshape(part, typeof(part).shape[1:])


def _with_first(part: Any) -> Any:
    return broadcast_leading(part, 1)


# A program of one process with one of these has a `pmap` over the devices of several in it.
CONVERSIONS = frozenset((rows_of_all_p.name, own_rows_p.name))


@record
class OverProcesses:
    """The program of all processes: whose arguments and results have the dim of processes first.

    `local` says which arguments have it, as each process has its own, and `results` which results.
    """

    closed: ClosedJaxpr
    mesh: Mesh
    specs: tuple[PartitionSpec | None, ...]
    local: tuple[bool, ...]
    results: tuple[bool, ...]

    @property
    def own(self) -> Mesh:
        """The mesh of this process's devices."""
        return own_mesh(self.mesh)


def own_mesh(mesh: Mesh) -> Mesh:
    """The devices of this process, of a mesh by process."""
    (here,) = [row for row in mesh.devices if row[0].process_index == process_index()]
    return Mesh(here, mesh.axis_names[1:])


def over_processes(closed: ClosedJaxpr, layouts: Layouts | None) -> OverProcesses:
    """A program of one process, vectorised over all that take part in its pmaps.

    Arguments that lie over several processes already are the same for all.
    """
    eqn = next(e for e in all_eqns(closed) if e.prim.name in CONVERSIONS)
    mesh = mesh_of_processes(eqn.params["mesh"], eqn.params["rows"])
    process, here = mesh.axis_names[0], own_mesh(mesh)
    given = layouts or [None] * len(closed.in_avals)
    local = tuple([s is None or s.is_fully_addressable for s in given])
    axis = BatchAxis(PROCESSES, mesh.axis_sizes[0])
    batched, results = batch_jaxpr(closed, axis, local, force_out=all(local))

    def constrained(*args: Any) -> list[Any]:
        outs = eval_closed(batched, *args)
        return [_by_process(x, mesh) if b else x for x, b in zip(outs, results, strict=True)]

    jaxpr = closed.jaxpr
    made = close(constrained, batched.in_avals, jaxpr.name, jaxpr.arg_names)
    specs = []
    for sharding, is_local in zip(given, local, strict=True):
        if not is_local:
            specs.append(spec_over(mesh, sharding) if sharding is not None else None)
            continue
        inner = None if sharding is None else spec_over(here, sharding)
        specs.append(PartitionSpec(process, *(inner or ())))
    return OverProcesses(made, mesh, tuple(specs), local, tuple(results))


def _by_process(x: Any, mesh: Mesh) -> Any:
    """A value whose first dim is split by process, and nothing else is."""
    free = [PartitionSpec.UNCONSTRAINED] * (typeof(x).ndim - 1)
    spec = PartitionSpec(mesh.axis_names[0], *free)
    return sharding_constraint_p.bind(x, mesh=mesh, spec=spec)
