"""dot_general: all pairings of dims against einsum, dtypes, derivatives, batching, errors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spmd
from spmd import lax
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, DtypeError, ShapeError
from spmd.core.aval import typeof
from spmd.core.stage import trace_to_jaxpr
from spmd.testing import check_grads

SIZES = {"a": 2, "b": 3, "c": 4, "d": 2, "e": 3, "f": 1, "g": 0}


@st.composite
def products(draw):
    """Labels of two operands: shared ones are contracted or batched, as `batched` says."""
    labels = draw(st.permutations("abcdefg"))
    count = draw(st.integers(0, 3))
    shared = labels[:count]
    batched = [draw(st.booleans()) for _ in shared]
    left = labels[count : count + draw(st.integers(0, 2))]
    right = labels[5 : 5 + draw(st.integers(0, 2))]
    lhs = draw(st.permutations([*shared, *left]))
    rhs = draw(st.permutations([*shared, *right]))
    return lhs, rhs, [s for s, b in zip(shared, batched, strict=True) if b]


def dimension_numbers(lhs, rhs, batch):
    contract = [x for x in lhs if x in rhs and x not in batch]
    pairs = [[[side.index(x) for x in kind] for side in (lhs, rhs)] for kind in (contract, batch)]
    return tuple(tuple(tuple(side) for side in kind) for kind in pairs)


def free(labels, other):
    return [x for x in labels if x not in other]


@settings(max_examples=60, deadline=None)
@given(products())
def test_every_pairing_is_an_einsum(case):
    lhs, rhs, batch = case
    rng = np.random.default_rng(0)
    x = rng.normal(size=[SIZES[k] for k in lhs])
    y = rng.normal(size=[SIZES[k] for k in rhs])
    numbers = dimension_numbers(lhs, rhs, batch)
    out = [*batch, *free(lhs, rhs), *free(rhs, lhs)]
    equation = f"{''.join(lhs)},{''.join(rhs)}->{''.join(out)}"
    with spmd.config.override("enable_x64", True):
        found = lax.dot_general(x, y, numbers)
        np.testing.assert_allclose(found, np.einsum(equation, x, y), rtol=1e-12, atol=1e-12)
        check_grads(lambda x, y: lax.dot_general(x, y, numbers), (x, y), 1)


# ---- dtypes ------------------------------------------------------------------------------------


def test_integers_wrap_and_preferred_type_does_not():
    x = np.full((1, 4), 100, np.int8)
    assert np.asarray(lax.dot(x, x.T))[0, 0] == np.int64(40000).astype(np.int8)
    wide = lax.dot(x, x.T, preferred_element_type=np.int32)
    assert wide.dtype == np.int32
    assert np.asarray(wide)[0, 0] == 40000


def test_bfloat16_is_summed_in_float32():
    x = np.full((1, 512), 1 / 3, dtypes.bfloat16)
    found = lax.dot(x, x.T)
    exact = 512 * np.float32(x[0, 0]) ** 2
    assert found.dtype == dtypes.bfloat16
    assert np.asarray(found)[0, 0] == np.asarray(exact).astype(dtypes.bfloat16)


def test_gradients_have_the_dtypes_of_the_operands():
    x = np.ones((2, 3), dtypes.bfloat16)

    def total(x, y):
        return lax.reduce_sum(lax.dot(x, y, preferred_element_type=np.float32), (0, 1))

    dx, dy = spmd.grad(total, argnums=(0, 1))(x, x.T)
    assert dx.dtype == dy.dtype == dtypes.bfloat16
    np.testing.assert_array_equal(np.asarray(dx).astype(np.float32), 2)


def test_mixed_dtypes_are_promoted_as_in_jax():
    x = np.ones((2, 3), np.float32)
    assert lax.dot(x, np.ones(3, np.int32)).dtype == np.float32


def test_bool_products_ask_whether_any_pair_is_true():
    x = np.array([[True, False], [False, False]])
    np.testing.assert_array_equal(lax.dot(x, x), x)


# ---- batching ----------------------------------------------------------------------------------


def test_vmap_of_one_side_moves_nothing():
    """A batched operand has one more free dim, wherever the batch dim is."""
    x = np.ones((3, 2, 4), np.float32)
    y = np.ones((4, 5), np.float32)
    jaxpr = spmd.make_jaxpr(spmd.vmap(lax.dot, in_axes=(1, None), out_axes=1))(x, y).jaxpr
    assert [e.prim.name for e in jaxpr.eqns] == ["dot_general"]


def test_vmap_of_both_sides_is_a_batch_matmul():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(6, 2, 3)).astype("f4"), rng.normal(size=(6, 3, 4)).astype("f4")
    jaxpr = spmd.make_jaxpr(spmd.vmap(lax.dot))(x, y).jaxpr
    assert [e.prim.name for e in jaxpr.eqns] == ["dot_general"]
    np.testing.assert_allclose(spmd.vmap(lax.dot)(x, y), lax.batch_matmul(x, y), rtol=1e-6)


# ---- errors ------------------------------------------------------------------------------------


def traced(f, *xs):
    return trace_to_jaxpr(lambda *a: [f(*a)], [typeof(x) for x in xs])


def test_errors():
    x, y = np.ones((2, 3), np.float32), np.ones((4, 5), np.float32)
    with pytest.raises(ShapeError) as caught:
        traced(lax.dot, x, y)
    assert (
        "contracted dims must have equal sizes, but dim 1 of lhs float32[2,3] has size 3 and "
        "dim 0 of rhs float32[4,5] has size 4"
    ) in str(caught.value)
    with pytest.raises(ShapeError, match="takes vectors and matrices"):
        traced(lax.dot, x, np.float32(1))
    with pytest.raises(ShapeError, match=r"different numbers in range\(2\)"):
        traced(lambda x, y: lax.dot_general(x, y, (((2,), (0,)), ((), ()))), x, y)
    with pytest.raises(ShapeError, match="come in pairs"):
        traced(lambda x, y: lax.dot_general(x, y, (((0, 1), (0,)), ((), ()))), x, y)
    with pytest.raises(ArgumentError, match="must be"):
        lax.dot_general(x, y, ((1,), (0,)))
    with pytest.raises(DtypeError, match="preferred_element_type=int8 cannot hold"):
        narrow = {"preferred_element_type": np.int8}
        traced(lambda x, y: lax.dot(x, y, **narrow), np.int32(x), np.int32(x.T))
    with pytest.raises(ShapeError, match="batch_matmul"):
        traced(lax.batch_matmul, x, np.ones((1, 4, 5), np.float32))


def test_dot_with_dimension_numbers_is_dot_general():
    x, y = np.ones((2, 3, 4), np.float32), np.full((2, 4, 5), 2, np.float32)
    numbers = (((2,), (1,)), ((0,), (0,)))
    found = lax.dot(x, y, dimension_numbers=numbers)
    np.testing.assert_array_equal(found, lax.dot_general(x, y, numbers))


# ---- precision ---------------------------------------------------------------------------------

SQUARE = np.ones((2, 2), np.float32)


@pytest.mark.parametrize("precision", ["foo", 3, ("high", "foo"), ("high",) * 3])
def test_an_unknown_precision_is_an_error(precision):
    with pytest.raises(ArgumentError, match=r"dot_general: precision=.* must be None, a lax\.Prec"):
        lax.dot(SQUARE, SQUARE, precision=precision)
    with pytest.raises(ArgumentError, match="conv_general_dilated: precision="):
        lax.conv(SQUARE[None, None], SQUARE[None, None], (1, 1), "SAME", precision)


@pytest.mark.parametrize(
    "precision", ["highest", "tensorfloat32", lax.Precision.HIGH, ("high", None), "BF16_BF16_F32"]
)
def test_each_precision_of_jax_is_accepted(precision):
    np.testing.assert_array_equal(lax.dot(SQUARE, SQUARE, precision=precision), SQUARE @ SQUARE)
