"""The smaller families against JAX: integers, bits, histograms, placing, files, `r_`, unique."""

from __future__ import annotations

import io

import ml_dtypes
import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.base.errors import SpmdError
from tests.numpy.oracle import assert_agrees, case, jnp, values

X = values(20)
I = np.array([0, 12, -18, 7, 0, 2**20])  # noqa: E741
J = np.array([[4], [0], [-6]])
BYTES = np.array([[0, 1, 129], [255, 77, 8]], np.uint8)
POINTS = values(30, 2)
WEIGHTS = values(30)
EDGES = np.float32([-3, -1, 0.5, 3])
TIES = np.array([3, 1, 3, 2, 2, 2])
ANGLES = np.cumsum(values(15)).astype(np.float32) % np.float32(2 * np.pi)


def number_cases():
    yield case("gcd", lambda xp, x, y: xp.gcd(x, y), I, J)
    yield case("gcd-u8", lambda xp, x, y: xp.gcd(x, y), BYTES, BYTES[::-1].copy())
    yield case("lcm", lambda xp, x, y: xp.lcm(x, y), I, J)
    for order in ("big", "little"):
        how = {"bitorder": order}
        yield case(f"pack-{order}", lambda xp, x, h=how: xp.packbits(x, **h), TIES - 2)
        yield case(f"pack-rows-{order}", lambda xp, x, h=how: xp.packbits(x, axis=0, **h), BYTES)
        yield case(f"unpack-{order}", lambda xp, x, h=how: xp.unpackbits(x, **h), BYTES)
    for count in (3, 30, -5):
        yield case(f"unpack-{count}", lambda xp, x, n=count: xp.unpackbits(x, 1, n), BYTES)
    yield case("i0", lambda xp, x: xp.i0(x), X, rtol=1e-5)
    yield case("i0-ints", lambda xp, x: xp.i0(x), TIES, rtol=1e-5)
    yield case("spacing", lambda xp, x: xp.spacing(x), np.float32([0, -0.0, 1, -3, 1e-40, np.nan]))
    yield case("spacing-f16", lambda xp, x: xp.spacing(x), np.float16([0, 1, -3]))
    yield case("unwrap", lambda xp, x: xp.unwrap(x), ANGLES)
    yield case("unwrap-ints", lambda xp, x: xp.unwrap(x, axis=0, period=6), 4 * J)
    yield case("unwrap-discont", lambda xp, x: xp.unwrap(x, 4.0), ANGLES.reshape(3, 5))
    yield case("unwrap-empty", lambda xp, x: xp.unwrap(x), ANGLES[:0])


def structure_cases():
    inside, far = np.array([0, 19, -3, 0]), np.array([0, 19, 25, -3])
    for mode, at in ((None, inside), ("clip", far), ("wrap", far)):
        yield case(f"put-{mode}", lambda xp, x, i, v, m=mode: xp.put(x, i, v, m, inplace=False),
                   X, at, X[3:6])  # fmt: skip
    yield case("place", lambda xp, x, m, v: xp.place(x, m, v, inplace=False), X, X > 0, X[3:6])
    yield case("r_", lambda xp, x: xp.r_[x, 1.5, 2:4, -1:1:3j], X)
    yield case("r_-dims", lambda xp, x: xp.r_["0,2", x, x], X)
    yield case("r_-column", lambda xp, x: xp.r_["0,2,0", x, x], X)
    yield case("r_-matrix", lambda xp, x: xp.r_["c", x, 1:3], X)
    yield case("c_", lambda xp, x: xp.c_[x, x], X)
    yield case("c_-blocks", lambda xp, x: xp.c_[x.reshape(4, 5), x[:4]], X)
    yield case("diag", lambda xp, x: x[xp.diag_indices_from(x)], X[:16].reshape(4, 4))
    yield case("mask-size", lambda xp: xp.mask_indices(3, xp.triu, size=8))


