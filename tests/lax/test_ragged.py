"""Ragged and scaled products, ragged exchanges, and the high halves of integer products."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import spmd
from spmd import collectives, errors, lax
from spmd.testing import check_grads

_random = np.random.default_rng(5)


def _normal(*shape: int) -> np.ndarray:
    return _random.normal(size=shape).astype(np.float32)


def _groups(sizes: np.ndarray) -> list[slice]:
    ends = np.cumsum(sizes)
    return [slice(e - n, e) for e, n in zip(ends, sizes, strict=True)]


# ---- ragged products ---------------------------------------------------------------------------


def test_each_group_of_rows_meets_its_own_matrix():
    x, w, sizes = _normal(7, 3), _normal(3, 3, 4), np.array([2, 0, 4])
    expected = np.zeros((7, 4), np.float32)
    for k, rows in enumerate(_groups(sizes)):
        expected[rows] = x[rows] @ w[k]
    for f in (lax.ragged_dot, spmd.jit(lax.ragged_dot)):
        np.testing.assert_allclose(f(x, w, sizes), expected, rtol=1e-5, atol=1e-6)
    check_grads(lambda x, w: lax.ragged_dot(x, w, sizes), (x, w), order=2, atol=1e-3, rtol=1e-3)
    many = spmd.vmap(lax.ragged_dot, (None, None, 0))(x, w, np.stack([sizes, sizes[::-1]]))
    np.testing.assert_allclose(many[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [[1, 2, 2], [[1, 2, 2], [0, 4, 1]]], ids=["shared", "each"])
def test_a_ragged_contraction_sums_each_group(sizes):
    a, b, sizes = _normal(2, 5, 6), _normal(2, 6, 4), np.array(sizes)
    numbers = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), [2], [])
    found = lax.ragged_dot_general(a, b, sizes, numbers)
    for batch in range(2):
        mine = sizes if sizes.ndim == 1 else sizes[batch]
        for k, part in enumerate(_groups(mine)):
            expected = a[batch][:, part] @ b[batch][part]
            np.testing.assert_allclose(found[k, batch], expected, rtol=1e-5, atol=1e-6)


def test_a_ragged_batch_changes_nothing():
    a, b = _normal(3, 2, 4), _normal(3, 4, 2)
    numbers = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), [0], [])
    found = lax.ragged_dot_general(a, b, np.array([1, 2]), numbers)
    np.testing.assert_allclose(found, a @ b, rtol=1e-5, atol=1e-6)


def test_ragged_products_refuse_what_does_not_fit():
    a = _normal(2, 5, 6)
    numbers = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), [2], [])
    with pytest.raises(errors.ShapeError, match="group_sizes"):
        lax.ragged_dot_general(a, _normal(2, 6, 4), np.ones((3, 3), int), numbers)
    with pytest.raises(errors.DtypeError, match="integers"):
        lax.ragged_dot(_normal(3, 2), _normal(1, 2, 2), np.ones(1))
    with pytest.raises(errors.ShapeError, match="ragged_dot"):
        lax.ragged_dot(a, a, np.array([1]))


def test_neighbours_share_a_scale():
    a, b = _normal(2, 3, 8), _normal(2, 8, 4)
    scales, factors = _normal(2, 3, 2), _normal(2, 4, 4)
    expected = (a * scales.repeat(4, 2)) @ (b * factors.repeat(2, 1))
    found = lax.scaled_dot(a, b, lhs_scale=scales, rhs_scale=factors)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(errors.ShapeError, match="lhs_scale"):
        lax.scaled_dot(a, b, lhs_scale=_normal(2, 3, 3))


# ---- exchanges ---------------------------------------------------------------------------------


def _exchange(axis_size: int, slices: int):
    """Random slices, and what each device must end up with."""
    n, per = axis_size, slices
    send = _random.integers(0, 3, size=(n, n * per)).astype(np.int32)
    begins = np.concatenate([np.zeros((n, 1), np.int32), np.cumsum(send, 1)[:, :-1]], 1)
    rows = int(send.sum(1).max()) + 1
    x = _normal(n, rows, 2)
    # What a device receives, sender by sender, one slice after the other.
    receive = send.reshape(n, n, per).transpose(1, 0, 2).reshape(n, n * per)
    places = np.concatenate([np.zeros((n, 1), np.int32), np.cumsum(receive, 1)[:, :-1]], 1)
    out = np.full((n, int(receive.sum(1).max()) + 2, 2), -1, np.float32)
    expected = out.copy()
    for d in range(n):
        for k in range(n * per):
            s, j = divmod(k, per)
            begin, count = begins[s, d * per + j], receive[d, k]
            expected[d, places[d, k] : places[d, k] + count] = x[s, begin : begin + count]
    # Senders say where their slices go on the receivers.
    told = places.reshape(n, n, per).transpose(1, 0, 2).reshape(n, n * per)
    return (x, out, begins, send, told, receive), expected


@pytest.mark.parametrize(("axis_size", "slices"), [(2, 1), (3, 2)])
def test_slices_of_any_length_arrive(axis_size, slices):
    args, expected = _exchange(axis_size, slices)
    f = functools.partial(collectives.ragged_all_to_all, axis_name="i")
    np.testing.assert_array_equal(spmd.vmap(f, axis_name="i")(*args), expected)
    np.testing.assert_array_equal(spmd.jit(spmd.vmap(f, axis_name="i"))(*args), expected)


def test_groups_exchange_among_themselves():
    args, expected = _exchange(2, 1)
    twice = [np.concatenate([a, a]) for a in args]
    groups = [[0, 1], [2, 3]]
    f = functools.partial(collectives.ragged_all_to_all, axis_name="i", axis_index_groups=groups)
    found = spmd.vmap(f, axis_name="i")(*twice)
    np.testing.assert_array_equal(found, np.concatenate([expected, expected]))


def test_slices_must_divide_among_the_devices():
    f = functools.partial(collectives.ragged_all_to_all, axis_name="i")
    x, v = np.zeros((2, 3, 1), np.float32), np.zeros((2, 3), np.int32)
    with pytest.raises(errors.ShapeError, match="3 slices"):
        spmd.vmap(f, axis_name="i")(x, x, v, v, v, v)


# ---- integers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "uint32", "int32"])
def test_the_high_half_of_a_product_is_exact(name):
    limits = np.iinfo(name)
    x, y = (
        _random.integers(limits.min, limits.max, size=100, endpoint=True).astype(name)
        for _ in range(2)
    )
    x[:4] = limits.min, limits.max, limits.min, 0
    y[:4] = limits.min, limits.max, limits.max, 5
    bits = 8 * limits.dtype.itemsize
    expected = [int(a) * int(b) >> bits for a, b in zip(x, y, strict=True)]
    for f in (lax.mulhi, spmd.jit(lax.mulhi)):
        np.testing.assert_array_equal(f(x, y), np.array(expected).astype(name))
    with pytest.raises(errors.DtypeError, match="mulhi"):
        lax.mulhi(x, np.float32(1))


# ---- small helpers -----------------------------------------------------------------------------


def test_approximate_top_k_is_exact():
    x = _normal(4, 9)
    values, places = lax.approx_min_k(x, 3)
    np.testing.assert_array_equal(values, np.sort(x, 1)[:, :3])
    np.testing.assert_array_equal(places, np.argsort(x, 1)[:, :3])
    np.testing.assert_array_equal(lax.approx_max_k(x, 2, 0)[0], np.sort(x, 0)[::-1][:2])


@pytest.mark.parametrize(
    ("shape", "k", "recall", "override"),
    [((1000,), 3, 0.95, -1), ((5000,), 3, 0.95, -1), ((3, 700), 20, 0.8, -1),
     ((3, 9000), 1, 0.9, -1),
     ((2, 1300), 5, 0.99, -1), ((3, 9000), 50, 0.95, 100000), ((2, 100), 3, 0.95, -1)],
)  # fmt: skip
def test_as_many_candidates_as_xla_keeps(shape, k, recall, override):
    jax = pytest.importorskip("jax")
    x = _normal(*shape)
    how = {"recall_target": recall, "reduction_input_size_override": override}
    found = lax.approx_max_k(x, k, aggregate_to_topk=False, **how)
    expected = jax.lax.approx_max_k(x, k, aggregate_to_topk=False, **how)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_mistakes_of_approximate_top_k():
    x = _normal(2, 300)
    with pytest.raises(errors.OptionError, match=r"recall_target=1.5 must be larger than 0"):
        lax.approx_max_k(x, 3, recall_target=1.5)
    with pytest.raises(errors.OptionError, match="override=50 must be at least 300"):
        lax.approx_min_k(x, 3, aggregate_to_topk=False, reduction_input_size_override=50)
    with pytest.raises(errors.ShapeError, match="k=301"):
        lax.approx_min_k(x, 301, aggregate_to_topk=False)


def test_broadcast_like_follows_numpy():
    x = _normal(3, 1)
    found = lax.broadcast_like(x, np.zeros((2, 3, 4)))
    np.testing.assert_array_equal(found, np.broadcast_to(x, (2, 3, 4)))
    with pytest.raises(errors.ShapeError, match="broadcast"):
        lax.broadcast_like(np.zeros((2, 3)), x)
