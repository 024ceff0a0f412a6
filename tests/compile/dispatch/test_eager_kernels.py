"""Programs of single operations that serve all sizes: beside `impl`, and beside what `jit` does."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.base.config import config
from spmd.compile.cpu.assemble.generic_kernels_ir import BLOCK, RUN
from spmd.compile.dispatch import eager, eager_kernels
from spmd.compile.dispatch.eager_cache import COMPILE_AFTER
from spmd.sharding.array import from_numpy
from tests.compile.dispatch.fast_calls import computed_by_impl, evaluated, forget, linked

SIZES = (1, 3, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 17)
REDUCTIONS = {"reduce_sum", "reduce_prod", "reduce_max", "reduce_min"}
FUNCTIONS = sorted(eager.SIZE_GENERIC - REDUCTIONS - {"dot_general", "pow", "integer_pow", "atan2"})
RNG = np.random.default_rng(7)


@pytest.fixture(autouse=True)
def cold():
    forget()


def values(shape, dtype=np.float32, low=0.05, high=0.95):
    """Numbers in the domain of every function."""
    return from_numpy(RNG.uniform(low, high, shape).astype(snp.dtype(dtype)))


def bits(x):
    return np.asarray(x).tobytes()


@pytest.fixture
def by_impl():
    """The primitives whose `impl` computes something during a test."""
    with computed_by_impl() as names:
        yield names


# ---- float functions ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_float_function_gives_the_bits_of_jit(name, by_impl):
    f = getattr(lax, name)
    for dtype in ("float32", "bfloat16"):
        for size in SIZES:
            x = values(size, dtype)
            x = snp.add(x, 1.0) if name == "acosh" else x
            assert bits(f(x)) == bits(spmd.jit(f)(x)), (dtype, size)
    assert name not in by_impl
    x = values((3, 50), high=0.9)
    with config.override("disable_jit", True):
        wanted = np.asarray(f(x))
    assert name in by_impl
    np.testing.assert_allclose(f(x), wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("size", SIZES)
def test_powers_give_the_bits_of_jit(size, by_impl):
    x, y, one = values(size), values(size), values(())
    for f, args in [
        (lax.pow, (x, y)),
        (lax.pow, (x, one)),
        (lax.pow, (one, y)),
        (lax.pow, (one, one)),
        (lax.atan2, (x, y)),
        (lambda x: lax.integer_pow(x, 5), (x,)),
        (lambda x: lax.integer_pow(x, -3), (x,)),
    ]:
        assert bits(f(*args)) == bits(spmd.jit(f)(*args))
    assert not by_impl


def test_special_values_give_the_bits_of_jit():
    ends = np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-40, 3e38], np.float32)
    for name in FUNCTIONS:
        f = getattr(lax, name)
        assert bits(f(from_numpy(ends))) == bits(spmd.jit(f)(ends)), name


# ---- reductions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "axes", "cut"),
    [
        ((4, 5), (1,), (4, 5, 1)),
        ((4, 5), (0,), (1, 4, 5)),
        ((4, 5), (0, 1), (1, 20, 1)),
        ((2, 3, 4, 5), (1, 2), (2, 12, 5)),
        ((2, 1, 4, 1), (0, 1, 2), (1, 8, 1)),
        ((2, 3, 4), (0, 2), None),
        ((1, 3), (0,), (3, 1, 1)),
        ((), (), (1, 1, 1)),
    ],
)
def test_reduced_shapes_become_matrices(shape, axes, cut):
    assert eager_kernels.matrices(shape, axes) == cut


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=str)
@pytest.mark.parametrize("name", sorted(REDUCTIONS))
def test_reductions_are_near_those_in_float64(name, dtype, by_impl):
    whole = {"reduce_sum": np.sum, "reduce_prod": np.prod}
    whole |= {"reduce_max": np.max, "reduce_min": np.min}
    with config.override("enable_x64", True):
        for shape in [(7,), (BLOCK * RUN * 3 + 5,), (3, 70), (70, 3), (5, 40, 37), (1, 1), ()]:
            x = values(shape, dtype, 0.9, 1.1)
            axes = [tuple(range(len(shape))), *((d,) for d in range(len(shape)))]
            for axis in dict.fromkeys(a for a in axes if a):
                found = getattr(lax, name)(x, axis)
                wanted = whole[name](np.asarray(x, np.float64), axis=axis)
                assert found.dtype == dtype
                np.testing.assert_allclose(
                    found, wanted, rtol=1e-4 if dtype == np.float32 else 1e-10
                )
    assert not by_impl


@pytest.mark.parametrize("name", ["max", "min"])
def test_nan_wins_and_signs_of_zero_are_ordered(name):
    f = getattr(snp, name)
    for count in (3, 40, 300):
        x = np.linspace(-1, 1, count, dtype=np.float32)
        x[count // 2] = np.nan
        assert np.isnan(f(from_numpy(x)))
        assert np.isnan(np.asarray(f(from_numpy(np.stack([x, x])), 0))[count // 2])
        assert f(from_numpy(np.full(count, np.inf, np.float32))) == np.inf


def test_long_sums_are_accurate():
    x = RNG.uniform(size=65_000).astype(np.float32)
    exact = x.sum(dtype=np.float64)
    assert abs(float(snp.sum(from_numpy(x))) - exact) < 2e-7 * exact
    tall = x.reshape(-1, 2)
    exact = tall.sum(0, dtype=np.float64)
    np.testing.assert_allclose(snp.sum(from_numpy(tall), 0), exact, rtol=2e-5)


# ---- products ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((4, 4), (4, 4)),
        ((5,), (5, 6)),
        ((4, 5), (5,)),
        ((3, 4, 5), (3, 5, 6)),
        ((30, 64), (64, 33)),
    ],
)
def test_products_give_the_bits_of_jit(left, right, by_impl):
    x, y = values(left), values(right)
    assert bits(x @ y) == bits(spmd.jit(snp.matmul)(x, y))
    np.testing.assert_allclose(x @ y, np.asarray(x) @ np.asarray(y), rtol=1e-5)
    assert not by_impl


def test_operations_without_size_generic_code_are_computed_by_impl(by_impl):
    x, half = values((2, 3, 4)), values((3, 4), "bfloat16")
    np.testing.assert_allclose(lax.reduce_sum(x, (0, 2)), np.asarray(x).sum((0, 2)), rtol=1e-6)
    assert lax.reduce_sum(half, (0,)).dtype == half.dtype
    z = from_numpy(np.array([1 + 2j, 3 - 1j], np.complex64))
    np.testing.assert_allclose(lax.exp(z), np.exp(np.asarray(z)), rtol=1e-6)
    assert lax.exp(values((0, 3))).shape == (0, 3)
    assert float(lax.reduce_sum(values((0,)), (0,))) == 0.0
    assert by_impl == ["reduce_sum", "reduce_sum", "exp", "exp", "reduce_sum"]


# ---- calls -------------------------------------------------------------------------------------


def test_operands_of_every_kind_give_the_same_bits():
    x = values((3, 5))
    wanted = bits(lax.tanh(x))
    assert bits(lax.tanh(np.asarray(x))) == wanted
    assert bits(lax.tanh(np.asfortranarray(x))) == wanted
    number = lax.tanh(0.5)
    assert number.weak_type and bits(number) == bits(lax.tanh(np.float32(0.5)))
    device = spmd.devices()[1]
    committed = lax.tanh(spmd.device_put(x, device))
    assert committed.devices() == {device} and bits(committed) == wanted
    large = values(30_000)
    assert bits(lax.tanh(large))[: 4 * 100] == bits(lax.tanh(large[:100]))
    gone = values(4)
    gone.delete()
    with pytest.raises(spmd.errors.DeletedError):
        lax.tanh(gone)


def test_a_new_shape_compiles_nothing():
    x = values((50, 40))
    snp.tanh(x), x.sum(), x.sum(0)
    with linked() as code:
        for n in range(1, 40):
            snp.tanh(x[:n]), x[:n].sum(), x[:, :n].sum(0)
    assert not code


CALLS = {
    "tanh": lambda x: snp.tanh(x),
    "sum": lambda x: snp.sum(x),
    "sum of rows": lambda x: x.sum(axis=1),
    "sum that keeps dims": lambda x: x.sum(0, keepdims=True),
    "mean": lambda x: x.mean(),
    "mean of columns": lambda x: snp.mean(x, axis=0),
    "max": lambda x: x.max(1),
    "argmax": lambda x: x.argmax(1),
    "any": lambda x: (x > 0.5).any(0),
    "integers": lambda x: (x * 100).astype(np.int32).sum(),
    "product": lambda x: x @ x.T,
    "where": lambda x: snp.where(x > 0.5, x, x),
    "slice": lambda x: x[1:3],
    "steps": lambda x: x[::-2],
    "reshape": lambda x: x.reshape(-1, 2),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_call_gives_the_bits_of_the_first(name):
    f, x = CALLS[name], values((6, 4))
    first = f(x)
    for _ in range(2 * COMPILE_AFTER):
        out = f(x)
        assert (out.aval, bits(out)) == (first.aval, bits(first))
    with evaluated() as names:
        f(x)
    # Processors differ in what a float gives that fits no integer: this is never compiled.
    assert names == (["convert_element_type"] if name == "integers" else [])


def test_options_are_part_of_the_kind():
    x = values((3, 4))
    for _ in range(COMPILE_AFTER + 2):
        assert x.sum(0).shape == (4,) and x.sum(axis=1).shape == (3,)
        assert x.sum(axis=(0, 1)).shape == x.sum().shape == ()
        assert x.sum(0, keepdims=True).shape == (1, 4)
        assert x.sum(dtype=np.float16).dtype == np.float16
    assert snp.sum(a=x).shape == ()
    with pytest.raises(spmd.errors.ArgumentError, match="axis must be an integer"):
        x.sum(1.0)
    with pytest.raises(spmd.errors.ArgumentError, match="axis 2 is out of bounds"):
        x.sum(2)
    np.testing.assert_array_equal(x[0:2], np.asarray(x)[:2])


def test_disable_jit_computes_by_impl():
    x = values(100)
    fast = bits(lax.tanh(x))
    with config.override("disable_jit", True):
        assert bits(lax.tanh(x)) == np.tanh(np.asarray(x)).tobytes() != fast
    assert bits(lax.tanh(x)) == fast


def test_tracers_pass_through():
    x = values((3, 4))
    for _ in range(COMPILE_AFTER + 2):
        snp.tanh(x), x.sum(0), x @ x.T
    assert "tanh" in str(spmd.make_jaxpr(lambda y: snp.tanh(x) * y)(x))
    slope = spmd.grad(lambda y: snp.tanh(y).sum(0) @ x.sum(0))(x)
    np.testing.assert_allclose(
        slope, (1 - np.tanh(np.asarray(x)) ** 2) * np.asarray(x).sum(0), rtol=1e-5
    )
