"""Who is to blame for a job that stands still, from what is known of each rank."""

from __future__ import annotations

import dataclasses

import pytest

from launch.flight.file import (
    BREAKPOINT,
    COLLECTIVE,
    COMPILING,
    DATA,
    HOST,
    LEFT,
    PROGRAM,
    RAISED,
    TRACING,
)
from launch.supervise.stall import Call, View, explain
from launch.supervise.watchdog import Watch

PSUM = Call("psum", "/home/me/train.py:88", 0, 41, (0, 1, 2), "float32[8] over data")


def page(phase: int = HOST, state: int = 0, step: int = -1) -> dict:
    return {"pid": 7, "phase": phase, "state": state, "step": step, "age": 0.0}


def waits(rank: int, call: Call = PSUM, idle: float = 30.0) -> View:
    return View(rank, page=page(COLLECTIVE), idle=idle, last=call)


def absent(rank: int, phase: int = HOST, **look) -> View:
    look = {"state": "S", "busy": 0.0, "stack": [], **look}
    done = Call("psum", "/home/me/train.py:88", 0, 40, (0, 1, 2), done=True)
    return View(rank, page=page(phase), idle=30.0, look=look, last=done)


def test_a_rank_in_host_code():
    stack = [
        ["/usr/lib/python3.11/socket.py", 7, "readinto"],
        ["/home/me/fetch.py", 41, "get"],
        ["/home/me/train.py", 80, "<module>"],
    ]
    view = absent(1, stack=stack, kernel="wait_woken")
    verdict = explain([waits(0), view, waits(2)])
    assert verdict.lines(30.0, {1: "rank 1 (node7, cpu:1)"}) == [
        "stalled for 30 s: ranks 0, 2 wait in psum train.py:88 (float32[8] over data)",
        "  rank 1 (node7, cpu:1) never came to psum train.py:88: it is at fetch.py:41 in get, "
        "asleep in wait_woken",
        "      /usr/lib/python3.11/socket.py:7 in readinto",
        "      /home/me/fetch.py:41 in get",
        "      /home/me/train.py:80 in <module>",
    ]
    assert verdict.ending() == "ranks 0, 2 were waiting in psum train.py:88"
    assert not verdict.excused


@pytest.mark.parametrize(
    ("view", "kind", "excused"),
    [
        (absent(1), "never entered", False),
        (absent(1, stack=[["/home/me/dataset.py", 3, "__getitem__"]]), "data loader", False),
        (absent(1, DATA), "data loader", False),
        (absent(1, COMPILING, busy=0.9), "compiling", True),
        (absent(1, COMPILING, busy=0.0), "compiling", False),
        (absent(1, TRACING, busy=0.9), "compiling", True),
        (absent(1, PROGRAM, busy=0.9), "slow", False),
        (absent(1, BREAKPOINT), "breakpoint", True),
        (absent(1, state="t", tracer="gdb (process 3)", pid=7), "stopped", True),
        (absent(1, state="T", tracer="", pid=7), "stopped", False),
        (View(1, ended="was killed by SIGKILL", idle=9.0), "dead", False),
        (View(1, ended="finished", idle=9.0), "left", False),
        (View(1, ended="raised KeyError at a.py:1", idle=9.0), "raised", False),
        (View(1, page=page(state=LEFT), idle=9.0), "left", False),
        (View(1, page=page(state=RAISED), idle=9.0), "raised", False),
        (View(1, idle=9.0), "not joined", False),
        (View(1, page=page(), idle=0.1), "slow", True),
    ],
    ids=str,
)
def test_culprit_classes(view: View, kind: str, excused: bool):
    verdict = explain([waits(0), view, waits(2)])
    assert [(f.rank, f.kind) for f in verdict.findings] == [(1, kind)]
    assert verdict.excused is excused


def test_blame_follows_the_chain_of_waits():
    """Rank 0 waits for 1, which waits elsewhere for 2, which sleeps."""
    pair = Call("psum", "a.py:1", 5, 1, (0, 1))
    other = Call("psum", "a.py:2", 6, 1, (1, 2))
    verdict = explain([waits(0, pair), waits(1, other), absent(2)])
    assert [f.rank for f in verdict.findings] == [2]


def test_ranks_outside_of_the_group_are_not_to_blame():
    pair = Call("psum", "a.py:1", 5, 1, (0, 1))
    verdict = explain([waits(0, pair), absent(1), absent(2)])
    assert [f.rank for f in verdict.findings] == [1]


