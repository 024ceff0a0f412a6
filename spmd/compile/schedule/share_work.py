"""Work that devices of a process do alike is done once, and its result is one buffer.

The one idea: devices that hold the same value need one copy of it. Every buffer has *homes*: for
each local device the first device that has the same value. They follow from the specs of the
arguments: what a step writes differs where something differs that it reads, or that decides whether
it runs. A step whose results have fewer homes than there are devices runs on these homes only
(`Once`), and every device reads from the memory of its home. An exchange that gives several devices
the same writes it once.

Small steps stay with each device. They cost less than the moment at which all devices wait for one,
and a loop of small steps is one function (`cpu/assemble/compiled_loops.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from spmd.base.record import record, replace
from spmd.compile.lower.mesh_layout import PerDevice, Topology
from spmd.compile.lower.steps import (
    Branch,
    Buffer,
    Exchange,
    Homes,
    Host,
    Once,
    Parallel,
    RankExchange,
    Schedule,
    Step,
    While,
    accesses,
    accesses_inside,
    blocks,
    walk,
)
from spmd.compile.native.program.steps import Meeting, with_blocks
from spmd.compile.schedule.overlap_collectives import seconds_of
from spmd.transport.shm.plan import Clear, Copy, Memory, Place, Read, Reduce

# Work that is shorter stays with each device: a meeting of threads takes about as long.
LEAST_SECONDS = 2e-6
# The least time of a call of Python.
HOST_SECONDS = 5e-6

# A position of the mesh has the same value as another one if both have the same number here: the
# first position that has it. `Homes` are the same for the local devices only.
Classes = tuple[int, ...]


def share_work(schedule: Schedule, topology: Topology, given: Sequence[Any]) -> Schedule:
    """The schedule whose steps run once where devices do alike; the one given is changed in place.

    `given` are the axes of the mesh along which each argument differs.
    """
    if len(topology.local) > 1:
        inputs = [classes_along(topology, axes) for axes in given]
        alike = _Alike(schedule, topology, inputs)
        shared = _chosen(schedule.steps, alike)
        for buffer, homes in shared.items():
            buffer.homes = homes
        schedule.steps = _once(schedule.steps, shared)
    return schedule


# ---- which positions have the same value -------------------------------------------------------


def classes_along(topology: Topology, axes: Iterable[Any]) -> Classes:
    """The classes of a value that differs along some axes of the mesh."""
    along = [topology.indices_along(axis) for axis in axes]
    return _numbered(zip(*along, strict=True) if along else [()] * len(topology.processes))


def _numbered(keys: Iterable[Any]) -> Classes:
    """Each position's number: that of the first with an equal key."""
    first: dict[Any, int] = {}
    return tuple([first.setdefault(key, k) for k, key in enumerate(keys)])


@lru_cache(maxsize=4096)
def _both(one: Classes, other: Classes) -> Classes:
    """The classes of what depends on two values."""
    return one if one == other else _numbered(zip(one, other, strict=True))


@lru_cache(maxsize=1024)
def _after_meeting(x: Classes, meeting: Meeting) -> Classes:
    """The classes of what an exchange makes of its operand."""
    keys: list[Any] = list(range(len(x)))
    for group in meeting.groups:
        given = tuple([x[k] for k in group])
        for number, k in enumerate(group):
            keys[k] = given if meeting.same else (given, number)
    return _numbered(keys)


class _Alike:
    """The classes of all buffers of a schedule: the coarsest that fit all its steps."""

    def __init__(self, schedule: Schedule, topology: Topology, inputs: Sequence[Classes]):
        count = len(topology.processes)
        self.local = topology.local
        self.everywhere: Classes = (0,) * count
        self.nowhere: Classes = tuple(range(count))
        self.of: dict[Buffer, Classes] = dict(zip(schedule.inputs, inputs, strict=True))
        for buffer, (value, _) in schedule.consts:
            if isinstance(value, PerDevice):
                self.of[buffer] = self._of_constant(value)
        self._changed = True
        while self._changed:
            self._changed = False
            self._steps(schedule.steps, self.everywhere)

    def classes(self, buffer: Buffer) -> Classes:
        return self.of.get(buffer, self.everywhere)

    def homes(self, buffer: Buffer) -> Homes | None:
        """The homes of a buffer; None if every device has a value of its own."""
        homes = _numbered(self.classes(buffer)[k] for k in self.local)
        return None if homes == tuple(range(len(homes))) else homes

    def _of_constant(self, value: PerDevice) -> Classes:
        keys: list[Any] = list(self.nowhere)
        for k, x in zip(self.local, value.values, strict=True):
            keys[k] = x.tobytes()
        return _numbered(keys)

    def _steps(self, steps: Sequence[Step], around: Classes) -> None:
        for step in steps:
            inside = around
            match step:
                case Branch(index=decides) | While(predicate=decides):
                    inside = _both(around, self.classes(decides.buffer))
                case _:
                    self._step(step, around)
            for block in blocks(step):
                self._steps(block, inside)

    def _step(self, step: Step, around: Classes) -> None:
        made, written = around, []
        for ref, writes in accesses(step):
            made = _both(made, self.classes(ref.buffer))
            if writes:
                written.append(ref.buffer)
        meeting = meeting_of(step)
        if meeting is not None:
            # It does not read what it writes.
            given = [self.classes(ref.buffer) for ref, writes in accesses(step) if not writes]
            made = around
            for x in given:
                made = _both(made, _after_meeting(x, meeting))
            for buffer in written:
                made = _both(made, self.classes(buffer))
            if not all(_fits(group, made) for group in meeting.groups):
                made = self.nowhere
        elif isinstance(step, Host) and step.effects:
            made = self.nowhere
        for buffer in written:
            if self.classes(buffer) != made:
                self.of[buffer] = made
                self._changed = True


