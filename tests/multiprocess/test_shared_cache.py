"""Ranks that share a compile cache: what one run leaves, however it ends, the next one finds."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.mpi

Run = Callable[..., subprocess.CompletedProcess[str]]

PROGRAM = """
import sys
import numpy as np
import spmd, spmd.numpy as snp
from spmd.compile.native.llvm.compiler import loader
x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
print(float(spmd.jit(lambda x: snp.sum(snp.tanh(x @ x)))(x)))
total = spmd.pmap(lambda x: spmd.lax.psum(x, "i"), axis_name="i")(x[None])
print("compiled", loader.compiled, file=sys.stderr)
"""


def test_what_ranks_compiled_the_next_run_finds(mpirun: Run, tmp_path: Path):
    (tmp_path / "train.py").write_text(PROGRAM)
    env = {"SPMD_CACHE_DIR": str(tmp_path / "cache"), "SPMD_CHECK": "0"}
    runs = [mpirun(2, [str(tmp_path / "train.py")], env=env, timeout=120) for _ in range(2)]
    for done in runs:
        assert done.returncode == 0, done.stderr
    assert sorted(runs[0].stdout.split()) == sorted(runs[1].stdout.split())
    assert "compiled 0" not in runs[0].stderr
    assert runs[1].stderr.count("compiled 0") == 2
    assert not list(tmp_path.glob("cache/objects/??/.new-*"))
