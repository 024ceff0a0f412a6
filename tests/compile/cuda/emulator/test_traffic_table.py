"""The table `benchmarks/cuda_traffic.md`: what programs move on a GPU, counted by the emulator.

Each kernel of a program runs on its own, on random numbers. Global memory is compared with the
bytes of the program's arguments and results; sectors and wavefronts with the least that the
accesses of each warp could take.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import spmd
from spmd import nn
from spmd import numpy as snp
from spmd.compile.cuda.assemble import rendering
from spmd.compile.cuda.emulator.traffic import SECTOR
from spmd.compile.executable.build import make_schedule
from spmd.compile.executable.cuda_backend import BACKEND
from spmd.compile.kernel.dtypes import DTYPES
from spmd.compile.kernel.ir import Kernel
from spmd.compile.lower.steps import Launch, Multiply, walk
from spmd.compile.passes.pipeline import PASSES, run_passes
from spmd.core.ir import ClosedJaxpr
from tests.compile.cuda.emulated import Emulator
from tests.conftest import ROOT

PAGE = ROOT / "benchmarks" / "cuda_traffic.md"
HEAD = """# Bytes that programs move on a GPU

Counted by the emulator (`docs/cuda.md`), float32. A ratio of 1.00 is the least that is possible.
*Bytes* are those that kernels move to and from global memory, beside those of the program's
arguments and results; weights of rows are read for each row, from a cache. *Sectors* of 32 bytes
and *wavefronts* of shared memory are compared with the least that each access of a warp could take.
`pytest tests/compile/cuda/emulator/test_traffic_table.py --update-golden` writes this page.

| program | sizes | kernels | bytes | sectors | wavefronts |
|---|---|---|---|---|---|
"""


def layernorm(x: Any, scale: Any = 1.0, shift: Any = 0.0) -> Any:
    mean = x.mean(-1, keepdims=True)
    spread = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / snp.sqrt(spread + 1e-5) * scale + shift


def adam(w: Any, g: Any, m: Any, v: Any) -> Any:
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    return w - 0.001 * m / (snp.sqrt(v) + 1e-8), m, v


def momentum(w: Any, g: Any, m: Any) -> Any:
    m = 0.9 * m + g
    return w - 0.01 * m, m


def attention(q: Any, k: Any, v: Any) -> Any:
    return nn.softmax(q @ k.T / math.sqrt(q.shape[-1])) @ v


# A function, the shapes of its arguments, and the largest ratio of bytes.
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], float]] = {
    "gelu": (nn.gelu, ((64, 256),), 1.05),
    "sum of a product": (lambda x, y: x * y + x, ((64, 256), (64, 256)), 1.05),
    "softmax": (nn.softmax, ((64, 256),), 1.05),
    "layernorm": (layernorm, ((64, 256),), 1.05),
    "layernorm with weights": (layernorm, ((64, 256), (256,), (256,)), 2.0),
    "softmax of long rows": (nn.softmax, ((4, 8000),), 1.05),
    "momentum": (momentum, ((16384,),) * 3, 1.05),
    "adam": (adam, ((16384,),) * 4, 1.05),
    "transpose": (lambda x: x.T * 2, ((128, 128),), 1.05),
    "product": (lambda a, b: a @ b, ((64, 32), (32, 64)), math.inf),
    "attention": (attention, ((64, 32),) * 3, math.inf),
}


@functools.cache
def measured(name: str) -> tuple[int, float, float, float]:
    """The kernels of a program, and the ratios of bytes, sectors and wavefronts."""
    function, shapes, _ = PROGRAMS[name]
    closed: ClosedJaxpr = spmd.make_jaxpr(function)(*[np.ones(s, np.float32) for s in shapes])
    schedule = make_schedule(run_passes(closed, passes=BACKEND.passes(PASSES)), BACKEND)
    steps = [step for step in walk(schedule.steps) if isinstance(step, (Launch, Multiply))]
    assert len(steps) == len(list(walk(schedule.steps)))
    rng = np.random.default_rng(0)
    totals = {"global": [0, 0], "shared": [0, 0]}
    launches = 0
    for step in steps:
        callee = step.kernel if isinstance(step, Launch) else step.product
        rendered = rendering(callee)
        arrays = [rng.uniform(0.5, 1.5, n).astype(DTYPES[d].numpy) for d, n in sizes(callee)]
        for traffic in Emulator(rendered.functions, mode="counted").run(rendered, arrays):
            assert traffic is not None and traffic.counted == traffic.accesses
            launches += 1
            for space, total in totals.items():
                for k, units in enumerate(traffic.total(space)):
                    total[k] += units
    least = sum(a.nbytes for a in (*closed.in_avals, *closed.out_avals))
    moved, sectors = totals["global"]
    waves, fewest = totals["shared"]
    return launches, moved * SECTOR / least, moved / sectors, waves / fewest if fewest else 1.0


def sizes(callee: Any) -> list[tuple[str, int]]:
    """The dtypes and the elements of a callee's arrays."""
    if isinstance(callee, Kernel):
        return [(arg.dtype, arg.size) for arg in callee.args]
    extent = {"a": callee.m * callee.k, "b": callee.k * callee.n}
    operands = [(o.dtype, extent[n]) for n, o in (("a", callee.a), ("b", callee.b))]
    return [*operands, *[(arg.dtype, arg.size) for arg in callee.epilogue.args[1:]]]


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_moves_twice(name):
    _, bytes_moved, sectors, wavefronts = measured(name)
    assert bytes_moved <= PROGRAMS[name][2]
    assert sectors <= 1.05
    assert wavefronts <= 1.02


def test_the_page_is_current(golden):
    rows = []
    for name, (_, shapes, _) in PROGRAMS.items():
        launches, *ratios = measured(name)
        shown = " | ".join(f"{ratio:.2f}" for ratio in ratios)
        listed = ", ".join(str(list(s)) for s in dict.fromkeys(shapes))
        rows.append(f"| {name} | {listed} | {launches} | {shown} |")
    golden(PAGE, HEAD + "\n".join(rows) + "\n")
