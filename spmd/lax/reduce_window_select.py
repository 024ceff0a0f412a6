"""Tangents and cotangents of pooling by maximum: each window selects one element.

The one idea: a window selects the first (in row-major order) of its largest or smallest elements.
Gathering tangents from there and scattering cotangents to there are linear maps, each the
transpose of the other; the selected element does not change near almost every operand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.errors import ShapeError
from spmd.core.aval import ShapedArray
from spmd.core.primitive import Dims, Primitive, dims
from spmd.core.structural import to_front
from spmd.lax.conv import padded_array, window_view
from spmd.lax.conv_dims import Windows
from spmd.lax.families import FLOAT, ORDERED, check_dtype, fail, linear_in

# ---- the public functions ----------------------------------------------------------------------


def select_and_gather_add(tangents: Any, operand: Any, select: str, windows: Windows) -> Any:
    """From each window of `tangents` the element at the place that `operand`'s window selects.

    `select` is "max" or "min".
    """
    return select_and_gather_add_p.bind(tangents, operand, select=select, windows=windows)


def select_and_scatter_add(source: Any, operand: Any, select: str, windows: Windows) -> Any:
    """An array like `operand`: each element of `source` is added where its window selects."""
    return select_and_scatter_add_p.bind(source, operand, select=select, windows=windows)


# ---- windows -----------------------------------------------------------------------------------


def with_batch_dim(windows: Windows) -> Windows:
    """The windows, which span one element of a new first dim."""
    return Windows(
        (1, *windows.sizes),
        (1, *windows.strides),
        ((0, 0), *windows.padding),
        (1, *windows.base_dilation),
        (1, *windows.dilation),
    )


def untouched(windows: Windows) -> list[bool]:
    """Along which dims windows are single elements, one for each of the operand's."""
    columns = zip(
        windows.sizes, windows.strides, windows.padding, windows.base_dilation, strict=True
    )
    return [column == (1, 1, (0, 0), 1) for column in columns]


def _selected(xp: Any, operand: Any, select: str, windows: Windows) -> tuple[Any, Any]:
    """For each window the number of the selected tap, and whether there is an element at all."""
    fill = {"max": dtypes.min_value, "min": dtypes.max_value}[select](operand.dtype)[()]
    ndim = operand.ndim
    inside = window_view(
        xp, padded_array(xp, xp.ones(operand.shape, np.bool_), windows, 0), windows
    )
    values = window_view(xp, padded_array(xp, operand, windows, fill), windows)
    shape = values.shape[:ndim]
    inside, values = (v.reshape((*shape, math.prod(windows.sizes))) for v in (inside, values))
    if not values.shape[-1]:
        return xp.zeros(shape, np.int64), xp.zeros(shape, np.bool_)
    best = (xp.max if select == "max" else xp.min)(values, axis=-1, keepdims=True)
    hit = inside & ((values == best) | (values != values))
    return xp.argmax(hit, axis=-1), xp.any(hit, axis=-1)


# ---- gather ------------------------------------------------------------------------------------


def _gather_abstract(
    tangents: ShapedArray, operand: ShapedArray, *, select: str, windows: Windows
) -> ShapedArray:
    name = "select_and_gather_add"
    check_dtype(name, "tangents", tangents, FLOAT)
    check_dtype(name, "operand", operand, ORDERED)
    if tangents.shape != operand.shape:
        fail(ShapeError, f"{name}: tangents {tangents} need the shape of the operand {operand}")
    return tangents.update(shape=windows.counts(operand.shape))


def _gather_impl(xp: Any, tangents: Any, operand: Any, *, select: str, windows: Windows) -> Any:
    place, some = _selected(xp, operand, select, windows)
    taps = window_view(xp, padded_array(xp, tangents, windows, 0), windows)
    taps = taps.reshape((*place.shape, math.prod(windows.sizes)))
    if not taps.shape[-1]:
        return xp.zeros(place.shape, tangents.dtype)
    found = xp.take_along_axis(taps, place[..., None], axis=-1)[..., 0]
    return xp.where(some, found, xp.zeros((), tangents.dtype))


def _scatter_abstract(
    source: ShapedArray, operand: ShapedArray, *, select: str, windows: Windows
) -> ShapedArray:
    name = "select_and_scatter_add"
    check_dtype(name, "source", source, FLOAT)
    check_dtype(name, "operand", operand, ORDERED)
    counts = windows.counts(operand.shape)
    if source.shape != counts:
        fail(
            ShapeError,
            f"{name}: source {source} must have one element for each of the {counts} windows of "
            f"the operand {operand}",
        )
    return source.update(shape=operand.shape)


def _scatter_impl(xp: Any, source: Any, operand: Any, *, select: str, windows: Windows) -> Any:
    place, some = _selected(xp, operand, select, windows)
    wide = np.dtype(np.float32) if source.dtype.itemsize < 4 else source.dtype
    out = xp.zeros(operand.shape, wide)
    if not out.size or not source.size:
        return out.astype(source.dtype)
    taps = xp.unravel_index(place, windows.sizes)
    where = []
    for d, tap in enumerate(taps):
        sizes = [1] * source.ndim
        sizes[d] = source.shape[d]
        first = xp.arange(source.shape[d]).reshape(sizes) * windows.strides[d]
        position = first + tap * windows.dilation[d] - windows.padding[d][0]
        where.append(xp.clip(position // windows.base_dilation[d], 0, operand.shape[d] - 1))
    xp.add.at(out, tuple(where), xp.where(some, source, 0).astype(wide))
    return out.astype(source.dtype)


# ---- the rules that both share -----------------------------------------------------------------


def _batch(prim: Callable[[], Primitive]) -> Any:
    def batch(axis: Any, operands: Any, at: Any, *, select: str, windows: Windows) -> Any:
        moved = [to_front(x, d, axis.size) for x, d in zip(operands, at, strict=True)]
        return prim().bind(*moved, select=select, windows=with_batch_dim(windows)), 0

    return batch


def _dims(first: ShapedArray, operand: ShapedArray, *, select: str, windows: Windows) -> Dims:
    same, ndim = untouched(windows), operand.ndim
    labels = [[d if same[d] else -1 - d - k * ndim for d in range(ndim)] for k in range(3)]
    return dims(labels[:2], labels[2:])


select_and_gather_add_p = Primitive(
    "select_and_gather_add",
    abstract=_gather_abstract,
    impl=_gather_impl,
    jvp=linear_in(lambda: select_and_gather_add_p, 0),
    transpose=lambda ct, tangents, operand, **params: [
        select_and_scatter_add_p.bind(ct, operand, **params),
        None,
    ],
    batch=_batch(lambda: select_and_gather_add_p),
    dims=_dims,
)
select_and_scatter_add_p = Primitive(
    "select_and_scatter_add",
    abstract=_scatter_abstract,
    impl=_scatter_impl,
    jvp=linear_in(lambda: select_and_scatter_add_p, 0),
    transpose=lambda ct, source, operand, **params: [
        select_and_gather_add_p.bind(ct, operand, **params),
        None,
    ],
    batch=_batch(lambda: select_and_scatter_add_p),
    dims=_dims,
)
