"""Copies of NumPy arrays as compiled code reads them fastest: on cache lines, or huge pages.

NumPy aligns to 16 bytes. A vector of 64 then lies on two cache lines wherever it is read, and a
random element of a large array costs a look-up of its small page.
"""

from __future__ import annotations

import numpy as np

_LINE = 64
# Copies of fewer bytes are read in no time however they lie; finding a place would cost more.
_ALIGNED_FROM = 4096
_HUGE_PAGE = 2 * 2**20
# From this size on NumPy itself asks for huge pages.
_ADVISED = 2 * _HUGE_PAGE


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
