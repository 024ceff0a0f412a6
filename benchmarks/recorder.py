"""The cost of the flight recorder: the same programs with and without it, in one job.

spmdrun -n 2 -m benchmarks.recorder

Records are switched on and off in the words that native code reads, so both ways run the very same
program; blocks alternate, and the difference is that of neighbours.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.transport import flight_recorder as flight
from spmd.transport import world as bootstrap
from spmd.transport.flight_recorder import FLIGHT
from spmd.transport.shm import native_state
from spmd.transport.shm.communicator import ShmCommunicator

PAIRS = 40
STEPS = 60
COLLECTIVES = 2000
LAYERS = ((64, 128), (128, 128), (128, 10))


def main() -> None:
    """Print the figures of rank 0."""
    world = bootstrap.world()
    if not isinstance(world, ShmCommunicator):
        raise SystemExit("run it on two or more ranks of one host: spmdrun -n 2 -m ...")
    found = {
        "training step": compare(world, training()),
        "psum of 4 B in a loop": compare(world, psums()),
    }
    if world.rank == 0:
        for name, (on, off, difference) in found.items():
            print(f"{name:<22} on {on:9.3f} us  off {off:9.3f} us  difference {difference:+.3f} us")
        print(f"{'record from Python':<22} {from_python():.3f} us")


def compare(world: ShmCommunicator, go: Callable[[], float]) -> tuple[float, float, float]:
    """Medians with records and without, and of the differences of neighbouring blocks."""
    words, size = world.state.words, world.size
    address = words[native_state.RECORD]
    times: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(PAIRS):
        for on in (True, False) if pair % 2 else (False, True):
            words[native_state.RECORD] = address if on else 0
            FLIGHT.words[flight.SIZE] = size if on else 1  # programs then say nothing either
            times[on].append(go())
    words[native_state.RECORD], FLIGHT.words[flight.SIZE] = address, size
    difference = np.median(np.subtract(times[True], times[False]))
    return float(np.median(times[True])), float(np.median(times[False])), float(difference)


def training() -> Callable[[], float]:
    """Microseconds of a step of a small network: gradients, their mean over ranks, an update."""

    def loss(weights, x, y):
        for w in weights[:-1]:
            x = snp.tanh(x @ w)
        return snp.mean((x @ weights[-1] - y) ** 2)

    def train(weights, x, y):
        means = [lax.pmean(g, "i") for g in spmd.grad(loss)(weights, x, y)]
        return [w - 0.01 * g for w, g in zip(weights, means, strict=True)]

    step = spmd.pmap(train, axis_name="i")
    rng = np.random.default_rng(0)
    start = [snp.asarray(rng.normal(size=(1, *s)).astype(np.float32) * 0.1) for s in LAYERS]
    x = rng.normal(size=(1, 64, 64)).astype(np.float32)
    y = rng.normal(size=(1, 64, 10)).astype(np.float32)

    def go() -> float:
        weights = step(start, x, y)
        began = time.perf_counter()
        for _ in range(STEPS):
            weights = step(weights, x, y)
        np.asarray(weights[0])
        return (time.perf_counter() - began) / STEPS * 1e6

    go()
    return go


def psums() -> Callable[[], float]:
    """Microseconds of a psum of four bytes, of many in one program."""

    def many(x):
        return lax.fori_loop(0, COLLECTIVES, lambda _, x: lax.psum(x, "i") * 0.5, x)

    program = spmd.pmap(many, axis_name="i")
    x = np.ones((1, 1), np.float32)

    def go() -> float:
        began = time.perf_counter()
        np.asarray(program(x))
        return (time.perf_counter() - began) / COLLECTIVES * 1e6

    go(), go()
    return go


def from_python() -> float:
    """Microseconds of a record that Python writes, as for ranks on several hosts."""
    log = flight.GroupLog(flight.WORLD, "world", [0])
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(20_000):
            place = log.begin(0, 4)
            FLIGHT.entered(place)
            log.completed(place)
        best = min(best, (time.perf_counter() - began) / 20_000 * 1e6)
    return best


if __name__ == "__main__":
    main()
