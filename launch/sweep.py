"""Removes the shared memory that the killed ranks of a job left in /dev/shm.

MPI libraries name their segments and remove them when they end in order; a killed rank does not.
Only files of this user, made since the job began, which no process has open or mapped, are removed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path("/dev/shm")
_OURS = re.compile(r"(mpich_shm_|sm_segment\.|vader_segment\.|spmd-\d)")


def sweep(since: float) -> list[str]:
    """Remove leftovers with a change time (seconds since the epoch) after `since`."""
    left = [path for path in FOLDER.glob("*") if _OURS.match(path.name) and _is_new(path, since)]
    if not left:
        return []
    # Listed before: a file made after this point is not in `left`.
    used = set(_in_use())
    removed = []
    for path in left:
        if str(path) not in used:
            path.unlink(missing_ok=True)
            removed.append(str(path))
    return removed


def _is_new(path: Path, since: float) -> bool:
    try:
        state = path.stat()
    except OSError:
        return False
    return state.st_uid == os.getuid() and state.st_ctime >= since


def _in_use() -> Iterator[str]:
    """Every file in /dev/shm that a process of this user has open or mapped."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            for line in (process / "maps").read_text().splitlines():
                _, found, name = line.partition(f"{FOLDER}/")
                if found:
                    yield f"{FOLDER}/{name}"
            for link in (process / "fd").iterdir():
                yield os.readlink(link)
        except OSError:
            continue  # it has ended, or is not ours
