"""Arrays in another shape or order: `reshape`, `transpose`, `squeeze`, `flip`, `broadcast_to`.

No element is changed; joining and repeating are in `joining.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd import lax
from spmd.base.errors import ArgumentError, ConcretizationError, ShapeError
from spmd.base.source import current_source
from spmd.base.util import product
from spmd.compile.dispatch.eager_cache import cached_options
from spmd.core.aval import typeof
from spmd.core.structural import move_dim
from spmd.numpy import promotion
from spmd.numpy.creation import canonical_shape
from spmd.numpy.promotion import as_array, broadcast_shapes_of, check_arraylike, plain
from spmd.numpy.reductions import Axis, canonical_axes, canonical_axis

# ---- shapes ------------------------------------------------------------------------------------


def shape(a: Any) -> tuple[int, ...]:
    """The shape of an array or number."""
    check_arraylike("shape", a)
    return typeof(plain(a)).shape


def ndim(a: Any) -> int:
    """How many dims an array has."""
    check_arraylike("ndim", a)
    return typeof(plain(a)).ndim


def size(a: Any, axis: Axis = None) -> int:
    """How many elements an array has, or how many along some dims."""
    check_arraylike("size", a)
    sizes = typeof(plain(a)).shape
    return product(sizes[d] for d in canonical_axes(axis, len(sizes), "size"))


@cached_options
def reshape(a: Any, shape: Any = None, order: str = "C", *, copy: bool | None = None) -> Any:
    """Give the elements another shape; one size may be -1 and is then computed.

    >>> reshape(arange(6), (2, -1)).shape
    (2, 3)
    """
    check_arraylike("reshape", a)
    a = plain(a)
    new_shape = _new_shape(typeof(a).shape, shape)
    if order == "C":
        return as_array(lax.reshape(a, new_shape))
    if order == "F":
        backwards = range(typeof(a).ndim)[::-1]
        return transpose(lax.reshape(a, new_shape[::-1], tuple(backwards)))
    raise ArgumentError(f"reshape: order must be 'C' or 'F', got {order!r}")


def _new_shape(old: tuple[int, ...], shape: Any) -> tuple[int, ...]:
    try:
        sizes = [operator.index(d) for d in (shape if np.iterable(shape) else (shape,))]
    except ConcretizationError:
        raise
    except TypeError:
        raise ArgumentError(f"reshape: a shape must consist of integers, got {shape!r}") from None
    total = product(old)
    unknown = [k for k, d in enumerate(sizes) if d == -1]
    if len(unknown) > 1:
        raise ShapeError(f"reshape: only one size can be -1, got {tuple(sizes)}")
    known = product(d for d in sizes if d != -1)
    fits = known and total % known == 0 if unknown else known == total
    if not fits or any(d < -1 for d in sizes):
        raise ShapeError(
            f"{current_source()}: cannot reshape array of shape {old} (size {total}) into shape "
            f"{tuple(sizes)} (size {'a multiple of ' if unknown else ''}{known})"
        )
    if unknown:
        sizes[unknown[0]] = total // known
    return tuple(sizes)


@cached_options
def ravel(a: Any, order: str = "C") -> Any:
    """All elements in one dim."""
    check_arraylike("ravel", a)
    if order == "K":
        raise ArgumentError("ravel: order='K' is not supported; use 'C' or 'F'")
    return reshape(a, (typeof(plain(a)).size,), order)


@cached_options
def squeeze(a: Any, axis: Axis = None) -> Any:
    """Drop dims of size 1: all of them, or those given."""
    check_arraylike("squeeze", a)
    a = plain(a)
    sizes = typeof(a).shape
    if axis is None:
        dims = tuple(d for d, n in enumerate(sizes) if n == 1)
    else:
        dims = canonical_axes(axis, len(sizes), "squeeze")
    wrong = [d for d in dims if sizes[d] != 1]
    if wrong:
        raise ShapeError(
            f"squeeze: cannot select an axis to squeeze out which has size not equal to one, got "
            f"shape {sizes} and axis {wrong[0]} (size {sizes[wrong[0]]})"
        )
    return as_array(lax.squeeze(a, dims))


@cached_options
def expand_dims(a: Any, axis: Any) -> Any:
    """Insert dims of size 1, at the given positions of the result."""
    check_arraylike("expand_dims", a)
    a = plain(a)
    many = axis if isinstance(axis, (tuple, list)) else (axis,)
    dims = canonical_axes(many, typeof(a).ndim + len(many), "expand_dims")
    return as_array(lax.expand_dims(a, dims))


def atleast_1d(*arrays: Any) -> Any:
    """Arrays with at least one dim."""
    return _each("atleast_1d", arrays, lambda a, n: a if n >= 1 else lax.reshape(a, (1,)))


def atleast_2d(*arrays: Any) -> Any:
    """Arrays with at least two dims; new ones are put in front."""

    def raised(a: Any, n: int) -> Any:
        return a if n >= 2 else lax.reshape(a, (1,) * (2 - n) + typeof(a).shape)

    return _each("atleast_2d", arrays, raised)


def atleast_3d(*arrays: Any) -> Any:
    """Arrays with at least three dims; a matrix gets one behind, a vector one at each side."""

    def raised(a: Any, n: int) -> Any:
        sizes = typeof(a).shape
        wanted = {0: (1, 1, 1), 1: (1, *sizes, 1), 2: (*sizes, 1)}
        return lax.reshape(a, wanted[n]) if n in wanted else a

    return _each("atleast_3d", arrays, raised)


def _each(name: str, arrays: Sequence[Any], raised: Any) -> Any:
    # The array API has one array, NumPy any number: a list only if there are several.
    if len(arrays) == 1 and isinstance(arrays[0], (tuple, list)):
        return [as_array(raised(np.asarray(a), np.ndim(a))) for a in arrays[0]]
    check_arraylike(name, *arrays)
    results = [as_array(raised(a, typeof(a).ndim)) for a in map(plain, arrays)]
    return results[0] if len(results) == 1 else results


# ---- broadcasting ------------------------------------------------------------------------------


def broadcast_to(array: Any, shape: Any) -> Any:
    """`array` repeated to a shape by NumPy's rules."""
    check_arraylike("broadcast_to", array)
    array = plain(array)
    target = canonical_shape(shape, "broadcast_to")
    old = typeof(array).shape
    fits = len(old) <= len(target)
    if not fits or broadcast_shapes_of("broadcast_to", [old, target]) != target:
        raise ShapeError(f"broadcast_to: incompatible shapes for broadcasting: {old} to {target}")
    return as_array(promotion.broadcast_to(array, target))


