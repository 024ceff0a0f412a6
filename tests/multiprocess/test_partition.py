"""Automatic partitioning over real ranks."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.mpi

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("ranks, devices", [(2, 1), (3, 2), (4, 1)])
def test_random_programs_over_ranks(mpirun: Run, ranks: int, devices: int):
    program = ["-m", "tests.multiprocess.programs.partition", "6"]
    done = mpirun(ranks, program, env={"SPMD_NUM_CPU_DEVICES": str(devices)}, timeout=240)
    assert done.returncode == 0, done.stderr
    assert f"over {ranks} ranks, {ranks * devices} devices: all right" in done.stdout


@pytest.mark.parametrize("ranks, devices", [(2, 2), (3, 1), (4, 1)])
def test_explicit_mode_and_partly_manual_maps_over_ranks(mpirun: Run, ranks: int, devices: int):
    program = ["-m", "tests.multiprocess.programs.explicit"]
    done = mpirun(ranks, program, env={"SPMD_NUM_CPU_DEVICES": str(devices)}, timeout=240)
    assert done.returncode == 0, done.stderr
    assert f"over {ranks} ranks, {ranks * devices} devices: all right" in done.stdout
