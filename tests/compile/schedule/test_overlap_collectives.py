"""Overlap: starts early, waits late, in an order that changes no value."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.compile.lower import collective
from spmd.compile.lower.lowering import lower
from spmd.compile.lower.mesh_layout import Topology
from spmd.compile.lower.steps import (
    Buffer,
    Copy,
    Host,
    Loop,
    Ref,
    Schedule,
    Step,
    accesses,
    view,
    walk,
)
from spmd.compile.passes.pipeline import PASSES_OVERLAPPED, run_passes
from spmd.compile.schedule.overlap_collectives import (
    HALVES,
    LEAST_OVERLAP_SECONDS,
    overlap_exchanges,
    overlapped,
    summary,
)
from spmd.core.aval import ShapedArray
from spmd.core.axis import AxisFrame, extend_axes
from spmd.core.rewrite import close

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "overlap.txt"
SMALL, LARGE = 1 << 10, 64 << 20  # the second is worth milliseconds


# ---- programs of steps ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Half:
    """Stands for a function of a half: which exchange, and which half."""

    name: str
    which: str


class Steps:
    """Writes steps over buffers that have names."""

    def __init__(self) -> None:
        self.buffers: dict[str, Buffer] = {}
        self.steps: list[Step] = []

    def ref(self, name: str, nbytes: int = LARGE) -> Ref:
        if name not in self.buffers:
            self.buffers[name] = Buffer("temp", nbytes, len(self.buffers))
        return Ref(self.buffers[name])

    def copy(self, target: str, source: str, nbytes: int = LARGE) -> None:
        self.steps.append(Copy(self.ref(target), self.ref(source), nbytes))

    def exchange(self, target: str, source: str, count: int = 256, grows: int = 1) -> None:
        given = ShapedArray((count,), np.dtype(np.float32))
        got = ShapedArray((count * grows,), np.dtype(np.float32))
        name = f"psum {target}"
        halves = Half(name, "start"), Half(name, "wait")
        ins, outs = (view(self.ref(source), given),), (view(self.ref(target), got),)
        step = Host(Half(name, "whole"), ins, outs, name, together=True, halves=halves)
        self.steps.append(step)

    def effect(self, source: str) -> None:
        aval = ShapedArray((), np.dtype(np.float32))
        read = (view(self.ref(source), aval),)
        self.steps.append(Host(print, read, (), f"print {source}", effects=True))


def names(steps: Sequence[Step], of: Steps) -> list[str]:
    """What is done in order: `b` is a copy to b, `start psum s` a half."""
    known = {buffer: name for name, buffer in of.buffers.items()}
    copied = [known[s.target.buffer] if isinstance(s, Copy) else "" for s in steps]
    return [s.name if isinstance(s, Host) else c for s, c in zip(steps, copied, strict=True)]


def test_an_exchange_starts_when_its_operand_is_there_and_lands_at_its_first_reader():
    p = Steps()
    p.copy("grad2", "x")
    p.copy("grad1", "grad2")
    p.exchange("sum2", "grad2")
    p.copy("new2", "sum2")
    p.exchange("sum1", "grad1")
    p.copy("new1", "sum1")
    assert names(overlapped(p.steps), p) == [
        "grad2",
        "start psum sum2",
        "grad1",
        "start psum sum1",
        "wait-for psum sum2",
        "new2",
        "wait-for psum sum1",
        "new1",
    ]


def test_work_that_needs_no_exchange_is_done_while_one_flies():
    p = Steps()
    p.exchange("sum", "x", count=1 << 20)
    p.copy("y", "sum")
    p.copy("other", "w")
    assert names(overlapped(p.steps), p) == ["start psum sum", "other", "wait-for psum sum", "y"]


def test_no_more_is_done_before_its_turn_than_covers_an_exchange():
    p = Steps()
    p.exchange("sum", "x", count=1)  # a millisecond on a slow network; a copy here takes 13
    p.copy("y", "sum")
    p.copy("other", "w")
    p.copy("another", "w")
    order = names(overlapped(p.steps), p)
    assert order == ["start psum sum", "other", "wait-for psum sum", "y", "another"]


def test_an_exchange_that_nothing_covers_is_one_step():
    p = Steps()
    p.copy("grad", "x", SMALL)
    p.exchange("sum", "grad")
    p.copy("y", "sum", SMALL)
    assert names(overlapped(p.steps), p) == ["grad", "psum sum", "y"]
    assert names(overlapped(p.steps, least_seconds=0.0), p)[1] == "start psum sum"


def test_exchanges_keep_their_order():
    p = Steps()
    p.copy("late", "x")
    p.exchange("first", "late")
    p.exchange("second", "x")  # ready before, but second in the order of all ranks
    p.copy("y", "x")
    p.copy("z", "first")
    order = names(overlapped(p.steps), p)
    assert [n for n in order if n.startswith("start")] == ["start psum first", "start psum second"]


def test_effects_are_met_by_nothing_in_flight():
    p = Steps()
    p.copy("grad", "x")
    p.exchange("sum", "grad")
    p.copy("y", "x")
    p.effect("y")
    p.copy("z", "sum")
    order = names(overlapped(p.steps), p)
    assert order.index("wait-for psum sum") < order.index("print y")


def test_results_that_are_larger_than_operands_wait_their_turn():
    p = Steps()
    for k in range(6):
        p.exchange(f"whole{k}", f"part{k}", count=1 << 21, grows=2)  # 8 MiB more each
        p.copy(f"layer{k}", f"whole{k}")
        p.copy(f"layer{k}", f"layer{k}")
    flying = most = 0
    for step in overlapped(p.steps):
        flying += isinstance(step, Host) and step.name.startswith(HALVES[0])
        flying -= isinstance(step, Host) and step.name.startswith(HALVES[1])
        most = max(most, flying)
    assert most == 2


def test_loops_are_put_in_order_inside():
    p = Steps()
    p.exchange("sum", "x")
    p.copy("other", "w")
    p.copy("y", "sum")
    loop = Loop(3, tuple(p.steps))
    (found,) = overlapped([loop])
    assert isinstance(found, Loop) and found.trips == 3
    assert names(found.body, p) == ["start psum sum", "other", "wait-for psum sum", "y"]


def test_without_exchanges_nothing_changes():
    p = Steps()
    p.copy("y", "x")
    assert overlapped(p.steps) is p.steps


# ---- any program ---------------------------------------------------------------------------------


def random_steps(seed: int) -> Steps:
    rng = random.Random(seed)
    p = Steps()
    known = ["x0", "x1"]
    for k in range(rng.randrange(3, 40)):
        source = rng.choice(known)
        # Some write over what is there, as loops and concatenations do.
        target = rng.choice(known) if rng.random() < 0.2 and source != known[0] else f"t{k}"
        what = rng.random()
        if what < 0.35 and target != source:
            p.exchange(target, source, rng.choice([1, 1 << 12, 1 << 20]), rng.choice([1, 1, 4]))
        elif what < 0.4:
            p.effect(source)
            continue
        else:
            p.copy(target, source, rng.choice([SMALL, LARGE]))
        known.append(target)
    return p


def values(steps: Sequence[Step]) -> tuple[dict[Buffer, Any], list[Any]]:
    """What is in each buffer in the end, and the exchanges and effects with what they were given.

    An exchange in flight must be met by nothing that touches its operand or writes its result.
    """
    memory: dict[Buffer, Any] = {}
    flying: dict[str, tuple[Buffer, Buffer]] = {}
    seen: list[Any] = []
    for number, step in enumerate(steps):
        read = [r.buffer for r, writes in accesses(step) if not writes]
        written = [r.buffer for r, writes in accesses(step) if writes]
        given = tuple(memory.get(b, id(b)) for b in read)
        name = step.name if isinstance(step, Host) else "copy"
        half, _, what = name.partition(" ")
        if half == HALVES[1]:
            flying.pop(what)
            continue
        for operand, result in flying.values():
            assert operand not in written and result not in (*read, *written), (number, name)
        if isinstance(step, Host):
            seen.append((what if half == HALVES[0] else name, given))
        if isinstance(step, Host) and half != HALVES[0] and flying:
            raise AssertionError(f"{name} while {list(flying)} fly")
        if half == HALVES[0]:
            flying[what] = read[0], written[0]
        for buffer in written:
            memory[buffer] = (name if half != HALVES[0] else what, given)
    assert not flying
    return memory, seen


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("least_seconds", [0.0, LEAST_OVERLAP_SECONDS])
def test_any_order_gives_the_same_values(seed: int, least_seconds: float):
    p = random_steps(seed)
    found = overlapped(p.steps, least_seconds)
    memory, seen = values(p.steps)
    assert values(found) == (memory, seen)
    counts = [sum(isinstance(s, Copy) for s in steps) for steps in (p.steps, found)]
    assert counts[0] == counts[1]


# ---- a training step -----------------------------------------------------------------------------


class Alone:
    """Stands for `HostCollective`: no other members are needed here."""

    is_watched = False
    label = 0

    def __init__(self, *_: Any) -> None:
        self.comm = None

    def run(self, *_: Any) -> None:
        raise AssertionError


class AloneAsync:
    def __init__(self, _: Any) -> None:
        pass

    start = wait = None


def test_a_training_step_is_as_the_golden_text_says(request, monkeypatch):
    monkeypatch.setattr(collective, "HostCollective", Alone)
    monkeypatch.setattr(collective, "AsyncCollective", AloneAsync)

    def loss(params: Any, x: Any) -> Any:
        for w, b in params:
            x = snp.tanh(x @ w + b)
        return snp.mean(x**2)

    def step(*flat: Any) -> list[Any]:
        *leaves, x = flat
        params = [(leaves[k], leaves[k + 1]) for k in range(0, len(leaves), 2)]
        value, gradients = spmd.value_and_grad(loss)(params, x)
        summed = lax.psum(gradients, "i")
        new = spmd.tree.map(lambda a, g: a - 0.1 * g, params, summed)
        return [lax.psum(value, "i"), *spmd.tree.leaves(new)]

    sizes = {"i": 2}
    shapes = [*itertools.chain(*[((384, 384), (384,))] * 6), (256, 384)]
    with extend_axes([AxisFrame("i", 2, "pmap")]):
        closed = close(step, [ShapedArray(s, np.float32) for s in shapes], "step")
    topology = Topology(sizes, (0, 1), 0, overlaps=True)
    lowered = lower(run_passes(closed, passes=PASSES_OVERLAPPED), topology)
    found = overlap_exchanges(lowered, 0.0)
    said = f"{found}\n" + "\n".join(summary(["psum"] * 13, found.steps)) + "\n"
    said = (
        "\n".join(line.partition(" test_overlap_collectives.py:")[0] for line in said.splitlines())
        + "\n"
    )
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text(said)
    assert said == GOLDEN.read_text()


def test_a_schedule_keeps_its_inputs_and_results():
    p = Steps()
    p.exchange("sum", "x")
    before = Schedule([p.ref("x").buffer], [], [], p.steps, [0])
    after = overlap_exchanges(before, 0.0)
    assert after.inputs is before.inputs and after.results is before.results
    assert len(list(walk(after.steps))) == 2
