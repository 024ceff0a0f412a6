"""Looks at a rank from outside: its flight page, the kernel's and Python's reports.

Nothing here needs the rank's help, so it works while the rank hangs in native code, sleeps in the
kernel or is stopped by a debugger. The guard uses it, on the rank's own host.
"""

from __future__ import annotations

import ast
import ctypes
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

# A real-time signal: neither Python nor any MPI uses one.
STACK_SIGNAL = int(signal.SIGRTMIN) + 7
SECONDS_FOR_STACKS = 1.0
SECONDS_FOR_PY_SPY = 10.0

# The first words of a flight page (spmd/transport/flight_recorder.py).
PAGE = struct.Struct("<13q")
PID, BEGUN, STATE, PHASE, SINCE, CALLED, STEP, LOST = 2, 5, 6, 7, 8, 9, 10, 12

# Larger sources are not read to find the name of a method.
MOST_SOURCE_BYTES = 1 << 20

_LIBC = ctypes.CDLL(None)
_THREAD = re.compile(r"^(Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


@dataclass(slots=True)
class Subject:
    """A rank as its guard sees it."""

    pid: int
    flight: str = ""  # the path of its flight file, which may not be there yet
    stacks: str = ""  # the file to which it writes its stacks when asked
    sample: tuple[float, float] = (0.0, 0.0)  # when, CPU seconds until then
    busy: float = 0.0  # CPU seconds a second, between the last two samples
    last_page: tuple[int, ...] = field(default=())

    def page(self) -> tuple[int, ...]:
        """The first words of its flight page, or nothing while there is none."""
        try:
            with open(self.flight, "rb") as file:
                return PAGE.unpack(file.read(PAGE.size))
        except (OSError, struct.error):
            return ()

    def pulse(self) -> dict | None:
        """The changes of its page, with ages instead of times: hosts have clocks of their own."""
        self._measure()
        page = self.page()
        if not page or page == self.last_page:
            return None
        self.last_page = page
        return described(page)

    def _measure(self) -> None:
        now, used = time.monotonic(), cpu_seconds(self.pid)
        before, used_before = self.sample
        if before and now > before:
            self.busy = (used - used_before) / (now - before)
        self.sample = now, used

    def look(self) -> dict:
        """All facts at this time: state, the awaited object, stacks, page."""
        status = _status(self.pid)
        tracer = int(status.get("TracerPid", "0") or 0)
        found = {
            "pid": self.pid,
            "state": status.get("State", "?")[:1],
            "tracer": f"{_text(f'/proc/{tracer}/comm') or 'a debugger'} (process {tracer})"
            if tracer
            else "",
            "kernel": _waits_in(self.pid),
            "busy": round(self.busy, 3),
            "stack": [],
        }
        if found["state"] not in "TtZX?":
            found["stack"] = self.stack(status)
        page = self.page()
        if page:
            found["page"] = described(page)
        return found

    def stack(self, status: dict[str, str]) -> list[list]:
        """The main thread's frames as `[file, line, function]`, the innermost first."""
        caught = int(status.get("SigCgt", "0"), 16)
        # A process that does not catch the signal, as one without spmd, would be ended by it.
        if self.stacks and caught >> (STACK_SIGNAL - 1) & 1:
            text = _ask_for_stacks(self.pid, self.stacks)
            if text:
                return [qualified(*frame) for frame in main_thread(text)]
        return _by_py_spy(self.pid)


def described(page: tuple[int, ...]) -> dict:
    """A flight page's words by name."""
    since = page[SINCE]
    return {
        "pid": page[PID],
        "begun": page[BEGUN],
        "state": page[STATE],
        "phase": page[PHASE],
        "age": max(0.0, time.monotonic() - since / 1e9) if since else 0.0,
        "called": page[CALLED],
        "step": page[STEP],
    }


# ---- the kernel's view ---------------------------------------------------------------------------


def _text(path: str | Path) -> str:
    """The text of one of the kernel's files; empty where there is none to read."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def _status(pid: int) -> dict[str, str]:
    words = (line.partition(":") for line in _text(f"/proc/{pid}/status").splitlines())
    return {name: value.strip() for name, _, value in words}


def _waits_in(pid: int) -> str:
    """The kernel function in which its main thread sleeps, as far as the kernel tells."""
    where = _text(f"/proc/{pid}/wchan")
    if where not in ("", "0"):
        return where
    top = _text(f"/proc/{pid}/stack").partition("\n")[0]
    return top.split("] ")[-1].partition("+")[0]


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used so far; 0 if it is gone."""
    words = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if not words:
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def ended_by_kernel(pid: int, kills_before: int) -> str:
    """The kernel's reason to kill a process, if memory was it and the kernel tells."""
    if out_of_memory_kills() > kills_before:
        return "out of memory: the kernel's killer struck in this memory group"
    try:
        said = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=2).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "out of memory, says the kernel's log" if f"Killed process {pid} " in said else ""


