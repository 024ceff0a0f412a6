"""Repeated calls of programs on GPUs: donated memory, and what a call costs, counted."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections import Counter
from functools import partial

import numpy as np
import pytest

import spmd
from spmd import P, lax
from spmd import numpy as snp
from spmd.base.config import config
from spmd.base.errors import CudaError, DeletedError, OutOfMemoryError
from spmd.compile.cuda.driver import driver
from spmd.compile.cuda.emulator.driver import EmulatorDriver
from spmd.compile.cuda.emulator.streams import Streams
from spmd.compile.executable import cuda_backend
from tests.compile.cuda.other_library import Library

pytestmark = pytest.mark.usefixtures("gpus")

X = np.linspace(-2, 2, 24, dtype=np.float32).reshape(4, 6)
# The first two calls take the general path, and a closure is written; then it is used.
CALLS = 5
# By then the memory of results repeats, and calls over the same memory are captured.
WARM = 8


def addresses(x) -> list[int]:
    """Where an array's shards lie."""
    return [shard.unsafe_buffer_pointer() for shard in x.shards or (x,)]


def loss(w, x):
    return ((snp.tanh(x @ w) - 1) ** 2).sum()


def update(w, x):
    return w - 0.1 * spmd.grad(loss)(w, x)


def updated(w, times: int = CALLS):
    """The same on the CPU, without donation."""
    with config.override("platform", "cpu"):
        step = spmd.jit(update)
        for _ in range(times):
            w = step(w, X)
        return np.asarray(w)


# ---- donation ----------------------------------------------------------------------------------


def test_a_result_is_written_over_a_donated_argument():
    step = spmd.jit(update, donate_argnums=0)
    x, w = snp.asarray(X), snp.asarray(X.T.copy()) + 0
    places = []
    for _ in range(CALLS):
        old, w = w, step(w, x)
        assert old.is_deleted()
        places += addresses(w)
    with pytest.raises(DeletedError):
        step(old, x)
    np.testing.assert_allclose(w, updated(X.T), 1e-4)
    assert len(set(places)) == 1


def test_mapped_and_sharded_state_is_written_over():
    mesh = spmd.make_mesh((4,), ("i",))
    maps = {
        "pmap": spmd.pmap(lambda x: x * 2 + lax.axis_index("i"), axis_name="i", donate_argnums=0),
        "shard_map": spmd.jit(
            spmd.shard_map(
                lambda x: x * 2 + lax.axis_index("i"), mesh=mesh, in_specs=P("i"), out_specs=P("i")
            ),
            donate_argnums=0,
        ),
    }
    for name, step in maps.items():
        state, wanted, before = step(X), X * 2 + np.arange(4)[:, None], []
        for _ in range(CALLS):
            before = addresses(state)
            state, wanted = step(state), wanted * 2 + np.arange(4)[:, None]
        np.testing.assert_allclose(state, wanted, err_msg=name)
        assert addresses(state) == before, name


@pytest.mark.parametrize("call", range(1, CALLS))
def test_memory_that_others_hold_stays(call):
    """An array over the same memory, another library, and that of another library keep values."""
    step, library = spmd.jit(lambda x: x * 2 + 1, donate_argnums=0), Library()
    for _ in range(call - 1):
        step(snp.asarray(X) + 0)
    x = snp.asarray(X) + 0
    same = spmd.device_put(x, x.device)
    capsule = (y := snp.asarray(X) + 0).__dlpack__(stream=-1, max_version=(1, 0))
    lent = library.array(X)
    z = snp.from_dlpack(lent)
    outs = [step(x), step(y), step(z)]
    assert z.is_deleted()
    for out in outs:
        np.testing.assert_array_equal(out, X * 2 + 1)
    np.testing.assert_array_equal(same, X)
    np.testing.assert_array_equal(snp.from_dlpack(Given(capsule)), X)
    np.testing.assert_array_equal(library.read(lent.address, X.shape, X.dtype), X)


class Given:
    """An array of another library, of which a capsule is all that there is."""

    def __init__(self, capsule):
        self.capsule = capsule

    def __dlpack__(self, **_):
        return self.capsule

    def __dlpack_device__(self):
        return 2, 0


