"""Definitions of factorizations where LAPACK fails, or nearly: they are compiled for CPUs here."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import lax
from tests.compile.definitions.compiled import by_definition

RNG = np.random.default_rng(0)


def both_ways(name, function, *operands):
    wanted = spmd.tree_util.tree_leaves(spmd.jit(function)(*operands))
    return by_definition(function, name, *operands), [np.asarray(x) for x in wanted]


def matrices(kind: str, *shape: int) -> np.ndarray:
    """Two complex matrices, of which the first is a special one."""
    x = (RNG.normal(size=(2, *shape)) + 1j * RNG.normal(size=(2, *shape))).astype(np.complex64)
    match kind:
        case "rank one":
            x[0] = x[0, :, :1] * x[0, :1]
        case "zero":
            x[0] = 0
        case "large":
            x[0] *= np.float32(1e30)
        case "nan":
            x[0, 0, 0] = np.nan
    return x


def assert_unitary(x):
    off = np.conj(x.swapaxes(1, 2)) @ x - np.eye(x.shape[-1])
    np.testing.assert_allclose(off, 0, atol=1e-5)


KINDS = ["random", "rank one", "zero", "large", "nan"]


@pytest.mark.parametrize("kind", KINDS)
def test_eigh(kind):
    x = matrices(kind, 9, 9)
    x = x + np.conj(x.swapaxes(1, 2))
    (v, w), (_, wanted) = both_ways("eigh", lambda x: lax.linalg.eigh(x, symmetrize_input=False), x)
    if kind == "nan":
        assert np.isnan(v[0]).all() and np.isnan(w[0]).all()
        v, w, wanted, x = v[1:], w[1:], wanted[1:], x[1:]
    scale = np.abs(wanted).max(-1)[:, None] + np.float32(1e-30)
    np.testing.assert_allclose(w / scale, wanted / scale, atol=2e-6)
    assert_unitary(v)
    scale = scale[..., None].astype(np.complex64)
    np.testing.assert_allclose((x / scale) @ v, v * w[:, None] / scale, atol=5e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_svd(kind):
    x = matrices(kind, 7, 4)
    (u, s, vh), (_, wanted, _) = both_ways("svd", lambda x: tuple(lax.linalg.svd(x)), x)
    if kind == "nan":
        assert all(np.isnan(y[0]).all() for y in (u, s, vh))
        u, s, vh, wanted, x = (y[1:] for y in (u, s, vh, wanted, x))
    scale = wanted[:, :1] + np.float32(1e-30)
    np.testing.assert_allclose(s / scale, wanted / scale, atol=2e-6)
    assert_unitary(u)
    assert_unitary(vh)
    again = (u[:, :, :4] * (s / scale)[:, None]) @ vh
    np.testing.assert_allclose(again, x / scale[..., None], atol=5e-6)


def test_factors_that_do_not_exist_are_nan():
    a = np.array([[[4.0, 2.0], [2.0, 1.0]], [[4.0, 2.0], [2.0, 5.0]]], np.float32)
    for name, operands in (("cholesky", (a,)), ("solve", (a, a))):
        found, wanted = both_ways(name, getattr(lax.linalg, name), *operands)
        assert np.isnan(found[0][0]).any()
        np.testing.assert_allclose(found[0], wanted[0], atol=1e-6)
