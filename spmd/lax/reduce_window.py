"""Windowed reductions, as in pooling: sums, products and extremes over windows that slide.

The one idea: a reduction over a window is a reduction over its taps, and the tap at one offset of
all windows together is a strided slice of the padded operand. Sums, maxima and minima are
primitives, with kernels of their own; anything else is written with slices, dim by dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.errors import ArgumentError, ShapeError
from spmd.base.tree import tree_flatten, tree_unflatten
from spmd.core.aval import ShapedArray, typeof
from spmd.core.explicit import match_sharding
from spmd.core.jvp import zero_tangent
from spmd.core.primitive import Dims, Primitive, linear
from spmd.core.structural import broadcast_in_dim
from spmd.core.trace import Tracer
from spmd.lax.arithmetic import add, max, min
from spmd.lax.array import full
from spmd.lax.conv import padded_array, window_view
from spmd.lax.conv_dims import Windows, pads_of, pads_of_operand_gradient, per_dim
from spmd.lax.convert import convert_element_type
from spmd.lax.families import (
    NUMERIC,
    ORDERED,
    DtypeSet,
    check_dtype,
    fail,
    nonlinear,
    quiet,
)
from spmd.lax.reduce import check_reduced, combine_arrays
from spmd.lax.reduce_window_select import select_and_gather_add, untouched
from spmd.lax.slicing import pad, slice, untouched_dims

# ---- the public function -----------------------------------------------------------------------


def reduce_window(
    operand: Any,
    init_value: Any,
    computation: Callable[..., Any],
    window_dimensions: Sequence[int],
    window_strides: Sequence[int] | None = None,
    padding: Any = "VALID",
    base_dilation: Sequence[int] | None = None,
    window_dilation: Sequence[int] | None = None,
) -> Any:
    """Combine the elements of each window with any associative function of two scalars.

    `window_dimensions`, `window_strides`, `base_dilation` and `window_dilation` hold one integer,
    and `padding` one (low, high) pair, for **each dim of `operand`**; a dim without windows has
    size 1. `padding` may also be "SAME" or "VALID". `operand` may be a pytree of arrays of one
    shape, `init_value` is then the like of scalars. The dtype stays. Padding consists of
    `init_value`, which must be neutral for `computation`. `lax.add`, `lax.max` and `lax.min` with
    their usual init values are the fast cases.

    Raises `ShapeError` if the shapes of the arrays differ, and `ArgumentError` if the pytrees
    differ or a sequence has the wrong length.

    >>> x = np.arange(16, dtype=np.float32).reshape(4, 4)
    >>> lax.reduce_window(x, -np.inf, lax.max, (2, 2), (2, 2))
    Array([[ 5.,  7.],
           [13., 15.]], dtype=float32)
    """
    arrays, tree = tree_flatten(operand)
    inits, init_tree = tree_flatten(init_value)
    _check_operands(arrays, inits, tree == init_tree)
    shape = typeof(arrays[0]).shape
    windows = _windows(
        shape, window_dimensions, window_strides, padding, base_dilation, window_dilation
    )
    known = _KNOWN.get(computation)
    if known is not None and len(arrays) == 1:
        prim, identity = known
        if _is_constant(inits[0], identity(typeof(arrays[0]).dtype)):
            return tree_unflatten(tree, [prim.bind(arrays[0], windows=windows)])
    inits = [
        convert_element_type(init, typeof(x).dtype) for x, init in zip(arrays, inits, strict=True)
    ]
    combine = combine_arrays(computation, tree)
    return tree_unflatten(tree, _reduce_by_slices(arrays, inits, combine, windows))


def _windows(
    shape: Any, sizes: Any, strides: Any, padding: Any, base: Any, dilation: Any
) -> Windows:
    name, ndim = "reduce_window", len(shape)
    if sizes is None:
        fail(ArgumentError, f"{name}: window_dimensions must be given, one size for each dim")
    sizes = per_dim(name, "window_dimensions", sizes, ndim)
    strides = per_dim(name, "window_strides", strides, ndim)
    base = per_dim(name, "base_dilation", base, ndim)
    dilation = per_dim(name, "window_dilation", dilation, ndim)
    spans = Windows(sizes, strides, ((0, 0),) * ndim, base, dilation).spans()
    # As in a convolution, "SAME" is about the operand's own size, whatever lies between elements.
    pads = pads_of(name, padding, shape, spans, strides)
    return Windows(sizes, strides, pads, base, dilation)


def _check_operands(arrays: Any, inits: Any, same_tree: bool) -> None:
    if not arrays or not same_tree:
        fail(
            ArgumentError,
            "reduce_window: operand and init_value must be pytrees of the same structure, with at "
            f"least one array; got {len(arrays)} and {len(inits)} values",
        )
    check_reduced("reduce_window", arrays, inits)


def _is_constant(value: Any, wanted: Any) -> bool:
    return not isinstance(value, Tracer) and bool(np.asarray(value) == wanted)


def _reduce_by_slices(
    arrays: Any, inits: Any, combine: Callable[..., Any], windows: Windows
) -> list[Any]:
    """Combine the taps along one dim after the other, each tap a slice of the padded operands."""
    shape = typeof(arrays[0]).shape
    counts = windows.counts(shape)
    start = tuple(broadcast_in_dim(init, counts, ()) for init in inits)
    if 0 in counts:
        return list(start)
    parts = tuple(pad(x, init, windows.config()) for x, init in zip(arrays, inits, strict=True))
    for d in sorted(range(len(counts)), key=lambda d: windows.sizes[d] > 1):
        taps = [
            _tap(parts, d, k * windows.dilation[d], counts[d], windows.strides[d])
            for k in range(windows.sizes[d])
        ]
        # One after the other, after the init values, as bodies that are not associative need.
        if start and all(v.shape == counts for v in map(typeof, taps[0])):
            laid = zip(start, taps[0], strict=True)
            taps, start = [tuple(match_sharding(x, typeof(y)) for x, y in laid), *taps], ()
        parts = functools.reduce(combine, taps)
    return list(parts)


def _tap(parts: Any, dim: int, first: int, count: int, stride: int) -> tuple[Any, ...]:
    shape = typeof(parts[0]).shape
    starts, limits, steps = [0] * len(shape), list(shape), [1] * len(shape)
    starts[dim], limits[dim], steps[dim] = first, first + (count - 1) * stride + 1, stride
    return tuple(slice(x, starts, limits, steps) for x in parts)


# ---- the primitives ----------------------------------------------------------------------------


def _window_reduction(
    name: str, accepts: DtypeSet, combine: str, identity: Callable[[Any], Any]
) -> Primitive:
    """One member: `combine` is the NumPy function that joins two elements."""

    def abstract(x: ShapedArray, *, windows: Windows) -> ShapedArray:
        check_dtype(name, "operand", x, accepts)
        whole = windows.padded(x.shape)
        if any(size < 0 for size in whole):
            fail(
                ShapeError,
                f"{name}: padding={windows.padding} cuts more than the sizes of operand {x}",
            )
        return x.update(shape=windows.counts(x.shape))

    def impl(xp: Any, x: Any, *, windows: Windows) -> Any:
        view = window_view(xp, padded_array(xp, x, windows, identity(x.dtype)), windows)
        taps = tuple(range(x.ndim, 2 * x.ndim))
        return getattr(xp, combine)(view, axis=taps, initial=identity(x.dtype)).astype(x.dtype)

    def batch(axis: Any, operands: Any, at: Any, *, windows: Windows) -> Any:
        return prim.bind(operands[0], windows=_with_dim(windows, at[0])), at[0]

    def dims(x: ShapedArray, *, windows: Windows) -> Dims:
        return untouched_dims([range(x.ndim)], untouched(windows))

    prim = Primitive(
        name,
        abstract=abstract,
        impl=quiet(impl),
        jvp=_extreme_jvp(name, combine),
        transpose=nonlinear(name),
        batch=batch,
        dims=dims,
    )
    return prim


def _with_dim(windows: Windows, at: int) -> Windows:
    """The windows, which span one element of a new dim."""

    def inserted(values: Sequence[Any], value: Any) -> tuple[Any, ...]:
        return (*values[:at], value, *values[at:])

    return Windows(
        inserted(windows.sizes, 1),
        inserted(windows.strides, 1),
        inserted(windows.padding, (0, 0)),
        inserted(windows.base_dilation, 1),
        inserted(windows.dilation, 1),
    )


def _extreme_jvp(name: str, select: str) -> Any:
    """The tangent of the element that a window selects."""

    def jvp(primals: Any, tangents: Any, *, windows: Windows) -> Any:
        prim = _KNOWN_BY_NAME[name]
        out = prim.bind(*primals, windows=windows)
        if typeof(out).tangent().dtype == dtypes.float0:
            return out, zero_tangent(out)
        return out, select_and_gather_add(tangents[0], primals[0], select, windows)

    return jvp


def _sum_transpose(ct: Any, x: Any, *, windows: Windows) -> list[Any]:
    """Each element gets the cotangents of the windows that it is in."""
    shape, counts = x.aval.shape, typeof(ct).shape
    if 0 in counts or 0 in shape:
        return [full(shape, 0, x.aval.dtype)]
    slid = Windows(
        windows.sizes,
        windows.base_dilation,
        pads_of_operand_gradient(windows, shape, counts),
        windows.strides,
        windows.dilation,
    )
    return [reduce_window_sum_p.bind(ct, windows=slid)]


reduce_window_sum_p = _window_reduction("reduce_window_sum", NUMERIC, "sum", lambda d: d.type(0))
reduce_window_sum_p.jvp = linear
reduce_window_sum_p.transpose = _sum_transpose
reduce_window_max_p = _window_reduction(
    "reduce_window_max", ORDERED, "max", lambda d: dtypes.min_value(d)[()]
)
reduce_window_min_p = _window_reduction(
    "reduce_window_min", ORDERED, "min", lambda d: dtypes.max_value(d)[()]
)
_KNOWN_BY_NAME = {p.name: p for p in (reduce_window_max_p, reduce_window_min_p)}
_KNOWN = {
    add: (reduce_window_sum_p, lambda d: 0),
    max: (reduce_window_max_p, lambda d: dtypes.min_value(d)[()]),
    min: (reduce_window_min_p, lambda d: dtypes.max_value(d)[()]),
}


# ---- shapes ------------------------------------------------------------------------------------


def reduce_window_shape_tuple(
    operand_shape: Sequence[int],
    window_dimensions: Sequence[int],
    window_strides: Sequence[int] | None = None,
    padding: Any = "VALID",
    base_dilation: Sequence[int] | None = None,
    window_dilation: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Return the shape of the result of a windowed reduction, a tuple of ints.

    `operand_shape` is the operand's; `window_dimensions`, `window_strides`, `padding`,
    `base_dilation` and `window_dilation` are those of `reduce_window`. Raises `ArgumentError` as
    that does.

    >>> lax.reduce_window_shape_tuple((8, 8), (3, 3), (2, 2), "SAME")
    (4, 4)
    """
    shape = tuple(operand_shape)
    windows = _windows(
        shape, window_dimensions, window_strides, padding, base_dilation, window_dilation
    )
    return windows.counts(shape)
