"""The driver of GPUs over a stand-in for CuPy, which drives the emulator."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import sys

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd import numpy as snp
from spmd.base.config import config
from spmd.base.errors import CudaError, OutOfMemoryError
from spmd.compile.cuda.emulator.driver import EmulatorDriver
from tests.compile.cuda.other_library import Library
from tests.compile.cuda.standin_cupy import DRIVER, DRIVER_MODULE, RUNTIME, Standin

X = np.linspace(-2, 2, 24, dtype=np.float32).reshape(4, 6)


@pytest.fixture
def standin(monkeypatch):
    made = Standin(EmulatorDriver(2, capacity=1 << 24))
    made.install(monkeypatch.setattr, monkeypatch.setitem)
    yield made
    sys.modules.pop(DRIVER_MODULE, None)


@pytest.fixture
def platform(standin):
    """Programs run on the two devices of the stand-in."""
    with config.override("cuda_driver", "standin"), config.override("platform", "cuda"):
        yield
    spmd.clear_caches()


def test_a_device_has_facts(standin):
    gpu = standin.driver
    assert gpu.device_count() == 2
    facts = gpu.facts(1)
    assert (facts.name, facts.arch, facts.memory) == ("emulated GPU 1", "sm_90", 1 << 24)
    assert gpu.bus_id(0) != gpu.bus_id(1)
    with pytest.raises(CudaError, match="CUDA device 2: there are 2"):
        gpu.facts(2)


def test_copies_are_in_the_stream(standin):
    gpu, out = standin.driver, np.zeros_like(X)
    place = gpu.allocate(0, X.nbytes)
    gpu.copy(0, place, X.ctypes.data, X.nbytes)
    gpu.copy(0, out.ctypes.data, place, X.nbytes)
    assert not gpu.is_idle(0)
    gpu.synchronize(0)
    np.testing.assert_array_equal(out, X)
    gpu.clear(0, place, 8)
    gpu.copy(0, out.ctypes.data, place, X.nbytes)
    is_done = gpu.mark(0)
    while not is_done():
        pass
    assert (out.ravel()[:3] == [0, 0, X[0, 2]]).all()
    gpu.free(0, place)
    assert gpu.memory_in_use(0) == (0, X.nbytes)


def test_pinned_memory_is_freed_behind_the_work_of_the_stream(standin):
    gpu, out = standin.driver, np.zeros_like(X)
    place, pinned = gpu.allocate(0, X.nbytes), gpu.allocate_pinned(X.nbytes)
    ctypes.memmove(pinned, X.ctypes.data, X.nbytes)
    gpu.copy(0, place, pinned, X.nbytes)
    gpu.free_pinned(0, pinned)
    gpu.copy(0, out.ctypes.data, place, X.nbytes)
    gpu.synchronize(0)
    np.testing.assert_array_equal(out, X)
    with pytest.raises(KeyError):
        gpu.free_pinned(0, pinned)
    gpu.allocate_pinned(64)  # looks for what can be freed
    assert pinned not in standin.gpu.pinned
    gpu.free(0, place)


def test_streams_wait_for_each_other(standin):
    gpu = standin.driver
    place, library = gpu.allocate(1, X.nbytes), Library(1, gpu=standin.gpu)
    gpu.copy(1, place, X.ctypes.data, X.nbytes)
    gpu.order(1, gpu.stream(1), library.stream)
    gpu.order(1, gpu.stream(1), 1)
    np.testing.assert_array_equal(library.read(place, X.shape, X.dtype), X)
    assert standin.gpu.events == {}
    assert (gpu.device_of(place), gpu.device_of(X.ctypes.data)) == (1, None)


def test_memory_that_is_not_there_is_an_error(standin):
    held = standin.driver.allocate(0, 1 << 20)
    standin.others = 3 << 20
    with pytest.raises(OutOfMemoryError) as caught:
        standin.driver.allocate(0, 1 << 24)
    assert str(caught.value).endswith(
        "CUDA device 0 (emulated GPU 0): 16.8 MB asked, 12.6 MB of 16.8 MB free; other processes "
        "and CUDA itself hold 3.15 MB"
    )
    standin.driver.free(0, held)


def test_failed_work_has_a_hint(standin):
    gpu = standin.driver
    place = gpu.allocate(1, 64)
    with pytest.raises(CudaError, match="is not 4096 bytes of one allocation"):
        gpu.copy(1, place, place, 4096)
    assert "SPMD_CUDA_DRIVER=emulator" in _raised(gpu.copy, 1, place, place, 4096)


def _raised(call, *args):
    with pytest.raises(CudaError) as caught:
        call(*args)
    return str(caught.value)


@pytest.mark.usefixtures("platform")
def test_programs_run(standin, monkeypatch):
    def step(x):
        y = lax.fori_loop(0, 3, lambda k, y: snp.tanh(y) + k, x)
        return (y @ y.T).sum(0)

    found = spmd.jit(step)(X)
    with config.override("platform", "cpu"):
        wanted = np.asarray(spmd.jit(step)(X))
    np.testing.assert_allclose(found, wanted, 1e-5)
    total = spmd.pmap(lambda x: lax.psum(x, "i"), axis_name="i")(X[:2])
    np.testing.assert_allclose(total[1], X[0] + X[1], 1e-6)
    launched, replay = [], standin.driver.replay
    monkeypatch.setattr(standin.driver, "replay", lambda *g: launched.append(g) or replay(*g))
    repeated, x = spmd.jit(step), snp.asarray(X) + 0
    outs = [np.asarray(repeated(x)) for _ in range(8)]
    assert len(launched) >= 3
    np.testing.assert_allclose(outs, [wanted] * 8, 1e-5)

    def until(x):
        return lax.while_loop(lambda s: s.sum() < 1e6, lambda s: s * 1.5 + 1, x)

    launched.clear()
    with config.override("platform", "cpu"):
        wanted_too = np.asarray(spmd.jit(until)(X))
    np.testing.assert_allclose(spmd.jit(until)(x), wanted_too, 1e-5)
    assert not launched  # native code launches the graph of the body
    copied, upload = [], standin.driver.upload
    monkeypatch.setattr(standin.driver, "upload", lambda *g: copied.append(g) or upload(*g))
    outs = [np.asarray(repeated(X * 1)) for _ in range(8)]
    assert len(copied) >= 4
    np.testing.assert_allclose(outs, [wanted] * 8, 1e-5)


def test_the_stand_in_has_no_name_that_the_wheel_lacks():
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("the wheel of CuPy is not installed: pip install spmd[cuda]")
    cupy = pytest.importorskip("cupy", exc_type=ImportError)
    api = "cupy_backends.cuda.api"
    for name, signatures in ("runtime", RUNTIME), ("driver", DRIVER):
        real = importlib.import_module(f"{api}.{name}")
        for signature in signatures:
            assert getattr(real, signature.split("(")[0]).__doc__.splitlines()[0] == signature
    assert issubclass(importlib.import_module(f"{api}.runtime").CUDARuntimeError, RuntimeError)
    made = Standin(EmulatorDriver(1)).cuda()
    for name, ours in vars(made).items():
        real = getattr(cupy.cuda, name)
        public = [n for n in vars(ours) if not n.startswith("_")]
        assert [n for n in public if not hasattr(real, n)] == [], name
