"""The front that all transports share: look at the arguments, then hand over flat arrays.

`CheckedCommunicator` turns every public call into a `Call` (which the ranks compare) and one hook
`_kind(call, ...)` on one-dimensional arrays, so a transport holds nothing but movement of data.
"""

from __future__ import annotations

import abc
import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from spmd.base.errors import CollectiveError
from spmd.transport.call_signature import (
    Call,
    Kind,
    check_buffer,
    dtype_name,
    make_call,
    pairs_detail,
    ranks_text,
)
from spmd.transport.communicator import Counts, ReduceOp
from spmd.transport.failure_message import say
from spmd.transport.flight_recorder import GroupLog
from spmd.transport.origin import NOWHERE, Origin
from spmd.transport.progress_thread import PROGRESS
from spmd.transport.reduction import check_op


class CheckedCommunicator(abc.ABC):
    """Implements `Communicator` on top of hooks that move flat arrays."""

    # Whether another thread than the main one may make calls, and whether it pays to let it.
    allows_overlap = True
    prefers_overlap = False

    def __init__(self, rank: int, size: int, name: str):
        self.rank = rank
        self.size = size
        self.name = name
        self._told_held: Call | None = None
        self.log: GroupLog | None = None  # the calls' log for the flight recorder

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}, rank {self.rank} of {self.size})"

    # ---- the public calls ----------------------------------------------------------------------

    def all_reduce(
        self, buf: np.ndarray, op: ReduceOp = ReduceOp.SUM, origin: Origin = NOWHERE
    ) -> None:
        """Reduce `buf` over all ranks, in place."""
        check_buffer(Kind.ALL_REDUCE, "buf", buf, writable=True)
        check_op(op, buf.dtype)
        call = make_call(Kind.ALL_REDUCE, op, dtype_name(buf.dtype), buf.size, "", origin)
        self._carry(self._all_reduce, call, buf, buf.reshape(-1), op)

    def all_gather(self, buf: np.ndarray, out: np.ndarray, origin: Origin = NOWHERE) -> None:
        """Collect the `buf` of every rank in `out`, in rank order."""
        self._check_pair(Kind.ALL_GATHER, buf, out, 1, self.size)
        call = make_call(Kind.ALL_GATHER, None, dtype_name(buf.dtype), buf.size, "", origin)
        self._carry(self._all_gather, call, buf, buf.reshape(-1), out.reshape(-1))

    def reduce_scatter(
        self,
        buf: np.ndarray,
        out: np.ndarray,
        op: ReduceOp = ReduceOp.SUM,
        origin: Origin = NOWHERE,
    ) -> None:
        """Reduce `buf` over all ranks and keep this rank's block of the result in `out`."""
        self._check_pair(Kind.REDUCE_SCATTER, buf, out, self.size, 1)
        check_op(op, buf.dtype)
        call = make_call(Kind.REDUCE_SCATTER, op, dtype_name(buf.dtype), buf.size, "", origin)
        self._carry(self._reduce_scatter, call, buf, buf.reshape(-1), out.reshape(-1), op)

    def all_to_all(
        self,
        buf: np.ndarray,
        out: np.ndarray,
        origin: Origin = NOWHERE,
        counts: Counts | None = None,
    ) -> None:
        """Send block `r` of `buf` to rank `r`; `out` holds the blocks sent here, in rank order.

        Blocks are equally large, unless `counts` says how many elements each rank sends to each.
        """
        if counts is not None:
            self._ragged(buf, out, origin, counts)
            return
        self._check_pair(Kind.ALL_TO_ALL, buf, out, 1, 1)
        if buf.size % self.size:
            raise CollectiveError(
                f"all_to_all: buf has {buf.size} elements, which do not divide into "
                f"{self.size} equal blocks, one a rank"
            )
        call = make_call(Kind.ALL_TO_ALL, None, dtype_name(buf.dtype), buf.size, "", origin)
        self._carry(self._all_to_all, call, buf, buf.reshape(-1), out.reshape(-1))

    def _ragged(self, buf: np.ndarray, out: np.ndarray, origin: Origin, counts: Counts) -> None:
        check_buffer(Kind.ALL_TO_ALL, "buf", buf, writable=False)
        check_buffer(Kind.ALL_TO_ALL, "out", out, writable=True)
        if len(counts) != self.size or any(len(row) != self.size for row in counts):
            raise CollectiveError(
                f"all_to_all: counts must have {self.size} rows of {self.size}, one a rank"
            )
        given, got = sum(counts[self.rank]), sum(row[self.rank] for row in counts)
        if buf.dtype != out.dtype or (buf.size, out.size) != (given, got):
            raise CollectiveError(
                f"all_to_all: buf is {buf.dtype.name}[{buf.size}] and out is "
                f"{out.dtype.name}[{out.size}]; by counts rank {self.rank} gives {given} elements "
                f"and gets {got}, of one dtype"
            )
        detail = "counts=" + ";".join([",".join(map(str, row)) for row in counts])
        total = sum(map(sum, counts))
        call = make_call(Kind.ALL_TO_ALL, None, dtype_name(buf.dtype), total, detail, origin)
        flat = buf.reshape(-1), out.reshape(-1)
        self._carry(self._all_to_all_of, call, buf, *flat, counts)

    def permute(
        self,
        buf: np.ndarray,
        out: np.ndarray,
        pairs: Sequence[tuple[int, int]],
        origin: Origin = NOWHERE,
    ) -> None:
        """Send `buf` along each `(source, target)` pair; `out` is zeros where nothing arrives."""
        self._check_pair(Kind.PERMUTE, buf, out, 1, 1)
        detail = pairs_detail(pairs, self.size)
        call = make_call(Kind.PERMUTE, None, dtype_name(buf.dtype), buf.size, detail, origin)
        self._carry(self._permute, call, buf, buf.reshape(-1), out.reshape(-1), pairs)

    def broadcast(self, buf: np.ndarray, root: int = 0) -> None:
        """Copy the `buf` of rank `root` into the `buf` of every rank."""
        check_buffer(Kind.BROADCAST, "buf", buf, writable=True)
        if not 0 <= root < self.size:
            raise CollectiveError(
                f"broadcast: root={root}; this group has ranks 0 to {self.size - 1}"
            )
        call = make_call(Kind.BROADCAST, None, dtype_name(buf.dtype), buf.size, f"root={root}")
        self._carry(self._broadcast, call, buf, buf.reshape(-1), root)

    def all_gather_object(self, obj: Any, origin: Origin = NOWHERE) -> list[Any]:
        """The objects of all ranks, in rank order. Pickled: for small things, not for arrays."""
        call = make_call(Kind.ALL_GATHER_OBJECT, origin=origin)
        return self._carry(self._gather_objects, call, None, obj)

    def compare(self, digest: int, origin: Origin) -> bool:
        """Whether all ranks are about to run a program of this digest for the first time."""
        mine, out = np.array([digest], np.int64), np.empty(self.size, np.int64)
        call = make_call(Kind.PROGRAM, None, "int64", 1, "", origin)
        self._carry(self._all_gather, call, mine, mine, out)
        return bool((out == digest).all())

    def barrier(self) -> None:
        """Return when every rank of the group has called it."""
        self.meet(make_call(Kind.BARRIER))

    def meet(self, call: Call) -> None:
        """Return when every rank of the group has reached a call whose data NCCL carries."""
        self._carry(self._barrier, call, None)

    def split(
        self, color: int | None, key: int = 0, origin: Origin = NOWHERE
    ) -> CheckedCommunicator | None:
        """Divide the group by colour; ranks order by `key`, then by rank in this group."""
        return self._carry(self._split, make_call(Kind.SPLIT, origin=origin), None, color, key)

    def _split(self, call: Call, color: int | None, key: int) -> CheckedCommunicator | None:
        wishes = self._gather_objects(call, (color, key))
        colors = sorted({c for c, _ in wishes if c is not None})
        groups = [
            [rank for _, rank in sorted((k, r) for r, (c, k) in enumerate(wishes) if c == wanted)]
            for wanted in colors
        ]
        made = self._subgroup(groups)
        if self.log is not None:
            number = self.log.split()  # also on a rank that is in no part
            if made is not None:
                place = self._place(groups)
                assert place is not None
                made.log = self.log.part(number, made.name, place[1])
        return made

    def abort(self, reason: str) -> None:
        """End the whole job and give `reason` to the other ranks."""
        self.announce_failure(f"rank {self.rank}: {reason}")
        self._end_job()

    def trouble(self) -> str:
        """The reason why ranks wait in vain, where the transport knows one; else nothing."""
        return ""

    def announce_failure(self, text: str) -> None:  # noqa: B027
        """Make ranks that wait for this one raise `PeerError(text)`, where the transport can."""

    def revoke(self) -> None:  # noqa: B027
        """Have MPI wake the ranks that wait here, where it is MPI that they wait in."""

    def announce_exit(self, code: int) -> None:  # noqa: B027
        """Say that this rank left the program and will make no more calls."""

    def announce_held(self, held: bool) -> None:  # noqa: B027
        """Say that this rank is held in a debugger, or no longer: no reason to give up.

        Ranks that wait for this one say so once, and wait on.
        """

    def tell_held(self, ranks: Sequence[int], call: Call) -> None:
        """Say, once for each call, that this rank waits for ranks that are in a debugger."""
        if self._told_held is not call:
            self._told_held = call
            say(self.rank, f"waiting in {call} for {ranks_text(ranks)}, stopped at a breakpoint")

    def all_ranks_left(self) -> bool:
        """Whether every other rank has announced its exit, where the transport can know."""
        return False

    # ---- implemented by a transport ------------------------------------------------------------

    @abc.abstractmethod
    def _all_reduce(self, call: Call, buf: np.ndarray, op: ReduceOp) -> None: ...

    @abc.abstractmethod
    def _all_gather(self, call: Call, buf: np.ndarray, out: np.ndarray) -> None: ...

    @abc.abstractmethod
    def _reduce_scatter(
        self, call: Call, buf: np.ndarray, out: np.ndarray, op: ReduceOp
    ) -> None: ...

    @abc.abstractmethod
    def _all_to_all(self, call: Call, buf: np.ndarray, out: np.ndarray) -> None: ...

    @abc.abstractmethod
    def _all_to_all_of(
        self, call: Call, buf: np.ndarray, out: np.ndarray, counts: Counts
    ) -> None: ...

    @abc.abstractmethod
    def _permute(
        self, call: Call, buf: np.ndarray, out: np.ndarray, pairs: Sequence[tuple[int, int]]
    ) -> None: ...

    @abc.abstractmethod
    def _broadcast(self, call: Call, buf: np.ndarray, root: int) -> None: ...

    @abc.abstractmethod
    def _barrier(self, call: Call) -> None: ...

    @abc.abstractmethod
    def _subgroup(self, groups: list[list[int]]) -> CheckedCommunicator | None:
        """The communicator of the group that holds this rank; the same `groups` on all ranks."""

    @abc.abstractmethod
    def _end_job(self) -> None: ...

    # ---- helpers -------------------------------------------------------------------------------

    def _carry(
        self, move: Callable[..., Any], call: Call, buf: np.ndarray | None, *operands: Any
    ) -> Any:
        """Make a call, and note it in the flight recorder."""
        PROGRESS.drain()
        log = self.log
        if log is None:
            return move(call, *operands)
        place = log.enter(call, 0 if buf is None else buf.nbytes)
        try:
            result = move(call, *operands)
        except BaseException:
            log.stopped()
            raise
        log.leave(place)
        return result

    def _check_pair(
        self, kind: Kind, buf: np.ndarray, out: np.ndarray, buf_blocks: int, out_blocks: int
    ) -> None:
        check_buffer(kind, "buf", buf, writable=False)
        check_buffer(kind, "out", out, writable=True)
        if buf.dtype != out.dtype:
            raise CollectiveError(
                f"{kind.name.lower()}: buf is {buf.dtype.name} and out is {out.dtype.name}"
            )
        if buf.size * out_blocks != out.size * buf_blocks:
            wanted = buf.size * out_blocks / buf_blocks
            raise CollectiveError(
                f"{kind.name.lower()}: buf has {buf.size} elements and out has {out.size}; "
                f"over {self.size} ranks out needs {wanted:g}"
            )

    def _gather_objects(self, call: Call, obj: Any) -> list[Any]:
        payload = np.frombuffer(pickle.dumps(obj), np.uint8)
        sizes = np.empty(self.size, np.int64)
        self._all_gather(call, np.array([payload.size], np.int64), sizes)
        longest = int(sizes.max())
        padded = np.zeros(longest, np.uint8)
        padded[: payload.size] = payload
        out = np.empty(longest * self.size, np.uint8)
        second = make_call(call.kind, None, "uint8", longest, "", call.origin)
        self._all_gather(second, padded, out)
        rows = out.reshape(self.size, longest)
        return [
            pickle.loads(row[:length].tobytes()) for row, length in zip(rows, sizes, strict=True)
        ]

    def _place(self, groups: list[list[int]]) -> tuple[int, list[int]] | None:
        """The group that holds this rank, and its members; None if the rank gave no colour."""
        for index, members in enumerate(groups):
            if self.rank in members:
                return index, members
        return None


def blocks(flat: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """A flat array cut into consecutive blocks of these sizes."""
    found, at = [], 0
    for size in sizes:
        found.append(flat[at : at + size])
        at += size
    return found


def zero(out: np.ndarray) -> None:
    """The result of a rank that no rank sends to."""
    out.view(np.uint8)[...] = 0  # by bytes: not every extension dtype can be assigned an int


class OpenGroups:
    """The groups of this process that have other processes in them: they are told how it ends."""

    def __init__(self) -> None:
        self._groups: weakref.WeakSet[CheckedCommunicator] = weakref.WeakSet()

    def add(self, group: CheckedCommunicator) -> None:
        """Note a group for as long as it is in use."""
        self._groups.add(group)

    def __iter__(self) -> Iterator[CheckedCommunicator]:
        return iter(list(self._groups))

    def clear(self) -> None:
        """Forget the groups: no rank meets there any more."""
        self._groups.clear()


OPEN_GROUPS = OpenGroups()
