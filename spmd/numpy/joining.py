"""Arrays put together and taken apart: `concatenate`, `stack`, `block`, `split`, `unstack`."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd import lax
from spmd.base.errors import ArgumentError, ConcretizationError, ShapeError
from spmd.base.source import current_source
from spmd.core.aval import is_arraylike, typeof
from spmd.core.trace import Tracer
from spmd.numpy.manipulation import atleast_1d, atleast_2d, atleast_3d, ravel, reshape
from spmd.numpy.promotion import (
    as_array,
    check_arraylike,
    convert,
    operand,
    optional_dtype,
    plain,
    promote_dtypes,
)
from spmd.numpy.reductions import canonical_axis
from spmd.sharding.array import Array, ArrayLike

# ---- putting together --------------------------------------------------------------------------


def _array_list(name: str, arrays: Any) -> list[Array]:
    if is_arraylike(arrays) and typeof(arrays).ndim:
        arrays = unstack(arrays)
    try:
        if is_arraylike(arrays) or not hasattr(arrays, "__len__"):
            raise TypeError
        arrays = list(arrays)  # of a library's own class of sequences, too
    except TypeError:
        raise ArgumentError(
            f"{name}: the arrays must be given as a list or tuple, got {arrays!r}"
        ) from None
    if not arrays:
        raise ArgumentError(f"{name}: need at least one array to {name}")
    check_arraylike(name, *arrays)
    return [plain(a) for a in arrays]


def concatenate(arrays: Any, axis: int | None = 0, dtype: Any = None) -> Array:
    """Join arrays along a dim that they have.

    `arrays` is a list or tuple, or one array whose first dim is taken apart. Their shapes agree in
    all dims but `axis`; with `axis=None` they are flattened first. They are promoted to one dtype,
    or converted to `dtype`. Raises a `ShapeError` if the shapes do not fit, and an `ArgumentError`
    if there are no arrays or they are not in a list.

    >>> snp.concatenate([np.array([1, 2]), np.array([3.5])])
    Array([1. , 2. , 3.5], dtype=float32)
    """
    if is_arraylike(axis) and typeof(axis).ndim:
        raise ArgumentError(
            "concatenate: axis must be an integer, got an array; give the arrays as one list: "
            "concatenate([a, b])"
        )
    items = _array_list("concatenate", arrays)
    if axis is None:
        items, axis = [ravel(a) for a in items], 0
    ranks = {typeof(a).ndim for a in items}
    if 0 in ranks:
        raise ShapeError("concatenate: zero-dimensional arrays cannot be concatenated; use stack")
    d = canonical_axis(axis, max(ranks), "concatenate")
    _check_joinable("concatenate", items, d)
    wanted = optional_dtype(dtype, "concatenate")
    if wanted is None:
        items = promote_dtypes(*items)
    else:
        items = [convert(a, wanted) for a in items]
    return as_array(items[0]) if len(items) == 1 else lax.concatenate(items, d)


def concat(arrays: Any, /, *, axis: int | None = 0) -> Array:
    """Join arrays along a dim that they have: `concatenate` as the array API standard names it.

    The shapes of `arrays` agree in all dims but `axis`; they are promoted to one dtype.

    >>> snp.concat([np.array([1, 2]), np.array([3])])
    Array([1, 2, 3], dtype=int32)
    """
    return concatenate(arrays, axis)


def _check_joinable(name: str, items: Sequence[Any], d: int) -> None:
    first = typeof(items[0]).shape
    for k, a in enumerate(items):
        other = typeof(a).shape
        others_agree = (*first[:d], *first[d + 1 :]) == (*other[:d], *other[d + 1 :])
        if len(other) != len(first) or not others_agree:
            raise ShapeError(
                f"{name}: shapes must agree in all dims but {d}, got {first} (array 0) and {other} "
                f"(array {k})\nAt {current_source()}."
            )


def stack(arrays: Any, axis: int = 0, out: None = None, dtype: Any = None) -> Array:
    """Join arrays of one shape along a new dim.

    `axis` is the position of the new dim in the result. The `arrays` are promoted to one dtype, or
    converted to `dtype`. Raises a `ShapeError` if their shapes differ.

    >>> snp.stack([np.array([1, 2]), np.array([3, 4])], axis=1)
    Array([[1, 3],
           [2, 4]], dtype=int32)
    """
    items = _array_list("stack", arrays)
    shapes = list(dict.fromkeys(typeof(a).shape for a in items))
    if len(shapes) > 1:
        raise ShapeError(
            f"stack: all arrays must have the same shape, got {', '.join(map(str, shapes))}\n"
            f"At {current_source()}."
        )
    d = canonical_axis(axis, len(shapes[0]) + 1, "stack")
    row = (*shapes[0][:d], 1, *shapes[0][d:])
    return concatenate([lax.reshape(a, row) for a in items], d, dtype)


def vstack(tup: Any, dtype: Any = None) -> Array:
    """Join arrays along the first dim; vectors are rows.

    The arrays of the list `tup` are promoted to one dtype, or converted to `dtype`; their other
    dims have equal sizes.

    >>> snp.vstack([np.array([1, 2]), np.array([3, 4])])
    Array([[1, 2],
           [3, 4]], dtype=int32)
    """
    return concatenate([atleast_2d(a) for a in _array_list("vstack", tup)], 0, dtype)


def hstack(tup: Any, dtype: Any = None) -> Array:
    """Join arrays along the second dim, vectors along their only one.

    The arrays of the list `tup` are promoted to one dtype, or converted to `dtype`; their other
    dims have equal sizes.

    >>> snp.hstack([np.array([1, 2]), np.array([3, 4])])
    Array([1, 2, 3, 4], dtype=int32)
    """
    items = [atleast_1d(a) for a in _array_list("hstack", tup)]
    return concatenate(items, 0 if typeof(items[0]).ndim == 1 else 1, dtype)


def dstack(tup: Any, dtype: Any = None) -> Array:
    """Join arrays along the third dim.

    The arrays of the list `tup` get three dims by `atleast_3d`; they are promoted to one dtype, or
    converted to `dtype`.

    >>> snp.dstack([np.array([1, 2]), np.array([3, 4])]).shape
    (1, 2, 2)
    """
    return concatenate([atleast_3d(a) for a in _array_list("dstack", tup)], 2, dtype)


def column_stack(tup: Any) -> Array:
    """Join vectors as the columns of a matrix; matrices contribute all of their columns.

    The arrays of the list `tup` have first dims of equal size and are promoted to one dtype.

    >>> snp.column_stack([np.array([1, 2]), np.array([3, 4])])
    Array([[1, 3],
           [2, 4]], dtype=int32)
    """
    items = _array_list("column_stack", tup)
    columns = [a if typeof(a).ndim >= 2 else reshape(a, (-1, 1)) for a in items]
    return concatenate(columns, 1)


def append(arr: ArrayLike, values: ArrayLike, axis: int | None = None) -> Array:
    """Join two arrays, `arr` and `values` behind it, along a dim.

    Their shapes agree in all dims but `axis`; with `axis=None` both are flattened. They are
    promoted to one dtype.

    >>> snp.append(np.array([1, 2]), np.array([3]))
    Array([1, 2, 3], dtype=int32)
    """
    return concatenate([arr, values], axis)


def block(arrays: Any) -> Array:
    """Join blocks, given as nested lists, to one array.

    The innermost lists of `arrays` are joined along the last dim, those around them along the last
    but one, and so on. The blocks are promoted to one dtype.

    >>> snp.block([[np.ones((2, 2)), np.zeros((2, 1))]])
    Array([[1., 1., 0.],
           [1., 1., 0.]], dtype=float32)
    """
    depth = _depth(arrays)

    def join(x: Any, level: int) -> Any:
        if not isinstance(x, list):
            return x
        parts = [join(item, level + 1) for item in x]
        rank = max(depth, *(typeof(p).ndim for p in parts))
        whole = [reshape(p, (1,) * (rank - typeof(p).ndim) + typeof(p).shape) for p in parts]
        return concatenate(whole, level - depth)

    return as_array(join(arrays, 0))


def _depth(x: Any) -> int:
    if not isinstance(x, list):
        return 0
    if not x:
        raise ArgumentError("block: lists must not be empty")
    return 1 + max(_depth(item) for item in x)


# ---- taking apart ------------------------------------------------------------------------------


def unstack(x: ArrayLike, /, *, axis: int = 0) -> tuple[Array, ...]:
    """Take an array apart along a dim, into a tuple of arrays without it.

    `axis` is the dim; the dtype stays.

    >>> snp.unstack(np.array([[1, 2], [3, 4]]))
    (Array([1, 2], dtype=int32), Array([3, 4], dtype=int32))
    """
    x = operand("unstack", x)
    d = canonical_axis(axis, typeof(x).ndim, "unstack")
    return tuple(
        lax.squeeze(lax.slice_in_dim(x, k, k + 1, axis=d), (d,)) for k in range(typeof(x).shape[d])
    )


def array_split(ary: ArrayLike, indices_or_sections: Any, axis: int = 0) -> list[Array]:
    """Split an array along a dim into parts of nearly equal size.

    `indices_or_sections` is the number of parts, of which the first ones are larger by one, or a
    list of the positions at which `ary` is cut. The dtype stays.

    >>> snp.array_split(np.arange(5), 2)
    [Array([0, 1, 2], dtype=int32), Array([3, 4], dtype=int32)]
    """
    return _split("array_split", ary, indices_or_sections, axis, equal=False)


def split(ary: ArrayLike, indices_or_sections: Any, axis: int = 0) -> list[Array]:
    """Split an array along a dim into parts of equal size.

    `indices_or_sections` is the number of parts, or a list of the positions at which `ary` is cut.
    The result is a list of arrays of the same dtype. Raises a `ShapeError` if the size of dim
    `axis` is not a multiple of the number.

    >>> snp.split(np.arange(4), 2)
    [Array([0, 1], dtype=int32), Array([2, 3], dtype=int32)]
    >>> snp.split(np.arange(4), [1])
    [Array([0], dtype=int32), Array([1, 2, 3], dtype=int32)]
    """
    return _split("split", ary, indices_or_sections, axis, equal=True)


def vsplit(ary: ArrayLike, indices_or_sections: Any) -> list[Array]:
    """Split an array along the first dim into parts of equal size.

    `ary` and `indices_or_sections` are those of `split`; the dtype stays.

    >>> snp.vsplit(np.array([[1, 2], [3, 4]]), 2)
    [Array([[1, 2]], dtype=int32), Array([[3, 4]], dtype=int32)]
    """
    return _split("vsplit", ary, indices_or_sections, 0, equal=True)


def hsplit(ary: ArrayLike, indices_or_sections: Any) -> list[Array]:
    """Split an array along the second dim, vectors along their only one, into parts of equal size.

    `ary` and `indices_or_sections` are those of `split`; the dtype stays.

    >>> snp.hsplit(np.array([1, 2, 3, 4]), 2)
    [Array([1, 2], dtype=int32), Array([3, 4], dtype=int32)]
    """
    axis = 0 if typeof(plain(ary)).ndim == 1 else 1
    return _split("hsplit", ary, indices_or_sections, axis, equal=True)


def dsplit(ary: ArrayLike, indices_or_sections: Any) -> list[Array]:
    """Split an array along the third dim into parts of equal size.

    `ary` and `indices_or_sections` are those of `split`; the dtype stays.

    >>> [x.shape for x in snp.dsplit(np.zeros((2, 3, 4)), 2)]
    [(2, 3, 2), (2, 3, 2)]
    """
    return _split("dsplit", ary, indices_or_sections, 2, equal=True)


def _split(name: str, a: Any, where: Any, axis: int, equal: bool) -> list[Array]:
    a = operand(name, a)
    d = canonical_axis(axis, typeof(a).ndim, name)
    n = typeof(a).shape[d]
    if isinstance(where, Tracer):
        raise ConcretizationError(f"{name}: where to split must be concrete, got {where!r}")
    if np.ndim(where) == 0:
        parts = operator.index(where)
        if equal and n % parts:
            raise ShapeError(
                f"{name}: array split does not result in an equal division: dim {d} of size {n} "
                f"into {parts} parts; array_split allows unequal ones"
            )
        small, larger = divmod(n, parts)
        cuts = np.cumsum([0, *([small + 1] * larger), *([small] * (parts - larger))]).tolist()
    else:
        inner = [operator.index(i) for i in np.asarray(where)]
        cuts = [0, *(min(max(i + n if i < 0 else i, 0), n) for i in inner), n]
    return [
        as_array(lax.slice_in_dim(a, start, max(start, stop), axis=d))
        for start, stop in itertools.pairwise(cuts)
    ]
