"""Collectives between GPUs by NCCL, through CuPy: availability, communicators, failures.

The one idea: NCCL moves data only. The ranks meet on the host first, through the communicator that
they have anyway: it compares their calls, names a rank that does not come, and carries NCCL's ids.
Then every rank puts its part into its streams and goes on. `WATCH` finds later failures when the
progress thread polls it: it hears of ranks that failed, asks NCCL, and ends all communicators, so
that no stream waits for ever.

This is the only file that imports `cupy.cuda.nccl`. It knows devices by number only; what makes one
current is handed in.
"""

from __future__ import annotations

import atexit
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from spmd.base.config import config
from spmd.base.errors import CollectiveError, DeviceError, PeerError
from spmd.base.record import record
from spmd.transport.call_signature import ranks_text
from spmd.transport.checked import CheckedCommunicator
from spmd.transport.failure_message import say
from spmd.transport.flight_recorder import FLIGHT
from spmd.transport.origin import Origin
from spmd.transport.progress_thread import PROGRESS
from spmd.transport.world import after_recovery, world

# Sends and receives, and bfloat16, are in NCCL from here on: 2.10.
OLDEST = 21000
# Seconds between two checks for failures while exchanges are in flight.
LOOK_SECONDS = 0.05
# Seconds to wait for a failed rank's own notice, which arrives later than NCCL's error.
WORD_SECONDS = 1.0
# Seconds at exit in which other ranks may still receive data from this one.
EXIT_SECONDS = 30.0

CODES = {
    1: "a CUDA call failed",
    2: "a system call failed",
    3: "an internal error, a bug in NCCL or memory that was overwritten",
    4: "an argument is invalid",
    5: "a call is invalid here",
    6: "a rank or the network between ranks failed",
    7: "it has not finished what it was asked to do",
}

# ---- availability --------------------------------------------------------------------------------


def library() -> Any:
    """CuPy's module; an ImportError says what is missing."""
    import cupy.cuda.nccl as nccl  # asked for by programs over GPUs of several ranks

    if not getattr(nccl, "available", False):
        raise ImportError("CuPy does not find libnccl.so.2")
    return nccl


def missing() -> str:
    """The reason why this process can't use NCCL, with what to do; "" if it can."""
    try:
        version = library().get_version()
    except ImportError as error:
        return f"NCCL is missing ({error}); pip install spmd[cuda-mesh]"
    if version < OLDEST:
        return (
            f"NCCL is {version}, and spmd needs {OLDEST} or newer; pip install -U spmd[cuda-mesh]"
        )
    return ""


