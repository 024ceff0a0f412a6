"""Exchanges in a stream of their own: overlap, order by events, and each event taken away."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd import numpy as snp
from spmd.base.config import config
from spmd.base.errors import CollectiveError, CudaError
from spmd.compile.cuda.driver import makers
from spmd.compile.cuda.emulator.driver import EmulatorDriver
from spmd.compile.cuda.emulator.streams import Streams
from spmd.compile.executable import cuda_backend
from tests.compile.cuda.test_calls import WARM, asked

pytestmark = pytest.mark.usefixtures("gpus")
assert asked

X = np.linspace(-2, 2, 24, dtype=np.float32).reshape(4, 6)
LONG = 3 << 13  # elements of which an all_reduce goes in two phases


def long(x):
    return snp.tile(snp.tanh(x), LONG // 6)


# Programs in which streams meet in each way that there is.
PROGRAMS = {
    # Work beside an exchange, then a reader; then a writer over what others copy.
    "beside": lambda x: lax.psum(snp.tanh(x), "i") + snp.cumsum(snp.sin(x)),
    "in two phases": lambda x: lax.psum(long(x), "i")[:6] * 2 + x,
    "one after the other": lambda x: lax.psum(lax.all_gather(x * 2, "i").sum(0) * x, "i"),
    "in a loop": lambda x: lax.fori_loop(0, 3, lambda k, s: lax.pmean(s * 2, "i") + k, x),
    "rows": lambda x: lax.all_gather(x.reshape(2, 3) + 1, "i", axis=1, tiled=True).sum(1),
    "scattered": lambda x: lax.psum_scatter(snp.outer(x, x)[:4] + 1, "i", tiled=True) * 2,
    "traded": lambda x: lax.all_to_all(snp.outer(x, x + 1)[:, :4] * 2, "i", 1, 0).sum(0),
    "to the next": lambda x: lax.ppermute(x * 2, "i", [(0, 1), (1, 3), (3, 2)]) + x,
}


def wanted(function, x=X):
    with config.override("platform", "cpu"):
        return np.asarray(spmd.jit(spmd.vmap(function, axis_name="i"))(x))


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    mapped = spmd.pmap(PROGRAMS[name], axis_name="i")
    for _ in range(3):
        np.testing.assert_allclose(mapped(X), wanted(PROGRAMS[name]), 1e-4, 1e-5)


DTYPES = "bool", "int8", "uint16", "int64", "bfloat16", "float16", "float64", "complex64"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [5, LONG + 1])
def test_reductions_have_the_bits_of_the_cpu(dtype, count):
    values = np.arange(4 * count).reshape(4, count) % 13 - 6
    reduce = lax.psum if dtype in ("complex64", "bool") else lax.pmax
    for function in reduce, lax.psum:
        found = {}
        for platform in "cpu", "cuda":
            with config.override("platform", platform), config.override("num_cpu_devices", 4):
                x = (values if dtype != "bool" else values > 0).astype(dtype)
                found[platform] = spmd.pmap(lambda x, f=function: f(x, "i"), axis_name="i")(x)
        np.testing.assert_array_equal(found["cuda"], found["cpu"])


def test_the_host_waits_for_nothing(asked):
    def step(w, x):
        return w - 0.1 * lax.pmean(spmd.grad(lambda w: ((x @ w) ** 2).sum())(w), "i")

    mapped = spmd.pmap(step, axis_name="i", donate_argnums=0)
    x = spmd.pmap(lambda x: x + 1)(X.reshape(4, 2, 3))
    w = spmd.pmap(lambda x: x[0] * 0 + 1)(x)
    for _ in range(WARM):
        w = mapped(w, x)
    asked.clear()
    w = mapped(w, x)
    assert asked == {}
    np.testing.assert_allclose(w, np.broadcast_to(np.asarray(w)[0], w.shape))


@pytest.mark.filterwarnings("ignore::spmd.errors.CollectiveWarning")
def test_only_some_devices_reach_an_exchange():
    def some(x):
        return lax.cond(x[0] > 0, lambda x: lax.psum(x, "i"), lambda x: x, x)

    with pytest.raises(CollectiveError, match=r"psum.*: devices \[2, 3\] reached it, devices \[0"):
        spmd.pmap(some, axis_name="i")(X)
    same = spmd.pmap(some, axis_name="i")(np.abs(X) + 1)
    np.testing.assert_allclose(same[0], (np.abs(X) + 1).sum(0), 1e-6)


# ---- an event taken away -------------------------------------------------------------------------

_drivers = itertools.count()


def exchanges(name: str) -> Callable[[], object]:
    """Two calls of a program over four devices."""
    mapped = spmd.pmap(PROGRAMS[name], axis_name="i")
    x = spmd.pmap(lambda x: x + 0)(X)
    return lambda: np.asarray([mapped(x) for _ in range(2)][-1])


def uploads(name: str) -> Callable[[], object]:
    """Three repeated calls with values of the host, while the emulator is behind."""
    function = spmd.jit(lambda x, batch: snp.tanh(x @ batch.T) @ batch + batch)
    x = spmd.jit(lambda x: x + 0)(X)
    for _ in range(3):
        np.asarray(function(x, X))
    np.asarray([function(x, X) for _ in range(3)][-1])
    return lambda: np.asarray([function(x, X * k) for k in range(4)][-1])


def reads(name: str) -> Callable[[], object]:
    """Results that are read while later calls are under way, some of them fetched before."""
    step = spmd.jit(lambda x: (snp.tanh(x) * 2, (x * x).sum()))
    x = spmd.jit(lambda x: x + 0)(X)

    def calls() -> object:
        state, totals = x, []
        for k in range(4):
            state, total = step(state)
            totals.append(total)
            if k % 2:
                total.copy_to_host_async()
        return [float(total) for total in totals], np.asarray(state)

    calls()
    return calls


def moves(name: str) -> Callable[[], object]:
    """Arrays that move from the host to a GPU, and from there to another, and are freed there."""
    step = spmd.jit(lambda x: snp.tanh(x) * 2)
    one, two, *others = spmd.devices()
    columns = spmd.NamedSharding(spmd.Mesh(np.array(others), ("i",)), spmd.P(None, "i"))

    def calls() -> object:
        outs = []
        for k in range(3):
            x = step(spmd.device_put(X * k, one))
            y = step(spmd.device_put(x, two))
            outs += [step(spmd.device_put(y, columns)), y] if k == 1 else [y]
            del x
        return [np.asarray(out) for out in outs]

    calls()
    return calls


OTHERS = {"uploads": uploads, "reads": reads, "moves": moves}


def run(name: str, seed: int, missing: int | None = None) -> int:
    """Run a program without its `missing`-th wait for an event; how many there are."""
    gpu = EmulatorDriver(4, seed=seed, capacity=1 << 26)
    wait_for, waits = Streams.wait_for, []

    def counted(self, number, mark):
        if not self.is_behind(number, mark):
            waits.append(None)
            if len(waits) - 1 == missing:
                return
        wait_for(self, number, mark)

    kind = f"without an event {next(_drivers)}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(makers, kind, lambda: gpu)
        # A look that finds a copy done would do instead of a wait for it.
        patch.setattr(cuda_backend, "_let_go", lambda: None)
        with config.override("cuda_driver", kind):
            calls = (exchanges if name in PROGRAMS else OTHERS[name])(name)
            patch.setattr(Streams, "wait_for", counted)
            calls()
            for device in range(4):  # what was freed too
                gpu.synchronize(device)
                gpu.synchronize(device, gpu.upload_stream(device))
    return len(waits)


# Both, where memory that is freed before a copy from it is done is what shows.
TOLD = "an event is missing|of one allocation|outside of what is allocated"


@pytest.mark.parametrize("name", ["beside", "rows", "scattered", *OTHERS])
def test_each_wait_for_an_event_is_needed(name):
    for missing in range(run(name, 0)):
        with pytest.raises(CudaError, match=TOLD):
            run(name, missing % 20, missing)


def test_a_missing_wait_is_told_in_any_order():
    """The order in which streams are late is a matter of the seed; the report is not."""
    for name, step in (("to the next", 5), ("reads", 2), ("moves", 3)):
        for missing in range(0, run(name, 0), step):
            for seed in range(missing % 5, 20, 5):  # with -m nightly, all
                with pytest.raises(CudaError, match=TOLD):
                    run(name, seed, missing)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", [*PROGRAMS, *OTHERS])
def test_each_missing_wait_is_told_with_each_seed(name, seed):
    for missing in range(run(name, seed)):
        with pytest.raises(CudaError, match=TOLD):
            run(name, seed, missing)