def broadcast_arrays(*args: Any) -> list[Any]:
    """All arrays repeated to their common shape."""
    check_arraylike("broadcast_arrays", *args)
    arrays = [plain(a) for a in args]
    target = broadcast_shapes_of("broadcast_arrays", [typeof(a).shape for a in arrays])
    return [as_array(promotion.broadcast_to(a, target)) for a in arrays]


# ---- order of dims -----------------------------------------------------------------------------


@cached_options
def transpose(a: Any, axes: Sequence[int] | None = None) -> Any:
    """Reverse the dims, or put them in the order `axes`."""
    check_arraylike("transpose", a)
    a = plain(a)
    n = typeof(a).ndim
    if axes is None:
        order: tuple[int, ...] = tuple(range(n))[::-1]
    else:
        order = canonical_axes(axes, n, "transpose")
        if len(order) != n:
            raise ShapeError(f"transpose: axes={axes} must name each of the {n} dims once")
    return as_array(lax.transpose(a, order))


def permute_dims(a: Any, /, axes: Any) -> Any:
    """Reorder the dims: `transpose` as the array API standard names it."""
    return transpose(a, axes)


def matrix_transpose(x: Any, /) -> Any:
    """Swap the last two dims."""
    check_arraylike("matrix_transpose", x)
    if typeof(plain(x)).ndim < 2:
        raise ShapeError(f"matrix_transpose: at least 2 dims are needed, got {typeof(plain(x))}")
    return swapaxes(x, -1, -2)


@cached_options
def swapaxes(a: Any, axis1: int, axis2: int) -> Any:
    """Exchange two dims."""
    check_arraylike("swapaxes", a)
    a = plain(a)
    n = typeof(a).ndim
    d1, d2 = canonical_axis(axis1, n, "swapaxes"), canonical_axis(axis2, n, "swapaxes")
    order = list(range(n))
    order[d1], order[d2] = order[d2], order[d1]
    return as_array(lax.transpose(a, order))


def moveaxis(a: Any, source: Axis, destination: Axis) -> Any:
    """Move dims to other positions, the rest keeping their order."""
    check_arraylike("moveaxis", a)
    a = plain(a)
    n = typeof(a).ndim
    origin = canonical_axes(source, n, "moveaxis")
    target = canonical_axes(destination, n, "moveaxis")
    if len(origin) != len(target):
        raise ShapeError(
            f"moveaxis: source={source} and destination={destination} must have equally many dims"
        )
    order = [d for d in range(n) if d not in origin]
    for at, d in sorted(zip(target, origin, strict=True)):
        order.insert(at, d)
    return as_array(lax.transpose(a, order))


