"""Fault injection: makes one rank late, dead, absent, wrong or different at one collective.

`SPMD_INJECT` (spmdrun's `--inject`) holds faults separated by `;`, each `what:rank=R,op=N,...`. The
world that a process joins is then wrapped in an `InjectingCommunicator`, through which every public
call of every group goes; without the variable there is no wrapper and nothing to pay. Compiled
programs see a communicator that is not native, and call it through Python for each collective, so
that each can be hit.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from spmd.base.errors import InternalError, LaunchError
from spmd.base.record import record
from spmd.transport.call_signature import Call
from spmd.transport.checked import CheckedCommunicator
from spmd.transport.communicator import Counts, ReduceOp
from spmd.transport.environment import FAULTS
from spmd.transport.origin import NOWHERE, Origin

ATTEMPT = "SPMD_RESTART"  # set by spmdrun: how often the job was started again

HELP = """\
--inject FAULT makes one rank misbehave at one of its collectives; give it several times for several
faults. FAULT is what:key=value,...

  delay:rank=2,op=17,s=30         sleep for s seconds before collective 17 (they count from 0)
  kill:rank=1,op=5[,signal=9]     send itself a signal: 9 kill, 11 segfault, 19 stop
  skip:rank=1,op=5                do not make this call
  swap-op:rank=1,op=5             make another one: max for sum, sum for max, else a barrier
  corrupt:rank=1,op=5[,bit=0]     flip a bit of what it receives
  raise:rank=1,op=5               raise InjectedFault

