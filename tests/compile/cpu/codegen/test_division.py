"""Division by what a row shares: NumPy's quotients, bit by bit where they are not tiny."""

import numpy as np
import pytest

import spmd
from spmd.compile.cpu.codegen.kernel import render
from spmd.compile.kernel.builder import Builder
from spmd.compile.native.llvm.vector_emitter import Target

SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 3.0, -0.7, 1.0000001)
TYPES = [np.float32, np.float64]


def numbers(dtype, count, seed):
    """Special numbers, the ends of the range, numbers near 1 and random bits."""
    info, rng = np.finfo(dtype), np.random.default_rng(seed)
    ends = [info.smallest_subnormal, 5 * info.smallest_subnormal, info.tiny, info.max, info.max / 3]
    integer = f"u{info.bits // 8}"
    bits = rng.integers(0, 2**info.bits, count, integer, endpoint=False).view(dtype)
    near = rng.standard_normal(count).astype(dtype)
    return np.concatenate([np.array([*SPECIAL, *ends, *(-x for x in ends)], dtype), bits, near])


def assert_quotients(got, x, y):
    """Equal, signs of zeros too; within 2 units of the last place where they are tiny."""
    with np.errstate(all="ignore"):
        wanted = x / y
    info = np.finfo(got.dtype)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(np.where(np.isnan(got), got, wanted)))
    tiny = np.abs(wanted) < info.tiny * 2.0 ** (2 * info.nmant)
    np.testing.assert_array_equal(got[~tiny], wanted[~tiny])
    unit = np.maximum(np.spacing(np.abs(wanted[tiny])), info.smallest_subnormal)
    assert np.all(np.abs(got[tiny] - wanted[tiny]) <= 2 * unit)


@pytest.fixture(autouse=True)
def _wide():
    with spmd.config.override("enable_x64", True):
        yield


@pytest.mark.parametrize("dtype", TYPES)
def test_quotients_by_a_row_divisor_are_those_of_numpy(dtype):
    x, y = numbers(dtype, 500, 1), numbers(dtype, 30, 2)
    x = np.broadcast_to(np.concatenate([x, y]), (len(y), len(x) + len(y))).copy()
    got = np.asarray(spmd.jit(lambda x, y: x / y[:, None])(x, y))
    assert_quotients(got, x, y[:, None])


@pytest.mark.parametrize("dtype", TYPES)
def test_quotients_in_a_column_sum_are_those_of_numpy(dtype):
    # Lanes run along the divisors here: each has its own, for all rows.
    rng = np.random.default_rng(3)
    x = rng.standard_normal((50, 129)).astype(dtype)
    x[:, 5], x[:, 6], x[3, 7] = 0, np.finfo(dtype).tiny / 64, np.inf
    program = spmd.jit(lambda x: (x.sum(0), x / x.sum(0)))
    total, got = (np.asarray(part) for part in program(x))
    assert_quotients(got, x, total)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("divisor", [3.0, -7.0, 0.1, 1e-30, 1e30, 4.0, 0.0, np.inf, 1e38, 1e-38])
def test_quotients_by_a_constant_are_those_of_numpy(dtype, divisor):
    x = numbers(dtype, 500, 4)
    assert_quotients(np.asarray(spmd.jit(lambda x: x / divisor)(x)), x, dtype(divisor))


def test_a_divisor_of_a_whole_row_needs_no_vector_division():
    b = Builder((8,), (256,))
    x, y, out = b.arg("f32", 8 * 256), b.arg("f32", 8), b.arg("f32", 8 * 256, "out")
    with b.row():
        b.store(out, (256, 1), b.op("div", b.load(x, (256, 1)), b.load(y, (1, 0))))
    kernel = b.build()
    assert "fdiv <" not in render(kernel, Target(512, True)).text
    assert "fdiv <" in render(kernel, Target(512, False)).text
