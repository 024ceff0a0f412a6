"""A rank's place in a few words: from the frames of its stack, and from its last record.

The place that helps is the user's own line: frames of Python's library, of installed packages and
of spmd are only named where there is nothing else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

# `[file, line, function]`, the innermost first.
Frames = Sequence[Sequence]

_PACKAGE = str(Path(__file__).resolve().parents[2] / "spmd") + os.sep
_LIBRARY = re.compile(r"(/lib(64)?/python3|/site-packages/|/dist-packages/|^<)")
_DATA = re.compile(
    r"data_?(load|set)|loader|prefetch|(load|read|next|get|fetch)_(batch|data|shard|sample|example)"
    r"|\b__next__$",
    re.I,
)


def user_frame(frames: Frames) -> Sequence | None:
    """The innermost frame of the user's own code, else the innermost of all."""
    theirs = [f for f in frames if not _LIBRARY.search(f[0]) and not f[0].startswith(_PACKAGE)]
    return (list(theirs) or list(frames) or [None])[0]


def place_of(frames: Frames) -> str:
    """`loader.py:41 in get`, or nothing."""
    frame = user_frame(frames)
    if frame is None:
        return ""
    within = "" if frame[2] == "<module>" else f" in {frame[2]}"
    return f"{os.path.basename(frame[0])}:{frame[1]}{within}"


def loads_data(frames: Frames) -> bool:
    """Whether the stack goes through something that is called a data loader."""
    return any(_DATA.search(os.path.basename(f[0])) or _DATA.search(f[2]) for f in frames)


def in_program(frames: Frames) -> bool:
    """Whether the innermost frames are those of spmd's runtime, which runs a compiled program."""
    runtime = tuple(_PACKAGE + os.path.join("compile", part) for part in ("cpu", "native"))
    return bool(frames) and frames[0][0].startswith(runtime)


def rank_text(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 0, 2, 3`, shortened where they are many."""
    numbers = sorted(ranks)
    shown = ", ".join(map(str, numbers[:12])) + (", ..." if numbers[12:] else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"
