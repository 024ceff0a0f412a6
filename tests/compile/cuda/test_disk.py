"""Programs and machine code on the disk: a second process compiles nothing, with either driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd import numpy as snp
from spmd.api.inspect import make_jaxpr
from spmd.base.config import config
from spmd.compile.cuda import images, nvrtc
from spmd.compile.cuda.program import CudaProgram
from spmd.compile.executable.executable import compile_jaxpr
from spmd.compile.executable.memory_analysis import memory_of
from spmd.compile.native.llvm import object_cache
from spmd.compile.native.program import stored

ROOT = Path(__file__).parents[3]

# Loops, constants (the user's and one that passes make), a callback-free host step, several
# devices, an operation outside of jit, a donated argument.
SCRIPT = """
import sys
import numpy as np
import spmd
from spmd import lax, numpy as snp

{setup}

X = np.linspace(-2, 2, 24, dtype=np.float32).reshape(4, 6)
TABLE = np.arange(6, dtype=np.float32)

def step(x):
    y = lax.fori_loop(0, 3, lambda k, y: snp.tanh(y) + k, x)
    return (y @ y.T).sum(0), snp.sort(x * TABLE), snp.linalg.cholesky(x @ x.T + 9 * snp.eye(4))

found = [
    *spmd.jit(step)(X),
    spmd.pmap(lambda x: lax.psum(x * 2, "i"), axis_name="i")(X[:2]),
    snp.asarray(X) + 1,
    spmd.jit(lambda x: x * 2 + 1, donate_argnums=0)(snp.asarray(X) + 2),
]
assert all(d.platform == "gpu" for x in found for d in x.devices())
print(*[float(np.asarray(x).astype(np.float64).sum()) for x in found])
from spmd.compile.native.llvm.compiler import loader
print(loader.compiled, *[m for m in {modules} if m in sys.modules])
"""
STANDIN = """
sys.path.insert(0, {root!r})
from spmd.compile.cuda.emulator.driver import EmulatorDriver
from tests.compile.cuda.standin_cupy import Standin
Standin(EmulatorDriver(2)).install()
"""
# None of them belongs in a process that finds its programs on the disk.
MAKERS = (
    "llvmlite",
    "spmd.compile.cuda.assemble",
    "spmd.compile.cuda.kernel",
    "spmd.compile.cuda.nvrtc",
    "spmd.compile.cuda.emulator.translate",
    "spmd.compile.lower.lowering",
    "spmd.compile.passes.pipeline",
)


@pytest.mark.parametrize("name", ["emulator", "standin"])
def test_a_second_process_compiles_nothing(run_python, tmp_path, name):
    setup = STANDIN.format(root=str(ROOT)) if name == "standin" else ""
    env = {
        "SPMD_CACHE_DIR": str(tmp_path),
        "SPMD_CHECK": "0",
        "SPMD_PLATFORM": "cuda",
        "SPMD_CUDA_DRIVER": name,
        "SPMD_NUM_CUDA_DEVICES": "2",
    }
    script = SCRIPT.format(setup=setup, modules=MAKERS)
    first, second = (run_python(["-c", script], env=env) for _ in range(2))
    assert not first.returncode, first.stderr
    assert not second.returncode, second.stderr
    values, made = first.stdout.splitlines()
    assert int(made.split()[0]) > 5
    assert "spmd.compile.cuda.nvrtc" in made
    assert second.stdout.splitlines() == [values, "0"]


# ---- in one process ----------------------------------------------------------------------------

X = np.linspace(-2, 2, 40, dtype=np.float32).reshape(5, 8)


@pytest.fixture
def folder(tmp_path, monkeypatch, gpus):
    """A cache of the test's own, with programs stored as they are outside of tests."""
    own = object_cache.ObjectCache(lambda: tmp_path)
    monkeypatch.setattr(stored, "object_cache", own)
    monkeypatch.setattr(images, "object_cache", own)
    monkeypatch.setattr(images, "known", {})
    with config.override("check", False):
        yield own


