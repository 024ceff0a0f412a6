"""The emulator finds what a GPU would not forgive: without that, its agreement proves nothing."""

from __future__ import annotations

import re

import numpy as np
import pytest

from spmd.base.errors import CudaError
from spmd.compile.cuda.kernel import module_text, render
from spmd.compile.cuda.launch import Rendered
from spmd.compile.kernel.ir import Kernel
from tests.compile.cuda.emulated import Emulator
from tests.compile.kernel.interpret import interpret
from tests.compile.kernel.op_kernels import row_sum, transposed_case


def run(kernel: Kernel, rendered: Rendered, source: str) -> tuple[np.ndarray, np.ndarray]:
    """What the interpreter and the emulated source leave in a kernel's arguments."""
    rng = np.random.default_rng(0)
    arrays = [rng.uniform(0.5, 1, arg.size).astype(np.float32) for arg in kernel.args]
    expected, got = [a.copy() for a in arrays], [a.copy() for a in arrays]
    interpret(kernel, expected)
    Emulator(rendered.functions, source).run(rendered, got)
    return np.concatenate(expected), np.concatenate(got)


KERNELS = {
    "a row by several warps": (row_sum(3, 1000), "reduce_rows"),
    "a tile": (transposed_case((40, 40), "f32").kernel, "kernel_"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_removed_barrier_is_found(name):
    kernel, function = KERNELS[name]
    rendered = render(kernel)
    source = module_text(rendered.functions)
    expected, got = run(kernel, rendered, source)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    start = re.search(rf"\b{function}\w*(<[^>]*>)?\(", source)
    assert start is not None
    # The last barrier of the function: the one between the writes and the reads.
    end = re.compile(r"^}", re.M).search(source, start.end())
    assert end is not None
    at = source.rindex("__syncthreads();", start.end(), end.start())
    broken = source[:at] + source[at:].replace("__syncthreads();", "", 1)
    with pytest.raises(CudaError, match=r"with no barrier between, and one of them") as caught:
        run(kernel, rendered, broken)
    # One of the two is what reads too early: the next access behind the barrier.
    behind = broken[at:].splitlines()
    reading = next(line.strip() for line in behind if re.search(r"(slots|tile0)\[", line))
    assert f": {reading}" in str(caught.value)


def test_a_barrier_that_some_threads_miss_is_found():
    kernel = row_sum(3, 1000)
    rendered = render(kernel)
    source = module_text(rendered.functions)
    first = "const int member = threadIdx.x;"
    assert first in source
    with pytest.raises(CudaError, match=r"waits at a barrier, and others have ended at team.cuh"):
        run(kernel, rendered, source.replace(first, f"{first} if (member >= 32) return;"))
    with pytest.raises(CudaError, match=r"lanes of its warp that don't come at team.cuh"):
        run(kernel, rendered, source.replace(first, f"{first} if (member == 5) return;"))


def test_accesses_outside_are_found():
    kernel = row_sum(3, 1000)
    rendered = render(kernel)
    source = module_text(rendered.functions)
    with pytest.raises(CudaError, match=r"wrote 4 bytes at .*, outside of what is allocated at "):
        run(kernel, rendered, source.replace("a1[point] =", "a1[point + 1] ="))
    with pytest.raises(CudaError, match=r"read 4 bytes at .* at kernels.cu:\d+: const f32 v1 = a0"):
        run(kernel, rendered, source.replace("= a0[point", "= a0[1 + point"))
    slots = "slots += threadIdx.y * WARPS;"
    assert slots in source
    with pytest.raises(CudaError, match=r"of the shared memory, which has 32 at .*value;"):
        run(kernel, rendered, source.replace(slots, "slots += WARPS;", 1))
