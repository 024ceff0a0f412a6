"""Did what was printed name the fault: rank, line, class? And is nothing said where all is well?

The judge reads what a user reads, text; it knows no record that the tools keep for themselves.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.faults.corpus import Program

# By kind of fault, words of which one must stand in the sentence that names the culprit.
SENTENCES = {
    "mismatch": r"\w",
    "left": r"left the program",
    "raised": r"raised \w+",
    "exited": r"ended with exit code|left the program",
    "killed": r"was killed by SIG",
    "stopped": r"is stopped",
    "stuck": r"never came to|has not joined|in a callback|hangs in",
    "loading": r"is in the data loader",
    "computing": r"computes in a program|is tracing|is compiling",
    "slow": r"is slow|never came to",
    "value": r"\w+Error\b|[Nn]a[Nn]|differ",
    "static": r"\w",
    "launch": r"\w",
}
_RANKS = re.compile(r"\branks? (\d+(?:-\d+)?(?:(?:, ?| and )\d+(?:-\d+)?)*)")
_PREFIX = re.compile(r"^r[\d, -]+ \| ")
# What follows the facts of an error about ranks that differ.
_ADVICE = "Every rank must"
# What no correct program may be told.
_ALARM = re.compile(
    r"^(spmdrun|spmd)\b(?!: running as a single process).*"
    r"|.*\b(CollectiveError|PeerError|LaunchError|StaticWarning)\b.*"
)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of stderr, and when it came (seconds since the epoch)."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is missing or wrong in what was said (nothing: all right), and when it had been said."""

    wrong: tuple[str, ...]
    named_at: float | None = None

    @property
    def is_right(self) -> bool:
        """Whether the fault was named, or a correct program left in peace."""
        return not self.wrong


def ranks_in(text: str) -> set[int]:
    """All ranks that a sentence names: `rank 1`, `ranks 0, 2`, `ranks 0-2`."""
    found: set[int] = set()
    for match in _RANKS.finditer(text):
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", match[1]):
            found |= set(range(int(first), int(last or first) + 1))
    return found


def judge(program: Program, code: int, lines: Sequence[Line]) -> Verdict:
    """Compare what spmdrun printed on stderr, and its exit code, with what the program expects."""
    if not program.is_fault:
        return _judge_peace(code, lines)
    wrong = []
    if program.code is None and code == 0 and program.kind not in ("static", "launch"):
        wrong.append("exit code 0")
    if program.code is not None and code != program.code:
        wrong.append(f"exit code {code}, not {program.code}")
    text = "\n".join(line.text for line in lines)
    wrong += [f"no word of /{word}/" for word in program.words if not re.search(word, text)]
    named, more = _naming(program, lines)
    return Verdict((*wrong, *more), named)


def _judge_peace(code: int, lines: Iterable[Line]) -> Verdict:
    wrong = [f"exit code {code}"] if code else []
    alarms = (line.text for line in lines if _ALARM.match(_PREFIX.sub("", line.text)))
    alarm = next(alarms, None)
    if alarm is not None:
        wrong.append(f"false alarm: {alarm[:120]}")
    return Verdict(tuple(wrong))


def _naming(program: Program, lines: Sequence[Line]) -> tuple[float | None, list[str]]:
    """When each culprit had been named with its line and class, and what was never said."""
    wrong = []
    times = []
    faults = _places(program, "fault")
    sentence = re.compile(SENTENCES[program.kind])
    for rank in program.culprits:
        said = [
            line for line in lines if rank in ranks_in(line.text) and sentence.search(line.text)
        ]
        if not said:
            wrong.append(f"rank {rank} is not named as {program.kind}")
            continue
        there = [line for line in said if _shows(line.text, faults)] if faults else said
        there = there or _in_blocks(program, lines, faults)
        if not there:
            wrong.append(f"rank {rank} is not named at {' or '.join(faults)}")
            continue
        times.append(there[0].at)
    if not program.culprits:
        there = [line for line in lines if not faults or _shows(line.text, faults)]
        if there:
            times.append(there[0].at)
        else:
            wrong.append(f"no word of {' or '.join(faults) or 'anything'}")
    others = _places(program, "others")
    if others and not any(_shows(line.text, others) for line in lines):
        wrong.append(f"where the others were, {' or '.join(others)}, is not said")
    return (max(times) if times else None), wrong


def _in_blocks(program: Program, lines: Sequence[Line], faults: list[str]) -> list[Line]:
    """Errors with one line a side: the culprits stand alone on theirs, the place on another."""
    found = []
    for at, line in enumerate(lines):
        if "CollectiveError: " not in line.text:
            continue
        block = list(itertools.takewhile(lambda x: _ADVICE not in x.text, lines[at : at + 12]))
        alone = any(ranks_in(side.text) == set(program.culprits) for side in block)
        if alone and any(_shows(side.text, faults) for side in block):
            found.append(line)
    return found


def _places(program: Program, mark: str) -> list[str]:
    return [f"{program.file}:{number}" for number in program.lines(mark)]


def _shows(text: str, places: Iterable[str]) -> bool:
    return any(re.search(rf"{re.escape(place)}(?!\d)", text) for place in places)
