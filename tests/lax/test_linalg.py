"""Linear algebra: the table of records, and what holds of stacks, failures and empty matrices."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.base.config import config
from spmd.base.errors import DtypeError, RefusedError, ShapeError
from spmd.core.aval import typeof
from spmd.core.stage import trace_to_jaxpr
from spmd.testing import check_grads
from tests.lax.checks import as_list, check_vmap
from tests.lax.records_linalg import RECORDS

TOLERANCE = {np.dtype(t): e for t, e in (("f", 2e-3), ("d", 1e-9), ("F", 2e-3), ("D", 1e-9))}


@pytest.fixture(autouse=True)
def wide_dtypes():
    with config.override("enable_x64", True):
        yield


def assert_same(found, wanted, dtype):
    for x, y in zip(as_list(found), as_list(wanted), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(x, y, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("record", RECORDS, ids=str)
def test_value(record):
    """Eager evaluation against JAX, and jit against eager evaluation: float32 and complex128."""
    for dtype in record.dtypes[::3]:
        operands = record.make(dtype)
        found = record.function(lax, *operands)
        assert_same(spmd.jit(lambda *xs: record.function(lax, *xs))(*operands), found, dtype)
        if record.oracle:
            jax = pytest.importorskip("jax")
            with jax.enable_x64(True):
                wanted = record.function(jax.lax, *map(jax.numpy.asarray, operands))
                assert_same(found, [np.asarray(x) for x in jax.tree.leaves(wanted)], dtype)


@pytest.mark.parametrize("record", [r for r in RECORDS if r.order], ids=str)
def test_derivatives(record):
    """Finite differences: second order for real matrices, first order for complex ones."""

    def f(*xs):
        outs = record.function(lax, *xs)
        outs = outs if isinstance(outs, (tuple, list)) else [outs]
        return [x for x in outs if x.dtype.kind in "fc"]

    for dtype in record.dtypes:
        if dtype.itemsize == (16 if dtype.kind == "c" else 8):
            order = 1 if dtype.kind == "c" else record.order
            check_grads(f, record.make(dtype), order, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("record", RECORDS, ids=str)
def test_vmap_is_a_loop(record):
    dtype, seeds = record.dtypes[-1], iter(range(100))
    check_vmap(
        lambda *xs: record.function(lax, *xs),
        lambda rng: record.make(dtype, next(seeds)),
        exact=False,
    )


@pytest.mark.parametrize("record", RECORDS, ids=str)
def test_leading_dims_may_be_split(record):
    """`impl` of two parts of a stack, joined, is `impl` of the stack; and the law's labels fit."""
    example = [record.make(record.dtypes[-1], seed) for seed in range(3)]
    stacks = [np.stack(column) for column in zip(*example, strict=True)]
    closed = trace_to_jaxpr(
        lambda *xs: as_flat(spmd.vmap(lambda *ys: record.function(lax, *ys))(*xs)),
        [typeof(x) for x in stacks],
    )
    eqn = next(e for e in closed.eqns if e.prim.name == record.primitive)
    rule = eqn.prim.dims(*[v.aval for v in eqn.invars], **eqn.params)
    assert [len(o) for o in rule.operands] == [v.aval.ndim for v in eqn.invars]
    assert [len(o) for o in rule.results] == [v.aval.ndim for v in eqn.outvars]
    rng = np.random.default_rng(0)
    operands = [
        rng.integers(2, 5, v.aval.shape, dtype=np.int32)
        if v.aval.dtype == np.int32
        else rng.normal(size=v.aval.shape).astype(v.aval.dtype)
        for v in eqn.invars
    ]
    label = 0
    at = [o.index(label) for o in rule.operands]

    def run(part):
        cut = [np.take(x, part, d) for x, d in zip(operands, at, strict=True)]
        out = eqn.prim.impl(np, *cut, **eqn.params)
        return out if eqn.prim.multiple else [out]

    for whole, first, rest, labels in zip(
        run([0, 1, 2]), run([0]), run([1, 2]), rule.results, strict=True
    ):
        joined = np.concatenate([first, rest], labels.index(label))
        np.testing.assert_allclose(joined, whole, rtol=1e-9, atol=1e-9)


def as_flat(out):
    return list(out) if isinstance(out, (tuple, list)) else [out]


