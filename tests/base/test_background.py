"""Work beside the program: its order, its threads' starts and ends, and forked children."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from spmd.base.background import Worker, is_ending, start_thread, wait_for_rest

ROOT = Path(__file__).parents[2]
PATIENCE = 60


def refuse(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("daemon", [False, True])
def test_jobs_are_done_in_their_order_by_one_thread(daemon: bool):
    worker, ended = Worker("test", daemon), threading.Event()
    done: list[tuple[int, str]] = []
    for k in range(200):
        assert worker.submit(lambda k=k: done.append((k, threading.current_thread().name)))
    assert worker.submit(ended.set) and ended.wait(PATIENCE)
    assert done == [(k, "test") for k in range(200)]


def test_jobs_of_several_threads_are_all_done():
    worker, done = Worker("test"), []

    def submit(first: int) -> None:
        for k in range(first, 2000, 4):
            assert worker.submit(lambda k=k: done.append(k))

    threads = [threading.Thread(target=submit, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    if last := worker.thread:
        last.join(PATIENCE)
    assert sorted(done) == list(range(2000)) and worker.thread is None


@pytest.mark.parametrize("daemon", [False, True])
def test_flush_waits_for_all_jobs(daemon: bool):
    worker, done = Worker("test", daemon), []
    worker.flush()  # there are none
    for k in range(100):
        assert worker.submit(lambda k=k: done.append(k))
    worker.flush()
    assert done == list(range(100))


def test_the_thread_ends_after_the_last_job_and_that_of_a_daemon_does_not():
    for daemon in (False, True):
        worker = Worker("test", daemon)
        for _ in range(2):
            gate = threading.Event()
            assert worker.submit(lambda gate=gate: gate.wait(PATIENCE))
            thread = worker.thread
            assert thread is not None and thread.daemon == daemon
            gate.set()
            thread.join(0.05 if daemon else PATIENCE)
            assert thread.is_alive() == daemon and (worker.thread is thread) == daemon


def test_a_caller_is_told_that_no_thread_can_be_started(monkeypatch):
    worker, done = Worker("test"), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert start_thread(done.set, "test") is None
        assert not worker.submit(done.set) and worker.thread is None
    assert not done.is_set()
    assert worker.submit(done.set) and done.wait(PATIENCE)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("daemon", [False, True])
def test_a_forked_child_has_no_job_of_its_parent_and_a_thread_of_its_own(daemon: bool):
    worker = Worker("test", daemon)
    begun, gate, done = threading.Event(), threading.Event(), []
    worker.submit(lambda: (begun.set(), gate.wait(PATIENCE)))
    worker.submit(lambda: done.append("parent"))
    assert begun.wait(PATIENCE)
    with worker._lock:  # as if another thread submitted
        child = os.fork()
        if child == 0:
            ended = threading.Event()
            is_new = worker.thread is None
            worker.submit(lambda: done.append("child"))
            worker.submit(ended.set)
            os._exit(0 if ended.wait(PATIENCE) and is_new and done == ["child"] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gate.set()
    ended = threading.Event()
    assert worker.submit(ended.set) and ended.wait(PATIENCE)
    assert done == ["parent"]


ENDS = """
import threading, time
from spmd.base.background import Worker, is_ending, start_thread, wait_for_rest

def work():
    while not is_ending():
        time.sleep(0.001)
    print("work", worker.submit(lambda: print("next")), other.submit(print), flush=True)

worker, other, daemon = Worker("test"), Worker("other"), Worker("daemon", daemon=True)
assert not is_ending()
daemon.submit(lambda: time.sleep(1000))
worker.submit(work)
"""


def test_the_end_of_the_program_waits_for_jobs_and_starts_no_thread():
    done = subprocess.run(
        [sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "work True False\nnext\n", "")
    assert not is_ending()


# These have their reasons, which `background.py` gives.
OTHERS = ["spmd/base/background.py", "spmd/base/stack_dump.py", "spmd/transport/threads.py"]


def test_no_other_module_starts_threads():
    found = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "spmd").rglob("*.py"))
        if "threading.Thread(" in path.read_text(encoding="utf-8")
    ]
    assert found == OTHERS


def test_wait_for_rest_returns_at_once_after_a_rest():
    last_active = time.monotonic() - 1.0
    wait_for_rest(lambda: last_active, lambda seconds: pytest.fail("it waits"), 0.5, 30.0)


def test_wait_for_rest_waits_for_what_is_left_of_a_rest():
    last_active, pauses = time.monotonic(), []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        time.sleep(seconds)

    wait_for_rest(lambda: last_active, pause, 0.05, 30.0)
    assert time.monotonic() >= last_active + 0.05
    assert all(seconds <= 0.05 for seconds in pauses)


def test_wait_for_rest_ends_when_a_pause_says_so():
    pauses = []
    wait_for_rest(time.monotonic, lambda seconds: pauses.append(seconds) or True, 10.0, 30.0)
    assert len(pauses) == 1


def test_wait_for_rest_ends_after_the_longest_wait():
    began = time.monotonic()
    wait_for_rest(time.monotonic, time.sleep, 10.0, 0.05)
    assert 0.05 <= time.monotonic() - began < 10.0