def test_an_input_that_is_read_later_stays():
    step = spmd.jit(lambda x: (x + 1, (x * x).sum() + x[::-1]), donate_argnums=0)
    for _ in range(CALLS):
        one, two = step(snp.asarray(X) + 0)
        np.testing.assert_array_equal(one, X + 1)
        np.testing.assert_allclose(two, (X * X).sum() + X[::-1], 1e-6)


# ---- costs -------------------------------------------------------------------------------------


def python_calls(function, *args) -> Counter[str]:
    """The Python functions that a call enters, but for the emulator's and what these call."""
    found, depth = Counter(), [0]

    def profile(frame, event, arg):
        inside = "emulator" in frame.f_code.co_filename
        if event == "call":
            found[frame.f_code.co_qualname] += not inside and not depth[0]
            depth[0] += inside
        elif event == "return":
            depth[0] -= inside

    sys.setprofile(profile)
    try:
        outs = function(*args)
    finally:
        sys.setprofile(None)
    del outs
    return +found


ASKED = "allocate", "allocate_pinned", "begin_capture", "copy", "order", "replay", "synchronize"
ASKED += "upload", "new_event"


@pytest.fixture
def asked(monkeypatch):
    """Counts of what the driver is asked for."""
    found, gpu = Counter(), driver()
    for name in ASKED:
        method = getattr(gpu, name)

        def counted(*args, name=name, method=method):
            found[name] += 1
            return method(*args)

        monkeypatch.setattr(gpu, name, counted)
    return found


def test_a_training_step_costs_as_few_calls_as_on_the_cpu():
    counts = {}
    for platform in "cpu", "cuda":
        with config.override("platform", platform):
            step = spmd.jit(update, donate_argnums=0)
            w, x = snp.asarray(X.T.copy()) + 0, snp.asarray(X) + 0
            for _ in range(CALLS):
                w = step(w, x)
            counts[platform] = python_calls(step, w, x)
    assert counts["cuda"] == counts["cpu"] == {"JitFunction.__call__": 1, "match": 1}


def test_a_repeated_call_is_one_launch_without_allocation_and_wait(asked, monkeypatch):
    function = spmd.jit(lambda x, w: (snp.tanh(x @ w).sum(0), (x[:, :4] @ w.T).sum(1)))
    x, w = snp.asarray(X) + 0, snp.asarray(X.T.copy()) + 0
    for _ in range(WARM):
        outs = function(x, w)
    put, works = Streams.put, []

    def counted(streams, number, do, always=False):
        works.append(always)  # an event, or freed memory
        return put(streams, number, do, always)

    monkeypatch.setattr(Streams, "put", counted)
    asked.clear()
    outs = function(x, w)
    assert asked == {"replay": 1} and works == [False, True]
    monkeypatch.undo()
    with config.override("platform", "cpu"):
        wanted = function(X, X.T)
    for out, y in zip(outs, wanted, strict=True):
        np.testing.assert_allclose(out, y, 1e-4, 1e-5)


def test_values_of_the_host_are_one_copy(asked):
    function = spmd.jit(lambda x, rate, flag, batch, count: x * rate + batch[flag * 1] - count)
    x = snp.asarray(X) + 0
    for k in range(WARM):
        asked.clear()
        out = function(x, 0.5 * k, bool(k % 2), X * k, np.float32(k))
        np.testing.assert_allclose(out, X * 0.5 * k + X[k % 2] * k - k, 1e-5)
    asked.clear()
    values = 2.5, True, X * 3, np.float32(7)
    out = function(x, *values)
    values[2][:] = np.nan  # what the caller does with its array afterwards is of no matter
    assert asked == {"replay": 1, "upload": 1}
    del asked
    np.testing.assert_allclose(out, X * 2.5 + X[1] * 3 - 7, 1e-5)


def test_pinned_memory_that_is_freed_too_early_shows(monkeypatch):
    """The same with the wait for the copy taken out: the emulator's streams are late."""
    gpu = driver()
    assert isinstance(gpu, EmulatorDriver)
    monkeypatch.setattr(gpu, "free_pinned", lambda device, address, *_: gpu.release_pinned(address))
    function = spmd.jit(lambda x, batch: x + batch)
    for _ in range(CALLS):
        assert np.isnan(function(snp.zeros(X.shape), X)).all()


