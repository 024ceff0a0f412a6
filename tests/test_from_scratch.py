"""`docs/spmd_from_scratch.py` runs, and its toy agrees with the system that it explains."""

from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import spmd
import spmd.numpy as jnp
from spmd import lax

PATH = Path(__file__).resolve().parent.parent / "docs" / "spmd_from_scratch.py"


def _load():
    spec = importlib.util.spec_from_file_location("spmd_from_scratch", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["spmd_from_scratch"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


toy = _load()
EXAMPLES = [name for name in vars(toy) if name.startswith("example_")]


def test_each_chapter_that_can_show_something_does():
    assert len(EXAMPLES) >= 6


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name):
    getattr(toy, name)()


def network(m, dot, total):
    """One function, written for either system: `m` has sin, exp and tanh."""

    def run(w, x):
        hidden = m.tanh(dot(x, w) + m.sin(x)) * m.exp(-x)
        return total(hidden * hidden)

    return run


WEIGHTS = np.array([[0.3, -0.5], [0.8, 0.1]])
INPUTS = np.linspace(-1, 1, 12).reshape(3, 2, 2)


@pytest.mark.parametrize("wrap", ["plain", "jit"])
def test_derivatives_are_those_of_spmd(wrap):
    ours = network(toy, toy.matmul, toy.reduce_sum)
    theirs = network(jnp, jnp.matmul, jnp.sum)
    compiled = toy.jit if wrap == "jit" else lambda f: f
    with spmd.config.override("enable_x64", True):
        w, x = jnp.asarray(WEIGHTS), jnp.asarray(INPUTS)

        def close(found, wanted):
            np.testing.assert_allclose(found, np.asarray(wanted), rtol=1e-11, atol=1e-13)

        close(compiled(ours)(WEIGHTS, INPUTS[0]), theirs(w, x[0]))
        close(compiled(toy.grad(ours))(WEIGHTS, INPUTS[0]), spmd.grad(theirs)(w, x[0]))
        per_example = toy.vmap(lambda x: toy.grad(ours)(WEIGHTS, x))
        close(compiled(per_example)(INPUTS), spmd.vmap(spmd.grad(theirs), (None, 0))(w, x))

        def along(jvp, grad, f, example):
            return lambda w: jvp(grad(lambda v: f(v, example)), (w,), (w,))[1]

        found = compiled(along(toy.jvp, toy.grad, ours, INPUTS[0]))(WEIGHTS)
        close(found, along(spmd.jvp, spmd.grad, theirs, x[0])(w))


def test_collectives_are_those_of_spmd():
    values = np.array([0.2, 1.0, -0.4, 2.0])

    def step(m, psum):
        return lambda x: m.sin(x * psum(x, "i")) + psum(m.exp(x), "i")

    ours, theirs = step(toy, toy.psum), step(jnp, lax.psum)
    with spmd.config.override("enable_x64", True):
        x = jnp.asarray(values)
        wanted = np.asarray(spmd.vmap(theirs, axis_name="i")(x))
        slopes = np.asarray(spmd.vmap(spmd.grad(theirs), axis_name="i")(x))
    for mapped in (toy.vmap, toy.pmap):
        np.testing.assert_allclose(mapped(ours, "i")(values), wanted, rtol=1e-12)
        np.testing.assert_allclose(mapped(toy.grad(ours), "i")(values), slopes, rtol=1e-12)


def test_a_map_inside_a_gradient_means_vmap():
    mapped = toy.pmap(lambda x: toy.psum(toy.sin(x) * x, "i"), "i")
    x = np.array([0.5, 1.5, 2.5])
    found = toy.grad(lambda x: toy.reduce_sum(mapped(x)))(x)
    np.testing.assert_allclose(found, 3 * (np.cos(x) * x + np.sin(x)), rtol=1e-12)


def test_a_kernel_of_nothing_writes_nothing():
    assert toy.jit(lambda x: toy.exp(x) * x)(np.empty((0, 3))).shape == (0, 3)


def test_one_program_serves_equal_shapes_and_views():
    traced = []

    def f(x):
        traced.append(x)
        return toy.exp(x) * 2.0 + x

    fast, x = toy.jit(f), np.arange(12.0).reshape(3, 4)
    np.testing.assert_allclose(fast(x), np.exp(x) * 2 + x, rtol=1e-14)
    np.testing.assert_allclose(fast(x[::-1]), (np.exp(x) * 2 + x)[::-1], rtol=1e-14)
    np.testing.assert_allclose(fast(np.broadcast_to(1.0, (3, 4))), 2 * np.e + 1, rtol=1e-14)
    assert len(traced) == 1
    np.testing.assert_allclose(fast(x.T), (np.exp(x) * 2 + x).T, rtol=1e-14)
    assert len(traced) == 2


def test_mistakes_say_what_is_wrong():
    with pytest.raises(NameError, match="no vmap or pmap around it has an axis 'i'"):
        toy.psum(1.0, "i")
    with pytest.raises(TypeError, match="can't branch"):
        toy.jit(lambda x: x if x else -x)(1.0)
    with pytest.raises(ValueError, match="different sizes, \\[2, 3\\]"):
        toy.vmap(toy.add)(np.ones(2), np.ones(3))


def test_a_device_that_fails_does_not_leave_the_others_waiting():
    meeting = toy.Meeting(2)

    def failing(args, meet):
        raise ZeroDivisionError

    other = threading.Thread(target=lambda: heard.append(_outcome(meeting)), daemon=True)
    heard: list = []
    other.start()
    with pytest.raises(ZeroDivisionError):
        meeting.run(0, failing, [])
    other.join(10)
    assert heard == [threading.BrokenBarrierError]


def test_the_first_failure_is_the_one_that_is_reported():
    with pytest.raises(NameError, match="axis 'j'"):
        toy.pmap(lambda x: toy.psum(x, "j"), "i")(np.ones(3))
    program = toy.make_jaxpr(lambda x: toy.psum(x, "i"), 1.0, axis="i")[0]
    meeting = toy.Meeting(2)
    with pytest.raises(ValueError, match="zip"):
        meeting.run(0, toy.Program(program), [])
    assert isinstance(meeting.error, ValueError)


def _outcome(meeting):
    try:
        meeting.psum(1, np.ones(3))
    except Exception as error:
        return type(error)
    return None


def test_it_stays_a_page_or_two():
    assert 400 <= len(PATH.read_text().splitlines()) <= 600
