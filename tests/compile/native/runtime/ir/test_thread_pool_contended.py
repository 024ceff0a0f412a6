"""The pool beside another process that computes on the core of its worker.

Each script runs in a process of its own on two cores, with a busy process bound to the second.
"""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2,
    reason="needs two cores, and Linux, which lets threads be bound to them",
)

BEGIN = """
import ctypes, os, subprocess, sys, time
import numpy as np
from spmd.compile.native.llvm.compiler import compile_texts
from spmd.compile.native.runtime.load import pool_calls
from tests.compile.native.runtime.ir.parallel_for import parallel_for
from spmd.compile.native.llvm.function_builder import Function
from spmd.compile.native.runtime.pool_layout import CONTENDED, LINE_BYTES, LINES
from spmd.compile.native.runtime.ir.thread_affinity import core
from spmd.base.config import config

first, second = sorted(os.sched_getaffinity(0))[:2]
os.sched_setaffinity(0, {first, second})
spin = f"import os\\nos.sched_setaffinity(0, {{{second}}})\\nprint(flush=True)\\nwhile True: pass"
LATEST = time.monotonic() + 60

# 1 + the cores on which a unit begins and ends. The two units wait for each other first, so that
# each thread has one; then that of the worker, who is not on the caller's core, has more to do.
f = Function("meet", "void", ["ptr", "ptr", "i64", "i64"])
args, sizes, begin, end = f.params
cores, words, total = f.load("ptr", args), f.load("ptr", args, 8), f.var("double", 1.0)
with f.range(begin, end) as unit:
    at = core(f)
    f.store(at, cores, unit * 16)
    f.atomic("add", words, 0, f.value("i64", 1))
    with f.loop():
        f.break_if(f.atomic_load(words, 0) >= 2)
    with f.if_(at.differs(f.load("i64", sizes))):
        with f.range(0, f.load("i64", sizes, 8)):
            total.set(total.get() * 1.0000001)
    f.store(core(f), f.at(cores, unit * 16), 8)
    f.store(total.get(), words, 8)
meet = compile_texts(["declare i32 @sched_getcpu()\\n" + f.text()], optimize=True)["meet"]

def job(spins):
    cores, words = np.zeros((2, 2), np.int64), np.zeros(2, np.int64)
    addresses = [a.__array_interface__["data"][0] for a in (cores, words)]
    parallel_for(meet, addresses, [first + 1, spins], 2, 1)
    return cores - 1

with config.override("num_threads", 2):
    job(1000)
    os.sched_setaffinity(0, {first})  # the caller; its worker is kept off that core
    job(1000)
    threads = map(int, os.listdir("/proc/self/task"))
    (worker,) = [t for t in threads if os.sched_getaffinity(t) == {second}]
    busy = subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE)
    busy.stdout.readline()
    try:
        check()
    finally:
        busy.kill()
"""


def run(check: str) -> str:
    script = f"def check():\n    {check.strip()}\n{BEGIN}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_worker_that_loses_its_core_is_brought_to_its_caller():
    # Its part takes a few turns, of which the busy process leaves it one in seventy.
    run("""
    os.setpriority(os.PRIO_PROCESS, worker, 19)
    while True:
        cores = job(10_000_000).tolist()
        (begun,) = [b for b, _ in cores if b != first] or [None]
        if begun is not None and [begun, first] in cores:
            break
        assert time.monotonic() < LATEST, "the worker always ends where it began"
    assert os.sched_getaffinity(worker) == {second}, "and is sent back"
    """)


def test_worker_that_lost_its_core_by_yielding_sleeps():
    run("""
    words = pool_calls().words
    while not ctypes.c_int64.from_buffer(words, LINES + LINE_BYTES + CONTENDED).value:
        job(1000)
        time.sleep(0.0003)
        assert time.monotonic() < LATEST, "the worker never saw that it lost its turn"
    """)
