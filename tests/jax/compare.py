"""One program, written once for both libraries: what spmd gives must be what JAX gives.

A case is a function of a library `j`, which has the transformations (`j.grad`), `j.np` and `j.lax`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.base.dtypes import float0

jax = pytest.importorskip("jax", reason="the oracle of these tests is JAX")
jnp = pytest.importorskip("jax.numpy")

Case = Callable[[Any], Any]

OURS = SimpleNamespace(**vars(spmd), np=snp)
THEIRS = SimpleNamespace(**vars(jax), np=jnp)


def cases(**named: Case) -> Any:
    """The parametrisation of a test over named cases."""
    return pytest.mark.parametrize("case", list(named.values()), ids=list(named))


def assert_same(case: Case, rtol: float = 2e-5, atol: float = 2e-5) -> Any:
    """Run a case with both libraries and compare structure, shapes, dtypes and values."""
    found, tree = spmd.tree.flatten(case(OURS))
    wanted, their_tree = jax.tree_util.tree_flatten(case(THEIRS))
    assert len(found) == len(wanted), f"{tree}, but JAX gives {their_tree}"
    for x, y in zip(found, wanted, strict=True):
        # Numbers that pass through untouched may come out as Python's, here or there.
        x, y = spmd.numpy.asarray(x) if isinstance(x, (int, float)) else x, np.asarray(y)
        got = np.asarray(x)
        assert got.shape == y.shape
        if y.dtype == THEIRS.float0:
            assert got.dtype == float0
            continue
        assert got.dtype == np.asarray(jnp.asarray(y)).dtype
        np.testing.assert_allclose(got, y, rtol=rtol, atol=atol)
    return tree
