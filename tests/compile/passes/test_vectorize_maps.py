"""Maps of elementwise functions over single numbers, against the loop outside of `jit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.compile.passes.vectorize_maps import MOST_ELEMENTS

X = np.random.default_rng(0).normal(size=300).astype(np.float32)
# A function of one number; whether its loop becomes work on all numbers.
MAPS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "choice": (lambda v: snp.where(v > 0, v * v, -v), True),
    "several results": (lambda v: (snp.sin(v), v > 1, snp.float32(2)), True),
    "closed over": (lambda v: snp.exp(v) * X[3] + X.sum(), True),
    "clip": (lambda v: snp.clip(snp.round(v * 3).astype(int), -2, 2), True),
    "vectors": (lambda v: snp.sum(snp.stack([v, v * 2])), False),
    "gather": (lambda v: snp.asarray(X)[(v * 10).astype(int)], False),
    "loop": (lambda v: lax.fori_loop(0, 3, lambda i, c: c * v, v), False),
}


@pytest.mark.parametrize("name", MAPS)
def test_maps_of_numbers(name: str):
    function, is_elementwise = MAPS[name]
    program = spmd.jit(lambda x: lax.map(function, x))
    text = program.lower(X).compile().as_text()
    assert ("loop" not in text and "parallel" not in text) == is_elementwise, text
    with spmd.disable_jit():
        expected = spmd.vmap(function)(snp.asarray(X))
    for one, other in zip(*map(spmd.tree.leaves, (program(X), expected)), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def test_gradients_and_loops_around():
    function = MAPS["choice"][0]

    def total(x: Any) -> Any:
        step = lambda c, _: (lax.map(function, c, batch_size=None) * 0.9, None)  # noqa: E731
        return lax.scan(step, x, None, length=3)[0].sum()

    slope = spmd.jit(spmd.grad(total))(X)
    eps = 1e-3
    for k in (0, 7):
        moved = [total(snp.asarray(X).at[k].add(d)) for d in (eps, -eps)]
        np.testing.assert_allclose(slope[k], (moved[0] - moved[1]) / (2 * eps), atol=0.3)


def test_a_carry_keeps_the_loop():
    text = (
        spmd.jit(lambda x: lax.scan(lambda c, v: (c + v, c), 0.0, x)).lower(X).compile().as_text()
    )
    assert "loop" in text


def test_batched_maps():
    rows = np.stack([X[:50], X[50:100]])
    program = spmd.jit(spmd.vmap(lambda x: lax.map(MAPS["choice"][0], x)))
    assert "parallel" not in program.lower(rows).compile().as_text()
    np.testing.assert_allclose(program(rows), np.where(rows > 0, rows * rows, -rows), rtol=1e-6)
    longer = np.stack([X[:50]] * (MOST_ELEMENTS + 1))
    assert "parallel" in program.lower(longer).compile().as_text()