class _Agreement:
    """The result of the agreement of the ranks of the job, made once."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def forget(self) -> None:
        """Ask again: the ranks are others."""
        self.reason = None


agreement = _Agreement()
after_recovery(agreement.forget)


def is_agreed(gpus: Sequence[str], carried: str, origin: Origin) -> bool:
    """Whether all ranks use NCCL; all of them ask at the same place of their programs.

    `gpus` are the names of this rank's devices, the same for one GPU in all processes of a host;
    `carried` says why the driver can't be used with NCCL. The answer is found once, and said where
    it may surprise.
    """
    if agreement.reason is None:
        reason = agreement.reason = disagreement(world(), gpus, carried, origin)
        if reason and gpus and config.nccl == "auto" and world().rank == 0:
            say(0, f"GPUs of several ranks exchange through the host's memory: {reason}")
    reason = agreement.reason
    if reason and config.nccl == "always":
        raise DeviceError(f"SPMD_NCCL=always: {reason}")
    return not reason


def disagreement(
    comm: CheckedCommunicator, gpus: Sequence[str], carried: str, origin: Origin
) -> str:
    reason = carried
    if config.nccl == "never":
        reason = "SPMD_NCCL=never"
    elif not reason and not comm.allows_overlap:
        reason = "this MPI takes calls from one thread only"
    reason = reason or missing()
    found = comm.all_gather_object((reason, list(gpus)), origin)
    reasons: dict[str, list[int]] = {}
    users: dict[str, list[int]] = {}
    for rank, (text, names) in enumerate(found):
        if text:
            reasons.setdefault(text, []).append(rank)
        for name in names:
            users.setdefault(name, []).append(rank)
    if reasons:
        first, ranks = next(iter(reasons.items()))
        return first if len(ranks) == comm.size else f"{ranks_text(ranks)}: {first}"
    shared = [ranks for ranks in users.values() if len(ranks) > 1]
    return f"{ranks_text(sorted(set(shared[0])))} share a GPU" if shared else ""


# ---- communicators -------------------------------------------------------------------------------


@record
class Member:
    """A local device's place: its group, and its number among the group's devices."""

    device: int
    group: int
    rank: int
    size: int


def attempt(what: str, call: Callable[..., Any], *args: Any) -> Any:
    """Make a call of NCCL; a result code is an error in words."""
    try:
        return call(*args)
    except KeyError as error:  # CuPy has no name for the code
        raise CollectiveError(_text(what, int(error.args[0]), "")) from None
    except RuntimeError as error:
        code = getattr(error, "status", None)
        if code is None:
            raise
        raise CollectiveError(_text(what, int(code), str(error))) from None


@contextmanager
def _grouped(what: str) -> Iterator[None]:
    """Let NCCL take the calls of a `with` block as one."""
    nccl = library()
    attempt(what, nccl.groupStart)
    try:
        yield
    except BaseException:
        with suppress(CollectiveError):
            attempt(what, nccl.groupEnd)
        raise
    attempt(what, nccl.groupEnd)


def _text(what: str, code: int, own: str) -> str:
    meaning = CODES.get(code, "a code that spmd does not know")
    said = f"; {own}" if own else ""
    return (
        f"NCCL could not {what}: {meaning} (code {code}{said}).\n"
        "NCCL_DEBUG=WARN makes NCCL itself say more."
    )


class NcclGroup:
    """The communicators of this process's devices, one for each, in groups that don't overlap."""

    def __init__(self, comms: dict[int, Any]):
        self._comms = comms
        WATCH.groups.append(self)

    def call(self, what: str, calls: Sequence[tuple[int, str, tuple[Any, ...]]]) -> None:
        """Put calls into streams, as one: device, the name of NCCL's call, its arguments."""
        WATCH.check()
        try:
            with _grouped(what):
                for device, name, args in calls:
                    attempt(what, getattr(self._comms[device], name), *args)
        except CollectiveError:
            WATCH.check()  # its communicators were ended meanwhile
            raise

    def error(self) -> CollectiveError | None:
        """The failure that NCCL has noticed meanwhile."""
        for comm in self._comms.values():
            try:
                attempt("go on", comm.check_async_error)
            except CollectiveError as error:
                return error
        return None

    def abort(self) -> None:
        """End the communicators: what waits in streams returns, with any values."""
        for comm in self._comms.values():
            comm.abort()


