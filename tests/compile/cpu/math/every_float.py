"""The error of compiled f32 functions over the bit patterns of f32, in units of the last place.

The comparison is itself a compiled program: the function in f32, the same function in f64 as the
reference (within a few units of *its* last place, see `test_accuracy.py`), the distance, and the
worst place. That is what makes all 2**32 arguments a matter of a minute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import spmd
import spmd.numpy as snp
from spmd import lax

PATTERNS = 1 << 32
CHUNK = 1 << 22

# What a NaN, an infinity or a zero of the wrong sign counts for.
WRONG = 1e9


@dataclass(frozen=True)
class Worst:
    """The largest error found, and the bit pattern of its argument."""

    ulps: float
    bits: int

    @property
    def argument(self) -> np.float32:
        """The argument as a float."""
        return np.array(self.bits, np.uint32).view(np.float32)[()]

    def __str__(self) -> str:
        return f"{self.ulps:.3f} ulp at {self.argument!r} (bits 0x{self.bits:08x})"


def worst_error(function: Callable[[Any], Any], first: int, last: int, step: int = 1) -> Worst:
    """Compare `function` in f32 and f64 at the bit patterns first, first + step, ... below last."""
    with spmd.config.override("enable_x64", True):
        program = spmd.jit(lambda start: _scan(function, start, step))
        found = Worst(-1.0, 0)
        for start in range(first, last, CHUNK * step):
            ulps, place = (np.asarray(part) for part in program(np.uint64(start)))
            bits = start + int(place) * step
            if bits < last and ulps > found.ulps:
                found = Worst(float(ulps), bits)
    return found


def _scan(function: Callable[[Any], Any], start: Any, step: int) -> tuple[Any, Any]:
    numbers = lax.add(start, lax.mul(lax.iota(np.uint64, CHUNK), np.uint64(step)))
    x = lax.bitcast_convert_type(lax.convert_element_type(numbers, np.uint32), np.float32)
    error = distance(function(x), function(lax.convert_element_type(x, np.float64)))
    # Past the end: the patterns start again from zero, and count for nothing.
    error = snp.where(numbers < np.uint64(PATTERNS), error, -1.0)
    return snp.max(error), snp.argmax(error)


def distance(got: Any, exact: Any) -> Any:
    """The distance of f32 results to exact ones (f64) in units of the f32 result's last place.

    An overflow counts as 2**128, the next float there would be.
    """
    top = np.float64(2.0**128)
    close = snp.clip(exact, -top, top)
    given = snp.clip(lax.convert_element_type(got, np.float64), -top, top)
    exponent = lax.shift_right_logical(
        lax.bitcast_convert_type(snp.abs(close), np.uint64), np.uint64(52)
    )
    # The last place of 2**k is 2**(k - 23), and that of denormals 2**-149.
    exponent = snp.maximum(exponent, np.uint64(1023 - 126)) - np.uint64(23)
    exponent = snp.minimum(exponent, np.uint64(1023 + 127 - 23))
    unit = lax.bitcast_convert_type(lax.shift_left(exponent, np.uint64(52)), np.float64)
    error = snp.abs(given - close) / unit
    negative = lax.bitcast_convert_type(got, np.uint32) >> np.uint32(31)
    below = lax.bitcast_convert_type(exact, np.uint64) >> np.uint64(63)
    other_zero = (got == 0) & (lax.convert_element_type(negative, np.uint64) != below)
    broken = snp.isnan(got) != snp.isnan(exact)
    error = snp.where(broken | other_zero, WRONG, error)
    return snp.where(snp.isnan(got) & snp.isnan(exact), 0.0, error)
