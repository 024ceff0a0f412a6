"""Arrays moved between layouts over real ranks: in shared memory, and by messages."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.mpi

Run = Callable[..., subprocess.CompletedProcess[str]]


more = pytest.mark.nightly(reason="one and several devices of a rank run in CI")


@pytest.mark.parametrize(
    "ranks, devices, shared",
    [
        (2, 2, "1"),
        (3, 1, "1"),
        pytest.param(4, 1, "1", marks=more),
        pytest.param(2, 1, "0", marks=more),
        (3, 2, "0"),
    ],
)
def test_random_layouts_over_ranks(mpirun: Run, ranks: int, devices: int, shared: str):
    program = ["-m", "tests.multiprocess.programs.redistribution", "24"]
    env = {"SPMD_NUM_CPU_DEVICES": str(devices), "SPMD_SHARED_MEMORY": shared}
    done = mpirun(ranks, program, env=env, timeout=240)
    assert done.returncode == 0, done.stderr
    assert f"over {ranks} ranks, {ranks * devices} devices: all right" in done.stdout


TURNED = """
import numpy as np
import spmd
from spmd import NamedSharding, P

devices = np.array(spmd.devices())
x = np.arange(64, dtype=np.float32)
y = spmd.device_put(x, NamedSharding(spmd.Mesh(devices, ("x",)), P("x")))
z = spmd.device_put(y, NamedSharding(spmd.Mesh(devices[::-1], ("x",)), P("x")))
here = z.addressable_shards[0]
np.testing.assert_array_equal(here.data, x[here.index])
"""


@pytest.mark.parametrize("shared", ["1", "0"])
def test_the_flight_record_has_the_bytes_that_a_rank_receives(
    mpirun: Run, tmp_path: Path, shared: str
):
    program = tmp_path / "turned.py"
    program.write_text(TURNED)
    env = {"SPMD_TRACE": str(tmp_path / "trace"), "SPMD_SHARED_MEMORY": shared}
    done = mpirun(4, [str(program)], env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    events = json.loads((tmp_path / "trace" / "trace.json").read_text())["traceEvents"]
    found = [e for e in events if e["name"].startswith("exchange ")]
    assert {e["pid"] for e in found} == set(range(4))
    assert {e["args"]["bytes"] for e in found} == {64}
    assert all("turned.py" in e["args"]["line"] for e in found)