def histogram_cases():
    p, w = POINTS, WEIGHTS
    yield case("2d", lambda xp, p: xp.histogram2d(p[:, 0], p[:, 1]), p)
    yield case("2d-pair", lambda xp, p: xp.histogram2d(p[:, 0], p[:, 1], [3, 4]), p)
    yield case("2d-edges", lambda xp, p, e: xp.histogram2d(p[:, 0], p[:, 1], e), p, EDGES)
    yield case("2d-mixed", lambda xp, p, e: xp.histogram2d(p[:, 0], p[:, 1], [5, e]), p, EDGES)
    yield case("dd", lambda xp, p: xp.histogramdd(p, 4, [(-2, 2), None]), p)
    yield case("dd-weights", lambda xp, p, w: xp.histogramdd(p, 4, weights=w), p, w)
    yield case("dd-density", lambda xp, p, w: xp.histogramdd(p, 4, weights=w, density=True), p, w,
               rtol=1e-4)  # fmt: skip


@pytest.mark.parametrize("cases", [number_cases, structure_cases, histogram_cases])
def test_families_are_jax_s(cases):
    assert_agrees(*cases())


def test_unique_by_the_standard():
    for name in ("unique_all", "unique_counts", "unique_inverse"):
        ours, theirs = getattr(snp, name)(TIES), getattr(jnp, name)(TIES)
        assert ours._fields == theirs._fields
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b)
    sized = spmd.jit(lambda x: snp.unique_all(x, size=4, fill_value=9))(TIES)
    for a, b in zip(sized, jnp.unique_all(TIES, size=4, fill_value=9), strict=True):
        np.testing.assert_array_equal(a, b)
    assert snp.unique_counts(np.array([np.nan, np.nan])).counts.tolist() == [1, 1]


def test_put_ignores_what_is_outside():
    """As JAX documents; what it does is to clip."""
    placed = snp.put(np.zeros(4), np.array([3, 7, -9, 0]), np.array([1, 2]), inplace=False)
    assert placed.tolist() == [2, 0, 0, 1]


def test_mask_indices_without_a_size():
    for ours, theirs in zip(
        snp.mask_indices(3, snp.triu, 1), np.mask_indices(3, np.triu, 1), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_integers_under_transformations():
    at_once = spmd.jit(spmd.vmap(snp.gcd, (None, 0)))(I, J)
    np.testing.assert_array_equal(at_once, np.gcd(I, J))
    by_rows = spmd.vmap(snp.unpackbits)(BYTES)
    np.testing.assert_array_equal(by_rows, np.unpackbits(BYTES, axis=1))
    changes = spmd.grad(lambda x: (snp.unwrap(x) ** 2).sum())(ANGLES)
    np.testing.assert_allclose(changes, 2 * np.asarray(snp.unwrap(ANGLES)), rtol=1e-5)
    placed = spmd.grad(lambda v: snp.put(X, np.array([1, 4]), v, inplace=False).sum())(X[:2])
    np.testing.assert_array_equal(placed, [1, 1])


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.complex64, np.bool_])
def test_files_keep_values_and_dtype(dtype):
    file, x = io.BytesIO(), snp.asarray(values(3, 2).astype(dtype))
    snp.save(file, x)
    file.seek(0)
    back = snp.load(file)
    assert back.dtype == x.dtype and isinstance(back, spmd.Array)
    np.testing.assert_array_equal(np.asarray(back), np.asarray(x))


