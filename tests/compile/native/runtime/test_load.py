"""The parts of the native runtime: which a program needs, and that no other is loaded."""

import subprocess
import sys

import pytest

from spmd.compile.native.program import byte_code, encode
from spmd.compile.native.program.encode import Encoder
from spmd.compile.native.program.run_layout import PARTS, POOL, QUEUE
from spmd.compile.native.program.steps import KernelStep, Program

_PARTS = """
import spmd, spmd.numpy as snp
from spmd import lax
from spmd.compile.native.runtime import load as runtime

compile_written, names = runtime.compile_written, []
runtime.compile_written = lambda written: names.append(written.name) or compile_written(written)

def loaded():
    return {name.removeprefix("runtime ") for name in names} - {"runtime"}

spmd.jit(lambda x: x * 2 + 1)(snp.ones(3))
assert loaded() == set(), loaded()
spmd.jit(lambda x: x @ x)(snp.ones((32, 32)))
assert loaded() == set(), loaded()
spmd.jit(lambda x: snp.tanh(x) * 2)(snp.ones(10**6))
runtime.pool_calls()  # nobody waits for it
assert loaded() <= {"pool", "queue"} and "pool" in loaded(), loaded()
grow = spmd.jit(lambda x: lax.while_loop(lambda y: y[0] < 900, lambda y: snp.sort(y * 2), x))
assert grow(snp.ones(5000))[7] == 1024
assert "while" in loaded(), loaded()
"""


def test_a_process_loads_the_parts_that_its_programs_use():
    done = subprocess.run([sys.executable, "-c", _PARTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_each_step_has_its_part_of_the_runtime():
    everything = set(range(byte_code.KERNEL, byte_code.ONCE + 1))
    assert set(encode._OF_STEPS) == everything - {byte_code.KERNEL, byte_code.COPY}
    assert {*encode._OF_STEPS.values(), POOL, QUEUE} == set(PARTS)


@pytest.mark.parametrize("units, cost_ns, parts", [(1, 1e6, ()), (2, 1e6, (POOL,)), (2, 1.0, ())])
def test_programs_with_shared_work_load_the_pool(units, cost_ns, parts):
    step = KernelStep(2**20, (), units, cost_ns)
    assert Encoder(Program((), (step,)), {}).encode().parts == parts
