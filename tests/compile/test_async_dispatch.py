"""Asynchronous dispatch: what is computed beside Python is what would be computed at once."""

from __future__ import annotations

import copy
import json
import operator
import os
import pickle
import textwrap
import threading
import time

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.compile.dispatch import fast_call
from spmd.compile.executable import async_operands
from spmd.compile.executable.executable import compile_jaxpr
from spmd.compile.native.runtime import async_queue
from spmd.compile.native.runtime import run as native_run
from spmd.compile.native.runtime.async_queue import QUEUE
from spmd.errors import CollectiveError, DeletedError
from spmd.sharding import PartitionSpec as P
from spmd.sharding.future import Future
from spmd.transport import flight_recorder as flight
from spmd.transport.flight_recorder import FLIGHT
from tests.compile.programs import by_impl, random_program
from tests.compile.queue_gate import shut_gate
from tests.threads import in_threads

# Longer than it takes to come to a wait, on a busy machine too.
MOMENT = 0.05


@pytest.fixture
def all_long(monkeypatch: pytest.MonkeyPatch):
    """Every program counts as long while the test runs, and may copy what it wants."""
    monkeypatch.setattr(native_run, "LONG_NS", 0.0)
    monkeypatch.setattr(async_queue, "AT_ONCE_NS", 0)
    for module in (async_operands, fast_call):
        monkeypatch.setattr(module, "most_copied", lambda program: float("inf"))
    yield
    QUEUE.drain()


pytestmark = pytest.mark.usefixtures("all_long")


def is_pending(x) -> bool:
    return any(type(piece.owner) is Future for piece in x.shards or (x,))


def step(x):
    return snp.tanh(x * 2 + 1)


def at_once(function, *args):
    """What a function gives without the queue."""
    with spmd.config.override("cpu_enable_async_dispatch", False):
        return spmd.tree.map(np.asarray, function(*args))


X = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [1, 3], ids=["general path", "closure"])
def test_a_call_returns_before_its_program_has_run(calls):
    f = spmd.jit(step)
    x = snp.asarray(X)
    for _ in range(calls - 1):
        f(x).block_until_ready()
    with shut_gate():
        out = f(x)
        assert is_pending(out) and not out.is_ready() and not out.is_deleted()
        assert (out.shape, out.dtype, out.nbytes) == ((3, 4), np.float32, 48)
    assert out.is_ready() and out.block_until_ready() is out and not is_pending(out)
    np.testing.assert_array_equal(out, at_once(f, x))


READERS = {
    "asarray": np.asarray,
    "block_until_ready": lambda x: np.asarray(x.block_until_ready()),
    "block of tree": lambda x: np.asarray(spmd.block_until_ready([x])[0]),
    "device_get": spmd.device_get,
    "item": lambda x: np.asarray([[x[i, j].item() for j in range(4)] for i in range(3)]),
    "tolist": lambda x: np.asarray(x.tolist(), np.float32),
    "tobytes": lambda x: np.frombuffer(x.tobytes(), np.float32).reshape(3, 4),
    "iteration": lambda x: np.stack([np.asarray(row) for row in x]),
    "dlpack": np.from_dlpack,
    "pickle": lambda x: np.asarray(pickle.loads(pickle.dumps(x))),
    "deepcopy": lambda x: np.asarray(copy.deepcopy(x)),
    "shards": lambda x: np.asarray(x.addressable_shards[0].data),
    "device_put": lambda x: np.asarray(spmd.device_put(x, spmd.devices()[0])),
    "numpy operation": lambda x: np.add(x, np.float32(0)),
    "eager operation": lambda x: np.asarray(x + 0),
    "eager function": lambda x: np.log(np.asarray(snp.exp(x))),
    "jitted, short": lambda x: np.asarray(spmd.jit(lambda y: y + 0)(x)),
    "jitted, forwarded": lambda x: np.asarray(spmd.jit(lambda y: (y, y + 1))(x)[0]),
    "save": lambda x: np.asarray(snp.stack([x, x])[1]),
    "constant": lambda x: np.asarray(spmd.jit(lambda: x + 0)()),
    "pmap": lambda x: np.asarray(spmd.pmap(lambda y: y + 0)(x)),
}


