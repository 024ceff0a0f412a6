"""Overlap: exchanges between processes run while the program computes.

An exchange that can be in flight becomes two steps. Its *start* comes as soon as its operand is
there, its *wait* when nothing else is left to do: before the first step that reads the result, and
behind steps that need it not, as many as it takes to cover the exchange on a slow network. Between
the two, operand and result are in use, so the memory plan keeps both.

Exchanges keep their order among each other: the ranks have agreed about it. Effects and
exchanges that cannot be in flight are met by nothing that is. An exchange that little would cover
stays one step: two halves cost more than one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from spmd.base.record import record, replace
from spmd.compile.lower.steps import (
    Buffer,
    Host,
    RankExchange,
    Ref,
    Schedule,
    Step,
    accesses_inside,
    walk,
)
from spmd.compile.native.program.steps import with_blocks
from spmd.compile.schedule.cost_model import step_cost

# The speed of a core, and of a slow network between hosts: 1 Gbit/s.
FLOPS_A_SECOND = 50e9
BYTES_A_SECOND = 10e9
LINK_BYTES_A_SECOND = 100e6
LINK_SECONDS = 1e-3
# The two halves are two calls of Python and a change of threads.
LEAST_OVERLAP_SECONDS = 100e-6
# Steps that are done before their turn keep their results in memory until then.
MOST_BYTES_AHEAD = 64 << 20
MOST_STEPS_AHEAD = 64
# An exchange that starts early needs more memory if its result is larger than its operand.
MOST_BYTES_GATHERED = 16 << 20

HALVES = ("start", "wait-for")


def overlap_exchanges(schedule: Schedule, least_seconds: float = LEAST_OVERLAP_SECONDS) -> Schedule:
    """Let exchanges that can be in flight be so, also in loops and branches.

    `least_seconds` are the seconds of other steps that an exchange must overlap with.
    """
    steps = list(overlapped(schedule.steps, least_seconds))
    return Schedule(schedule.inputs, schedule.outputs, schedule.consts, steps, schedule.results)


def overlapped(
    steps: Sequence[Step], least_seconds: float = LEAST_OVERLAP_SECONDS
) -> Sequence[Step]:
    """The same steps in an order in which exchanges overlap with others."""
    if not any(map(_can_fly, walk(steps))):
        return steps
    inside = [with_blocks(step, lambda block: overlapped(block, least_seconds)) for step in steps]
    return _joined(_Order(inside).run(), least_seconds)


def seconds_of(step: Step) -> float:
    """The estimated seconds of a step, the same on all machines."""
    cost = step_cost(step)
    return cost.flops / FLOPS_A_SECOND + cost.moved / BYTES_A_SECOND


# ---- dependences ---------------------------------------------------------------------------------


def _used(step: Step) -> Iterator[tuple[Buffer, bool]]:
    """The buffers that a step reads or writes, those inside of it included."""
    return ((ref.buffer, writes) for ref, writes in accesses_inside([step]))


def _is_fixed(step: Step) -> bool:
    """Whether a step keeps its place among exchanges: others than this process take part."""

    def meets(one: Step) -> bool:
        if isinstance(one, Host):
            return one.together or one.effects
        return isinstance(one, RankExchange)

    return any(map(meets, walk([step])))


def _can_fly(step: Step) -> bool:
    """Whether a step is an exchange that can be in flight."""
    return isinstance(step, Host) and step.halves is not None


def _before(steps: Sequence[Step]) -> list[set[int]]:
    """For each step, those that must be done before: they write its operands, and so on."""
    writer: dict[Buffer, int] = {}
    readers: dict[Buffer, list[int]] = {}
    needed: list[set[int]] = []
    for number, step in enumerate(steps):
        mine: set[int] = set()
        used = list(_used(step))
        for buffer, writes in used:
            if buffer in writer:
                mine.add(writer[buffer])
            if writes:
                mine.update(readers.get(buffer, ()))
        for buffer, writes in used:
            if writes:
                writer[buffer] = number
                readers[buffer] = []
        for buffer, writes in used:
            if not writes:
                readers.setdefault(buffer, []).append(number)
        mine.discard(number)
        needed.append(mine)
    return needed


# ---- the order -----------------------------------------------------------------------------------


@record(frozen=False)
class _Flight:
    """An exchange that is started and not waited for."""

    number: int
    uncovered: float  # seconds of it that no step has covered yet
    nbytes: int  # by which its result is larger than its operand


@record
class _Start:
    number: int
    step: Host[Ref]


@record
class _Wait:
    number: int
    step: Host[Ref]


class _Order:
    """Puts steps in an order, one after the other."""

    def __init__(self, steps: Sequence[Step]):
        self.steps = steps
        self.needed = _before(steps)
        self.done = [False] * len(steps)
        self.first = 0  # all before it are done
        self.order: list[Step | _Start | _Wait] = []
        self.flights: list[_Flight] = []
        self.fixed = [n for n, step in enumerate(steps) if _is_fixed(step)]
        self.is_fixed = frozenset(self.fixed)
        self.next_fixed = 0  # in `fixed`
        self.bytes_ahead = 0  # bytes of results that were computed before their turn

    def run(self) -> list[Step | _Start | _Wait]:
        """The steps, with starts and waits."""
        while self._start_what_is_ready() or self.first < len(self.steps):
            if self.done[self.first]:
                self.first += 1
                continue
            missing = self._missing(self.first)
            number = self.first if not missing else self._another(missing)
            if number is None:
                self._wait_for(missing)
            else:
                self._do(number)
        self._wait_for(self.flights[-1:])
        return self.order

    def _start_what_is_ready(self) -> bool:
        """Start the next exchanges, as far as their operands are there."""
        started = False
        while self.next_fixed < len(self.fixed):
            number = self.fixed[self.next_fixed]
            step = self.steps[number]
            if not _can_fly(step):
                break
            assert isinstance(step, Host)
            if self._flying_needed(number) or not all(self.done[n] for n in self.needed[number]):
                break
            flight = _flight(number, step)
            gathered = sum(f.nbytes for f in self.flights) + flight.nbytes
            if number != self.first and flight.nbytes and gathered > MOST_BYTES_GATHERED:
                break
            self.next_fixed += 1
            self.flights.append(flight)
            self.order.append(_Start(number, step))
            self.done[number] = started = True
        return started

    def _flying_needed(self, number: int) -> list[_Flight]:
        """The exchanges in flight whose result a step needs."""
        return [flight for flight in self.flights if flight.number in self.needed[number]]

    def _missing(self, number: int) -> list[_Flight]:
        """The exchanges that must have landed before a step whose turn it is."""
        if number in self.is_fixed and not _can_fly(self.steps[number]):
            return list(self.flights)
        return self._flying_needed(number)

    def _another(self, missing: Sequence[_Flight]) -> int | None:
        """A later step to do while some exchanges are not covered yet."""
        if all(flight.uncovered <= 0 for flight in missing):
            return None
        end = min(self.first + MOST_STEPS_AHEAD, len(self.steps))
        for number in range(self.first + 1, end):
            if self.done[number] or number in self.is_fixed or self._flying_needed(number):
                continue
            if not all(self.done[n] for n in self.needed[number]):
                continue
            written = sum(b.nbytes for b, writes in _used(self.steps[number]) if writes)
            if self.bytes_ahead + written <= MOST_BYTES_AHEAD:
                self.bytes_ahead += written
                return number
        return None

    def _do(self, number: int) -> None:
        step = self.steps[number]
        self.next_fixed += number in self.is_fixed
        seconds = seconds_of(step)
        for flight in self.flights:  # one after the other goes over the network
            covered = min(max(flight.uncovered, 0.0), seconds)
            flight.uncovered -= covered
            seconds -= covered
        self.order.append(step)
        self.done[number] = True

    def _wait_for(self, flights: Sequence[_Flight]) -> None:
        """Wait for some exchanges, and for all that were started before: they end before."""
        if not flights:
            return
        last = max(flight.number for flight in flights)
        landed = [f for f in self.flights if f.number <= last]
        self.flights = [f for f in self.flights if f.number > last]
        for flight in landed:
            step = self.steps[flight.number]
            assert isinstance(step, Host)
            self.order.append(_Wait(flight.number, step))
        self.bytes_ahead = 0


def _flight(number: int, step: Host[Ref]) -> _Flight:
    (given,), (got,) = step.inputs, step.outputs
    seconds = LINK_SECONDS + max(given.nbytes, got.nbytes) / LINK_BYTES_A_SECOND
    return _Flight(number, seconds, max(got.nbytes - given.nbytes, 0))


# ---- halves that overlap with enough -------------------------------------------------------------


def _joined(order: Sequence[Step | _Start | _Wait], least_seconds: float) -> list[Step]:
    """The order as steps; where next to nothing happens between halves, they are one step."""
    whole = _alone(order, least_seconds)
    steps: list[Step] = []
    for item in order:
        if isinstance(item, _Start):
            steps.append(item.step if item.number in whole else _half(item.step, 0))
        elif isinstance(item, _Wait):
            if item.number not in whole:
                steps.append(_half(item.step, 1))
        else:
            steps.append(item)
    return steps


def _alone(order: Sequence[Step | _Start | _Wait], least_seconds: float) -> set[int]:
    """The exchanges that fly in a group, with no others before or behind, that little covers."""
    whole: set[int] = set()
    flying: set[int] = set()
    together: set[int] = set()
    seconds = 0.0
    for item in order:
        if isinstance(item, _Start):
            if not flying:
                together, seconds = set(), 0.0
            flying.add(item.number)
            together.add(item.number)
        elif isinstance(item, _Wait):
            flying.discard(item.number)
            if not flying and seconds < least_seconds:
                whole |= together
        elif flying:
            seconds += seconds_of(item)
    return whole


def _half(step: Host[Ref], which: int) -> Host[Ref]:
    assert step.halves is not None
    name = f"{HALVES[which]} {step.name}"
    return replace(step, function=step.halves[which], name=name, halves=None)


# ---- the result ----------------------------------------------------------------------------------


def summary(traced: Iterable[str], steps: Sequence[Step]) -> list[str]:
    """`psum: 62 tensors in 3 exchanges, 2 of them while the program computes`, for each kind.

    `traced` are the kinds of the collectives that the user wrote, `steps` those of the program.
    """
    halves = [step for step in walk(steps) if isinstance(step, Host | RankExchange)]
    names = [
        step.name.split() for step in halves if isinstance(step, RankExchange) or step.together
    ]
    tensors = Counter(traced)
    started = Counter(name[1] for name in names if name[0] == HALVES[0])
    whole = Counter(name[0] for name in names if name[0] in tensors)
    said = []
    for kind, count in sorted(tensors.items()):
        exchanges = started[kind] + whole[kind]
        text = f"{kind}: {_several(count, 'tensor')} in {_several(exchanges, 'exchange')}"
        if started[kind]:
            text += f", {started[kind]} of them while the program computes"
        said.append(text)
    return said


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
