"""`spmd.scipy.interpolate`: interpolation on a rectangular grid."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd import numpy as snp
from spmd.base.errors import ArgumentError, DtypeArgumentError, RefusedError, ShapeError
from spmd.core.aval import typeof
from spmd.numpy.promotion import as_array, promote_dtypes_inexact

__all__ = ["RegularGridInterpolator"]


class RegularGridInterpolator:
    """Interpolate values that are known on a rectangular grid, linearly or by the nearest one.

    `points` are the grid's coordinates, one ascending vector for each of the first dims of
    `values`. Outside of the grid the result is `fill_value`; with `fill_value=None` the outermost
    cells are extrapolated.

    >>> f = RegularGridInterpolator((snp.arange(3.0),), snp.asarray([0.0, 10.0, 40.0]))
    >>> f(snp.asarray([[0.5], [1.5]]))
    Array([ 5., 25.], dtype=float32)
    """

    def __init__(
        self,
        points: Sequence[Any],
        values: Any,
        method: str = "linear",
        bounds_error: bool = False,
        fill_value: Any = np.nan,
    ):
        if method not in ("linear", "nearest"):
            raise ArgumentError(
                f"RegularGridInterpolator: method must be 'linear' or 'nearest', got {method!r}"
            )
        if bounds_error:
            raise RefusedError(
                "RegularGridInterpolator: bounds_error=True depends on values, which a traced "
                "function does not know; use fill_value"
            )
        (values,) = promote_dtypes_inexact(as_array(values))
        if fill_value is not None and not snp.can_cast(
            typeof(as_array(fill_value)).dtype, typeof(values).dtype, casting="same_kind"
        ):
            raise DtypeArgumentError(
                f"RegularGridInterpolator: fill_value={fill_value!r} does not fit values of dtype "
                f"{typeof(values).dtype}; convert values, or give fill_value=None"
            )
        grid = tuple(as_array(p) for p in points)
        shape = typeof(values).shape
        if len(grid) > len(shape):
            raise ShapeError(
                f"RegularGridInterpolator: {len(grid)} vectors of points, but values has shape "
                f"{shape}"
            )
        for k, p in enumerate(grid):
            if typeof(p).shape != (shape[k],):
                raise ShapeError(
                    f"RegularGridInterpolator: points[{k}] must be a vector of {shape[k]} "
                    f"elements, as values has shape {shape}; got {typeof(p)}"
                )
        self.grid, self.values = grid, values
        self.method, self.bounds_error, self.fill_value = method, bounds_error, fill_value

    def __call__(self, xi: Any, method: str | None = None) -> Any:
        """The values at `xi`: coordinates along the last dim, or a tuple of arrays of them."""
        method = self.method if method is None else method
        if method not in ("linear", "nearest"):
            raise ArgumentError(
                f"RegularGridInterpolator: method must be 'linear' or 'nearest', got {method!r}"
            )
        count = len(self.grid)
        if isinstance(xi, (tuple, list)):
            xi = snp.stack(snp.broadcast_arrays(*xi), axis=-1)
        (xi,) = promote_dtypes_inexact(as_array(xi))
        if typeof(xi).ndim == 1:  # points of a grid of one dim; else one point, a list of one
            xi = xi[:, None] if count == 1 else xi[None]
        if typeof(xi).ndim == 0 or typeof(xi).shape[-1] != count:
            raise ShapeError(
                f"RegularGridInterpolator: the last dim of xi must be {count}, the number of the "
                f"grid's dims; got {typeof(xi)}"
            )
        columns = [xi[..., k] for k in range(count)]
        cells = [_cell(p, x) for p, x in zip(self.grid, columns, strict=True)]
        out = (self._linear if method == "linear" else self._nearest)(cells)
        if self.fill_value is None:
            return out
        outside = snp.zeros(typeof(columns[0]).shape, bool)
        for p, x in zip(self.grid, columns, strict=True):
            outside = outside | (x < p[0]) | (x > p[-1])
        return snp.where(_over(outside, out), self.fill_value, out)

    def _linear(self, cells: Sequence[tuple[Any, Any]]) -> Any:
        """The corners of each cell, weighed by the distances from the opposite ones."""
        total = 0.0
        for corner in itertools.product((0, 1), repeat=len(cells)):
            places = tuple(i + side for (i, _), side in zip(cells, corner, strict=True))
            weight = 1.0
            for (_, fraction), side in zip(cells, corner, strict=True):
                weight = weight * (fraction if side else 1 - fraction)
            corner_values = self.values[places]
            total = total + corner_values * _over(weight, corner_values)
        return total

    def _nearest(self, cells: Sequence[tuple[Any, Any]]) -> Any:
        return self.values[tuple(snp.where(f <= 0.5, i, i + 1) for i, f in cells)]


def _over(x: Any, like: Any) -> Any:
    """`x` with dims of size 1 after its own, to the rank of `like`."""
    missing = typeof(like).ndim - typeof(as_array(x)).ndim
    return snp.reshape(x, (*typeof(as_array(x)).shape, *(1,) * missing))


def _cell(points: Any, x: Any) -> tuple[Any, Any]:
    """The number of the cell in which x lies, and where inside: 0 at its start, 1 at its end."""
    last = typeof(points).shape[0] - 2
    if last < 0:
        raise ShapeError("RegularGridInterpolator: each vector of points needs two at least")
    place = snp.clip(snp.searchsorted(points, x, side="right") - 1, 0, last)
    start, end = points[place], points[place + 1]
    return place, (x - start) / (end - start)
