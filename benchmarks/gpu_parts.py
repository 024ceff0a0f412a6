"""The parts of `gpu_first_run` that compute on a GPU, each in a process of its own.

    python -m benchmarks.gpu_parts PART SIZE

A kernel that fails takes its process's CUDA with it, so no part shares one. The last line that a
part prints is JSON: a list of figures. The emulator runs them too, with other sizes; it says
whether the parts work, not how fast.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

import spmd
from benchmarks import programs, torch_programs
from benchmarks.case import normal
from benchmarks.sides import load_side
from spmd import numpy as snp
from spmd.compile.cuda.driver import driver


@dataclass(frozen=True)
class Sizes:
    """What is computed: bytes of an array, side of a product, steps of models, for how long."""

    nbytes: int
    product: int
    mlp: dict[str, Any]
    transformer: dict[str, int]
    products_in_a_row: int
    seconds: float


SIZES = {
    "full": Sizes(
        1 << 30,
        8192,
        {"sizes": (784, 4096, 4096, 10), "batch": 1024},
        {"layers": 6, "width": 512, "length": 256, "batch": 16, "vocabulary": 8192},
        200,
        0.5,
    ),
    "small": Sizes(
        1 << 14,
        48,
        {"sizes": (20, 16, 10), "batch": 8},
        {"layers": 1, "width": 8, "length": 4, "batch": 2, "vocabulary": 16},
        6,
        0.0,
    ),
}


@dataclass(frozen=True)
class Figure:
    """A figure, the goal for it if it has one, and whether more is better."""

    what: str
    value: float
    unit: str
    goal: float | None = None


def seconds_of(call: Callable[[], Any], wait: Callable[[Any], Any], least: float) -> float:
    """Seconds a call takes on average, of as many as fill some time after two others."""
    for _ in range(2):
        wait(call())
    calls = 1
    while True:
        start = time.perf_counter()
        for _ in range(calls):
            out = call()
        wait(out)
        past = time.perf_counter() - start
        if past >= least:
            return past / calls
        calls *= 2


def ready(x: Any) -> Any:
    """Wait for the results of a call."""
    return spmd.block_until_ready(x)


# ---- parts -------------------------------------------------------------------------------------


def bandwidth(sizes: Sizes) -> list[Figure]:
    """Kernels that only move memory, as parts of the speed with which the device copies."""
    gpu, n = driver(), sizes.nbytes
    source, target = gpu.allocate(0, n), gpu.allocate(0, n)

    def copy() -> None:
        gpu.copy(0, target, source, n)

    took = seconds_of(copy, lambda _: gpu.synchronize(0), sizes.seconds)
    for address in (source, target):
        gpu.free(0, address)
    speed = 2 * n / took
    figures = [Figure("copy", speed / 1e9, "GB/s")]
    rows = 1 << max(0, (n // 4).bit_length() - 11)  # of 1024, while there are so many elements
    x = snp.asarray(normal(rows, n // 4 // rows))

    def normalised(x):
        centred = x - x.mean(-1, keepdims=True)
        return centred / snp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)

    kernels: list[tuple[str, Callable[..., Any], int, float]] = [
        ("elementwise", lambda x: snp.maximum(x * 2 + 1, 0), 2, 0.90),
        ("softmax", partial(spmd.nn.softmax, axis=-1), 2, 0.85),
        ("layernorm", normalised, 2, 0.85),
    ]
    for name, function, arrays, goal in kernels:
        jitted = spmd.jit(function)
        _compare(name, jitted(x)[:4], function(np.asarray(x[:4])), 1e-4)
        took = seconds_of(partial(jitted, x), ready, sizes.seconds)
        figures.append(
            Figure(f"{name} of {n >> 10} KiB", arrays * n / took / speed, "of copy", goal)
        )
    return figures


def product(sizes: Sizes) -> list[Figure]:
    """Square products of float32 in TF32, and of bfloat16, beside cuBLAS's of float16."""
    n = sizes.product
    a, b = normal(n, n), normal(n, n, seed=1)
    figures, speed, name = [], 0.0, ""
    for kind, dtype in (("TF32", np.float32), ("bf16", snp.bfloat16)):
        x, y = (snp.asarray(each).astype(dtype) for each in (a, b))
        jitted = spmd.jit(partial(snp.matmul, precision="tensorfloat32"))
        wanted = np.asarray(x[:4]).astype(np.float32) @ np.asarray(y).astype(np.float32)
        _compare("product", np.asarray(jitted(x, y)[:4]).astype(np.float32), wanted, 2e-2)
        speed = 2 * n**3 / seconds_of(partial(jitted, x, y), ready, sizes.seconds)
        name = f"product of {n}, {kind}"
        figures.append(Figure(name, speed / 1e12, "TFLOP/s"))
    if driver().name == "cupy":
        import cupy

        p, q = (cupy.asarray(each).astype(cupy.float16) for each in (a, b))
        stream = cupy.cuda.get_current_stream()
        took = seconds_of(lambda: p @ q, lambda _: stream.synchronize(), sizes.seconds)
        figures.append(Figure(name, speed / (2 * n**3 / took), "of cuBLAS", 0.70))
    return figures


