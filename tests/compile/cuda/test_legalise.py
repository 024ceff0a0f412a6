"""Steps without a CUDA kernel, computed by the host, against the CPU's kernels for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd import numpy as snp
from spmd.compile.cpu.assemble import assemble
from spmd.compile.cuda.legalise import legalise
from spmd.compile.executable.backend import CPU
from spmd.compile.executable.executable import Executable
from spmd.compile.lower.steps import Contract, Host, walk
from spmd.compile.passes.pipeline import run_passes

ASSEMBLER = SimpleNamespace(
    CalleeCompiler=assemble.CalleeCompiler, assemble=assemble.assemble, legalise=legalise
)
RNG = np.random.default_rng(0)


class Legalised(Executable):
    """A program of the CPU from the steps that CUDA has."""

    backend = replace(CPU, assembler=ASSEMBLER, stores=False)


def conv(strides: tuple[int, ...], dilation: tuple[int, ...], groups: int) -> Callable[..., Any]:
    def call(x: Any, k: Any) -> Any:
        out = lax.conv_general_dilated(
            x, k, strides, "SAME", rhs_dilation=dilation, feature_group_count=groups
        )
        return snp.tanh(out) + 1

    return call


IMAGE = RNG.standard_normal((2, 4, 7, 9)).astype(np.float32)
KERNEL = RNG.standard_normal((6, 4, 3, 2)).astype(np.float32)
HALF = RNG.standard_normal((6, 2, 3, 2)).astype(np.float32)

PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "convolution": (conv((1, 1), (1, 1), 1), (IMAGE, KERNEL)),
    "convolution with strides": (conv((2, 1), (1, 2), 1), (IMAGE, KERNEL)),
    "convolution in groups": (conv((1, 1), (1, 1), 2), (IMAGE, HALF)),
    "gradient of a convolution": (
        spmd.grad(lambda x, k: conv((2, 1), (1, 1), 1)(x, k).sum(), (0, 1)),
        (IMAGE, KERNEL),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_host_computes_what_the_kernels_do(name):
    function, args = PROGRAMS[name]
    closed = spmd.make_jaxpr(function)(*args)
    made = Legalised(closed, run_passes)
    steps = walk(made.schedule.steps)
    assert any(isinstance(step, Host) for step in steps)
    assert not any(isinstance(step, Contract) for step in steps)
    wanted = spmd.tree_util.tree_leaves(spmd.jit(function)(*args))
    for out, value in zip(made(args), wanted, strict=True):
        if value.dtype == np.float32:
            np.testing.assert_allclose(out, value, 2e-5, 2e-5)
        np.testing.assert_array_equal(np.asarray(out).shape, value.shape)