@pytest.mark.parametrize("name", READERS)
def test_whoever_reads_waits(name):
    f = spmd.jit(step)
    wanted = at_once(f, X)
    with shut_gate(MOMENT):
        out = f(snp.asarray(X))
        np.testing.assert_allclose(READERS[name](out), wanted, rtol=1e-6)


SCALARS = {
    "bool": bool,
    "int": int,
    "float": float,
    "complex": complex,
    "index": operator.index,
    "text": str,
    "repr": repr,
    "format": "{:d}".format,
}


@pytest.mark.parametrize("name", SCALARS)
def test_whoever_reads_a_number_waits(name):
    f = spmd.jit(lambda x: x + 1)
    with shut_gate(MOMENT):
        out = SCALARS[name](f(snp.asarray(41)))
    assert out == SCALARS[name](snp.asarray(42))


@pytest.mark.parametrize("seed", range(20))
def test_random_programs(seed):
    closed, args = random_program(seed, length=20)
    made = compile_jaxpr(closed)
    arrays = [snp.asarray(x) for x in args]
    now = made.call(arrays, in_queue=False)
    with shut_gate():
        later = made(arrays)
        assert all(is_pending(x) for x, r in zip(later, made.results, strict=True) if r is None)
    for mine, same, meant in zip(later, now, by_impl(closed, args), strict=True):
        np.testing.assert_array_equal(mine, same)
        np.testing.assert_allclose(mine, meant, rtol=2e-4, atol=2e-5)


def test_a_chain_of_different_programs_keeps_its_order():
    programs = [
        spmd.jit(step),
        spmd.jit(lambda x: snp.sort(x, 0)[::-1] - x.mean()),
        spmd.jit(lambda x: lax.fori_loop(0, 3, lambda i, c: c @ c.T @ c / 20, x)),
        spmd.jit(lambda x: x.reshape(4, 3).T),
    ]

    def chain(x, rounds=8):
        kept = []
        for k in range(rounds):
            x = programs[k % len(programs)](x)
            kept.append(x)
        return kept

    wanted = at_once(chain, X)
    with shut_gate():
        found = chain(snp.asarray(X))
        assert not any(x.is_ready() for x in found)
    for k in (5, 7, 0, 6, 1, 2, 3, 4):
        np.testing.assert_array_equal(found[k], wanted[k])


def test_trees_keywords_and_numbers():
    f = spmd.jit(lambda tree, *, rate: {"w": tree["w"] - rate, "n": (tree["n"] + 1, None)})
    tree = {"w": snp.asarray(X), "n": 3}
    for _ in range(4):
        out = f(tree, rate=0.5)
        np.testing.assert_array_equal(out["w"], X - np.float32(0.5))
        assert out["n"][0] == 4 and out["n"][1] is None
        assert f(tree, rate=2)["w"][0, 0] == -4


@pytest.mark.parametrize("mapped", [False, True], ids=["jit", "pmap"])
def test_wide_dicts(mapped):
    def step(tree):
        return {name: value * 2 for name, value in tree.items()}

    f = spmd.pmap(step) if mapped else spmd.jit(step)
    tree = {f"k{7 * k % 10}": snp.full((4, 3), k) for k in range(10)}
    for _ in range(4):
        out = f(f(tree))
        assert all(map(is_pending, out.values()))
        for name, value in tree.items():
            np.testing.assert_array_equal(out[name], 4 * np.asarray(value))


def test_numpy_arguments_are_read_at_the_call():
    f = spmd.jit(step)
    wanted = at_once(f, X)
    for _ in range(4):
        given = X.copy()
        with shut_gate():
            out = f(given)
            given[:] = 7
        np.testing.assert_array_equal(out, wanted)


