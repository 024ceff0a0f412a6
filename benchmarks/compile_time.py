"""The first call of a jitted function: trace, compile, run, in a process that never saw it before.

Every sample is a process of its own, so neither side can reuse a kernel; spmd's disk cache is off.
What a side does once per process (loading its compiler and its matrix products) happens before,
with another program. JAX's products come with it as machine code, spmd's are generated once per
machine and then come from the disk cache: `FIRST_PRODUCT` shows what that first time costs.
`start to first result` is the opposite: the whole process, import included, as a user waits for it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.cases import BOTH, call_jitted, mlp_inputs, mlp_step, multiply_add, normal
from benchmarks.measure import ROOT, Result
from benchmarks.sides import Side, load_side

SAMPLES = 7
FIRST_PRODUCT = "the first product of a machine"


def compile_small(side: Side) -> Callable[[], Any]:
    """Two operations."""
    return call_jitted(side, 1000)


def compile_chain(side: Side) -> Callable[[], Any]:
    """A chain of 120 elementwise operations in one kernel."""

    def body(x):
        for k in range(40):
            x = side.np.sin(x * (1 + 0.01 * k)) + 0.5
        return x

    function, x = side.jit(body), side.array(normal(1000))
    return lambda: function(x)


def compile_mlp(side: Side) -> Callable[[], Any]:
    """The training step of a network with five layers."""
    step = side.jit(partial(mlp_step, side))
    params, x, y = mlp_inputs(side, (64, 128, 96, 80, 72, 10), 32)
    return lambda: step(params, x, y)


def compile_scan(side: Side) -> Callable[[], Any]:
    """A loop whose body has a product and a curve."""

    def body(w, x):
        def turn(h, _):
            h = side.np.tanh(h @ w)
            return h, side.np.sum(h)

        return side.lax.scan(turn, x, None, length=20)

    function = side.jit(body)
    w, x = side.array(normal(32, 32)), side.array(normal(8, 32))
    return lambda: function(w, x)


def compile_product(side: Side) -> Callable[[], Any]:
    """One matrix product."""
    function, x = side.jit(lambda a: a @ a), side.array(normal(32, 32))
    return lambda: function(x)


PROGRAMS: dict[str, Callable[[Side], Callable[[], Any]]] = {
    "x*y+x": compile_small,
    "chain of 120 operations": compile_chain,
    "step of a 5-layer MLP": compile_mlp,
    "scan": compile_scan,
    FIRST_PRODUCT: compile_product,
}


def first_call(side_name: str, program: str) -> float:
    """Seconds of the first call, measured in this process, which must be fresh."""
    side = load_side(side_name)
    loading = side.jit(lambda a: multiply_add(side, a, 1 - a))
    side.ready(loading(side.array(normal(3, 5))))
    if program != FIRST_PRODUCT:
        side.ready(side.jit(lambda a, b: a @ b)(side.array(normal(5, 7)), side.array(normal(7, 3))))
    run = PROGRAMS[program](side)
    start = time.perf_counter()
    side.ready(run())
    return time.perf_counter() - start


def _fresh(side: str, program: str, byte_code: str) -> tuple[float, float]:
    """First-call seconds and whole-process seconds of one fresh process."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PYTHONPYCACHEPREFIX": byte_code,
        "PYTHONDONTWRITEBYTECODE": "",
        "SPMD_CACHE_DIR": "",
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "0",
    }
    command = [sys.executable, "-m", "benchmarks.compile_time", side, program]
    start = time.perf_counter()
    done = subprocess.run(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1]), time.perf_counter() - start


def measure_compile(only: str = "", samples: int = SAMPLES) -> list[Result]:
    """The programs whose case contains `only`, the two sides alternating."""
    with tempfile.TemporaryDirectory(prefix="spmd-benchmarks-") as byte_code:
        for side in BOTH:  # an installed package has its byte code; this round writes it
            _fresh(side, "x*y+x", byte_code)
        return [
            result
            for program in PROGRAMS
            if only in f"compile/{program}"
            for result in _measure_program(program, samples, byte_code)
        ]


def _measure_program(program: str, samples: int, byte_code: str) -> list[Result]:
    first: dict[str, list[float]] = {side: [] for side in BOTH}
    whole: dict[str, list[float]] = {side: [] for side in BOTH}
    for _ in range(samples):
        for side in BOTH:
            call, process = _fresh(side, program, byte_code)
            first[side].append(call)
            whole[side].append(process)
    results = [Result.of(f"compile/{program}", side, first[side], 1) for side in BOTH]
    if program == "x*y+x":
        name = f"compile/process start to first result, {program}"
        results += [Result.of(name, side, whole[side], 1) for side in BOTH]
    return results


if __name__ == "__main__":
    print(json.dumps(first_call(sys.argv[1], sys.argv[2])))
