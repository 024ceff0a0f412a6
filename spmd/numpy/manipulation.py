"""Arrays in another shape or order: `reshape`, `transpose`, `squeeze`, `flip`, `broadcast_to`.

No element is changed; joining and repeating are in `joining.py`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd import lax
from spmd.base.errors import ArgumentError, ConcretizationError, RefusedError, ShapeError
from spmd.base.source import current_source
from spmd.compile.dispatch.eager_cache import cached_options
from spmd.core.aval import typeof
from spmd.core.explicit import hooks, lays_out_result
from spmd.core.structural import move_dim
from spmd.numpy import promotion
from spmd.numpy.creation import canonical_shape
from spmd.numpy.programs import one_program
from spmd.numpy.promotion import as_array, broadcast_shapes_of, check_arraylike, operand, plain
from spmd.numpy.reductions import Axis, canonical_axes, canonical_axis
from spmd.sharding.array import Array, ArrayLike

# ---- shapes ------------------------------------------------------------------------------------


def shape(a: ArrayLike) -> tuple[int, ...]:
    """The shape of an array or number: a tuple with the size of each dim.

    It does not depend on the dtype, and is known for traced arrays too. As in NumPy, None has no
    dims.

    >>> snp.shape(np.zeros((2, 3)))
    (2, 3)
    """
    return _shape_of("shape", a)


def _shape_of(name: str, a: Any) -> tuple[int, ...]:
    """The shape of an argument of function `name`; that of None is (), and sequences have one."""
    if a is None:
        return ()
    if isinstance(a, (list, tuple)):
        return np.shape(a)
    return typeof(operand(name, a)).shape


def ndim(a: ArrayLike) -> int:
    """The number of dims of an array, 0 for numbers of any dtype and for None.

    >>> snp.ndim(np.zeros((2, 3)))
    2
    """
    return len(_shape_of("ndim", a))


def size(a: ArrayLike, axis: Axis = None) -> int:
    """The number of elements of an array of any dtype, or along the dims of `axis`; 1 for None.

    >>> snp.size(np.zeros((2, 3))), snp.size(np.zeros((2, 3)), 1)
    (6, 3)
    """
    sizes = _shape_of("size", a)
    return math.prod(sizes[d] for d in canonical_axes(axis, len(sizes), "size"))


@cached_options
@lays_out_result
def reshape(
    a: ArrayLike,
    shape: Any = None,
    order: str = "C",
    *,
    copy: bool | None = None,
    out_sharding: Any = None,
) -> Array:
    """Give the elements another shape, in the same order.

    `shape` is an integer or a tuple of integers; one size may be -1 and is then computed.
    `order` is "C" for row-major order or "F" for column-major order. The dtype stays; `copy`
    changes nothing, as arrays are immutable. `out_sharding`, a sharding or spec over `Explicit`
    mesh axes, is the layout of the result. Raises a `ShapeError` if the sizes do not fit, and
    an `ArgumentError` for another `order`.

    >>> snp.reshape(np.arange(6), (2, -1))
    Array([[0, 1, 2],
           [3, 4, 5]], dtype=int32)
    """
    a = operand("reshape", a)
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
    total = math.prod(old)
    unknown = [k for k, d in enumerate(sizes) if d == -1]
    if len(unknown) > 1:
        raise ShapeError(f"reshape: only one size can be -1, got {tuple(sizes)}")
    known = math.prod(d for d in sizes if d != -1)
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
@lays_out_result
def ravel(a: ArrayLike, order: str = "C", *, out_sharding: Any = None) -> Array:
    """Put all elements into one dim.

    `order` is "C" for row-major order or "F" for column-major order; the dtype stays.
    `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout of the result.
    Raises an `ArgumentError` for another `order`.

    >>> snp.ravel(np.array([[1, 2], [3, 4]]))
    Array([1, 2, 3, 4], dtype=int32)
    """
    check_arraylike("ravel", a)
    if order == "K":
        raise RefusedError("ravel: order='K' is not supported; use 'C' or 'F'")
    return reshape(a, (typeof(plain(a)).size,), order)


@cached_options
def squeeze(a: ArrayLike, axis: Axis = None) -> Array:
    """Drop dims of size 1: all of them, or those of `axis`.

    The elements and their dtype stay. Raises a `ShapeError` if a dim of `axis` has another size.

    >>> snp.squeeze(np.zeros((1, 3, 1))).shape
    (3,)
    """
    a = operand("squeeze", a)
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
def expand_dims(a: ArrayLike, axis: Any) -> Array:
    """Insert dims of size 1.

    `axis` is a position in the result, or a tuple of positions. The elements and their dtype stay.

    >>> snp.expand_dims(np.zeros(3), (0, 2)).shape
    (1, 3, 1)
    """
    a = operand("expand_dims", a)
    many = tuple(axis) if isinstance(axis, (tuple, list, range)) else (axis,)
    dims = canonical_axes(many, typeof(a).ndim + len(many), "expand_dims")
    return as_array(lax.expand_dims(a, dims))


def atleast_1d(*arrays: Any) -> Any:
    """Give arrays at least one dim.

    Of several `arrays` the result is a list. The elements and their dtype stay.

    >>> snp.atleast_1d(3.0)
    Array([3.], dtype=float32, weak_type=True)
    """
    return _each("atleast_1d", arrays, lambda a, n: a if n >= 1 else lax.reshape(a, (1,)))


def atleast_2d(*arrays: Any) -> Any:
    """Give arrays at least two dims; new ones are put in front.

    Of several `arrays` the result is a list. The elements and their dtype stay.

    >>> snp.atleast_2d(np.arange(3))
    Array([[0, 1, 2]], dtype=int32)
    """

    def raised(a: Any, n: int) -> Any:
        return a if n >= 2 else lax.reshape(a, (1,) * (2 - n) + typeof(a).shape)

    return _each("atleast_2d", arrays, raised)


def atleast_3d(*arrays: Any) -> Any:
    """Give arrays at least three dims: a matrix gets one behind, a vector one at each side.

    Of several `arrays` the result is a list. The elements and their dtype stay.

    >>> snp.atleast_3d(np.zeros((2, 3))).shape
    (2, 3, 1)
    """

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


@lays_out_result
def broadcast_to(array: ArrayLike, shape: Any, *, out_sharding: Any = None) -> Array:
    """Repeat an array to a shape, by NumPy's rules of broadcasting.

    `array` has the last dims of `shape`, in which a size of 1 is repeated. The dtype stays.
    `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout of the result.
    Raises a `ShapeError` if the shapes do not fit.

    >>> snp.broadcast_to(np.array([1, 2]), (2, 2))
    Array([[1, 2],
           [1, 2]], dtype=int32)
    """
    array = operand("broadcast_to", array)
    target = canonical_shape(shape, "broadcast_to")
    old = typeof(array).shape
    fits = len(old) <= len(target)
    if not fits or broadcast_shapes_of("broadcast_to", [old, target]) != target:
        raise ShapeError(f"broadcast_to: incompatible shapes for broadcasting: {old} to {target}")
    return as_array(promotion.broadcast_to(array, target))


def broadcast_arrays(*args: ArrayLike) -> list[Array]:
    """Repeat the arrays `args` to their common shape.

    The result is a list; each array keeps its dtype. Raises a `ShapeError` if the shapes do not
    fit.

    >>> [x.shape for x in snp.broadcast_arrays(np.zeros((2, 1)), np.zeros(3))]
    [(2, 3), (2, 3)]
    """
    check_arraylike("broadcast_arrays", *args)
    arrays = [plain(a) for a in args]
    target = broadcast_shapes_of("broadcast_arrays", [typeof(a).shape for a in arrays])
    found = [as_array(promotion.broadcast_to(a, target)) for a in arrays]
    if all(typeof(x).explicit is None for x in found):
        return found
    return _lying_alike(found)


def _lying_alike(arrays: list[Array]) -> list[Array]:
    """Arrays of one shape, each split over `Explicit` axes where one of them is."""
    given = [typeof(x).explicit for x in arrays]
    first = next(lies for lies in given if lies is not None)
    entries: list[Any] = []
    for d in range(len(first.spec)):
        split = {lies.spec[d] for lies in given if lies is not None and lies.spec[d]}
        if len(split) > 1:
            return arrays
        entries.append(split.pop() if split else None)
    place = first.update(spec=type(first.spec)(*entries))
    return [x if typeof(x).explicit == place else hooks.reshard(x, place) for x in arrays]


# ---- order of dims -----------------------------------------------------------------------------


@cached_options
def transpose(a: ArrayLike, axes: Sequence[int] | None = None) -> Array:
    """Reverse the dims, or put them into the order `axes`.

    Dim k of the result is dim `axes[k]` of `a`; the dtype stays. Raises a `ShapeError` if `axes`
    does not name each dim once.

    >>> snp.transpose(np.array([[1, 2], [3, 4]]))
    Array([[1, 3],
           [2, 4]], dtype=int32)
    """
    a = operand("transpose", a)
    n = typeof(a).ndim
    if axes is None:
        order: tuple[int, ...] = tuple(range(n))[::-1]
    else:
        order = canonical_axes(axes, n, "transpose")
        if len(order) != n:
            raise ShapeError(f"transpose: axes={axes} must name each of the {n} dims once")
    return as_array(lax.transpose(a, order))


def permute_dims(a: ArrayLike, /, axes: Any) -> Array:
    """Put the dims into the order `axes`: `transpose` as the array API standard names it.

    Dim k of the result is dim `axes[k]` of `a`; the dtype stays.

    >>> snp.permute_dims(np.zeros((2, 3, 4)), (2, 0, 1)).shape
    (4, 2, 3)
    """
    return transpose(a, axes)


def matrix_transpose(x: ArrayLike, /) -> Array:
    """Exchange the last two dims.

    The dtype stays. Raises a `ShapeError` if `x` has less than two dims.

    >>> snp.matrix_transpose(np.zeros((2, 3, 4))).shape
    (2, 4, 3)
    """
    if typeof(operand("matrix_transpose", x)).ndim < 2:
        raise ShapeError(f"matrix_transpose: at least 2 dims are needed, got {typeof(plain(x))}")
    return swapaxes(x, -1, -2)


@cached_options
def swapaxes(a: ArrayLike, axis1: int, axis2: int) -> Array:
    """Exchange the dims `axis1` and `axis2`; the dtype stays.

    >>> snp.swapaxes(np.zeros((2, 3, 4)), 0, 2).shape
    (4, 3, 2)
    """
    a = operand("swapaxes", a)
    n = typeof(a).ndim
    d1, d2 = canonical_axis(axis1, n, "swapaxes"), canonical_axis(axis2, n, "swapaxes")
    order = list(range(n))
    order[d1], order[d2] = order[d2], order[d1]
    return as_array(lax.transpose(a, order))


def moveaxis(a: ArrayLike, source: Axis, destination: Axis) -> Array:
    """Move dims to other positions; the others keep their order.

    Dim `source` of `a` becomes dim `destination` of the result; both may be tuples. The dtype
    stays. Raises a `ShapeError` if they differ in length.

    >>> snp.moveaxis(np.zeros((2, 3, 4)), 0, -1).shape
    (3, 4, 2)
    """
    a = operand("moveaxis", a)
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


def rollaxis(a: ArrayLike, axis: int, start: int = 0) -> Array:
    """Move the dim `axis` back until it lies before position `start`.

    The dtype stays; `moveaxis` is easier to read.

    >>> snp.rollaxis(np.zeros((2, 3, 4)), 2).shape
    (4, 2, 3)
    """
    n = typeof(a).ndim
    d = canonical_axis(axis, n, "rollaxis")
    at = start + n if start < 0 else start
    return as_array(move_dim(plain(a), d, at - 1 if d < at else at))


# ---- order of elements -------------------------------------------------------------------------


def flip(m: ArrayLike, axis: Axis = None) -> Array:
    """Reverse the order of elements along dims.

    `axis` is one dim of `m`, several, or None for all. Shape and dtype stay.

    >>> snp.flip(np.array([[1, 2], [3, 4]]), 1)
    Array([[2, 1],
           [4, 3]], dtype=int32)
    """
    m = operand("flip", m)
    return as_array(lax.rev(m, canonical_axes(axis, typeof(m).ndim, "flip")))


def flipud(m: ArrayLike) -> Array:
    """Reverse the order of elements along the first dim of `m`; shape and dtype stay.

    >>> snp.flipud(np.array([[1, 2], [3, 4]]))
    Array([[3, 4],
           [1, 2]], dtype=int32)
    """
    return flip(m, 0)


def fliplr(m: ArrayLike) -> Array:
    """Reverse the order of elements along the second dim of `m`; shape and dtype stay.

    >>> snp.fliplr(np.array([[1, 2], [3, 4]]))
    Array([[2, 1],
           [4, 3]], dtype=int32)
    """
    return flip(m, 1)


def rot90(m: ArrayLike, k: int = 1, axes: tuple[int, int] = (0, 1)) -> Array:
    """Turn an array by 90 degrees, `k` times, in the plane of two dims.

    The first of `axes` turns towards the second. The dtype of `m` stays.

    >>> snp.rot90(np.array([[1, 2], [3, 4]]))
    Array([[2, 4],
           [1, 3]], dtype=int32)
    """
    m = operand("rot90", m)
    d1, d2 = canonical_axes(axes, typeof(m).ndim, "rot90")
    turns = k % 4
    if turns == 0:
        return as_array(m)
    if turns == 2:
        return flip(m, (d1, d2))
    if turns == 1:
        return swapaxes(flip(m, d2), d1, d2)
    return flip(swapaxes(m, d1, d2), d2)


def roll(a: ArrayLike, shift: Any, axis: Axis = None) -> Array:
    """Move elements along dims; those that leave at one end come back at the other.

    `shift` and `axis` may have several entries, one for each other; a dim that is named twice is
    moved twice. `axis=None` moves the flat array. Shape and dtype stay. Raises a `ShapeError` if
    `shift` and `axis` differ in length and neither has one entry.

    >>> snp.roll(np.arange(4), 1)
    Array([3, 0, 1, 2], dtype=int32)
    """
    a = operand("roll", a)
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
    if isinstance(a, Array) and a.shards is not None:
        return _rolled_at_once(a, by=tuple(map(operator.index, shifts)), dims=tuple(dims))
    for step, d in zip(shifts, dims, strict=True):
        a = _rolled(a, step, d)
    return as_array(a)


@one_program("by", "dims")
def _rolled_at_once(a: Any, by: tuple[int, ...], dims: tuple[int, ...]) -> Any:
    """A roll of an array over a mesh: the compiler sends no more than the rows that leave."""
    for step, d in zip(by, dims, strict=True):
        a = _rolled(a, step, d)
    return a


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
