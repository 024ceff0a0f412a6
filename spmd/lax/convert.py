"""Changing dtypes: by value, by bits, by precision; and operands brought to one dtype.

The one idea: a conversion has XLA's meaning where C leaves it open. A float becomes the nearest
integer towards zero within the integer's range, NaN becomes 0, and anything that is not 0 is True.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import spmd.base.context as context
from spmd.base import dtypes
from spmd.base.errors import (
    ArgumentError,
    DtypeArgumentError,
    DtypeError,
    KeyOperationError,
    ShapeError,
)
from spmd.base.tree import tree_map
from spmd.core.aval import ShapedArray, is_arraylike, typeof
from spmd.core.jvp import zero_tangent
from spmd.core.primitive import Primitive, dims, linear, remembered
from spmd.core.structural import broadcast_in_dim, move_dim
from spmd.core.trace import EVAL, Tracer, constant, unchanged
from spmd.lax.families import (
    ANY,
    FLOAT,
    MOVABLE,
    REAL,
    check_dtype,
    elementwise_dims,
    fail,
    nonlinear,
    unary,
)

if TYPE_CHECKING:
    from spmd.sharding.array import Array

_PYTHON_SCALARS = (bool, int, float, complex)

# ---- convert_element_type ----------------------------------------------------------------------


def convert_element_type(operand: Any, new_dtype: Any, weak_type: bool = False) -> Array:
    """Convert every element of `operand` to `new_dtype`; the shape stays.

    Floats become integers towards zero, within the integer's range (NaN gives 0); integers wrap
    around; complex numbers lose their imaginary part; anything but 0 is True. With `weak_type=True`
    the result gives way to other dtypes in promotion, as a Python number does. The 64-bit dtypes
    become 32-bit ones unless x64 is enabled. Raises `ArgumentError` if `new_dtype` is None, and
    `DtypeError` if the elements are keys.

    >>> lax.convert_element_type(np.array([1.9, -1.9, np.nan, 1e10]), np.int32)
    Array([         1,         -1,          0, 2147483647], dtype=int32)
    """
    if new_dtype is None:
        raise ArgumentError("convert_element_type: new_dtype is None; name a dtype")
    aval = typeof(operand)
    if aval.dtype is not new_dtype:  # types of values are canonical
        new_dtype = dtypes.canonical(new_dtype)
    if aval.dtype == new_dtype and aval.weak_type == weak_type:
        return unchanged(operand)
    if type(operand) is int:
        operand = dtypes.number(operand, new_dtype)
    elif type(operand) is complex and not (dtypes.is_complex(new_dtype) or new_dtype == np.bool_):
        fail(
            DtypeArgumentError, f"convert_element_type: {operand} is no {new_dtype.name}; use .real"
        )
    if context.state.trace is not EVAL and _is_scalar_constant(operand, aval):
        folded = _converted(np, np.asarray(operand), new_dtype)
        return constant(folded, ShapedArray((), new_dtype, bool(weak_type)))
    return convert_element_type_p.bind(operand, new_dtype=new_dtype, weak_type=bool(weak_type))


def _is_scalar_constant(x: Any, aval: ShapedArray) -> bool:
    """Whether `x` would be a literal if it were staged: a number, or a concrete array of rank 0."""
    return not aval.shape and not isinstance(x, Tracer) and aval.dtype.kind != "V"


@remembered
def _convert_abstract(x: ShapedArray, *, new_dtype: np.dtype, weak_type: bool) -> ShapedArray:
    if x.dtype != new_dtype:
        name = dtypes.long_name(new_dtype)
        if dtypes.is_key(x.dtype):
            fail(
                KeyOperationError,
                f"convert_element_type: {x} cannot be converted to {name}: a key is opaque; "
                "random.key_data gives its bits",
            )
        check_dtype("convert_element_type", "operand", x, ANY)
        if new_dtype not in ANY:
            fail(DtypeArgumentError, f"convert_element_type: {x} cannot be converted to {name}")
    return x.update(dtype=new_dtype, weak_type=weak_type)


def _converted(xp: Any, x: Any, new_dtype: np.dtype) -> Any:
    if x.dtype == new_dtype:
        return x
    with np.errstate(all="ignore"):
        if dtypes.is_bool(new_dtype):
            return x != 0
        if dtypes.is_complex(x.dtype) and not dtypes.is_complex(new_dtype):
            x = x.real
        if dtypes.is_float(x.dtype) and dtypes.is_integer(new_dtype):
            return _saturated(xp, x, new_dtype)
        return x.astype(new_dtype)


def _saturated(xp: Any, x: Any, new_dtype: np.dtype) -> Any:
    limits = dtypes.iinfo(new_dtype)
    x = xp.trunc(x.astype(np.float64))
    # 2**63 - 1 is no float64, so the limits are compared, and the middle alone is converted.
    above = x >= float(limits.max)
    below = x <= float(limits.min)
    inside = xp.where(above | below | xp.isnan(x), 0.0, x).astype(new_dtype)
    low = xp.where(below, np.asarray(limits.min, new_dtype), inside)
    return xp.where(above, np.asarray(limits.max, new_dtype), low)


def _convert_jvp(primals: Any, tangents: Any, *, new_dtype: np.dtype, weak_type: bool) -> Any:
    out = convert_element_type_p.bind(*primals, new_dtype=new_dtype, weak_type=weak_type)
    if not dtypes.is_inexact(new_dtype):
        return out, zero_tangent(out)
    return out, convert_element_type(tangents[0], new_dtype, weak_type)


def _convert_batch(axis: Any, operands: Any, at: Any, **params: Any) -> Any:
    return convert_element_type_p.bind(operands[0], **params), at[0]


convert_element_type_p = Primitive(
    "convert_element_type",
    abstract=_convert_abstract,
    impl=lambda xp, x, *, new_dtype, weak_type: xp.asarray(_converted(xp, x, new_dtype)),
    jvp=_convert_jvp,
    transpose=lambda ct, x, **_: [convert_element_type(ct, x.aval.dtype, x.aval.weak_type)],
    batch=_convert_batch,
    dims=elementwise_dims,
)

# ---- operands of one dtype ---------------------------------------------------------------------


def matched(*operands: Any) -> tuple[Any, ...]:
    """Operands whose weakly typed members took the dtype of the others, where that loses nothing.

    Dims of size 1 are repeated to the size that another operand of that rank has there.
    A Python number beside a float16 array becomes float16; beside integers, 1.0 stays a float
    and the primitive reports the difference. Strong dtypes are never changed, and neither are
    numbers among themselves.
    """
    avals = [typeof(x) for x in operands]
    if len({a.shape for a in avals if a.shape}) > 1:
        operands = _of_one_shape(operands, avals)
    first = avals[0].dtype
    if all([a.dtype is first for a in avals]) or all([a.dtype == first for a in avals]):
        return operands
    if all([isinstance(x, _PYTHON_SCALARS) for x in operands]):
        return operands
    try:
        dtype, weak = dtypes.promote(tuple([(a.dtype, a.weak_type) for a in avals]))
    except DtypeError:
        return operands
    if any([not a.weak_type and a.dtype != dtype for a in avals]):
        return operands
    pairs = zip(operands, avals, strict=True)
    return tuple([_as_weak_operand(x, a, dtype, weak) for x, a in pairs])


def _of_one_shape(operands: Sequence[Any], avals: Sequence[ShapedArray]) -> tuple[Any, ...]:
    """Operands of one rank with their dims of size 1 repeated; others are for the primitive."""
    shapes = [a.shape for a in avals if a.shape]
    if len({len(s) for s in shapes}) > 1:
        return tuple(operands)
    shape = tuple([max(sizes) if min(sizes) else 0 for sizes in zip(*shapes, strict=True)])
    if any(d not in (1, whole) for s in shapes for d, whole in zip(s, shape, strict=True)):
        return tuple(operands)
    dims = tuple(range(len(shape)))
    return tuple(
        x if a.shape in ((), shape) else broadcast_in_dim(x, shape, dims)
        for x, a in zip(operands, avals, strict=True)
    )


def number_of_dtype(what: str, x: Any, dtype: np.dtype) -> np.ndarray:
    """A Python number beside operands of a dtype; a DtypeError if the dtype has no such.

    Negative integers wrap around, so that -1 beside uint8 is 255.
    """
    lost = dtypes.is_integer(dtype) and (
        isinstance(x, (float, complex))
        or (not isinstance(x, bool) and not -dtypes.iinfo(dtype).max - 1 <= x)
        or x > dtypes.iinfo(dtype).max
    )
    if lost or (isinstance(x, complex) and not dtypes.is_complex(dtype)):
        fail(
            DtypeError,
            f"{what}: the number {x!r} does not fit the {dtypes.long_name(dtype)} of the other "
            "operand; convert one with lax.convert_element_type",
        )
    return dtypes.number(x, dtype)


def _as_weak_operand(x: Any, aval: ShapedArray, dtype: np.dtype, weak: bool) -> Any:
    if aval.dtype == dtype:
        return x
    if isinstance(x, _PYTHON_SCALARS):
        value = number_of_dtype("lax", x, dtype)
        return value.item() if weak else value[()]
    return convert_element_type(x, dtype, weak)


# ---- bitcast_convert_type ----------------------------------------------------------------------


def bitcast_convert_type(operand: Any, new_dtype: Any) -> Array:
    """Read the same bits as another dtype.

    For a `new_dtype` of the same width the shape of `operand` stays. For a narrower one a new last
    dim holds the parts, least significant first; for a wider one the last dim of `operand`, of as
    many elements as are needed, is used up. Raises `ShapeError` if it has another size, and
    `DtypeError` for booleans and complex numbers.

    >>> lax.bitcast_convert_type(np.float32(1.0), np.uint32)
    Array(1065353216, dtype=uint32)
    >>> lax.bitcast_convert_type(np.array([1, 256], np.uint16), np.uint8)
    Array([[1, 0],
           [0, 1]], dtype=uint8)
    """
    return bitcast_convert_type_p.bind(operand, new_dtype=dtypes.canonical(new_dtype))


def _bitcast_abstract(x: ShapedArray, *, new_dtype: np.dtype) -> ShapedArray:
    if x.dtype == new_dtype:
        return x.strip_weak()
    check_dtype("bitcast_convert_type", "operand", x, REAL)
    check_dtype("bitcast_convert_type", "new_dtype", ShapedArray((), new_dtype), REAL)
    old, new = x.dtype.itemsize, new_dtype.itemsize
    if old == new:
        return ShapedArray(x.shape, new_dtype)
    if old > new:
        return ShapedArray((*x.shape, old // new), new_dtype)
    if not x.shape or x.shape[-1] * old != new:
        fail(
            ShapeError,
            f"bitcast_convert_type: {new_dtype} takes {new // old} elements of {x.dtype}, which "
            f"must be the last dim, but the operand is {x}",
        )
    return ShapedArray(x.shape[:-1], new_dtype)


def _bitcast_impl(xp: Any, x: Any, *, new_dtype: np.dtype) -> Any:
    old, new = x.dtype.itemsize, new_dtype.itemsize
    x = xp.ascontiguousarray(x).reshape(x.shape)
    if old == new:
        return x.view(new_dtype)
    if old > new:
        return x.reshape(*x.shape, 1).view(new_dtype)
    return x.view(new_dtype).reshape(x.shape[:-1])


def _bitcast_batch(axis: Any, operands: Any, at: Any, *, new_dtype: np.dtype) -> Any:
    x = move_dim(operands[0], at[0], 0)
    return bitcast_convert_type_p.bind(x, new_dtype=new_dtype), 0


def _bitcast_dims(x: ShapedArray, *, new_dtype: np.dtype) -> Any:
    old, new = x.dtype.itemsize, new_dtype.itemsize
    if old == new:
        return dims([range(x.ndim)], [range(x.ndim)])
    if old > new:
        return dims([range(x.ndim)], [(*range(x.ndim), -1)])
    last = x.ndim - 1
    return dims([range(x.ndim)], [range(last)], whole=[last])


def _bitcast_jvp(primals: Any, tangents: Any, *, new_dtype: np.dtype) -> Any:
    out = bitcast_convert_type_p.bind(*primals, new_dtype=new_dtype)
    return out, zero_tangent(out)


bitcast_convert_type_p = Primitive(
    "bitcast_convert_type",
    abstract=_bitcast_abstract,
    impl=_bitcast_impl,
    jvp=_bitcast_jvp,
    transpose=nonlinear("bitcast_convert_type"),
    batch=_bitcast_batch,
    dims=_bitcast_dims,
)

# ---- reduce_precision --------------------------------------------------------------------------


def reduce_precision(operand: Any, exponent_bits: int, mantissa_bits: int) -> Array:
    """Round every element to a float of the given numbers of bits.

    `exponent_bits` and `mantissa_bits` describe that float; `operand` keeps its shape and float
    dtype. Rounding is to nearest, ties to even; too large numbers become infinity, too small ones
    zero. Raises `ArgumentError` for less than one exponent bit or a negative number of
    mantissa bits, and `DtypeError` for other dtypes.

    >>> lax.reduce_precision(np.float32(1.2345), 8, 7)
    Array(1.234375, dtype=float32)
    """
    if exponent_bits < 1 or mantissa_bits < 0:
        raise ArgumentError(
            f"reduce_precision: exponent_bits={exponent_bits} must be at least 1 and "
            f"mantissa_bits={mantissa_bits} at least 0"
        )
    return reduce_precision_p.bind(
        operand, exponent_bits=int(exponent_bits), mantissa_bits=int(mantissa_bits)
    )


def _rounded_bits(xp: Any, x: Any, *, exponent_bits: int, mantissa_bits: int) -> Any:
    """Round to even on the bits, then flush numbers beyond the narrower exponent."""
    info = dtypes.finfo(x.dtype)
    word = np.dtype(f"u{x.dtype.itemsize}")
    bits = x.view(word)
    if mantissa_bits < info.nmant:
        drop = info.nmant - mantissa_bits
        last = (bits >> word.type(drop)) & word.type(1)
        bits = bits + last + word.type((1 << (drop - 1)) - 1)
        bits = bits & ~word.type((1 << drop) - 1)
    if exponent_bits < info.iexp:
        mask = word.type(((1 << info.iexp) - 1) << info.nmant)
        sign = bits & word.type(1 << (8 * word.itemsize - 1))
        bias, wide = (1 << (exponent_bits - 1)) - 1, (1 << (info.iexp - 1)) - 1
        exponent = bits & mask
        bits = xp.where(exponent > word.type((wide + bias) << info.nmant), sign | mask, bits)
        bits = xp.where(exponent <= word.type((wide - bias) << info.nmant), sign, bits)
    return xp.where(xp.isnan(x), x, bits.view(x.dtype))


reduce_precision_p = unary(
    "reduce_precision",
    accepts=FLOAT,
    impl=_rounded_bits,
    jvp=linear,
    transpose=lambda ct, x, **how: reduce_precision_p.bind(ct, **how),
    widen=False,
)

# ---- identities --------------------------------------------------------------------------------


def stop_gradient(x: Any) -> Any:
    """Return each array of the pytree `x` as it is, but constant for differentiation.

    The shape, the dtype and the values stay; tangents and cotangents are zero.

    >>> spmd.grad(lambda x: x * lax.stop_gradient(x))(3.0)
    Array(3., dtype=float32, weak_type=True)
    """
    return tree_map(_stop_gradient, x)


def _stop_gradient(x: Any) -> Any:
    return stop_gradient_p.bind(x) if dtypes.is_inexact(typeof(x).dtype) else unchanged(x)


def copy(x: Any) -> Array:
    """Return a copy of an array that later donation of the original does not touch.

    The shape, the dtype and the derivative are those of `x`.

    >>> lax.copy(np.arange(3))
    Array([0, 1, 2], dtype=int32)
    """
    return copy_p.bind(x)


stop_gradient_p = unary(
    "stop_gradient", accepts=MOVABLE, impl=lambda xp, x: xp.array(x), widen=False
)
copy_p = unary(
    "copy",
    accepts=MOVABLE,
    impl=lambda xp, x: xp.array(x),
    jvp=linear,
    transpose=lambda ct, x: copy(ct),
    widen=False,
)


# ---- dtype -------------------------------------------------------------------------------------


def dtype(x: Any) -> Any:
    """The dtype of an array, of a Python number as an array, or that a name of a dtype stands for.

    Arrays may have any shape. Raises an `ArgumentError` if `x` is neither.

    >>> lax.dtype(1.5), lax.dtype("int8")
    (dtype('float32'), dtype('int8'))
    """
    if is_arraylike(x):
        return x.dtype if hasattr(x, "dtype") and not isinstance(x, np.ndarray) else typeof(x).dtype
    if x is not None:
        try:
            return dtypes.canonical(x)
        except TypeError:
            pass
    raise ArgumentError(f"dtype: {x!r} of type {type(x).__name__} is no array and no dtype")
