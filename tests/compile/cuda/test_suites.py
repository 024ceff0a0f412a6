"""Suites of the CPU on emulated GPUs: random programs, the table of collectives, the examples.

A random program has another seed here than on the CPU. `-m nightly` runs more of them, and the
examples that take minutes on an emulator.
"""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.base.config import config
from spmd.compile.executable.executable import compile_jaxpr
from tests.collectives.table import AXIS, CASES, OURS
from tests.compile.programs import by_impl, random_program
from tests.lax.test_records import assert_close
from tests.test_examples import TOY, check_example, example_arguments

DEVICES = 4
ON_EMULATOR = {
    "SPMD_PLATFORM": "cuda",
    "SPMD_CUDA_DRIVER": "emulator",
    "SPMD_NUM_CUDA_DEVICES": str(DEVICES),
}


def same_as_host(seed: int) -> None:
    with config.override("default_matmul_precision", "highest"):
        closed, args = random_program(seed)
    executable = compile_jaxpr(closed, device=spmd.devices("cuda")[0])
    for found, wanted in zip(executable(args), by_impl(closed, args), strict=True):
        found = np.asarray(found)
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.usefixtures("gpus")
# In 552 a cosine, which has local memory, follows a barrier.
@pytest.mark.parametrize("seed", [*range(500, 512), 552])
def test_a_random_program(seed):
    same_as_host(seed)


@pytest.mark.nightly
@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("seed", range(512, 612))
def test_many_random_programs(seed):
    same_as_host(seed)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("case", [c for c in (*CASES, *OURS) if c.fits(DEVICES)], ids=str)
def test_a_collective(case):
    x = case.example(DEVICES, "float32" if "float32" in case.dtypes else case.dtypes[0])

    def call():
        found = spmd.pmap(lambda x: case.body(lax, x, DEVICES), axis_name=AXIS)(x)
        return spmd.tree_util.tree_leaves(found)

    found = call()
    with config.override("platform", "cpu"), config.override("num_cpu_devices", DEVICES):
        wanted = call()
    assert {d.platform for y in found for d in y.devices()} == {"gpu"}
    for y, z in zip(found, wanted, strict=True):
        assert_close(y, z, 64.0)


QUICK = ("batched_predict", "ring_all_reduce")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.nightly) for n in sorted(TOY)],
)
def test_an_example(name, run_python, tmp_path):
    done = run_python(example_arguments(name, tmp_path), env=ON_EMULATOR, timeout=280)
    assert done.returncode == 0, done.stderr
    check_example(name, done.stdout)
