"""Programs with a `pmap` over several processes in them: each process has arguments of its own.

All processes run the program of all of them (`spmd/sharding/process_rows.py`), on arrays whose
first dim is split by process. A process's arguments are its part of them, and so are its results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd.base.errors import ShardingError
from spmd.compile.executable.mesh_program import MeshProgram
from spmd.compile.lazy import partition
from spmd.core.aval import ShapedArray, typeof
from spmd.core.ir import ClosedJaxpr
from spmd.core.trace import to_numpy
from spmd.sharding.array import Array, from_memory, from_numpy, from_shards
from spmd.sharding.named import NamedSharding, Sharding, SingleDeviceSharding
from spmd.sharding.operand_layouts import Layouts
from spmd.sharding.process_rows import OverProcesses, over_processes
from spmd.sharding.spec import PartitionSpec


def partitioned(found: OverProcesses, plans: list[Any] | None = None) -> ClosedJaxpr:
    """The program of all processes as one `shard_map` equation over their devices."""
    free = [None] * len(found.closed.out_avals)
    made = partition.partition(found.closed, found.mesh, found.specs, free, plans)
    if made is None:
        raise ShardingError(
            f"{found.closed.jaxpr.name}: a pmap over the devices of several processes is beside a "
            "map over other devices or another mesh, or beside an effect that is no callback; take "
            "that out of the jitted function"
        )
    return made


class ProcessProgram(MeshProgram):
    """Runs a program together with all other processes, on arguments of this one.

    An array over several processes is the same for all, and so is what is made of such alone.
    """

    def __init__(
        self, closed: ClosedJaxpr, donated: Sequence[bool] = (), layouts: Layouts | None = None
    ):
        self.found = found = over_processes(closed, layouts)
        made = partitioned(found)
        super().__init__(made, made.eqns[0], donated, found.closed)
        self.in_avals, self.out_avals = tuple(closed.in_avals), tuple(closed.out_avals)

    @property
    def is_plain(self) -> bool:
        """Whether arguments and results are the equation's: they never are."""
        return False

    @property
    def input_shardings(self) -> list[Any]:
        """The sharding of each argument on this process; None for one that is not read."""
        pairs = zip(super().input_shardings, self.found.local, strict=True)
        return [self._own(s) if s is not None and local else s for s, local in pairs]

    @property
    def output_shardings(self) -> list[Any]:
        """The sharding of each result on this process."""
        pairs = zip(super().output_shardings, self.found.results, strict=True)
        return [self._own(s) if local else s for s, local in pairs]

    def _own(self, sharding: NamedSharding) -> NamedSharding:
        return NamedSharding(self.found.own, PartitionSpec(*sharding.spec[1:]))

    def __call__(self, leaves: Sequence[Any]) -> list[Array]:
        """Run on arguments of exactly the avals compiled for."""
        found = self.found
        rows = zip(leaves, found.local, found.specs, strict=True)
        outs = super().__call__([self._whole(x, s) if local else x for x, local, s in rows])
        self.give_up(leaves)
        rows = zip(outs, found.results, self.out_avals, strict=True)
        return [self._part(x, a) if local else x for x, local, a in rows]

    def _whole(self, x: Any, spec: PartitionSpec | None) -> Array:
        """The array of all processes' values, of which this one has `x`."""
        found, aval = self.found, typeof(x).strip_sharding()
        assert spec is not None
        sharding = NamedSharding(found.mesh, spec)
        own = self._own(sharding)
        if type(x) is Array and x.shards is not None and x.sharding.layout == own.layout:
            shards = [_reshaped(s, (1, *s.shape)) for s in x.shards]
        else:
            value = to_numpy(x)
            indices = own.devices_indices_map(value.shape)
            known: dict[str, Array] = {}  # a part that devices share is there once
            shards = []
            for d in own.mesh.flat_devices():
                part, name = value[indices[d]], str(indices[d])
                if name not in known:
                    known[name] = from_numpy(part.reshape(1, *part.shape))
                shards.append(_reshaped(known[name], (1, *part.shape), SingleDeviceSharding(d)))
        shape = (found.mesh.axis_sizes[0], *aval.shape)
        return from_shards(aval.update(shape=shape), sharding, shards)

    def _part(self, x: Array, aval: ShapedArray) -> Array:
        """This process's value."""
        sharding = x.sharding
        assert isinstance(sharding, NamedSharding)
        shards = [_reshaped(s, s.shape[1:]) for s in x.shards or (x,)]
        return from_shards(aval.strip_sharding(), self._own(sharding), shards)


def _reshaped(x: Array, shape: tuple[int, ...], sharding: Sharding | None = None) -> Array:
    """An array of another shape over the same memory."""
    x.block_until_ready()
    place = x._sharding if sharding is None else sharding
    return from_memory(x.ptr, x.owner, x.aval.update(shape=shape), place)
