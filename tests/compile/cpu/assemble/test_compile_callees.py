"""Compiling ahead: the steps that are seen as they are written are those that are run."""

import threading

import numpy as np
import pytest

import spmd.numpy as snp
from spmd import lax, nn
from spmd.api.compiled import jit
from spmd.api.reverse import grad
from spmd.compile.cpu.assemble.compile_callees import CalleeCompiler
from spmd.compile.executable import executable

X = np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)


def _network(x):
    for _ in range(3):
        x = nn.gelu(x @ x) - snp.mean(x, axis=0)
    return snp.sum(snp.sort(x, axis=1)[:, :8])


def _tall(x):
    return snp.tile(x, (40, 1)) @ x  # its operand is packed by a step before it


def _image(x):
    image = x.reshape(1, 1, 64, 64)
    return lax.conv_general_dilated(image, image[:, :, :3, :3], (1, 1), "SAME")


def _loops(x):
    def turn(carry, row):
        small = snp.exp(row[:8]) * snp.sum(carry)
        return snp.tanh(carry @ x + row) + snp.sort(snp.sin(x), axis=1), snp.max(small)

    return lax.scan(turn, x, x)


PROGRAMS = {
    "network": grad(_network),
    "tall": _tall,
    "image": _image,
    "loops": _loops,
    "branch": lambda x: lax.cond(x[0, 0] > 0, lambda a: a @ a, lambda a: snp.exp(a), x),
    "short loop": lambda x: lax.fori_loop(0, 9, lambda i, a: snp.cos(a) * i, x[0, :5]) + x[0, 0],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_callees_compiled_ahead_are_those_of_the_program(name, monkeypatch):
    begun, needed, watches = [], [], []
    watch, callee = CalleeCompiler.watch, CalleeCompiler.callee

    def watching(self, steps):
        watches.append(steps)
        watch(self, steps)
        watches.pop()

    def noting(self, each):
        (begun if watches else needed).append(each)
        callee(self, each)

    monkeypatch.setattr(CalleeCompiler, "watch", watching)
    monkeypatch.setattr(CalleeCompiler, "callee", noting)
    jit(PROGRAMS[name])(X)
    assert set(begun) <= set(needed)
    assert begun


def test_an_error_after_the_first_kernels_leaves_no_thread_behind(monkeypatch):
    def refuse(*args, **more):
        raise RuntimeError("no plan")

    monkeypatch.setattr(executable.build, "plan_program", refuse)
    with pytest.raises(RuntimeError, match="no plan"):
        jit(grad(_network))(X + 1)
    for thread in threading.enumerate():
        if thread.name == "spmd-compile":
            thread.join(60)
            assert not thread.is_alive()
    monkeypatch.undo()
    assert np.isfinite(np.asarray(jit(grad(_network))(X + 1))).all()
