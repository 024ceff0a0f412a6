"""The collectives of a program in order, as all ranks must have them, and the errors if not.

Before a program that spans processes runs for the first time, the ranks compare digests of its
schedule: one small exchange. Only where these differ do the schedules themselves travel, and every
rank raises the same error, which shows the first difference with the user's lines of both sides.
"""

from __future__ import annotations

import collections as containers
from collections.abc import Iterator, Sequence
from typing import Any

from spmd.base.config import config
from spmd.base.errors import CollectiveError
from spmd.base.record import field, record, replace
from spmd.base.source import Source
from spmd.core.aval import ShapedArray
from spmd.core.ir import ClosedJaxpr, Eqn, Jaxpr, Names, Var, format_eqn, subjaxprs
from spmd.core.rewrite import dce
from spmd.transport.call_signature import digest_of, ranks_text
from spmd.transport.checked import CheckedCommunicator
from spmd.transport.origin import Origin

# ---- one collective ----------------------------------------------------------------------------


@record
class Entry:
    """One collective of a program. Ranks must agree about all of it but `argument`.

    `argument` is the argument from which the operand was computed: it is for readers, and may
    differ where ranks compute their operands in different ways.
    """

    kind: str
    dtype: str
    shape: str
    axes: str
    options: str = ""  # groups, permutation, dims
    within: str = ""  # the loops and branches around it
    source: str = ""
    operand: str = ""
    argument: str = field(default="", compare=False, repr=False)

    def __str__(self) -> str:
        operand = self.operand or self.argument
        leaf = f" of {operand}" if operand else ""
        around = f", {self.within}" if self.within else ""
        return f"{self.what}{leaf} at {self.source}{around}"

    @property
    def what(self) -> str:
        """The collective without its place."""
        options = f" with {self.options}" if self.options else ""
        return f"{self.kind} {self.dtype}{self.shape} over {self.axes}{options}"


# Names of an entry's fields for readers; fields that explain others come first.
_FIELDS = {
    "kind": "kind",
    "axes": "axis",
    "dtype": "dtype",
    "shape": "shape",
    "options": "groups, permutation or dims",
    "within": "the loop or branch around it",
    "operand": "operand",
    "source": "line",
}


def entry_of(eqn: Eqn, within: str = "") -> Entry:
    """A collective equation as an entry."""
    return describe(eqn.prim.name, eqn.invars[0].aval, eqn.params, eqn.source, within)


def describe(
    kind: str, aval: ShapedArray, given: dict[str, Any], source: Source, within: str = ""
) -> Entry:
    """A collective, be it an equation or not, as an entry."""
    params = dict(given)
    axes = ", ".join(map(axis_text, params.pop("axes")))
    options = [f"{k}={_option(v)}" for k, v in sorted(params.items()) if v is not None]
    dims = ",".join(map(str, aval.shape))
    dtype = aval.short().partition("[")[0]
    return Entry(
        kind=kind,
        dtype=dtype,
        shape=f"[{dims}]",
        axes=axes,
        options=" ".join(options),
        within=within,
        source=source.short,
        operand=source.operand,
    )


def axis_text(name: Any) -> str:
    """An axis name as all ranks write it; the names of unnamed axes are objects of one process."""
    return repr(name) if isinstance(name, (str, int, tuple)) else "an unnamed axis"


def _option(value: Any) -> str:
    if isinstance(value, tuple) and all(isinstance(v, tuple) for v in value):
        joined = ">" if all(len(v) == 2 for v in value) else ","
        return ";".join(joined.join(map(str, v)) for v in value)
    return str(value)


def collectives(jaxpr: Jaxpr | ClosedJaxpr, within: str = "") -> Iterator[tuple[Eqn, str]]:
    """Every collective of a jaxpr in the order of the program, with the control flow around it."""
    for eqn in jaxpr.eqns:
        if is_collective(eqn):
            yield eqn, within
            continue
        for k, (name, inner) in enumerate(subjaxprs(eqn.params)):
            here = _place(eqn, name, k)
            yield from collectives(inner, ", ".join(filter(None, (here, within))))


def is_collective(eqn: Eqn) -> bool:
    """Whether an equation makes devices meet; a cast of types does not."""
    return eqn.prim.members is not None and eqn.prim.name != "pvary"


def _place(eqn: Eqn, name: str, k: int) -> str:
    if eqn.prim.name == "scan":
        return f"in a loop of {eqn.params['length']} rounds at {eqn.source.short}"
    if eqn.prim.name == "while":
        part = "condition" if name == "cond_jaxpr" else "body"
        return f"in the {part} of the while_loop at {eqn.source.short}"
    if eqn.prim.name == "cond":
        return f"in branch {k} of the cond at {eqn.source.short}"
    return ""


