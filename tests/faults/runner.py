"""Runs a program of the corpus under its launcher, and looks at what it said and what it left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.corpus import Program
from tests.faults.judge import Line, Verdict, judge

ROOT = Path(__file__).resolve().parents[2]
PLAY = str(Path(__file__).with_name("play.py"))
SHARED = Path("/dev/shm")
FOLDER = "SPMD_FAULTS_FOLDER"  # marks every process of a run, and tells it where its files belong

# Far above what any program takes, and what a busy machine adds: reached only by one that hangs.
PATIENCE = 90.0
# What a rank and a launcher may take to be gone after spmdrun has ended.
SECONDS_TO_VANISH = 8.0
# A stall is reported after half of this time without progress, and ends the job after the whole.
STALLS = ("--stall-timeout", "6")
# Correct programs get more time: on a busy machine ranks may take seconds to start.
PATIENT_STALLS = ("--stall-timeout", "20")
# Names of shared memory that MPI libraries and spmd make.
_SEGMENT = re.compile(r"mpich|sm_segment|vader_segment|spmd")


@dataclass(frozen=True, slots=True)
class Result:
    """One run: the verdict, and the text on which it rests."""

    program: Program
    verdict: Verdict
    seconds: float | None  # from the program's beginning to the culprit's name
    out: str
    err: str


def run(
    program: Program,
    options: Sequence[str] = (),
    environ: Mapping[str, str] = {},
    wrap: Callable[[list[str]], list[str]] = list,
) -> Result:
    """Run one program; `options` and `environ` are added to its own, `wrap` says where it runs."""
    # A short path: sockets live in it, and their names have an end.
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name)
        before = set(SHARED.iterdir()) if SHARED.is_dir() else set()
        own = {FOLDER: name, "TMPDIR": name, "PYTHONPATH": str(ROOT)}
        settings = {k: v for k, v in os.environ.items() if k != "SPMD_NUM_CPU_DEVICES"}
        job = subprocess.Popen(
            wrap(_command(program, options)),
            env={**settings, **own, **program.environ, **environ},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        lines, out = _read(job)
        verdict = judge(program, job.returncode, lines)
        began = _began(folder)
        wrong = [*verdict.wrong, *_left(name, before, program.launcher == "spmdrun")]
        if job.returncode == -signal.SIGKILL:
            wrong.append(f"had not ended after {PATIENCE:g} s")
    seconds = verdict.named_at - began if verdict.named_at and began else None
    text = "\n".join(line.text for line in lines)
    return Result(program, Verdict(tuple(wrong), verdict.named_at), seconds, out, text)


def _command(program: Program, options: Sequence[str]) -> list[str]:
    play = [PLAY, program.name]
    if program.launcher == "python":
        return [sys.executable, *play]
    if program.launcher == "other-mpi":
        return [sys.executable, str(Path(__file__).with_name("other_mpi.py")), *play]
    stalls = STALLS if program.is_fault else PATIENT_STALLS
    words = ["-n", str(program.ranks), *stalls, *program.options, *options, *play]
    return [sys.executable, "-m", "launch", *words]


def _read(job: subprocess.Popen[str]) -> tuple[list[Line], str]:
    """Everything the job prints, stderr with the time of each line; ends a job that hangs."""
    lines: list[Line] = []
    out: list[str] = []

    def read_lines() -> None:
        assert job.stderr is not None
        for text in job.stderr:
            lines.append(Line(time.time(), text.rstrip("\n")))

    def read_out() -> None:
        assert job.stdout is not None
        out.append(job.stdout.read())

    readers = [threading.Thread(target=f, daemon=True) for f in (read_lines, read_out)]
    for reader in readers:
        reader.start()
    try:
        job.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()
    for reader in readers:
        reader.join(SECONDS_TO_VANISH)
    for pipe, reader in zip((job.stderr, job.stdout), readers, strict=True):
        if pipe is not None and not reader.is_alive():  # else an orphan holds its other end
            pipe.close()
    return lines, "".join(out)


def _began(folder: Path) -> float | None:
    """When the last rank began with its program."""
    times = [float(path.read_text() or 0) for path in folder.glob("began-*")]
    return max(times, default=None)


# ---- what a job leaves -------------------------------------------------------------------------


def _left(folder: str, before: set[Path], supervised: bool) -> list[str]:
    """Processes and shared memory of the job that are still there, after a moment.

    Where nobody supervises, Open MPI's single processes leave their segment; it is removed here.
    """
    deadline = time.monotonic() + SECONDS_TO_VANISH
    left = _orphans(folder) + _segments(before)
    while left and supervised and time.monotonic() < deadline:
        time.sleep(0.1)
        left = _orphans(folder) + _segments(before)
    if not supervised:
        for path in set(SHARED.glob("sm_segment.*.0")) - before:
            if not _is_used(path):
                path.unlink(missing_ok=True)
        left = _orphans(folder)
    for path in Path(folder).glob("spmdrun-*"):
        left.append(f"left the folder {path.name}")
    return left


def _orphans(folder: str) -> list[str]:
    mark = f"{FOLDER}={folder}\0".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes():
                words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if words:  # a zombie has none
                    found.append(f"left a process: {words[:80]}")
        except OSError:
            continue  # it has ended, or belongs to someone else
    return found


def _segments(before: set[Path]) -> list[str]:
    """New shared memory that nobody has open: what other jobs use now is theirs."""
    if not SHARED.is_dir():
        return []
    new = [p for p in SHARED.iterdir() if p not in before and _SEGMENT.search(p.name)]
    return [f"left {path}" for path in new if not _is_used(path)] if new else []


def _is_used(path: Path) -> bool:
    """Whether a process maps a file, has it or something in it open, or its name has a live pid."""
    if any(Path("/proc", number).exists() for number in re.findall(r"\d+", path.name)):
        return True
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(path) in (process / "maps").read_text():
                return True
            if any(os.readlink(link).startswith(str(path)) for link in (process / "fd").iterdir()):
                return True
        except OSError:
            continue
    return False