def rollaxis(a: Any, axis: int, start: int = 0) -> Any:
    """Move a dim back until it lies before position `start`."""
    n = typeof(a).ndim
    d = canonical_axis(axis, n, "rollaxis")
    at = start + n if start < 0 else start
    return as_array(move_dim(plain(a), d, at - 1 if d < at else at))


# ---- order of elements -------------------------------------------------------------------------


def flip(m: Any, axis: Axis = None) -> Any:
    """Reverse the elements along dims, all by default."""
    check_arraylike("flip", m)
    m = plain(m)
    return as_array(lax.rev(m, canonical_axes(axis, typeof(m).ndim, "flip")))


def flipud(m: Any) -> Any:
    """Reverse along the first dim."""
    return flip(m, 0)


def fliplr(m: Any) -> Any:
    """Reverse along the second dim."""
    return flip(m, 1)


def rot90(m: Any, k: int = 1, axes: tuple[int, int] = (0, 1)) -> Any:
    """Turn by 90 degrees, `k` times, from the first of `axes` towards the second."""
    check_arraylike("rot90", m)
    m = plain(m)
    d1, d2 = canonical_axes(axes, typeof(m).ndim, "rot90")
    turns = k % 4
    if turns == 0:
        return as_array(m)
    if turns == 2:
        return flip(m, (d1, d2))
    if turns == 1:
        return swapaxes(flip(m, d2), d1, d2)
    return flip(swapaxes(m, d1, d2), d2)


def roll(a: Any, shift: Any, axis: Axis = None) -> Any:
    """Move elements along dims; those that leave at one end come back at the other.

    `shift` and `axis` may have several entries, one for each other; a dim that is named twice is
    moved twice.

    >>> roll(arange(4), 1)
    Array([3, 0, 1, 2], dtype=int32)
    """
    check_arraylike("roll", a)
    a = plain(a)
    if axis is None:
        return reshape(roll(ravel(a), shift, 0), typeof(a).shape)
    many = axis if isinstance(axis, (tuple, list, np.ndarray)) else (axis,)
    dims = [canonical_axis(d, typeof(a).ndim, "roll") for d in many]
    shifts = _shifts(plain(shift))
    if len(shifts) != len(dims) and 1 not in (len(shifts), len(dims)):
        raise ShapeError(
            f"{current_source()}: roll: shift={shift} and axis={axis} must have equally many "
            "entries, or one of them a single one"
        )
    # One entry stands for as many as the other has, as when arrays broadcast.
    count = len(dims) if len(shifts) == 1 else len(shifts)
    shifts = shifts * count if len(shifts) == 1 else shifts
    dims = dims * count if len(dims) == 1 else dims
    for step, d in zip(shifts, dims, strict=True):
        a = _rolled(a, step, d)
    return as_array(a)


def _shifts(shift: Any) -> list[Any]:
    """The entries of a roll's shift: a number, a sequence of them, or an array of rank 0 or 1."""
    if isinstance(shift, (tuple, list)):
        return list(shift)
    aval = typeof(shift)
    if aval.ndim > 1:
        raise ShapeError(
            f"{current_source()}: roll: shift={aval} must be a number, or one for each axis"
        )
    return [shift[k] for k in range(aval.shape[0])] if aval.ndim else [shift]


def _rolled(a: Any, shift: Any, d: int) -> Any:
    n = typeof(a).shape[d]
    if n == 0:
        return a
    try:
        by = operator.index(shift) % n
    except ConcretizationError:
        return _rolled_by_traced(a, shift, d, n)
    if by == 0:
        return a
    head = lax.slice_in_dim(a, n - by, n, axis=d)
    return lax.concatenate([head, lax.slice_in_dim(a, 0, n - by, axis=d)], d)


def _rolled_by_traced(a: Any, shift: Any, d: int, n: int) -> Any:
    """A window of the doubled array, that starts where the first element comes from."""
    start = lax.rem(shift, np.array(n, typeof(shift).dtype))
    start = lax.rem(
        lax.sub(np.array(n, typeof(shift).dtype), start), np.array(n, typeof(shift).dtype)
    )
    return lax.dynamic_slice_in_dim(lax.concatenate([a, a], d), start, n, axis=d)
