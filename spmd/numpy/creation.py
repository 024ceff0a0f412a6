"""Making arrays: from data (`array`, `astype`) and from nothing (`zeros`, `full_like`).

Under a transformation these are staged like everything else: `zeros((3,))` is one equation, and
data become constants.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd import lax
from spmd.api.placement import device_put
from spmd.base import context, dtypes
from spmd.base.errors import (
    ArgumentError,
    ConcretizationError,
    DtypeError,
    RefusedError,
    ShapeError,
)
from spmd.base.transfers import report_creation
from spmd.compile.executable.nan_check import check_created
from spmd.compile.lazy import cuda_sharing
from spmd.core.aval import is_arraylike, typeof
from spmd.core.explicit import lays_out_result, match_type
from spmd.core.trace import EVAL, Tracer
from spmd.numpy.promotion import (
    as_array,
    broadcast_shapes,
    broadcast_to,
    check_arraylike,
    constant_like,
    convert,
    default_float,
    operand,
    optional_dtype,
    plain,
    result_type,
    user_dtype,
)
from spmd.sharding.array import Array, ArrayLike, alias, from_shards, in_scope
from spmd.sharding.named import NamedSharding, Sharding


def placed(x: Any, device: Any) -> Any:
    """`x` on a device or with a sharding; as it is, if `device` is None or over no mesh."""
    if device is None or (isinstance(device, NamedSharding) and device.mesh.empty):
        return x
    return device_put(x, device)


# ---- from data ---------------------------------------------------------------------------------


@lays_out_result
def array(
    object: Any,
    dtype: Any = None,
    copy: bool = True,
    order: str | None = "K",
    ndmin: int = 0,
    *,
    device: Any = None,
    out_sharding: Any = None,
) -> Array:
    """Make an array of numbers, arrays, or nested lists and tuples of them.

    The dtype is the common dtype of the items, or `dtype`; Python floats become float32 and
    Python integers int32 (64 bits with x64). `ndmin` puts dims of size 1 in front of the shape.
    `copy=False` may return `object` itself. `order` may be None, "K", "C" or "A", which all
    mean row-major; `device` is a device or sharding for the result. An object on a GPU, with
    `__cuda_array_interface__`, stays there; its memory is shared if `copy` is False.
    `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout of the result.
    Raises a `ShapeError` if the items of a list differ in shape, and an `ArgumentError` for values
    that are no numbers or for another `order`.

    >>> snp.array([[1, 2], [3.5, 4]])
    Array([[1. , 2. ],
           [3.5, 4. ]], dtype=float32)
    """
    if order not in (None, "K", "C", "A"):
        raise RefusedError(f"array: order={order!r}; arrays are row-major here")
    found = optional_dtype(dtype, "array")
    if not isinstance(object, (Array, Tracer)):
        report_creation("array")
    if isinstance(object, (list, tuple)):
        result = _from_nested(object, found)
    else:
        result = _from_value(object, found, copy)
    missing = ndmin - typeof(result).ndim
    if missing > 0:
        result = lax.reshape(result, (1,) * missing + typeof(result).shape)
    check_created("array", result, object)
    return placed(result, device)


@lays_out_result
def asarray(
    a: Any,
    dtype: Any = None,
    order: str | None = None,
    *,
    copy: bool | None = None,
    device: Any = None,
    out_sharding: Any = None,
) -> Array:
    """Convert `a` to an array; an array that has the dtype already is returned as it is.

    `a` is a number, an array, or nested lists of them, and the result has its shape. `dtype`,
    `order` and `device` are those of `array`; `copy=True` makes a copy in any case.
    `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout of the result.

    >>> snp.asarray([1, 2, 3])
    Array([1, 2, 3], dtype=int32)
    """
    found = optional_dtype(dtype, "asarray")
    return array(a, found, bool(copy), order, device=device)


def _from_value(x: Any, dtype: np.dtype | None, copy: bool) -> Any:
    x = plain(x)
    if dtype is not None and isinstance(x, np.ndarray) and x.dtype.kind in "OM":
        # Numbers in objects, and dates, are what NumPy makes of them.
        x = x.astype(dtype)
    if not is_arraylike(x):
        if hasattr(x, "__cuda_array_interface__"):
            x, copy = cuda_sharing.from_array_interface(x, copy or None), False
        else:
            x = _from_foreign(x)
    if dtype is None or dtype == typeof(x).dtype:
        is_python = isinstance(x, (int, float, complex)) and not isinstance(x, np.generic)
        if dtype is not None and (is_python or typeof(x).weak_type):
            return (
                as_array(convert(dtypes.exact(x, dtype), dtype))
                if is_python
                else lax.convert_element_type(x, dtype)
            )
        if copy and isinstance(x, (Tracer, Array)):
            return lax.copy(x) if isinstance(x, Tracer) else in_scope(alias(x))
        return as_array(x)
    return lax.convert_element_type(dtypes.exact(x, dtype), dtype)


def _from_foreign(x: Any) -> Any:
    """Something that NumPy understands: a memoryview, an array of another library."""
    if x is None:
        raise ArgumentError("array: None is not a valid value for an array")
    convert = getattr(x, "__jax_array__", None)
    if convert is not None:
        return convert()
    made = np.asarray(x)
    if made.dtype.kind not in "biufcV":
        raise ArgumentError(
            f"array: cannot make an array of {x!r} of type {type(x).__name__}; "
            "give numbers, arrays, or nested lists of them"
        )
    return made


def _leaves(x: Any) -> list[Any]:
    if isinstance(x, (list, tuple)):
        return [leaf for item in x for leaf in _leaves(item)]
    return [plain(x)]


def _from_nested(items: Sequence[Any], dtype: np.dtype | None) -> Any:
    leaves = [x if is_arraylike(x) else _from_foreign(x) for x in _leaves(items)]
    if dtype is None:
        dtype = result_type(*leaves) if leaves else default_float()
    if all(isinstance(x, (bool, int, float, complex, np.ndarray, np.generic)) for x in leaves):
        try:
            return as_array(np.array(items, dtype=dtype))
        except OverflowError:
            for leaf in leaves:
                dtypes.exact(leaf, dtype)
            raise
        except ValueError as error:
            raise ShapeError(f"array: {error}") from None
    return _stacked(items, dtype)


def _stacked(items: Any, dtype: np.dtype) -> Any:
    if not isinstance(items, (list, tuple)):
        return as_array(convert(plain(items), dtype))
    rows = [_stacked(x, dtype) for x in items]
    shapes = {typeof(r).shape for r in rows}
    if len(shapes) > 1:
        raise ShapeError(
            f"array: the items of a list must have one shape, got {', '.join(map(str, shapes))}"
        )
    rows = [lax.reshape(r, (1, *typeof(r).shape)) for r in rows]
    return lax.concatenate(rows, 0)


def copy(a: ArrayLike, order: str | None = None) -> Array:
    """Copy an array, so that it stays when the array itself is deleted or donated.

    Shape and dtype are those of `a`; `order` is that of `array`. Arrays don't change, so both may
    lie in the same memory until a program writes to one of them.

    >>> snp.copy(np.arange(3))
    Array([0, 1, 2], dtype=int32)
    """
    check_arraylike("copy", a)
    return array(a, copy=True, order=order)


def astype(x: ArrayLike, dtype: Any, /, *, copy: bool = False, device: Any = None) -> Array:
    """Convert every element of `x` to a dtype; the shape stays.

    Floats are truncated towards zero for integers, and complex numbers lose their imaginary part.
    None means the default float. `copy` is accepted and changes nothing, as arrays are immutable;
    `device` is a device or sharding for the result.

    >>> snp.astype(np.array([1.7, -1.7]), int)
    Array([ 1, -1], dtype=int32)
    """
    x = operand("astype", x)
    found = default_float() if dtype is None else user_dtype(dtype, "astype")
    source = typeof(x).dtype
    if dtypes.is_complex(source) and not dtypes.is_complex(found):
        if not dtypes.is_bool(found):
            warnings.warn(
                "Casting from complex to real dtypes will soon raise a ValueError. Please first "
                "use snp.real or snp.imag to take the real or imaginary part of your input.",
                DeprecationWarning,
                stacklevel=2,
            )
        x = lax.ne(x, constant_like(x, 0)) if dtypes.is_bool(found) else lax.real(x)
    result = as_array(lax.convert_element_type(x, found))
    return placed(result, device)


# ---- filled ------------------------------------------------------------------------------------


def canonical_shape(shape: Any, name: str) -> tuple[int, ...]:
    """A shape as tuple of ints: an error names the argument that is traced or no integer."""
    # An array may be an integer; a sequence of a class of the user's is a shape as well.
    several = isinstance(shape, (list, tuple, np.ndarray)) or (
        hasattr(shape, "__iter__")
        and (not hasattr(shape, "__index__") or getattr(shape, "ndim", 0) == 1)
    )
    whole: Any = shape if several else (shape,)
    if isinstance(shape, Tracer):
        raise ConcretizationError(_traced_shape(name, shape))
    try:
        result = tuple(operator.index(d) for d in whole)
    except ConcretizationError:
        raise ConcretizationError(_traced_shape(name, shape)) from None
    except TypeError:
        raise ArgumentError(
            f"{name}: a shape must be an integer or a tuple of integers, got {shape!r}"
        ) from None
    if any(d < 0 for d in result):
        raise ShapeError(f"{name}: shape {result} has a negative size")
    return result


def _traced_shape(name: str, shape: Any) -> str:
    return (
        f"{name}: the shape {shape!r} is traced, but shapes must be known when a function is "
        "traced. Mark the argument it comes from static (jit's static_argnums)."
    )


def _filled(name: str, shape: Any, value: Any, dtype: Any, device: Any) -> Any:
    if isinstance(dtype, (int, np.integer)) and not isinstance(dtype, bool):
        raise ArgumentError(
            f"{name} received {shape!r} and {dtype!r}: a shape is one argument, so write "
            f"{name}(({shape}, {dtype}))"
        )
    report_creation(name)
    found = default_float() if dtype is None else user_dtype(dtype, name)
    result = lax.full(canonical_shape(shape, name), value, found)
    return placed(result, device)


@lays_out_result
def zeros(shape: Any, dtype: Any = None, *, device: Any = None, out_sharding: Any = None) -> Array:
    """Make an array of zeros of a shape.

    `shape` is an integer or a tuple of integers; `dtype` is the default float if it is None:
    float32, or float64 with x64. `device` is a device or sharding for the result.
    `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout of the result.

    >>> snp.zeros((2, 3))
    Array([[0., 0., 0.],
           [0., 0., 0.]], dtype=float32)
    """
    return _filled("zeros", shape, 0, dtype, device)


@lays_out_result
def ones(shape: Any, dtype: Any = None, *, device: Any = None, out_sharding: Any = None) -> Array:
    """Make an array of ones of a shape.

    `shape` is an integer or a tuple of integers; `dtype` is the default float if it is None:
    float32, or float64 with x64. `device` is a device or sharding for the result.
    `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout of the result.

    >>> snp.ones(3, dtype=int)
    Array([1, 1, 1], dtype=int32)
    """
    return _filled("ones", shape, 1, dtype, device)


@lays_out_result
def empty(shape: Any, dtype: Any = None, *, device: Any = None, out_sharding: Any = None) -> Array:
    """Make an array of a shape: it holds zeros, as memory is never uninitialised here.

    `shape` is an integer or a tuple of integers; `dtype` is the default float if it is None:
    float32, or float64 with x64. `device` is a device or sharding for the result.
    `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout of the result.

    >>> snp.empty(2)
    Array([0., 0.], dtype=float32)
    """
    return _filled("empty", shape, 0, dtype, device)


@lays_out_result
def full(
    shape: Any,
    fill_value: ArrayLike,
    dtype: Any = None,
    *,
    device: Any = None,
    out_sharding: Any = None,
) -> Array:
    """Make an array of a shape, filled with a value.

    `fill_value` is a scalar, or an array that broadcasts to `shape`. The dtype is `dtype`, or
    that of `fill_value`. `device` is a device or sharding for the result. `out_sharding`, a
    sharding or spec over `Explicit` mesh axes, is the layout of the result. Raises a
    `ShapeError` if `fill_value` does not broadcast to `shape`.

    >>> snp.full((2, 2), np.array([1, 2]))
    Array([[1, 2],
           [1, 2]], dtype=int32)
    """
    check_arraylike("full", fill_value)
    shape = canonical_shape(shape, "full")
    found, value = optional_dtype(dtype, "full"), plain(fill_value)
    if not isinstance(value, (Array, Tracer)):
        report_creation("full")
    if device is not None and found is None:
        found = typeof(value).dtype  # arrays that are placed have no weak type
    if found is not None and type(value) is complex:  # integers wrap around here, as in JAX
        value = dtypes.exact(value, found)
    return placed(_spread(value, shape, found), device)


def _spread(value: Any, shape: tuple[int, ...], dtype: np.dtype | None) -> Any:
    if typeof(value).ndim == 0:
        return lax.full(shape, value, dtype)
    if dtype is not None:
        value = lax.convert_element_type(value, dtype)
    if broadcast_shapes(typeof(value).shape, shape) != shape:
        raise ShapeError(f"full: fill_value of shape {typeof(value).shape} does not fit {shape}")
    return broadcast_to(value, shape)


def _like(name: str, a: Any, value: Any, dtype: Any, shape: Any, device: Any) -> Any:
    if not (hasattr(a, "dtype") and hasattr(a, "shape")):
        a = operand(name, a)
    found = optional_dtype(dtype, name)
    report_creation(name)
    weak = False
    if found is None:
        aval = typeof(a) if is_arraylike(a) else None
        found = dtypes.canonical(a.dtype) if aval is None else aval.dtype
        weak = aval is not None and aval.weak_type
    if isinstance(value, complex) and not dtypes.is_complex(found):
        raise DtypeError(f"{name}: the fill_value {value!r} is complex, and the dtype {found.name}")
    new_shape = np.shape(a) if shape is None else canonical_shape(shape, name)
    if device is None:
        device = _place_of(a, tuple(new_shape), weak)
        if device is not None and getattr(a, "shards", None) and typeof(value).ndim == 0:
            # Each device fills its own shard: the whole may fit on none of them.
            shapes = [s.shape if tuple(new_shape) == a.shape else new_shape for s in a.shards]
            shards = [
                _like(name, s, value, dtype, shape, s.device)
                for s, shape in zip(a.shards, shapes, strict=True)
            ]
            return from_shards(shards[0].aval.update(shape=new_shape), device, shards)
    if weak and typeof(value).ndim == 0:
        value = convert(value, found, weak=True)
        result = lax.full(new_shape, value)
    else:
        result = _spread(value, tuple(new_shape), found)
    if device is None and isinstance(a, (Array, Tracer)):
        result = match_type(result, typeof(a))
    return placed(result, device)


def _place_of(a: Any, shape: tuple[int, ...], weak: bool) -> Any:
    """The sharding of what was placed, an array or a struct, for a result of this shape."""
    state = context.state
    place = None if isinstance(a, Tracer) else getattr(a, "sharding", None)
    if place is None or state.trace is not EVAL or state.axes or weak:
        return None
    if not (isinstance(place, Sharding) and place._is_concrete and getattr(a, "_committed", True)):
        return None
    keeps = shape == np.shape(a) or place.is_fully_replicated
    return place if keeps and not getattr(a, "is_unreduced", False) else None


@lays_out_result
def zeros_like(
    a: ArrayLike,
    dtype: Any = None,
    shape: Any = None,
    *,
    device: Any = None,
    out_sharding: Any = None,
) -> Array:
    """Make an array of zeros with the shape, dtype and sharding of `a`.

    `dtype` and `shape` replace those of `a`; `device` is a device or sharding for the result.
    The result has the sharding of `a` if that was placed and no other shape or device is given.
    `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout of the result.

    >>> snp.zeros_like(np.array([1, 2, 3]))
    Array([0, 0, 0], dtype=int32)
    """
    return _like("zeros_like", a, 0, dtype, shape, device)


@lays_out_result
def ones_like(
    a: ArrayLike,
    dtype: Any = None,
    shape: Any = None,
    *,
    device: Any = None,
    out_sharding: Any = None,
) -> Array:
    """Make an array of ones with the shape, dtype and sharding of `a`.

    `dtype` and `shape` replace those of `a`; `device` is a device or sharding for the result.
    The result has the sharding of `a` if that was placed and no other shape or device is given.
    `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout of the result.

    >>> snp.ones_like(np.array([1, 2, 3]))
    Array([1, 1, 1], dtype=int32)
    """
    return _like("ones_like", a, 1, dtype, shape, device)


def empty_like(
    prototype: ArrayLike, dtype: Any = None, shape: Any = None, *, device: Any = None
) -> Array:
    """Make an array of zeros with the shape and dtype of `prototype`.

    `dtype` and `shape` replace those of `prototype`; `device` is a device or sharding for the
    result.

    >>> snp.empty_like(np.array([1.5, 2.5]))
    Array([0., 0.], dtype=float32)
    """
    return _like("empty_like", prototype, 0, dtype, shape, device)


@lays_out_result
def full_like(
    a: ArrayLike,
    fill_value: ArrayLike,
    dtype: Any = None,
    shape: Any = None,
    *,
    device: Any = None,
    out_sharding: Any = None,
) -> Array:
    """Make an array with the shape and dtype of `a`, filled with a value.

    `fill_value` is a scalar, or an array that broadcasts to the shape; it is converted to the
    dtype. `dtype` and `shape` replace those of `a`; `device` is a device or sharding for the
    result. `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout of the
    result.

    >>> snp.full_like(np.array([1, 2, 3]), 7)
    Array([7, 7, 7], dtype=int32)
    """
    return _like("full_like", a, operand("full_like", fill_value), dtype, shape, device)
