"""The helper for work in threads: what fails in one fails the test."""

from __future__ import annotations

import threading

import pytest

from tests.threads import in_threads


def test_all_have_run_at_once_when_it_returns():
    meeting, seen = threading.Barrier(3), []
    in_threads(lambda x: (meeting.wait(10), seen.append(x)), range(3))
    assert sorted(seen) == [0, 1, 2]


def test_an_error_of_a_thread_is_raised():
    with pytest.raises(ZeroDivisionError):
        in_threads(lambda x: 1 // x, [1, 0])


def test_a_thread_that_does_not_return_is_an_error():
    go = threading.Event()
    with pytest.raises(AssertionError, match="1 of 2 threads had not returned"):
        in_threads(lambda x: x or go.wait(60), [True, False], seconds=0.05)
    go.set()
