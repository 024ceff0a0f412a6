"""What a process imports by when: a start is mostly imports, so each module has its time.

The program runs in two processes with one disk cache: what the second one needs is what counts.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

PROGRAM = """
import json, sys, numpy
others = set(sys.modules)
import spmd, spmd.numpy as snp
seen = [sorted(set(sys.modules) - others)]
f = spmd.jit(lambda x: snp.tanh(x) * 2 + x)
x = snp.arange(3.0)
for _ in range(3):
    f(x).block_until_ready()
    seen.append(sorted(set(sys.modules) - others))
spmd.nn.softmax(spmd.random.normal(spmd.random.key(0), (3,))).block_until_ready()
seen.append(sorted(set(sys.modules) - others))
print(json.dumps(seen))
"""

# By how many calls of a jitted function have been made: what is not imported then; 4 is after the
# first use of `spmd.nn` and `spmd.random`.
NOT_YET = {
    0: (
        *("hashlib", "difflib", "pathlib", "logging", "spmd.compile.executable.executable"),
        *("spmd.numpy._lazy_names", "spmd.lax._lazy_names", "spmd.nn", "spmd.random", "spmd.debug"),
    ),
    1: (
        "pathlib",
        "spmd.compile.dispatch.fast_call",
        "spmd.compile.native.program.encode",
        "spmd.compile.native.llvm.modules",
    ),
    2: (
        "hashlib",
        "sysconfig",
        "spmd.compile.dispatch.mesh_fast_call",
        "spmd.compile.executable.mesh_executable",
        "spmd.compile.passes.pipeline",
        "spmd.compile.native.runtime.ir.modules",
        "spmd.compile.native.cpython.ir.entry_point",
        "spmd.compile.native.cpython.ir.tree_unflatten",
    ),
    4: ("numpy.random", "secrets"),
}


def _imported(folder: str) -> list[set[str]]:
    environment = os.environ | {"SPMD_CACHE_DIR": folder, "SPMD_CHECK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [set(modules) for modules in json.loads(done.stdout)]


def test_the_names_are_those_of_modules():
    names = [name for names in NOT_YET.values() for name in names]
    assert not [name for name in names if importlib.util.find_spec(name) is None]


def test_a_start_imports_what_it_needs(tmp_path):
    _imported(str(tmp_path))
    seen = _imported(str(tmp_path))
    for calls, names in NOT_YET.items():
        early = seen[calls].intersection(names)
        assert not early, f"after {calls} calls there is already {sorted(early)}"
    assert seen[2] == seen[3], "the third call of a program imports nothing"
