"""Convolutions: `conv_general_dilated`, of which all others are special cases.

The one idea: a convolution is linear in each operand, and the transpose with respect to either is
another convolution with dims renamed: strides and dilations change places, and groups of features
become groups of the batch. So one primitive is closed under every order of differentiation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.base.config import config
from spmd.base.errors import ArgumentError, ShapeError
from spmd.core.aval import ShapedArray, typeof
from spmd.core.explicit import lays_out_result
from spmd.core.primitive import Dims, Primitive, dims
from spmd.core.structural import is_linear, move_dim, reshape, zeros_like_aval
from spmd.lax.array import full, rev
from spmd.lax.conv_dims import (
    ConvDimensionNumbers,
    Windows,
    conv_dimension_numbers,
    pads_of,
    pads_of_operand_gradient,
    pads_of_window_gradient,
    per_dim,
    swapped,
)
from spmd.lax.convert import convert_element_type
from spmd.lax.dot import check_preferred, product_dtypes
from spmd.lax.families import (
    ANY,
    NARROW_FLOATS,
    check_dtype,
    check_same_dtype,
    fail,
    multilinear,
    precisions,
)

if TYPE_CHECKING:
    from spmd.sharding.array import Array

# ---- the public functions ----------------------------------------------------------------------


@lays_out_result
def conv_general_dilated(
    lhs: Any,
    rhs: Any,
    window_strides: Sequence[int],
    padding: Any,
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> Array:
    """Slide the windows `rhs` over `lhs`, and sum the products of each position.

    `dimension_numbers` names the dims, `("NHWC", "HWIO", "NHWC")`; None is `("NCHW", "OIHW",
    "NCHW")`, for any number of spatial dims. `window_strides`, `lhs_dilation` and `rhs_dilation`
    hold one integer for each spatial dim; `padding` is "SAME", "SAME_LOWER", "VALID" or a (low,
    high) pair for each. `feature_group_count=g` splits the features of `lhs` and the output
    features of `rhs` in g groups that are convolved each on its own (as many groups as features: a
    depthwise convolution); `batch_group_count=g` does it with the batch of `lhs`. `precision`,
    `preferred_element_type` and the dtype rule are those of `dot_general`. **The window is not
    flipped**: machine learning calls this a convolution.

    `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout of the result.
    Raises `ShapeError` if features or groups do not fit, `DtypeError` if sums of that dtype are
    impossible, and `ArgumentError` for other padding or dimension numbers.

    >>> x = np.arange(5, dtype=np.float32).reshape(1, 1, 5)
    >>> lax.conv_general_dilated(x, np.ones((1, 1, 3), np.float32), (1,), "SAME")
    Array([[[1., 3., 6., 9., 7.]]], dtype=float32)
    """
    name = "conv_general_dilated"
    if precision is not None or config.default_matmul_precision is not None:
        precision = precisions.precision_of(name, precision)
    left, right = typeof(lhs), typeof(rhs)
    numbers = conv_dimension_numbers(left.shape, right.shape, dimension_numbers)
    ndim = left.ndim - 2
    strides = per_dim(name, "window_strides", window_strides, ndim)
    base = per_dim(name, "lhs_dilation", lhs_dilation, ndim)
    dilation = per_dim(name, "rhs_dilation", rhs_dilation, ndim)
    if isinstance(padding, str) and any(d != 1 for d in base):
        fail(
            ArgumentError,
            f"{name}: padding={padding!r} has no meaning with lhs_dilation={base}; give "
            "(low, high) pairs, or use conv_transpose",
        )
    spatial = [left.shape[d] for d in numbers.lhs_spec[2:]]
    window = [right.shape[d] for d in numbers.rhs_spec[2:]]
    spans = Windows(tuple(window), strides, (), base, dilation).spans()
    pads = pads_of(name, padding, spatial, spans, strides)
    lhs, rhs, preferred = product_dtypes(lhs, rhs, preferred_element_type)
    return conv_general_dilated_p.bind(
        lhs,
        rhs,
        window_strides=strides,
        padding=pads,
        lhs_dilation=base,
        rhs_dilation=dilation,
        dimension_numbers=numbers,
        feature_group_count=int(feature_group_count),
        batch_group_count=int(batch_group_count),
        precision=precision,
        preferred_element_type=preferred,
    )


def conv(
    lhs: Any,
    rhs: Any,
    window_strides: Sequence[int],
    padding: str,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Array:
    """Convolve `lhs`, laid out "NCHW...", with windows `rhs`, laid out "OIHW...".

    `window_strides` and `padding` ("SAME", "SAME_LOWER" or "VALID") are those of
    `conv_general_dilated`, and so are `precision`, `preferred_element_type`, the result's shape and
    dtype, and the errors: `ShapeError` if features do not fit, and `ArgumentError` for other
    padding.

    >>> lax.conv(np.ones((1, 2, 5, 5)), np.ones((3, 2, 3, 3)), (1, 1), "VALID").shape
    (1, 3, 3, 3)
    """
    return conv_with_general_padding(
        lhs, rhs, window_strides, padding, None, None, precision, preferred_element_type
    )


def conv_with_general_padding(
    lhs: Any,
    rhs: Any,
    window_strides: Sequence[int],
    padding: Any,
    lhs_dilation: Sequence[int] | None,
    rhs_dilation: Sequence[int] | None,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Array:
    """Convolve `lhs`, laid out "NCHW...", with windows `rhs`, laid out "OIHW...", with any padding.

    `window_strides`, `padding`, `lhs_dilation`, `rhs_dilation`, `precision` and
    `preferred_element_type` are those of `conv_general_dilated`, and so are the result's shape and
    dtype, and the errors: `ShapeError` if features do not fit, and `ArgumentError` for other
    padding.

    >>> x, w = np.ones((1, 1, 5)), np.ones((1, 1, 3))
    >>> lax.conv_with_general_padding(x, w, (1,), [(2, 0)], None, None)
    Array([[[1., 2., 3., 3., 3.]]], dtype=float32)
    """
    return conv_general_dilated(
        lhs,
        rhs,
        window_strides,
        padding,
        lhs_dilation,
        rhs_dilation,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )


# ---- abstract ----------------------------------------------------------------------------------


def windows_of(rhs_shape: Sequence[int], params: Any) -> Windows:
    """The windows of an equation's parameters, along the spatial dims in canonical order."""
    return Windows(
        tuple(rhs_shape[d] for d in params["dimension_numbers"].rhs_spec[2:]),
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
    )


def _check_groups(lhs: ShapedArray, rhs: ShapedArray, params: Any) -> None:
    """Raise the user's error unless the numbers of features and examples fit the groups."""
    name, numbers = "conv_general_dilated", params["dimension_numbers"]
    groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    batch, features = (lhs.shape[d] for d in numbers.lhs_spec[:2])
    results, inputs = (rhs.shape[d] for d in numbers.rhs_spec[:2])
    if groups < 1 or batch_groups < 1 or (groups > 1 and batch_groups > 1):
        fail(
            ArgumentError,
            f"{name}: feature_group_count={groups} and batch_group_count={batch_groups} must be "
            "positive, and only one of them greater than 1",
        )
    if features != groups * inputs:
        fail(
            ShapeError,
            f"{name}: lhs {lhs} has {features} features in dim {numbers.lhs_spec[1]}; rhs {rhs} "
            f"takes {inputs} (dim {numbers.rhs_spec[1]}) times feature_group_count={groups}, "
            f"which is {groups * inputs}",
        )
    for count, argument in ((groups, "feature_group_count"), (batch_groups, "batch_group_count")):
        if results % count:
            fail(
                ShapeError,
                f"{name}: the {results} output features of rhs {rhs} (dim {numbers.rhs_spec[0]}) "
                f"must be a multiple of {argument}={count}",
            )
    if batch % batch_groups:
        fail(
            ShapeError,
            f"{name}: the batch size {batch} of lhs {lhs} (dim {numbers.lhs_spec[0]}) must be a "
            f"multiple of batch_group_count={batch_groups}",
        )


def _conv_abstract(lhs: ShapedArray, rhs: ShapedArray, **params: Any) -> ShapedArray:
    name, numbers = "conv_general_dilated", params["dimension_numbers"]
    for argument, aval in (("lhs", lhs), ("rhs", rhs)):
        check_dtype(name, argument, aval, ANY)
    check_same_dtype(name, ("lhs", "rhs"), (lhs, rhs))
    _check_groups(lhs, rhs, params)
    wanted = params["preferred_element_type"]
    check_preferred(name, lhs.dtype, wanted)
    windows = windows_of(rhs.shape, params)
    spatial = [lhs.shape[d] for d in numbers.lhs_spec[2:]]
    if any(size < 0 for size in windows.padded(spatial)):
        fail(
            ShapeError,
            f"{name}: padding={params['padding']} cuts more than the spatial sizes "
            f"{tuple(spatial)} of lhs {lhs}",
        )
    sizes = (
        lhs.shape[numbers.lhs_spec[0]] // params["batch_group_count"],
        rhs.shape[numbers.rhs_spec[0]],
        *windows.counts(spatial),
    )
    shape = [0] * lhs.ndim
    for d, size in zip(numbers.out_spec, sizes, strict=True):
        shape[d] = size
    return ShapedArray(
        tuple(shape), wanted, lhs.weak_type and rhs.weak_type and wanted == lhs.dtype
    )


# ---- impl --------------------------------------------------------------------------------------


def padded_array(xp: Any, x: Any, windows: Windows, fill: Any) -> Any:
    """`x` dilated and padded with `fill`, or cut where padding is negative."""
    whole = windows.padded(x.shape)
    out = xp.full(whole, fill, x.dtype)
    target, source = [], []
    for size, total, (low, _), step in zip(
        x.shape, whole, windows.padding, windows.base_dilation, strict=True
    ):
        first = max(-(low // step), 0) if low < 0 else 0
        last = min(size, -(-(total - low) // step)) if total > low else 0
        last = max(last, first)
        start = low + first * step
        target.append(slice(start, start + (last - first) * step, step))
        source.append(slice(first, last))
    if all(s.stop > s.start for s in source):
        out[tuple(target)] = x[tuple(source)]
    return out


def window_view(xp: Any, x: Any, windows: Windows) -> Any:
    """All windows of a padded array, without a copy: first dims which window, then which tap."""
    counts = tuple(
        max((size - span) // stride + 1, 0)
        for size, span, stride in zip(x.shape, windows.spans(), windows.strides, strict=True)
    )
    steps = [s * stride for s, stride in zip(x.strides, windows.strides, strict=True)]
    taps = [s * dilation for s, dilation in zip(x.strides, windows.dilation, strict=True)]
    return xp.lib.stride_tricks.as_strided(x, (*counts, *windows.sizes), (*steps, *taps))


def _conv_impl(xp: Any, lhs: Any, rhs: Any, **params: Any) -> Any:
    """One product of matrices per group: patches of the padded lhs times the windows."""
    numbers, out = params["dimension_numbers"], params["preferred_element_type"]
    wide = np.dtype(np.float32) if out in NARROW_FLOATS else out
    windows = windows_of(rhs.shape, params)
    lhs = xp.transpose(lhs, numbers.lhs_spec).astype(wide)
    rhs = xp.transpose(rhs, numbers.rhs_spec).astype(wide)
    (batch, features), spatial, results = lhs.shape[:2], lhs.shape[2:], rhs.shape[0]
    counts = windows.counts(spatial)
    groups = params["feature_group_count"] * params["batch_group_count"]
    kept = batch // params["batch_group_count"]
    if not math.prod((batch, features, results, *counts, *windows.sizes)):
        found = xp.zeros((kept, results, *counts), out)
    else:
        both = _with_two_dims(windows)
        patches = window_view(xp, padded_array(xp, lhs, both, 0), both)
        # Now (batch, features, *counts, 1, 1, *taps), the batch or the features in groups.
        split = (params["batch_group_count"], kept, params["feature_group_count"], -1)
        patches = patches.reshape((*split, math.prod(counts), math.prod(windows.sizes)))
        patches = xp.transpose(patches, (0, 2, 1, 4, 3, 5))
        depth = rhs.shape[1] * math.prod(windows.sizes)
        rows = patches.reshape((groups, kept * math.prod(counts), depth))
        columns = xp.transpose(rhs.reshape((groups, results // groups, depth)), (0, 2, 1))
        with np.errstate(all="ignore"):
            found = xp.matmul(rows, columns)
        found = found.reshape((groups, kept, math.prod(counts), results // groups))
        found = xp.transpose(found, (1, 0, 3, 2)).reshape((kept, results, *counts))
    return xp.transpose(found, np.argsort(numbers.out_spec)).astype(out)


def _with_two_dims(windows: Windows) -> Windows:
    """The windows, which span one element of two more dims in front."""
    return Windows(
        (1, 1, *windows.sizes),
        (1, 1, *windows.strides),
        ((0, 0), (0, 0), *windows.padding),
        (1, 1, *windows.base_dilation),
        (1, 1, *windows.dilation),
    )


# ---- derivatives -------------------------------------------------------------------------------


def _conv_transpose(ct: Any, lhs: Any, rhs: Any, **params: Any) -> Any:
    side = 0 if is_linear(lhs) else 1
    aval, other = (lhs.aval, rhs) if side == 0 else (rhs.aval, lhs)
    other_aval = typeof(other)
    if not math.prod(typeof(ct).shape):
        found = zeros_like_aval(aval)
    else:
        other = convert_element_type(other, typeof(ct).dtype, other_aval.weak_type)
        turn = _transpose_lhs if side == 0 else _transpose_rhs
        found = convert_element_type(turn(ct, aval, other, params), aval.dtype, aval.weak_type)
    return [found, None] if side == 0 else [None, found]


def _counts(ct: Any, numbers: ConvDimensionNumbers) -> list[int]:
    return [typeof(ct).shape[d] for d in numbers.out_spec[2:]]


def _transpose_lhs(ct: Any, aval: ShapedArray, rhs: Any, params: Any) -> Any:
    """The cotangent, convolved with the flipped windows; strides become dilations."""
    numbers = params["dimension_numbers"]
    lhs_spec, rhs_spec, out_spec = numbers
    windows = windows_of(typeof(rhs).shape, params)
    spatial = [aval.shape[d] for d in lhs_spec[2:]]
    groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    if groups * batch_groups > 1:
        # Output features are in groups, each with all of its inputs: groups of inputs from here.
        rhs = split_dim(rhs, rhs_spec[0], groups * batch_groups)
        rhs = fold_dim(rhs, rhs_spec[0], rhs_spec[1])
    found = conv_general_dilated(
        ct,
        rev(rhs, rhs_spec[2:]),
        window_strides=params["lhs_dilation"],
        padding=pads_of_operand_gradient(windows, spatial, _counts(ct, numbers)),
        lhs_dilation=params["window_strides"],
        rhs_dilation=params["rhs_dilation"],
        dimension_numbers=ConvDimensionNumbers(out_spec, swapped(rhs_spec), lhs_spec),
        feature_group_count=groups * batch_groups,
        precision=params["precision"],
    )
    if batch_groups > 1:
        found = fold_dim(split_dim(found, lhs_spec[1], batch_groups), lhs_spec[1], lhs_spec[0])
    return found


def _transpose_rhs(ct: Any, aval: ShapedArray, lhs: Any, params: Any) -> Any:
    """The operand, convolved with the cotangent as its windows, summing over the batch."""
    numbers = params["dimension_numbers"]
    lhs_spec, rhs_spec, out_spec = numbers
    windows = windows_of(aval.shape, params)
    spatial = [typeof(lhs).shape[d] for d in lhs_spec[2:]]
    return conv_general_dilated(
        lhs,
        ct,
        window_strides=params["rhs_dilation"],
        padding=pads_of_window_gradient(windows, spatial, _counts(ct, numbers)),
        lhs_dilation=params["lhs_dilation"],
        rhs_dilation=params["window_strides"],
        dimension_numbers=ConvDimensionNumbers(*map(swapped, (lhs_spec, out_spec, rhs_spec))),
        feature_group_count=params["batch_group_count"],
        batch_group_count=params["feature_group_count"],
        precision=params["precision"],
    )


# ---- batch, dims -------------------------------------------------------------------------------


def fold_dim(x: Any, source: int, target: int) -> Any:
    """Make dim `source` the outer part of dim `target` (numbered without `source`)."""
    x = move_dim(x, source, target)
    shape = typeof(x).shape
    return reshape(x, (*shape[:target], shape[target] * shape[target + 1], *shape[target + 2 :]))


def split_dim(x: Any, dim: int, count: int) -> Any:
    """Cut dim `dim` in `count` parts, along a new dim before it."""
    shape = typeof(x).shape
    return reshape(x, (*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :]))


def _fold_inside(x: Any, at: int, dim: int, groups: int) -> Any:
    """Make the batched dim `at` part of dim `dim` of an example, inside each of its groups."""
    x = move_dim(x, at, 0)
    x = split_dim(x, dim + 1, groups)  # batched, ..., groups, rest, ...
    return fold_dim(fold_dim(x, 0, dim + 1), dim, dim)


def _conv_batch(axis: Any, operands: Any, at: Any, **params: Any) -> Any:
    """The batched dim joins a dim that the convolution keeps: batch, output features or groups."""
    lhs, rhs = operands
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    if not axis.size:
        return _empty_batch(operands, at, params), 0
    if at[0] is not None and at[1] is not None:
        name = "batch_group_count" if batch_groups > 1 else "feature_group_count"
        lhs = fold_dim(lhs, at[0], lhs_spec[0 if batch_groups > 1 else 1])
        rhs = fold_dim(rhs, at[1], rhs_spec[0])
        params = {**params, name: params[name] * axis.size}
        out = conv_general_dilated_p.bind(lhs, rhs, **params)
        return split_dim(out, out_spec[1], axis.size), out_spec[1]
    if at[0] is not None:
        lhs = _fold_inside(lhs, at[0], lhs_spec[0], batch_groups)
        out = conv_general_dilated_p.bind(lhs, rhs, **params)
        return split_dim(out, out_spec[0], axis.size), out_spec[0]
    count = groups * batch_groups
    rhs = _fold_inside(rhs, at[1], rhs_spec[0], count)
    out = conv_general_dilated_p.bind(lhs, rhs, **params)
    feature = out_spec[1]
    out = split_dim(split_dim(out, feature, count), feature + 1, axis.size)
    return fold_dim(out, feature, feature + 1), feature


def _empty_batch(operands: Any, at: Any, params: Any) -> Any:
    avals = []
    for x, d in zip(operands, at, strict=True):
        aval = typeof(x)
        shape = aval.shape if d is None else aval.shape[:d] + aval.shape[d + 1 :]
        avals.append(aval.update(shape=shape))
    out = _conv_abstract(*avals, **params)
    return full((0, *out.shape), 0, out.dtype)


def _conv_dims(lhs: ShapedArray, rhs: ShapedArray, **params: Any) -> Dims:
    """Batch, features and output features are as in a product; groups and space stay whole."""
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    ndim = lhs.ndim
    left = [-1 - d for d in range(ndim)]
    right = [-1 - ndim - d for d in range(ndim)]
    result = [-1 - 2 * ndim - d for d in range(ndim)]
    if params["batch_group_count"] == 1:
        left[lhs_spec[0]] = result[out_spec[0]] = 0
        if params["feature_group_count"] == 1:
            left[lhs_spec[1]] = right[rhs_spec[1]] = 1
            right[rhs_spec[0]] = result[out_spec[1]] = 2
    return dims([left, right], [result], reduces="add")


conv_general_dilated_p = Primitive(
    "conv_general_dilated",
    abstract=_conv_abstract,
    impl=_conv_impl,
    jvp=multilinear(lambda: conv_general_dilated_p),
    transpose=_conv_transpose,
    batch=_conv_batch,
    dims=_conv_dims,
)