def connect(
    comm: CheckedCommunicator,
    members: Sequence[Member],
    at: Callable[[int], AbstractContextManager[object]],
    origin: Origin,
) -> NcclGroup:
    """The communicators of this process's devices; all ranks of `comm` come here together.

    `at` makes a device current.
    """
    nccl = library()
    WATCH.check()
    name = "make an id for a group of GPUs"
    made = {m.group: attempt(name, nccl.get_unique_id) for m in members if m.rank == 0}
    ids = {k: v for found in comm.all_gather_object(made, origin) for k, v in found.items()}
    comms: dict[int, Any] = {}

    def initialize() -> None:
        what = f"connect {members[0].size} GPUs for {origin}"
        with _grouped(what):
            for m in members:
                with at(m.device):
                    args = m.size, ids[m.group], m.rank
                    comms[m.device] = attempt(what, nccl.NcclCommunicator, *args)

    # NCCL waits for the other ranks, without an end: this thread can leave.
    request, began = PROGRESS.send(initialize), time.monotonic()
    while not PROGRESS.await_(request, LOOK_SECONDS):
        trouble = world().trouble()
        if trouble:
            error: Exception = PeerError(trouble)
        elif time.monotonic() - began > config.collective_timeout:
            error = CollectiveError(
                f"rank {comm.rank} waited {time.monotonic() - began:.1f} s for NCCL to connect "
                f"GPUs for {origin}.\nNCCL_DEBUG=INFO says what it waits for, "
                "SPMD_NCCL=never goes through the host's memory. If ranks are only slow, raise "
                "SPMD_COLLECTIVE_TIMEOUT (seconds)."
            )
        else:
            continue
        PROGRESS.give_up(request)
        raise error
    if request.error is not None:
        raise request.error
    return NcclGroup(comms)


# ---- what ends them ------------------------------------------------------------------------------


class Watch:
    """Exchanges that are in streams, and the failure that ended all communicators."""

    def __init__(self) -> None:
        self.groups: list[NcclGroup] = []
        self.failure: Exception | None = None
        # For each exchange whether it is done, its record of the flight recorder, and the record's
        # number: a later one may have taken its place.
        self._flying: deque[tuple[Callable[[], bool], int, int]] = deque()
        self._looked = 0.0
        self._noticed = 0.0  # when NCCL told of a failure that no rank has explained yet
        atexit.register(self.finish)

    def add(self, is_done: Callable[[], bool], place: int) -> None:
        """Watch an exchange that was put into streams, until it is done."""
        self._flying.append((is_done, place, FLIGHT.words[place] if place else 0))
        PROGRESS.watch(self.look)

    def check(self) -> None:
        """Raise the failure that ended all communicators, if there is one."""
        if self.failure is not None:
            raise self.failure

    def look(self) -> bool:
        """Note what is done, and look for failures; whether there is anything left to watch."""
        if self._flying and self.failure is None:
            now = time.monotonic()
            is_done, place, number = self._flying[0]
            if not is_done():
                if now - self._looked > LOOK_SECONDS:
                    self._look_for_failure(now)
            elif self._error() is not None:
                self._look_for_failure(now)
            else:
                if place and FLIGHT.words[place] == number:
                    FLIGHT.completed(place)
                self._flying.popleft()
        return bool(self._flying) and self.failure is None

    def _error(self) -> CollectiveError | None:
        return next((e for e in (group.error() for group in list(self.groups)) if e), None)

    def _look_for_failure(self, now: float) -> None:
        self._looked = now
        trouble, error = world().trouble(), self._error()
        if trouble:
            self.fail(PeerError(trouble))
        elif error is None:
            self._noticed = 0.0
        elif not self._noticed:
            self._noticed = now
        elif now - self._noticed > WORD_SECONDS:
            self.fail(error)

    def settle(self) -> None:
        """After a wait for a stream: raise if what was waited for has failed."""
        while self.failure is None and self._flying and self._error() is not None:
            time.sleep(LOOK_SECONDS)  # the others may say why
        self.check()

    def fail(self, error: Exception) -> None:
        """End all communicators for a reason, which those who wait will raise."""
        if self.failure is None:
            self.failure = error
            for group in self.groups:
                group.abort()

    def finish(self) -> None:
        """At the end of the program: let the exchanges come to their end."""
        deadline = time.monotonic() + EXIT_SECONDS
        while self._flying and self.failure is None and time.monotonic() < deadline:
            time.sleep(0.001)

    def forget(self) -> None:
        """Go on with other ranks: end what there is."""
        self.fail(PeerError("the job goes on without ranks that died"))
        self.groups.clear()
        self._flying.clear()
        self.failure = None


WATCH = Watch()
after_recovery(WATCH.forget)