def launches(sizes: Sizes) -> list[Figure]:
    """The time of the host and of all for one small product more in a program."""
    w = snp.asarray(normal(16, 16) / 4)

    def many(count: int) -> tuple[float, float]:
        def body(x):
            for _ in range(count):
                x = snp.tanh(x @ w)
            return x

        jitted = spmd.jit(body)
        call = partial(jitted, w)
        host = min(_seconds_to_begin(call) for _ in range(8))
        return host, seconds_of(call, ready, sizes.seconds)

    figures = []
    for graphs, how in (True, ""), (False, ", without graphs"):
        with spmd.config.override("cuda_graphs", graphs):
            one, more = many(1), many(1 + sizes.products_in_a_row)
        pairs = zip(one, more, strict=True)
        host, whole = ((b - a) / sizes.products_in_a_row * 1e6 for a, b in pairs)
        figures += [
            Figure(f"a call with one product, the host's time{how}", one[0] * 1e6, "µs"),
            Figure(f"one product more, the host's time{how}", host, "µs"),
            Figure(f"one product more, until it is done{how}", whole, "µs"),
        ]
    return figures


def _seconds_to_begin(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    out = call()
    past = time.perf_counter() - start
    ready(out)
    return past


def mlp(sizes: Sizes, side: str) -> list[Figure]:
    """A training step of an MLP on one side; the loss of the third step tells if it is right."""
    return _step(side, "mlp", programs.train_mlp, torch_programs.train_mlp, sizes.mlp, sizes)


def transformer(sizes: Sizes, side: str) -> list[Figure]:
    """A training step of a transformer on one side."""
    makers = programs.train_transformer, torch_programs.train_transformer
    return _step(side, "transformer", *makers, sizes.transformer, sizes)


def _step(name: str, what: str, make: Any, of_torch: Any, given: Any, sizes: Sizes) -> list[Figure]:
    run: Any
    wait: Callable[[Any], Any]
    if name == "torch":
        import torch

        run = torch.compile(of_torch(_OnGpu(torch), **given))

        def wait_for_gpu(x: Any) -> Any:
            torch.cuda.synchronize()
            return x

        wait = wait_for_gpu
    else:
        side = load_side(name)
        run, wait = make(side, **given), side.ready
    # What JAX does on GPUs where no precision is asked for.
    with spmd.default_matmul_precision("tensorfloat32"):
        for _ in range(3):
            out = wait(run())
        loss = out[-1] if isinstance(out, tuple | list) else out
        took = seconds_of(run, wait, sizes.seconds)
    return [
        Figure(f"{what}, {name}", took * 1e3, "ms"),
        Figure(
            f"{what}, {name}, loss", float(np.asarray(loss.cpu() if name == "torch" else loss)), ""
        ),
    ]


class _OnGpu:
    """PyTorch whose tensors of NumPy arrays lie on the GPU."""

    def __init__(self, torch: Any):
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def from_numpy(self, value: np.ndarray) -> Any:
        return self._torch.from_numpy(value).cuda()


def device(sizes: Sizes) -> dict[str, Any]:
    """What the machine has."""
    del sizes
    gpu = driver()
    if not gpu.device_count():
        spmd.devices("cuda")  # says what is missing
    facts = gpu.facts(0)
    found = {"driver": gpu.name, "devices": gpu.device_count(), "device": facts.name}
    found |= {"arch": facts.arch, "memory": facts.memory}
    if gpu.name == "cupy":
        import cupy

        runtime = cupy.cuda.runtime
        found |= {"cuda driver": runtime.driverGetVersion(), "cupy": cupy.__version__}
    return found


def _compare(what: str, found: Any, wanted: Any, tolerance: float) -> None:
    """A wrong result has no speed."""
    wanted = np.asarray(wanted)
    error = np.abs(np.asarray(found) - wanted).max() / np.abs(wanted).max()
    if not error <= tolerance:
        raise ValueError(f"{what}: differs by {error:.1e} of the largest value")


PARTS: dict[str, Callable[..., Any]] = {
    part.__name__: part for part in (device, bandwidth, product, launches, mlp, transformer)
}


def main() -> None:
    """Run one part, and print its figures as the last line."""
    name, size, *side = sys.argv[1:]
    found = PARTS[name](SIZES[size], *side)
    print(json.dumps(found if isinstance(found, dict) else [asdict(each) for each in found]))


if __name__ == "__main__":
    main()
