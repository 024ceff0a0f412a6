"""`gaussian_kde`: a density estimated from a sample, as a sum of one normal density a point.

Dims: D dimensions of the data, N points of the sample, M points asked about.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from spmd import numpy as snp
from spmd import random
from spmd.base.errors import ArgumentError, ShapeError
from spmd.base.tree import register_pytree_node_class
from spmd.core.aval import typeof
from spmd.nn import logsumexp
from spmd.numpy.promotion import (
    check_arraylike,
    check_real,
    promote_dtypes_inexact,
)
from spmd.scipy.linalg.factors import cho_factor, cho_solve
from spmd.scipy.special import ndtr


@register_pytree_node_class
@dataclasses.dataclass(frozen=True, init=False)
class gaussian_kde:
    """A Gaussian kernel density estimate of `dataset` (D, N) or (N,), with `weights` (N,).

    `bw_method` is "scott" (the default), "silverman", a number that scales the data's covariance,
    or a function of the estimate that returns one. It is a pytree: it may be an argument of jitted
    functions, and be differentiated.

    >>> kde = gaussian_kde(snp.asarray([0.0, 1.0, 1.5, 4.0]))
    >>> bool(kde.integrate_box_1d(-100.0, 100.0) > 0.999)
    True
    """

    neff: Any
    dataset: Any
    weights: Any
    covariance: Any
    inv_cov: Any

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        """The arrays, and nothing beside them."""
        return tuple(getattr(self, name) for name in _FIELDS), None

    @classmethod
    def tree_unflatten(cls, aux_data: None, children: Any) -> gaussian_kde:
        """The estimate of these arrays."""
        del aux_data
        kde = object.__new__(cls)
        for name, value in zip(_FIELDS, children, strict=True):
            object.__setattr__(kde, name, value)
        return kde

    def __init__(
        self,
        dataset: Any,
        bw_method: str | float | Callable[[gaussian_kde], Any] | None = None,
        weights: Any = None,
    ):
        check_arraylike("gaussian_kde", dataset)
        data = snp.atleast_2d(dataset)
        check_real("gaussian_kde", data)
        d, n = typeof(data).shape
        if d * n < 2:
            raise ShapeError(f"gaussian_kde: dataset needs several elements, got {typeof(data)}")
        if weights is None:
            (data,) = promote_dtypes_inexact(data)
            weights = snp.full(n, 1.0 / n, typeof(data).dtype)
        else:
            check_arraylike("gaussian_kde", weights)
            data, weights = promote_dtypes_inexact(data, snp.atleast_1d(weights))
            if typeof(weights).shape != (n,):
                raise ShapeError(
                    f"gaussian_kde: weights must have shape ({n},), one for each point, got "
                    f"{typeof(weights).shape}"
                )
            weights = weights / snp.sum(weights)
        neff = 1 / snp.sum(weights**2)
        for name, value in (("dataset", data), ("weights", weights), ("neff", neff)):
            object.__setattr__(self, name, value)
        factor = self._factor(bw_method, d)
        own = snp.atleast_2d(snp.cov(data, rowvar=True, bias=False, aweights=weights))
        object.__setattr__(self, "covariance", own * factor**2)
        object.__setattr__(self, "inv_cov", snp.linalg.inv(own) / factor**2)

    def _factor(self, method: Any, d: int) -> Any:
        if method is None or method == "scott":
            return snp.power(self.neff, -1.0 / (d + 4))
        if method == "silverman":
            return snp.power(self.neff * (d + 2) / 4.0, -1.0 / (d + 4))
        if callable(method):
            return method(self)
        if isinstance(method, str) or snp.ndim(method):
            raise ArgumentError(
                f"gaussian_kde: bw_method={method!r} must be 'scott', 'silverman', a number or a "
                "function"
            )
        return method

    @property
    def d(self) -> int:
        """The number of dimensions the data has."""
        return typeof(self.dataset).shape[0]

    @property
    def n(self) -> int:
        """The number of points the sample has."""
        return typeof(self.dataset).shape[1]

    # ---- densities ----

    def logpdf(self, x: Any) -> Any:
        """The logarithm of the density at points (D, M), or (M,) in one dimension."""
        check_arraylike("gaussian_kde.logpdf", x)
        points_DM = self._points(x)
        root = snp.linalg.cholesky(self.inv_cov)
        white_ND = snp.matmul(snp.transpose(self.dataset), root)
        asked_MD = snp.matmul(snp.transpose(points_DM), root)
        squares = snp.sum(snp.square(asked_MD[:, None, :] - white_ND[None, :, :]), -1)
        scale = snp.sum(snp.log(snp.diagonal(root))) - 0.5 * self.d * math.log(2 * math.pi)
        return logsumexp(scale - 0.5 * squares + snp.log(self.weights), axis=1)

    def evaluate(self, points: Any) -> Any:
        """The density at points (D, M), or (M,) in one dimension."""
        return snp.exp(self.logpdf(points))

    def pdf(self, x: Any) -> Any:
        """The density, as `evaluate`."""
        return self.evaluate(x)

    def __call__(self, points: Any) -> Any:
        return self.evaluate(points)

    def _points(self, points: Any) -> Any:
        points = snp.atleast_2d(points)
        check_real("gaussian_kde", points)
        d, m = typeof(points).shape
        if d == self.d:
            return points
        if d == 1 and m == self.d:
            return snp.reshape(points, (self.d, 1))
        raise ShapeError(f"gaussian_kde: points have dimension {d}, the dataset has {self.d}")

    # ---- integrals ----

    def integrate_gaussian(self, mean: Any, cov: Any) -> Any:
        """The integral of the density times a normal density with this mean and covariance."""
        mean, cov = snp.atleast_1d(snp.squeeze(mean)), snp.atleast_2d(cov)
        if typeof(mean).shape != (self.d,) or typeof(cov).shape != (self.d, self.d):
            raise ShapeError(
                f"gaussian_kde.integrate_gaussian: mean must be ({self.d},) and cov "
                f"({self.d}, {self.d}), got {typeof(mean).shape} and {typeof(cov).shape}"
            )
        return snp.sum(self._convolved(self.covariance + cov, mean[:, None])[:, 0])

    def integrate_box_1d(self, low: Any, high: Any) -> Any:
        """The probability between two limits, in one dimension."""
        if self.d != 1 or snp.ndim(low) or snp.ndim(high):
            raise ArgumentError(
                "gaussian_kde.integrate_box_1d: the data must have one dimension and the limits "
                f"be scalars, got {self.d} dimensions"
            )
        deviation = snp.sqrt(self.covariance[0, 0])
        below, above = ((limit - self.dataset[0]) / deviation for limit in (low, high))
        return snp.sum(self.weights * (ndtr(above) - ndtr(below)))

    def integrate_kde(self, other: gaussian_kde) -> Any:
        """The integral of the product of two estimated densities."""
        if other.d != self.d:
            raise ShapeError(
                f"gaussian_kde.integrate_kde: the estimates have {self.d} and {other.d} dimensions"
            )
        parts = self._convolved(self.covariance + other.covariance, other.dataset)
        return snp.sum(parts * other.weights)

    def _convolved(self, covariance: Any, means_DM: Any) -> Any:
        """Weighted normal densities of all differences between points and means, (N, M)."""
        root = cho_factor(covariance)
        gaps_DNM = self.dataset[:, :, None] - means_DM[:, None, :]
        flat = snp.reshape(gaps_DNM, (self.d, -1))
        squares = snp.sum(flat * cho_solve(root, flat), 0)
        norm = snp.power(2 * math.pi, self.d / 2) * snp.prod(snp.diagonal(root[0]))
        density = snp.exp(-0.5 * snp.reshape(squares, typeof(gaps_DNM).shape[1:])) / norm
        return density * self.weights[:, None]

    # ---- samples ----

    def resample(self, key: Any, shape: tuple[int, ...] = ()) -> Any:
        """Draws from the estimated density, (D, *shape)."""
        which, noise = random.split(key)
        chosen = random.choice(which, self.n, shape=shape, p=self.weights)
        zero = snp.zeros(self.d, typeof(self.covariance).dtype)
        dtype = typeof(self.dataset).dtype
        moved = random.multivariate_normal(noise, zero, self.covariance, shape=shape, dtype=dtype)
        return self.dataset[:, chosen] + snp.moveaxis(moved, -1, 0)

    def integrate_box(self, low_bounds: Any, high_bounds: Any, maxpts: Any = None) -> Any:
        """Not supported, as in JAX: only `integrate_box_1d` is."""
        raise NotImplementedError("gaussian_kde: only boxes in one dimension; integrate_box_1d")

    def set_bandwidth(self, bw_method: Any = None) -> Any:
        """Not supported, as in JAX: an estimate does not change; make another one."""
        raise NotImplementedError("gaussian_kde: make another estimate with this bw_method")


_FIELDS = tuple(f.name for f in dataclasses.fields(gaussian_kde))
