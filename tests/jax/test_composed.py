"""Combinations of transformations under both libraries: equal values, dtypes and structures."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import spmd
from tests.jax import composed_deeper  # noqa: F401  (enters its programs)
from tests.jax.composed import PROGRAMS

jax = pytest.importorskip("jax", reason="the oracle of these tests is JAX")


def comparable(x):
    x = np.asarray(x)
    return x.astype(np.float32) if x.dtype.name == "bfloat16" else x


# JAX says nothing about the scale of a loss that is summed inside of grad.
@pytest.mark.filterwarnings("ignore:.*the loss is a psum:spmd.errors.CollectiveWarning")
@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_same_results(f):
    with warnings.catch_warnings():
        # JAX advises against its own pmap under jit.
        warnings.simplefilter("ignore")
        wanted = f(jax)
    wanted, found = jax.tree_util.tree_leaves(wanted), spmd.tree.leaves(f(spmd))
    assert len(found) == len(wanted)
    for x, y in zip(found, wanted, strict=True):
        if hasattr(y, "dtype"):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(comparable(x), comparable(y), rtol=2e-5, atol=2e-6)