def test_a_closed_chain_is_a_difference():
    """Two groups entered in opposite order: nobody is absent, and nobody will come."""
    row, column = Call("psum", "a.py:1", 5, 1, (0, 1)), Call("pmax", "a.py:2", 6, 1, (0, 1))
    verdict = explain([waits(0, row), waits(1, column)])
    assert [(f.rank, f.kind) for f in verdict.findings] == [(1, "different collective")]
    assert "came to pmax a.py:2 where others came to psum a.py:1" in verdict.lines(3, {})[-1]
    assert (
        verdict.ending() == "rank 0 was waiting in psum a.py:1; rank 1 was waiting in pmax a.py:2"
    )


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_rank_that_was_stopped_in_a_collective(ahead: int):
    """It came to its call, as the others did, or to the one before theirs."""
    view = waits(1)
    view.look = {"state": "T", "tracer": "", "pid": 7}
    next_call = dataclasses.replace(PSUM, number=41 + ahead)
    verdict = explain([waits(0, next_call), view, waits(2, next_call)])
    assert [(f.rank, f.kind) for f in verdict.findings] == [(1, "stopped")]
    assert "is stopped by a signal" in verdict.findings[0].text


def test_two_rounds_of_a_loop_are_told_apart():
    verdict = explain([waits(0), waits(1, dataclasses.replace(PSUM, number=42)), waits(2)])
    (finding,) = verdict.findings
    came = "came to psum train.py:88 (call 42) where others came to psum train.py:88 (call 41)"
    assert (finding.rank, finding.text) == (1, came)


def test_nobody_waits():
    assert explain([absent(0), absent(1)]) is None


# ---- the watch ---------------------------------------------------------------------------------


class FakeJob:
    """A job whose ranks do what a test says."""

    def __init__(self, *views: View):
        self.found, self.said, self.ended, self.looks = list(views), [], None, 0

    def views(self, now: float) -> list[View]:
        return self.found

    def look_closer(self) -> None:
        self.looks += 1

    def have_looked(self) -> bool:
        return True

    def note(self, text: str) -> None:
        self.said.append(text)

    def marks(self) -> dict[int, str]:
        return {}

    def stalled(self, verdict) -> None:
        self.ended = verdict


def pass_time(watch: Watch, job: FakeJob, seconds: int) -> None:
    """Let everybody do nothing for so long."""
    for _ in range(seconds):
        watch.now = getattr(watch, "now", 100.0) + 1.0
        for view in job.found:
            view.idle += 1.0
        watch.tick(job, watch.now)


def test_a_warning_then_the_end():
    watch, job = Watch(600.0), FakeJob(waits(0, idle=0.0), absent(1), waits(2, idle=0.0))
    pass_time(watch, job, 28)
    assert not job.said and not job.looks
    pass_time(watch, job, 10)
    assert job.said[0].startswith("spmdrun: stalled for 31 s: ranks 0, 2 wait in psum train.py:88")
    assert job.said[-1].startswith("spmdrun: if nothing moves, it ends in 569 s")
    told = len(job.said)
    pass_time(watch, job, 555)
    assert len(job.said) == told and job.ended is None
    pass_time(watch, job, 20)
    assert job.ended.findings[0].kind == "never entered"


def test_a_job_that_goes_on_is_left_alone():
    watch, job = Watch(20.0), FakeJob(waits(0, idle=0.0), absent(1), waits(2, idle=0.0))
    pass_time(watch, job, 15)
    assert "stalled" in job.said[0]
    for view in job.found:
        view.idle = 0.0
    pass_time(watch, job, 3)
    assert job.said[-1] == "spmdrun: the job goes on"
    assert job.ended is None


def test_a_rank_that_compiles_has_all_the_time_it_needs():
    watch = Watch(20.0)
    job = FakeJob(waits(0, idle=0.0), absent(1, COMPILING, busy=1.0))
    pass_time(watch, job, 100)
    assert job.ended is None
    assert job.said[-1] == "spmdrun: that is no reason to end the job"
    job.found[1].look["busy"] = 0.0
    pass_time(watch, job, 70)
    assert job.ended is not None


def test_a_rank_that_has_just_compiled_gets_time_to_come():
    watch, job = Watch(20.0), FakeJob(waits(0, idle=0.0), absent(1, COMPILING, busy=0.9))
    pass_time(watch, job, 40)
    job.found[1] = absent(1)  # it runs what it has compiled
    pass_time(watch, job, 8)
    assert job.ended is None
    pass_time(watch, job, 15)
    assert job.ended is not None


def test_the_end_of_a_compilation_is_progress():
    """Also where the closer look came when the compiler waited for a processor."""
    watch, job = Watch(20.0), FakeJob(waits(0, idle=0.0), absent(1, COMPILING, busy=0.0))
    pass_time(watch, job, 19)
    assert "stalled" in job.said[0]
    job.found[1] = absent(1)
    pass_time(watch, job, 8)
    assert job.ended is None
    pass_time(watch, job, 15)
    assert job.ended is not None


def test_zero_switches_it_off():
    watch, job = Watch(0.0), FakeJob(waits(0), absent(1))
    pass_time(watch, job, 1000)
    assert job.ended is None and not job.said
