"""The rule of `shard_map` inside a program of one device."""

from __future__ import annotations

import numpy as np

from spmd.compile.lazy import multidevice
from spmd.compile.lower.lowering import Lowering, rule
from spmd.compile.lower.steps import Host
from spmd.core.ir import Eqn


@rule("shard_map")
def shard_map(lowering: Lowering, eqn: Eqn) -> None:
    """A call of the mesh's program."""
    executable = multidevice.mesh_executable(**eqn.params)

    def run(device: int, inputs: list[np.ndarray], outputs: list[np.ndarray]) -> None:
        for target, value in zip(outputs, executable(inputs), strict=True):
            target[...] = value._value()

    ins = tuple((lowering.ref(a), a.aval) for a in eqn.invars)
    outs = tuple((lowering.place(v), v.aval) for v in eqn.outvars)
    lowering.steps.append(Host(run, ins, outs, f"shard_map {eqn.params['name']}", eqn.source))
