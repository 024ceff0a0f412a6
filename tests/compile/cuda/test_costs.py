"""Repeated calls of training steps, counted: allocations, waits, copies, launches, memory."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest

import spmd
from spmd import P, lax
from spmd import numpy as snp
from spmd.base.config import config
from spmd.compile.cuda.driver import driver, makers
from spmd.compile.cuda.driver_protocol import Entries
from spmd.compile.cuda.emulator.driver import EmulatorDriver
from spmd.compile.cuda.emulator.streams import Streams
from spmd.compile.native.llvm.compiler import compile_texts
from spmd.compile.native.llvm.function_builder import Function
from tests.compile.cuda.test_calls import WARM, asked

pytestmark = pytest.mark.usefixtures("gpus")
assert asked

DEVICES = 4
X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)


def step(params, x):
    def loss(params):
        h = x
        for w, b in params:
            h = snp.tanh(h @ w + b)
        return ((h - 1) ** 2).mean()

    value, slopes = spmd.value_and_grad(loss)(params)
    return spmd.tree_util.tree_map(lambda w, g: w - 0.1 * g, params, slopes), value


def scanned(w, rows):
    def loss(w):
        return lax.scan(lambda h, x: (snp.tanh(h @ w + x), (h * h).sum()), rows[0], rows)[1].sum()

    value, slope = spmd.value_and_grad(loss)(w)
    return w - 0.1 * slope, value


def averaged(w, x):
    slope = spmd.grad(lambda w: ((x @ w) ** 2).sum())(w)
    return w - 0.1 * lax.pmean(slope, "i"), x.sum()


def layers(x=X):
    return [(x * 0.1, x[0]), (x.T * 0.2, x[1]), (x * 0.3, x[2])]


def placed(tree, *spec):
    """A pytree on one GPU; with a spec over four."""
    if not spec:
        return spmd.jit(lambda tree: spmd.tree_util.tree_map(lambda x: x + 0, tree))(tree)
    mesh = spmd.make_mesh((DEVICES,), ("i",))
    return spmd.device_put(tree, spmd.NamedSharding(mesh, P(*spec)))


# A function, its state and its batch.
PROGRAMS = {
    "one kernel": lambda: (spmd.jit(lambda x, y: (snp.sin(x) * 2, y)), placed(X), placed(X)),
    "mlp": lambda: (spmd.jit(step, donate_argnums=0), placed(layers()), placed(X)),
    "scan": lambda: (spmd.jit(scanned, donate_argnums=0), placed(X), placed(np.stack([X] * 5))),
    "sharded": lambda: (
        spmd.jit(step, donate_argnums=0),
        placed(layers(), None),
        placed(X, "i"),
    ),
    "pmap": lambda: (
        spmd.pmap(averaged, axis_name="i", donate_argnums=0),
        spmd.pmap(lambda x: x + 0)(np.stack([X] * DEVICES)),
        spmd.pmap(lambda x: x + 0)(np.stack([X] * DEVICES)),
    ),
}
# The most launches and copies of a device without a graph. Each all_reduce of four GPUs takes six.
MOST = {"one kernel": 1, "mlp": 12, "scan": 35, "sharded": 36, "pmap": 10}


def works_of_a_call(monkeypatch, function, *args):
    """How much work a call puts into streams, True for events, and its results."""
    found, put = Counter(), Streams.put

    def counted(streams, number, do, always=False):
        found[always] += 1
        return put(streams, number, do, always)

    with monkeypatch.context() as patch:
        patch.setattr(Streams, "put", counted)
        outs = function(*args)
    return found, outs


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_step_in_steady_state(name, graphs, asked, monkeypatch):
    with config.override("cuda_graphs", graphs):
        function, state, batch = PROGRAMS[name]()
        for _ in range(WARM):
            state, value = function(state, batch)
        asked.clear()
        works, outs = works_of_a_call(monkeypatch, function, state, batch)
    replayed = graphs and name in ("mlp", "scan")
    assert asked == ({"replay": 1} if replayed else {})
    devices = DEVICES if name in ("sharded", "pmap") else 1
    assert works[False] <= (1 if replayed else devices * MOST[name])
    if devices == 1:
        assert works[True] == 1  # the call has ended
    del value, outs


def test_a_step_has_as_many_launches_as_kernels_on_the_cpu():
    texts = {}
    for platform in "cpu", "cuda":
        with config.override("platform", platform):
            lowered = spmd.jit(step, donate_argnums=0).lower(layers(), X)
            texts[platform] = lowered.compile().as_text().splitlines()
    assert len(texts["cuda"]) <= len(texts["cpu"]) == MOST["mlp"]


def test_small_sums_of_a_step_are_one_exchange():
    function, state, batch = PROGRAMS["sharded"]()
    text = function.lower(state, batch).compile().as_text()
    assert text.count("all_reduce") == 1, text


@pytest.mark.parametrize("donated", [(), (0,)])
@pytest.mark.parametrize("name", ["mlp", "scan"])
def test_the_most_memory_is_that_of_the_plan(name, donated, monkeypatch):
    """After any number of calls, within one part in a hundred."""
    gpu = EmulatorDriver(1, mode="plain", capacity=1 << 26)
    kind = f"for memory {name} {donated}"
    monkeypatch.setitem(makers, kind, lambda: gpu)
    wide = np.ones((128, 128), np.float32)
    function = spmd.jit(step if name == "mlp" else scanned, donate_argnums=donated)
    given = (layers(wide), wide) if name == "mlp" else (wide, np.stack([wide] * 5))
    with config.override("cuda_driver", kind):
        assert driver() is gpu
        planned = function.lower(*given).compile().memory_analysis().peak_memory_in_bytes
        state, batch = spmd.device_put(given)
        for _ in range(WARM):
            state, value = function(state, batch)
            del value
        spmd.block_until_ready(state)
        most = gpu.memory_in_use(0)[1]
    assert planned <= most <= 1.01 * planned


# ---- the host's time ---------------------------------------------------------------------------


class DriverThatDoesNothing(EmulatorDriver):
    """A driver whose functions return at once: what is left of a call is the host's own time."""

    entries_run_python = False

    def __init__(self) -> None:
        super().__init__(1, mode="plain", capacity=1 << 26)
        nothing = Function("nothing_for_costs", "i32", [])
        nothing.ret(nothing.value("i32", 0))
        address = dict(compile_texts([nothing.text()]))[nothing.name]
        self.entries = Entries(*[address] * len(Entries.__slots__))

    def load(self, device, image):
        return 1

    def function(self, device, module, symbol, shared):
        return 1

    def record_event(self, device, event, stream=None):
        pass

    def free(self, device, address, stream=None):
        with self._lock:
            self._gpus[device].memory.free(address)


