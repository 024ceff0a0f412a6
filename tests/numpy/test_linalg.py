"""`spmd.numpy.linalg` against NumPy, and its derivatives against finite differences."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import numpy as snp
from spmd.base.config import config
from spmd.base.errors import ShapeError
from spmd.testing import check_grads

RNG = np.random.default_rng(3)
A = RNG.normal(size=(2, 4, 4))
C = A + 1j * RNG.normal(size=A.shape)
TALL = RNG.normal(size=(2, 5, 3))
SYMMETRIC = A[0] @ A[0].T + np.eye(4)
LOW_RANK = np.outer([1.0, 2, 3, 4], [2.0, 0, 1, 1])
TENSOR = RNG.normal(size=(2, 3, 6))


@pytest.fixture(autouse=True)
def wide_dtypes():
    with config.override("enable_x64", True):
        yield


SAME_AS_NUMPY = [
    *[(name, (x,), {}) for name in ("inv", "det", "slogdet", "svdvals") for x in (A, C)],
    *[("det", (A[:, :n, :n],), {}) for n in (1, 2, 3)],
    *[("pinv", (x,), {}) for x in (A, C, TALL, TALL.swapaxes(1, 2), LOW_RANK)],
    ("pinv", (SYMMETRIC,), {"hermitian": True}),
    *[("matrix_rank", (x,), {}) for x in (A, LOW_RANK, np.zeros((3, 2)))],
    *[("cond", (A, p), {}) for p in (None, 2, -2, 1, -1, np.inf, -np.inf, "fro", "nuc")],
    *[("matrix_norm", (C,), {"ord": p}) for p in (2, -2, "nuc", "fro", 1, np.inf)],
    ("norm", (TALL, "nuc"), {"axis": (0, 2), "keepdims": True}),
    *[("matrix_power", (A, n), {}) for n in (-2, 0, 3)],
    ("solve", (A, TALL[:, :4]), {}),
    ("solve", (A, C[0, 0]), {}),
    ("solve", (A[0], C), {}),
    ("cholesky", (SYMMETRIC,), {}),
    ("cholesky", (SYMMETRIC,), {"upper": True}),
    ("eigvalsh", (SYMMETRIC,), {}),
    ("eigvals", (C,), {}),
    ("qr", (TALL,), {}),
    ("qr", (TALL,), {"mode": "complete"}),
    ("qr", (TALL,), {"mode": "r"}),
    ("qr", (TALL,), {"mode": "raw"}),
    ("lstsq", (TALL[0], TALL[1]), {}),
    ("tensorinv", (TENSOR,), {}),
    ("tensorsolve", (TENSOR, TENSOR[:, :, 0]), {}),
    ("tensorsolve", (TENSOR, TENSOR[0, 0]), {"axes": (0, 1)}),
]


@pytest.mark.parametrize("name, args, how", SAME_AS_NUMPY)
def test_same_as_numpy(name, args, how):
    found = getattr(snp.linalg, name)(*args, **how)
    wanted = getattr(np.linalg, name)(*args, **how)
    several = isinstance(wanted, tuple)
    for x, y in zip(found if several else [found], wanted if several else [wanted], strict=True):
        assert np.shape(x) == np.shape(y)
        np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-8)


def test_factors_multiply_to_the_matrix():
    u, s, vh = snp.linalg.svd(C, full_matrices=False)
    np.testing.assert_allclose(np.asarray(u * s[:, None, :] @ vh), C, atol=1e-9)
    u, s, vh = snp.linalg.svd(SYMMETRIC - 3 * np.eye(4), hermitian=True)
    np.testing.assert_allclose(np.asarray((u * s) @ vh), SYMMETRIC - 3 * np.eye(4), atol=1e-9)
    assert (np.diff(np.asarray(s)) <= 0).all()
    w, v = snp.linalg.eig(A)
    np.testing.assert_allclose(A @ np.asarray(v), np.asarray(v * w[:, None, :]), atol=1e-9)
    w, v = snp.linalg.eigh(SYMMETRIC, UPLO="U")
    np.testing.assert_allclose(np.asarray((v * w) @ v.T), SYMMETRIC, atol=1e-9)


@pytest.mark.parametrize(
    "f, args",
    [
        (snp.linalg.det, (A,)),
        (snp.linalg.det, (A[0, :3, :3],)),
        (lambda x: snp.linalg.slogdet(x)[1], (C[0],)),
        (lambda x: snp.linalg.slogdet(x)[0], (C[0],)),
        (snp.linalg.inv, (A,)),
        (snp.linalg.solve, (A[0], TALL[0, :4])),
        (snp.linalg.pinv, (TALL[0],)),
        (snp.linalg.pinv, (C[0, :2],)),
        (lambda a, b: snp.linalg.lstsq(a, b)[0], (TALL[0], TALL[1])),
        (lambda x: snp.linalg.norm(x, 2), (A[0],)),
        (lambda x: snp.linalg.norm(x, "nuc"), (TALL[0],)),
        (lambda x: snp.linalg.eigvalsh(x @ x.T), (A[0],)),
    ],
)
def test_derivatives(f, args):
    check_grads(f, args, 1 if args[0].dtype.kind == "c" else 2, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rank", [3, 2])
def test_det_of_a_singular_matrix_has_its_derivative(rank):
    """The adjugate, of rank one if one dim is missing and zero if two are."""
    x = A[0, :, :rank] @ A[1, :rank, :]
    gradient = np.asarray(spmd.grad(snp.linalg.det)(x))
    minors = [
        [(-1) ** (i + j) * np.linalg.det(np.delete(np.delete(x, i, 0), j, 1)) for j in range(4)]
        for i in range(4)
    ]
    np.testing.assert_allclose(gradient, minors, atol=1e-9)


def test_integers_become_floats():
    assert snp.linalg.inv(np.eye(2, dtype=np.int32)).dtype.kind == "f"


def test_errors():
    with pytest.raises(ShapeError, match=r"inv: square matrices, .* needed, got shape \(2, 3\)"):
        snp.linalg.inv(np.ones((2, 3)))
    with pytest.raises(ShapeError, match="solve: b must be"):
        snp.linalg.solve(np.eye(2), np.ones(3))


@pytest.mark.parametrize("wide", [False, True])
def test_the_rank_of_least_squares_has_the_default_dtype(wide):
    with spmd.config.override("enable_x64", wide):
        rank = snp.linalg.lstsq(np.eye(2), np.ones(2))[2]
    assert rank.dtype == ("int64" if wide else "int32") and rank == 2
