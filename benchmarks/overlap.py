"""The time that exchanges in flight save: one training step without and with them, over ranks.

spmdrun -n 2 -m benchmarks.overlap [--batch 2048]

"alone" is the step of one rank without any exchange: what a step could take at best. The step runs
without overlap ("never") and with buckets of several sizes, in turns, in one job; the new weights
must have the same bits in all. Hosts with a slow link between them, on one machine:

python -m tests.multiprocess.pretend_hosts 2 --megabits 300 -- -n 2 -m benchmarks.overlap
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import spmd
import spmd.numpy as snp
from launch.flight.file import parse
from spmd import lax
from spmd.compile.passes import combine_psums
from spmd.transport.flight_recorder import FLIGHT

BUCKETS = (256 << 10, 1 << 20, 4 << 20)


def loss(weights: Any, x: Any) -> Any:
    """Of a plain network of equal layers."""
    y = x
    for w, b in weights:
        y = snp.tanh(y @ w + b)
    return snp.mean((y - x) ** 2)


def update(weights: Any, gradients: Any) -> Any:
    return spmd.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)


def step(weights: Any, x: Any) -> Any:
    """Data parallel: gradients of this rank's batch, their mean over ranks, an update."""
    value, gradients = spmd.value_and_grad(loss)(weights, x)
    return lax.pmean(value, "i"), update(weights, lax.pmean(gradients, "i"))


def alone(weights: Any, x: Any) -> Any:
    """The same without other ranks."""
    value, gradients = spmd.value_and_grad(loss)(weights, x)
    return value, update(weights, gradients)


class Way:
    """One way to run the step: its program, its times, and what was in flight."""

    def __init__(self, name: str, function: Callable[..., Any], setting: str, bucket: int = 0):
        self.name, self.function, self.setting, self.bucket = name, function, setting, bucket
        self.seconds: list[float] = []
        self.flown = self.stood = 0

    def run(self, weights: Any, x: Any) -> Any:
        """One step, which waits for its results."""
        before = FLIGHT.words[5]
        with spmd.config.override("overlap", self.setting):
            if self.bucket:
                combine_psums.BUCKET_BYTES = self.bucket
            began = time.perf_counter()
            value, new = spmd.block_until_ready(self.function(weights, x))
            self.seconds.append(time.perf_counter() - began)
        for record in parse(bytes(FLIGHT.bytes)).records:
            if record.sequence > before and record.completed:
                took = record.completed - record.began
                self.flown += took * record.is_overlapped
                self.stood += took * record.is_wait
        return value, new

    def line(self) -> str:
        """Its row of the table."""
        low, middle, high = np.percentile(self.seconds[2:], [25, 50, 75]) * 1e3
        hidden = f"{max(0.0, 1 - self.stood / self.flown):8.0%}" if self.flown else ""
        return f"{self.name:<24} {middle:8.1f} ms  +-{(high - low) / 2:5.1f} {hidden}"


def main() -> None:
    """Print the table on rank 0."""
    options = argparse.ArgumentParser(description="Time a training step over ranks.")
    for name, default in (("layers", 24), ("width", 256), ("batch", 2048), ("steps", 7)):
        options.add_argument(f"--{name}", type=int, default=default)
    given = options.parse_args()
    rank, size = spmd.process_index(), spmd.process_count()
    rng = np.random.default_rng(0)
    shape = given.width, given.width
    weights = [
        (rng.normal(size=shape).astype(np.float32) / given.width**0.5, np.zeros(shape[:1], "f4"))
        for _ in range(given.layers)
    ]
    x = rng.normal(size=(size, given.batch, given.width)).astype(np.float32)[rank]

    def mapped() -> Callable[..., Any]:
        f = spmd.pmap(lambda w, x: step(w, x), axis_name="i", in_axes=(None, 0), out_axes=None)
        return lambda w, x: f(w, x[None])

    ways = [Way("alone", spmd.jit(alone), "never"), Way("never", mapped(), "never")]
    ways += [Way(f"always, {b >> 10} KiB", mapped(), "always", b) for b in BUCKETS]
    news: dict[str, Any] = {}
    for _ in range(2 + given.steps):
        for way in ways:
            news[way.name] = way.run(weights, x)[1]
    wanted = [np.asarray(leaf) for leaf in spmd.tree.leaves(news["never"])]
    for way in ways[2:]:
        for leaf, right in zip(spmd.tree.leaves(news[way.name]), wanted, strict=True):
            assert np.asarray(leaf).tobytes() == right.tobytes(), way.name
    if rank == 0:
        mib = sum(leaf.nbytes for leaf in wanted) / 2**20
        print(f"{size} ranks, {mib:.1f} MiB of gradients, batch {given.batch}")
        print("\n".join(way.line() for way in ways), flush=True)


if __name__ == "__main__":
    main()
