"""Elements replaced in flat order: `put` at positions, `place` where a mask holds."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd import lax
from spmd.base.errors import ArgumentError, RefusedError, ShapeError
from spmd.core.aval import typeof
from spmd.numpy import indexing
from spmd.numpy.logic import as_bool
from spmd.numpy.manipulation import ravel
from spmd.numpy.promotion import as_array, check_arraylike, plain
from spmd.numpy.repeating import resize
from spmd.numpy.searching import flatnonzero
from spmd.numpy.selection import clip
from spmd.numpy.ufuncs import remainder
from spmd.sharding.array import Array


def _refuse_in_place(name: str, inplace: bool) -> None:
    if inplace:
        raise RefusedError(f"{name}: arrays are immutable; pass inplace=False for a new one")


def put(a: Any, ind: Any, v: Any, mode: str | None = None, *, inplace: bool = True) -> Array:
    """Copy `a` with the elements at flat positions replaced.

    `ind` are the positions, as integers; `v` are the new values, repeated as often as needed and
    converted to the dtype of `a`. The result has the shape and dtype of `a`. By default negative
    positions count from the end, and positions outside are ignored. With `mode` "clip" or "wrap"
    both are brought inside. As arrays are immutable, `inplace=False` must be given. Raises an
    `ArgumentError` without it, and for another `mode`.

    >>> put(np.zeros((2, 2)), np.array([0, 3]), np.array([5.0, 7.0]), inplace=False)
    Array([[5., 0.],
           [0., 7.]], dtype=float32)
    """
    _refuse_in_place("put", inplace)
    check_arraylike("put", a, ind, v)
    a, ind, v = as_array(plain(a)), ravel(plain(ind)), ravel(plain(v))
    if mode not in (None, "drop", "clip", "wrap"):
        raise ArgumentError(
            f"put: mode must be 'clip', 'wrap' or None (outside is ignored), got {mode!r}; "
            "values are not looked at, so 'raise' is not supported"
        )
    count = typeof(ind).size
    if not a.size or not count or not typeof(v).size:
        return a
    if mode == "clip":
        ind = clip(ind, 0, a.size - 1)
    elif mode == "wrap":
        ind = remainder(ind, a.size)
    return _written(a, ind, resize(v, count))


def place(arr: Any, mask: Any, vals: Any, *, inplace: bool = True) -> Array:
    """Copy `arr` with the elements replaced at which a mask holds.

    `mask` has as many elements as `arr`; those that are not zero hold. `vals` are the new values,
    in order, repeated as often as needed, and converted to the dtype of `arr`. The result has the
    shape and dtype of `arr`. As arrays are immutable, `inplace=False` must be given. Raises an
    `ArgumentError` without it, and a `ShapeError` if `mask` has another size or `vals` is empty.

    >>> place(np.arange(4), np.array([True, False, True, True]), np.array([8, 9]), inplace=False)
    Array([8, 1, 9, 8], dtype=int32)
    """
    _refuse_in_place("place", inplace)
    check_arraylike("place", arr, mask, vals)
    arr, mask, vals = as_array(plain(arr)), as_bool(ravel(plain(mask))), ravel(plain(vals))
    if typeof(mask).size != arr.size:
        raise ShapeError(f"place: arr has {arr.size} elements and mask {typeof(mask).size}")
    if not typeof(vals).size:
        raise ShapeError("place: vals is empty")
    if not arr.size:
        return arr
    where = flatnonzero(mask, size=arr.size, fill_value=arr.size)
    return _written(arr, where, resize(vals, arr.size))


def _written(a: Any, positions: Any, values: Any) -> Any:
    values = lax.convert_element_type(values, a.dtype)
    flat = indexing.IndexUpdateHelper(ravel(a))[positions].set(values, mode="drop")
    return lax.reshape(flat, np.shape(a))
