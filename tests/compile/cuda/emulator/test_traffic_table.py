"""The table `benchmarks/cuda_traffic.md`: what programs move on a GPU, counted by the emulator.

Each kernel of a program runs on its own, on random numbers. Global memory is compared with the
bytes of the program's arguments and results, or of the arrays of its kernels where they need
others (gradients); sectors and wavefronts with the least that the accesses of each warp could take.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import spmd
from spmd import nn
from spmd import numpy as snp
from spmd.compile.cuda.assemble import rendering
from spmd.compile.cuda.emulator.traffic import SECTOR
from spmd.compile.executable.build import make_schedule
from spmd.compile.executable.cuda_backend import BACKEND
from spmd.compile.kernel.attention import BlockedAttention
from spmd.compile.kernel.dtypes import DTYPES
from spmd.compile.kernel.ir import Kernel
from spmd.compile.lower.steps import Attend, Launch, Multiply, walk
from spmd.compile.passes.pipeline import PASSES, run_passes
from spmd.core.ir import ClosedJaxpr
from tests.compile.cuda.emulated import Emulator
from tests.conftest import ROOT

KINDS = (Launch, Multiply, Attend)
PAGE = ROOT / "benchmarks" / "cuda_traffic.md"
HEAD = """# Bytes that programs move on a GPU

Counted by the emulator (`docs/cuda.md`), in float32 where no other dtype is named. A ratio of 1.00
is the least that is possible.
*Bytes* are those that kernels ask for and write, beside those of the program's arguments and
results. *Memory* has each sector that a launch touches once, as a GPU whose L2 cache (tens of MB)
holds them moves it. The two differ where several blocks read the same: weights of rows, operands of
products, and in attention the keys and values, which each block of 64 queries reads. Attention
under derivatives is compared with the arrays of each of its kernels, which hand on the logsumexp.
*Sectors* of 32 bytes and *wavefronts* of shared memory are compared with the least that each access
of a warp could take.
`pytest tests/compile/cuda/emulator/test_traffic_table.py --update-golden` writes this page.

| program | sizes | kernels | bytes | memory | sectors | wavefronts |
|---|---|---|---|---|---|---|
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


def fused_attention(q: Any, k: Any, v: Any) -> Any:
    return nn.dot_product_attention(q, k, v)


def rounded_attention(q: Any, k: Any, v: Any) -> Any:
    with spmd.default_matmul_precision("tensorfloat32"):
        return fused_attention(q, k, v)


def attention_grad(q: Any, k: Any, v: Any, ct: Any) -> Any:
    return spmd.vjp(fused_attention, q, k, v)[1](ct)


def wide_product(a: Any, b: Any) -> Any:
    return snp.matmul(a, b, preferred_element_type=np.int32)


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
    "product, bfloat16": (lambda a, b: a @ b, ((64, 32), (32, 64)), math.inf),
    "product, int8": (wide_product, ((64, 32), (32, 64)), math.inf),
    "attention, written out": (attention, ((64, 32),) * 3, math.inf),
    "attention": (fused_attention, ((1, 64, 2, 32),) * 3, 1.05),
    "attention of two blocks": (fused_attention, ((1, 128, 1, 32),) + ((1, 64, 1, 32),) * 2, 1.35),
    "gradient of attention": (attention_grad, ((1, 64, 1, 32),) * 4, 1.05),
    "attention, TF32": (rounded_attention, ((1, 64, 2, 32),) * 3, 1.05),
    "attention, bfloat16": (fused_attention, ((1, 64, 2, 64),) * 3, 1.05),
    "gradient of attention, bfloat16": (attention_grad, ((1, 64, 1, 64),) * 4, 1.05),
}


@functools.cache
def measured(name: str) -> tuple[int, float, float, float, float]:
    """The kernels of a program, and the ratios of bytes, memory, sectors and wavefronts."""
    function, shapes, _ = PROGRAMS[name]
    named = {"bfloat16": ml_dtypes.bfloat16, "int8": np.int8}
    dtype = named.get(name.rpartition(", ")[2], np.float32)
    closed: ClosedJaxpr = spmd.make_jaxpr(function)(*[np.ones(s, dtype) for s in shapes])
    schedule = make_schedule(run_passes(closed, passes=BACKEND.passes(PASSES)), BACKEND)
    steps = [step for step in walk(schedule.steps) if isinstance(step, KINDS)]
    assert len(steps) == len(list(walk(schedule.steps)))
    rng = np.random.default_rng(0)
    totals = {"global": [0, 0], "shared": [0, 0]}
    launches = touched = own = 0
    for step in steps:
        callee = step.product if isinstance(step, Multiply) else step.kernel
        rendered = rendering(callee)
        arrays = [rng.uniform(0.5, 1.5, n).astype(DTYPES[d].numpy) for d, n in sizes(callee)]
        own += sum(array.nbytes for array in arrays)
        for traffic in Emulator(rendered.functions, mode="counted").run(rendered, arrays):
            assert traffic is not None and traffic.counted == traffic.accesses
            launches += 1
            touched += traffic.touched
            for space, total in totals.items():
                for k, units in enumerate(traffic.total(space)):
                    total[k] += units
    least = sum(a.nbytes for a in (*closed.in_avals, *closed.out_avals))
    least = own if name.startswith("gradient") else least
    moved, sectors = totals["global"]
    waves, fewest = totals["shared"]
    shared = waves / fewest if fewest else 1.0
    return launches, moved * SECTOR / least, touched * SECTOR / least, moved / sectors, shared


def sizes(callee: Any) -> list[tuple[str, int]]:
    """The dtypes and the elements of a callee's arrays."""
    if isinstance(callee, BlockedAttention):
        return attention_arrays(callee)
    if isinstance(callee, Kernel):
        return [(arg.dtype, arg.size) for arg in callee.args]
    extent = {"a": callee.m * callee.k, "b": callee.k * callee.n}
    operands = [(o.dtype, extent[n]) for n, o in (("a", callee.a), ("b", callee.b))]
    return [*operands, *[(arg.dtype, arg.size) for arg in callee.epilogue.args[1:]]]


def attention_arrays(kernel: BlockedAttention) -> list[tuple[str, int]]:
    """The arrays of attention without masks and a bias."""
    rows = kernel.batch * kernel.heads * kernel.rows
    keys = kernel.batch * kernel.heads * kernel.keys * kernel.features
    counts: dict[str, int] = dict.fromkeys(("top", "rest", "delta"), rows)
    counts |= dict.fromkeys(("q", "out", "ct", "dq"), rows * kernel.features)
    numbers = ("top", "rest", "delta")
    return [
        ("f32" if name in numbers else kernel.dtype, counts.get(name, keys))
        for name in (*kernel.reads, *kernel.writes)
    ]


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_moves_twice(name):
    _, bytes_moved, memory, sectors, wavefronts = measured(name)
    assert bytes_moved <= PROGRAMS[name][2]
    assert memory <= (math.inf if name == "attention, written out" else 1.05)
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