@pytest.fixture
def nothing(monkeypatch):
    """Programs run on a driver that does nothing, and no call is captured."""
    kind = "nothing"
    monkeypatch.setitem(makers, kind, DriverThatDoesNothing)
    with config.override("cuda_driver", kind), config.override("cuda_graphs", False):
        yield
    spmd.clear_caches()


def seconds_of_a_call(function, *args, calls: int) -> float:
    """The least processor time of this thread for a call: other processes don't count."""
    found = []
    for _ in range(20):
        start = time.thread_time()
        for _ in range(calls):
            function(*args)
        found.append((time.thread_time() - start) / calls)
    return min(found)


def test_a_call_of_one_kernel_takes_microseconds(nothing):
    function, x = spmd.jit(lambda x: snp.sin(x) * 2), snp.asarray(X) + 0
    for _ in range(WARM):
        function(x)
    assert seconds_of_a_call(function, x, calls=100) < 15e-6


def test_a_launch_takes_a_tenth_of_a_microsecond(nothing):
    """A loop of many launches, without what a call costs beside."""
    trips = 4000
    function = spmd.jit(lambda x: lax.fori_loop(0, trips, lambda k, x: snp.sort(x * 2) + k, x))
    text = function.lower(X).compile().as_text()
    launches = trips * sum(" = " in line and line.startswith(" ") for line in text.splitlines())
    assert launches >= 2 * trips, text
    x = snp.asarray(X) + 0
    for _ in range(WARM):
        function(x)
    assert seconds_of_a_call(function, x, calls=1) / launches < 0.1e-6
