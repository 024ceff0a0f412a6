"""Ctrl-C while a long program runs: it is heard at once, and neither stays nor is waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Rounds for hours; `wide` ones are of too much work for one function.
HEAD = """
import os, signal, sys, threading, time
import numpy as np
import spmd
import spmd.numpy as snp
from spmd import lax

ROUNDS = 2_000_000_000
narrow, wide = np.full(100, 0.5, np.float32), np.full((300, 300), 0.001, np.float32)
many = np.full((4, 100), 0.5, np.float32)


def counted(x):
    return lax.fori_loop(0, ROUNDS, lambda i, y: snp.sin(y) + 0.5, x)


def conditional(x):
    return lax.while_loop(lambda c: c[0] < ROUNDS, lambda c: (c[0] + 1, snp.sin(c[1])), (0, x))[1]


def products(x):
    return lax.fori_loop(0, ROUNDS, lambda i, y: y @ x + 0.001, x)


def nested(x):
    return lax.fori_loop(0, ROUNDS, lambda i, y: lax.fori_loop(0, 3, lambda j, z: z * 0.5, y), x)


def deep(x):
    return lax.fori_loop(0, ROUNDS, lambda i, y: counted(y), x)


def sums(x):
    return lax.fori_loop(0, ROUNDS, lambda i, y: lax.psum(snp.sin(y), "i"), x)


PROGRAMS = {
    "counted": (spmd.jit(counted), narrow),
    "conditional": (spmd.jit(conditional), narrow),
    "products": (spmd.jit(products), wide),
    "nested": (spmd.jit(nested), narrow),
    "deep": (spmd.jit(deep), narrow),
    "number": (spmd.jit(counted), np.float32(0.5)),
    "devices": (spmd.pmap(counted, axis_name="i"), many),
    "sums": (spmd.pmap(sums, axis_name="i"), many),
}


def interrupt(seconds):
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
"""

# Each program is interrupted and given up; then a short one must run, and nothing else.
GIVEN_UP = """
spmd.config.update("cpu_enable_async_dispatch", sys.argv[1] == "queued")
for name, (program, x) in PROGRAMS.items():
    y = None
    interrupt(1.0)
    try:
        y = program(x)
        y.block_until_ready()
        print(name, "ended")
    except KeyboardInterrupt:
        pass
    if y is not None:
        try:
            np.asarray(y)
        except spmd.errors.SpmdError as error:
            assert "interrupted (Ctrl-C) in a loop" in str(error), error
    assert float(spmd.jit(lambda x: x.sum() * 2)(np.ones(1000, np.float32))) == 2000.0
    busy = time.process_time()
    time.sleep(0.5)
    busy = time.process_time() - busy
    print(name, "busy" if busy > 0.35 else "idle", flush=True)
"""

# Ends with the interrupt, at the place that the argument names.
ENDS = """
where = sys.argv[1]
if where == "kernel":  # one without a loop that could end
    from tests.compile.queue_gate import Gate
    gate = Gate()
    x = snp.ones(3)
    y = spmd.jit(lambda x: x * 2)(x)
else:
    program, x = PROGRAMS["products"]
    y = program(x)
print("started", flush=True)
if where == "elsewhere":
    time.sleep(600)
if where != "exit":
    gate.job.wait() if where == "kernel" else y.block_until_ready()
"""


def environment() -> dict[str, str]:
    return {**os.environ, "SPMD_NUM_CPU_DEVICES": "4", "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("how", ["queued", "at_once"])
def test_a_program_that_is_given_up_ends(how: str):
    done = subprocess.run(
        [sys.executable, "-c", HEAD + GIVEN_UP, how],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    names = ["counted", "conditional", "products", "nested", "deep", "number", "devices", "sums"]
    assert done.stdout.splitlines() == [f"{name} idle" for name in names]


@pytest.mark.parametrize("where", ["waiting", "elsewhere", "exit", "kernel"])
def test_an_interrupted_process_ends(where: str):
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD + ENDS, where],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    try:
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    # Interrupted while it ends by itself, a process ends as it would have.
    assert process.returncode == (0 if where == "exit" else -signal.SIGINT), said
    assert "KeyboardInterrupt" in said


def test_a_handler_that_returns_lets_the_loop_go_on():
    program = HEAD + (
        "spmd.config.update('cpu_enable_async_dispatch', False)\n"
        "heard = []\n"
        "signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))\n"
        "def halves(x):\n"
        "    return lax.fori_loop(0, 40_000_000, lambda i, y: snp.sin(y) + 0.5, x)\n"
        "f, x = spmd.jit(halves), np.float32(0.5)\n"
        "first = float(f(x))\n"
        "threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()\n"
        "print(float(f(x)) == first, heard)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "True [1]\n"), done.stderr