def out_of_memory_kills() -> int:
    """How often the kernel has killed for memory in this process's memory group."""
    kills = 0
    for line in _text("/proc/self/cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        root = "memory" if "memory" in kinds.split(",") else "" if not kinds else None
        if root is None:
            continue
        file = "memory.oom_control" if root else "memory.events"
        within = Path("/sys/fs/cgroup", root)
        text = _text(within / path.lstrip("/") / file) or _text(within / file)
        kills += sum(int(n) for n in re.findall(r"^oom_kill (\d+)", text, re.M))
    return kills


# ---- Python's view -------------------------------------------------------------------------------


def _ask_for_stacks(pid: int, path: str) -> str:
    """Make the process write its stacks, and return them."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            word, _, listener = file.readline().partition(" ")
        before = os.path.getsize(path)
        # To a thread that waits for nothing else: a signal would end a sleep of another.
        if word != "listener" or _LIBC.tgkill(pid, int(listener), STACK_SIGNAL):
            return ""
    except (OSError, ValueError, AttributeError):
        return ""
    size, deadline = before, time.monotonic() + SECONDS_FOR_STACKS
    while time.monotonic() < deadline:
        time.sleep(0.02)
        now = os.path.getsize(path)
        if now > before and now == size:
            break  # it has stopped writing
        size = now
    with open(path, encoding="utf-8", errors="replace") as file:
        file.seek(before)
        return file.read()


def main_thread(text: str) -> list[list]:
    """The frames of the main thread in a text of faulthandler's."""
    threads: list[list[list]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif (frame := _FRAME.match(line)) and threads:
            threads[-1].append([frame[1], int(frame[2]), frame[3]])
    threads = [frames for frames in threads if frames]
    # The program's own file is the outermost frame of one thread only; faulthandler lists it last.
    whole = [frames for frames in threads if frames[-1][2] in ("<module>", "_run_module_as_main")]
    return (whole or threads or [[]])[-1]


def qualified(file: str, line: int, function: str) -> list:
    """The frame with its function's name as `DataLoader.__next__`, where the source tells."""
    try:
        if os.path.getsize(file) > MOST_SOURCE_BYTES:
            return [file, line, function]
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return [file, line, function]
    names: list[str] = []
    inside: ast.AST | None = tree
    while inside is not None:
        around = (d for d in _definitions(inside) if d.lineno <= line <= (d.end_lineno or d.lineno))
        inside = found = next(around, None)
        if found is not None:
            names.append(found.name)
    return [file, line, ".".join(names) if names and names[-1] == function else function]


def _definitions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef]:
    """The functions and classes inside a node, not those inside of them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            yield child
        else:
            yield from _definitions(child)


def _by_py_spy(pid: int) -> list[list]:
    """The stack as py-spy sees it, where it is installed and allowed."""
    tool = shutil.which("py-spy")
    if tool is None:
        return []
    try:
        said = subprocess.run(
            [tool, "dump", "--json", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=SECONDS_FOR_PY_SPY,
        ).stdout
        threads = json.loads(said)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return []
    found = [
        [[f["filename"], f["line"], f["name"]] for f in thread["frames"]]
        for thread in threads
        if thread.get("thread_name") in (None, "MainThread") and thread["frames"]
    ]
    return found[0] if found else []
