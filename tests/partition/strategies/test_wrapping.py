"""Stencils on arrays that are padded with their own other ends: halos move, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, debug, lax
from tests.partition.programs import auto_mesh, kinds

RNG = np.random.default_rng(0)
SIZE = 256
X = RNG.standard_normal((SIZE, SIZE)).astype(np.float32)


def blurred(x: Any) -> Any:
    p = snp.pad(x, 1, mode="wrap")
    n, m = x.shape
    return sum(p[a : a + n, b : b + m] for a in range(3) for b in range(3)) / 9


def placed(x: np.ndarray, sizes: dict[str, int], *spec: Any) -> Any:
    mesh = auto_mesh(tuple(sizes.values()), tuple(sizes))
    return spmd.device_put(x, NamedSharding(mesh, P(*spec)))


# The permutes of a stencil of 3 x 3 points, and the rows and columns that a device receives.
STENCILS = [
    ({"x": 4}, ("x",), 2, 2 * SIZE),
    ({"x": 4}, (None, "x"), 6, 6 * SIZE),
    ({"x": 2, "y": 2}, ("x", "y"), 8, 8 * SIZE // 2),
    ({"x": 2, "y": 2}, (("x", "y"),), 2, 2 * SIZE),
]


@pytest.mark.parametrize("sizes, spec, permutes, numbers", STENCILS, ids=str)
def test_a_stencil_with_wrapped_ends_sends_rows(sizes: Any, spec: Any, permutes: int, numbers: int):
    x = placed(X, sizes, *spec)
    found = debug.collectives(spmd.jit(blurred))(x)
    assert {c.kind for c in found} == {"permute"} and len(found) <= permutes
    assert sum(c.received for c in found) <= 4 * numbers
    got = spmd.jit(blurred)(x)
    np.testing.assert_allclose(got, blurred(X), rtol=1e-5, atol=1e-6)
    assert got.sharding.is_equivalent_to(x.sharding, 2)

    def steps(x: Any) -> Any:
        return lax.fori_loop(0, 3, lambda _, x: blurred(x) * 2, x)

    found = debug.collectives(spmd.jit(steps))(x)
    assert {c.kind for c in found} == {"permute"}
    assert sum(c.received * c.times for c in found) <= 3 * 4 * numbers
    np.testing.assert_allclose(spmd.jit(steps)(x), steps(X), rtol=1e-4, atol=1e-5)
    slope = spmd.grad(lambda x: (blurred(x) ** 2).sum())
    np.testing.assert_allclose(spmd.jit(slope)(x), slope(X), rtol=1e-4, atol=1e-5)


def test_an_array_whose_padded_dims_are_whole_is_padded_as_written():
    x = placed(X, {"x": 4}, "x")

    def f(x: Any) -> Any:
        p = snp.pad(x, ((0, 0), (1, 1)), mode="wrap")
        return sum(p[:, k : k + SIZE] for k in range(3))

    assert kinds(f, x) == {}
    np.testing.assert_allclose(spmd.jit(f)(x), f(X), rtol=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_slices_of_wrapped_paddings_are_those_of_one_device(data: Any):
    """Of any widths and bounds, twice, also beside other readers of the padded array."""
    ndim = data.draw(st.integers(1, 3))
    shape = tuple(data.draw(st.sampled_from([4, 8, 12])) for _ in range(ndim))
    widths = data.draw(st.integers(1, 2)), data.draw(st.integers(0, 2))
    dims = [data.draw(st.booleans()) for _ in range(ndim)]
    times, reads_all = data.draw(st.integers(1, 2)), data.draw(st.booleans())
    config = [widths if padded else (0, 0) for padded in dims]
    cuts = []
    for _ in range(data.draw(st.integers(1, 3))):
        starts = [data.draw(st.integers(0, low + high)) for low, high in config]
        cuts.append(tuple(slice(a, a + n) for a, n in zip(starts, shape, strict=True)))

    def f(x: Any) -> Any:
        total = 0.0
        for _ in range(times):
            p = snp.pad(x, config, mode="wrap")
            x = sum(snp.sin(p[cut] * (k + 1)) for k, cut in enumerate(cuts))
            total = total + p.sum() if reads_all else total
        return x, total

    sizes = data.draw(st.sampled_from([{"x": 4}, {"x": 2, "y": 2}]))
    spec: list[Any] = [None] * ndim
    for axis in sizes:
        d = data.draw(st.integers(0, ndim - 1))
        spec[d] = spec[d] or axis
    x = RNG.standard_normal(shape).astype(np.float32)
    got, want = spmd.jit(f)(placed(x, sizes, *spec)), f(x)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-3, atol=1e-3)
