"""Float sums are at least as accurate as NumPy's pairwise ones, in every layout."""

import numpy as np
import pytest

import spmd
import spmd.numpy as snp

LAYOUTS = {
    "all": ((1_300_007,), None),
    "rows": ((37, 50_021), 1),
    "long columns": ((50_021, 37), 0),
    "wide columns": ((4_099, 300), 0),
    "middle": ((7, 9_001, 24), 1),
    "two dims": ((300, 7, 301), (0, 2)),
    "rows of a transpose": ((50_021, 37), "transposed"),
}


@pytest.mark.parametrize("kind", ["uniform", "normal", "growing"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_are_as_good_as_pairwise_ones(layout, kind):
    shape, axis = LAYOUTS[layout]
    rng = np.random.default_rng(len(layout))
    x = {
        "uniform": rng.random(shape),
        "normal": rng.standard_normal(shape),
        "growing": np.linspace(1e-3, 1e3, int(np.prod(shape))).reshape(shape),
    }[kind].astype(np.float32)
    if axis == "transposed":
        got = np.asarray(spmd.jit(lambda x: snp.sum(x.T, axis=1))(x))
        exact, pairwise = x.astype(float).sum(0), np.ascontiguousarray(x.T).sum(1)
    else:
        got = np.asarray(spmd.jit(lambda x: snp.sum(x, axis=axis))(x))
        exact = x.astype(float).sum(axis)
        # NumPy adds in pairs only along its last dim: give it the summed dims there.
        axes = tuple(range(x.ndim)) if axis is None else (axis,) if isinstance(axis, int) else axis
        rest = [k for k in range(x.ndim) if k not in axes]
        moved = np.ascontiguousarray(x.transpose(*rest, *axes))
        pairwise = moved.reshape(*moved.shape[: len(rest)], -1).sum(-1)
    # Relative to the sum of absolute values, as the error bound of any order of adding is.
    size = np.abs(x.astype(float)).sum(0 if axis == "transposed" else axis)
    mine = np.max(np.abs(got - exact) / size) / 2.0**-24
    other = np.max(np.abs(pairwise - exact) / size) / 2.0**-24
    # A unit and a half here is less than one unit of the last place.
    # Which sums meet first depends on the lanes of the machine's vectors, for both sides.
    assert mine <= max(1.1 * other, 1.5), f"{mine:.2f} units beside {other:.2f} of pairwise sums"


def test_bfloat16_sums_accumulate_in_float32():
    x = snp.ones((40_000,), snp.bfloat16)
    assert float(spmd.jit(snp.sum)(x)) == 39_936  # 40000 rounded to 8 bits, not stuck at 256


def test_integer_sums_wrap():
    x = np.full(4, 2**30 + 2**29, np.int32)
    assert int(spmd.jit(snp.sum)(x)) == np.sum(x, dtype=np.int32)


@pytest.mark.parametrize("n", [7, 64, 1000, 100_003])
def test_extremes_know_nan_and_the_first_place(n):
    x = np.sin(np.arange(n, dtype=np.float32) * 1.7)
    for values in (x, np.where(np.arange(n) == n // 2, np.nan, x), np.zeros(n), -np.zeros(n)):
        values = values.astype(np.float32)
        for name in ("max", "min", "argmax", "argmin"):
            got = np.asarray(spmd.jit(getattr(snp, name))(values))
            np.testing.assert_array_equal(got, getattr(np, name)(values), name)