def meeting_of(step: Step) -> Meeting | None:
    """The groups of devices that meet in a step, if they exchange something there."""
    if isinstance(step, Exchange):
        return Meeting(step.groups, step.kind in ("all_reduce", "all_gather", "broadcast"))
    return step.meeting if isinstance(step, Host | RankExchange) else None


def _fits(group: Sequence[int], made: Classes) -> bool:
    """Whether the members of a group get one result, or each another."""
    return len({made[k] for k in group}) in (1, len(group))


# ---- what is shared ----------------------------------------------------------------------------


@record
class _Unit:
    """A step that could run once, or an exchange that could write once, and what it writes."""

    step: Step
    written: tuple[Buffer, ...]
    homes: Homes | None


def _chosen(steps: Sequence[Step], alike: _Alike) -> dict[Buffer, Homes]:
    """The homes of the buffers that are shared.

    All that writes such a buffer runs once, so buffers that a step writes together are shared
    together; and they are if that saves enough work.
    """
    root: dict[Buffer, Buffer] = {}

    def find(buffer: Buffer) -> Buffer:
        while root.setdefault(buffer, buffer) is not buffer:
            root[buffer] = buffer = root[root[buffer]]
        return buffer

    units = list(_units(steps, alike))
    for unit in units:
        for buffer in unit.written[1:]:
            root[find(buffer)] = find(unit.written[0])
    seconds: dict[Buffer, float] = {}
    for unit in units:
        if unit.written:
            first = find(unit.written[0])
            own = float("-inf") if unit.homes is None else _seconds(unit.step)
            seconds[first] = seconds.get(first, 0.0) + own
    return {
        buffer: unit.homes
        for unit in units
        for buffer in unit.written
        if unit.homes is not None and seconds[find(buffer)] >= LEAST_SECONDS
    }


def _seconds(step: Step) -> float:
    calls = sum(isinstance(one, Host) for one in walk((step,)))
    return seconds_of(step) + calls * HOST_SECONDS


def _units(steps: Sequence[Step], alike: _Alike) -> Iterator[_Unit]:
    for step in steps:
        written = tuple({ref.buffer: None for ref, writes in accesses_inside((step,)) if writes})
        homes = {alike.homes(buffer) for buffer in written}
        if blocks(step) and (len(homes) != 1 or not _is_alone(step)):
            if isinstance(step, Parallel):
                yield _Unit(step, written, None)  # devices meet nowhere in it
            else:
                for block in blocks(step):
                    yield from _units(block, alike)
        else:
            yield _Unit(step, written, None if len(homes) != 1 else homes.pop())


def _is_alone(step: Step) -> bool:
    """Whether devices meet nowhere in a step, and all that it does is to write its results."""
    return not any(
        isinstance(one, Exchange | RankExchange)
        or (isinstance(one, Host) and (one.together or one.effects))
        for one in walk((step,))
    )


# ---- the steps ---------------------------------------------------------------------------------


def _once(steps: Sequence[Step], shared: dict[Buffer, Homes]) -> list[Step]:
    made: list[Step] = []
    body: list[Step] = []
    homes: Homes | None = None

    def close() -> None:
        if homes is not None:
            made.append(Once(tuple(sorted(set(homes))), tuple(body)))
        body.clear()

    for step in steps:
        written = [ref.buffer for ref, writes in accesses_inside((step,)) if writes]
        own = shared.get(written[0]) if written and _is_alone(step) else None
        if any(shared.get(buffer) != own for buffer in written):
            own = None
        if own != homes:
            close()
            homes = own
        if own is not None:
            body.append(step)
        elif isinstance(step, Exchange):
            made.append(_written_once(step))
        elif isinstance(step, RankExchange):
            made.append(_between_ranks(step))
        else:
            made.append(with_blocks(step, lambda block: _once(block, shared)))
    close()
    return made


def _written_once(step: Exchange[Any]) -> Step:
    """An exchange of the groups that write another result, which each of them writes once."""
    homes = step.output.buffer.homes
    if homes is None:
        return step
    seen: set[int] = set()
    groups = []
    for group in step.groups:
        if not seen.issuperset(homes[k] for k in group):
            groups.append(group)
            seen.update(homes[k] for k in group)
    is_one = len({homes[k] for k in step.groups[0]}) == 1 < len(step.groups[0])
    return replace(step, groups=tuple(groups), is_one=is_one)


def _between_ranks(step: RankExchange[Any]) -> Step:
    """The same that writes what devices share in the memory of its home only."""
    homes = step.output.buffer.homes
    if homes is None:
        return step

    def is_home(place: Place) -> bool:
        return place.memory != Memory.OUTPUT or homes[place.index] == place.index

    actions = []
    for action in step.rounds.actions:
        if isinstance(action, Reduce):
            targets = tuple([place for place in action.targets if is_home(place)])
            if targets:
                actions.append(replace(action, targets=targets))
        elif not isinstance(action, Copy | Clear | Read) or is_home(action.target):
            actions.append(action)
    return replace(step, rounds=replace(step.rounds, actions=tuple(actions)))
