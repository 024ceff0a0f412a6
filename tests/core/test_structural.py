"""Primitives that move elements without looking at them: how their dims correspond."""

from __future__ import annotations

import numpy as np
import pytest

from spmd.core.aval import ShapedArray
from spmd.core.structural import reshape_p


@pytest.mark.parametrize(
    ("shape", "new_sizes", "operand", "result"),
    [
        ((2, 3, 4), (2, 12), (0, -2, -3), (0, -102)),
        ((2, 3, 4), (6, 4), (-1, -2, 2), (-101, 2)),
        ((0, 2), (0, 3, 2, 2), (-1, -2), (-101, -102, -103, -104)),
        ((0, 2, 2), (0, 2), (-1, -2, -3), (-101, -102)),
        ((2, 0, 3), (2, 0, 5), (0, -2, -3), (0, -102, -103)),
    ],
)
def test_a_reshape_labels_dims_that_are_the_same_behind_no_empty_dim(
    shape, new_sizes, operand, result
):
    assert callable(reshape_p.dims)
    rule = reshape_p.dims(ShapedArray(shape, np.dtype(np.float32)), new_sizes=new_sizes)
    assert rule.operands == (operand,) and rule.results == (result,)
