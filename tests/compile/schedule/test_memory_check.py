"""The law of memory plans: a value that is read after another was written over it is told."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.base.config import config
from spmd.base.errors import InternalError
from spmd.compile.schedule import memory_plan
from spmd.compile.schedule.memory_check import check_memory

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)


def late_reader(x):
    y = snp.sort(x, 0) * 2
    return y, snp.sort(y, 0) + x[::-1]


def loop(x):
    return lax.fori_loop(0, 3, lambda k, c: snp.sort(c, 0) + x, x * 0)


def until(x):
    return lax.while_loop(lambda c: c.sum() < 9, lambda c: snp.sort(c, 0)[::-1] + abs(x), x)


def branch(x):
    y = snp.sort(x, 1)
    return lax.cond(y[0, 0] > 0, lambda y: y @ x, lambda y: snp.sort(y, 0) + x, y)


def rows(x):
    return lax.scan(lambda c, row: (snp.sort(c) + row, c[::-1] * x[0]), x[1], x)[1]


PROGRAMS = late_reader, loop, until, branch, rows


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_a_donated_argument_that_is_read_later_is_told(program, platform, monkeypatch):
    """The mutant writes a result over an argument, whoever reads that afterwards."""
    settings = {"cuda_driver": "emulator", "num_cuda_devices": 4, "platform": platform}
    with ExitStack() as stack:
        for setting, value in settings.items():
            stack.enter_context(config.override(setting, value))
        spmd.jit(program, donate_argnums=0).lower(X).compile()
        monkeypatch.setattr(memory_plan, "_read_before", lambda *_: True)
        with pytest.raises(InternalError) as caught:
            spmd.jit(program, donate_argnums=0).lower(X).compile()
    text = str(caught.value)
    assert f"{program.__name__}: " in text and " reads input0 (256 bytes), over which " in text
    assert "wrote output0" in text and "test_memory_check.py:" in text


@pytest.mark.parametrize("program", [*PROGRAMS, lambda x: snp.cumsum(snp.sort(x) @ x, 0)])
def test_a_life_that_ends_too_early_is_told(program):
    """Each temporary in turn is forgotten before its last reader, whose memory others take then."""
    compiled = spmd.jit(program).lower(X).compile().executable
    schedule, told, moved = compiled.schedule, 0, 0
    for number in range(len(schedule.steps) + 40):
        plan = memory_plan.plan_lives(schedule.steps)
        temps = [b for b, life in plan.lives.items() if b.kind == "temp" and life.last > life.first]
        if number >= len(temps):
            break
        plan.lives[temps[number]].last = plan.lives[temps[number]].first
        memory_plan.place_temporaries(plan)
        # A place that nobody else has while the buffer is read harms nothing.
        moved += _is_shared(plan, temps[number], memory_plan.plan_lives(schedule.steps))
        try:
            check_memory("mutant", schedule, plan, {})
        except InternalError as error:
            assert "the memory plan is wrong" in str(error)
            told += 1
    assert told >= moved


def _is_shared(plan, buffer, lives) -> bool:
    """Whether another buffer is first written to a buffer's place before it is read last."""
    start, own = plan.offsets[buffer], lives.lives[buffer]
    return any(
        own.first < lives.lives[other].first < own.last
        and plan.aliased_into.get(other) is plan.aliased_into.get(buffer)
        and at < start + buffer.nbytes
        and start < at + other.nbytes
        for other, at in plan.offsets.items()
        if other is not buffer
    )
