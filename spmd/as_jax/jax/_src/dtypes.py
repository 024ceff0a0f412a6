"""`jax._src.dtypes`: the names of `jax.dtypes`, and the base of dtypes that libraries define."""

from __future__ import annotations

import numpy as np

import spmd.dtypes as _ours
from spmd.dtypes import (
    TypePromotionError,
    canonicalize_dtype,
    extended,
    finfo,
    float0,
    iinfo,
    issubdtype,
    result_type,
)

__all__ = [
    "DType",
    "ExtendedDType",
    "TypePromotionError",
    "canonicalize_dtype",
    "extended",
    "finfo",
    "float0",
    "iinfo",
    "issubdtype",
    "result_type",
    "supports_inf",
]

DType = np.dtype


class ExtendedDType:
    """The base of dtypes that libraries define; no array of spmd has one."""


def to_complex_dtype(dtype: np.dtype) -> np.dtype:
    """The complex dtype whose parts hold values of a dtype."""
    return result_type(dtype, np.complex64)


def dtype(x: object) -> np.dtype:
    """The dtype of a value."""
    return result_type(x)


def supports_inf(dtype: np.dtype) -> bool:
    """Whether a float dtype has infinities."""
    return bool(np.isinf(np.asarray(np.inf).astype(dtype).astype(np.float32)))


def __getattr__(name: str) -> object:
    return getattr(_ours, name)
