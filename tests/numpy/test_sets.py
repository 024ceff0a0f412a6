"""Set functions of NaNs, empty sets, complex numbers and mixed dtypes; empty covariances."""

from __future__ import annotations

import numpy as np
import pytest

import spmd.numpy as snp
from tests.numpy.oracle import jnp

SETS = {
    "nan": np.array([3, 1, np.nan, 2, np.nan, 1, -0.0, 0.0], np.float32),
    "other": np.array([np.nan, 1, 5], np.float32),
    "int": np.array([3, 1, 2, 1], np.int32),
    "empty": np.zeros(0, np.float32),
    "complex": np.array([1 + 1j, 1, complex(np.nan, 2), complex(2, np.nan)], np.complex64),
}
PAIRS = [("nan", "other"), ("nan", "nan"), ("int", "nan"), ("int", "complex"), ("empty", "int")]


def assert_same(ours, theirs):
    ours, theirs = (x if isinstance(x, tuple) else (x,) for x in (ours, theirs))
    for x, y in zip(ours, theirs, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("name", ["union1d", "intersect1d", "setdiff1d", "setxor1d"])
def test_sets_of_two(name, pair, from_jax):
    x, y = (SETS[k] for k in pair)
    options = [{}, {"size": 4, "fill_value": 9}]
    options += [{"assume_unique": True}] if name != "union1d" else []
    options += [{"return_indices": True}] if name == "intersect1d" else []
    for given in options:
        wanted = from_jax(lambda given=given: getattr(jnp, name)(x, y, **given))
        found = getattr(snp, name)(x, y, **given)
        assert_same(found, tuple(wanted) if isinstance(wanted, list) else wanted)


@pytest.mark.parametrize("name", SETS)
def test_different_elements(name):
    x = SETS[name]
    for given in ({}, {"equal_nan": False, "return_counts": True}, {"size": 6, "fill_value": 7}):
        assert_same(snp.unique(x, **given), jnp.unique(x, **given))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0), (0, 0)])
def test_covariances_of_nothing(shape):
    x = np.zeros(shape, np.float32)
    for name in ("cov", "corrcoef"):
        assert_same(getattr(snp, name)(x), getattr(jnp, name)(x))
        assert_same(getattr(snp, name)(x, rowvar=False), getattr(jnp, name)(x, rowvar=False))
