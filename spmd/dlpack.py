"""Arrays to and from other libraries, in the same memory: `from_dlpack`, as in `jax.dlpack`.

Another library takes an `Array` by its own `from_dlpack`. The memory is shared in both directions,
and must not be written to as long as both use it. It may be that of a GPU: then the streams of both
libraries are ordered, and the host doesn't wait.

>>> x = from_dlpack(np.ones(3, np.float32))
>>> np.from_dlpack(x)
array([1., 1., 1.], dtype=float32)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.errors import DtypeError
from spmd.base.source import current_source
from spmd.numpy import standard
from spmd.sharding.array import Array

__all__ = ["from_dlpack", "is_supported_dtype", "to_dlpack"]


def from_dlpack(external_array: Any, device: Any = None, copy: bool | None = None) -> Array:
    """Make an array of another library's array, in the same memory where that can be.

    The arguments, the result and the errors are those of `spmd.numpy.from_dlpack`:
    `external_array` is an object with `__dlpack__`, and `device` a device or sharding.

    >>> from_dlpack(np.arange(3.0, dtype=np.float32))
    Array([0., 1., 2.], dtype=float32)
    """
    return standard.from_dlpack(external_array, device=device, copy=copy)


def is_supported_dtype(dtype: Any) -> bool:
    """Return whether arrays of a dtype can be handed over.

    `dtype` is a dtype, its name, or a scalar type. NumPy, which does it, has no bfloat16. Raises
    `DtypeError` for None.

    >>> is_supported_dtype("float32"), is_supported_dtype(snp.bfloat16)
    (True, False)
    """
    if dtype is None:
        raise DtypeError(f"{current_source()}: is_supported_dtype: expected a dtype, got None")
    return np.dtype(dtype) in _SUPPORTED


_SUPPORTED = frozenset(dtypes.ANY) - dtypes.SMALL - {dtypes.bfloat16}


def to_dlpack(
    x: Array,
    stream: int | None = None,
    dl_device: tuple[int, int] | None = None,
    max_version: tuple[int, int] | None = None,
    copy: bool | None = None,
) -> Any:
    """Return a capsule of the DLPack protocol with the memory of an array.

    `x` is an `Array` on one device; the other parameters are those of `x.__dlpack__`. Raises
    `DtypeError` for dtypes that the protocol, or NumPy, has not, and `ArgumentError` for another
    stream or device.

    >>> type(to_dlpack(snp.ones(3))).__name__
    'PyCapsule'
    """
    return x.__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)
