"""`spmd.scipy.cluster.vq`: vector quantisation, the nearest of a book of codes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spmd import numpy as snp
from spmd.base.errors import ShapeError
from spmd.core.aval import typeof
from spmd.numpy.promotion import as_array, promote_dtypes_inexact

if TYPE_CHECKING:
    from spmd.sharding.array import Array

__all__ = ["vq"]


def vq(obs: Any, code_book: Any, check_finite: bool = True) -> tuple[Array, Array]:
    """Find the nearest code for each observation, and the distance to it.

    `obs` has shape (m, n) and `code_book` (k, n); vectors stand for n = 1. The results have shape
    (m,): integers, and floats of the dtype that both are promoted to. `check_finite` changes
    nothing: a compiled program cannot raise for a value. Raises `ShapeError` for other shapes.

    >>> book = np.array([[8.0, 9.0], [0.0, 0.0]])
    >>> spmd.scipy.cluster.vq.vq(np.array([[0.0, 1.0], [9.0, 9.0]]), book)
    (Array([1, 0], dtype=int32), Array([1., 1.], dtype=float32))
    """
    del check_finite
    points, codes = promote_dtypes_inexact(as_array(obs), as_array(code_book))
    if typeof(points).ndim == typeof(codes).ndim == 1:
        points, codes = points[:, None], codes[:, None]
    a, b = typeof(points), typeof(codes)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ShapeError(
            f"vq: obs (m, n) and code_book (k, n) must have vectors of one length, got {a} and {b}"
        )
    distances = snp.linalg.norm(points[:, None] - codes[None], axis=-1)
    return snp.argmin(distances, -1), snp.min(distances, -1)
