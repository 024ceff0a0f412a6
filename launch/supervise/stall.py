"""The reason of a stall: waiting ranks, the ranks missing there, and the fate of these.

A pure function from the facts about each rank to a `Verdict`. The rank that times out is usually a
victim: blame follows the chain of waits to a rank that waits for none. Where the chain closes,
the ranks wait in different collectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..flight.file import BREAKPOINT, COMPILING, DATA, HOST, LEFT, PROGRAM, RAISED, TRACING, short
from .locations import in_program, loads_data, place_of, rank_text

# A rank that used less of a core than this does not compute.
IDLE = 0.05
STACK_SHOWN = 6
# The text about a rank that ended with exit code 0.
FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Call:
    """A collective that a rank came to: its name, its line, number `number` of its group."""

    op: str
    source: str
    group: int
    number: int
    members: tuple[int, ...]
    what: str = ""  # dtype, shape, axes
    done: bool = False

    @property
    def place(self) -> str:
        """`psum train.py:88`."""
        return f"{self.op} {short(self.source)}".strip()

    @property
    def key(self) -> tuple[int, int, str, str]:
        """Equal for ranks that wait in the same call."""
        return self.group, self.number, self.op, self.source


@dataclass(slots=True)
class View:
    """All that is known of one rank at one moment."""

    rank: int
    where: str = ""  # `host, cpu:1`
    ended: str = ""  # how it ended, if it did
    page: Mapping = field(default_factory=dict)  # of its flight page; empty: it has not joined
    idle: float = 0.0  # seconds since anything on its page changed
    look: Mapping = field(default_factory=dict)
    last: Call | None = None  # the last collective it came to

    @property
    def waits_in(self) -> Call | None:
        """The collective it waits in."""
        open_call = self.last is not None and not self.last.done
        return self.last if open_call and not self.ended and not self.page.get("state") else None

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger stopped it, wherever it was."""
        return not self.ended and self.look.get("state") in ("T", "t")

    @property
    def phase(self) -> int:
        """The activity that it reports."""
        return self.page.get("phase", HOST)


@dataclass(frozen=True, slots=True)
class Finding:
    """The state of one rank that others wait for."""

    rank: int
    kind: str  # the culprit class, one of those in docs/debugging.md
    text: str
    stack: tuple[str, ...] = ()
    excused: bool = False  # no reason to end the job: it goes on, or a person holds it


@dataclass(frozen=True, slots=True)
class Verdict:
    """The ranks that wait, where, and the reason."""

    waiting: tuple[tuple[Call, tuple[int, ...]], ...]
    findings: tuple[Finding, ...]

    @property
    def excused(self) -> bool:
        """Whether the job should be left alone for now."""
        return any(finding.excused for finding in self.findings)

    @property
    def only_compiles(self) -> bool:
        """Whether nothing is wrong: those that are missing compile, and get on with it."""
        return all(f.kind == "compiling" and f.excused for f in self.findings)

    def ending(self) -> str:
        """`ranks 0, 2, 3 were waiting in psum train.py:88`."""
        return "; ".join(waiting_text(call, ranks, "was", "were") for call, ranks in self.waiting)

    def lines(self, seconds: float, marks: Mapping[int, str]) -> list[str]:
        """The report, a line a place, with the stacks of the missing ranks."""
        waited = [waiting_text(call, ranks, "waits", "wait") for call, ranks in self.waiting]
        said = [f"stalled for {seconds:.0f} s: {waited[0]}" if waited else "stalled"]
        said += [f"  {text}" for text in waited[1:]]
        for finding in self.findings:
            said.append(f"  {marks.get(finding.rank, f'rank {finding.rank}')} {finding.text}")
            said += [f"      {frame}" for frame in finding.stack]
        return said


def waiting_text(call: Call, ranks: Sequence[int], one: str, several: str) -> str:
    """`ranks 0, 2 wait in psum train.py:88 (call 41, f32[10] over data)`."""
    verb = one if len(ranks) == 1 else several
    going = "waiting " if one == "was" else ""
    detail = f" ({call.what})" if call.what and not going else ""
    return f"{rank_text(ranks)} {verb} {going}in {call.place}{detail}"


