"""`spmdrun --selftest`: do ranks on this machine reach each other, rightly and fast?

A program of its own on every rank, through the same launcher and transports as any user's program:
a ring, reductions over all dtypes against their exact results, and a table of speed.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import numpy as np

from spmd.transport import world
from spmd.transport.communicator import Communicator, ReduceOp

DTYPES = ("bool", "int8", "int32", "uint64", "float16", "float32", "float64", "complex128")
SIZES = (4, 1 << 10, 64 << 10, 1 << 20, 16 << 20)
SECONDS_A_SIZE = 0.3
ROUNDS = 5


def check_ring(comm: Communicator) -> None:
    """Pass a token once around; each rank adds itself to it."""
    pairs = [(r, (r + 1) % comm.size) for r in range(comm.size)]
    token, heard = np.array([comm.rank]), np.empty(1, int)
    for hop in range(comm.size):
        comm.permute(token, heard, pairs)
        wanted = (comm.rank - hop - 1) % comm.size
        assert heard[0] == wanted, f"rank {comm.rank}, hop {hop}: heard {heard[0]}, not {wanted}"
        token[:] = heard


def check_all_reduce(comm: Communicator) -> None:
    """Sums whose result is known exactly, at sizes that take each of the transport's ways."""
    for name in DTYPES:
        for count in (1, 1000, 300_000):
            values = np.arange(count) % 5
            x = (values * (comm.rank + 1)).astype(name)
            given = [(values * (r + 1)).astype(name) for r in range(comm.size)]
            comm.all_reduce(x, ReduceOp.SUM)
            wanted = given[0].copy()
            for part in given[1:]:
                wanted = wanted + part  # integers and small multiples: exact in every dtype
            assert np.array_equal(x, wanted.astype(name)), f"rank {comm.rank}: {name}[{count}]"


def seconds_per_call(comm: Communicator, call: Callable[[], None]) -> float:
    """The median over rounds of the slowest rank's mean time."""
    began = time.perf_counter()
    call()
    once = np.array([time.perf_counter() - began])
    comm.all_reduce(once, ReduceOp.MAX)  # all ranks must make the same number of calls
    repeats = max(3, min(1000, int(SECONDS_A_SIZE / ROUNDS / once[0])))
    rounds = np.empty(ROUNDS)
    for k in range(ROUNDS):
        comm.barrier()
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        rounds[k] = (time.perf_counter() - began) / repeats
    comm.all_reduce(rounds, ReduceOp.MAX)
    return float(np.median(rounds))


def main() -> None:
    """Run all of it; rank 0 prints."""
    comm = world.world()

    def say(text: str) -> None:
        if comm.rank == 0:
            print(text, flush=True)

    hosts = comm.all_gather_object(socket.gethostname())
    names = ", ".join(f"{name} ({hosts.count(name)})" for name in sorted(set(hosts)))
    say(f"{comm.size} ranks on {names} through {type(comm).__name__}")
    check_ring(comm)
    say("ring        every rank heard from all others, in order")
    check_all_reduce(comm)
    say(f"all_reduce  right on {', '.join(DTYPES)}")
    say(f"{'bytes':>10} {'all_reduce':>13} {'all_gather':>13} {'reduced':>12}")
    for nbytes in SIZES:
        x = np.zeros(nbytes // 4, np.float32)
        gathered = np.empty(x.size * comm.size, np.float32)
        reduce = seconds_per_call(comm, lambda x=x: comm.all_reduce(x))
        gather = seconds_per_call(comm, lambda x=x, out=gathered: comm.all_gather(x, out))
        rate = nbytes / reduce / 1e9
        say(f"{nbytes:>10} {reduce * 1e6:>10.1f} µs {gather * 1e6:>10.1f} µs {rate:>7.2f} GB/s")
    comm.barrier()
    say("all right")


if __name__ == "__main__":
    main()
