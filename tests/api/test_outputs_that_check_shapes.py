"""Containers among outputs may check their leaves: they see whole results, or stand-ins."""

import numpy as np
import pytest

import spmd


class Matrix:
    """A container that refuses arrays whose last dims are not (2, 3)."""

    def __init__(self, array):
        if hasattr(array, "shape") and array.shape[-2:] != (2, 3):
            raise ValueError(f"a Matrix of shape {array.shape}")
        self.array = array


spmd.tree_util.register_pytree_node(Matrix, lambda m: ((m.array,), None), lambda _, c: Matrix(*c))


@pytest.mark.parametrize("out_axes", [0, (0, 1), (Matrix(0), 0)], ids=["int", "tuple", "tree"])
@pytest.mark.parametrize("name", ["vmap", "pmap"])
def test_batch_dims_are_moved_before_containers_are_made(name, out_axes):
    count = 5 if name == "vmap" else 1
    columns = np.arange(3 * count, dtype=np.float32).reshape(3, count)

    def rows_of(x):
        return Matrix(np.array([[1.0], [2.0]], np.float32) @ x[None]), x  # mapped dim: 1

    made, again = getattr(spmd, name)(rows_of, in_axes=1, out_axes=out_axes)(columns)
    np.testing.assert_array_equal(made.array, np.stack([columns.T, 2 * columns.T], 1))
    np.testing.assert_array_equal(again, columns if out_axes == (0, 1) else columns.T)
