"""Operations in terms of a convolution: transposed and local ones, and patches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.base.errors import ArgumentError, ShapeError
from spmd.core.aval import typeof
from spmd.core.structural import move_dim, permute_dims
from spmd.lax.array import rev
from spmd.lax.conv import conv_general_dilated, windows_of
from spmd.lax.conv_dims import (
    ConvDimensionNumbers,
    conv_dimension_numbers,
    dilated,
    pads_of,
    per_dim,
)
from spmd.lax.dot import dot_general
from spmd.lax.families import fail

if TYPE_CHECKING:
    from spmd.sharding.array import Array

# ---- transposed --------------------------------------------------------------------------------

_LAYOUTS = {
    2: ("NC", "IO", "NC"),
    3: ("NHC", "HIO", "NHC"),
    4: ("NHWC", "HWIO", "NHWC"),
    5: ("NHWDC", "HWDIO", "NHWDC"),
}


def conv_transpose(
    lhs: Any,
    rhs: Any,
    strides: Sequence[int],
    padding: Any,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    transpose_kernel: bool = False,
    precision: Any = None,
    preferred_element_type: Any = None,
    use_consistent_padding: bool = False,
) -> Array:
    """Convolve upwards by `strides` where another convolution would go down by them.

    `padding` is "SAME" or "VALID", those of the convolution that it reverses, or one (low, high)
    pair for each spatial dim: the padding of the dilated `lhs`, or with `use_consistent_padding`
    that of the reversed convolution. `transpose_kernel` flips the windows `rhs` and swaps their
    features: this is then the gradient of a convolution with `rhs`. `rhs_dilation`,
    `dimension_numbers`, `precision`, `preferred_element_type`, the shape and the dtype rule are
    those of `conv_general_dilated`, but the default layout has features last: NHWC, HWIO. Raises
    `ArgumentError` if `lhs` has no default layout, and `ShapeError` if features do not fit.

    >>> x = np.ones((1, 3, 1), np.float32)
    >>> lax.conv_transpose(x, np.ones((2, 1, 1), np.float32), (2,), "VALID").shape
    (1, 6, 1)
    """
    ndim = typeof(lhs).ndim
    if dimension_numbers is None:
        if ndim not in _LAYOUTS:
            fail(
                ArgumentError,
                f"conv_transpose: lhs {typeof(lhs)} has {ndim} dims; without dimension_numbers it "
                f"must have {min(_LAYOUTS)} to {max(_LAYOUTS)}",
            )
        dimension_numbers = _LAYOUTS[ndim]
    numbers = conv_dimension_numbers(typeof(lhs).shape, typeof(rhs).shape, dimension_numbers)
    steps = per_dim("conv_transpose", "strides", strides, ndim - 2)
    dilation = per_dim("conv_transpose", "rhs_dilation", rhs_dilation, ndim - 2)
    if use_consistent_padding or padding in ("SAME", "VALID"):
        window = [typeof(rhs).shape[d] for d in numbers.rhs_spec[2:]]
        spans = [dilated(k, d) for k, d in zip(window, dilation, strict=True)]
        each = [padding] * len(steps) if isinstance(padding, str) else padding
        padding = [_pads(k, s, p) for k, s, p in zip(spans, steps, each, strict=True)]
    if transpose_kernel:
        rhs = rev(rhs, numbers.rhs_spec[2:])
        order = list(range(ndim))
        one, other = numbers.rhs_spec[:2]
        order[one], order[other] = other, one
        rhs = permute_dims(rhs, order)
    return conv_general_dilated(
        lhs,
        rhs,
        (1,) * (ndim - 2),
        padding,
        steps,
        dilation,
        numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )


def _pads(span: int, stride: int, padding: Any) -> tuple[int, int]:
    """The padding of the dilated lhs that reverses a convolution's padding, along one dim."""
    if padding == "SAME":
        whole = span + stride - 2
        before = span - 1 if stride > span - 1 else -(-whole // 2)
    elif padding == "VALID":
        whole = span + stride - 2 + max(span - stride, 0)
        before = span - 1
    else:
        low, high = padding
        before, whole = span - 1 - low, 2 * (span - 1) - low - high
    return before, whole - before


# ---- patches -----------------------------------------------------------------------------------


def conv_general_dilated_patches(
    lhs: Any,
    filter_shape: Sequence[int],
    window_strides: Sequence[int],
    padding: Any,
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Array:
    """Cut the windows out of `lhs`, each laid out along the feature dim of the result.

    That dim has the size `features * prod(filter_shape)`, the taps of the first feature first.
    `window_strides`, `padding`, `lhs_dilation`, `rhs_dilation`, `dimension_numbers`, `precision`,
    `preferred_element_type`, the dtype rule and the errors are those of `conv_general_dilated`:
    `ShapeError` and `ArgumentError`.

    >>> x = np.arange(4, dtype=np.float32).reshape(1, 1, 4)
    >>> lax.conv_general_dilated_patches(x, (2,), (1,), "VALID")
    Array([[[0., 1., 2.],
            [1., 2., 3.]]], dtype=float32)
    """
    aval = typeof(lhs)
    taps = tuple(int(k) for k in filter_shape)
    numbers = conv_dimension_numbers(aval.shape, (1, 1, *taps), dimension_numbers)
    count = math.prod(taps)
    features = aval.shape[numbers.lhs_spec[1]]
    # One window for each tap, that is 1 there and 0 elsewhere; the same for every feature.
    pick = np.eye(count, dtype=aval.dtype).reshape((count, 1, *taps))
    pick = np.tile(pick, (features, *(1,) * (len(taps) + 1)))
    return conv_general_dilated(
        lhs,
        np.moveaxis(pick, range(aval.ndim), numbers.rhs_spec),
        window_strides,
        padding,
        lhs_dilation,
        rhs_dilation,
        _rhs_positions(numbers, taps),
        feature_group_count=features,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )


def _rhs_positions(numbers: ConvDimensionNumbers, taps: Sequence[int]) -> ConvDimensionNumbers:
    if len(taps) != len(numbers.rhs_spec) - 2:
        fail(
            ShapeError,
            f"conv_general_dilated_patches: filter_shape={tuple(taps)} must have one size for each "
            f"of the {len(numbers.rhs_spec) - 2} spatial dims",
        )
    return numbers


# ---- local -------------------------------------------------------------------------------------


def conv_general_dilated_local(
    lhs: Any,
    rhs: Any,
    window_strides: Sequence[int],
    padding: Any,
    filter_shape: Sequence[int],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    precision: Any = None,
) -> Array:
    """Convolve `lhs` with windows `rhs` of their own at each position of the result.

    The spatial dims of `rhs` are those of the result; its input features are the windows of `lhs`,
    of shape `filter_shape`, as `conv_general_dilated_patches` lays them out. `window_strides`,
    `padding`, `lhs_dilation`, `rhs_dilation`, `dimension_numbers`, `precision`, the dtype rule and
    the errors are those of `conv_general_dilated`: `ShapeError` and `ArgumentError`.

    >>> x = np.ones((1, 1, 4), np.float32)
    >>> windows = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    >>> lax.conv_general_dilated_local(x, windows, (1,), "VALID", (2,))
    Array([[[3., 5., 7.]]], dtype=float32)
    """
    patches = conv_general_dilated_patches(
        lhs,
        filter_shape,
        window_strides,
        padding,
        lhs_dilation,
        rhs_dilation,
        dimension_numbers,
        precision,
    )
    shape = (1, 1, *filter_shape)
    _, rhs_spec, out_spec = conv_dimension_numbers(typeof(lhs).shape, shape, dimension_numbers)
    pairs = sorted(zip(out_spec[2:], rhs_spec[2:], strict=True))
    batch = tuple(zip(*pairs, strict=True)) or ((), ())
    contract = ((out_spec[1],), (rhs_spec[1],))
    out = dot_general(patches, rhs, (contract, batch), precision)
    # The result's dims: the spatial ones in order, then batch and output features.
    first, last = sorted((out_spec[0], out_spec[1]))
    ndim = typeof(out).ndim
    batch_dim, feature_dim = ndim - 2, ndim - 1
    if out_spec[0] < out_spec[1]:
        return move_dim(move_dim(out, batch_dim, first), feature_dim, last)
    return move_dim(move_dim(out, feature_dim, first), ndim - 1, last)


# ---- shapes ------------------------------------------------------------------------------------


def conv_shape_tuple(
    lhs_shape: Sequence[int],
    rhs_shape: Sequence[int],
    strides: Sequence[int],
    pads: Any,
    batch_group_count: int = 1,
) -> tuple[int, ...]:
    """Return the shape of a convolution's result, a tuple of ints.

    `lhs_shape`, laid out "NCHW...", and `rhs_shape`, "OIHW...", are the operands' shapes;
    `strides`, `pads` and `batch_group_count` are those of `conv_general_dilated`. Raises
    `ShapeError` or `ArgumentError` as that does.

    >>> lax.conv_shape_tuple((2, 3, 8), (4, 3, 3), (1,), "VALID")
    (2, 4, 6)
    """
    found = conv_general_shape_tuple(lhs_shape, rhs_shape, strides, pads, None)
    return (found[0] // batch_group_count, *found[1:])


def conv_transpose_shape_tuple(
    lhs_shape: Sequence[int],
    rhs_shape: Sequence[int],
    window_strides: Sequence[int],
    padding: Any,
    dimension_numbers: Any,
) -> tuple[int, ...]:
    """Return the shape of the result of `conv_transpose`, a tuple of ints.

    `lhs_shape` and `rhs_shape` are the operands' shapes; `window_strides`, `padding` and
    `dimension_numbers` are those of `conv_transpose`.

    >>> names = ("NHC", "HIO", "NHC")
    >>> lax.conv_transpose_shape_tuple((1, 4, 3), (3, 3, 5), (2,), "SAME", names)
    (1, 8, 5)
    """
    numbers = conv_dimension_numbers(lhs_shape, rhs_shape, dimension_numbers)
    spatial = [lhs_shape[d] for d in numbers.lhs_spec[2:]]
    window = [rhs_shape[d] for d in numbers.rhs_spec[2:]]
    if isinstance(padding, str):
        padding = [_pads(k, s, padding) for k, s in zip(window, window_strides, strict=True)]
    counts = (
        (n - 1) * s - k + 2 + sum(pads)
        for n, k, s, pads in zip(spatial, window, window_strides, padding, strict=True)
    )
    sizes = (lhs_shape[numbers.lhs_spec[0]], rhs_shape[numbers.rhs_spec[0]], *counts)
    return tuple(int(sizes[k]) for k in np.argsort(numbers.out_spec))


def conv_general_shape_tuple(
    lhs_shape: Sequence[int],
    rhs_shape: Sequence[int],
    window_strides: Sequence[int],
    padding: Any,
    dimension_numbers: Any,
) -> tuple[int, ...]:
    """Return the shape of a convolution's result, a tuple of ints.

    `lhs_shape` and `rhs_shape` are the operands' shapes; `window_strides`, `padding` and
    `dimension_numbers` are those of `conv_general_dilated`.

    >>> names = ("NHWC", "HWIO", "NHWC")
    >>> lax.conv_general_shape_tuple((1, 8, 8, 3), (3, 3, 3, 4), (2, 2), "SAME", names)
    (1, 4, 4, 4)
    """
    numbers = conv_dimension_numbers(lhs_shape, rhs_shape, dimension_numbers)
    strides = tuple(window_strides)
    spatial = [lhs_shape[d] for d in numbers.lhs_spec[2:]]
    window = [rhs_shape[d] for d in numbers.rhs_spec[2:]]
    ones = (1,) * len(strides)
    params = {
        "dimension_numbers": numbers,
        "window_strides": strides,
        "padding": pads_of("conv_general_shape_tuple", padding, spatial, window, strides),
        "lhs_dilation": ones,
        "rhs_dilation": ones,
    }
    counts = windows_of(rhs_shape, params).counts(spatial)
    sizes = (lhs_shape[numbers.lhs_spec[0]], rhs_shape[numbers.rhs_spec[0]], *counts)
    order = np.argsort(numbers.out_spec)
    return tuple(int(sizes[k]) for k in order)
