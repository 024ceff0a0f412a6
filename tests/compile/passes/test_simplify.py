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
