"""The parser of `x[...]`: each part of an index, and the dim of `x` that it consumes.

Parsing knows nothing of traces beyond "is this value known?"; `spmd.numpy.indexing` turns the parts
into slices, dynamic slices, gathers and scatters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, IndexingError, NonConcreteBooleanIndexError
from spmd.base.record import record
from spmd.base.source import current_source
from spmd.core.aval import is_arraylike, typeof
from spmd.core.trace import Tracer
from spmd.numpy.promotion import plain

# ---- the parts ---------------------------------------------------------------------------------


@record
class NewDim:
    """`None`: a dim of size 1 in the result that consumes none of `x`."""


@record
class Span:
    """A slice of one dim: elements `start`, `start + step`, ..., `size` of them."""

    dim: int
    start: int
    step: int
    size: int


@record
class Point:
    """One integer, not negative if it is static, that removes its dim."""

    dim: int
    at: Any

    @property
    def static(self) -> bool:
        return isinstance(self.at, int)


@record
class Table:
    """An array of integers: an advanced index of one dim."""

    dim: int
    at: Any


Part = NewDim | Span | Point | Table


@record
class IndexExpr:
    """An index, parsed for arrays of one shape.

    `inserted` dims of size 1 must be put into the array first: scalar booleans index them. Every
    dim of the array with them is consumed by one part. `adjacent` says that the advanced indices
    stand side by side, so that the dims they make take their place; else those come first.
    """

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    adjacent: bool
    inserted: tuple[int, ...] = ()

    @property
    def has_tables(self) -> bool:
        return any(isinstance(part, Table) for part in self.parts)


# ---- telling the kinds apart -------------------------------------------------------------------


def is_known(x: Any) -> bool:
    """Whether the value of an index is at hand, on this process, when the index is parsed."""
    if isinstance(x, Tracer):
        return False
    return getattr(x, "shards", None) is None


def is_mask(x: Any) -> bool:
    """Whether a part of an index is a boolean or an array of booleans."""
    return is_arraylike(x) and dtypes.is_bool(typeof(x).dtype)


def _as_tuple(index: Any) -> tuple[Any, ...]:
    """The parts of an index as the user wrote them."""
    if isinstance(index, list):
        raise IndexingError(
            f"{current_source()}: a list is no index of arrays, as NumPy's rules for lists are "
            "ambiguous and converting them is slow. Write x[array(indices)] to pick elements, or "
            "x[tuple(indices)] for one index per dim."
        )
    parts = index if isinstance(index, tuple) else (index,)
    return tuple(_plain_part(part) for part in parts)


def _plain_part(part: Any) -> Any:
    if part is None or part is Ellipsis or isinstance(part, slice):
        return part
    if isinstance(part, (list, tuple)):
        part = np.asarray(part) if part else np.zeros(0, np.int32)
    part = plain(part)
    if not is_arraylike(part):
        raise IndexingError(
            f"{current_source()}: {part!r} of type {type(part).__name__} is no index; indices are "
            "integers, slices (`:`), Ellipsis (`...`), None, and arrays of integers or booleans"
        )
    dtype = typeof(part).dtype
    if not (dtypes.is_integer(dtype) or dtypes.is_bool(dtype)):
        raise IndexingError(
            f"{current_source()}: an index must have an integer or boolean dtype, got "
            f"{typeof(part).strip_weak()}; convert it with .astype(int)"
        )
    return part


def _consumes(part: Any) -> int:
    if part is None or part is Ellipsis:
        return 0
    return typeof(part).ndim if is_mask(part) else 1


# ---- parsing -----------------------------------------------------------------------------------


def parse_index(index: Any, shape: tuple[int, ...], wrap: bool = True) -> IndexExpr:
    """Parse an index of an array of `shape`; negative numbers count from the end if `wrap`."""
    given = _as_tuple(index)
    ellipses = [k for k, part in enumerate(given) if part is Ellipsis]
    if len(ellipses) > 1:
        raise IndexingError(f"{current_source()}: an index can have only one ellipsis (`...`)")
    consumed = sum(map(_consumes, given))
    if consumed > len(shape):
        raise IndexingError(
            f"{current_source()}: too many indices: the array has shape {shape}, that is "
            f"{len(shape)} dims, but {consumed} were indexed"
        )
    fill = [slice(None)] * (len(shape) - consumed)
    at = ellipses[0] if ellipses else len(given)
    adjacent = _adjacent(given)
    parser = _Parser(shape, wrap)
    for part in (*given[:at], *fill, *given[at + 1 :]):
        parser.take(part)
    return IndexExpr(tuple(parser.shape), tuple(parser.parts), adjacent, tuple(parser.inserted))


def _adjacent(given: Sequence[Any]) -> bool:
    """Whether no slice, None or ellipsis stands between two advanced indices."""
    advanced = [
        k for k, part in enumerate(given) if not (_is_basic(part) or isinstance(part, slice))
    ]
    return not advanced or advanced[-1] - advanced[0] + 1 == len(advanced)


def _is_basic(part: Any) -> bool:
    return part is None or part is Ellipsis


class _Parser:
    """Walks over an index and the dims of the array at once."""

    def __init__(self, shape: tuple[int, ...], wrap: bool):
        self.shape = list(shape)
        self.wrap = wrap
        self.parts: list[Part] = []
        self.inserted: list[int] = []
        self.dim = 0

    def take(self, part: Any) -> None:
        if part is None:
            self.parts.append(NewDim())
        elif is_mask(part):
            self.mask(part)
        elif isinstance(part, slice):
            self.parts.append(_span(part, self.dim, self.shape[self.dim]))
            self.dim += 1
        elif typeof(part).ndim == 0:
            self.parts.append(self.point(part))
            self.dim += 1
        else:
            self.parts.append(Table(self.dim, self.wrapped(part)))
            self.dim += 1

    def point(self, value: Any) -> Point:
        size = self.shape[self.dim]
        if size == 0:
            raise IndexingError(
                f"{current_source()}: an integer index is out of bounds for dim {self.dim}, which "
                "has size 0"
            )
        if is_known(value):
            value = int(np.asarray(value))
            return Point(self.dim, value + size if self.wrap and value < 0 else value)
        return Point(self.dim, self.wrapped(value))

    def wrapped(self, indices: Any) -> Any:
        """Integers with the negative ones counted from the end of the current dim."""
        size = self.shape[self.dim]
        if is_known(indices):
            values = np.asarray(indices)
            if dtypes.is_unsigned(values.dtype):
                return values
            values = values.astype(np.int64)
            return np.where(values < 0, values + size, values) if self.wrap else values
        if dtypes.is_unsigned(typeof(indices).dtype):
            return indices
        if typeof(indices).dtype.itemsize < 4:
            indices = lax.convert_element_type(indices, np.int32)
        if not self.wrap:
            return indices
        return lax.select(lax.lt(indices, 0), lax.add(indices, size), indices)

    def mask(self, mask: Any) -> None:
        aval = typeof(mask)
        if isinstance(mask, Tracer):
            raise NonConcreteBooleanIndexError(
                f"{current_source()}: a traced boolean mask, {aval}, is used as an index, but the "
                "shape of the result would depend on its values. Use spmd.numpy.where(mask, x, y) "
                "to keep the shape, x.at[mask].set(scalar) to update, or spmd.numpy.nonzero(mask, "
                "size=n) for a result of fixed size."
            )
        if aval.ndim == 0:
            self.shape.insert(self.dim, 1)
            self.inserted.append(self.dim)
            self.parts.append(Table(self.dim, np.arange(int(bool(mask)))))
            self.dim += 1
            return
        expected = tuple(self.shape[self.dim : self.dim + aval.ndim])
        if aval.shape != expected:
            raise IndexingError(
                f"{current_source()}: a boolean index of shape {aval.shape} must have the shape of "
                f"the dims that it indexes, {expected}"
            )
        for where in np.nonzero(np.asarray(mask)):
            self.parts.append(Table(self.dim, where))
            self.dim += 1


def _span(part: slice, dim: int, size: int) -> Span:
    bounds = []
    for bound in (part.start, part.stop, part.step):
        if isinstance(bound, Tracer) and bound.concrete() is None:
            raise IndexingError(
                f"{current_source()}: the bounds of a slice must be static, as they make the "
                f"result's shape; got {part.start}:{part.stop}:{part.step}. For a slice of static "
                "size at a traced position use lax.dynamic_slice(x, start, sizes), and "
                "lax.dynamic_update_slice to write one; or mark the bound static (static_argnums)."
            )
        try:
            bounds.append(bound if bound is None else bound.__index__())
        except (AttributeError, TypeError):
            raise IndexingError(
                f"{current_source()}: the bounds of a slice must be integers or None, got {bound!r}"
            ) from None
    if bounds[2] == 0:
        raise ArgumentError(f"{current_source()}: the step of a slice must not be zero")
    start, stop, step = slice(*bounds).indices(size)
    return Span(dim, start, step, len(range(start, stop, step)))
