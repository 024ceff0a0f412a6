"""Simplify: what an equation is equal to."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax


@pytest.mark.parametrize("wide, narrow", [("int32", "uint8"), ("uint8", "int32")])
def test_bits_of_one_number_everywhere_keep_their_shape(wide, narrow):
    for size in (0, 4):

        def f(x, size=size):
            return lax.bitcast_convert_type(snp.full((size, 4), x[0]), narrow)

        x = np.array([3], wide)
        np.testing.assert_array_equal(spmd.jit(f)(x), f(x))


@pytest.mark.parametrize(
    "spec, is_product",
    [
        ("ij,ij->j", False),
        ("bij,bij->j", False),
        ("ikj,ikj->ij", False),
        ("ij,ij->i", True),  # along the last dim a product reads along memory
        ("ij,ij->", True),
        ("ij,jk->ik", True),
    ],
)
def test_inner_products_along_memory_are_sums(spec, is_product):
    sizes = {"b": 3, "i": 5, "j": 5, "k": 5}
    x, y = (
        np.random.default_rng(k).normal(size=[sizes[c] for c in names]).astype(np.float32)
        for k, names in enumerate(spec.split("->")[0].split(","))
    )
    program = spmd.jit(lambda x, y: snp.einsum(spec, x, y))
    assert ("product" in program.lower(x, y).compile().as_text()) == is_product
    np.testing.assert_allclose(program(x, y), np.einsum(spec, x, y), rtol=1e-5, atol=1e-5)