# ---- the schedule of a program -----------------------------------------------------------------


@record
class Schedule:
    """A rank's description of a program: text only, so that it can travel.

    `entries` are the collectives that the user wrote, `exchanges` those of the compiler;
    `arguments` are names and types, as one device sees them. Of a program that the compiler made
    of one for one device, `code` stands for all equations; `equations` are their lines and sources,
    for readers.
    """

    name: str
    caller: str
    mesh: str
    arguments: tuple[tuple[str, str], ...]
    entries: tuple[Entry, ...]
    exchanges: tuple[Entry, ...]
    code: str = ""
    equations: tuple[tuple[str, str], ...] = ()

    @property
    def program(self) -> str:
        """The program's name and the place of its first call."""
        return f"{self.name} (called at {self.caller})"

    @property
    def beginning(self) -> str:
        """The program's first collective as the user wrote it, for ranks that do not compile it."""
        first = next(iter(self.entries or self.exchanges), None)
        return f"which begins with {first}" if first else ""

    @property
    def law(self) -> str:
        """The text that must be the same on all ranks."""
        shapes = [aval for _, aval in self.arguments]
        exchanged = [*map(repr, self.entries), *map(repr, self.exchanges)]
        return "\n".join([self.mesh, self.code, *shapes, *exchanged])

    @property
    def texts(self) -> Any:
        """All that errors may show of it and ranks must agree about."""
        return replace(self, code="").law, [text for text, _ in self.equations]

    @property
    def digest(self) -> int:
        """64 bits that stand for the law."""
        return digest_of(self.law.encode())


def order_of(
    traced: ClosedJaxpr,
    final: ClosedJaxpr,
    name: str,
    caller: str,
    mesh: str,
    layouts: Sequence[str] = (),
) -> tuple[Schedule, dict[Eqn, Origin]]:
    """The schedule of a program, and the origin of each collective of the optimised program.

    `traced` holds the collectives as the user wrote them, `final` those of the compiler. `layouts`
    says how arguments are laid out, where that is no part of the code.
    """
    jaxpr = traced.jaxpr
    hoisted = len(jaxpr.invars) - len(jaxpr.arg_names)
    names = [f"a value from outside, number {k}" for k in range(hoisted)] + list(jaxpr.arg_names)
    avals = [v.aval.update(weak_type=False, vma=frozenset()).short() for v in jaxpr.invars]
    if len(layouts) == len(avals):
        pairs = zip(avals, layouts, strict=True)
        avals = [f"{aval} on each device, laid out by {text}" for aval, text in pairs]
    found = list(collectives(final))
    entries = _named(list(collectives(traced)), jaxpr, jaxpr.arg_names)
    schedule = Schedule(
        name=name,
        caller=caller,
        mesh=mesh,
        arguments=tuple(zip(names, avals, strict=True)) if hoisted >= 0 else (),
        entries=entries,
        # Ranks compare these texts at each call, so they hold only facts that must agree.
        exchanges=tuple(
            replace(entry, argument="") for entry in _named(found, final.jaxpr, jaxpr.arg_names)
        ),
    )
    digest, program = schedule.digest, schedule.program
    origins = {
        eqn: Origin(str(entry), program, digest, k, entry.source, entry.operand)
        for k, ((eqn, _), entry) in enumerate(zip(found, schedule.exchanges, strict=True))
    }
    return schedule, origins


def needed(whole: ClosedJaxpr) -> ClosedJaxpr:
    """The equations that the results depend on: others, such as prints, may be one rank's own."""
    used = [True] * len(whole.jaxpr.outvars)
    return ClosedJaxpr(dce(whole.jaxpr, used, keeps_effects=False)[0], whole.consts)


def with_equations(schedule: Schedule, whole: ClosedJaxpr) -> Schedule:
    """The schedule with the lines of the program for one device that the compiler made it of."""
    jaxpr, names = needed(whole).jaxpr, Names()
    for var in (*jaxpr.constvars, *jaxpr.invars):
        names(var)
    lines = [
        (line, eqn.source.short)
        for eqn in jaxpr.eqns
        for line in format_eqn(eqn, names).split("\n")
    ]
    results = f"in ({', '.join(map(names, jaxpr.outvars))})"
    return replace(schedule, equations=(*lines, (results, schedule.caller)))


