"""Polynomials against JAX and against each other: a product divides, a derivative integrates."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.base.errors import SpmdError
from spmd.testing import check_grads
from tests.numpy.oracle import assert_agrees, case, values

P, Q = values(6), values(3) + 4
INTS = np.array([0, 0, 3, 1, 2])


def cases():
    for name in "polyadd polysub polymul polydiv".split():
        for kind, pair in {
            "long": (P, Q),
            "short": (Q, P),
            "ints": (INTS, np.array([2, 1])),
        }.items():
            yield case(f"{name}-{kind}", lambda xp, p, q, n=name: getattr(xp, n)(p, q), *pair,
                       rtol=1e-5, atol=1e-5)  # fmt: skip
    for m in (0, 1, 3):
        yield case(f"polyder-{m}", lambda xp, p, m=m: xp.polyder(p, m), P)
        yield case(f"polyint-{m}", lambda xp, p, m=m: xp.polyint(p, m), P)
    yield case("polyint-k", lambda xp, p, k: xp.polyint(p, 2, k), P, np.float32([3, 4]))
    yield case("polyint-ints", lambda xp, p: xp.polyint(p, k=1.5), INTS)
    yield case("poly", lambda xp, p: xp.poly(p), P, rtol=1e-4, atol=1e-4)
    yield case("poly-complex", lambda xp, p: xp.poly(p), values(4, dtype=np.complex64), rtol=1e-4)
    yield case("poly-none", lambda xp, p: xp.poly(p), P[:0])
    yield case("poly-scalar", lambda xp, p: xp.poly(p), P[1])
    x, y, w = values(9), values(9, 2), values(9) + 4
    at = {"rtol": 1e-3, "atol": 1e-4}
    yield case("polyfit", lambda xp, x, y: xp.polyfit(x, y[:, 0], 3), x, y, **at)
    yield case("polyfit-w", lambda xp, x, y, w: xp.polyfit(x, y, 2, w=w), x, y, w, **at)
    yield case("polyfit-full", lambda xp, x, y: xp.polyfit(x, y, 2, full=True), x, y, **at)
    yield case("polyfit-cov", lambda xp, x, y: xp.polyfit(x, y, 2, cov=True), x, y, **at)


def test_roots_are_where_the_polynomial_is_zero():
    for p in (np.array([1.0, -6, 11, -6]), np.array([0.0, 0, 2, 1, 5]), np.array([1.0, 0, 0])):
        found = np.sort_complex(np.asarray(snp.roots(p)))
        np.testing.assert_allclose(found, np.sort_complex(np.roots(p)), rtol=1e-3, atol=1e-3)
    kept = np.asarray(
        spmd.jit(lambda p: snp.roots(p, strip_zeros=False))(np.float32([0, 1, -3, 2]))
    )
    assert np.isnan(kept[2])
    np.testing.assert_allclose(np.sort(kept[:2].real), [1, 2], rtol=1e-4)
    assert snp.roots(np.zeros(3)).shape == (0,) and snp.roots(np.ones(1)).dtype == np.complex64
    matrix = values(3, 3)
    np.testing.assert_allclose(snp.poly(matrix), np.poly(matrix), rtol=1e-3, atol=1e-3)


def test_polynomials_are_jax_s():
    assert_agrees(*cases())


def test_division_undoes_multiplication():
    quotient, rest = snp.polydiv(snp.polymul(P, Q), Q)
    np.testing.assert_allclose(quotient, P, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(rest, np.zeros(8), atol=1e-4)
    assert snp.polydiv(snp.polymul(P, Q), Q, trim_leading_zeros=True)[1].shape == (0,)
    assert snp.polymul(INTS, INTS, trim_leading_zeros=True).tolist() == [9, 6, 13, 4, 4]


def test_derivatives_and_maps():
    check_grads(lambda p, q: snp.polydiv(p, q), (P, Q), order=2, atol=1e-3, rtol=1e-3)
    check_grads(snp.poly, (Q,), order=2, atol=1e-3, rtol=1e-3)
    at_once = spmd.vmap(snp.polydiv, (0, None))(np.stack([P, 2 * P]), Q)
    for whole, one in zip(at_once, snp.polydiv(2 * P, Q), strict=True):
        np.testing.assert_allclose(whole[1], one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: snp.polyder(P, -1), "polyder: m=-1 must not be negative"),
        (lambda: snp.polyint(P, 2, np.ones(3)), "k must be a scalar or have shape (1,) or (2,)"),
        (lambda: snp.polyadd(np.ones((2, 2)), P), "coefficients must be vectors"),
        (lambda: snp.polyfit(P, Q, 1), "y a vector or matrix with as many rows"),
        (lambda: snp.poly(np.ones((2, 3))), "a vector of roots or a square matrix is needed"),
        (lambda: spmd.jit(snp.roots)(P), "pass strip_zeros=False"),
        (lambda: snp.polydiv(P, P[:0]), "the divisor has no coefficients"),
    ],
)
def test_errors_name_what_is_wrong(call, text):
    with pytest.raises(SpmdError) as caught:
        call()
    assert text in str(caught.value)


def test_trimming_asked_for_at_no_end_keeps_zeros():
    assert snp.trim_zeros(np.zeros(3), "").shape == (3,)
    assert snp.trim_zeros(np.zeros(3), "f").shape == (0,)


def test_a_remainder_of_nan_is_not_trimmed():
    _, rest = snp.polydiv(np.arange(1.0, 4.0), np.zeros(2), trim_leading_zeros=True)
    assert rest.shape == (3,) and np.isnan(rest).all()
