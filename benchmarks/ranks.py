"""One process of a collective benchmark: spmd, JAX, PyTorch or bare MPI; waits for commands.

python -m benchmarks.ranks SIDE FOLDER RANKS RANK ADDRESS

Each process blocks in a read of its own pipe while other sides are timed, so that it takes no core;
rank 0 answers through a pipe of the side. A rank that mpirun started asks it for its number. All
sides reduce, gather or exchange the same float32 numbers, and compare what they get with NumPy
before anything is timed.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from benchmarks.sharding import over_ranks
from benchmarks.sides import Side, load_side

KINDS = ("psum", "all_gather", "psum_scatter", "all_to_all", "ppermute")
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")

# Of a collective and everyone's input, a function that does it.
Prepare = Callable[[str, numpy.ndarray], Callable[[], Any]]


@dataclass(frozen=True)
class Party:
    """One process: how it makes calls, what their results are as rows, and its place."""

    prepare: Prepare
    rows: Callable[[Any], numpy.ndarray]
    members: int
    place: int
    side: Side | None = None  # where it runs the cases of other subjects


# ---- what is computed ----------------------------------------------------------------------------


def given(kind: str, nbytes: int, members: int) -> numpy.ndarray:
    """The inputs of all members, a row each; small whole numbers, so that sums are exact."""
    count = max(nbytes // 4, 1)
    if kind in ("psum_scatter", "all_to_all"):
        count = -(-count // members) * members  # a block for each
    return (numpy.arange(count) % 7 + numpy.arange(members)[:, None]).astype(numpy.float32)


def expected(kind: str, x: numpy.ndarray) -> numpy.ndarray:
    """The results of all members, a row each."""
    members = len(x)
    if kind == "psum":
        return numpy.tile(x.sum(0), (members, 1))
    if kind == "all_gather":
        return numpy.tile(x.reshape(-1), (members, 1))
    if kind == "psum_scatter":
        return x.sum(0).reshape(members, -1)
    if kind == "all_to_all":
        return x.reshape(members, members, -1).swapaxes(0, 1).reshape(members, -1)
    return numpy.roll(x, 1, 0)


def ring(members: int) -> list[tuple[int, int]]:
    """The pairs of the ppermute: everyone sends to the next."""
    return [(k, (k + 1) % members) for k in range(members)]


# ---- the sides -----------------------------------------------------------------------------------


def mapped(side: Side, kind: str, members: int) -> Callable[..., Any]:
    """The collective as a program over the devices, of spmd or JAX."""
    lax = side.lax
    bodies = {
        "psum": lambda x: lax.psum(x, "i"),
        "all_gather": lambda x: lax.all_gather(x, "i"),
        "psum_scatter": lambda x: lax.psum_scatter(x, "i", tiled=True),
        "all_to_all": lambda x: lax.all_to_all(x, "i", 0, 0, tiled=True),
        "ppermute": lambda x: lax.ppermute(x, "i", ring(members)),
    }
    return side.top.pmap(bodies[kind], axis_name="i")


def _framework(name: str, ranks: int, rank: int, address: str) -> Party:
    if name == "jax" and ranks > 1:
        jax = importlib.import_module("jax")
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, ranks, rank)
    side = load_side(name)
    members, here = side.top.device_count(), side.top.local_device_count()
    place = side.top.process_index() * here

    def prepare(kind: str, x: numpy.ndarray) -> Callable[[], Any]:
        function = mapped(side, kind, members)
        # The argument is on its devices already, as in a training loop.
        whole = side.top.pmap(lambda x: x + 0)(x[place : place + here])
        return lambda: function(whole).block_until_ready()

    def rows(out: Any) -> numpy.ndarray:
        shards = sorted(out.addressable_shards, key=lambda shard: shard.device.id)
        return numpy.stack([numpy.asarray(shard.data).reshape(-1) for shard in shards])

    return Party(prepare, rows, members, place, side)


def _mpi(name: str, ranks: int, rank: int, address: str) -> Party:
    world = importlib.import_module("mpi4py.MPI").COMM_WORLD
    ranks, rank = world.Get_size(), world.Get_rank()

    def prepare(kind: str, x: numpy.ndarray) -> Callable[[], Any]:
        mine = numpy.ascontiguousarray(x[rank])
        wide = (ranks, *mine.shape)

        # A fresh result for each call, as the others give.
        def run() -> numpy.ndarray:
            if kind == "psum":
                world.Allreduce(mine, out := numpy.empty_like(mine))
            elif kind == "all_gather":
                world.Allgather(mine, out := numpy.empty(wide, mine.dtype))
            elif kind == "psum_scatter":
                out = numpy.empty(mine.size // ranks, mine.dtype)
                world.Reduce_scatter_block(mine, out)
            elif kind == "all_to_all":
                world.Alltoall(mine, out := numpy.empty_like(mine))
            else:
                out = numpy.empty_like(mine)
                world.Sendrecv(mine, (rank + 1) % ranks, 0, out, (rank - 1) % ranks, 0)
            return out

        return run

    return Party(prepare, lambda out: out.reshape(1, -1), ranks, rank)


def _torch(name: str, ranks: int, rank: int, address: str) -> Party:
    torch = importlib.import_module("torch")
    group = importlib.import_module("torch.distributed")
    group.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=ranks)

    def prepare(kind: str, x: numpy.ndarray) -> Callable[[], Any]:
        mine = torch.from_numpy(x[rank].copy())
        parts = mine.shape[0] // ranks

        def run() -> Any:
            if kind == "psum":
                group.all_reduce(out := mine.clone())
            elif kind == "all_gather":
                out = torch.empty(ranks * mine.shape[0])
                group.all_gather_into_tensor(out, mine)
            elif kind == "psum_scatter":
                out = torch.empty(parts)
                group.reduce_scatter_tensor(out, mine)
            elif kind == "all_to_all":
                group.all_to_all_single(out := torch.empty_like(mine), mine)
            else:
                out = torch.empty_like(mine)
                sent = group.isend(mine, (rank + 1) % ranks)
                group.recv(out, (rank - 1) % ranks)
                sent.wait()
            return out

        return run

    return Party(prepare, lambda out: out.numpy().reshape(1, -1), ranks, rank)


SIDES = {"spmd": _framework, "jax": _framework, "mpi": _mpi, "torch": _torch}


# ---- commands ------------------------------------------------------------------------------------


class Rank:
    """Answers commands of the controller."""

    def __init__(self, side: str, ranks: int, rank: int, address: str):
        self._party = SIDES[side](side, ranks, rank, address)
        self._run: Callable[[], Any] = lambda: None

    def prepare(self, kind: str, nbytes: int) -> float:
        """Make the call, check its result, warm up; gives seconds per call."""
        party = self._party
        x = given(kind, nbytes, party.members)
        self._run = party.prepare(kind, x)
        self.time(2, 1)  # compiles
        found = party.rows(self._run())
        wanted = expected(kind, x)[party.place : party.place + len(found)]
        numpy.testing.assert_array_equal(found, wanted)
        return min(self.time(3, 1))

    def prepare_case(self, case: str) -> dict[str, Any]:
        """Make a case over arrays of all ranks; seconds per call, and the sizes of its results."""
        side = self._party.side
        assert side is not None
        found = next(c for c in over_ranks(self._party.members) if c.name == case)
        call = found.make(side)

        def measured(*results: Any) -> Any:
            return [side.np.sum(side.np.abs(x.astype("float32"))) for x in results]

        # Every rank has numbers that are whole, and no array of other ranks.
        out = side.jit(measured)(*side.tree.leaves(call()))
        sizes = [float(numpy.asarray(x.addressable_shards[0].data)) for x in out]
        self._run = lambda: side.ready(call())
        self.time(2, 1)
        return {"seconds": min(self.time(3, 1)), "sizes": sizes}

    def time(self, samples: int, inner: int) -> list[float]:
        """Seconds per call, several times over `inner` calls."""
        run, found = self._run, []
        run()  # the ranks wake up one after the other
        for _ in range(samples):
            start = time.perf_counter()
            for _ in range(inner):
                run()
            found.append((time.perf_counter() - start) / inner)
        return found


def main() -> None:
    """Answer until the controller closes the pipe."""
    side, folder, ranks, number, address = sys.argv[1:]
    variables = [os.environ[name] for name in RANK_VARIABLES if name in os.environ]
    rank = int(number) if int(number) >= 0 else int(variables[0])
    if int(number) < 0 and hasattr(os, "sched_setaffinity"):
        # Started by mpirun: a core each. Ranks that wander share one now and then.
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    me = None
    with Path(folder, f"{side}-{rank}").open() as commands:
        for line in commands:
            command = json.loads(line)
            if command is None:
                break
            try:
                me = me or Rank(side, int(ranks), rank, address)
                name = command.pop("do")
                answer = {"value": getattr(me, name)(**command)}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"[:500]}
            if rank == 0 or "error" in answer:
                with Path(folder, f"{side}-answers").open("a") as answers:
                    answers.write(json.dumps({"rank": rank, **answer}) + "\n")
            if "error" in answer:
                break  # a rank that is out of step cannot go on
    os._exit(0)  # without a shutdown barrier: the others may be stuck


if __name__ == "__main__":
    main()
