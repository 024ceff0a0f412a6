"""Making, reshaping, joining, searching and multiplying arrays, against JAX."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.base.config import config
from spmd.base.errors import SpmdError
from spmd.testing import check_grads
from tests.numpy.oracle import assert_agrees, case, jax, jnp, values

X = values(3, 4)
CUBE = values(2, 3, 4)
V = values(6)
INTS = values(3, 4, dtype=np.int32)
BOOLS = values(3, 4, dtype=bool)
SORTED = np.array([-2.0, -1.0, 0.0, 0.0, 1.5, 3.0], np.float32)

CREATION = [
    case("zeros", lambda xp: xp.zeros((2, 3))),
    case("ones-dtype", lambda xp: xp.ones(3, np.int32)),
    case("full", lambda xp: xp.full((2, 2), 7)),
    case("full-array", lambda xp, v: xp.full((2, 4), v), values(4)),
    case("empty", lambda xp: xp.empty((0, 2)).shape == (0, 2) and xp.zeros(1)),
    case("zeros_like", lambda xp, x: xp.zeros_like(x), INTS),
    case("ones_like-dtype", lambda xp, x: xp.ones_like(x, dtype=xp.bfloat16), X),
    case("full_like", lambda xp, x: xp.full_like(x, 2.5, shape=(2,)), X),
    case("full_like-int", lambda xp, x: xp.full_like(x, 2.5), INTS),
    case("array-nested", lambda xp: xp.array([[1, 2], [3.5, 4]])),
    case("array-mixed", lambda xp, x: xp.array([x[0, 0], 2.0, x[1, 1]]), X),
    case("array-of-arrays", lambda xp, x: xp.array([x[0], x[1]]), X),
    case("array-ndmin", lambda xp, v: xp.array(v, ndmin=3), V),
    case("array-number", lambda xp: xp.array(2)),
    case("asarray-float", lambda xp: xp.asarray(2.0)),
    case("asarray-dtype", lambda xp: xp.asarray(2, np.float32)),
    case("asarray-empty", lambda xp: xp.asarray([])),
    case("asarray-bool", lambda xp: xp.asarray([True, 2])),
    case("astype", lambda xp, x: xp.astype(x, np.int32), X),
    case("astype-complex", lambda xp, x: xp.astype(x, bool), values(4, dtype=np.complex64)),
    case("arange", lambda xp: xp.arange(5)),
    case("arange-float", lambda xp: xp.arange(1.0, 2.0, 0.25)),
    case("arange-negative", lambda xp: xp.arange(5, -2, -2)),
    case("arange-dtype", lambda xp: xp.arange(3, dtype=np.float16)),
    case("linspace", lambda xp: xp.linspace(0, 1, 7)),
    case("linspace-open", lambda xp: xp.linspace(-2.0, 3, 5, endpoint=False)),
    case("linspace-step", lambda xp: xp.linspace(0, 1, 5, retstep=True)),
    case("linspace-arrays", lambda xp, v: xp.linspace(v, 2 * v, 4, axis=1), V),
    case("linspace-int", lambda xp: xp.linspace(0, 10, 5, dtype=np.int32)),
    case("linspace-one", lambda xp: xp.linspace(3, 10, 1)),
    case("logspace", lambda xp: xp.logspace(0, 2, 5), rtol=1e-5),
    case("geomspace", lambda xp: xp.geomspace(1.0, 1000.0, 4), rtol=1e-5),
    case("eye", lambda xp: xp.eye(3, 4, 1)),
    case("identity", lambda xp: xp.identity(3, np.int32)),
    case("tri", lambda xp: xp.tri(3, 4, -1)),
    case("tril", lambda xp, x: xp.tril(x, 1), CUBE),
    case("triu", lambda xp, x: xp.triu(x, -1), INTS),
    case("diag", lambda xp, v: xp.diag(v, 1), V),
    case("diag-of", lambda xp, x: xp.diag(x, -1), X),
    case("diagflat", lambda xp, x: xp.diagflat(x[:2, :2]), X),
    case("diagonal", lambda xp, x: xp.diagonal(x, 1, 1, 2), CUBE),
    case("diagonal-below", lambda xp, x: xp.diagonal(x, -1), X),
    case("meshgrid", lambda xp, v: xp.meshgrid(v, v[:2]), V),
    case("meshgrid-ij", lambda xp, v: xp.meshgrid(v, v[:2], v[:3], indexing="ij"), V),
    case("meshgrid-sparse", lambda xp, v: xp.meshgrid(v, v[:2], sparse=True), V),
    case("indices", lambda xp: xp.indices((2, 3))),
    case("fromfunction", lambda xp: xp.fromfunction(lambda i, j: i + j, (2, 3), dtype=np.int32)),
    case("tril_indices", lambda xp: xp.tril_indices(3, 1)),
    case("ix_", lambda xp, x: xp.asarray(x)[xp.ix_(np.array([0, 2]), np.array([1, 3]))], X),
    case("mgrid", lambda xp: [xp.mgrid[0:3, 0:2], xp.ogrid[0:3, 0:2]]),
    case("diag_indices", lambda xp: xp.diag_indices(3)),
    case("windows", lambda xp: [xp.hanning(5), xp.hamming(5), xp.bartlett(5), xp.blackman(5)]),
    case("vander", lambda xp, v: xp.vander(v[:3], 4), V, rtol=1e-5),
]

SHAPES = [
    case("reshape", lambda xp, x: xp.reshape(x, (2, -1)), X),
    case("reshape-F", lambda xp, x: xp.reshape(x, (4, 3), order="F"), X),
    case("ravel", lambda xp, x: xp.ravel(x), CUBE),
    case("ravel-F", lambda xp, x: xp.ravel(x, order="F"), X),
    case("squeeze", lambda xp, x: xp.squeeze(x[:, None, :1]), X),
    case("squeeze-axis", lambda xp, x: xp.squeeze(x[None, None], 1), X),
    case("expand_dims", lambda xp, x: xp.expand_dims(x, (0, -1)), X),
    case("atleast", lambda xp, v: [xp.atleast_1d(2.0), xp.atleast_2d(v), xp.atleast_3d(v)], V),
    case("broadcast_to", lambda xp, v: xp.broadcast_to(v, (2, 6)), V),
    case("broadcast_arrays", lambda xp, x, v: xp.broadcast_arrays(x, v), X, values(4)),
    case("transpose", lambda xp, x: xp.transpose(x, (1, 2, 0)), CUBE),
    case("transpose-all", lambda xp, x: xp.transpose(x), CUBE),
    case("matrix_transpose", lambda xp, x: xp.matrix_transpose(x), CUBE),
    case("swapaxes", lambda xp, x: xp.swapaxes(x, 0, -1), CUBE),
    case("moveaxis", lambda xp, x: xp.moveaxis(x, (0, 1), (-1, 0)), CUBE),
    case("rollaxis", lambda xp, x: xp.rollaxis(x, 2, 1), CUBE),
    case("flip", lambda xp, x: [xp.flip(x), xp.flipud(x), xp.fliplr(x)], X),
    *[case(f"rot90-{k}", lambda xp, x, k=k: xp.rot90(x, k), X) for k in (1, 2, 3, -1)],
    case("roll", lambda xp, x: [xp.roll(x, 5), xp.roll(x, -1, 0), xp.roll(x, (1, 2), (0, 1))], X),
    case("roll twice", lambda xp, x: [xp.roll(x, (1, 2), (0, 0)), xp.roll(x, (1, 2), 1)], X),
    case(
        "roll by arrays",
        lambda xp, x: [xp.roll(x, np.array([1, 2]), (0, 1)), xp.roll(x, 3, ())],
        X,
    ),
    case("concatenate", lambda xp, x, i: xp.concatenate([x, i]), X, INTS),
    case("concatenate-flat", lambda xp, x, v: xp.concatenate([x, v], None), X, V),
    case("concatenate-dtype", lambda xp, x: xp.concatenate([x, x], 1, dtype=np.float16), X),
    case("stack", lambda xp, x, b: xp.stack([x, b], axis=1), X, BOOLS),
    case("stack-array", lambda xp, x: xp.stack(x), X),
    case("vstack", lambda xp, v: xp.vstack([v, v[None]]), V),
    case("hstack", lambda xp, v, x: [xp.hstack([v, v]), xp.hstack([x, x])], V, X),
    case("dstack", lambda xp, x: xp.dstack([x, x]), X),
    case("column_stack", lambda xp, v: xp.column_stack([v, v]), V),
    case("append", lambda xp, x: xp.append(x, 1.0), X),
    case("block", lambda xp, x: xp.block([[x, x], [x, xp.zeros_like(x)]]), X),
    case("unstack", lambda xp, x: xp.unstack(x, axis=1), X),
    case("split", lambda xp, x: xp.split(x, 2, axis=1), X),
    case("split-at", lambda xp, x: xp.split(x, [1, 3], axis=1), X),
    case("array_split", lambda xp, v: xp.array_split(v, 4), V),
    case("hsplit", lambda xp, x: [xp.hsplit(x, 2), xp.vsplit(x, 3)], X),
    case("tile", lambda xp, x: [xp.tile(x, 2), xp.tile(x, (2, 1, 2))], X),
    case("repeat", lambda xp, x: [xp.repeat(x, 2), xp.repeat(x, 3, axis=1)], X),
    case("repeat-each", lambda xp, x: xp.repeat(x, np.array([0, 2, 1]), axis=0), X),
    case("repeat-length", lambda xp, x, n: xp.repeat(x, n, 0, total_repeat_length=5), X,
         np.array([1, 0, 3])),
    case("resize", lambda xp, v: xp.resize(v, (3, 5)), V),
    case("delete", lambda xp, v: [xp.delete(v, 1), xp.delete(v, np.array([0, -1]))], V),
    case("insert", lambda xp, v: xp.insert(v, 2, 9.0), V),
    case("insert-rows", lambda xp, x: xp.insert(x, np.array([1, 3]), 5.0, axis=1), X),
    case("diff", lambda xp, x: [xp.diff(x), xp.diff(x, 2, axis=0), xp.diff(x, prepend=0.0)], X),
    case("ediff1d", lambda xp, v: xp.ediff1d(v, to_end=1.0), V),
    case("trapezoid", lambda xp, v: [xp.trapezoid(v), xp.trapezoid(v, dx=0.5)], V),
    case("gradient", lambda xp, x: xp.gradient(x), X),
    case("gradient-step", lambda xp, v: xp.gradient(v, 0.5), V),
    *[
        case(f"pad-{mode}", lambda xp, x, mode=mode: xp.pad(x, ((1, 2), (0, 3)), mode), X)
        for mode in ("constant", "edge", "reflect", "symmetric", "wrap", "maximum", "mean",
                     "linear_ramp", "median")
    ],
    case("pad-value", lambda xp, x: xp.pad(x, 1, constant_values=7), INTS),
    case("pad-values", lambda xp, x: xp.pad(x, 1, constant_values=((1, 2), (3, 4))), X),
    case("pad-ramp", lambda xp, x: xp.pad(x, (3, 1), "linear_ramp", end_values=1.7), INTS),
    case("pad-odd", lambda xp, v: xp.pad(v, 4, "reflect", reflect_type="odd"), V),
    case("pad-long", lambda xp, v: xp.pad(v, 15, "reflect"), V),
]  # fmt: skip

PRODUCTS = [
    case("dot", lambda xp, x, v: [xp.dot(x, v), xp.dot(v, v), xp.dot(2.0, v)], X, values(4)),
    case("dot-cube", lambda xp, c, x: xp.dot(c, x.T), CUBE, X),
    case("matmul", lambda xp, c, x: [c @ x.T, xp.matmul(x, c[0].T)], CUBE, X),
    case("matmul-vectors", lambda xp, c, v: [c @ v, v @ xp.swapaxes(c, 1, 2), v @ v], CUBE,
         values(4)),
    case("matmul-broadcast", lambda xp, a, b: xp.matmul(a, b), values(2, 1, 3, 4),
         values(5, 4, 2), rtol=1e-5),
    case("matmul-int", lambda xp, a, b: xp.matmul(a, b), INTS, INTS.T.copy()),
    case("matmul-mixed", lambda xp, a, b: xp.matmul(a, b), INTS, X.T.copy(), rtol=1e-5),
    case("matmul-bf16", lambda xp, a: xp.matmul(a, a.T), X.astype(ml_dtypes.bfloat16), rtol=2e-2),
    case("tensordot", lambda xp, a, b: [xp.tensordot(a, b, 1), xp.tensordot(a, b, ((1,), (0,)))],
         X, X.T.copy(), rtol=1e-5),
    case("inner", lambda xp, a: xp.inner(a, a), X, rtol=1e-5),
    case("outer", lambda xp, a, v: xp.outer(a, v), X, V),
    case("vdot", lambda xp, a: xp.vdot(a, a), values(4, dtype=np.complex64), rtol=1e-5),
    case("vecdot", lambda xp, a: xp.vecdot(a, a), CUBE, rtol=1e-5),
    case("matvec", lambda xp, a, v: [xp.matvec(a, v), xp.vecmat(v[:3], a)], CUBE, values(4)),
    case("kron", lambda xp, a, v: [xp.kron(a, v), xp.kron(v, v)], X, V),
    case("cross", lambda xp, a: xp.cross(a, a[::-1]), values(4, 3), rtol=1e-4, atol=1e-5),
    case("trace", lambda xp, x: [xp.trace(x), xp.trace(x, 1, 1, 2)], CUBE),
    *[
        case(f"einsum-{text}", lambda xp, *xs, text=text: xp.einsum(text, *xs), *xs, rtol=1e-5)
        for text, xs in (
            ("ij,kj->ik", (X, X)),
            ("ij->ji", (X,)),
            ("ij->", (X,)),
            ("ij->j", (X,)),
            ("ii->i", (X[:, :3].copy(),)),
            ("ii", (X[:, :3].copy(),)),
            ("bij,bjk->bik", (CUBE, CUBE.swapaxes(1, 2).copy())),
            ("...ij,...j", (CUBE, values(4))),
            ("i,j", (V, V)),
            ("ij,jk,kl->il", (X, X.T.copy(), X)),
            ("ij,ij->ij", (X, X)),
            ("i,i,i->", (V, V, V)),
            ("ij,j,i->", (X, values(4), values(3))),
            ("ijk,k->", (CUBE, values(4))),
        )
    ],
    case("einsum-lists", lambda xp, x: xp.einsum(x, [0, 1], x, [2, 1], [0, 2]), X, rtol=1e-5),
    case("norm", lambda xp, x: [xp.linalg.norm(x), xp.linalg.norm(x, axis=1, keepdims=True)], X),
    *[case(f"norm-{o}", lambda xp, v, o=o: xp.linalg.norm(v, o), V, rtol=1e-5)
      for o in (0, 1, 2, 3, np.inf, -np.inf)],
    *[case(f"matrix-norm-{o}", lambda xp, x, o=o: xp.linalg.norm(x, o), X, rtol=1e-5)
      for o in ("fro", 1, np.inf, -1)],
    case("matrix_power", lambda xp, x: xp.linalg.matrix_power(x[:, :3], 3), X, rtol=1e-4),
    case("multi_dot", lambda xp, x: xp.linalg.multi_dot([x, x.T, x]), X, rtol=1e-4, atol=1e-4),
]  # fmt: skip

SEARCHES = [
    case("sort", lambda xp, x: [xp.sort(x), xp.sort(x, axis=0, descending=True)], X),
    case("sort-nan", lambda xp, v: xp.sort(v), np.array([1, np.nan, -np.inf, 0], np.float32)),
    case("argsort", lambda xp, x: [xp.argsort(x, axis=0), xp.argsort(x, descending=True)], INTS),
    case("lexsort", lambda xp, x: xp.lexsort((x[0], x[1])), INTS),
    case("searchsorted", lambda xp, a, v: [xp.searchsorted(a, v),
         xp.searchsorted(a, v, side="right")], SORTED, values(3, 4)),
    case("searchsorted-nan", lambda xp, a, v: xp.searchsorted(a, v, side="right"), SORTED,
         np.array([np.nan, -9, 9, 0], np.float32)),
    case("digitize", lambda xp, a, v: [xp.digitize(v, a), xp.digitize(v, a[::-1], right=True)],
         SORTED, V),
    case("nonzero", lambda xp, x: xp.nonzero(x, size=8), INTS),
    case("nonzero-fill", lambda xp, x: xp.nonzero(x, size=14, fill_value=-1), BOOLS),
    case("where-size", lambda xp, x: xp.where(x > 0, size=9, fill_value=7), X),
    case("argwhere", lambda xp, x: xp.argwhere(x, size=5), BOOLS),
    case("flatnonzero", lambda xp, x: xp.flatnonzero(x, size=5), BOOLS),
    case("compress", lambda xp, x: xp.compress(xp.array([True, False, True]), x, axis=0, size=2),
         X),
    case("extract", lambda xp, x: xp.extract(x > 0, x, size=6), X),
    case("unique", lambda xp, x: xp.unique(x, size=5), INTS),
    case("unique-all", lambda xp, x: xp.unique(x, True, True, True, size=9, fill_value=-7), INTS),
    case("unique-rows", lambda xp, x: xp.unique(x, axis=0, size=3), INTS[[0, 1, 0]]),
    *[case(name, lambda xp, x, y, name=name: getattr(xp, name)(x, y, size=6), INTS, V.astype(int))
      for name in ("union1d", "setdiff1d", "setxor1d", "intersect1d")],
    *[case(f"{name}-{mode}", lambda xp, a, v, name=name, mode=mode: [
        getattr(xp, name)(a, v, mode), getattr(xp, name)(v, a, mode)], V, values(4), rtol=1e-4,
        atol=1e-5) for name in ("convolve", "correlate") for mode in ("full", "same", "valid")],
    case("isin", lambda xp, x: xp.isin(x, xp.array([1, 2])), INTS),
    case("take", lambda xp, x: [xp.take(x, np.array([2, 0])), xp.take(x, np.array([2, 0]), 0)], X),
    case("take_along_axis", lambda xp, x: xp.take_along_axis(x, xp.argsort(x), -1), X),
    case("interp", lambda xp, x, a, f: xp.interp(x, a, f), V, np.arange(4.0, dtype=np.float32),
         values(4)),
    case("interp-ends", lambda xp, x, a, f: xp.interp(x, a, f, left=-9.0, right="extrapolate"), V,
         np.arange(4.0, dtype=np.float32), values(4), rtol=1e-5, atol=1e-5),
    case("polyval", lambda xp, p, x: xp.polyval(p, x), values(4), V, rtol=1e-4, atol=1e-4),
    case("unravel_index", lambda xp, i: xp.unravel_index(i, (2, 3)), np.array([0, 5, 3, 9])),
    case("ravel_multi_index", lambda xp, i, j: xp.ravel_multi_index((i, j), (2, 3), mode="clip"),
         np.array([0, 1]), np.array([2, 7])),
    case("vectorize", lambda xp, x: xp.vectorize(lambda v: xp.sum(v), signature="(n)->()")(x),
         CUBE),
    case("vectorize-two", lambda xp, x, v: xp.vectorize(
        lambda a, b: a @ b, signature="(n,m),(m)->(n)")(x, v), CUBE, values(4)),
    case("apply_along_axis", lambda xp, x: xp.apply_along_axis(lambda v: v * v.sum(), 1, x), CUBE,
         rtol=1e-5),
    case("apply_over_axes", lambda xp, x: xp.apply_over_axes(xp.sum, x, (0, 2)), CUBE, rtol=1e-5),
]  # fmt: skip


@pytest.mark.parametrize(
    "cases",
    [CREATION, SHAPES, PRODUCTS, SEARCHES],
    ids=["creation", "shapes", "products", "searches"],
)
def test_like_jax(cases):
    assert_agrees(*cases)


def test_sizes_found_from_data():
    x = np.array([3, 0, 1, 3, 0])
    np.testing.assert_array_equal(snp.nonzero(x)[0], [0, 2, 3])
    np.testing.assert_array_equal(snp.unique(x), [0, 1, 3])
    values, index, inverse, counts = snp.unique(x, True, True, True)
    wanted = np.unique(x, True, True, True)
    for ours, theirs in zip((values, index, inverse, counts), wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(snp.argwhere(x), np.argwhere(x))
    np.testing.assert_array_equal(snp.trim_zeros(np.array([0, 1, 0, 2, 0])), [1, 0, 2])


def test_gradients_go_through():
    for f in (
        lambda x: snp.sum(snp.sort(x) * np.arange(6)),
        lambda x: snp.median(x) + snp.quantile(x, 0.3),
        lambda x: snp.sum(snp.pad(x, 3, "reflect") ** 2),
        lambda x: snp.sum(snp.roll(x, 2) * x) + snp.linalg.norm(x),
        lambda x: snp.sum(snp.einsum("i,j->ij", x, x) * snp.tri(6)),
        lambda x: snp.sum(snp.repeat(x, 2) * snp.tile(x, 2)) + snp.prod(x),
        lambda x: snp.var(x) + snp.std(x) + snp.max(x) + snp.sum(snp.cumsum(x) ** 2),
    ):
        with config.override("enable_x64", True):
            check_grads(f, (V.astype(np.float64),), order=1)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: snp.reshape(X, (5, 2)), "cannot reshape array of shape (3, 4) (size 12)"),
        (lambda: snp.reshape(X, (-1, -1)), "only one size can be -1"),
        (lambda: snp.zeros(2, 3), "write zeros((2, 3))"),
        (lambda: snp.concatenate([X, V]), "got (3, 4) (array 0) and (6,) (array 1)"),
        (lambda: snp.concatenate([]), "need at least one array to concatenate"),
        (lambda: snp.stack([X, V]), "same shape, got (3, 4), (6,)"),
        (lambda: snp.matmul(X, X), "(size 4) and dim 0 of the second (3, 4) (size 3)"),
        (lambda: snp.matmul(2.0, X), "operand 0 has no dims"),
        (lambda: snp.einsum("ij,jk", X, X), "label 'j' in 'ij,jk' has sizes 4 and 3"),
        (lambda: snp.einsum("ij", V), "names 2 dims, but the operand has shape (6,)"),
        (lambda: snp.split(V, 4), "does not result in an equal division"),
        (lambda: snp.squeeze(X, 0), "size not equal to one"),
        (lambda: snp.broadcast_to(X, (4, 3)), "got incompatible shapes for broadcasting"),
        (lambda: snp.array([[1, 2], [3]]), "inhomogeneous"),
        (lambda: snp.array(None), "None is not a valid value"),
        (lambda: snp.arange(3j), "must be a real number"),
        (lambda: snp.where(X, 1), "give both x and y, or neither"),
        (lambda: snp.transpose(X, (0, 0)), "duplicate value"),
    ],
)
def test_errors_name_what_is_wrong(call, text):
    with pytest.raises(SpmdError) as caught:
        call()
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("f", "text"),
    [
        (lambda x: snp.zeros(x.astype(int)[0]), "traced"),
        (lambda x: snp.nonzero(x), "give size="),
        (lambda x: snp.unique(x), "give size="),
        (lambda x: snp.arange(x[0]), "arange: stop is traced"),
        (lambda x: snp.repeat(x, x.astype(int)), "total_repeat_length"),
    ],
)
def test_what_must_be_static_says_so(f, text):
    with pytest.raises(SpmdError) as caught:
        spmd.make_jaxpr(f)(V)
    assert text in str(caught.value)


def test_names_are_jax_s():
    missing = [n for n in dir(snp) if not n.startswith("_") and not hasattr(jnp, n)]
    ours_only = {"creation", "dtype", "einsum"}
    modules = {n for n in missing if hasattr(getattr(snp, n), "__file__")}
    assert set(missing) - modules - ours_only == set()


@pytest.mark.parametrize("bins", [[1.0, 2.0, 4.0], [4.0, 2.0], [1, 2], []])
@pytest.mark.parametrize("right", [False, True])
def test_numbers_of_bins_have_32_bits_under_x64(bins, right):
    x = np.array([0.5, 2, 3, 9])
    with jax.enable_x64(True), spmd.enable_x64(True):
        ours, theirs = (
            snp.digitize(x, np.array(bins), right),
            jnp.digitize(x, np.array(bins), right),
        )
        assert ours.dtype == theirs.dtype == np.int32
        np.testing.assert_array_equal(ours, theirs)


def test_complex_objects_are_what_has_a_complex_dtype():
    for x, wanted in ((snp.complex64, True), (snp.float32, False), ([1, 2j], True), (1j, True),
                      (None, False), (np.ones(2), False)):  # fmt: skip
        assert snp.iscomplexobj(x) is wanted and snp.isrealobj(x) is not wanted


def test_labels_of_einsum_are_any_objects_with_an_order():
    x, y = np.arange(6.0).reshape(2, 3), np.arange(12.0).reshape(3, 4)
    found = snp.einsum(x, ["b", "a"], y, ["a", "c"], ["c", "b"])
    np.testing.assert_allclose(found, np.einsum("ba,ac->cb", x, y))
    np.testing.assert_array_equal(snp.einsum(x, [("q", 1), ("p", 2)]), x.T)
    np.testing.assert_allclose(snp.einsum(x, [..., 60], [60]), x.sum(0))
    with pytest.raises(TypeError, match="hashable and comparable"):
        snp.einsum(x, [0, "a"])
    with pytest.raises(SpmdError, match="must name dims of the operands"):
        snp.einsum(x, [0, 1], [2])


def test_dims_may_be_an_array():
    assert snp.transpose(X, snp.array([1, 0])).shape == X.shape[::-1]
    assert snp.sum(X, axis=snp.array([0, 1])).shape == ()
