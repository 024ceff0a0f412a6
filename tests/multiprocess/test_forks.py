"""Children that a rank forks: they are no ranks, and must not disturb those."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.mpi

Run = Callable[..., subprocess.CompletedProcess[str]]

PROGRAM = """
import os, sys
import numpy as np
from spmd.transport import world as bootstrap
from spmd.base.errors import LaunchError
comm = bootstrap.world()
x = np.ones(3)
comm.all_reduce(x)
child = os.fork()
if child == 0:
    try:
        comm.all_reduce(x)
    except LaunchError as error:
        assert f"was forked from rank {comm.rank}" in str(error)
        sys.exit(3)  # runs what is registered at exit
    sys.exit(4)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
comm.all_reduce(x)
assert x[0] == 4
print("on", flush=True)
"""


@pytest.mark.parametrize("shared", ["1", "0"], ids=["shared_memory", "messages"])
def test_a_forked_child_is_no_rank_and_ends_by_itself(mpirun: Run, tmp_path: Path, shared: str):
    (tmp_path / "train.py").write_text(PROGRAM)
    done = mpirun(2, [str(tmp_path / "train.py")], env={"SPMD_SHARED_MEMORY": shared}, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("on") == 2
