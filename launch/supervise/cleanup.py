"""Removes the shared memory that the killed ranks of a job left in /dev/shm.

MPI libraries name their segments and remove them when they end in order; a killed rank does not.
Only files of this user, made since the job began, which no process has open or mapped, are removed.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path("/dev/shm")
# Folders in which spmdrun has the ranks' flight files.
FLIGHTS = "spmdrun-flight-"
YOUNG_SECONDS = 600.0
_OURS = re.compile(r"(mpich_shm_|sm_segment\.|vader_segment\.|spmd-\d)")


def sweep(since: float) -> list[str]:
    """Remove leftovers with a change time (seconds since the epoch) after `since`."""
    left = [path for path in FOLDER.glob("*") if _OURS.match(path.name) and _changed(path) >= since]
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


def sweep_flights() -> list[str]:
    """Remove folders of flight files of jobs that are over; their guards were killed before.

    A folder whose files some process has in its memory belongs to a job that runs, perhaps one that
    was started from another host; one that is young may belong to a job that is just starting.
    """
    before = time.time() - YOUNG_SECONDS
    left = [
        path for path in FOLDER.glob(f"{FLIGHTS}*") if path.is_dir() and _changed(path) < before
    ]
    used = {os.path.dirname(name) for name in _in_use()} if left else set()
    removed = [str(path) for path in left if str(path) not in used]
    for path in removed:
        shutil.rmtree(path, ignore_errors=True)
    return removed


def _changed(path: Path) -> float:
    """The change time of a file of this user; else NaN: neither before nor after any time."""
    try:
        state = path.stat()
    except OSError:
        return math.nan
    return state.st_ctime if state.st_uid == os.getuid() else math.nan


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
