"""Programs say in the flight record that they run: what a callback sees, and what is left after."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd.transport import flight_recorder as flight
from spmd.transport.flight_recorder import FLIGHT


@pytest.fixture
def as_one_of_two(monkeypatch: pytest.MonkeyPatch):
    """This process counts as a rank of a job of two while the test runs."""
    FLIGHT.words[flight.SIZE] = 2
    yield
    FLIGHT.words[flight.SIZE] = 1


def seen_inside() -> list[int]:
    seen: list[int] = []

    def look(x):
        seen.append(FLIGHT.words[flight.PHASE])
        return x

    shape = spmd.ShapeDtypeStruct((), np.float32)
    f = spmd.jit(lambda x: spmd.pure_callback(look, shape, x + 1) * 2)
    for _ in range(4):  # the first calls go another way than the later ones
        f(np.float32(1)).block_until_ready()
    return seen


def test_a_program_is_a_phase_of_its_own(as_one_of_two):
    before, since = FLIGHT.words[flight.PROGRAMS], FLIGHT.words[flight.SINCE]
    assert seen_inside() == [flight.PROGRAM] * 4
    assert FLIGHT.words[flight.PHASE] == flight.HOST
    assert FLIGHT.words[flight.PROGRAMS] >= before + 4
    assert FLIGHT.words[flight.SINCE] > since


def test_a_single_process_does_not_read_the_clock():
    seen_inside()
    since = FLIGHT.words[flight.SINCE]
    f = spmd.jit(lambda x: x + 1)
    f(np.float32(1))
    since = FLIGHT.words[flight.SINCE]
    for _ in range(3):
        f(np.float32(1)).block_until_ready()
    assert FLIGHT.words[flight.SINCE] == since
    assert FLIGHT.words[flight.PHASE] == flight.HOST
