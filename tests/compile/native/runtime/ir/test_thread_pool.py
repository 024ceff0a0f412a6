"""The worker pool under stress: every unit exactly once, nested jobs, resizing, fork."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from spmd.base.config import config
from spmd.base.errors import ArgumentError
from spmd.compile.native.llvm.compiler import compile_texts
from spmd.compile.native.llvm.function_builder import Function
from spmd.compile.native.runtime.load import num_threads
from tests.compile.native.runtime.ir.parallel_for import (
    parallel_for,
    parked_workers,
    running_workers,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the pool is made of pthreads")


def count_kernel() -> int:
    """counts[unit] += 1 and, to be seen by others, calls[0] += 1 for each range."""
    f = Function("count_units", "void", ["ptr", "ptr", "i64", "i64"])
    args, _, begin, end = f.params
    counts = f.load("ptr", args)
    f.atomic("add", f.load("ptr", args, 8), 0, f.value("i64", 1))
    with f.range(begin, end) as unit:
        f.store(f.load("i64", counts, unit * 8) + 1, counts, unit * 8)
    return compile_texts([f.text()], optimize=True)["count_units"]


def slow_kernel() -> int:
    """Spends about 10 us a unit and notes the unit as done."""
    f = Function("slow_units", "void", ["ptr", "ptr", "i64", "i64"])
    args, sizes, begin, end = f.params
    done = f.load("ptr", args)
    with f.range(begin, end) as unit:
        total = f.var("double", 1.0)
        with f.range(0, f.load("i64", sizes)):
            total.set(total.get() * 1.0000001)
        f.store(total.get(), done, unit * 8)
    return compile_texts([f.text()], optimize=True)["slow_units"]


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@pytest.fixture(params=[1, 2, 4, 9])
def threads(request):
    with config.override("num_threads", request.param):
        assert num_threads() == request.param
        yield request.param


def test_every_unit_is_done_once(threads):
    kernel = count_kernel()
    rng = np.random.default_rng(0)
    for _ in range(300):
        units = int(rng.integers(1, 2000))
        counts, calls = np.zeros(units, np.int64), np.zeros(1, np.int64)
        parallel_for(kernel, [address(counts), address(calls)], [], units, int(rng.integers(1, 99)))
        assert (counts == 1).all()


def test_many_tiny_jobs_are_done(threads):
    kernel = count_kernel()
    counts, calls = np.zeros(64, np.int64), np.zeros(1, np.int64)
    for _ in range(20_000):
        parallel_for(kernel, [address(counts), address(calls)], [], 64, 16)
    assert (counts == 20_000).all()
    assert calls[0] == 80_000 or threads == 1


def test_jobs_are_done_after_pauses_in_which_workers_park():
    kernel = count_kernel()
    counts, calls = np.zeros(64, np.int64), np.zeros(1, np.int64)
    with config.override("num_threads", 3):
        for _ in range(30):
            parallel_for(kernel, [address(counts), address(calls)], [], 64, 1)
            assert running_workers() == 2
            deadline = time.monotonic() + 10
            while parked_workers() < 2:
                assert time.monotonic() < deadline, "idle workers must park"
                time.sleep(0.0005)
    assert (counts == 30).all()


def order_kernel() -> int:
    """order[calls[0]++] = begin, for each range."""
    f = Function("note_order", "void", ["ptr", "ptr", "i64", "i64"])
    args, _, begin, _ = f.params
    now = f.atomic("add", f.load("ptr", args, 8), 0, f.value("i64", 1))
    f.store(begin, f.load("ptr", args), now * 8)
    return compile_texts([f.text()], optimize=True)["note_order"]


def test_every_second_job_runs_backwards():
    kernel, orders = order_kernel(), []
    with config.override("num_threads", 1):
        for _ in range(3):
            order, calls = np.zeros(10, np.int64), np.zeros(1, np.int64)
            parallel_for(kernel, [address(order), address(calls)], [], 20, 2)
            orders.append(order.tolist())
    assert sorted(orders[0]) == list(range(0, 20, 2))
    assert orders[1] == orders[0][::-1]
    assert orders[2] == orders[0]
    assert orders[0] in (sorted(orders[0]), sorted(orders[0], reverse=True))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the system for masks")
def test_workers_stay_off_the_core_of_their_caller():
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core has to be shared")
    kernel = count_kernel()
    counts, calls = np.zeros(64, np.int64), np.zeros(1, np.int64)
    with config.override("num_threads", 3):
        before = set(map(int, os.listdir("/proc/self/task")))
        parallel_for(kernel, [address(counts), address(calls)], [], 64, 1)
        workers = set(map(int, os.listdir("/proc/self/task"))) - before
        assert len(workers) == 2
        try:
            for core in (cores[0], cores[-1], cores[0]):
                os.sched_setaffinity(0, {core})  # of this thread
                parallel_for(kernel, [address(counts), address(calls)], [], 64, 1)
                for worker in workers:
                    assert os.sched_getaffinity(worker) == set(cores) - {core}
        finally:
            os.sched_setaffinity(0, cores)
    assert (counts == 4).all()


def test_callers_in_several_threads_get_their_own_results():
    kernel = slow_kernel()
    wrong = []

    def call() -> None:
        for _ in range(50):
            done = np.zeros(40)
            parallel_for(kernel, [address(done)], [1000], 40, 1)
            if not (done > 1).all():
                wrong.append(done)

    with config.override("num_threads", 3):
        callers = [threading.Thread(target=call) for _ in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(60)
            assert not caller.is_alive()
    assert not wrong


def test_a_job_inside_a_job_runs_on_its_caller():
    kernel = count_kernel()
    counts, calls = np.zeros(8, np.int64), np.zeros(1, np.int64)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    def outer(args, sizes, begin, end):
        for _ in range(begin, end):
            parallel_for(kernel, [address(counts), address(calls)], [], 8, 1)

    pointer = ctypes.cast(outer, ctypes.c_void_p).value
    with config.override("num_threads", 2):
        # The two callbacks take the GIL in turn, so the counts need no atomics.
        parallel_for(pointer, [], [], 10, 1)
    assert (counts == 10).all()


def test_the_pool_may_be_resized_while_jobs_run():
    kernel = slow_kernel()
    stop = threading.Event()
    wrong = []

    def call() -> None:
        while not stop.is_set():
            done = np.zeros(20)
            parallel_for(kernel, [address(done)], [200], 20, 1)
            if not (done > 1).all():
                wrong.append(done)

    caller = threading.Thread(target=call)
    caller.start()
    before = config.num_threads
    try:
        for threads in (2, 4, 1, 3, 2, 1) * 5:
            config.update("num_threads", threads)
            time.sleep(0.002)
    finally:
        stop.set()
        caller.join(30)
        config.update("num_threads", before)
    assert not caller.is_alive()
    assert not wrong


def test_zero_units_do_nothing_and_bad_grains_are_refused():
    parallel_for(0, [], [], 0)
    with pytest.raises(ValueError, match="-1 units"):
        parallel_for(0, [], [], -1)
    with pytest.raises(ValueError, match="0 at a time"):
        parallel_for(0, [], [], 5, 0)


def test_no_threads_are_refused():
    before = config.num_threads
    with pytest.raises(ArgumentError, match="at least the calling thread"):
        config.update("num_threads", 0)
    config.update("num_threads", before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_makes_its_own_pool():
    kernel = count_kernel()

    def count(units: int) -> bool:
        counts, calls = np.zeros(units, np.int64), np.zeros(1, np.int64)
        for _ in range(100):
            parallel_for(kernel, [address(counts), address(calls)], [], units, 1)
        return bool((counts == 100).all())

    with config.override("num_threads", 2):
        assert count(50)
        for _ in range(5):
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                fresh = running_workers() == 0
                os._exit(0 if fresh and count(50) and running_workers() == 1 else 1)
            assert os.waitpid(child, 0)[1] == 0
            assert count(50), "the parent's pool still works"


def test_a_process_with_parked_workers_ends_quietly():
    program = (
        "import numpy as np\n"
        "from tests.compile.native.runtime.ir.test_thread_pool import count_kernel, address\n"
        "from tests.compile.native.runtime.ir.parallel_for import parallel_for, running_workers\n"
        "a, b = np.zeros(8, np.int64), np.zeros(1, np.int64)\n"
        "parallel_for(count_kernel(), [address(a), address(b)], [], 8, 1)\n"
        "print(running_workers(), a.sum())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "SPMD_NUM_THREADS": "3"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "2 8\n", "")
