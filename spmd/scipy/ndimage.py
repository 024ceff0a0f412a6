"""`spmd.scipy.ndimage`: `map_coordinates`, an array read between its elements."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd import lax
from spmd import numpy as snp
from spmd.base import dtypes
from spmd.base.errors import RefusedError, ShapeError
from spmd.core.aval import typeof
from spmd.numpy.promotion import as_array, promote_dtypes

if TYPE_CHECKING:
    from spmd.sharding.array import Array

__all__ = ["map_coordinates"]

_MODES = ("constant", "nearest", "wrap", "mirror", "reflect")


def map_coordinates(
    input: Any, coordinates: Sequence[Any], order: int, mode: str = "constant", cval: Any = 0.0
) -> Array:
    """Read the values of an array at coordinates between its elements.

    `coordinates` has one array for each dim of `input`, all of one shape, which is the result's;
    its dtype is that of `input`. `order` 0 takes the nearest element (at halves the one farther
    from 0), 1 interpolates linearly. Outside of the array `mode` goes on: "constant" with `cval`,
    "nearest" with the last element, "wrap" from the other side, "mirror" and "reflect" backwards
    (without and with the last element twice). Raises `ShapeError` if there is not one array for
    each dim, and `ArgumentError` for another order or mode.

    >>> spmd.scipy.ndimage.map_coordinates(np.arange(4.0), [np.array([0.5, 2.25])], order=1)
    Array([0.5 , 2.25], dtype=float32)
    """
    x = as_array(input)
    places = [as_array(c) for c in coordinates]
    shape = typeof(x).shape
    if len(places) != len(shape):
        raise ShapeError(
            f"map_coordinates: needs coordinates for {len(shape)} dims, got {len(places)}"
        )
    if order not in (0, 1):
        raise RefusedError(f"map_coordinates: order={order} must be 0 or 1")
    if mode not in _MODES:
        raise RefusedError(f"map_coordinates: mode={mode!r} must be one of {', '.join(_MODES)}")
    places = promote_dtypes(*places) if places else []
    fill = snp.asarray(cval, typeof(x).dtype)
    choices = [_choices(c, order) for c in places]
    total: Any = None
    for chosen in itertools.product(*choices):
        index, weight, inside = [], None, None
        for (at, share), size in zip(chosen, shape, strict=True):
            index.append(_within(at, size, mode))
            weight = share if weight is None else share if share is None else weight * share
            if mode == "constant":
                valid = (at >= 0) & (at < size)
                inside = valid if inside is None else inside & valid
        values = x[tuple(index)]
        if inside is not None:
            values = snp.where(inside, values, fill)
        term = values if weight is None else values * weight
        total = term if total is None else total + term
    return _as_dtype(total, typeof(x).dtype)


def _choices(c: Any, order: int) -> list[tuple[Any, Any]]:
    """The elements around a coordinate, with the share of each."""
    whole = not dtypes.is_inexact(typeof(c).dtype)
    if order == 0 or whole:
        return [(c if whole else lax.round(c).astype(np.int32), None)]
    low = snp.floor(c)
    upper = c - low
    at = low.astype(np.int32)
    return [(at, 1 - upper), (at + 1, upper)]


def _within(at: Any, size: int, mode: str) -> Any:
    """The index of an element that stands for a place that may be outside."""
    if mode == "wrap":
        return at % size
    if mode in ("mirror", "reflect"):
        twice = mode == "reflect"
        period = max(2 * size if twice else 2 * (size - 1), 1)
        there = at % period
        return snp.where(there >= size, period - there - twice, there)
    return snp.clip(at, 0, size - 1)


def _as_dtype(x: Any, dtype: Any) -> Any:
    whole = np.issubdtype(dtype, np.integer) and dtypes.is_inexact(typeof(x).dtype)
    return (lax.round(x) if whole else x).astype(dtype)
