"""`SPMD_DEBUG=collectives`: results of collectives and values of the host are compared."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.mpi

PROGRAM = """
import numpy as np
import spmd, spmd.numpy as snp
from spmd import lax

def step(x):
    y = lax.psum(x, "i")  # the sum
    y = y + lax.all_gather(x, "i").sum(0) + lax.ppermute(x, "i", [(0, 1), (1, 0)])
    z = lax.all_to_all(snp.stack([x, 2 * x]), "i", 0, 0)
    return y + z.sum(0) + lax.psum_scatter(snp.stack([x, x]), "i") + lax.pmax(x, "i")

rank = spmd.process_index()
x = np.arange(3, dtype=np.{dtype})[None] + rank
{change}
out = spmd.pmap(step, axis_name="i")(x)
print("rank", rank, "has", np.asarray(out.astype(np.float32))[0].tolist())
"""
LINE = next(k for k, text in enumerate(PROGRAM.splitlines(), 1) if "the sum" in text)


@pytest.fixture
def run(run_python, tmp_path: Path):
    """`run(change, *options)` runs the program under spmdrun with its collectives checked."""

    def start(change: str, *options: str, dtype: str = "float32", debug: str = "collectives"):
        program = tmp_path / "step.py"
        text = textwrap.dedent(PROGRAM).replace("{change}", change).replace("{dtype}", dtype)
        program.write_text(text)
        words = ["-m", "launch", "-n", "2", *options, str(program)]
        return run_python(
            words, env={"SPMD_DEBUG": debug, "SPMD_NUM_CPU_DEVICES": "1"}, timeout=240
        )

    return start


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "complex64"])
def test_right_results_pass(run, dtype):
    done = run("", dtype=dtype) if dtype != "complex64" else run("x = x * 1", dtype="float64")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("has [") == 2 and "Warning" not in done.stderr


@pytest.mark.parametrize("op", [0, 3])
def test_a_flipped_bit_is_an_error_on_both_ranks(run, op):
    done = run("", "--inject", f"corrupt:rank=1,op={op},bit=30")
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "data was changed on the way between ranks" in said
    assert "rank 1: on device 1 element [" in said
    assert "data was changed" in said.rstrip().splitlines()[-1]
    if op == 0:
        assert f"at step.py:{LINE}" in said


def test_nan_is_told_and_the_program_goes_on(run):
    done = run("x[0, 1] = np.nan if rank == 1 else x[0, 1]")
    assert done.returncode == 0, done.stderr
    assert "the operand of device 1 has 1 NaN" in done.stderr
    assert f"step.py:{LINE}" in done.stderr and done.stdout.count("has [") == 2


def test_collectives_are_printed_as_they_happen(run):
    done = run("", debug="2")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("psum") >= 2 and " took " in done.stderr


VALUES = """
import numpy as np
import spmd, spmd.numpy as snp
from spmd import random

rank = spmd.process_index()
rows = spmd.NamedSharding(spmd.make_mesh((2,), ("i",)), spmd.P("i"))
x = spmd.make_array_from_callback((4,), rows, lambda index: np.ones(4, np.float32)[index])
scale = spmd.jit(lambda x, by: x * by["rate"])
noise = spmd.jit(lambda x, key: x + random.normal(key, x.shape))

def said(call):
    try:
        call()
    except spmd.errors.ReplicaError as error:
        return str(error).splitlines()[:2]

for _ in range(3):
    scale(x, {"rate": np.float32(0.5)})
spmd.device_put(np.arange(4.0), rows)
print("rank", rank, said(lambda: scale(x, {"rate": np.float32(0.5 + rank)})))
print("rank", rank, said(lambda: noise(x, random.key(rank))))
print("rank", rank, said(lambda: spmd.device_put({"w": np.full(4, rank)}, rows)))
print("rank", rank, said(lambda: scale(x, {"rate": np.float32(0.25)})))
"""


TEXTS = (
    "by['rate'] float32[]: rank 1 differs from rank 0 by up to 1",
    "key key[]: rank 1 differs from rank 0",
    "x['w'] int32[4]: rank 1 differs from rank 0 by up to 1 at [0]",
    "None",
)


def test_values_of_the_host_that_differ_are_named(run_python, tmp_path: Path):
    """A program over a mesh takes a value of the host as the same on all ranks, unseen else."""
    program = tmp_path / "values.py"
    program.write_text(VALUES)
    words = ["-m", "launch", "-n", "2", str(program)]
    env = {"SPMD_NUM_CPU_DEVICES": "1"}
    out = run_python(words, env=env | {"SPMD_DEBUG": "collectives"}, timeout=240).stdout
    lines = [[line for line in out.splitlines() if text in line] for text in TEXTS]
    assert [len(found) for found in lines] == [2, 2, 2, 2], out
    assert all("0.5 on rank 0, 1.5 on rank 1" in line for line in lines[0])
    assert all("(0, 0) on rank 0, (0, 1) on rank 1" in line for line in lines[1])
    assert run_python(words, env=env, timeout=240).stdout.count("None") == 8
