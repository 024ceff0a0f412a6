"""The thread that makes exchanges: their order, their errors, and what a failed program leaves."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from spmd.transport import progress_thread as module
from spmd.transport.progress_thread import CalledOffError, ProgressThread


@pytest.fixture
def progress() -> Iterator[ProgressThread]:
    made = ProgressThread()
    yield made
    made.settle()


def test_transfers_are_made_in_the_order_they_were_sent(progress: ProgressThread):
    made: list[int] = []
    first = progress.send(lambda: (time.sleep(0.02), made.append(0)) and None)
    last = [progress.send(lambda k=k: made.append(k)) for k in range(1, 20)][-1]
    assert progress.await_(last)
    assert made == list(range(20)) and first.has_ended


def test_drain_waits_for_all_and_not_for_itself(progress: ProgressThread):
    made: list[bool] = []

    def move() -> None:
        progress.drain()  # as each call of a communicator does
        made.append(progress.is_here)

    progress.send(move)
    progress.send(move)
    progress.drain()
    assert made == [True, True] and not progress.is_here


def test_transfers_behind_a_failed_one_are_not_begun(progress: ProgressThread):
    made: list[int] = []
    error = ValueError("the peer is gone")

    def fail() -> None:
        raise error

    wrong, behind = progress.send(fail), progress.send(lambda: made.append(1))
    assert progress.await_(behind)
    assert wrong.error is error and behind.error is error and made == []
    progress.settle()  # as the program does that raises it
    again = progress.send(lambda: made.append(2))
    assert progress.await_(again) and again.error is None and made == [2]


def test_a_failed_program_calls_off_what_waits_for_others(progress: ProgressThread, monkeypatch):
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.05)

    def wait_for_ever() -> None:
        while True:
            progress.check()
            time.sleep(0.001)

    transfer = progress.send(wait_for_ever)
    progress.settle()
    assert transfer.has_ended and isinstance(transfer.error, CalledOffError)
    after = progress.send(progress.check)
    assert progress.await_(after) and after.error is None


def test_another_thread_is_never_called_off(progress: ProgressThread, monkeypatch):
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.05)
    called_off, checked = threading.Event(), threading.Event()

    def transfer() -> None:
        try:
            while True:
                progress.check()
                time.sleep(0.001)
        except CalledOffError:
            called_off.set()
            assert checked.wait(60)
            raise

    sent = progress.send(transfer)
    settling = threading.Thread(target=progress.settle)
    settling.start()
    assert called_off.wait(60)
    progress.check()
    checked.set()
    settling.join(60)
    assert isinstance(sent.error, CalledOffError)


def test_waiting_can_end_before_the_transfer(progress: ProgressThread):
    go_on = threading.Event()
    transfer = progress.send(lambda: go_on.wait() and None)
    assert not progress.await_(transfer, 0.01)
    go_on.set()
    assert progress.await_(transfer)


def test_without_a_thread_a_transfer_is_made_when_it_is_sent(progress: ProgressThread, monkeypatch):
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def fail() -> None:
        raise error

    def move() -> None:
        progress.drain()  # as each call of a communicator does
        made.append(progress.is_here)

    made: list[bool] = []
    error = ValueError("the peer is gone")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            transfer = progress.send(
                lambda: (progress.drain(), made.append(progress.is_here)) and None
            )
            assert transfer.has_ended and transfer.error is None
        wrong, behind = progress.send(fail), progress.send(lambda: made.append(True))
        assert wrong.error is error and behind.error is error and made == [False, False]
        progress.settle()
    transfer = progress.send(move)
    assert progress.await_(transfer) and transfer.error is None and made == [False, False, True]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_in_a_forked_child_nothing_is_in_flight(progress: ProgressThread):
    go_on, made = threading.Event(), []
    transfer = progress.send(lambda: go_on.wait() and None)
    with progress._lock:  # as if another thread sent something
        child = os.fork()
        if child == 0:
            progress.drain()
            is_made = progress.await_(progress.send(lambda: made.append(1)), 60)
            os._exit(0 if is_made and made == [1] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    go_on.set()
    assert progress.await_(transfer)
