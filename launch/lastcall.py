"""The last collective that a rank came to, from its flight file."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from .inspection import BEGUN, PAGE, PAGE_BYTES, STEP
from .stall import Call

_RECORDS = 4096
_RECORD = struct.Struct("<8q")
_LABELS = PAGE_BYTES + _RECORDS * _RECORD.size
_LABEL_BYTES = 11


def last_call(path: str | Path, size: int) -> Call | None:
    """Read it; None where the rank came to none, or left no file. `size` is the job's ranks."""
    try:
        data = Path(path).read_bytes()
        page = PAGE.unpack_from(data)
        labels = _labels(data, page[_LABEL_BYTES])
        for number in range(page[BEGUN], max(0, page[BEGUN] - _RECORDS), -1):
            words = _RECORD.unpack_from(data, PAGE_BYTES + (number - 1) % _RECORDS * _RECORD.size)
            seen, label, _, group, _, _, completed, call = words
            if seen != number or group == -1:
                continue  # torn, or no collective
            said = labels["label", label]
            members = labels.get(("group", group), {}).get("ranks", list(range(size)))
            return Call(
                said["kind"],
                said.get("source", ""),
                group,
                call,
                _members(members),
                _what(said),
                bool(completed),
            )
    except (OSError, struct.error, KeyError):
        pass
    return None


def last_step(path: str | Path) -> int:
    """The number of the step that the user's loop was in, or -1."""
    try:
        with open(path, "rb") as file:
            return PAGE.unpack(file.read(PAGE.size))[STEP]
    except (OSError, struct.error):
        return -1


def _labels(data: bytes, used: int) -> dict:
    found: dict = {}
    for line in data[_LABELS : _LABELS + used].splitlines():
        try:
            label = json.loads(line)
        except ValueError:
            continue  # torn: it was being written
        found["label", label["id"]] = label
        if label["kind"] == "group":
            found["group", label["group"]] = label
    return found


def _members(ranks: list[int] | str) -> tuple[int, ...]:
    """`[0, 2]` or `0-1023` as numbers."""
    if isinstance(ranks, str):
        first, _, last = ranks.partition("-")
        return tuple(range(int(first), int(last) + 1))
    return tuple(ranks)


def _what(label: dict) -> str:
    """`float32[10] over data`."""
    shape = ",".join(map(str, label.get("shape", ())))
    axes = f" over {', '.join(label['axes'])}" if label.get("axes") else ""
    return f"{label.get('dtype', '')}[{shape}]{axes}" if label.get("dtype") else axes.strip()
