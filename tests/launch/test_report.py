"""Who failed first, from how the ranks ended."""

from __future__ import annotations

from launch.report import Ending, first_failure, lines, traceback_in


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
    assert (ending.cause(), ending.exit_code) == ("killed by SIGSEGV", 139)


def test_the_report_ends_with_the_traceback_of_the_first():
    endings = [Ending(0, 0), raised(1, 2.0), raised(2, 1.0, secondary=True), Ending(3, None)]
    assert lines(endings, ["unused"], "r1 | ") == [
        "spmdrun: rank 0: finished",
        "spmdrun: rank 2: stopped by that failure",
        "spmdrun: rank 3: ended with the job",
        "spmdrun: rank 1 failed first: ValueError at train.py:7: no",
        "r1 | Traceback (most recent call last):",
        "r1 | ValueError: no",
    ]


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
