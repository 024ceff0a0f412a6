"""`odeint`: solutions in closed form, and gradients against finite differences."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.experimental.ode import odeint


@pytest.fixture(autouse=True)
def _x64():
    with spmd.enable_x64(True):
        yield


def oscillator(y, t, rate):
    return snp.stack([y[1], -rate * y[0]])


def test_a_solution_in_closed_form():
    t = np.linspace(0.0, 3.0, 7)
    found = odeint(oscillator, np.array([1.0, 0.0]), t, 4.0)
    np.testing.assert_allclose(found[:, 0], np.cos(2 * t), atol=1e-6)
    np.testing.assert_allclose(found[:, 1], -2 * np.sin(2 * t), atol=1e-6)


def test_states_may_be_pytrees_and_complex_numbers():
    t = np.linspace(0.0, 1.0, 3)

    def turn(y, t):
        return {"z": 1j * y["z"], "w": -y["w"]}

    found = odeint(turn, {"z": np.ones(2, np.complex128), "w": np.float64(2.0)}, t)
    np.testing.assert_allclose(found["z"][:, 0], np.exp(1j * t), atol=1e-7)
    np.testing.assert_allclose(found["w"], 2 * np.exp(-t), atol=1e-7)


def loss(y0, t, rate, shift):
    moved = odeint(lambda y, s, r: oscillator(y, s, r) + shift * s, y0, t, rate)
    return snp.sum(snp.sin(moved) * np.arange(1.0, 2 * len(t) + 1).reshape(-1, 2))


def test_gradients_are_those_of_finite_differences():
    args = np.array([0.7, -0.2]), np.array([0.0, 0.4, 1.1]), np.float64(2.3), np.float64(0.5)
    found = spmd.jit(spmd.grad(loss, (0, 1, 2, 3)))(*args)
    value = spmd.jit(loss)
    step = 1e-5
    for k, (x, got) in enumerate(zip(args, found, strict=True)):
        for index in np.ndindex(x.shape):
            moved = np.zeros(x.shape)
            moved[index] = step
            ends = [value(*args[:k], x + s * moved, *args[k + 1 :]) for s in (1, -1)]
            assert abs((ends[0] - ends[1]) / (2 * step) - got[index]) < 1e-4


def test_vmap_is_a_stack():
    t = np.array([0.0, 1.0, 1.5])
    rates = np.array([1.0, 2.0, 5.0])
    y0 = np.array([1.0, 0.5])
    stacked = spmd.vmap(lambda r: odeint(oscillator, y0, t, r))(rates)
    for rate, found in zip(rates, stacked, strict=True):
        np.testing.assert_allclose(found, odeint(oscillator, y0, t, rate), rtol=1e-9)


def test_limits_of_steps():
    t, steps = np.array([0.0, 1.0]), []

    def count(y, s):
        spmd.debug.callback(steps.append, s)
        return -y

    odeint(count, np.float64(1.0), t, rtol=1e-3, atol=1e-3)
    few = len(steps)
    steps.clear()
    fine = odeint(count, np.float64(1.0), t, rtol=1e-3, atol=1e-3, hmax=0.01)
    spmd.effects_barrier()
    assert len(steps) > 6 * 100 > few
    assert abs(fine[-1] - np.exp(-1)) < 1e-9
    steps.clear()
    odeint(count, np.float64(1.0), t, hmax=0.01, mxstep=5)
    spmd.effects_barrier()
    assert len(steps) == 2 + 5 * 6


def test_mistakes():
    with pytest.raises(spmd.errors.ArgumentError, match="arguments of func must be arrays"):
        odeint(oscillator, np.ones(2), np.array([0.0, 1.0]), "fast")
    with pytest.raises(spmd.errors.DtypeError, match=r"t\.astype\(float\)"):
        odeint(oscillator, np.ones(2), np.array([0, 1]), 1.0)


def test_an_integer_argument_has_no_gradient():
    def f(rate, n):
        return odeint(lambda y, t, r, n: -y * r * n, np.float64(1.0), np.array([0.0, 1.0]), rate, n)

    assert abs(spmd.grad(lambda r: f(r, 3)[-1])(0.5) + 3 * np.exp(-1.5)) < 1e-6