def compiled(function, *args) -> Any:
    """The program of a function on the default device, as another process would ask for it."""
    return compile_jaxpr(make_jaxpr(function)(*args), device=spmd.devices()[0])


def is_stored(executable) -> bool:
    return executable.native.program is None


def step(x):
    return lax.scan(lambda c, row: (snp.tanh(c + row), c * row), x[0], x)


def test_a_stored_program_gives_the_same_bits(folder):
    first = compiled(step, X)
    wanted = [np.asarray(y) for y in first((X,))]
    second = compiled(step, X)
    assert (is_stored(first), is_stored(second)) == (False, True)
    for y, w in zip(second((X,)), wanted, strict=True):
        np.testing.assert_array_equal(y, w)


@pytest.mark.parametrize("gone", ["names", "modules"])
def test_machine_code_that_is_gone_is_compiled_again(folder, monkeypatch, gone):
    first = compiled(step, X)
    wanted = [np.asarray(y) for y in first((X,))]
    load, compile_cubin, made = folder.load, nvrtc.compile_cubin, []

    def counted(source, arch):
        made.append(source)
        return compile_cubin(source, arch)

    def load_others(key):
        payload = load(key)
        if payload is None or payload.startswith(b"module "):
            return None if gone == "names" else payload
        return None if gone == "modules" and b"\x7fELF" in payload else payload

    monkeypatch.setattr(images.cuda_nvrtc, "compile_cubin", counted, raising=False)
    for forget, loader, times in ((False, load, 0), (True, load, 0), (True, load_others, 1)):
        if forget:
            images.known.clear()
        monkeypatch.setattr(folder, "load", loader)
        second = compiled(step, X)
        assert is_stored(second)
        for y, w in zip(second((X,)), wanted, strict=True):
            np.testing.assert_array_equal(y, w)
        assert len(made) == times


def test_a_stored_program_reports_scratch_memory_of_kernels(folder):
    """That of the runs that a sort merges, which no plan knows before assembly."""
    x = np.linspace(0, 9, 5000, dtype=np.float32) % 1
    closed = make_jaxpr(lambda x: snp.sort(x * 2))(x)
    # The second has the machine code made, and for that its plan.
    first, _, third = (compile_jaxpr(closed, device=spmd.devices()[0]) for _ in range(3))
    assert is_stored(third) and "plan" not in vars(third)
    sizes = [memory_of(each).temp_size_in_bytes for each in (first, third)]
    assert sizes[0] == sizes[1] == max(third.frames.arenas) > x.nbytes
    np.testing.assert_array_equal(third((x,))[0], np.sort(x * 2))


def until(x):
    return lax.while_loop(lambda s: s.sum() < 1e6, lambda s: s * 1.5 + 1, x)


def test_a_stored_loop_has_graphs(folder):
    with config.override("platform", "cpu"):
        wanted = np.asarray(spmd.jit(until)(abs(X)))
    for is_known in (False, True):
        executable = compiled(until, X)
        assert is_stored(executable) == is_known
        assert executable.native.bodies == 1
        np.testing.assert_allclose(executable((abs(X),))[0], wanted, 1e-5)


def test_another_nvrtc_compiles_again(folder, monkeypatch):
    compiled(step, X)((X,))
    symbols = [symbol for _, symbol in images.known]
    assert set(images.from_disk(symbols, "sm_90")) == set(symbols)
    assert images.from_disk(symbols, "sm_80") == {}
    monkeypatch.setattr(images, "toolkit", lambda: "12.0")
    assert images.from_disk(symbols, "sm_90") == {}


def test_errors_name_the_steps_of_a_stored_program(folder):
    closed = make_jaxpr(step)(X)
    first, second = (compile_jaxpr(closed, device=spmd.devices()[0]).native for _ in range(2))
    assert isinstance(first, CudaProgram) and isinstance(second, CudaProgram)
    assert second.program is None
    assert "steps, from" in first.described
    assert second.described == first.described
    orphan = compiled(step, X)  # whose jaxpr is gone
    assert orphan.native.described == first.described
