"""`spmdrun --links`: measures the link between each two ranks; a slow one stands out.

A program of its own on every rank. Pairs are measured one after the other, while all others wait,
so a link has the machine to itself. Latency is half of a round trip of 8 bytes, bandwidth that of
1 MiB there and back. A link that is much worse than the others of its kind is named.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from spmd.transport import world
from spmd.transport.communicator import Communicator

SMALL, LARGE = 8, 1 << 20
SECONDS_A_LINK = 0.05
FEWEST, MOST = 5, 200
# A link is reported if it is worse than the median of its kind (one host, or two) by this factor.
SUSPICIOUS = 3.0


@dataclass(frozen=True, slots=True)
class Link:
    """The link between two ranks: microseconds one way, GB/s."""

    first: int
    second: int
    micros: float
    rate: float
    same_host: bool


def seconds_there_and_back(comm: Communicator, nbytes: int) -> float:
    """The median time of a message to the other rank of a pair and back.

    The first rank of the pair decides how often, since both must make the same calls.
    """
    there, back = [(0, 1)], [(1, 0)]
    data, heard = np.zeros(nbytes, np.uint8), np.empty(nbytes, np.uint8)

    def once() -> float:
        began = time.perf_counter()
        comm.permute(data, heard, there)
        comm.permute(data, heard, back)
        return time.perf_counter() - began

    once()
    wanted = np.array([SECONDS_A_LINK / max(once(), 1e-9)])
    comm.broadcast(wanted, 0)
    return statistics.median(once() for _ in range(int(np.clip(wanted[0], FEWEST, MOST))))


def measure(comm: Communicator) -> list[Link]:
    """All links, on every rank."""
    hosts = comm.all_gather_object(socket.gethostname())
    found: list[Link] = []
    for first in range(comm.size):
        for second in range(first + 1, comm.size):
            mine = comm.rank in (first, second)
            pair = comm.split(0 if mine else None)
            times = (0.0, 0.0)
            if pair is not None:
                times = tuple(seconds_there_and_back(pair, n) for n in (SMALL, LARGE))
            small, large = comm.all_gather_object(times)[first]
            same = hosts[first] == hosts[second]
            found.append(Link(first, second, small / 2 * 1e6, 2 * LARGE / large / 1e9, same))
    return found


def share_cores(comm: Communicator) -> bool:
    """Whether two ranks of a host run on the same core: then they wait for it, not for the link."""
    mine = {(socket.gethostname(), core) for core in os.sched_getaffinity(0)}
    gathered = comm.all_gather_object(mine)
    return len(set().union(*gathered)) < sum(map(len, gathered))


def slow_links(links: Sequence[Link]) -> list[str]:
    """A sentence for each link that is much worse than the others of its kind."""
    said = []
    for kind in (True, False):
        alike = [link for link in links if link.same_host is kind]
        if len(alike) < 3:
            continue  # nothing to compare with
        micros = statistics.median(link.micros for link in alike)
        rate = statistics.median(link.rate for link in alike)
        for link in alike:
            where = f"ranks {link.first} and {link.second}"
            if link.micros > SUSPICIOUS * micros:
                said.append(f"{where}: {link.micros:.0f} µs, where {micros:.0f} µs is usual")
            if link.rate < rate / SUSPICIOUS:
                said.append(f"{where}: {link.rate:.2f} GB/s, where {rate:.2f} GB/s is usual")
    return said


def table(links: Sequence[Link], size: int, value: Callable[[Link], float]) -> str:
    """A matrix of ranks, the upper half filled."""
    by_pair = {(link.first, link.second): link for link in links}
    rows = ["     " + "".join(f"{r:>9}" for r in range(1, size))]
    for first in range(size - 1):
        cells = (
            f"{value(by_pair[first, second]):>9.2f}" if second > first else " " * 9
            for second in range(1, size)
        )
        rows.append(f"{first:>5}" + "".join(cells))
    return "\n".join(rows)


def main() -> None:
    """Run it; rank 0 prints."""
    comm = world.world()
    if comm.size == 1:
        print("one rank has no links; say how many: spmdrun -n 4 --links")
        return
    shared = share_cores(comm)
    links = measure(comm)
    if comm.rank == 0:
        print(f"{comm.size} ranks through {type(comm).__name__}")
        print("one way, µs of 8 bytes\n" + table(links, comm.size, lambda link: link.micros))
        print("GB/s of 1 MiB\n" + table(links, comm.size, lambda link: link.rate))
        slow = slow_links(links) or ["no link is much slower than the others"]
        print("\n".join(["ranks share cores: times say little"] if shared else slow))
    comm.barrier()


if __name__ == "__main__":
    main()
