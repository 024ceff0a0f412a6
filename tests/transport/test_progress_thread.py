"""The thread that makes exchanges: their order, their errors, and what a failed program leaves."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from spmd.transport import progress_thread as module
from spmd.transport.progress_thread import CalledOffError, ProgressThread


@pytest.fixture
def courier() -> Iterator[ProgressThread]:
    made = ProgressThread()
    yield made
    made.settle()


def test_transfers_are_made_in_the_order_they_were_sent(courier: ProgressThread):
    made: list[int] = []
    first = courier.send(lambda: (time.sleep(0.02), made.append(0)) and None)
    last = [courier.send(lambda k=k: made.append(k)) for k in range(1, 20)][-1]
    assert courier.await_(last)
    assert made == list(range(20)) and first.has_ended


def test_drain_waits_for_all_and_not_for_itself(courier: ProgressThread):
    made: list[bool] = []

    def move() -> None:
        courier.drain()  # as each call of a communicator does
        made.append(courier.is_here)

    courier.send(move)
    courier.send(move)
    courier.drain()
    assert made == [True, True] and not courier.is_here


def test_what_is_sent_behind_an_error_is_not_begun(courier: ProgressThread):
    made: list[int] = []
    error = ValueError("the peer is gone")

    def fail() -> None:
        raise error

    wrong, behind = courier.send(fail), courier.send(lambda: made.append(1))
    assert courier.await_(behind)
    assert wrong.error is error and behind.error is error and made == []
    courier.settle()  # as the program does that raises it
    again = courier.send(lambda: made.append(2))
    assert courier.await_(again) and again.error is None and made == [2]


def test_a_failed_program_calls_off_what_waits_for_others(courier: ProgressThread, monkeypatch):
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.05)

    def wait_for_ever() -> None:
        while True:
            courier.check()
            time.sleep(0.001)

    transfer = courier.send(wait_for_ever)
    courier.settle()
    assert transfer.has_ended and isinstance(transfer.error, CalledOffError)
    after = courier.send(courier.check)
    assert courier.await_(after) and after.error is None


def test_another_thread_is_never_called_off(courier: ProgressThread):
    courier._called_off = True
    courier.check()
    courier._called_off = False


def test_waiting_can_end_before_the_transfer(courier: ProgressThread):
    go_on = threading.Event()
    transfer = courier.send(lambda: go_on.wait() and None)
    assert not courier.await_(transfer, 0.01)
    go_on.set()
    assert courier.await_(transfer)