def explain(views: Sequence[View], soon: float = 1.0) -> Verdict | None:
    """The verdict, or None if no rank waits. A page that changed within `soon` seconds moves."""
    by_rank = {view.rank: view for view in views}
    groups: dict[tuple, tuple[Call, list[int]]] = {}
    for view in views:
        call = view.waits_in
        if call is not None:
            groups.setdefault(call.key, (call, []))[1].append(view.rank)
    if not groups:
        return None
    waiting = sorted(groups.values(), key=lambda group: (-len(group[1]), group[1]))
    missing = {
        member: call
        for call, ranks in reversed(waiting)
        for member in call.members
        if member not in ranks and member in by_rank
    }
    # A rank that came to a collective and was stopped there keeps the others all the same.
    stopped = {v.rank: v.waits_in for v in views if v.waits_in and v.is_stopped}
    findings = [
        judge(by_rank[rank], call, soon)
        for rank, call in sorted((missing | stopped).items())
        if by_rank[rank].waits_in is None or rank in stopped
    ]
    if not findings:
        findings = _crossed(waiting)
    shown = tuple((call, tuple(ranks)) for call, ranks in waiting)
    return Verdict(shown, tuple(findings))


def _crossed(waiting: Sequence[tuple[Call, list[int]]]) -> list[Finding]:
    """Every missing rank waits itself: ranks are in different collectives."""
    if len(waiting) == 1:
        call, ranks = waiting[0]
        text = f"came to {call.place} like all others: data is under way, or lost"
        return [Finding(ranks[0], "in transit", text)]
    first = waiting[0][0]
    found = []
    for call, ranks in waiting[1:]:
        places = call.place, first.place
        if call.place == first.place:  # they are in the same loop, and not in the same round
            places = f"{call.place} (call {call.number})", f"{first.place} (call {first.number})"
        text = "came to {} where others came to {}".format(*places)
        found += [Finding(rank, "different collective", text) for rank in ranks]
    return found


def judge(view: View, call: Call, soon: float) -> Finding:
    """The reason that keeps one rank from the collective in which others wait for it.

    Certain facts come first: its end, the kernel's report, its own report. Only
    then its stack is read.
    """
    look, place = view.look, place_of(view.look.get("stack", ()))
    at = f" at {place}" if place else ""
    step = view.page.get("step", -1)
    at += f" in step {step}" if step >= 0 else ""
    stack = tuple(
        f"{file}:{line} in {function}"
        for file, line, function in look.get("stack", ())[:STACK_SHOWN]
    )

    def finding(kind: str, text: str, excused: bool = False) -> Finding:
        return Finding(view.rank, kind, text, stack, excused)

    if view.ended and view.ended != FINISHED:
        return finding("raised" if "raised" in view.ended else "dead", view.ended)
    if view.ended or view.page.get("state") == LEFT:
        return finding("left", f"left the program without coming to {call.place}")
    if view.page.get("state") == RAISED:
        return finding("raised", "raised an error and is ending")
    if view.is_stopped:
        held = f"in a debugger, {look['tracer']}" if look.get("tracer") else "by a signal"
        hint = "" if look.get("tracer") else f"; kill -CONT {look['pid']} lets it go on"
        return finding("stopped", f"is stopped {held}{hint}", bool(look.get("tracer")))
    if view.phase == BREAKPOINT:
        return finding("breakpoint", f"is in a breakpoint{at}", True)
    if not view.page:
        return finding("not joined", f"has not joined the job{_or_is(at)}{_asleep(look)}")
    computes = look.get("busy", 0.0) > IDLE
    if view.phase in (TRACING, COMPILING):
        doing = "tracing" if view.phase == TRACING else "compiling"
        return finding("compiling", f"is {doing} a program{at}", computes)
    if view.idle < soon:
        return finding("slow", f"is slow: it makes progress{at and ', now' + at}", True)
    if view.phase == DATA or loads_data(look.get("stack", ())):
        return finding("data loader", f"is in the data loader{at}{_asleep(look)}")
    if view.phase == PROGRAM or in_program(look.get("stack", ())):
        return finding("slow", f"computes in a program{at}" if computes else f"hangs in one{at}")
    return finding("never entered", f"never came to {call.place}: it is{at}{_asleep(look)}")


def _asleep(look: Mapping) -> str:
    if look.get("busy", 0.0) > IDLE:
        return f", using {look['busy']:.0%} of a core"
    kernel = f" in {look['kernel']}" if look.get("kernel") else ""
    return f", asleep{kernel}"


def _or_is(at: str) -> str:
    return f": it is{at}" if at else ""