def test_numpy_arguments_that_are_large_for_their_program_are_not_copied(monkeypatch):
    monkeypatch.setattr(async_operands, "most_copied", lambda program: X.nbytes - 1)
    # A function of its own: jits of one function share the closures of calls made before.
    assert not is_pending(spmd.jit(lambda x: step(x))(X))


@pytest.mark.parametrize("mapped", ["pmap", "shard_map"])
def test_programs_over_the_devices_of_a_process(mapped):
    def body(x):
        return lax.psum(x, "i") + x, lax.axis_index("i") * x

    if mapped == "pmap":
        f = spmd.pmap(body, axis_name="i")
    else:
        mesh = spmd.make_mesh((4,), ("i",))
        f = spmd.jit(spmd.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i")))
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    wanted = at_once(lambda: f(f(x)[0]))
    for _ in range(4):
        with shut_gate():
            first, _ = f(x)
            found = f(first)
            assert all(is_pending(y) and not y.is_ready() for y in found)
        for mine, same in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(mine, same)


# ---- what is queued ------------------------------------------------------------------------------


def test_a_short_program_runs_at_once_unless_it_needs_what_is_computed(monkeypatch):
    long, short = spmd.jit(step), spmd.jit(lambda x: x - 1)
    x = snp.asarray(X)
    short(x), short(x), short(x)
    monkeypatch.setattr(native_run, "LONG_NS", 1e6)
    # Compiled while all was long, its closure goes through the queue.
    with shut_gate():
        here = spmd.jit(lambda x: x - 1)(x)
        assert not is_pending(here)
        np.testing.assert_array_equal(here, X - 1)
    monkeypatch.setattr(native_run, "LONG_NS", 0.0)
    with shut_gate():
        computed = long(x)
        monkeypatch.setattr(native_run, "LONG_NS", 1e6)
        behind = spmd.jit(lambda x: x - 1)(computed)
        assert is_pending(behind) and not behind.is_ready()
    np.testing.assert_array_equal(behind, np.asarray(computed) - 1)


@pytest.mark.parametrize(
    "name, value",
    [("cpu_enable_async_dispatch", False), ("debug_nans", True), ("disable_jit", True)],
)
def test_settings_under_which_all_calls_wait(name, value):
    f = spmd.jit(step)
    x = snp.asarray(X)
    for _ in range(3):
        f(x)
    with spmd.config.override(name, value):
        for _ in range(3):
            assert not is_pending(f(x))
    assert is_pending(f(x))


@pytest.mark.parametrize("mapped", [False, True], ids=["jit", "pmap"])
def test_calls_that_are_waited_for_at_once_run_at_once(mapped, monkeypatch):
    f = spmd.pmap(lambda x: x * 3) if mapped else spmd.jit(lambda x: x * 3)
    x = f(np.ones((4, 5), np.float32))
    seen = []

    def call():
        out = f(x)
        seen.append("later" if is_pending(out) else "now")
        np.testing.assert_array_equal(out, np.full((4, 5), 9.0))

    monkeypatch.setattr(async_queue, "AT_ONCE_NS", 1 << 60)
    x.block_until_ready()
    for _ in range(40):
        call()
    # One call, then three, seven and fifteen, are made at once before the next is looked at.
    expected = ["now"]
    for count in (3, 7, 15, 15):
        expected += ["later", *["now"] * count]
    assert seen == expected[:40]
    seen.clear()
    monkeypatch.setattr(async_queue, "AT_ONCE_NS", 0)
    for _ in range(40):
        call()
    assert "now" in seen and seen[20:] == ["later"] * 20


def test_a_setting_that_closes_the_queue_waits_for_it():
    with shut_gate(MOMENT):
        out = spmd.jit(step)(snp.asarray(X))
        with spmd.config.override("cpu_enable_async_dispatch", False):
            assert out.is_ready()


def test_programs_that_call_python_run_where_they_are_called():
    shape = spmd.ShapeDtypeStruct((3, 4), np.float32)
    threads = []

    def host(x):
        threads.append(threading.get_ident())
        return x

    f = spmd.jit(lambda x: spmd.pure_callback(host, shape, x) + 1)
    first = spmd.jit(step)
    for _ in range(3):
        with shut_gate(MOMENT):
            given = first(snp.asarray(X))
            out = f(given)
            assert not is_pending(out) and given.is_ready()
    assert set(threads) == {threading.get_ident()}


def test_the_queue_is_bounded(monkeypatch):
    f = spmd.jit(step)
    x = snp.asarray(X)
    made = []
    with shut_gate() as gate:
        caller = threading.Thread(target=lambda: made.extend(f(x) for _ in range(3 * MOST)))
        caller.start()
        deadline = time.monotonic() + 30
        while len(made) < MOST - 1 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(MOMENT)
        assert len(made) == MOST - 1, "the gate is the other one"
        gate.open()
        caller.join(30)
    assert len(made) == 3 * MOST
    monkeypatch.setattr(async_queue, "MOST_BYTES", 10 * X.nbytes)
    with shut_gate() as gate:
        caller = threading.Thread(target=lambda: made.extend(f(x) for _ in range(20)))
        caller.start()
        while len(made) < 3 * MOST + 10 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(MOMENT)
        assert len(made) == 3 * MOST + 10
        gate.open()
        caller.join(30)
    assert not caller.is_alive()


MOST = async_queue.MOST_JOBS


def test_memory_is_let_go():
    f = spmd.jit(lambda x: (x @ x.T) @ x)
    x = snp.ones((300, 300))
    f(x).block_until_ready()
    before = spmd.debug.memory_stats()["bytes_in_use"]
    for _ in range(50):
        out = f(x)
    del out
    QUEUE.drain()
    assert spmd.debug.memory_stats()["bytes_in_use"] <= before + 2 * x.nbytes


# ---- donation ------------------------------------------------------------------------------------


def test_a_donated_array_is_gone_at_once_and_its_memory_when_the_program_ran():
    f = spmd.jit(lambda x: x * 2 + 1, donate_argnums=0)
    g = spmd.jit(lambda x: x.sum())
    start = np.arange(40_000, dtype=np.float32)
    for _ in range(4):
        with shut_gate():
            x = f(snp.asarray(start))
            total = g(x)  # reads what is about to be written over
            y = f(x)
            assert x.is_deleted() and not y.is_deleted()
            with pytest.raises(DeletedError):
                np.asarray(x)
            with pytest.raises(DeletedError):
                f(x)
        np.testing.assert_array_equal(y, (start * 2 + 1) * 2 + 1)
        assert total == pytest.approx((start * 2 + 1).sum(), rel=1e-5)


def test_a_donated_block_is_written_over_if_nobody_holds_it():
    f = spmd.jit(lambda x: x * 2 + 1, donate_argnums=0)
    x = f(snp.ones(40_000))
    x.block_until_ready()
    place = x.ptr
    for _ in range(3):
        with shut_gate():
            for _ in range(5):
                x = f(x)
        assert x.block_until_ready().ptr == place
    view = np.asarray(x)
    before = view.copy()
    x = f(x)
    np.testing.assert_array_equal(x, before * 2 + 1)
    np.testing.assert_array_equal(view, before)  # the block was not taken


def test_another_array_over_donated_memory_stays():
    f = spmd.jit(lambda x: x * 2 + 1, donate_argnums=0)
    same = spmd.jit(lambda x: (x, x[0]))
    with shut_gate():
        x = f(snp.ones(40_000))
        twin, _ = same(x)
        y = f(x)
        assert x.is_deleted() and not twin.is_deleted()
    np.testing.assert_array_equal(y, np.full(40_000, 7, np.float32))
    np.testing.assert_array_equal(twin, np.full(40_000, 3, np.float32))


@pytest.mark.parametrize("calls", [1, 4])
def test_donation_over_devices(calls):
    f = spmd.pmap(lambda x: x * 2 + lax.axis_index("i"), axis_name="i", donate_argnums=0)
    x = np.ones((4, 20_000), np.float32)
    wanted = x
    for _ in range(calls):
        wanted = wanted * 2 + np.arange(4, dtype=np.float32)[:, None]
    with shut_gate():
        out = x
        for _ in range(calls):
            before, out = out, f(out)
            assert before is x or before.is_deleted()
    np.testing.assert_array_equal(out, wanted)


# ---- errors --------------------------------------------------------------------------------------


def diverging(x):
    """Fails when it runs: some devices reach a collective, others do not."""
    return lax.cond(x > 1, lambda x: lax.psum(x, "i"), lambda x: x, x)


@pytest.mark.filterwarnings("ignore::spmd.errors.CollectiveWarning")
def test_an_error_shows_where_the_result_is_needed():
    bad, good = spmd.pmap(diverging, axis_name="i"), spmd.pmap(lambda x: x + 1)
    with shut_gate():
        out = bad(np.arange(4.0, dtype=np.float32))
        behind = good(good(out))
        beside = good(good(np.arange(4.0, dtype=np.float32)))
    np.testing.assert_array_equal(beside, np.arange(4.0) + 2)
    for array in (behind, out, behind, good(beside)):
        if array is out or array is behind:
            with pytest.raises(
                CollectiveError, match=r"test_async_dispatch.py:.*did not"
            ) as caught:
                array.block_until_ready()
            (note,) = caught.value.__notes__
            assert "diverging was called at" in note and "test_async_dispatch.py" in note
        else:
            np.testing.assert_array_equal(array, np.arange(4.0) + 3)
    with pytest.raises(CollectiveError):
        good(out)


# ---- threads and processes -----------------------------------------------------------------------


def test_several_threads_call():
    f, g = spmd.jit(step), spmd.jit(lambda x: x - x.mean())
    starts = [X + k for k in range(6)]
    found = {}

    def work(k):
        x = snp.asarray(starts[k])
        for _ in range(30):
            x = g(f(x))
        found[k] = np.asarray(x)

    def alone(x):
        for _ in range(30):
            x = g(f(x))
        return x

    in_threads(work, range(6))
    for k, start in enumerate(starts):
        np.testing.assert_array_equal(found[k], at_once(alone, start))


def test_a_forked_child_has_what_was_computed():
    f = spmd.jit(step)
    with shut_gate(MOMENT):
        out = f(snp.asarray(X))
        child = os.fork()
        if not child:
            there = out.is_ready() and np.allclose(out, np.tanh(X * 2 + 1))
            again = f(f(snp.asarray(X)))  # the child has a queue of its own
            same = np.allclose(again, np.tanh(np.tanh(X * 2 + 1) * 2 + 1))
            os._exit(0 if there and same else 1)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


HEAD = """
import atexit, os, signal, threading, time
import numpy as np
import spmd, spmd.numpy as snp
from spmd.compile.native.runtime import run as runner
from spmd.compile.native.runtime.async_queue import QUEUE
runner.LONG_NS = 0.0
from tests.compile.queue_gate import Gate
f = spmd.jit(lambda x: x * 2)
x = snp.ones(1000)


def later(seconds, call, *args):
    threading.Thread(target=lambda: (time.sleep(seconds), call(*args)), daemon=True).start()
"""

CHILDREN = {
    # An interrupted wait: the program goes on, and its result is there later.
    "interrupt": """
    gate = Gate()
    y = f(x)
    later(1.0, os.kill, os.getpid(), signal.SIGINT)
    try:
        y.block_until_ready()
    except KeyboardInterrupt:
        print("interrupted", y.is_ready())
    gate.open()
    print(float(y[0]))
    """,
    # Nobody waits: the process does, then ends in good order.
    "exit": """
    ys = []
    atexit.register(lambda: print("ready", [y.is_ready() for y in ys].count(True)))
    gate = Gate()
    ys += [f(x) for _ in range(10)]
    later(0.3, gate.open)
    print("end")
    """,
    # A fork that did not wait.
    "fork": """
    QUEUE.drain = lambda: None
    gate = Gate()
    y = f(x)
    child = os.fork()
    if not child:
        try:
            y.block_until_ready()
        except spmd.errors.SpmdError as error:
            print("forked" in str(error), flush=True)
        print(float(f(f(x))[0]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    gate.open()
    print(float(y[0]))
    """,
    # Interrupted at its end, a process does not begin what is left.
    "interrupted exit": """
    ys = []

    def last():
        for y in ys[:2]:
            try:
                y.block_until_ready()
            except spmd.errors.SpmdError as error:
                print("cancelled" in str(error))

    atexit.register(last)
    gate = Gate()
    ys += [f(x) for _ in range(10)]
    later(1.0, os.kill, os.getpid(), signal.SIGINT)
    later(2.0, gate.open)
    print("end")
    """,
}
SAID = {
    "interrupt": ["interrupted False", "2.0"],
    "exit": ["end", "ready 10"],
    "fork": ["True", "4.0", "2.0"],
    "interrupted exit": ["end", "True", "True"],
}


@pytest.mark.parametrize("name", SAID)
def test_processes(name, run_python):
    done = run_python(["-c", HEAD + textwrap.dedent(CHILDREN[name])])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == SAID[name]


# ---- records -------------------------------------------------------------------------------------


def test_a_timeline_has_when_a_queued_program_ran(tmp_path):
    f = spmd.jit(step)
    with spmd.profiler.trace(tmp_path):
        first = FLIGHT.words[flight.COUNT]
        with shut_gate():
            out = f(snp.asarray(X))
            count = FLIGHT.words[flight.COUNT]
        out.block_until_ready()
        number = FLIGHT.label("program", program="step", queued=True)
        records = [flight.RING_WORD + n % flight.RECORDS * flight.RECORD_WORDS
                   for n in range(first, count)]  # fmt: skip
        words = FLIGHT.words
        (mine,) = [r for r in records if words[r + flight.LABEL] == number]
        times = [words[mine + w] for w in (flight.ENQUEUED, flight.ENTERED, flight.COMPLETED)]
    assert 0 < times[0] < times[1] < times[2]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (row,) = [e["tid"] for e in events if e["args"].get("name") == "programs beside Python"]
    spans = [e for e in events if e["name"] == "step" and e["tid"] == row]
    assert spans[0]["dur"] == pytest.approx((times[2] - times[1]) / 1e3, abs=0.01)


def test_a_rank_that_waits_for_a_program_is_running_it():
    seen = []

    def watch(gate):
        deadline = time.monotonic() + 60
        while FLIGHT.words[flight.PHASE] == flight.HOST and time.monotonic() < deadline:
            time.sleep(0.001)
        seen.append(FLIGHT.words[flight.PHASE])
        gate.open()

    FLIGHT.words[flight.SIZE] = 2
    try:
        with shut_gate() as gate:
            out = spmd.jit(step)(snp.asarray(X))
            assert FLIGHT.words[flight.PHASE] == flight.HOST
            watcher = threading.Thread(target=watch, args=(gate,))
            watcher.start()
            out.block_until_ready()
            watcher.join()
        assert FLIGHT.words[flight.PHASE] == flight.HOST
    finally:
        FLIGHT.words[flight.SIZE] = 1
    assert seen == [flight.PROGRAM]


@pytest.mark.parametrize("mapped", [False, True], ids=["jit", "pmap"])
def test_without_memory_for_it_a_call_waits_for_the_others(mapped, monkeypatch):
    f = spmd.pmap(lambda x: x - 1) if mapped else spmd.jit(lambda x: x - 1)
    g = spmd.jit(step)
    x = np.ones((4, 5), np.float32)
    f(x)
    asked = []

    def no_memory(device, nbytes):
        asked.append(nbytes)
        raise MemoryError("no memory")

    with shut_gate(MOMENT):
        before = g(snp.asarray(X))
        monkeypatch.setattr(QUEUE, "arena", no_memory)
        out = f(x)
        assert before.is_ready() and not is_pending(out) and asked
    np.testing.assert_array_equal(out, x - 1)
