"""Forks while other threads are at work: the child can do all that its parent could."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

# A thread compiles one new program after the other; children of the main thread compile, too.
WHILE_COMPILING = """
import os, signal, sys, threading
import numpy as np
import spmd, spmd.numpy as snp

x = snp.asarray(np.ones(4096, np.float32))
ended = threading.Event()

def program(scale):
    return spmd.jit(lambda x: snp.sort(snp.tanh(x * scale)) + snp.exp(x @ x - scale).sum())

def compile_again_and_again():
    scale = 0.0
    while not ended.is_set():
        scale += 1.0
        program(scale)(x).block_until_ready()

thread = threading.Thread(target=compile_again_and_again)
thread.start()
signal.alarm(100)
codes = []
for k in range(8):
    threading.Event().wait(0.013 * k)
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # a child that hangs is killed by this signal
        program(-1.0 - k)(x).block_until_ready()
        for helper in threading.enumerate():
            if helper.name == "spmd-early":  # the child's own
                helper.join()
        os._exit(0 if sys.getswitchinterval() == 0.005 else 3)
    codes.append(os.waitpid(child, 0)[1])
ended.set()
thread.join()
print(codes)
"""


def test_a_child_forked_while_another_thread_compiles_compiles_too():
    environment = {**os.environ, "SPMD_CACHE_DIR": "", "SPMD_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", WHILE_COMPILING],
        capture_output=True,
        text=True,
        timeout=150,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == str([0] * 8)


HOLDER = """
import importlib.util, os, signal, threading
from spmd.base import fork

# The module once more, whose locks are not those of spmd, which are free here.
spec = importlib.util.spec_from_file_location("own_fork", fork.__file__)
own = importlib.util.module_from_spec(spec)
spec.loader.exec_module(own)
locks = {what: own.guard(what) for what in own.GUARDED[1:]}
seen = []
own.enter_before_forks(own.GUARDED[0], lambda: seen.append("enter"), lambda: seen.append("leave"))
begun = threading.Event()

def hold():
    with locks["loader"]:
        begun.set()
        threading.Event().wait(0.2)
        with locks["memory"]:  # from the outside in: no fork stands in the way
            seen.append("done")

thread = threading.Thread(target=hold)
thread.start()
begun.wait()
signal.alarm(60)
child = os.fork()
if child == 0:
    free = all(lock.acquire(timeout=10) for lock in locks.values())
    os._exit(0 if free and seen == ["enter", "done", "leave"] else 1)
print(os.waitpid(child, 0)[1], seen)
"""


def test_a_fork_waits_for_guarded_locks_from_the_outermost_on():
    done = subprocess.run(
        [sys.executable, "-c", HOLDER], capture_output=True, text=True, timeout=90
    )
    assert done.stdout == "0 ['enter', 'done', 'leave']\n", done.stderr
