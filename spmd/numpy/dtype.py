"""The dtype names of `spmd.numpy` (`float32`, `bfloat16`, ...) and the questions about dtypes.

A name like `float32` is both a dtype (wherever one is expected) and a function that makes an array
of that dtype: `snp.float32(1)`.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, DtypeArgumentError
from spmd.base.transfers import report_creation
from spmd.compile.executable.nan_check import check_created
from spmd.core.aval import is_arraylike, typeof
from spmd.core.trace import Tracer
from spmd.sharding.array import Array


class ScalarType(type):
    """The class of dtype names: equal to the NumPy type, and callable to make arrays."""

    dtype: np.dtype

    def __hash__(cls) -> int:
        return hash(cls.dtype.type)

    def __eq__(cls, other: object) -> bool:
        return cls is other or cls.dtype.type == other

    def __ne__(cls, other: object) -> bool:
        return not cls == other

    def __call__(cls, x: Any = 0) -> Any:
        dtype = dtypes.canonical(cls.dtype)
        if not isinstance(x, (Array, Tracer)):
            report_creation(cls.__name__)
        given = dtypes.exact(x, dtype)
        given = given if is_arraylike(given) else np.asarray(given)
        made = lax.convert_element_type(given, dtype)
        check_created(cls.__name__, made, x)
        return made

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.dtype.type)

    def __repr__(cls) -> str:
        return f"<dtype name spmd.numpy.{cls.__name__}>"


def _scalar_type(kind: Any, name: str = "") -> Any:
    dtype = np.dtype(kind)
    members = {"dtype": dtype, "__doc__": f"The dtype {dtype.name}; called, makes such an array."}
    return ScalarType(name or dtype.name, (), members)


bool_ = _scalar_type(np.bool_, "bool_")
int8 = _scalar_type(np.int8)
int16 = _scalar_type(np.int16)
int32 = _scalar_type(np.int32)
int64 = _scalar_type(np.int64)
uint8 = _scalar_type(np.uint8)
uint16 = _scalar_type(np.uint16)
uint32 = _scalar_type(np.uint32)
uint64 = _scalar_type(np.uint64)
bfloat16 = _scalar_type(ml_dtypes.bfloat16)
float16 = _scalar_type(np.float16)
float32 = single = _scalar_type(np.float32)
float64 = double = _scalar_type(np.float64)
complex64 = csingle = _scalar_type(np.complex64)
complex128 = cdouble = _scalar_type(np.complex128)
# For storage: computing converts to a wider dtype, and rounds.
int1 = _scalar_type(ml_dtypes.int1)
int2 = _scalar_type(ml_dtypes.int2)
int4 = _scalar_type(ml_dtypes.int4)
uint1 = _scalar_type(ml_dtypes.uint1)
uint2 = _scalar_type(ml_dtypes.uint2)
uint4 = _scalar_type(ml_dtypes.uint4)
float4_e2m1fn = _scalar_type(ml_dtypes.float4_e2m1fn)
float6_e2m3fn = _scalar_type(ml_dtypes.float6_e2m3fn)
float6_e3m2fn = _scalar_type(ml_dtypes.float6_e3m2fn)
float8_e3m4 = _scalar_type(ml_dtypes.float8_e3m4)
float8_e4m3 = _scalar_type(ml_dtypes.float8_e4m3)
float8_e4m3b11fnuz = _scalar_type(ml_dtypes.float8_e4m3b11fnuz)
float8_e4m3fn = _scalar_type(ml_dtypes.float8_e4m3fn)
float8_e4m3fnuz = _scalar_type(ml_dtypes.float8_e4m3fnuz)
float8_e5m2 = _scalar_type(ml_dtypes.float8_e5m2)
float8_e5m2fnuz = _scalar_type(ml_dtypes.float8_e5m2fnuz)
float8_e8m0fnu = _scalar_type(ml_dtypes.float8_e8m0fnu)
# Canonicalised on use: 32 bits unless x64 is on.
int_ = int64
uint = uint64
float_ = float64
complex_ = complex128

dtype = np.dtype


_KINDS = {
    "bool": dtypes.is_bool,
    "signed integer": lambda d: dtypes.is_integer(d) and not dtypes.is_unsigned(d),
    "unsigned integer": dtypes.is_unsigned,
    "integral": dtypes.is_integer,
    "real floating": dtypes.is_float,
    "complex floating": dtypes.is_complex,
    "numeric": lambda d: dtypes.is_integer(d) or dtypes.is_inexact(d),
}


def isdtype(dtype: Any, kind: Any) -> bool:
    """Test whether a dtype is of a kind, as the array API standard names kinds.

    `dtype` is a dtype, its name, or a scalar type like `float32`. `kind` is such a dtype too, or
    one of the words "bool", "signed integer", "unsigned integer", "integral", "real floating",
    "complex floating" and "numeric". It may also be a tuple of these, of which one must fit. The
    result is a Python bool; bfloat16 is a real floating dtype. Raises a `DtypeArgumentError` for
    another word.

    >>> isdtype(float32, ("real floating", "complex floating"))
    True
    >>> isdtype(uint8, "signed integer")
    False
    """
    if isinstance(kind, tuple):
        return any(isdtype(dtype, k) for k in kind)
    if isinstance(kind, str) and kind in _KINDS:
        return _KINDS[kind](np.dtype(dtype))
    try:
        return np.dtype(dtype) == np.dtype(kind)
    except TypeError:
        raise DtypeArgumentError(
            f"isdtype: kind={kind!r} is no dtype, and none of the words {', '.join(_KINDS)}"
        ) from None


def can_cast(from_: Any, to: Any, casting: str = "safe") -> bool:
    """Test whether values of one dtype can be converted to another under NumPy's casting rule.

    `from_` is a dtype or an array of any shape, of which only the dtype counts and not the values;
    a Python number is refused. `to` is a dtype. `casting` is the rule: "no", "equiv", "safe" (the
    default), "same_kind" or "unsafe". The result is a Python bool. Raises a `ValueError` for
    another rule, and a `TypeError` for a name that is no dtype.

    >>> can_cast(int16, float32), can_cast(int32, float32)
    (True, False)
    >>> can_cast(int32, float32, "same_kind")
    True
    """
    if type(from_) in (int, float, complex):
        raise ArgumentError(
            f"can_cast: {from_!r} is a Python number, whose dtype depends on what it meets; give a "
            "dtype or an array"
        )
    source = typeof(from_).dtype if is_arraylike(from_) else np.dtype(from_)
    return np.can_cast(source, np.dtype(to), casting=casting)  # type: ignore[arg-type]


def issubdtype(arg1: Any, arg2: Any) -> bool:
    """Test whether a dtype is another one, or belongs to an abstract type like `floating`.

    `arg1` and `arg2` are dtypes, their names, scalar types, or abstract types. The answers are
    those of `numpy.issubdtype`, but bfloat16 belongs to `floating`. The result is a Python bool.
    Raises a `TypeError` for a name that is no dtype.

    >>> issubdtype(bfloat16, floating), issubdtype(int8, floating)
    (True, False)
    """
    return dtypes.issubdtype(arg1, arg2)
