"""Reductions, scans and scatters of dtypes that kernels do not combine: complex ones, booleans."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.compile.definitions.table import defines, is_bool, is_complex
from spmd.core.aval import typeof
from spmd.core.primitive import Primitive
from spmd.core.structural import broadcast_in_dim, permute_dims, reshape
from spmd.lax.arithmetic import add, imag, mul, real, sub
from spmd.lax.arithmetic import complex as complex_of
from spmd.lax.array import full_like, iota
from spmd.lax.concatenate import concatenate
from spmd.lax.control_maps import associative_scan
from spmd.lax.convert import convert_element_type
from spmd.lax.cumulative import logaddexp
from spmd.lax.gather import gather_like_scatter
from spmd.lax.logic import bitwise_and, bitwise_or, eq, ge, gt, le, lt, ne, select
from spmd.lax.reduce_window import (
    reduce_window_max_p,
    reduce_window_min_p,
    reduce_window_sum_p,
)
from spmd.lax.scatter import scatter, scatter_add_p, scatter_max_p, scatter_min_p
from spmd.lax.slicing import slice_in_dim
from spmd.lax.sort import sort
from spmd.lax.windows import GatherScatterMode, ScatterDimensionNumbers

# ---- complex numbers ---------------------------------------------------------------------------


def _first_of_two(x: Any, y: Any, beyond: Callable[..., Any], not_below: Callable[..., Any]) -> Any:
    """x where it comes first by its real part, then its imaginary part, or is not a number."""
    parts = [real(x), real(y), imag(x), imag(y)]
    known = bitwise_and(*[eq(v, v) for v in parts[2:]])
    before = bitwise_and(beyond(*parts[:2]), known)
    same = bitwise_and(eq(*parts[:2]), not_below(*parts[2:]))
    return select(bitwise_or(bitwise_or(before, same), ne(x, x)), x, y)


@defines("max", when=is_complex)
def maximum(x: Any, y: Any) -> Any:
    """The larger number, compared as pairs."""
    return _first_of_two(*_alike(x, y), gt, ge)


@defines("min", when=is_complex)
def minimum(x: Any, y: Any) -> Any:
    """The smaller number, compared as pairs."""
    return _first_of_two(*_alike(x, y), lt, le)


def _alike(x: Any, y: Any) -> tuple[Any, Any]:
    """Two operands of one shape; one of them may be a scalar."""
    if typeof(x).shape == typeof(y).shape:
        return x, y
    shape = typeof(x).shape or typeof(y).shape
    return broadcast_in_dim(x, shape, ()) if not typeof(x).shape else x, (
        broadcast_in_dim(y, shape, ()) if not typeof(y).shape else y
    )


@defines("cumprod", when=is_complex)
def cumprod(x: Any, *, axis: int, reverse: bool) -> Any:
    """Products of pairs, and of pairs of pairs."""
    return associative_scan(mul, x, reverse, axis)


@defines("reduce_prod", when=is_complex)
def reduce_prod(x: Any, *, axes: tuple[int, ...]) -> Any:
    """Products of the halves, until one is left."""
    shape = typeof(x).shape
    rest = [d for d in range(len(shape)) if d not in axes]
    kept = tuple([shape[d] for d in rest])
    x = reshape(permute_dims(x, (*axes, *rest)), (math.prod(shape[d] for d in axes), *kept))
    size = typeof(x).shape[0]
    while size > 1:
        half = size // 2
        ends = slice_in_dim(x, 0, half, axis=0), slice_in_dim(x, half, 2 * half, axis=0)
        odd = slice_in_dim(x, 2 * half, size, axis=0)
        x, size = mul(*ends), half
        if typeof(odd).shape[0]:
            first = mul(slice_in_dim(x, 0, 1, axis=0), odd)
            if size == 1:
                x = first
            else:
                x = concatenate([first, slice_in_dim(x, 1, size, axis=0)], 0)
    return reshape(x, kept)


def _by_parts(prim: Primitive, arrays: Sequence[Any], places: Sequence[int], params: Any) -> Any:
    """A linear primitive of the real and of the imaginary parts of the arrays at some places."""
    parts = []
    for part in (real, imag):
        given = [part(x) if k in places else x for k, x in enumerate(arrays)]
        parts.append(prim.bind(*given, **params))
    return complex_of(*parts)


@defines("reduce_window_sum", when=is_complex)
def reduce_window_sum(x: Any, **params: Any) -> Any:
    """The sums of the parts."""
    return _by_parts(reduce_window_sum_p, [x], [0], params)


@defines("scatter_add", when=is_complex)
def scatter_add(operand: Any, indices: Any, updates: Any, **params: Any) -> Any:
    """The sums of the parts."""
    return _by_parts(scatter_add_p, [operand, indices, updates], [0, 2], params)


@defines("scatter_mul", when=is_complex)
def scatter_mul(operand: Any, indices: Any, updates: Any, **params: Any) -> Any:
    """The products of the updates of each element, which a sort brings together."""
    given, aval = typeof(operand), typeof(updates)
    # The number of the element that an update multiplies, counted from 1; 0 is none.
    numbers = reshape(iota(np.int32 if given.size < 2**31 else np.int64, given.size), given.shape)
    to = gather_like_scatter(add(numbers, numbers.dtype.type(1)), indices, aval, **params)
    size = aval.size
    to, *parts = sort([reshape(x, (size,)) for x in (to, real(updates), imag(updates))])
    differs = ne(slice_in_dim(to, 1, size, axis=0), slice_in_dim(to, 0, size - 1, axis=0))
    ends = np.ones(1, np.bool_)

    def join(x: Any, y: Any) -> Any:
        return bitwise_or(x[0], y[0]), select(y[0], y[1], mul(x[1], y[1]))

    begins = concatenate([ends, differs], 0)
    products = associative_scan(join, (begins, complex_of(*parts)))[1]
    # Only the last update of an element has its whole product; the others go nowhere.
    last = bitwise_and(concatenate([differs, ends], 0), gt(to, full_like(to, 0)))
    place = reshape(select(last, sub(to, full_like(to, 1)), full_like(to, given.size)), (size, 1))
    elements = ScatterDimensionNumbers((), (0,), (0,))
    flat = reshape(operand, (given.size,))
    read = gather_like_scatter(
        flat,
        place,
        typeof(products),
        dimension_numbers=elements,
        indices_are_sorted=False,
        unique_indices=True,
        mode=GatherScatterMode.FILL_OR_DROP,
    )
    found = scatter(flat, place, mul(read, products), elements, unique_indices=True)
    return reshape(found, given.shape)


# ---- booleans ----------------------------------------------------------------------------------


def _as_bytes(prim: Primitive) -> Callable[..., Any]:
    """The definition of an extreme of booleans: that of bytes."""

    def definition(*arrays: Any, **params: Any) -> Any:
        given = [
            convert_element_type(x, np.uint8) if typeof(x).dtype == np.bool_ else x for x in arrays
        ]
        return convert_element_type(prim.bind(*given, **params), np.bool_)

    return definition


for _prim in (reduce_window_max_p, reduce_window_min_p, scatter_max_p, scatter_min_p):
    defines(_prim.name, when=is_bool)(_as_bytes(_prim))

# ---- logarithms of sums ------------------------------------------------------------------------


@defines("cumlogsumexp")
def cumlogsumexp(x: Any, *, axis: int, reverse: bool) -> Any:
    """Sums of pairs, and of pairs of pairs; those of narrow floats are rounded at the end."""
    dtype = typeof(x).dtype
    wide = x if dtype.itemsize > 2 else convert_element_type(x, np.float32)
    found = associative_scan(logaddexp, wide, reverse, axis)
    return found if dtype.itemsize > 2 else convert_element_type(found, dtype)
