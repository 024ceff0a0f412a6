"""`spmd.scipy.integrate`: the trapezoidal rule."""

from __future__ import annotations

from spmd.numpy.numerical import trapezoid

__all__ = ["trapezoid"]