def test_a_loop_over_its_own_results_alternates_between_two_graphs(asked):
    step = spmd.jit(lambda w, k: (snp.tanh(w @ X) @ X.T * 0.1 + w + k, (w * w).sum()))
    w, kept = snp.asarray(X @ X.T) + 0, []
    wanted = np.asarray(w)
    for k in range(40):
        w, total = step(w, 0.25 * k)
        np.testing.assert_allclose(total, (wanted * wanted).sum(), 1e-3)
        wanted = np.tanh(wanted @ X) @ X.T * np.float32(0.1) + wanted + np.float32(0.25 * k)
        if k == 20:
            kept += [w, wanted]  # its memory is not written over
    np.testing.assert_allclose(w, wanted, 1e-3)
    np.testing.assert_allclose(kept[0], kept[1], 1e-3)
    assert asked["begin_capture"] <= 4 and asked["replay"] > 25


def test_an_executable_has_at_most_four_graphs(asked, monkeypatch):
    function = spmd.jit(lambda x: (snp.tanh(x @ x.T) @ x).sum(0))
    several = [snp.asarray(X * k) + 0 for k in range(6)]
    gc.collect()
    freed, gpu = [], driver()
    free = gpu.free_graph
    monkeypatch.setattr(gpu, "free_graph", lambda *given: freed.append(given) or free(*given))
    for _ in range(12):
        for x in several:
            function(x)
    assert asked["begin_capture"] == 4 + len(freed) == 4 + 2
    asked.clear()
    with config.override("cuda_graphs", False):
        for _ in range(WARM):
            out = function(several[1])
    assert not asked["replay"]
    np.testing.assert_allclose(out, (np.tanh(X @ X.T) @ X).sum(0), 1e-4)


def test_a_capture_that_fails_leaves_launches(monkeypatch, capfd):
    function = spmd.jit(lambda x: (snp.tanh(x @ x.T) @ x).sum(0))
    x, gpu = snp.asarray(X) + 0, driver()
    end = gpu.end_capture

    def refused(*given):
        end(*given)
        raise CudaError("the capture was invalidated")

    monkeypatch.setattr(gpu, "end_capture", refused)
    with config.override("log_compiles", True):
        outs = [np.asarray(function(x)) for _ in range(WARM)]
    np.testing.assert_array_equal(outs, [outs[0]] * WARM)
    assert "without graphs: the capture was invalidated" in capfd.readouterr().err


def test_numbers_that_do_not_fit_take_the_general_path():
    function = spmd.jit(lambda x, k: x + k)
    x = snp.asarray(np.arange(4, dtype=np.int32))
    for k in range(CALLS):
        np.testing.assert_array_equal(function(x, k), np.arange(4) + k)
    with pytest.raises(Exception, match="2147483648"):
        function(x, 2**31)
    np.testing.assert_allclose(function(x, 0.5), np.arange(4) + 0.5)


def test_arrays_elsewhere_take_the_general_path():
    function = spmd.jit(lambda x, y: x @ y.T)
    one, two = spmd.devices()[:2]
    for _ in range(CALLS):
        assert function(snp.asarray(X) + 0, snp.asarray(X) + 1).device == one
    on_two = spmd.device_put(X, two)
    for _ in range(CALLS):
        out = function(on_two, snp.asarray(X))
        assert out.device == two and out.committed
        np.testing.assert_allclose(out, X @ X.T, 1e-4)
    assert function(X, snp.asarray(X)).device == one
    with config.override("default_device", two):
        for _ in range(CALLS):
            assert function(snp.asarray(X) + 0, snp.asarray(X) + 1).device == two
    with pytest.raises(ValueError, match="committed to different devices"):
        function(on_two, spmd.device_put(X, one))


def test_callbacks_of_repeated_calls_run_and_raise():
    seen = []

    def called():
        seen.append(1)
        if len(seen) > CALLS:
            raise KeyError("no such row")

    @spmd.jit
    def function(x):
        spmd.debug.callback(called)
        return x * 2, x

    x = snp.asarray(X) + 0
    for _ in range(CALLS):
        twice, same = function(x)
        np.testing.assert_array_equal(twice, X * 2)
        assert addresses(same) == addresses(x)
    spmd.effects_barrier()
    assert len(seen) == CALLS
    with pytest.raises(Exception, match="no such row"):
        function(x)
        spmd.effects_barrier()


