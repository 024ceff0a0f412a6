"""The first call of a jitted function: trace, compile, run, in a process that never saw it before.

Every sample is a process of its own, so neither side can reuse a kernel. What a side does once per
process (loading its compiler and its matrix products) happens before, with another program. JAX's
products come with it as machine code, spmd's are generated once per machine: `spmd prepare` does it
for all programs. So `compile/` measures a machine that was prepared: each sample begins with a copy
of the folder that `prepare` left, in which there is nothing of any program. `not prepared` and
`FIRST_PRODUCT` are the same without it, where a program waits for the products that it needs.

compile/  the first call, of programs that no disk cache has
cached/   the first call in a second process, both sides with their disk caches
          (of both: `start to first result` is the whole process, import included, as a user waits
          for it)
depth/    the gradient of a transformer by its number of layers; unrolled loops, gradients of
          unrolled layers, and sums of arguments by their number of equations; trace and compile
          apart
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.case import BOTH, integers, normal
from benchmarks.cases import find_case
from benchmarks.dispatch import call_jitted, multiply_add
from benchmarks.measure import ROOT, Failure, Result, environment
from benchmarks.programs import to_side, transformer_loss, transformer_params
from benchmarks.sides import Side, load_side

SAMPLES = 5
QUICK_SAMPLES = 1
# No more samples of a program than fit into this; of what takes longer there is one.
PROGRAM_SECONDS = 8.0
# A process that takes longer has no figure.
MOST_SECONDS = 180
FIRST_PRODUCT = "the first product of a machine"
# What begins without a disk cache, although it has a product.
NOT_PREPARED = ", not prepared"
DEPTHS = (12, 24, 48)
QUICK_DEPTHS = (4,)
# Equations of the programs that Python unrolled.
LENGTHS = (100, 1000, 9000, 60_000)
QUICK_LENGTHS = (300,)

Sample = dict[str, float]


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
    "scan": compile_scan,
    FIRST_PRODUCT: compile_product,
}
CASES = (
    "kernels/gelu, 1e+06",
    "kernels/black-scholes, 1e+06",
    "kernels/softmax, 1000 x 1024",
    "kernels/softmax over columns, 1000 x 1024",
    "kernels/layernorm, 1000 x 1024",
    "kernels/gradient of layernorm, 1000 x 1024",
    "kernels/gradient of logsumexp, 1000 x 1024",
    "kernels/full sum, 1e+06",
    "kernels/transpose and add, 1024 x 1024",
    "kernels/cumsum, 1e+06",
    "kernels/sort, 1e+05",
    "kernels/gather rows, 4096 of 10000 x 128",
    "kernels/scatter-add rows, 4096 into 10000 x 128",
    "kernels/random normal, 1e+06",
    "kernels/matmul 64",
    "kernels/matmul 512",
    "kernels/attention, 32 heads of 256 x 64",
    "kernels/gradient of causal attention, 32 heads",
    "kernels/conv 3x3, 4 x 32 x 32 x 64",
    "kernels/gradients of conv 3x3",
    "programs/MLP 64-256-128-10, batch 128",
    "programs/transformer with Adam, 2 layers of 128",
    "programs/convnet, 32 images of 32 x 32",
    "programs/per-example gradients, 64-128-10, batch 64",
    "programs/gradient of a GRU, 50 steps",
    "programs/n-body, 128 bodies, 100 steps",
    "programs/Hessian of 64 weights",
    "programs/Adam of 60 parameters",
)
# These are measured on a machine that was not prepared, too.
TWICE = (
    "x*y+x",
    "kernels/matmul 64",
    "programs/MLP 64-256-128-10, batch 128",
    "programs/transformer with Adam, 2 layers of 128",
)
CACHED = (
    "x*y+x",
    "kernels/softmax, 1000 x 1024",
    "programs/MLP 64-256-128-10, batch 128",
    "programs/transformer with Adam, 2 layers of 128",
)


# ---- in a fresh process ------------------------------------------------------------------------


def first_call(side: Side, program: str) -> Sample:
    """Seconds of the first call."""
    make = PROGRAMS[program] if program in PROGRAMS else find_case(program).make
    run = make(side)
    start = time.perf_counter()
    side.ready(run())
    return {"": time.perf_counter() - start}


def _transformer(side: Side, layers: int) -> tuple[Any, tuple[Any, ...]]:
    """The gradient of a transformer."""
    params = to_side(side, transformer_params(256, 16, 32, layers))
    tokens = side.array(integers(256, 2, 17))
    function = side.top.value_and_grad(partial(transformer_loss, side, heads=4))
    return function, (params, tokens)


def _steps(side: Side, equations: int) -> tuple[Any, tuple[Any, ...]]:
    """A loop that Python unrolls, of three equations a step."""

    def body(x):
        for k in range(equations // 3):
            x = side.np.sin(x) * 1.01 + k
        return x

    return body, (side.array(normal(8)),)


def _layers(side: Side, equations: int) -> tuple[Any, tuple[Any, ...]]:
    """The gradient of unrolled layers, of about ten equations each."""

    def loss(ws, x):
        for w in ws:
            x = side.np.tanh(x @ w)
        return side.np.sum(x)

    ws = [side.array(normal(8, 8))] * (equations // 10)
    return side.top.grad(loss), (ws, side.array(normal(4, 8)))


def _sum(side: Side, equations: int) -> tuple[Any, tuple[Any, ...]]:
    """The sum of one argument more than equations."""
    return (lambda *xs: sum(xs[1:], xs[0])), (side.array(normal(8)),) * (equations + 1)


# Programs by their size, and the sizes: the label has the size for `{}`.
SIZED: dict[str, Callable[[Side, int], tuple[Any, tuple[Any, ...]]]] = {
    "gradient of a transformer, {} layers": _transformer,
    "unrolled loop, {} equations": _steps,
    "gradient of unrolled layers, {} equations": _layers,
    "sum of arguments, {} equations": _sum,
}


def depth(side: Side, label: str, size: int) -> Sample:
    """Seconds to trace, and then to compile and run."""
    function, operands = SIZED[label](side, size)
    function = side.jit(function)
    start = time.perf_counter()
    function.trace(*operands)
    middle = time.perf_counter()
    side.ready(function(*operands))
    return {", trace": middle - start, ", compile": time.perf_counter() - middle}


def in_this_process(side_name: str, program: str) -> Sample:
    """One sample; the process must be fresh."""
    side = load_side(side_name)
    loading = side.jit(lambda a: multiply_add(side, a, 1 - a))
    side.ready(loading(side.array(normal(3, 5))))
    if program != FIRST_PRODUCT:
        side.ready(side.jit(lambda a, b: a @ b)(side.array(normal(5, 7)), side.array(normal(7, 3))))
    if program.startswith("depth/"):
        _, label, size = program.split("/")
        return depth(side, label, int(size))
    return first_call(side, program)


# ---- one process a sample ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Folders:
    """The programs that a fresh process finds on the disk."""

    byte_code: str
    caches: str = ""  # the disk caches of both sides, which one process leaves to the next
    prepared: str = ""  # spmd's disk cache, of which each process has a copy

    def variables(self, side: str) -> dict[str, str]:
        """The environment of a process."""
        return {
            **environment(side),
            "PYTHONPYCACHEPREFIX": self.byte_code,
            "PYTHONDONTWRITEBYTECODE": "",
            "SPMD_CACHE_DIR": self.caches and os.path.join(self.caches, "spmd"),
            "JAX_ENABLE_COMPILATION_CACHE": str(int(bool(self.caches))),
            "JAX_COMPILATION_CACHE_DIR": os.path.join(self.caches or self.byte_code, "jax"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }


def _fresh(side: str, program: str, folders: Folders) -> tuple[Sample, float]:
    """The sample of one fresh process, and the seconds of the whole process."""
    if folders.prepared and side == "spmd":
        with tempfile.TemporaryDirectory(prefix="spmd-benchmarks-") as folder:
            copied = shutil.copytree(folders.prepared, os.path.join(folder, "spmd"))
            return _run(side, program, folders.variables(side) | {"SPMD_CACHE_DIR": copied})
    return _run(side, program, folders.variables(side))


def _run(side: str, program: str, variables: dict[str, str]) -> tuple[Sample, float]:
    command = [sys.executable, "-m", "benchmarks.compile_time", side, program]
    start = time.perf_counter()
    given = {"env": variables, "cwd": ROOT, "capture_output": True, "text": True}
    try:
        done = subprocess.run(command, timeout=MOST_SECONDS, **given)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"more than {MOST_SECONDS} s") from None
    past = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["it ended"])[-1])
    return json.loads(done.stdout.splitlines()[-1]), past


def _prepare(folders: Folders) -> None:
    """Fill the folder with what belongs to this machine."""
    command = [sys.executable, "-m", "spmd", "prepare", "--cache-dir", folders.prepared]
    subprocess.run(
        command, env=folders.variables("spmd"), cwd=ROOT, check=True, capture_output=True
    )


def measure_compile(
    subject: str, only: str, quick: bool, progress: Callable[[str], None]
) -> list[Result | Failure]:
    """The programs of a subject whose case contains `only`, the two sides alternating."""
    results: list[Result | Failure] = []
    samples = QUICK_SAMPLES if quick else SAMPLES
    with tempfile.TemporaryDirectory(prefix="spmd-benchmarks-") as folder:
        bare = Folders(os.path.join(folder, "code"))
        given = bare
        for side in BOTH:  # an installed package has its byte code; this round writes it
            _fresh(side, "x*y+x", bare)
        if subject == "compile":
            given = replace(bare, prepared=os.path.join(folder, "prepared"))
            _prepare(given)
        elif subject == "cached":
            given = replace(bare, caches=os.path.join(folder, "caches"))
        for label, program in _programs(subject, quick):
            if only in label:
                progress(label)
                is_bare = label.endswith(NOT_PREPARED) or program == FIRST_PRODUCT
                results += _measure(label, program, samples, bare if is_bare else given)
    return results


def _programs(subject: str, quick: bool) -> Iterator[tuple[str, str]]:
    """Labels and programs."""
    if subject == "compile":
        for program in (*PROGRAMS, *CASES):
            label = f"compile/{program.partition('/')[2] or program}"
            yield label, program
            if program in TWICE:
                yield label + NOT_PREPARED, program
    elif subject == "cached":
        for program in CACHED:
            yield f"cached/{program.partition('/')[2] or program}", program
    else:
        for label, make in SIZED.items():
            if make is _transformer:
                sizes = QUICK_DEPTHS if quick else DEPTHS
            else:
                sizes = QUICK_LENGTHS if quick else LENGTHS
            for size in sizes:
                yield f"depth/{label.format(size)}", f"depth/{label}/{size}"


def _measure(label: str, program: str, samples: int, folders: Folders) -> list[Result | Failure]:
    seconds: dict[tuple[str, str], list[float]] = {}
    failed: dict[str, Failure] = {}
    began = time.perf_counter()
    for number in range(samples + bool(folders.caches)):
        for side in BOTH:
            if side in failed:
                continue
            try:
                sample, whole = _fresh(side, program, folders)
            except RuntimeError as error:
                failed[side] = Failure(label, side, str(error))
                continue
            if folders.caches and number == 0:  # this one fills them
                began = time.perf_counter()
                continue
            if program == "x*y+x":
                sample[", process start to first result"] = whole
            for part, value in sample.items():
                seconds.setdefault((label + part, side), []).append(value)
        if time.perf_counter() - began > PROGRAM_SECONDS:
            break
    made = [Result.of(case, side, values, 1) for (case, side), values in seconds.items()]
    return [*made, *failed.values()]


if __name__ == "__main__":
    print(json.dumps(in_this_process(sys.argv[1], sys.argv[2])))
