"""psum over two processes: spmd, JAX over gloo, and the bare MPI_Allreduce.

Each round starts the sides one after the other, so only one job runs at a time; rank 0 prints its
samples. spmd and MPI are started by mpirun, JAX's processes find each other through a port.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

from benchmarks.measure import ROOT, Result
from benchmarks.sides import Side, load_side

RANKS = 2
ROUNDS = 5
SIZES = {"4 B": 4, "64 KiB": 65536, "1 MiB": 2**20, "16 MiB": 2**24}
SIDES = ("spmd", "jax", "mpi")
SAMPLES = 30
MPI_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_btl": "^ofi",
    "OMPI_MCA_osc": "^ucx",
}


# ---- in a rank ---------------------------------------------------------------------------------


def _pmapped(side: Side) -> Callable[[int], Callable[[], Any]]:
    function = side.top.pmap(lambda x: side.lax.psum(x, "i") / RANKS, axis_name="i")

    def make(nbytes: int) -> Callable[[], Any]:
        x = function(numpy.ones((1, nbytes // 4), numpy.float32))
        return lambda: function(x).block_until_ready()

    return make


def _spmd(rank: int, address: str) -> Callable[[int], Callable[[], Any]]:
    return _pmapped(load_side("spmd"))


def _jax(rank: int, address: str) -> Callable[[int], Callable[[], Any]]:
    jax = importlib.import_module("jax")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, RANKS, rank)
    return _pmapped(load_side("jax"))


def _mpi(rank: int, address: str) -> Callable[[int], Callable[[], Any]]:
    world = importlib.import_module("mpi4py.MPI").COMM_WORLD

    def make(nbytes: int) -> Callable[[], Any]:
        x = numpy.ones(nbytes // 4, numpy.float32)

        def run():
            out = numpy.empty_like(x)  # a fresh result, as the others give
            world.Allreduce(x, out)
            return out

        return run

    return make


def time_sizes(side: str, rank: int, address: str) -> dict[str, list[float]]:
    """Seconds per call, by size; both ranks run this, and so wait for each other."""
    make = {"spmd": _spmd, "jax": _jax, "mpi": _mpi}[side](rank, address)
    samples = {}
    for label, nbytes in SIZES.items():
        run = make(nbytes)
        # A fixed number of calls on both ranks: a loop that ends by the clock would part them.
        inner = 20 if nbytes <= 2**20 else 2
        for _ in range(20):
            run()
        samples[label] = []
        for _ in range(SAMPLES):
            start = time.perf_counter()
            for _ in range(inner):
                run()
            samples[label].append((time.perf_counter() - start) / inner)
    return samples


# ---- the controller ----------------------------------------------------------------------------


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _round(side: str) -> dict[str, list[float]]:
    """Start one side's job and return rank 0's samples."""
    environment = {
        **os.environ,
        **MPI_ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "SPMD_NUM_CPU_DEVICES": "1",
        "JAX_PLATFORMS": "cpu",
    }
    program = [sys.executable, "-m", "benchmarks.ranks", side]
    if side == "jax":
        address = f"127.0.0.1:{_free_port()}"
        commands = [[*program, str(rank), address] for rank in range(RANKS)]
    else:
        mpirun = Path(sysconfig.get_path("scripts"), "mpirun")
        launcher = str(mpirun) if mpirun.exists() else "mpirun"
        commands = [[launcher, "-n", str(RANKS), *program]]
    jobs = [
        subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        printed = [job.communicate(timeout=300)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    if any(job.returncode for job in jobs):
        raise RuntimeError(f"psum over ranks: the job of {side} failed; see its output above")
    found = [line for text in printed for line in text.splitlines() if line.startswith("{")]
    return json.loads(found[0])


def measure_ranks(rounds: int = ROUNDS) -> list[Result]:
    """All sizes on all sides, round by round."""
    samples: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for side in SIDES:
            for label, seconds in _round(side).items():
                samples.setdefault((label, side), []).extend(seconds)
    return [
        Result.of(f"ranks/psum over {RANKS} ranks, {label}", side, samples[label, side], 1)
        for label in SIZES
        for side in SIDES
    ]


def main() -> None:
    """Be one rank: time all sizes, and print them if the rank is 0."""
    side, *rest = sys.argv[1:]
    rank = int(rest[0]) if rest else int(os.environ["OMPI_COMM_WORLD_RANK"])
    samples = time_sizes(side, rank, rest[1] if rest else "")
    if rank == 0:
        print(json.dumps(samples), flush=True)


if __name__ == "__main__":
    main()