def test_archives_buffers_and_texts():
    file = io.BytesIO()
    snp.savez(file, a=snp.arange(3), b=snp.ones(2))
    file.seek(0)
    np.testing.assert_array_equal(snp.load(file)["a"], [0, 1, 2])
    np.testing.assert_array_equal(snp.frombuffer(X.tobytes(), np.float32, 3, 8), X[2:5])
    np.testing.assert_array_equal(snp.fromstring("1.5, 2", sep=","), [1.5, 2])
    assert "[0, 1, 2]" in snp.array_repr(snp.arange(3))
    assert snp.array_str(snp.arange(3)) == "[0 1 2]"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: snp.gcd(X, 2), "gcd: integers are needed, got float32"),
        (lambda: snp.unpackbits(I), "unpackbits: bytes (uint8) are needed"),
        (lambda: snp.packbits(I, bitorder="up"), "bitorder must be 'big' or 'little', got 'up'"),
        (lambda: snp.put(X, I, X), "put: arrays are immutable; pass inplace=False"),
        (lambda: snp.put(X, I, X, "raise", inplace=False), "mode must be 'clip', 'wrap' or None"),
        (lambda: snp.place(X, X > 0, X[:0], inplace=False), "place: vals is empty"),
        (lambda: snp.histogramdd(POINTS, [3]), "1 bins were given for 2 dims"),
        (lambda: snp.histogramdd(POINTS, 3, [(0, 1)]), "range must be 2 pairs or None"),
        (lambda: snp.diag_indices_from(POINTS), "all of one size, are needed, got shape (30, 2)"),
        (lambda: snp.r_[X, "r"], "the directive 'r' must come first"),
        (lambda: snp.r_["x", X], "the directive 'x' must be 'r', 'c', or up to three integers"),
        (lambda: snp.fromfile("x"), "read it outside and pass the array"),
        (lambda: snp.unwrap(values(2, dtype=np.complex64)), "does not support complex input"),
    ],
)
def test_errors_name_what_is_wrong(call, text):
    with pytest.raises(SpmdError) as caught:
        call()
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: snp.linalg.cond(np.ones((2, 2)), "foo"), "cond: p='foo' must be"),
        (lambda: snp.linalg.cond(np.ones((2, 2)), 5), "cond: p=5 must be"),
        (lambda: snp.tril_indices_from(np.ones(2)), r"tril_indices_from: arr must have two dims"),
        (lambda: snp.triu_indices_from(np.ones((2, 2, 2))), r"triu_indices_from: arr must have"),
        (lambda: snp.histogramdd(POINTS, 2, range=(0, 1)), r"range must be 2 pairs or None"),
        (lambda: snp.histogramdd(POINTS, 2.5), r"bins=2\.5 must be an integer"),
        (lambda: snp.histogram(X, 2.5), r"bins=2\.5 must be an integer"),
        (lambda: snp.histogram(X, 2, range=3), r"range=3 must be \(low, high\)"),
    ],
)
def test_arguments_that_mean_nothing_are_errors(call, match):
    with pytest.raises(SpmdError, match=match):
        call()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_ldexp_of_any_exponent_is_the_rounded_product(dtype):
    x = np.array([0.0, -0.0, 1.0, -3.5, 6e4, np.inf, np.nan]).astype(snp.dtype(dtype))
    exponents = (0, 15, -14, 40, -41, 127, 128, -149, 277, 377, -376, 70000, 2**31 - 1, -(2**31))
    for exponent in exponents:
        with np.errstate(all="ignore"):
            wanted = np.ldexp(x.astype(np.float64), exponent).astype(x.dtype)
        found = np.asarray(snp.ldexp(x, exponent))
        np.testing.assert_array_equal(found.astype(np.float64), wanted.astype(np.float64))
        np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))
    largest = np.array([0, 2**32 - 1], np.uint32)
    np.testing.assert_array_equal(snp.ldexp(np.float32([0, 1]), largest[::-1]), [0.0, 1.0])


def test_none_has_the_shape_of_a_number_as_in_numpy():
    assert (snp.shape(None), snp.ndim(None), snp.size(None)) == ((), 0, 1)


@pytest.mark.parametrize("bitorder", ["big", "little"])
def test_bytes_are_packed_as_in_numpy(bitorder):
    rng = np.random.default_rng(4)
    every = np.unpackbits(np.arange(256, dtype=np.uint8)).reshape(256, 8)
    for x in (every, rng.random((3, 17, 4)) > 0.5, rng.integers(0, 3, 50)):
        for axis in (None, *range(x.ndim)):
            wanted = np.packbits(x.astype(bool), axis, bitorder)
            pack = spmd.jit(lambda y, axis=axis: snp.packbits(y, axis, bitorder))
            np.testing.assert_array_equal(pack(x), wanted)
            np.testing.assert_array_equal(snp.packbits(x, axis, bitorder), wanted)
