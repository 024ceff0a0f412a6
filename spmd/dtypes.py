"""dtypes: promotion, limits, and the extended dtypes of typed PRNG keys."""

# ruff: noqa: F401

from __future__ import annotations

from typing import Any

import numpy as _np
from ml_dtypes import bfloat16

from spmd.base import dtypes as _dtypes
from spmd.base.dtypes import (
    extended,
    finfo,
    float0,
    iinfo,
    issubdtype,
    prng_key,
    promote_types,
)
from spmd.base.dtypes import is_bool as _is_bool
from spmd.base.dtypes import is_complex as _is_complex
from spmd.base.dtypes import is_integer as _is_integer
from spmd.base.errors import ArgumentError as _ArgumentError
from spmd.base.errors import DtypeArgumentError, TypePromotionError
from spmd.core.aval import typeof as _typeof


def canonicalize_dtype(dtype: Any, allow_extended_dtype: bool = False) -> _np.dtype:
    """The dtype that arrays of `dtype` have: 64-bit ones are halved unless x64 is on.

    Raises `DtypeArgumentError` for the dtype of typed keys unless `allow_extended_dtype`, and
    `DtypeError` for what is no dtype.

    >>> canonicalize_dtype(np.float64)
    dtype('float32')
    """
    found = _dtypes.canonical(dtype)
    if _dtypes.is_key(found) and not allow_extended_dtype:
        raise DtypeArgumentError(
            f"canonicalize_dtype: {dtype} is an extended dtype; give allow_extended_dtype=True"
        )
    return found


def result_type(*args: Any, return_weak_type_flag: bool = False) -> Any:
    """The dtype that values (or dtypes) promote to; with the flag also whether it is weak.

    >>> result_type(np.ones(1, np.float32), 1)
    dtype('float32')
    """
    if not args:
        raise _ArgumentError("result_type: give at least one array, number or dtype")
    pairs = []
    for x in args:
        try:
            aval = _typeof(x)
            pairs.append((aval.dtype, aval.weak_type))
        except TypeError:
            pairs.append((_dtypes.canonical(x), False))
    dtype, weak = _dtypes.promote(tuple(pairs))
    return (dtype, weak) if return_weak_type_flag else dtype


def itemsize_bits(dtype: Any) -> int:
    """The number of bits of an element.

    >>> itemsize_bits(bfloat16)
    16
    """
    return _dtypes.bits_of(_np.dtype(dtype))


def scalar_type_of(x: Any) -> type:
    """The Python type of a value's elements: bool, int, float or complex.

    >>> scalar_type_of(np.ones(1, np.float16))
    <class 'float'>
    """
    dtype = _typeof(x).dtype
    if _is_bool(dtype):
        return bool
    if _is_integer(dtype):
        return int
    return complex if _is_complex(dtype) else float