def _argument_names(jaxpr: Jaxpr, arguments: Sequence[str]) -> dict[Any, str]:
    """The variables that are made of one argument alone, with the argument's name."""
    last = jaxpr.invars[len(jaxpr.invars) - len(arguments) :]
    names: dict[Any, str] = dict(zip(last, arguments, strict=True))
    for eqn in jaxpr.eqns:
        read = [v for v in eqn.invars if isinstance(v, Var)]
        if len(read) == 1 and read[0] in names:
            names.update(dict.fromkeys(eqn.outvars, names[read[0]]))
    return names


def _arguments(jaxpr: Jaxpr) -> set[Any]:
    """The variables that are arguments as they were given, but for their type and shape."""
    found: set[Any] = set(jaxpr.invars)
    for eqn in jaxpr.eqns:
        if eqn.prim.name in ("pvary", "reshape"):
            found.update(
                new for old, new in zip(eqn.invars, eqn.outvars, strict=True) if old in found
            )
    return found


def _named(
    listed: Sequence[tuple[Eqn, str]], jaxpr: Jaxpr, arguments: Sequence[str]
) -> tuple[Entry, ...]:
    """The entries, known by the arguments that they reduce, if by nothing else.

    Ranks must agree about that only where entries could be taken for each other without it.
    """
    given, whole = _argument_names(jaxpr, arguments), _arguments(jaxpr)
    entries = [entry_of(eqn, within) for eqn, within in listed]
    times = containers.Counter(entries)
    named = []
    for entry, (eqn, _) in zip(entries, listed, strict=True):
        argument = None if entry.operand else given.get(eqn.invars[0])
        if argument is not None:
            decides = times[entry] > 1 and eqn.invars[0] in whole
            entry = replace(entry, **{"operand" if decides else "argument": argument})
        named.append(entry)
    return tuple(named)


def agree(world: CheckedCommunicator, schedule: Schedule, whole: ClosedJaxpr | None = None) -> None:
    """Compare a program with the other ranks'; a difference raises the same error on all.

    `whole` is the program for one device that the compiler made it of, if it did.
    """
    if not world.compare(schedule.digest, Origin(schedule.beginning, schedule.program)):
        told = schedule if whole is None else with_equations(schedule, whole)
        schedules = world.all_gather_object(told)
        # A code may differ in what no text shows, such as the order of a set: no error of the user.
        if any(s.law != told.law and s.texts != told.texts for s in schedules):
            raise difference(schedules)


# ---- differences -------------------------------------------------------------------------------


def difference(schedules: Sequence[Schedule]) -> CollectiveError:
    """The error for ranks whose programs differ; `schedules[r]` is that of rank r."""
    sides: dict[str, list[int]] = {}
    for rank, schedule in enumerate(schedules):
        sides.setdefault(schedule.law, []).append(rank)
    groups = list(sides.values())
    first = [schedules[ranks[0]] for ranks in groups]
    same = len({s.name for s in first}) == 1
    what = first[0].program if same else "what to run"
    # Other arguments or collectives make other equations: these count where nothing else differs.
    found = list(_findings(groups, first))
    found = found or list(_equation_findings(groups, [s.equations for s in first]))
    head = f"ranks disagree about {what}; nothing of it has run."
    diff = "\n".join(found)
    if "collectives" in config.debug:
        shown, more = diff, ""
    else:
        causes = [] if same else found[1:2]
        causes += [text for text in found[1:] if text.startswith("argument ")][:1]
        shown = "\n".join([found[0], *causes])
        rest = len(found) - 1 - len(causes)
        more = (
            f"\n{rest} more difference{'s' * (rest > 1)}: error.diff has all, and with "
            "SPMD_DEBUG=collectives the error shows them."
            if rest
            else ""
        )
    advice = (
        "Every rank must trace the same program: look for `if rank == ...`, sets or unordered "
        "files that order the calls, and arguments whose shapes depend on the rank's data."
    )
    if found[0].startswith("line "):
        advice += (
            " What a rank knows alone is a constant of its program: pass it as an argument, or ask "
            "lax.axis_index."
        )
    if _differ_in_layout(first):
        advice += " Lay an argument out alike on all ranks: device_put(x, sharding)."
    return CollectiveError(f"{head}\n{shown}\n{advice}{more}", diff)


def _findings(groups: list[list[int]], first: list[Schedule]) -> Iterator[str]:
    """Each difference as a text, the most telling first."""
    if len({s.name for s in first}) > 1:
        yield _sides("the ranks call different programs", groups, [s.program for s in first])
    if len({s.mesh for s in first}) > 1:
        yield _sides("the mesh differs", groups, [s.mesh for s in first])
    users = list(_entry_findings(groups, [s.entries for s in first]))
    yield from users
    yield from _argument_findings(groups, first)
    if not users:
        for text in _entry_findings(groups, [s.exchanges for s in first]):
            yield f"after the compiler joined small collectives, {text}"


