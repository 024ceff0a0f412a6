"""What depends on whole rows, read at other places: rolls, pads and joins after a reduction.

A read that a pad guards must not guard the reduction that the value needs: that takes its whole
row, whichever of its elements are wanted.
"""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax, nn


def lowered(x, axis):
    return x - x.sum(axis, keepdims=True)


def normal(x, axis):
    e = snp.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def running(x, axis):
    return snp.cumsum(x, axis) + x.max(axis, keepdims=True)


VALUES = {"sum": lowered, "softmax": normal, "cumsum": running}
MOVES = {
    "roll": lambda q, x: snp.roll(q, 1, 1) * x,
    "roll rows": lambda q, x: snp.roll(q, 2, 0) + x,
    "roll both": lambda q, x: snp.roll(q, (1, -2), (0, 1)),
    "pad": lambda q, x: lax.pad(q, np.float32(3), ((1, 2, 0), (2, 1, 0))),
    "cut and pad": lambda q, x: lax.pad(q, np.float32(0), ((-1, 1, 0), (2, -1, 0))),
    "join": lambda q, x: snp.concatenate([q[:, 2:], x[:, :1], q[:, :1]], 1),
    "join rows": lambda q, x: snp.concatenate([q[2:], x[:1], q[:1]], 0),
    "backwards": lambda q, x: lax.rev(snp.roll(q, 1, 1) + q, (1,)),
    "reduced again": lambda q, x: lowered(snp.roll(q, 1, 1), 1) + snp.roll(q, 2, 1),
    "put in": lambda q, x: (
        snp.zeros((7, 40), x.dtype).at[1 : 1 + x.shape[0], 3 : 3 + x.shape[1]].set(q)
    ),
}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("value", VALUES)
def test_moves_of_reduced_rows(value, axis):
    x = np.random.default_rng(0).normal(size=(5, 33)).astype(np.float32)

    def f(x):
        return {name: move(VALUES[value](x, axis), x) for name, move in MOVES.items()}

    with spmd.disable_jit():
        wanted = f(x)
    for name, move in MOVES.items():
        found = spmd.jit(lambda x, move=move: move(VALUES[value](x, axis), x))(x)
        np.testing.assert_allclose(found, wanted[name], rtol=2e-5, atol=2e-5, err_msg=name)
    for name, found in spmd.jit(f)(x).items():
        np.testing.assert_allclose(found, wanted[name], rtol=2e-5, atol=2e-5, err_msg=name)


def test_the_gradient_of_a_rolled_softmax():
    x, y = np.random.default_rng(1).normal(size=(2, 4, 6)).astype(np.float32)

    def loss(x):
        return (snp.roll(nn.softmax(snp.roll(nn.softmax(x), 1, -1)), 2, -1) * y).sum()

    with spmd.disable_jit():
        wanted = spmd.grad(loss)(x)
    np.testing.assert_allclose(spmd.jit(spmd.grad(loss))(x), wanted, rtol=1e-4, atol=1e-6)
