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
    optional_dtype,
    plain,
    promote_dtypes,
)
from spmd.numpy.reductions import canonical_axis

# ---- putting together --------------------------------------------------------------------------


def _array_list(name: str, arrays: Any) -> list[Any]:
    if is_arraylike(arrays) and typeof(arrays).ndim:
        arrays = unstack(arrays)
    if not isinstance(arrays, (list, tuple)):
        raise ArgumentError(f"{name}: the arrays must be given as a list or tuple, got {arrays!r}")
    if not arrays:
        raise ArgumentError(f"{name}: need at least one array to {name}")
    check_arraylike(name, *arrays)
    return [plain(a) for a in arrays]


def concatenate(arrays: Any, axis: int | None = 0, dtype: Any = None) -> Any:
    """Join arrays along an existing dim; flattened first if `axis` is None."""
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


def concat(arrays: Any, /, *, axis: int | None = 0) -> Any:
    """Join arrays along an existing dim: `concatenate` as the array API standard names it."""
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


def stack(arrays: Any, axis: int = 0, out: None = None, dtype: Any = None) -> Any:
    """Join arrays of one shape along a new dim."""
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


def vstack(tup: Any, dtype: Any = None) -> Any:
    """Join arrays as rows."""
    return concatenate([atleast_2d(a) for a in _array_list("vstack", tup)], 0, dtype)


def hstack(tup: Any, dtype: Any = None) -> Any:
    """Join arrays side by side: along the second dim, vectors along the first."""
    items = [atleast_1d(a) for a in _array_list("hstack", tup)]
    return concatenate(items, 0 if typeof(items[0]).ndim == 1 else 1, dtype)


def dstack(tup: Any, dtype: Any = None) -> Any:
    """Join arrays along the third dim."""
    return concatenate([atleast_3d(a) for a in _array_list("dstack", tup)], 2, dtype)


def column_stack(tup: Any) -> Any:
    """Join vectors as columns of a matrix."""
    items = _array_list("column_stack", tup)
    columns = [a if typeof(a).ndim >= 2 else reshape(a, (-1, 1)) for a in items]
    return concatenate(columns, 1)


def append(arr: Any, values: Any, axis: int | None = None) -> Any:
    """`arr` followed by `values`."""
    return concatenate([arr, values], axis)


def block(arrays: Any) -> Any:
    """A matrix of blocks, given as nested lists."""
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


def unstack(x: Any, /, *, axis: int = 0) -> tuple[Any, ...]:
    """The slices along a dim, as a tuple."""
    check_arraylike("unstack", x)
    x = plain(x)
    d = canonical_axis(axis, typeof(x).ndim, "unstack")
    return tuple(
        lax.squeeze(lax.slice_in_dim(x, k, k + 1, axis=d), (d,)) for k in range(typeof(x).shape[d])
    )


def array_split(ary: Any, indices_or_sections: Any, axis: int = 0) -> list[Any]:
    """Split into nearly equal parts, or at the given indices."""
    return _split("array_split", ary, indices_or_sections, axis, equal=False)


def split(ary: Any, indices_or_sections: Any, axis: int = 0) -> list[Any]:
    """Split into equal parts, or at the given indices."""
    return _split("split", ary, indices_or_sections, axis, equal=True)


def vsplit(ary: Any, indices_or_sections: Any) -> list[Any]:
    """Split along the first dim."""
    return _split("vsplit", ary, indices_or_sections, 0, equal=True)


def hsplit(ary: Any, indices_or_sections: Any) -> list[Any]:
    """Split along the second dim; vectors along the first."""
    axis = 0 if typeof(plain(ary)).ndim == 1 else 1
    return _split("hsplit", ary, indices_or_sections, axis, equal=True)


def dsplit(ary: Any, indices_or_sections: Any) -> list[Any]:
    """Split along the third dim."""
    return _split("dsplit", ary, indices_or_sections, 2, equal=True)


def _split(name: str, a: Any, where: Any, axis: int, equal: bool) -> list[Any]:
    check_arraylike(name, a)
    a = plain(a)
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
