"""Plans: which mesh, and which mesh axis splits which dim of the weights and of the batch.

A plan is all that differs between data, fully sharded and tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import spmd
from spmd import P


@dataclass(frozen=True)
class Plan:
    """The axes of a mesh over n devices, and the specs of a batch, of weights, of the others."""

    axes: Callable[[int], dict[str, int]]
    batch: P
    weights: dict[str, P] = field(default_factory=dict)
    others: P = field(default_factory=P)

    def mesh(self) -> spmd.Mesh:
        """A mesh of all devices, along which the compiler decides what is not said."""
        axes = self.axes(spmd.device_count())
        return spmd.make_mesh(tuple(axes.values()), tuple(axes), spmd.sharding.AxisType.Auto)

    def spec(self, name: str) -> P:
        """The spec of a weight."""
        return self.weights.get(name, self.others)


# Columns of the first product of a pair and rows of the second: the pair needs one sum.
PAIRS = {
    "attention": P(None, None, "model"),
    "join": P(None, "model"),
    "up": P(None, None, "model"),
    "down": P(None, "model"),
}


def halves(n: int) -> dict[str, int]:
    """Two mesh axes: as many devices for the data as for the model, or twice as many."""
    model = 2 ** ((n.bit_length() - 1) // 2)
    return {"data": n // model, "model": model}


PLANS = {
    # Every device has all weights and a part of each batch.
    "dp": Plan(lambda n: {"data": n}, P("data")),
    # Every device keeps a part of each weight, and gathers a layer when it needs it.
    "fsdp": Plan(lambda n: {"data": n}, P("data"), {"embedding": P("data")}, P(None, "data")),
    # Every device has some heads and some hidden units of each layer.
    "tp": Plan(lambda n: {"model": n}, P(), PAIRS),
    "dp+tp": Plan(halves, P("data"), PAIRS),
}
