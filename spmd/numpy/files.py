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
    """Read the array in a file made by `save`, or the mapping of arrays in one made by `savez`.

    `file` is a path or an open binary file; `args` and `kwargs` are the further arguments of
    `numpy.load`. The array has the shape and dtype that it was saved with, bfloat16 too; 64-bit
    dtypes are halved unless x64 is on. The mapping is NumPy's, and its values are NumPy arrays.
    Raises a `DtypeError` for a dtype that spmd does not have, like that of text.

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
    """Make a vector of the numbers that the bytes of a buffer stand for.

    `buffer` is a `bytes` object, a NumPy array, or another object with a buffer, which is copied.
    `dtype` is that of the numbers in it, float64 by default; the result has it too, but 64-bit
    dtypes are halved unless x64 is on. `count` is the size of the result, and -1 takes all numbers.
    `offset` is the first byte that is read. Raises a `ValueError` if the bytes are too few for
    `count`, or no whole number of elements.

    >>> frombuffer(b"\\x01\\x02", dtype=np.uint8)
    Array([1, 2], dtype=uint8)
    >>> frombuffer(b"\\x01\\x02\\x03", dtype=np.uint8, count=1, offset=2)
    Array([3], dtype=uint8)
    """
    return asarray(np.frombuffer(buffer, dtype=dtype, count=count, offset=offset))


def fromstring(string: str, dtype: Any = float, count: int = -1, *, sep: str) -> Array:
    """Make a vector of the numbers in a text.

    `string` is the text, and `sep` stands between its numbers; it must not be empty. `dtype` is
    that of the numbers, float64 by default; the result has it too, but 64-bit dtypes are halved
    unless x64 is on. `count` is the size of the result, and -1 takes all numbers; the text must
    have as many.

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
    """Refuse to read numbers from a file, as in JAX.

    A traced function would read the file once, when it is traced, and never when it runs. A program
    reads it outside and passes the array: `asarray(numpy.fromfile(...))`, which has the shape and
    dtype that NumPy read. `args` and `kwargs`, those of `numpy.fromfile`, are ignored. Raises a
    `RefusedError`.

    >>> fromfile("numbers.bin", dtype=np.float32)
    Traceback (most recent call last):
    spmd.errors.RefusedError: fromfile: reading uses up the file, ...
    """
    _refuse("fromfile", "file")


def fromiter(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse to read numbers from an iterator, as in JAX.

    A traced function would use up the iterator once, when it is traced, and never when it runs. A
    program reads it outside and passes the array: `asarray(numpy.fromiter(...))`, which has the
    shape and dtype that NumPy read. `args` and `kwargs`, those of `numpy.fromiter`, are ignored.
    Raises a `RefusedError`.

    >>> asarray(np.fromiter((k * k for k in range(3)), np.int32))
    Array([0, 1, 4], dtype=int32)
    """
    _refuse("fromiter", "iterator")
