"""Copies of arrays as compiled code reads them fastest: on cache lines, or huge pages.

NumPy aligns to 16 bytes. A vector of 64 then lies on two cache lines wherever it is read, and a
random element of a large array costs a look-up of its small page.
"""

from __future__ import annotations

import numpy as np

from spmd.base import dtypes

# NumPy aligns to it, and compiled code may rely on that.
_ALIGNMENT = 16
_LINE = 64
# Arrays of fewer bytes are copied as they come: alignment would cost more than it saves.
_ALIGNED_FROM = 4096
_HUGE_PAGE = 2 * 2**20
# From this size on NumPy itself asks for huge pages.
_ADVISED = 2 * _HUGE_PAGE


def why_copied(dtype: np.dtype, in_order: bool, address: int) -> str | None:
    """The reason that memory of another library can't be read where it lies; None if it can.

    `in_order` says whether its elements lie one after the other, from `address`.
    """
    wanted = dtypes.canonical(dtype)
    if wanted != dtype:
        return f"{dtype.name} becomes {wanted.name}"
    if not in_order:
        return "its elements are not one after the other"
    if address % _ALIGNMENT:
        return f"its address is no multiple of {_ALIGNMENT}"
    return None


def aligned_copy(value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A C-contiguous copy of another dtype, or the same.

    >>> aligned_copy(np.ones((100, 30)), np.dtype(np.float32)).ctypes.data % 64
    0
    """
    nbytes = value.size * dtype.itemsize
    if nbytes < _ALIGNED_FROM:
        return np.array(value, dtype, order="C")
    if nbytes < _HUGE_PAGE:
        step, room = _LINE, nbytes + _LINE
    else:
        step, room = _HUGE_PAGE, max(nbytes, _ADVISED) + _HUGE_PAGE
    memory = np.empty(room, np.uint8)
    start = -memory.__array_interface__["data"][0] % step
    copy = memory[start : start + nbytes].view(dtype).reshape(value.shape)
    np.copyto(copy, value, casting="unsafe")
    return copy
