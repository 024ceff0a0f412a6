"""Counted mode: sectors of global memory and wavefronts of shared memory, for each line."""

from __future__ import annotations

import numpy as np
import pytest

from spmd.compile.cuda.emulator.code import load
from spmd.compile.cuda.emulator.gpu import Gpu
from spmd.compile.cuda.emulator.traffic import Traffic
from spmd.compile.cuda.kernel import render, render_product
from spmd.compile.cuda.launch import Launch
from spmd.compile.cuda.nvrtc import compile_ptx
from spmd.compile.kernel.matmul import Operand, Product, store_epilogue
from tests.compile.cuda.emulated import CAPACITY, Emulator
from tests.compile.kernel.op_kernels import transposed_case


def counted(body: str, threads: int = 64, grid: int = 2) -> Traffic:
    """The traffic of a kernel of one array `x` of floats and shared memory `s`."""
    source = (
        'extern "C" __global__ void f(float *x) {\n  extern __shared__ float s[];\n'
        f"  const int i = blockIdx.x * blockDim.x + threadIdx.x, t = threadIdx.x;\n{body}\n}}\n"
    )
    gpu = Gpu(0, CAPACITY)
    kernel = load(compile_ptx(source, "sm_90"), ["f"], "counted", source)["f"]
    traffic = gpu.launch(kernel, Launch(grid, (threads, 1), 32_768), [gpu.memory.allocate(1 << 20)])
    assert traffic is not None
    return traffic


GLOBAL = {
    "neighbours": ("x[i] = i;", 4 * 4),
    "every second": ("x[2 * i] = i;", 4 * 8),
    "far apart": ("x[8 * i] = i;", 4 * 32),
    "one for all": ("x[i / 64 * 8] = i;", 4),
    "vectors": ("((float4 *)x)[i] = make_float4(i, 0, 0, 0);", 4 * 16),
    "not at a sector": ("x[i + 1] = i;", 4 * 5),
}


@pytest.mark.parametrize("name", GLOBAL)
def test_sectors(name):
    body, sectors = GLOBAL[name]
    traffic = counted(body)
    (line,) = traffic.lines
    assert (line.space, line.writes, line.requests, line.moved) == ("global", True, 4, sectors)
    assert traffic.total("global") == (sectors, line.least)
    least = {"vectors": 64, "one for all": 4}.get(name, 16)
    assert line.least == least
    assert line.place == f"at kernels.cu:4: {body}"
    assert f"{sectors} moved" in str(traffic)


SHARED = {
    "neighbours": ("s[t] = t;", 4),
    "all the same": ("s[32] = x[i]; x[i] = s[0];", 4),
    "two ways": ("s[2 * t] = t;", 8),
    "all in one bank": ("s[32 * t] = t;", 4 * 32),
    "padded": ("s[33 * t] = t;", 4),
    "vectors": ("((float4 *)s)[t] = make_float4(t, 0, 0, 0);", 4 * 4),
    "vectors across": ("((float4 *)s)[t % 8 * 8 + t / 8] = make_float4(t, 0, 0, 0);", 4 * 32),
}


@pytest.mark.parametrize("name", SHARED)
def test_wavefronts(name):
    body, wavefronts = SHARED[name]
    traffic = counted(body)
    lines = [line for line in traffic.lines if line.space == "shared"]
    assert [line.moved for line in lines] == [wavefronts] * len(lines) and lines
    assert all(line.least == (16 if "vectors" in name else 4) for line in lines)


def test_rounds_of_a_loop_are_requests_of_their_own():
    traffic = counted("#pragma unroll 1\nfor (int k = 0; k < 3; k++) x[i + 128 * k] = k;")
    (line,) = traffic.lines
    assert (line.requests, line.moved, line.least) == (12, 48, 48)


def test_a_trace_that_is_full_says_so():
    traffic = counted("#pragma unroll 1\nfor (int k = 0; k < 3000; k++) x[(i + k) % 1024] = k;")
    assert traffic.accesses == 384_000 and traffic.counted < traffic.accesses


def test_a_transposed_tile_moves_the_least():
    case = transposed_case((64, 64), "f32")
    rendered = render(case.kernel)
    (traffic,) = Emulator(rendered.functions, mode="counted").run(rendered, case.arrays)
    assert traffic is not None and traffic.counted == traffic.accesses
    assert traffic.total("shared")[0] == traffic.total("shared")[1]
    assert traffic.total("global")[0] <= 1.3 * traffic.total("global")[1]


def test_a_products_slabs_are_read_without_conflicts():
    epilogue = store_epilogue((), 64, 64, "f32", "f32", (64, 1))
    product = Product(64, 64, 32, Operand("f32", 32, 1), Operand("f32", 64, 1), "f32", epilogue)
    rendered = render_product(product)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(n).astype(np.float32) for n in (2048, 2048, 4096)]
    (traffic,) = Emulator(rendered.functions, mode="counted").run(rendered, arrays)
    assert traffic is not None and traffic.counted == traffic.accesses
    moved, least = traffic.total("shared")
    assert moved == least
