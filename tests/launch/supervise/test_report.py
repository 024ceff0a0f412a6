"""Who failed first, from how the ranks ended."""

from __future__ import annotations

from dataclasses import replace

from launch.supervise.report import (
    Ending,
    first_failure,
    lines,
    quitters,
    read_traceback,
    summary,
    traceback_in,
)
from launch.supervise.stall import Call


def raised(
    rank: int, time: float, secondary: bool = False, exception: str = "ValueError"
) -> Ending:
    report = {
        "rank": rank,
        "time": time,
        "secondary": secondary,
        "exception": exception,
        "message": "no\nmore",
        "line": "train.py:7",
        "traceback": "Traceback (most recent call last):\nValueError: no",
    }
    return Ending(rank, 1, False, time, report)


def test_a_cause_comes_before_a_victim_that_ended_earlier():
    endings = [raised(0, 1.0, secondary=True), raised(1, 2.0), Ending(2, -15, True, 0.5)]
    assert first_failure(endings).rank == 1


def test_the_first_of_several_causes():
    assert first_failure([raised(0, 3.0), raised(1, 2.0), raised(2, 4.0)]).rank == 1


def test_nobody():
    assert first_failure([Ending(0, 0), Ending(1, 0)]) is None
    assert lines([Ending(0, 0)], [], "") == []


def test_a_signal_is_named_and_gives_a_shells_code():
    ending = Ending(1, -11)
    assert (ending.cause(), ending.exit_code) == ("was killed by SIGSEGV", 139)


def test_the_report_ends_with_the_whole_story_in_one_line():
    endings = [Ending(0, 0), raised(1, 2.0), raised(2, 1.0, secondary=True), Ending(3, None)]
    endings[1].host, endings[1].device, endings[1].step = "node7", "cpu:1", 118
    assert lines(endings, ["unused"], "r1 | ") == [
        "spmdrun: rank 0: finished",
        "spmdrun: rank 2: stopped by that failure",
        "spmdrun: rank 3: ended with the job",
        "r1 | Traceback (most recent call last):",
        "r1 | ValueError: no",
        "spmdrun: rank 1 (node7, cpu:1) raised ValueError at train.py:7 in step 118: no; "
        "rank 2 was waiting at train.py:7",
    ]
    shown = lines(endings, ["unused"], "r1 | ", lambda body: body[-1] == "ValueError: no")
    assert not [line for line in shown if "r1 | " in line] and len(shown) == 4


def test_the_last_line_names_the_collective_in_which_others_waited():
    call = Call("psum", "/home/me/train.py:88", 0, 41, (0, 1, 2, 3))
    endings = [raised(r, 1.0, secondary=True) for r in range(4)]
    for ending in endings:
        ending.last = call
    endings[1] = Ending(1, -9, False, 0.2, why="out of memory", last=replace(call, done=True))
    assert summary(first_failure(endings), endings) == (
        "rank 1 was killed by SIGKILL (out of memory) after psum train.py:88; "
        "ranks 0, 2, 3 were waiting in psum train.py:88"
    )


def test_ranks_that_agree_on_an_error_share_the_line():
    endings = [raised(r, 1.0 + r) for r in range(3)]
    assert lines(endings, [], "")[-1] == (
        "spmdrun: ranks 0, 1, 2 raised ValueError at train.py:7: no"
    )


def test_without_a_report_the_traceback_is_found_in_what_was_printed():
    tail = [
        "Traceback (most recent call last):",
        "old",
        "fine",
        "Traceback (most recent call x",
        "b",
    ]
    assert traceback_in(tail) == tail[3:]
    assert traceback_in([str(k) for k in range(100)]) == [str(k) for k in range(75, 100)]


# ---- ranks that left, and programs that raised before spmd was there -----------------------------

WAITS = Call("psum", "/home/me/train.py:88", 0, 41, (0, 1, 2))
DONE = Call("psum", "/home/me/train.py:88", 0, 40, (0, 1, 2), done=True)


def test_a_rank_that_left_is_named_where_the_others_only_waited():
    endings = [raised(0, 1.0, secondary=True), Ending(1, 0, last=DONE), Ending(2, -15, last=WAITS)]
    endings[0].last = WAITS
    assert [ending.rank for ending in quitters(endings)] == [1]
    assert summary(endings[0], endings) == (
        "rank 1 left the program (exit code 0) after psum train.py:88; "
        "ranks 0, 2 were waiting in psum train.py:88"
    )


def test_a_rank_that_ended_well_is_not_blamed_for_another_cause():
    for cause in (raised(0, 1.0), Ending(0, -9, last=WAITS), Ending(0, -15, last=DONE)):
        assert quitters([cause, Ending(1, 0), raised(2, 2.0, secondary=True)]) == []
    assert quitters([Ending(0, 0), Ending(1, 0)]) == []


def test_a_traceback_on_stderr_becomes_a_report():
    tail = [
        "loading",
        "Traceback (most recent call last):",
        '  File "/home/me/train.py", line 12, in <module>',
        "    json.loads(text)",
        '  File "/usr/lib/python3.11/json/decoder.py", line 353, in raw_decode',
        "    obj, end = self.scan_once(s, idx)",
        "               ^^^^^^^^^^^^^^^^^^^^^^",
        "json.decoder.JSONDecodeError: Expecting ',' delimiter: line 1",
    ]
    found = read_traceback(tail)
    assert (found["exception"], found["line"]) == ("JSONDecodeError", "train.py:12")
    assert found["message"] == "Expecting ',' delimiter: line 1"
    assert found["traceback"].splitlines() == tail[1:]
    assert read_traceback(["no data"]) == read_traceback(tail[:3]) == {}


def test_a_rank_that_mpi_ended_in_a_collective_is_no_cause():
    endings = [Ending(0, 14, at=1.0, last=WAITS), Ending(1, -9, at=2.0, last=DONE)]
    assert first_failure(endings).rank == 1
    assert first_failure([Ending(0, 14, at=1.0, last=DONE), endings[1]]).rank == 0
