"""`jax._src.numpy.util`: arguments as arrays of one dtype."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.as_jax.refuse import missing
from spmd.base.dtypes import is_inexact
from spmd.dtypes import result_type
from spmd.numpy import asarray

__all__ = [
    "promote_dtypes",
    "promote_dtypes_complex",
    "promote_dtypes_inexact",
    "promote_dtypes_numeric",
]
__getattr__ = missing("jax._src.numpy.util")


def promote_dtypes(*args: Any) -> list[Any]:
    """Arrays of the dtype that all have in common."""
    dtype = result_type(*args)
    return [asarray(x, dtype) for x in args]


def promote_dtypes_numeric(*args: Any) -> list[Any]:
    """Arrays of the dtype that all have in common, an integer one for bools."""
    dtype = result_type(*args)
    return [asarray(x, np.int32 if dtype == np.bool_ else dtype) for x in args]


def promote_dtypes_inexact(*args: Any) -> list[Any]:
    """Arrays of the dtype that all have in common, a floating one for integers."""
    dtype = result_type(*args)
    wide = dtype if is_inexact(dtype) else result_type(dtype, np.float32)
    return [asarray(x, wide) for x in args]


def promote_dtypes_complex(*args: Any) -> list[Any]:
    """Arrays of the complex dtype that all fit into."""
    dtype = result_type(*args, np.complex64)
    return [asarray(x, dtype) for x in args]
