"""`spmd.scipy.linalg` against `jax.scipy.linalg` and SciPy's definitions, with derivatives."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd.base.config import config
from spmd.base.errors import ArgumentError, ShapeError
from spmd.scipy import linalg
from spmd.testing import check_grads
from tests.lax.checks import as_list

RNG = np.random.default_rng(11)
A = RNG.normal(size=(4, 4))
C = A + 1j * RNG.normal(size=(4, 4))
B = RNG.normal(size=(4, 2))
POSITIVE = C @ C.conj().T + np.eye(4)
V = np.array([2.0, -1.0, 3.0])


@pytest.fixture(autouse=True)
def wide_dtypes():
    with config.override("enable_x64", True):
        yield


def assert_same(found, wanted):
    for x, y in zip(as_list(found), as_list(wanted), strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-8)


CASES = [
    ("cholesky", (POSITIVE,), {}),
    ("cholesky", (POSITIVE,), {"lower": True}),
    ("solve_triangular", (C, B + 0j), {"trans": "C"}),
    ("solve_triangular", (A, B[:, 0]), {"trans": 1, "lower": True, "unit_diagonal": True}),
    ("solve", (POSITIVE, B + 0j), {"assume_a": "pos"}),
    ("solve", (A, B[:, 0]), {}),
    ("lu", (C,), {}),
    ("lu", (A[:, :2],), {"permute_l": True}),
    ("lu_factor", (A,), {}),
    ("qr", (A[:, :2],), {}),
    ("qr", (A[:, :2],), {"mode": "economic", "pivoting": True}),
    ("qr", (A,), {"mode": "r"}),
    ("eigh", (POSITIVE,), {"eigvals_only": True}),
    ("eigh_tridiagonal", (np.arange(4.0), np.ones(3)), {"eigvals_only": True}),
    ("hessenberg", (C,), {"calc_q": True}),
    ("polar", (C,), {}),
    ("polar", (A[:, :2],), {"side": "left", "method": "svd"}),
    ("solve_sylvester", (A, A[:2, :2], B), {}),
    ("expm", (A,), {}),
    ("expm", (30 * C,), {}),
    ("expm_frechet", (A, A.T), {}),
    ("sqrtm", (C,), {}),
    ("sqrtm", (A,), {}),
    ("block_diag", (A, V), {}),
    ("toeplitz", (V + 1j,), {}),
    ("toeplitz", (V, np.arange(4)), {}),
    ("hankel", (V, np.arange(2.0)), {}),
    ("circulant", (V,), {}),
    ("companion", (V,), {}),
    ("leslie", (V, V[1:]), {}),
    ("fiedler", (V,), {}),
    *[
        ("convolution_matrix", (V, n, mode), {})
        for n in (2, 5)
        for mode in ("full", "same", "valid")
    ],
    ("dft", (5, "sqrtn"), {}),
    *[(name, (5,), {}) for name in ("hilbert", "invhilbert", "invpascal", "helmert")],
    ("invpascal", (4, "upper"), {}),
    ("helmert", (4, True), {}),
    ("hadamard", (4,), {}),
]


@pytest.mark.parametrize("name, args, how", CASES)
def test_same_as_jax(name, args, how):
    jax = pytest.importorskip("jax")
    oracle = getattr(pytest.importorskip("jax.scipy.linalg"), name, None)
    if oracle is None:
        pytest.skip(f"this JAX has no {name}")
    with jax.enable_x64(True):
        wanted = [np.asarray(x) for x in jax.tree.leaves(oracle(*args, **how))]
    found = spmd.tree_util.tree_leaves(getattr(linalg, name)(*args, **how))
    assert_same(found, wanted)
    assert [np.asarray(x).dtype.kind for x in found] == [x.dtype.kind for x in wanted]


@pytest.mark.parametrize("trans", [0, 1, 2])
def test_solving_with_factors(trans):
    matrix = (C, C.T, C.conj().T)[trans]
    found = linalg.lu_solve(linalg.lu_factor(C), B, trans)
    np.testing.assert_allclose(found, np.linalg.solve(matrix, B))
    for lower in (False, True):
        solved = linalg.cho_solve(linalg.cho_factor(POSITIVE, lower), B[:, 0])
        np.testing.assert_allclose(solved, np.linalg.solve(POSITIVE, B[:, 0]))


def test_functions_of_matrices_keep_their_laws():
    root = np.asarray(linalg.sqrtm(A))
    np.testing.assert_allclose(root @ root, A, atol=1e-10)
    np.testing.assert_allclose(np.asarray(linalg.funm(A, lambda x: x * x)), A @ A, atol=1e-8)
    t, z = (np.asarray(x) for x in linalg.rsf2csf(*linalg.schur(A)))
    np.testing.assert_allclose(z @ t @ z.conj().T, A, atol=1e-10)
    assert not np.tril(t, -1).any()
    v = np.asarray(
        linalg.eigh_tridiagonal(np.arange(4.0), np.ones(3), select="i", select_range=(1, 2))[1]
    )
    np.testing.assert_allclose(v.T @ v, np.eye(2), atol=1e-12)


def test_vmap_and_jit():
    stack = np.stack([A, 20 * A, 0 * A])
    for f in (linalg.expm, linalg.sqrtm, lambda x: linalg.polar(x + 3 * np.eye(4))[0]):
        wanted = np.stack([f(x) for x in stack[:2]])
        np.testing.assert_allclose(spmd.jit(spmd.vmap(f))(stack[:2]), wanted, rtol=1e-8, atol=1e-6)
        np.testing.assert_allclose(f(stack[:2]), wanted, rtol=1e-8, atol=1e-6)
    np.testing.assert_allclose(linalg.expm(stack[2]), np.eye(4), atol=1e-15)


@pytest.mark.parametrize(
    "f, args",
    [
        (linalg.expm, (A,)),
        (lambda x: linalg.sqrtm(x @ x.T), (A,)),
        (lambda x: linalg.polar(x), (A[:, :3],)),
        (lambda x: linalg.polar(x)[1], (np.eye(3),)),
        (linalg.solve_sylvester, (A + 4 * np.eye(4), A[:2, :2], B)),
        (lambda a, b: linalg.solve(a @ a.T, b, assume_a="pos"), (A, B)),
        (lambda a, b: linalg.lu_solve(linalg.lu_factor(a), b, 1), (A, B)),
    ],
)
def test_derivatives(f, args):
    check_grads(f, args, 1, atol=1e-4, rtol=1e-4)


def test_pascal():
    """Exact; JAX's comes from logarithms of factorials."""
    assert np.asarray(linalg.pascal(4)).tolist()[3] == [1, 4, 10, 20]
    assert np.asarray(linalg.pascal(4, "lower")).tolist()[3] == [1, 3, 3, 1]
    product = np.asarray(linalg.pascal(6)) @ np.asarray(linalg.invpascal(6))
    np.testing.assert_array_equal(product, np.eye(6))


