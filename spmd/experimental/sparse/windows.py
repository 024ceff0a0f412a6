"""Operations on `BCOO` arrays over windows: gathers, and convolutions of sparse arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import spmd.lax as lax
import spmd.numpy as snp
from spmd.api.inspect import eval_shape
from spmd.api.vectorize import vmap
from spmd.base.errors import RefusedError, ShapeError
from spmd.core.aval import ShapeDtypeStruct, typeof
from spmd.experimental.sparse.base import JAXSparse, refuse_sharding
from spmd.experimental.sparse.bcoo import BCOO, bcoo_fromdense, bcoo_update_layout
from spmd.experimental.sparse.shapes import (
    bcoo_dynamic_slice,
    bcoo_reshape,
    bcoo_squeeze,
    bcoo_transpose,
)
from spmd.lax.conv_dims import dilated, pads_of


def bcoo_gather(
    operand: BCOO,
    start_indices: Any,
    dimension_numbers: Any,
    slice_sizes: Sequence[int],
    *,
    unique_indices: bool = False,
    indices_are_sorted: bool = False,
    mode: Any = None,
    fill_value: Any = None,
) -> BCOO:
    """Take windows of a sparse array at arrays of indices, as `lax.gather` does.

    The index array's own dims become batch dims. Indices must be in bounds: `mode` is None or
    "promise_in_bounds", and a `RefusedError` is raised for another. `unique_indices`,
    `indices_are_sorted` and `fill_value` have no effect.

    >>> from spmd.experimental import sparse
    >>> rows = lax.GatherDimensionNumbers((1,), (0,), (0,))
    >>> sparse.bcoo_gather(sparse.eye(3), np.array([[2], [0]]), rows, (1, 3)).todense()
    Array([[0., 0., 1.],
           [1., 0., 0.]], dtype=float32)
    """
    in_bounds = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    if mode is not None and lax.GatherScatterMode.from_any(mode) is not in_bounds:
        raise RefusedError(f"bcoo_gather: {mode=} is not supported; indices must be in bounds")
    numbers = dimension_numbers
    if numbers.operand_batching_dims:
        raise RefusedError("bcoo_gather: operand_batching_dims are not supported; use vmap")
    starts = snp.asarray(start_indices)
    dense = ShapeDtypeStruct(operand.shape, operand.dtype)
    shape = eval_shape(
        lambda x, at: lax.gather(x, at, numbers, tuple(slice_sizes), mode=in_bounds), dense, starts
    ).shape

    def window(at: Any) -> BCOO:
        full: list[Any] = [0] * operand.ndim
        for k, d in enumerate(numbers.start_index_map):
            full[d] = at[k]
        found = bcoo_dynamic_slice(operand, full, slice_sizes)
        return bcoo_squeeze(found, dimensions=numbers.collapsed_slice_dims)

    across = typeof(starts).shape[:-1]
    if not across:
        return window(starts)
    found = vmap(window)(starts.reshape((-1, typeof(starts).shape[-1])))
    found = bcoo_reshape(found, new_sizes=(*across, *found.shape[1:]))
    batch = [d for d in range(len(shape)) if d not in numbers.offset_dims]
    order = np.argsort([*batch, *numbers.offset_dims])
    if list(order) == list(range(len(shape))):
        return found
    if set(order[: len(across)]) != set(range(len(across))):
        found = bcoo_update_layout(found, n_batch=0)
    return bcoo_transpose(found, permutation=[int(d) for d in order])


def bcoo_conv_general_dilated(
    lhs: Any,
    rhs: Any,
    *,
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
) -> BCOO:
    """Convolve two arrays of one example and one feature, at least one of them sparse.

    The parameters are those of `lax.conv_general_dilated`; `out_sharding` must be None. Each
    pair of stored elements gives one of the result. Raises `ShapeError` for more than one example,
    feature or group.

    >>> from spmd.experimental import sparse
    >>> x = sparse.BCOO.fromdense(np.array([[[0.0, 2.0, 0.0]]]))
    >>> w = sparse.BCOO.fromdense(np.array([[[1.0, 3.0]]]))
    >>> sparse.bcoo_conv_general_dilated(x, w, window_strides=(1,), padding="VALID").todense()
    Array([[[6., 2.]]], dtype=float32)
    """
    refuse_sharding("bcoo_conv_general_dilated", out_sharding)
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    ones = (1,) * (lhs.ndim - 2)
    lhs_dilation, rhs_dilation = tuple(lhs_dilation or ones), tuple(rhs_dilation or ones)
    strides = tuple(window_strides)
    x, w = _spatial(lhs, numbers.lhs_spec), _spatial(rhs, numbers.rhs_spec)
    groups = feature_group_count, batch_group_count
    out = eval_shape(
        lambda a, b: lax.conv_general_dilated(
            a, b, strides, padding, lhs_dilation, rhs_dilation, numbers, *groups,
            precision, preferred_element_type,
        ),
        ShapeDtypeStruct(lhs.shape, lhs.dtype), ShapeDtypeStruct(rhs.shape, rhs.dtype),
    )  # fmt: skip
    inner = [dilated(n, k) for n, k in zip(x.shape, lhs_dilation, strict=True)]
    window = [dilated(n, k) for n, k in zip(w.shape, rhs_dilation, strict=True)]
    pads = pads_of("bcoo_conv_general_dilated", padding, inner, window, strides)
    shape = tuple(out.shape[d] for d in numbers.out_spec[2:])

    values = (x.data[:, None] * w.data[None, :]).reshape(-1).astype(out.dtype)
    low = snp.asarray([p[0] for p in pads], x.indices.dtype)
    steps = snp.asarray(strides, x.indices.dtype)
    from_lhs = x.indices * snp.asarray(lhs_dilation, x.indices.dtype) + low
    from_rhs = (w.indices * snp.asarray(rhs_dilation, w.indices.dtype)).astype(x.indices.dtype)
    places = (from_lhs[:, None] - from_rhs[None, :]).reshape((-1, len(shape)))
    stored = _is_stored(x)[:, None] & _is_stored(w)[None, :]
    limits = snp.asarray(shape, x.indices.dtype)
    inside = (places >= 0) & (places % steps == 0) & (places // steps < limits)
    kept = snp.all(inside, axis=-1) & stored.reshape(-1)
    places = snp.where(kept[:, None], places // steps, limits)
    values = snp.where(kept, values, snp.zeros((), out.dtype))
    found = BCOO((values[None, None], places[None, None]), shape=(1, 1, *shape))
    if numbers.out_spec == tuple(range(lhs.ndim)):
        return found
    order = [int(d) for d in np.argsort(numbers.out_spec)]
    return bcoo_transpose(bcoo_update_layout(found, n_batch=0), permutation=order)


def _spatial(x: Any, spec: Sequence[int]) -> BCOO:
    """An operand as a sparse array of its spatial dims."""
    if any(x.shape[d] != 1 for d in spec[:2]):
        raise ShapeError(
            "bcoo_conv_general_dilated: sparse convolutions are of one example and one feature, "
            f"got shape {x.shape}, of which dims {tuple(spec[:2])} count them"
        )
    sparse = x if isinstance(x, JAXSparse) else bcoo_fromdense(x, nse=x.size)
    flat = bcoo_update_layout(sparse, n_batch=0, n_dense=0)
    moved = bcoo_transpose(flat, permutation=[int(d) for d in spec])
    return bcoo_squeeze(moved, dimensions=(0, 1))


def _is_stored(x: BCOO) -> Any:
    """Which elements are no padding."""
    return snp.all(x.indices < snp.asarray(x.shape, x.indices.dtype), axis=-1)
