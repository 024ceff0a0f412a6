"""Convolutions beside JAX's: random configurations, derived functions, layouts, errors."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.base.errors import ArgumentError, DtypeError, OptionError, ShapeError

jax = pytest.importorskip("jax")


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def assert_close(found, wanted, tolerance=2e-4):
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_allclose(
        found.astype(np.float64), wanted.astype(np.float64), rtol=tolerance, atol=tolerance
    )


# ---- random configurations ---------------------------------------------------------------------


def random_case(rng):
    """Operands and arguments of `conv_general_dilated`, with dims in any order."""
    letters = "HWD"[: rng.choice([1, 2, 2, 2, 3])]
    groups, batch_groups = rng.permutation([1, rng.choice([1, 1, 2, 3])])
    inputs, outputs, batch = rng.integers(1, 4, 3)
    size = {"N": batch * batch_groups, "C": inputs * groups, "I": inputs}
    size["O"] = outputs * groups * batch_groups
    window = {c: rng.integers(1, 4) for c in letters}
    size |= {c: rng.integers(4, 8) for c in letters}
    numbers = tuple("".join(rng.permutation(list(s + letters))) for s in ("NC", "OI", "NC"))
    lhs = normal(rng, *(size[c] for c in numbers[0]))
    rhs = normal(rng, *((size | window)[c] for c in numbers[1]))
    ndim = len(letters)
    how = {
        "window_strides": rng.integers(1, 4, ndim).tolist(),
        "padding": rng.integers(-1, 3, (ndim, 2)).tolist(),
        "lhs_dilation": rng.choice([1, 1, 2, 3], ndim).tolist(),
        "rhs_dilation": rng.choice([1, 1, 2], ndim).tolist(),
        "dimension_numbers": numbers,
        "feature_group_count": int(groups),
        "batch_group_count": int(batch_groups),
    }
    return lhs, rhs, how


@pytest.mark.parametrize("seed", range(6))
def test_values_and_gradients_are_those_of_jax(seed):
    rng = np.random.default_rng(seed)
    lhs, rhs, how = random_case(rng)
    wanted, pull = jax.vjp(lambda x, w: jax.lax.conv_general_dilated(x, w, **how), lhs, rhs)
    ct = normal(rng, *wanted.shape)

    @spmd.jit
    def ours(x, w, ct):
        out, pull = spmd.vjp(lambda x, w: lax.conv_general_dilated(x, w, **how), x, w)
        return out, *pull(ct)

    for found, other in zip(ours(lhs, rhs, ct), (wanted, *pull(ct)), strict=True):
        assert_close(found, other)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("axes", [(0, None), (None, 1), (1, 0), (2, 2)], ids=str)
def test_vmap_is_that_of_jax(seed, axes):
    rng = np.random.default_rng(100 + seed)
    lhs, rhs, how = random_case(rng)
    operands = [
        x if d is None else np.stack([x, 2 * x, -x], d)
        for x, d in zip((lhs, rhs), axes, strict=True)
    ]
    found, wanted = (
        module.vmap(lambda x, w, m=module: m.lax.conv_general_dilated(x, w, **how), in_axes=axes)(
            *operands
        )
        for module in (spmd, jax)
    )
    assert_close(found, wanted)


# ---- what is written in terms of it ------------------------------------------------------------


@pytest.mark.parametrize("padding", ["SAME", "VALID", ((1, 2), (0, 1))], ids=str)
@pytest.mark.parametrize("transpose_kernel", [False, True])
@pytest.mark.parametrize("consistent", [False, True])
def test_conv_transpose(padding, transpose_kernel, consistent):
    rng = np.random.default_rng(0)
    features = (3, 4) if transpose_kernel else (4, 3)
    x, w = normal(rng, 2, 4, 5, 4), normal(rng, 3, 2, *features)
    found, wanted = (
        module.conv_transpose(
            x,
            w,
            (2, 3),
            padding,
            rhs_dilation=(1, 2),
            transpose_kernel=transpose_kernel,
            use_consistent_padding=consistent,
        )
        for module in (lax, jax.lax)
    )
    assert_close(found, wanted)


@pytest.mark.parametrize("numbers", [None, ("NHWC", "HWIO", "NHWC"), ("CNHW", "OIWH", "HNCW")])
def test_patches_and_local(numbers):
    rng = np.random.default_rng(0)
    x = normal(rng, 3, 4, 5, 4)
    patches, wanted = (
        module.conv_general_dilated_patches(x, (3, 2), (1, 2), "SAME", dimension_numbers=numbers)
        for module in (lax, jax.lax)
    )
    assert_close(patches, wanted)
    out = lax.conv_dimension_numbers(x.shape, (1, 1, 3, 2), numbers)
    size = dict(zip("OI", (5, wanted.shape[out.out_spec[1]]), strict=True))
    space = dict(zip(out.rhs_spec[2:], [wanted.shape[d] for d in out.out_spec[2:]], strict=True))
    order = dict(zip(out.rhs_spec[:2], "OI", strict=True))
    w = normal(rng, *(size[order[d]] if d in order else space[d] for d in range(4)))
    found, wanted = (
        module.conv_general_dilated_local(x, w, (1, 2), "SAME", (3, 2), dimension_numbers=numbers)
        for module in (lax, jax.lax)
    )
    assert_close(found, wanted)


def test_short_forms():
    rng = np.random.default_rng(0)
    x, w = normal(rng, 2, 3, 5, 5), normal(rng, 4, 3, 3, 3)
    for found, wanted in (
        [m.conv(x, w, (1, 2), "SAME") for m in (lax, jax.lax)],
        [
            m.conv_with_general_padding(x, w, (1, 1), ((1, 0), (2, 2)), (2, 1), (1, 2))
            for m in (lax, jax.lax)
        ],
    ):
        assert_close(found, wanted)
    assert lax.conv_general_shape_tuple(x.shape, w.shape, (1, 2), "SAME", None) == (2, 4, 5, 3)


@pytest.mark.parametrize("padding", ["SAME", "same_lower", "VALID"])
def test_padtype_to_pads(padding):
    args = ((7, 8, 9), (3, 2, 5), (2, 3, 1), padding)
    wanted = jax.lax.padtype_to_pads(*map(np.array, args[:3]), padding)
    assert lax.padtype_to_pads(*args) == [tuple(map(int, p)) for p in wanted]


def test_dimension_numbers():
    shapes = ((1, 2, 3, 4), (5, 6, 7, 8))
    for numbers in (None, ("NHWC", "WHIO", "CNHW")):
        found = lax.conv_dimension_numbers(*shapes, numbers)
        assert tuple(found) == tuple(jax.lax.conv_dimension_numbers(*shapes, numbers))
        assert lax.conv_dimension_numbers(*shapes, found) == found


# ---- dtypes and empty arrays -------------------------------------------------------------------


def test_narrow_floats_are_summed_wide():
    rng = np.random.default_rng(0)
    x = np.asarray(normal(rng, 2, 6, 6, 32)).astype(spmd.dtypes.bfloat16)
    w = np.asarray(normal(rng, 3, 3, 32, 16)).astype(spmd.dtypes.bfloat16)
    how = {"window_strides": (1, 1), "padding": "SAME"}
    how["dimension_numbers"] = ("NHWC", "HWIO", "NHWC")
    found = spmd.jit(lambda x, w: lax.conv_general_dilated(x, w, **how))(x, w)
    wide = (v.astype(np.float32) for v in (x, w))
    exact = jax.lax.conv_general_dilated(*wide, **how)
    assert found.dtype == spmd.dtypes.bfloat16
    np.testing.assert_allclose(np.asarray(found).astype(np.float32), exact, rtol=2**-8, atol=1e-2)


@pytest.mark.parametrize("shapes", [((0, 3, 5), (4, 3, 2)), ((2, 0, 5), (4, 0, 2))], ids=str)
def test_empty(shapes):
    x, w = (np.ones(s, np.float32) for s in shapes)
    assert_close(lax.conv(x, w, (1,), "VALID"), jax.lax.conv(x, w, (1,), "VALID"))
    grads = spmd.grad(lambda x, w: lax.conv(x, w, (1,), "VALID").sum(), (0, 1))(x, w)
    assert [np.asarray(g).tolist() for g in grads] == [np.zeros_like(v).tolist() for v in (x, w)]


def test_windows_that_do_not_fit():
    x, w = np.ones((1, 1, 2), np.float32), np.ones((1, 1, 5), np.float32)
    assert lax.conv(x, w, (1,), "VALID").shape == (1, 1, 0)


# ---- errors ------------------------------------------------------------------------------------

X, W = np.ones((2, 3, 8, 8), np.float32), np.ones((4, 3, 3, 3), np.float32)


@pytest.mark.parametrize(
    "error, text, call",
    [
        (ShapeError, "same number of dims", lambda: lax.conv(X, W[0], (1, 1), "SAME")),
        (ShapeError, "has 3 features in dim 1; rhs", lambda: lax.conv(X, W[:, :2], (1, 1), "SAME")),
        (ArgumentError, "2 positive integers", lambda: lax.conv(X, W, (1,), "SAME")),
        (OptionError, "'SAME', 'SAME_LOWER', 'VALID'", lambda: lax.conv(X, W, (1, 1), "FULL")),
        (
            ArgumentError,
            "for each of the 2 dims",
            lambda: lax.conv_general_dilated(X, W, (1, 1), [(1, 1)]),
        ),
        (
            ArgumentError,
            "use conv_transpose",
            lambda: lax.conv_general_dilated(X, W, (1, 1), "SAME", (2, 2)),
        ),
        (
            ShapeError,
            "multiple of feature_group_count=3",
            lambda: lax.conv_general_dilated(X, W[:, :1], (1, 1), "SAME", feature_group_count=3),
        ),
        (
            ShapeError,
            "multiple of batch_group_count=4",
            lambda: lax.conv_general_dilated(X, W, (1, 1), "SAME", batch_group_count=4),
        ),
        (
            ArgumentError,
            "only one of them",
            lambda: lax.conv_general_dilated(
                X, W, (1, 1), "SAME", feature_group_count=2, batch_group_count=2
            ),
        ),
        (
            ArgumentError,
            "names 3 dims of 4",
            lambda: lax.conv_dimension_numbers(X.shape, W.shape, ("NHC", "HWIO", "NHWC")),
        ),
        (
            ArgumentError,
            "other spatial dims",
            lambda: lax.conv_dimension_numbers(X.shape, W.shape, ("NHDC", "HWIO", "NHWC")),
        ),
        (
            DtypeError,
            "conv_general_dilated: preferred_element_type=int32",
            lambda: lax.conv(X, W, (1, 1), "SAME", preferred_element_type=np.int32),
        ),
    ],
)
def test_errors(error, text, call):
    with pytest.raises(error, match=None) as caught:
        call()
    assert text in str(caught.value)
