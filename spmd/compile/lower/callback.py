"""Rules for callbacks: steps on the host that know the user's line, the device and its axes."""

from __future__ import annotations

from typing import Any

from spmd.base.context import attributed_to
from spmd.base.record import replace
from spmd.compile.lower.lowering import Lowering, host, rule
from spmd.compile.lower.mesh_layout import Topology
from spmd.compile.lower.steps import Host
from spmd.core.ir import Eqn
from spmd.lax.callback import Place, at_place, here


@rule("pure_callback", "io_callback", "debug_callback")
def callback(lowering: Lowering, eqn: Eqn) -> None:
    """The equation's `impl`, at the place of the device that it runs for."""
    host(lowering, eqn)
    step = lowering.steps[-1]
    assert isinstance(step, Host)
    function, source = step.function, eqn.source
    places = None if lowering.topology is None else places_of(lowering.topology)

    def run(device: int, inputs: Any, outputs: Any) -> None:
        # A program of one device that a callback runs is at the place of that callback.
        place = here() if places is None else places[device]
        with at_place(place), attributed_to(source):
            function(device, inputs, outputs)

    lowering.steps[-1] = replace(step, function=run)


@rule("inspect_sharding")
def inspect_sharding(lowering: Lowering, eqn: Eqn) -> None:
    """Nothing: the layout was told when the program was chosen."""


def places_of(topology: Topology) -> list[Place]:
    """The place of each local device of a mesh."""
    along = {axis: topology.along(axis) for axis in topology.sizes}
    return [
        Place(
            topology.devices[k] if topology.devices else k,
            tuple((axis, indices[j]) for axis, indices in along.items()),
        )
        for j, k in enumerate(topology.local)
    ]
