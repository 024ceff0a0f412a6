"""Running reductions: corners of values and of derivatives."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.base.errors import ShapeError
from spmd.testing import check_grads

NAMES = ["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [0, 1, 2, 3, 8, 9])
def test_derivatives_for_every_size(name, size):
    x = np.random.default_rng(size).permutation(np.linspace(0.5, 2, size)).reshape(size)
    with spmd.config.override("enable_x64", True):
        for reverse in (False, True):
            check_grads(lambda x, r=reverse: getattr(lax, name)(x, reverse=r), (x,), 2)


def test_product_over_zeros_has_a_gradient():
    x = np.array([2.0, 0.0, 3.0, 0.0], np.float32)
    jacobian = spmd.jacfwd(lax.cumprod)(x)
    wanted = [[1, 0, 0, 0], [0, 2, 0, 0], [0, 6, 0, 0], [0, 0, 0, 0]]
    np.testing.assert_array_equal(jacobian, wanted)


def test_logsumexp_of_infinities():
    x = np.array([-np.inf, -np.inf, 1.0, np.inf, 2.0], np.float32)
    np.testing.assert_array_equal(lax.cumlogsumexp(x), [-np.inf, -np.inf, 1, np.inf, np.inf])


def test_gradient_of_logsumexp_after_minus_infinity():
    x = np.array([-np.inf, 1.0, 1.0], np.float32)
    jacobian = np.asarray(spmd.jacrev(lax.cumlogsumexp)(x))
    np.testing.assert_allclose(jacobian[1:], [[0, 1, 0], [0, 0.5, 0.5]], atol=1e-6)


def test_gradient_of_logsumexp_is_finite_at_ties_to_second_order():
    x = np.zeros(4)
    with spmd.config.override("enable_x64", True):
        check_grads(lax.cumlogsumexp, (x,), 2)


def test_nan_stays():
    x = np.array([1.0, np.nan, 3.0], np.float32)
    for name in NAMES:
        assert np.isnan(np.asarray(getattr(lax, name)(x))[1:]).all()


def test_axis_error():
    with pytest.raises(ShapeError, match=r"cumsum: axis=1 must be in range\(1\)"):
        spmd.make_jaxpr(lambda x: lax.cumsum(x, 1))(np.ones(3, np.float32))


def test_derivatives_of_running_logsumexps_do_not_hide_nan():
    x = np.array([1.0, np.nan, 2.0], np.float32)
    for reverse, first in ((False, [1, 0, 0]), (True, [0, 0, 1])):
        jacobian = spmd.jacfwd(lambda y, r=reverse: lax.cumlogsumexp(y, reverse=r))(x)
        row = 2 if reverse else 0
        np.testing.assert_array_equal(jacobian[row], first)
        assert np.isnan(np.delete(np.asarray(jacobian), row, 0)).all()
        assert np.isnan(
            spmd.grad(lambda y, r=reverse: lax.cumlogsumexp(y, reverse=r).sum())(x)
        ).all()