op counts the data collectives and barriers of that rank, over all its groups. Instead of op,
step=120 is the first collective in that step (spmd.debug.step). With --max-restarts a fault strikes
in the first start; attempt=1 is the first restart."""


class InjectedFault(Exception):
    """The exception of `raise` in `SPMD_INJECT`: a failure that was asked for."""


@record
class Fault:
    """One fault: its kind, its rank, and its time."""

    what: str
    rank: int
    op: int | None = None
    step: int | None = None
    attempt: int = 0
    seconds: float = 0.0
    signal: int = int(signal.SIGKILL)
    bit: int = 0


# The optional and required keys of a fault besides its rank, when and attempt.
_KEYS = {
    "delay": {"s": "seconds"},
    "kill": {"signal": "signal"},
    "skip": {},
    "swap-op": {},
    "corrupt": {"bit": "bit"},
    "raise": {},
}
_COMMON = {"rank": "rank", "op": "op", "step": "step", "attempt": "attempt"}


def parse(text: str, ranks: int | None = None) -> tuple[Fault, ...]:
    """Read faults; raises `ValueError` that names the word which is wrong.

    >>> parse("kill:rank=1,op=5", ranks=2)[0].what
    'kill'
    """
    return tuple(_parse_one(word.strip(), ranks) for word in text.split(";") if word.strip())


def _parse_one(text: str, ranks: int | None) -> Fault:
    what, _, rest = text.partition(":")
    if what not in _KEYS:
        raise ValueError(f"{text}: {what!r} is no fault; known: {', '.join(_KEYS)}")
    keys = _COMMON | _KEYS[what]
    given: dict[str, Any] = {}
    for word in filter(None, rest.split(",")):
        key, equals, value = word.partition("=")
        if key not in keys or not equals:
            raise ValueError(f"{text}: {word!r}; {what} takes {', '.join(f'{k}=' for k in keys)}")
        try:
            given[keys[key]] = float(value) if key == "s" else int(value)
        except ValueError:
            raise ValueError(f"{text}: {word!r} needs a number") from None
        if given[keys[key]] < 0:
            raise ValueError(f"{text}: {word!r} cannot be negative")
    if "rank" not in given or ("op" in given) == ("step" in given):
        raise ValueError(f"{text}: say rank=R, and op=N or step=N")
    if what == "delay" and "seconds" not in given:
        raise ValueError(f"{text}: say for how long: s=30")
    if ranks is not None and given["rank"] >= ranks:
        raise ValueError(f"{text}: rank={given['rank']}; this job has ranks 0 to {ranks - 1}")
    if what == "kill" and given.get("signal") not in (None, *signal.valid_signals()):
        raise ValueError(f"{text}: there is no signal {given['signal']}")
    return Fault(what, **given)


# ---- the rank's side -----------------------------------------------------------------------------


class Injector:
    """The faults of one rank, and how many collectives it has come to."""

    def __init__(self, faults: Sequence[Fault], step: Callable[[], int]):
        self.faults = list(faults)
        self.step = step
        self.count = 0

    def due(self) -> list[Fault]:
        """The faults of the collective that begins now; each strikes once."""
        at, self.count = self.count, self.count + 1
        now = [f for f in self.faults if at == f.op or (f.step is not None and self._is_in(f.step))]
        self.faults = [f for f in self.faults if f not in now]
        return now

    def say_what_is_left(self) -> None:
        """Report the faults that were never injected: they have tested nothing."""
        for fault in self.faults:
            when = f"op={fault.op}" if fault.op is not None else f"step={fault.step}"
            sys.stderr.write(
                f"spmd: {FAULTS}: {fault.what} at {when} never struck; rank {fault.rank} made "
                f"{self.count} collectives\n"
            )

    def _is_in(self, step: int) -> bool:
        return self.step() == step


def wrapped(
    comm: CheckedCommunicator,
    step: Callable[[], int],
    environ: Mapping[str, str] = os.environ,
) -> CheckedCommunicator:
    """`comm` with this rank's faults of `environ`, or `comm` itself; `step` is the user's number.

    Every rank is wrapped if one is: all must take the same way through their programs.
    """
    text = environ.get(FAULTS, "").strip()
    if not text:
        return comm
    try:
        faults = parse(text)
    except ValueError as error:
        raise LaunchError(f"{FAULTS}={text}: {error}") from None
    attempt = int(environ.get(ATTEMPT, "0"))
    mine = [f for f in faults if f.rank == comm.rank and f.attempt == attempt]
    injector = Injector(mine, step)
    atexit.register(injector.say_what_is_left)
    return InjectingCommunicator(comm, injector)


def again(comm: CheckedCommunicator, before: CheckedCommunicator) -> CheckedCommunicator:
    """`comm`, which takes the place of `before`, with the faults that have not struck there."""
    if not isinstance(before, InjectingCommunicator):
        return comm
    return InjectingCommunicator(comm, before.injector)


class InjectingCommunicator(CheckedCommunicator):
    """A communicator whose public calls may fail on request; the rest is `inner`'s business."""

    def __init__(self, inner: CheckedCommunicator, injector: Injector):
        super().__init__(inner.rank, inner.size, inner.name)
        self.log = inner.log
        self.allows_overlap, self.prefers_overlap = inner.allows_overlap, inner.prefers_overlap
        self.inner = inner
        self.injector = injector

    def _call(
        self, out: np.ndarray | None, call: Callable[[], None], other: Callable[[], None]
    ) -> None:
        """Make a call, or apply the faults of this moment to it."""
        corrupt: list[Fault] = []
        for fault in self.injector.due():
            if fault.what == "delay":
                time.sleep(fault.seconds)
            elif fault.what == "kill":
                os.kill(os.getpid(), fault.signal)
            elif fault.what == "raise":
                raise InjectedFault(f"asked for by {FAULTS}, at collective {fault.op}")
            elif fault.what == "skip":
                return
            elif fault.what == "swap-op":
                call = other
            else:
                corrupt.append(fault)
        call()
        for fault in corrupt:
            if out is not None and out.nbytes:
                flat = out.reshape(-1).view(np.uint8)
                flat[fault.bit // 8 % flat.size] ^= 1 << fault.bit % 8

    # ---- the public calls ----------------------------------------------------------------------

    def all_reduce(
        self, buf: np.ndarray, op: ReduceOp = ReduceOp.SUM, origin: Origin = NOWHERE
    ) -> None:
        """See `CheckedCommunicator`."""
        other = ReduceOp.SUM if op is ReduceOp.MAX else ReduceOp.MAX
        self._call(
            buf,
            lambda: self.inner.all_reduce(buf, op, origin),
            lambda: self.inner.all_reduce(buf, other, origin),
        )

    def all_gather(self, buf: np.ndarray, out: np.ndarray, origin: Origin = NOWHERE) -> None:
        """See `CheckedCommunicator`."""
        self._call(out, lambda: self.inner.all_gather(buf, out, origin), self.inner.barrier)

    def reduce_scatter(
        self,
        buf: np.ndarray,
        out: np.ndarray,
        op: ReduceOp = ReduceOp.SUM,
        origin: Origin = NOWHERE,
    ) -> None:
        """See `CheckedCommunicator`."""
        other = ReduceOp.SUM if op is ReduceOp.MAX else ReduceOp.MAX
        self._call(
            out,
            lambda: self.inner.reduce_scatter(buf, out, op, origin),
            lambda: self.inner.reduce_scatter(buf, out, other, origin),
        )

    def all_to_all(
        self,
        buf: np.ndarray,
        out: np.ndarray,
        origin: Origin = NOWHERE,
        counts: Counts | None = None,
    ) -> None:
        """See `CheckedCommunicator`."""
        self._call(out, lambda: self.inner.all_to_all(buf, out, origin, counts), self.inner.barrier)

    def permute(
        self,
        buf: np.ndarray,
        out: np.ndarray,
        pairs: Sequence[tuple[int, int]],
        origin: Origin = NOWHERE,
    ) -> None:
        """See `CheckedCommunicator`."""
        self._call(out, lambda: self.inner.permute(buf, out, pairs, origin), self.inner.barrier)

    def broadcast(self, buf: np.ndarray, root: int = 0) -> None:
        """See `CheckedCommunicator`."""
        self._call(buf, lambda: self.inner.broadcast(buf, root), self.inner.barrier)

    def meet(self, call: Call) -> None:
        """See `CheckedCommunicator`; the data behind the meeting can't be corrupted."""
        one = np.zeros(1, np.int32)
        self._call(None, lambda: self.inner.meet(call), lambda: self.inner.all_reduce(one))

    # ---- calls without faults ------------------------------------------------------------------

    def all_gather_object(self, obj: Any, origin: Origin = NOWHERE) -> list[Any]:
        """See `CheckedCommunicator`; not counted, since spmd itself uses it too."""
        return self.inner.all_gather_object(obj, origin)

    def compare(self, digest: int, origin: Origin) -> bool:
        """See `CheckedCommunicator`."""
        return self.inner.compare(digest, origin)

    def split(
        self, color: int | None, key: int = 0, origin: Origin = NOWHERE
    ) -> CheckedCommunicator | None:
        """See `CheckedCommunicator`; the new group has the same faults, and counts on."""
        group = self.inner.split(color, key, origin)
        return None if group is None else InjectingCommunicator(group, self.injector)

    def announce_failure(self, text: str) -> None:
        """See `CheckedCommunicator`."""
        self.inner.announce_failure(text)

    def trouble(self) -> str:
        """See `CheckedCommunicator`."""
        return self.inner.trouble()

    def revoke(self) -> None:
        """See `CheckedCommunicator`."""
        self.inner.revoke()

    def announce_exit(self, code: int) -> None:
        """See `CheckedCommunicator`."""
        self.inner.announce_exit(code)

    def announce_held(self, held: bool) -> None:
        """See `CheckedCommunicator`."""
        self.inner.announce_held(held)

    def all_ranks_left(self) -> bool:
        """See `CheckedCommunicator`."""
        return self.inner.all_ranks_left()

    def _end_job(self) -> None:
        self.inner._end_job()

    # The hooks are reached through `inner`'s public calls only; they complete the class.

    def _unreached(self, *args: Any, **keywords: Any) -> NoReturn:
        raise InternalError("the collectives of a communicator with faults are those of `inner`")

    _all_reduce = _all_gather = _reduce_scatter = _all_to_all = _unreached
    _all_to_all_of = _permute = _broadcast = _barrier = _subgroup = _unreached
