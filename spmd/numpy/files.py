"""Arrays from files, buffers and text, and as text: `load`, `save`, `frombuffer`, `array_repr`."""

# ruff: noqa: F401

from __future__ import annotations

import os
from typing import IO, Any, NoReturn

import numpy as np
from numpy import array_repr, array_str, save, savez

from spmd.base import dtypes
from spmd.base.errors import RefusedError
from spmd.numpy.creation import asarray
from spmd.sharding.array import Array

_VOID_16 = np.dtype("V2")


def load(file: IO[bytes] | str | os.PathLike[Any], *args: Any, **kwargs: Any) -> Any:
    """The array in a file made by `save`; of one made by `savez`, NumPy's mapping of arrays.

    >>> import io
    >>> file = io.BytesIO()
    >>> spmd.numpy.save(file, spmd.numpy.arange(3, dtype="bfloat16"))
    >>> _ = file.seek(0)
    >>> load(file)
    Array([0, 1, 2], dtype=bfloat16)
    """
    found = np.load(file, *args, **kwargs)
    if not isinstance(found, np.ndarray):
        return found
    # NumPy has no name for bfloat16 and writes it as two bytes without meaning.
    found = found.view(dtypes.bfloat16) if found.dtype == _VOID_16 else found
    return asarray(found)


def frombuffer(buffer: Any, dtype: Any = float, count: int = -1, offset: int = 0) -> Array:
    """A copy of the numbers that the bytes of a buffer are, from `offset` on.

    >>> frombuffer(b"\\x01\\x02", dtype=np.uint8)
    Array([1, 2], dtype=uint8)
    """
    return asarray(np.frombuffer(buffer, dtype=dtype, count=count, offset=offset))


def fromstring(string: str, dtype: Any = float, count: int = -1, *, sep: str) -> Array:
    """The numbers of a text in which `sep` stands between them.

    >>> fromstring("1 2 3", dtype=int, sep=" ")
    Array([1, 2, 3], dtype=int32)
    """
    return asarray(np.fromstring(string, dtype=dtype, count=count, sep=sep))


def _refuse(name: str, source: str) -> NoReturn:
    raise RefusedError(
        f"{name}: reading uses up the {source}, once when a function is traced and never when it "
        f"runs; read it outside and pass the array: asarray(numpy.{name}(...))"
    )


def fromfile(*args: Any, **kwargs: Any) -> NoReturn:
    """Refused, as in JAX: a file is used up; use `asarray(numpy.fromfile(...))`."""
    _refuse("fromfile", "file")


def fromiter(*args: Any, **kwargs: Any) -> NoReturn:
    """Refused, as in JAX: an iterator is used up; use `asarray(numpy.fromiter(...))`."""
    _refuse("fromiter", "iterator")
