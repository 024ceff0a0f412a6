"""Parameters that few programs use: weights of quantiles, order-keeping sets, traced deletes."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import errors
from spmd import numpy as snp

_random = np.random.default_rng(3)
_x = _random.normal(size=(4, 7)).astype(np.float32)
_weights = _random.integers(0, 4, size=(4, 7)).astype(np.float32)


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("q", [0.0, 0.3, 1.0, np.array([0.1, 0.5, 0.9])], ids=str)
@pytest.mark.parametrize("weights", [None, _weights], ids=["plain", "weighted"])
def test_the_inverted_cdf_is_numpys(axis, q, weights):
    how = {"axis": axis, "method": "inverted_cdf", "weights": weights, "keepdims": True}
    np.testing.assert_array_equal(snp.quantile(_x, q, **how), np.quantile(_x, q, **how))
    percent = np.percentile(_x, 100 * q, **how)
    np.testing.assert_array_equal(snp.percentile(_x, 100 * q, **how), percent)


def test_weights_of_the_reduced_dims_are_spread():
    w = _weights[0]
    how = {"axis": 1, "method": "inverted_cdf", "weights": w}
    np.testing.assert_array_equal(snp.quantile(_x, 0.4, **how), np.quantile(_x, 0.4, **how))


def test_a_nan_is_passed_on_or_skipped():
    x = _x.copy()
    x[0, 0] = np.nan
    how = {"axis": 1, "method": "inverted_cdf", "weights": _weights}
    assert np.isnan(snp.quantile(x, 0.5, **how)[0])
    expected = np.nanquantile(x, 0.5, **how)
    np.testing.assert_array_equal(snp.nanquantile(x, 0.5, **how), expected)


def test_negative_weights_and_other_methods_are_refused():
    assert np.isnan(snp.quantile(_x[0], 0.5, method="inverted_cdf", weights=-_weights[0]))
    with pytest.raises(errors.ArgumentError, match="inverted_cdf"):
        snp.quantile(_x, 0.5, weights=_weights)
    with pytest.raises(errors.ShapeError, match="weights of shape"):
        snp.quantile(_x, 0.5, axis=1, method="inverted_cdf", weights=_weights[:, :2])


def test_sets_tell_where_their_elements_are():
    a, b = np.array([7, 1, 3, 3, 5]), np.array([5, 3, 9])
    for found, expected in zip(
        snp.intersect1d(a, b, return_indices=True),
        np.intersect1d(a, b, return_indices=True),
        strict=True,
    ):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(
        snp.setdiff1d(a, b, assume_unique=True), np.setdiff1d(a, b, assume_unique=True)
    )
    with pytest.raises(errors.ArgumentError, match="method"):
        snp.isin(a, b, method="quick")


def test_delete_takes_traced_indices_that_are_unique():
    f = spmd.jit(lambda i: snp.delete(snp.arange(6), i, assume_unique_indices=True))
    np.testing.assert_array_equal(f(np.array([1, -1])), [0, 2, 3, 4])


@pytest.mark.parametrize("axis", [None, 0, (1,)])
@pytest.mark.parametrize("trim", ["fb", "f", "b"])
def test_trim_zeros_of_matrices(axis, trim):
    x = np.zeros((4, 5), np.int32)
    x[1:3, 1:4] = 1
    expected = np.trim_zeros(x, trim, axis)
    np.testing.assert_array_equal(snp.trim_zeros(x, trim, axis), expected)
    assert snp.trim_zeros(np.zeros(3), trim).shape == (0,)


def test_means_given_and_integer_types_chosen():
    x = np.array([1.0, 2.0, np.nan], np.float32)
    assert snp.nanvar(x, mean=1.0) == 0.5 and snp.nanstd(x, mean=1.5) == 0.5
    assert snp.argsort(x, dtype=np.int16).dtype == np.int16
    assert snp.ravel_multi_index((1, 2), (3, 4), dtype=np.uint8).dtype == np.uint8
    with pytest.raises(errors.DtypeError, match="integer"):
        snp.argsort(x, dtype=np.float32)


def test_negative_indices_need_not_wrap():
    x = np.arange(5)
    found = snp.take_along_axis(x, np.array([-1]), 0, "clip", wrap_negative_indices=False)
    np.testing.assert_array_equal(found, [0])


def test_the_standards_linear_algebra_looks_at_the_last_dims():
    x = np.arange(18).reshape(2, 3, 3)
    np.testing.assert_array_equal(snp.linalg.diagonal(x, offset=1), np.linalg.diagonal(x, offset=1))
    np.testing.assert_array_equal(snp.linalg.trace(x), np.linalg.trace(x))
    np.testing.assert_array_equal(snp.linalg.outer(x[0, 0], x[0, 1]), np.outer(x[0, 0], x[0, 1]))
    np.testing.assert_array_equal(snp.linalg.cross(x[0], x[1]), np.linalg.cross(x[0], x[1]))
    for f in (snp.linalg.outer, snp.linalg.cross):
        with pytest.raises(errors.ShapeError, match="linalg"):
            f(x[..., :2], x[..., :2])
