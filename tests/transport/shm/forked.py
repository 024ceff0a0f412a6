"""Ranks as forked processes that share memory: no MPI is needed to test that transport."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from typing import Any

from spmd.transport.shm import communicator as shm

FORK = multiprocessing.get_context("fork")


class Ranks:
    """Forks N ranks that run `body(comm)` and collects what each returned or raised."""

    def __init__(self, size: int, body: Callable[[Any], Any]):
        self.size = size
        boxes = FORK.Manager()
        self.meeting = FORK.Barrier(size)
        self.shared = boxes.dict()
        self.results = boxes.dict()
        self.processes = [
            FORK.Process(target=self.rank_main, args=(rank, body)) for rank in range(size)
        ]

    def gather_for(self, rank: int) -> shm.Gather:
        calls = iter(range(1_000))

        def gather(obj: Any) -> list[Any]:
            call = next(calls)
            self.shared[call, rank] = obj
            self.meeting.wait(10)
            return [self.shared[call, r] for r in range(self.size)]

        return gather

    def rank_main(self, rank: int, body: Callable[[Any], Any]) -> None:
        comm = shm.connect(rank, self.size, self.gather_for(rank), lambda: os._exit(1))
        try:
            result = body(comm)
            assert comm is not None
            comm.announce_exit(0)
        except Exception as error:
            result = error
        self.results[rank] = result

    def run(self, timeout: float = 30) -> list[Any]:
        for process in self.processes:
            process.start()
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        stuck = [r for r, process in enumerate(self.processes) if process.is_alive()]
        for r in stuck:
            self.processes[r].kill()
        assert not stuck, f"ranks {stuck} still ran after {timeout} s"
        return [self.results.get(r) for r in range(self.size)]


def raised(results: list[Any]) -> list[Any]:
    return [f"{type(r).__name__}: {r}" if isinstance(r, Exception) else r for r in results]
