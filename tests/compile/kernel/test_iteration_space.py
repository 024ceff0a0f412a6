"""Normalising and splitting keep the meaning of kernels."""

import numpy as np
import pytest

from spmd.compile.kernel.builder import Builder
from spmd.compile.kernel.check import check_kernel
from spmd.compile.kernel.dtypes import DTYPES
from spmd.compile.kernel.iteration_space import normalise
from spmd.compile.kernel.split_reduction import split_reduction
from tests.compile.kernel.interpret import interpret
from tests.compile.kernel.random_kernels import random_case


@pytest.mark.parametrize("seed", range(60))
def test_normalise_keeps_the_meaning(seed):
    case = random_case(seed)
    normal = normalise(case.kernel)
    check_kernel(normal)
    exact = all(a.dtype.kind in "biu" for a in case.arrays)
    left, right = [a.copy() for a in case.arrays], [a.copy() for a in case.arrays]
    interpret(case.kernel, left)
    interpret(normal, right)
    for x, y in zip(left, right, strict=True):
        if exact:
            np.testing.assert_array_equal(x, y)
        else:
            wide = np.complex128
            np.testing.assert_allclose(x.astype(wide), y.astype(wide), rtol=1e-2, atol=1e-2)


def test_contiguous_dims_become_one():
    b = Builder((2, 3), (4, 5))
    x, out = b.arg("f32", 120), b.arg("f32", 120, "out")
    with b.row():
        b.store(out, (60, 20, 5, 1), b.load(x, (60, 20, 5, 1)))
    normal = normalise(b.build())
    assert (normal.outer, normal.inner, normal.vector_dim) == ((), (120,), 0)


def test_lanes_run_along_columns_for_a_column_sum():
    b = Builder((1000,), (50,))
    x, out = b.arg("f32", 50000), b.arg("f32", 1000, "out")
    with b.row():
        total = b.reduce("add", b.load(x, (1, 1000)))
    with b.point():
        b.store(out, (1,), total)
    normal = normalise(b.build())
    assert normal.outer == (1000,) and normal.vector_dim == 0


def full_sum(dtype: str, shape: tuple[int, int], indexed: bool):
    """Return a kernel of two reductions over everything; `indexed` weights by the row number."""
    b = Builder((), shape)
    x, out, top = b.arg(dtype, shape[0] * shape[1]), b.arg(dtype, 1, "out"), b.arg(dtype, 1, "out")
    with b.row():
        value = b.load(x, (shape[1], 1))
        if indexed:
            value = b.op("mul", value, b.iota(0, dtype))
        total, most = b.reduce("add", value), b.reduce("max", value)
    with b.point():
        b.store(out, (), b.op("neg", total))
        b.store(top, (), most)
    return b.build()


@pytest.mark.parametrize("dtype", ["f32", "i32", "bf16"])
@pytest.mark.parametrize("shape", [(64, 1024), (1001, 77), (100003, 1)])
@pytest.mark.parametrize("indexed", [False, True])
def test_split_sums_join_to_the_same(dtype, shape, indexed):
    kernel = full_sum(dtype, shape, indexed and dtype != "bf16")
    split = split_reduction(kernel)
    assert split is not None
    rng = np.random.default_rng(0)
    values = rng.integers(-3, 4, shape[0] * shape[1])
    arrays = [np.zeros(arg.size, _stored(dtype)) for arg in kernel.args]
    arrays[0][:] = values
    expected = [a.copy() for a in arrays]
    interpret(kernel, expected)
    temporaries = [np.zeros(size, _stored(kind)) for kind, size in split.temporaries]
    for step in (*split.partials, split.combine):
        interpret(step, [*arrays, *temporaries])
    for got, want in zip(arrays, expected, strict=True):
        np.testing.assert_allclose(got.astype(float), want.astype(float), rtol=1e-3)


def test_short_and_many_rows_stay_whole():
    assert split_reduction(full_sum("f32", (10, 100), False)) is None


def _stored(dtype: str) -> np.dtype:
    return DTYPES[dtype].numpy
