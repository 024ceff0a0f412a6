"""Writes flight files word by word, without the recorder: what its layout promises to readers."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PSUM = {"kind": "psum", "dtype": "float32", "shape": [4], "axes": ["i"], "source": "/a/train.py:88"}
GATHER = {"kind": "all_gather", "dtype": "float32", "shape": [4], "source": "/a/train.py:90"}
MS = 1_000_000


def flight_bytes(
    rank: int,
    size: int,
    records: Sequence[Sequence[int]] = (),
    labels: Sequence[dict[str, Any]] = (PSUM, GATHER),
    state: int = 0,
    phase: int = 0,
    since: int = 0,
    step: int = -1,
    text: str = "",
    first: int = 0,
    pid: int = 1,
) -> bytes:
    """A file; a record is (label, group, began, completed, call), `first` records came before."""
    own = {"kind": "rank", "host": f"node{rank}", "clock": [1, 1_700_000_000 * 10**9]}
    world = {"kind": "group", "group": 0, "name": "world", "ranks": list(range(size))}
    lines = [{"id": k, **label} for k, label in enumerate((own, world, *labels))]
    table = "".join(json.dumps(line) + "\n" for line in lines).encode()
    count = first + len(records)
    magic = int.from_bytes(b"SPMDFLT1", "little")
    words = (magic, 1, pid, rank, size, count, state, phase, since, 0, step, len(table))
    page = struct.pack("<12q", *words).ljust(1024, b"\0") + text.encode()
    ring = bytearray(64 * 4096)
    for k, (label, group, began, completed, call) in enumerate(records, first):
        at = 64 * (k % 4096)
        struct.pack_into(
            "<8q", ring, at, k + 1, label + 2, 16, group, began, began, completed, call
        )
    return page.ljust(4096, b"\0") + bytes(ring) + table.ljust(512 << 10, b"\0")


def write(folder: Path, rank: int, size: int, **given: Any) -> Path:
    """The same as `rank-N.flight`."""
    path = folder / f"rank-{rank}.flight"
    path.write_bytes(flight_bytes(rank, size, **given))
    return path


def calls(*numbers: int, label: int = 0, group: int = 0, open_last: bool = False) -> list[tuple]:
    """Records of calls, a millisecond each; the last may be open."""
    last = numbers[-1] if open_last else None
    return [(label, group, n * 10 * MS, 0 if n == last else n * 10 * MS + MS, n) for n in numbers]
