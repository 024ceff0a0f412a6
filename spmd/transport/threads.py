"""N ranks as threads of one process: the simulator of the other transports.

Nothing is copied between the ranks but the result: a rank shows its arrays to the others on a
`_Board`, each rank reads its part, and a second meeting keeps arrays unchanged until all have
read. Tests and debuggers use it; a program's virtual devices do not pass through here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.base.config import config
from spmd.base.errors import CollectiveError, PeerError
from spmd.transport.call_signature import CALL_BYTES, LAW_BYTES, Call, mismatch, ranks_text
from spmd.transport.checked import CheckedCommunicator, blocks, zero
from spmd.transport.communicator import Counts, ReduceOp
from spmd.transport.failure_message import failure_text
from spmd.transport.reduction import combine


class _Job:
    """The common state of a job's boards: the lock, and how the job ended if it did."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.failure: str | None = None

    def fail(self, text: str) -> None:
        with self.changed:
            self.failure = self.failure or text
            self.changed.notify_all()


class _Board:
    """The meeting place of the ranks of one group."""

    def __init__(self, job: _Job, size: int, name: str):
        self.job = job
        self.size = size
        self.name = name
        self.calls: list[Call | None] = [None] * size
        self.shown: list[Any] = [None] * size
        self.arrived = [0] * size  # meetings each rank has come to
        self.left: dict[int, str] = {}
        self.children: dict[tuple[int, int], _Board] = {}

    def leave(self, rank: int, how: str) -> None:
        with self.job.changed:
            self.left[rank] = how
            self.job.changed.notify_all()

    def meet(self, rank: int, call: Call) -> None:
        """Wait until every rank has come to this meeting as often as this one."""
        deadline = time.monotonic() + config.collective_timeout
        with self.job.changed:
            self.arrived[rank] += 1
            self.job.changed.notify_all()
            while missing := [r for r, n in enumerate(self.arrived) if n < self.arrived[rank]]:
                gone = [r for r in missing if r in self.left]
                if self.job.failure is None and gone:
                    self.job.failure = (
                        f"rank {gone[0]} {self.left[gone[0]]} while "
                        f"rank {rank} waited for it in {call}"
                    )
                    self.job.changed.notify_all()
                if self.job.failure is not None:
                    raise PeerError(self.job.failure)
                if not self.job.changed.wait(deadline - time.monotonic()):
                    raise CollectiveError(
                        f"rank {rank} | {call} waited {config.collective_timeout:g} s for "
                        f"{ranks_text(missing)}"
                    )

    def child(self, generation: int, index: int, size: int) -> _Board:
        with self.job.changed:
            name = f"{self.name}/{index}"
            return self.children.setdefault((generation, index), _Board(self.job, size, name))


class LocalCommunicator(CheckedCommunicator):
    """One of several ranks that are threads of this process."""

    def __init__(self, rank: int, board: _Board):
        super().__init__(rank, board.size, board.name)
        self._board = board
        self._sequence = 0
        self._splits = 0

    def announce_failure(self, text: str) -> None:
        self._board.job.fail(text)

    def announce_exit(self, code: int) -> None:
        self._board.leave(self.rank, "left the program")

    def _exchange(self, call: Call, shown: Any, read: Callable[[list[Any]], Any]) -> Any:
        """Show something, read what all others show, and return once everyone has read."""
        board = self._board
        board.calls[self.rank] = call
        board.shown[self.rank] = shown
        board.meet(self.rank, call)
        packed = [other.packed if other else bytes(CALL_BYTES) for other in board.calls]
        law = call.packed[:LAW_BYTES]
        differ = any(other[:LAW_BYTES] != law for other in packed)
        result = None if differ else read(list(board.shown))
        board.meet(self.rank, call)
        sequence, self._sequence = self._sequence, self._sequence + 1
        if differ:
            raise mismatch(sequence, packed)
        return result

    def _all_reduce(self, call: Call, buf: np.ndarray, op: ReduceOp) -> None:
        total = np.empty_like(buf)
        self._exchange(call, buf, lambda shown: combine(op, shown, total))
        np.copyto(buf, total)

    def _all_gather(self, call: Call, buf: np.ndarray, out: np.ndarray) -> None:
        self._exchange(call, buf, lambda shown: np.concatenate(shown, out=out))

    def _reduce_scatter(self, call: Call, buf: np.ndarray, out: np.ndarray, op: ReduceOp) -> None:
        mine = slice(self.rank * out.size, (self.rank + 1) * out.size)
        self._exchange(call, buf, lambda shown: combine(op, [x[mine] for x in shown], out))

    def _all_to_all(self, call: Call, buf: np.ndarray, out: np.ndarray) -> None:
        block = buf.size // self.size
        mine = slice(self.rank * block, (self.rank + 1) * block)
        self._exchange(call, buf, lambda shown: np.concatenate([x[mine] for x in shown], out=out))

    def _all_to_all_of(self, call: Call, buf: np.ndarray, out: np.ndarray, counts: Counts) -> None:
        def read(shown: list[np.ndarray]) -> None:
            arrived = [blocks(x, row)[self.rank] for x, row in zip(shown, counts, strict=True)]
            np.concatenate(arrived, out=out)

        self._exchange(call, buf, read)

    def _permute(
        self, call: Call, buf: np.ndarray, out: np.ndarray, pairs: Sequence[tuple[int, int]]
    ) -> None:
        source = {target: source for source, target in pairs}.get(self.rank)
        if source is None:
            zero(out)
        self._exchange(
            call, buf, lambda shown: None if source is None else np.copyto(out, shown[source])
        )

    def _broadcast(self, call: Call, buf: np.ndarray, root: int) -> None:
        def read(shown: list[np.ndarray]) -> None:
            if self.rank != root:
                np.copyto(buf, shown[root])

        self._exchange(call, buf, read)

    def _barrier(self, call: Call) -> None:
        self._exchange(call, None, lambda shown: None)

    def _subgroup(self, groups: list[list[int]]) -> LocalCommunicator | None:
        self._splits += 1
        place = self._place(groups)
        if place is None:
            return None
        index, members = place
        board = self._board.child(self._splits, index, len(members))
        return LocalCommunicator(members.index(self.rank), board)

    def _end_job(self) -> None:
        raise PeerError(self._board.job.failure or "the job has ended")


class LocalGroup:
    """Runs one function on N ranks that are threads of this process.

    >>> LocalGroup(3).run(lambda comm: comm.all_gather_object(comm.rank * 10))
    [[0, 10, 20], [0, 10, 20], [0, 10, 20]]
    """

    def __init__(self, size: int):
        self.size = size

    def run(self, fn: Callable[[LocalCommunicator], Any]) -> list[Any]:
        """Call `fn(comm)` on every rank and return their results, in rank order.

        When ranks raise, the first failure is raised here; the others got `PeerError` where they
        waited, so nothing hangs.
        """
        board = _Board(_Job(), self.size, "local")
        results: list[Any] = [None] * self.size
        failures: list[BaseException] = []

        def body(rank: int) -> None:
            comm = LocalCommunicator(rank, board)
            try:
                results[rank] = fn(comm)
                comm.announce_exit(0)
            except BaseException as error:
                with board.job.changed:
                    failures.append(error)
                comm.announce_failure(failure_text(rank, error))

        threads = [
            threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        causes = [error for error in failures if not isinstance(error, PeerError)]
        if failures:
            raise (causes or failures)[0]
        return results