def test_threads_have_arenas_of_their_own():
    function = spmd.jit(lambda x: snp.cumsum(snp.tanh(x @ x.T) @ x, axis=0).sum(1))
    wanted = [np.asarray(function(snp.asarray(X * k))) for k in range(4)]
    failed = []

    def calls(k: int) -> None:
        x = snp.asarray(X * k) + 0
        for _ in range(20):
            if not np.array_equal(function(x), wanted[k]):
                failed.append(k)

    threads = [threading.Thread(target=calls, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_arenas_are_freed_where_memory_is_short(monkeypatch):
    gpu = driver()
    function = spmd.jit(lambda x: (snp.tanh(x @ x.T) @ x).sum(0))
    x = snp.asarray(np.ones((64, 64), np.float32)) + 0
    for _ in range(CALLS):
        function(x)
    allocate, (arena,) = gpu.allocate, cuda_backend.arenas(gpu, 0)

    def short(device, nbytes):
        if cuda_backend.arenas(gpu, device):
            raise OutOfMemoryError("none is left")
        return allocate(device, nbytes)

    monkeypatch.setattr(gpu, "allocate", short)
    assert arena.nbytes and cuda_backend.CudaMemory(gpu, 0, 64).address
    assert cuda_backend.arenas(gpu, 0) == []
    monkeypatch.setattr(gpu, "allocate", fail)
    with pytest.raises(OutOfMemoryError, match="its results are f32"):
        function(x)


def fail(device, nbytes):
    raise OutOfMemoryError("none is left")


def test_nans_are_told_where_values_are_read(asked):
    @partial(spmd.jit, donate_argnums=0)
    def step(w, x):
        return snp.log(w) + x, (w * w).sum()

    mapped = spmd.pmap(lambda x: lax.psum(snp.sqrt(x), "i"), axis_name="i")
    w, x, xs = snp.asarray(np.abs(X) + 1) + 0, snp.asarray(X) - 5, mapped(np.abs(X))
    with spmd.debug_nans(True):
        first, total = step(w, x)
        asked.clear()
        outs = [step(first, x)]  # a NaN: the logarithm of a negative number
        outs.append(step(outs[0][0], x))
        sums = mapped(xs - 100)
        assert not asked["synchronize"] and first.is_deleted()
    told = r"jit\(step\): log made a NaN at \[0, 0\] of f32\[4,6\], at .*test_calls.py:\d+ \(step\)"
    with pytest.raises(FloatingPointError, match=told):
        float(total)
    np.testing.assert_allclose(float(total), ((np.abs(X) + 1) ** 2).sum(), 1e-5)  # told once
    with pytest.raises(FloatingPointError, match=r"pmap\(<lambda>\): sqrt made a NaN on cuda:0"):
        sums.addressable_shards[3].data.block_until_ready()
    with spmd.debug_nans(True):
        bad = snp.log(x)
    with pytest.raises(FloatingPointError, match=r"log made a NaN at .*test_calls.py"):
        bad.block_until_ready()


def test_checks_of_results_do_not_keep_all_operands():
    """Only the newest calls wait for a look at their results."""
    double = spmd.jit(lambda x: x * 2)
    x = snp.asarray(X) + 0
    with spmd.debug_nans(True):
        first = weakref.ref(x.owner)
        for _ in range(30):
            x = double(x)
        gc.collect()
        assert first() is None
    np.testing.assert_allclose(x, X * 2.0**30)


OBSTACLES = {
    "the host has a part": lambda: spmd.jit(
        lambda x: lax.cond(x.sum() > 9, lambda x: x @ x.T, lambda x: x[:, :4] + 1, x)
    ),
    "it runs on 4 GPUs": lambda: spmd.pmap(lambda x: lax.psum(x * 2, "i") + x, axis_name="i"),
}


@pytest.mark.parametrize("told", OBSTACLES)
def test_the_obstacle_to_a_graph_is_told(told, capfd):
    function = OBSTACLES[told]()
    x = function(X)
    with config.override("log_compiles", True):
        for _ in range(CALLS):
            function(x)
    assert capfd.readouterr().err.count(f"without graphs: {told}") == 1


def test_failures_of_a_repeated_call_name_the_program():
    function = spmd.jit(partial(update, x=X))
    w = snp.asarray(X.T.copy()) + 0
    for _ in range(CALLS):
        function(w)
    owner = w.owner
    driver().free(0, owner.address)
    driver().synchronize(0)
    with pytest.raises(CudaError, match=r"(?s)is allocated.*update: \d+ steps"):
        np.asarray(function(w))
    owner.address = 0
