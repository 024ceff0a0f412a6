"""Arrays moved between layouts over real ranks: in shared memory, and by messages."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.mpi

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    "ranks, devices, shared", [(2, 2, "1"), (3, 1, "1"), (4, 1, "1"), (2, 1, "0"), (3, 2, "0")]
)
def test_random_layouts_over_ranks(mpirun: Run, ranks: int, devices: int, shared: str):
    program = ["-m", "tests.multiprocess.programs.redistribution", "24"]
    env = {"SPMD_NUM_CPU_DEVICES": str(devices), "SPMD_SHARED_MEMORY": shared}
    done = mpirun(ranks, program, env=env, timeout=240)
    assert done.returncode == 0, done.stderr
    assert f"over {ranks} ranks, {ranks * devices} devices: all right" in done.stdout