def test_refusals():
    with pytest.raises(ArgumentError, match="eigh: b, type and eigvals are not supported"):
        linalg.eigh(A, b=A)
    with pytest.raises(ArgumentError, match="power of two"):
        linalg.hadamard(3)


@pytest.mark.parametrize("n", range(1, 9))
def test_fiedlers_companion_has_the_roots(n):
    oracle = pytest.importorskip("scipy.linalg")
    a = RNG.normal(size=n) + 2
    found = linalg.fiedler_companion(a)
    assert found.shape == (n - 1, n - 1)
    if n > 1:
        np.testing.assert_allclose(found, oracle.fiedler_companion(a))
        stacked = linalg.fiedler_companion(np.stack([a, 2 * a]))
        np.testing.assert_allclose(stacked[1], found, rtol=1e-12)


@pytest.mark.parametrize("pivoting", [False, True])
@pytest.mark.parametrize("mode", ["left", "right"])
@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (3, 5)])
def test_a_product_with_q(shape, mode, pivoting):
    oracle = pytest.importorskip("scipy.linalg")
    a = RNG.normal(size=shape) + 1j * RNG.normal(size=shape)
    size = min(shape) if mode == "left" else shape[0]
    c = RNG.normal(size=(size, 2) if mode == "left" else (2, size)) + 0j
    for given in (c, c[:, 0] if mode == "left" else c[0]):
        for conjugate in (False, True):
            found = linalg.qr_multiply(a, given, mode, pivoting, conjugate)
            want = oracle.qr_multiply(a, given, mode, pivoting, conjugate)
            assert_same(found, want)
    with pytest.raises(ShapeError, match=r"qr_multiply: Q of .* so c needs"):
        linalg.qr_multiply(a, np.ones((9, 9)), mode)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128])
@pytest.mark.parametrize("shape", [(4, 4), (6, 3), (3, 3)])
def test_the_polar_iteration(shape, dtype):
    a = (C if dtype == np.complex128 else A).repeat(2, 0)[: shape[0], : shape[1]]
    a = (a + np.eye(*shape)).astype(dtype)
    u, h, steps, converged = spmd.jit(spmd.lax.linalg.qdwh)(a)
    wanted_u, wanted_h = linalg.polar(a)
    bound = 2e-5 if dtype == np.float32 else 1e-12
    np.testing.assert_allclose(u, wanted_u, atol=bound)
    np.testing.assert_allclose(h, wanted_h, atol=bound * 10)
    assert bool(converged) and 1 < int(steps) <= 7
    assert not spmd.lax.linalg.qdwh(a, max_iterations=1)[3]


@pytest.mark.parametrize(
    "a", [np.zeros((2, 2)), np.diag([1.0, 0.0, 0.0]), np.ones((3, 3))], ids=["0", "diagonal", "1"]
)
def test_square_roots_of_singular_matrices(a):
    root = np.asarray(linalg.sqrtm(a))
    np.testing.assert_allclose(root @ root, a, atol=1e-3)
    assert np.isnan(np.asarray(linalg.sqrtm(np.array([[0.0, 1.0], [0.0, 0.0]])))).all()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_complex_schur_forms_are_those_of_scipy(size):
    scipy = pytest.importorskip("scipy.linalg")
    a = np.random.default_rng(size).normal(size=(size, size)).astype(np.float32)
    a[:, : size // 2] = a[:, -1:]
    t, z = scipy.schur(a)
    for ours, theirs in zip(linalg.rsf2csf(t, z), scipy.rsf2csf(t, z), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
