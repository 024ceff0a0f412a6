"""What a guard finds out about a process without that process's help."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.supervise.inspection import (
    PAGE,
    STACK_SIGNAL,
    Subject,
    described,
    ended_by_kernel,
    main_thread,
    out_of_memory_kills,
    qualified,
)
from launch.supervise.locations import loads_data, place_of, rank_text

STACKS = Path(__file__).resolve().parents[3] / "spmd" / "base" / "stack_dump.py"
PROGRAM = f"""
import ctypes, os, runpy, sys, time
runpy.run_path({str(STACKS)!r})  # what `import spmd` does first

class Loader:
    def __next__(self):
        how = sys.argv[1]
        if how == "native":  # sleeps in C, and keeps the interpreter's lock
            print("slept", ctypes.PyDLL(None).usleep(4_000_000), flush=True)
        elif how == "write":  # blocks as soon as the pipe is full
            print("wrote", os.write(os.pipe()[1], bytes(1 << 20)), flush=True)
        else:
            time.sleep(60)

print("ready", flush=True)
next(Loader())
"""


@pytest.fixture
def start(tmp_path: Path):
    """`start(how)` runs the program and gives it and its `Subject`."""
    started = []

    def run(how: str, watched: bool = True):
        (tmp_path / "work.py").write_text(PROGRAM)
        stacks = str(tmp_path / "stacks")
        environ = os.environ | ({"SPMD_STACKS": f"{STACK_SIGNAL}:{stacks}"} if watched else {})
        process = subprocess.Popen(
            [sys.executable, str(tmp_path / "work.py"), how],
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        return process, Subject(process.pid, "", stacks)

    yield run
    for process in started:
        process.kill()
        process.communicate()


def wanted(how: str) -> int:
    lines = PROGRAM.splitlines()
    mark = {"native": "usleep", "write": "os.write", "python": "time.sleep(60)"}[how]
    return next(n for n, line in enumerate(lines, 1) if mark in line)


@pytest.mark.parametrize("how", ["python", "native", "write"])
def test_the_stack_of_a_rank_that_cannot_answer(start, tmp_path: Path, how: str):
    process, subject = start(how)
    found = subject.look()
    assert found["state"] == "S" and not found["tracer"]
    file = str(tmp_path / "work.py")
    assert found["stack"][0] == [file, wanted(how), "Loader.__next__"]
    assert found["stack"][-1][2] == "<module>"
    assert place_of(found["stack"]) == f"work.py:{wanted(how)} in Loader.__next__"
    assert loads_data(found["stack"])
    if how == "native":  # the question did not shorten the sleep, which returns 0 when it is whole
        assert process.stdout.readline() == "slept 0\n"
    else:  # nor did it end the write
        assert process.poll() is None


def test_a_process_that_does_not_listen_is_not_killed_by_the_question(start):
    process, subject = start("python", watched=False)
    assert subject.look()["stack"] == [] or subject.look()["stack"][0][2].endswith("__next__")
    assert process.poll() is None


def test_a_stopped_process(start):
    process, subject = start("python")
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(0.1)
    found = subject.look()
    assert (found["state"], found["stack"], found["tracer"]) == ("T", [], "")


def test_a_process_that_is_gone():
    process = subprocess.Popen(["true"])
    process.wait()
    found = Subject(process.pid).look()
    assert found["state"] == "?" and found["stack"] == []
    assert ended_by_kernel(process.pid, out_of_memory_kills()) == ""


def test_the_main_thread_among_others():
    text = """\
Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 5 in wait
  File "/usr/lib/python3.11/threading.py", line 9 in _bootstrap

Current thread 0x00007f2 (most recent call first):
  <no Python frame>

Thread 0x00007f3 (most recent call first):
  File "/home/me/a b.py", line 3 in f
  File "/home/me/a b.py", line 7 in <module>
"""
    assert main_thread(text) == [["/home/me/a b.py", 3, "f"], ["/home/me/a b.py", 7, "<module>"]]
    assert main_thread("") == [] and main_thread("nonsense\n") == []


def test_names_of_methods_come_from_the_source(tmp_path: Path):
    file = tmp_path / "a.py"
    file.write_text("class A:\n    def f(self):\n        def g():\n            pass\n        g()\n")
    assert qualified(str(file), 4, "g")[2] == "A.f.g"
    assert qualified(str(file), 5, "f")[2] == "A.f"
    assert qualified(str(file), 5, "other")[2] == "other"  # the file has changed since
    assert qualified(str(tmp_path / "none.py"), 1, "f")[2] == "f"


def test_a_page_that_is_being_written(tmp_path: Path):
    path = tmp_path / "rank-0.flight"
    subject = Subject(os.getpid(), str(path))
    assert subject.pulse() is None
    path.write_bytes(b"short")
    assert subject.pulse() is None
    words = [0, 1, os.getpid(), 0, 2, 41, 0, 4, time.monotonic_ns() - 2_000_000_000, 3, 118, 0]
    path.write_bytes(struct.pack("<13q", *words, 0))
    page = subject.pulse()
    assert (page["begun"], page["phase"], page["step"]) == (41, 4, 118)
    assert 2.0 <= page["age"] < 30.0
    assert subject.pulse() is None  # nothing new
    assert described(PAGE.unpack(path.read_bytes()))["called"] == 3


def test_ranks_in_words():
    assert rank_text([3]) == "rank 3"
    assert rank_text([2, 0]) == "ranks 0, 2"
    assert rank_text(range(20)).endswith("11, ...")