def test_every_primitive_has_a_record():
    files = ("cholesky", "eigen", "lu", "qr", "schur", "svd", "sylvester", "triangular")
    files += ("tridiagonal_systems",)
    exported = {
        value.name
        for name in files
        for key, value in vars(importlib.import_module(f"spmd.lax.linalg.{name}")).items()
        if key.endswith("_p")
    }
    assert exported == {r.primitive for r in RECORDS}


# ---- what the table cannot say -----------------------------------------------------------------


def test_one_failing_matrix_leaves_the_others():
    stack = np.stack([np.eye(2), -np.eye(2), 4 * np.eye(2)])
    factors = np.asarray(lax.linalg.cholesky(stack))
    np.testing.assert_array_equal(factors[[0, 2]], np.stack([np.eye(2), 2 * np.eye(2)]))
    assert np.isnan(factors[1]).any()
    singular = np.stack([np.eye(2), np.zeros((2, 2))])
    solved = np.asarray(lax.linalg.solve(singular, np.ones((2, 2, 1))))
    np.testing.assert_array_equal(solved[0], np.ones((2, 1)))
    assert np.isnan(solved[1]).all()


@pytest.mark.parametrize("name", ["eigh", "svd", "eig", "qr", "lu", "schur", "cholesky"])
def test_nan_in_is_nan_out(name):
    first = spmd.tree_util.tree_leaves(getattr(lax.linalg, name)(np.full((3, 3), np.nan)))[0]
    assert np.isnan(np.asarray(first)).any()


@pytest.mark.parametrize("name", ["cholesky", "eigh", "eig", "lu", "qr", "svd", "schur", "geqrf"])
def test_empty(name):
    for shape in ((0, 0), (0, 3, 3)):
        outs = spmd.tree_util.tree_leaves(getattr(lax.linalg, name)(np.zeros(shape)))
        avals = spmd.make_jaxpr(getattr(lax.linalg, name))(np.zeros(shape)).out_avals
        assert [np.shape(x) for x in outs] == [a.shape for a in avals]


@pytest.mark.parametrize("kind", [float, complex])
def test_schur_form(kind):
    """The form itself: (quasi-)triangular, standard blocks, the spectrum of the matrix."""
    rng = np.random.default_rng(1)
    defective = np.diag(np.ones(5), 1)
    for a in (rng.normal(size=(12, 12)), defective, np.zeros((4, 4)), np.eye(3)):
        a = a.astype(kind)
        t, z = (np.asarray(x) for x in lax.linalg.schur(a))
        np.testing.assert_allclose(z @ t @ z.conj().T, a, atol=1e-12)
        np.testing.assert_allclose(z @ z.conj().T, np.eye(len(a)), atol=1e-12)
        below = np.diag(t, -1)
        assert not np.tril(t, -2).any()
        assert not (below[1:] * below[:-1]).any()
        if kind is complex:
            assert not below.any()
        for k in np.flatnonzero(below):
            assert t[k, k] == t[k + 1, k + 1]
            assert t[k, k + 1] * t[k + 1, k] < 0


def test_eigenvalues_of_a_degenerate_matrix_have_a_derivative():
    gradient = spmd.grad(lambda x: lax.linalg.eigh(x)[1].sum())(np.eye(3))
    np.testing.assert_allclose(gradient, np.eye(3))


def test_subsets():
    x = np.diag(np.arange(1.0, 5))
    assert np.asarray(lax.linalg.eigh(x, subset_by_index=(1, 3))[1]).tolist() == [2, 3]
    u, s, vh = lax.linalg.svd(x, full_matrices=False, subset_by_index=(0, 2))
    assert (u.shape, np.asarray(s).tolist(), vh.shape) == ((4, 2), [4, 3], (2, 4))


def test_errors_name_the_argument():
    with pytest.raises(ShapeError, match=r"cholesky: x must be square.*float64\[2,3\]"):
        lax.linalg.cholesky(np.ones((2, 3)))
    with pytest.raises(DtypeError, match="svd: accepts float32, float64"):
        lax.linalg.svd(np.ones((2, 2), np.int32))
    with pytest.raises(ShapeError, match="triangular_solve: b must be"):
        lax.linalg.triangular_solve(np.ones((2, 2)), np.ones((3, 2)), left_side=True)
    with pytest.raises(RefusedError, match="full_matrices=False"):
        spmd.jacfwd(lambda x: lax.linalg.qr(x)[0])(np.ones((3, 2)))
    with pytest.raises(RefusedError, match="enable_eigvec_derivs"):
        spmd.jacfwd(lambda x: lax.linalg.eig(x)[1].real)(np.eye(2))
