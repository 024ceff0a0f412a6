"""Reductions and statistics against JAX."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import spmd.numpy as snp
from spmd.base.errors import SpmdError
from tests.numpy.oracle import assert_agrees, case, values

X = values(3, 4)
WITH_NAN = np.where(X > 1.5, np.nan, X).astype(np.float32)
MASK = X > 0
KINDS = {
    "f32": X,
    "i32": values(3, 4, dtype=np.int32),
    "u8": values(3, 4, dtype=np.uint8),
    "bool": values(3, 4, dtype=bool),
    "c64": values(3, 4, dtype=np.complex64),
    "bf16": values(3, 4, dtype=ml_dtypes.bfloat16),
}


def loose(kind: str) -> dict[str, float]:
    return {"rtol": 2e-2, "atol": 2e-2} if kind == "bf16" else {"rtol": 1e-5, "atol": 1e-5}


def groups():
    """Cases of one function each."""
    for name in ("sum", "prod", "mean", "var", "std", "all", "any", "count_nonzero"):
        yield [
            case(
                f"{name}-{kind}-{axis}",
                lambda xp, x, name=name, axis=axis, keep=keep: getattr(xp, name)(
                    x, axis=axis, keepdims=keep
                ),
                x,
                **loose(kind),
            )
            for kind, x in KINDS.items()
            for axis, keep in ((None, False), (1, True), ((0, 1), False))
        ]
    for name in ("max", "min", "argmax", "argmin", "ptp", "cumsum", "cumprod"):
        yield [
            case(
                f"{name}-{kind}-{axis}",
                lambda xp, x, name=name, axis=axis: getattr(xp, name)(x, axis=axis),
                KINDS[kind],
                **loose(kind),
            )
            for kind in ("f32", "i32", "u8", "bf16")
            for axis in (None, -1)
        ]
    names = """nansum nanprod nanmean nanvar nanstd nanmax nanmin nanargmax nanargmin nancumsum
    nancumprod max argmax""".split()
    yield [
        case(
            f"{name}-nan",
            lambda xp, x, name=name: getattr(xp, name)(x, axis=1),
            WITH_NAN,
            rtol=1e-5,
        )
        for name in names
    ]


OPTIONS = [
    case("sum-where", lambda xp, x, m: xp.sum(x, axis=0, where=m), X, MASK),
    case("sum-initial", lambda xp, x: xp.sum(x, initial=3.0), X),
    case("sum-dtype", lambda xp, x: xp.sum(x, dtype=np.int32), X),
    case("sum-narrow", lambda xp, x: xp.sum(x, promote_integers=False), KINDS["u8"]),
    case("sum-number", lambda xp, x: xp.sum(x), 2.0),
    case("prod-where", lambda xp, x, m: xp.prod(x, where=m), X, MASK),
    case("max-where", lambda xp, x, m: xp.max(x, axis=1, where=m, initial=-5.0), X, MASK),
    case("min-initial", lambda xp, x: xp.min(x, initial=-7), KINDS["i32"]),
    case("max-bool", lambda xp, x: xp.max(x, axis=0), KINDS["bool"]),
    case("any-where", lambda xp, x, m: xp.any(x, where=m), X, MASK),
    case("mean-where", lambda xp, x, m: xp.mean(x, axis=0, where=m), X, MASK),
    case("mean-dtype", lambda xp, x: xp.mean(x, dtype=np.float16), X, rtol=1e-2),
    case("var-ddof", lambda xp, x: xp.var(x, axis=0, ddof=1), X),
    case("var-no-freedom", lambda xp, x: xp.var(x, axis=0, ddof=3), X),
    case("var-correction", lambda xp, x: xp.var(x, correction=0.5), X),
    case("var-where", lambda xp, x, m: xp.var(x, axis=0, where=m, ddof=1), X, MASK),
    case("std-mean", lambda xp, x: xp.std(x, axis=0, mean=xp.mean(x, 0, keepdims=True)), X),
    case("average", lambda xp, x: xp.average(x, axis=0), X),
    case("average-weights", lambda xp, x: xp.average(x, weights=xp.abs(x)), X),
    case("average-axis", lambda xp, x, w: xp.average(x, 1, w, True), X, values(4, low=1.0)),
    case("cumsum-bool", lambda xp, x: xp.cumsum(x, axis=0), KINDS["bool"]),
    case("cumsum-dtype", lambda xp, x: xp.cumsum(x, dtype=np.float32), KINDS["i32"]),
    case("cumulative_sum", lambda xp, x: xp.cumulative_sum(x, axis=1, include_initial=True), X),
    case("cumulative_prod", lambda xp, x: xp.cumulative_prod(x, axis=0), X),
    case("argmax-keepdims", lambda xp, x: xp.argmax(x, axis=0, keepdims=True), X),
    case("argmax-flat", lambda xp, x: xp.argmax(x, keepdims=True), X),
    case("empty-sum", lambda xp, x: xp.sum(x, axis=1), np.zeros((2, 0), np.float32)),
    case("empty-mean", lambda xp, x: xp.mean(x), np.zeros((0,), np.float32)),
    case("median", lambda xp, x: xp.median(x, axis=1), X),
    case("median-all", lambda xp, x: xp.median(x), X),
    case("median-int", lambda xp, x: xp.median(x, axis=0, keepdims=True), KINDS["i32"]),
    case("quantile", lambda xp, x, q: xp.quantile(x, q, axis=0), X, np.array([0.1, 0.5, 0.9])),
    case("quantile-two-axes", lambda xp, x: xp.quantile(x, 0.3, axis=(0, 1), keepdims=True), X),
    case("percentile", lambda xp, x: xp.percentile(x, 25.0, axis=1), X),
    case("nanmedian", lambda xp, x: xp.nanmedian(x, axis=1), WITH_NAN),
    case("nanquantile", lambda xp, x: xp.nanquantile(x, 0.25, axis=0), WITH_NAN),
    case("quantile-nan", lambda xp, x: xp.quantile(x, 0.25, axis=0), WITH_NAN),
    *[
        case(f"quantile-{m}", lambda xp, x, m=m: xp.quantile(x, 0.37, axis=0, method=m), X)
        for m in ("lower", "higher", "midpoint", "nearest")
    ],
    case("cov", lambda xp, x: xp.cov(x), X),
    case("cov-columns", lambda xp, x: xp.cov(x, rowvar=False, bias=True), X),
    case("cov-weights", lambda xp, x, w: xp.cov(x, aweights=w), X, values(4, low=1.0), rtol=1e-4),
    case("cov-vector", lambda xp, x: xp.cov(x), values(5)),
    case("corrcoef", lambda xp, x: xp.corrcoef(x), X, rtol=1e-5),
    case("bincount", lambda xp, x: xp.bincount(x, length=6), values(9, dtype=np.uint8)),
    case("bincount-weights", lambda xp, x, w: xp.bincount(x, w, length=4),
         values(9, dtype=np.uint8), values(9)),
    case("histogram", lambda xp, x: xp.histogram(x, 5), values(20)),
    case("histogram-range", lambda xp, x: xp.histogram(x, 4, (-1.0, 1.0), density=True),
         values(20)),
]  # fmt: skip


@pytest.mark.parametrize("cases", [*groups()], ids=lambda cases: cases[0].name.split("-")[0])
def test_like_jax(cases):
    assert_agrees(*cases)


def test_options():
    assert_agrees(*OPTIONS)


def test_bincount_finds_its_length():
    np.testing.assert_array_equal(snp.bincount(np.array([0, 3, 3])), [1, 0, 0, 2])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: snp.sum([1, 2]), "sum requires ndarray or scalar arguments, got <class 'list'>"),
        (lambda: snp.sum(X, axis=2), "axis 2 is out of bounds for an array of 2 dims"),
        (lambda: snp.sum(X, axis=(0, 0)), "duplicate value in axis"),
        (lambda: snp.max(np.zeros((0, 3))), "zero-size array to reduction operation max"),
        (lambda: snp.max(X, where=MASK), "give initial="),
        (lambda: snp.sum(X, where=X), "where must be a bool array"),
        (lambda: snp.sum(X, out=X), "arrays are immutable"),
        (lambda: snp.argmax(np.zeros(0)), "argmax of an empty sequence"),
        (lambda: snp.quantile(X, 0.5, method="magic"), "method must be one of linear"),
    ],
)  # fmt: skip
def test_errors_name_what_is_wrong(call, text):
    with pytest.raises(SpmdError) as caught:
        call()
    assert text in str(caught.value)