def _sides(title: str, groups: list[list[int]], texts: Sequence[str]) -> str:
    """A title and, for each different text, the ranks that say it."""
    who: dict[str, list[int]] = {}
    for ranks, text in zip(groups, texts, strict=True):
        who.setdefault(text, []).extend(ranks)
    lines = [f"  {ranks_text(sorted(ranks))}: {text}" for text, ranks in who.items()]
    return "\n".join([f"{title}:", *lines])


def _argument_findings(groups: list[list[int]], first: list[Schedule]) -> Iterator[str]:
    if len({len(s.arguments) for s in first}) > 1:
        counts = [f"{len(s.arguments)} arrays" for s in first]
        yield _sides("argument leaves differ in number", groups, counts)
        return
    for k in range(len(first[0].arguments)):
        texts = [s.arguments[k][1] for s in first]
        if len(set(texts)) > 1:
            yield _sides(f"argument {first[0].arguments[k][0]} differs", groups, texts)


def _equation_findings(
    groups: list[list[int]], lists: list[tuple[tuple[str, str], ...]]
) -> Iterator[str]:
    """The first line in which programs differ: later ones follow from it."""
    for k, lines in enumerate(zip(*lists, strict=False)):
        if len({text for text, _ in lines}) > 1:
            shown = [f"{text.strip()} at {place}" for text, place in lines]
            yield _sides(f"line {k + 1} of the program differs", groups, shown)
            return


def _differ_in_layout(first: list[Schedule]) -> bool:
    """Whether an argument is laid out in several ways; the text says after the type how."""
    rows = zip(*([text for _, text in s.arguments] for s in first), strict=False)
    return any(len({text.partition(", laid out by ")[2] for text in row}) > 1 for row in rows)


def _entry_findings(groups: list[list[int]], lists: list[tuple[Entry, ...]]) -> Iterator[str]:
    """How the lists of entries differ from those of the largest group of ranks."""
    base = max(range(len(groups)), key=lambda k: (len(groups[k]), -groups[k][0]))
    positions: dict[int, list[str]] = {}
    for k, entries in enumerate(lists):
        if k != base and entries != lists[base]:
            pair = groups[base], groups[k]
            for at, text in _pair_findings(pair, lists[base], entries):
                if text not in positions.setdefault(at, []):
                    positions[at].append(text)
    for at in sorted(positions):
        yield from positions[at]


def _pair_findings(
    ranks: tuple[list[int], list[int]], ours: tuple[Entry, ...], theirs: tuple[Entry, ...]
) -> Iterator[tuple[int, str]]:
    """The differences of two lists, aligned, with the number of the collective in the first."""
    if sorted(map(str, ours)) == sorted(map(str, theirs)):
        at = next(
            k for k, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other
        )
        title = f"the order differs from collective {at + 1} of {len(ours)} on"
        yield at, _sides(title, list(ranks), [str(ours[at]), str(theirs[at])])
        return
    # Entries that differ in a detail only are the same step of the program.
    keys = [[(e.kind, e.source, e.operand, e.within) for e in side] for side in (ours, theirs)]
    import difflib  # schedules that differ are rare

    matcher = difflib.SequenceMatcher(None, *keys, autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        common = min(b - a, d - c)
        for k in range(common):
            one, other = ours[a + k], theirs[c + k]
            if one != other:
                title = f"collective {a + k + 1} of {len(ours)} differs in {_what(one, other)}"
                yield a + k, _sides(title, list(ranks), [str(one), str(other)])
        if tag == "equal":
            continue
        for k in range(common, b - a):
            yield a + k, _missing(ranks[0], ranks[1], ours[a + k], a + k, len(ours))
        for k in range(common, d - c):
            yield b, _missing(ranks[1], ranks[0], theirs[c + k], c + k, len(theirs))


def _missing(have: list[int], lack: list[int], entry: Entry, at: int, count: int) -> str:
    return (
        f"collective {at + 1} of {count} is missing on {ranks_text(lack)}:\n"
        f"  {ranks_text(have)}: {entry}\n"
        f"  {ranks_text(lack)}: nothing"
    )


def _what(one: Entry, other: Entry) -> str:
    """The fields in which two entries differ, without those that follow from their kinds."""
    differ = [f for f in _FIELDS if getattr(one, f) != getattr(other, f)]
    if "kind" in differ:
        differ = [f for f in differ if f not in ("options", "source")]
    return _and([_FIELDS[f] for f in differ])


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
