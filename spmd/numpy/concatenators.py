"""`r_` and `c_`: arrays put together, and ranges made, in the syntax of indexing.

>>> r_[np.array([1, 2]), 0, 3:6]
Array([1, 2, 0, 3, 4, 5], dtype=int32)
>>> c_[np.array([1, 2]), np.array([3, 4])]
Array([[1, 3],
       [2, 4]], dtype=int32)
"""

from __future__ import annotations

from typing import Any

from spmd import lax
from spmd.base.errors import ArgumentError
from spmd.core.aval import typeof
from spmd.numpy.creation import array
from spmd.numpy.joining import concatenate
from spmd.numpy.manipulation import expand_dims
from spmd.numpy.ranges import arange, linspace

_MATRIX = {"r": 0, "c": 1}


class _Concatenator:
    """The class of `r_` and `c_`: three numbers that say how parts become one array.

    Parts are joined along `axis` after they got `ndmin` dims; the dims of a part with fewer begin
    at `first` (-1: they are the last ones).
    """

    def __init__(self, axis: int, ndmin: int, first: int, doc: str):
        self._numbers = (axis, ndmin, first)
        self.__doc__ = doc

    def __len__(self) -> int:
        return 0

    def __getitem__(self, key: Any) -> Any:
        parts = key if isinstance(key, tuple) else (key,)
        numbers, matrix = self._numbers, None
        if isinstance(parts[0], str):
            if parts[0] in _MATRIX:
                matrix = _MATRIX[parts[0]]
            else:
                numbers = self._directive(parts[0])
            parts = parts[1:]
        axis, ndmin, first = numbers
        result = concatenate([_part(p, ndmin, first) for p in parts], axis)
        is_vector = matrix is not None and typeof(result).ndim == 1
        return expand_dims(result, matrix) if is_vector else result

    def _directive(self, text: str) -> tuple[int, ...]:
        """`"axis"`, `"axis,ndmin"` or `"axis,ndmin,first"`; further numbers are ignored."""
        try:
            given = tuple(int(word) for word in text.split(","))[:3]
        except ValueError:
            raise ArgumentError(
                f"r_, c_: the directive {text!r} must be 'r', 'c', or up to three integers "
                "'axis,ndmin,first'"
            ) from None
        return (*given, *self._numbers[len(given) :])


def _part(item: Any, ndmin: int, first: int) -> Any:
    if isinstance(item, str):
        raise ArgumentError(f"r_, c_: the directive {item!r} must come first")
    is_range = isinstance(item, slice)
    x = _range(item) if is_range else array(item)
    # A range counts as a scalar: what it is made of are numbers.
    own = 0 if is_range else typeof(x).ndim
    x = array(x, ndmin=ndmin)
    if first == -1 or ndmin <= own:
        return x
    turns = ndmin - abs(ndmin + first + 1) % ndmin
    dims = [*range(ndmin)]
    return lax.transpose(x, (*dims[turns:], *dims[:turns]))


def _range(s: slice) -> Any:
    """`start:stop:step`; an imaginary step like `5j` is a number of points, the end included."""
    start = 0 if s.start is None else s.start
    step = 1 if s.step is None else s.step
    if isinstance(step, complex):
        return linspace(start, s.stop, int(abs(step)))
    return arange(start, s.stop, step)


r_ = _Concatenator(
    0,
    1,
    -1,
    "Arrays, numbers and ranges put together along the first dim.",
)
c_ = _Concatenator(
    -1,
    2,
    0,
    "Vectors put side by side as columns.",
)
