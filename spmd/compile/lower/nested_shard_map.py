"""The rule of `shard_map` inside a program of one device: it is evaluated as outside of jit."""

from __future__ import annotations

import numpy as np

from spmd.compile.lower.lowering import Lowering, rule
from spmd.compile.lower.steps import Host, view
from spmd.core.ir import Eqn
from spmd.core.trace import EVAL


@rule("shard_map")
def shard_map(lowering: Lowering, eqn: Eqn) -> None:
    """A step that evaluates the equation on the mesh's devices."""

    def run(device: int, inputs: list[np.ndarray], outputs: list[np.ndarray]) -> None:
        for target, value in zip(outputs, EVAL.process(eqn.prim, inputs, eqn.params), strict=True):
            target[...] = value._value

    ins = tuple(view(lowering.ref(a), a.aval) for a in eqn.invars)
    outs = tuple(view(lowering.place(v), v.aval) for v in eqn.outvars)
    lowering.steps.append(Host(run, ins, outs, f"shard_map {eqn.params['name']}", eqn.source))
