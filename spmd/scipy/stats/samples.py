"""Statistics of samples: ranks, modes, and the standard error of the mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from spmd import lax
from spmd import numpy as snp
from spmd.base.errors import ArgumentError, RefusedError
from spmd.base.util import canonical_dim
from spmd.core.aval import typeof
from spmd.numpy.promotion import (
    as_array,
    check_arraylike,
    default_float,
    promote_dtypes_inexact,
    promotes_inside,
)

if TYPE_CHECKING:
    from spmd.sharding.array import Array

_METHODS = ("average", "min", "max", "dense", "ordinal")


def _check_policy(name: str, nan_policy: str) -> None:
    if nan_policy not in ("propagate", "omit"):
        raise RefusedError(
            f"{name}: nan_policy must be 'propagate' or 'omit', got {nan_policy!r}; raising an "
            "error depends on values, which a traced function does not know"
        )


def sem(
    a: Any,
    axis: int | None = 0,
    ddof: int = 1,
    nan_policy: str = "propagate",
    *,
    keepdims: bool = False,
) -> Array:
    """Compute the standard error of the mean: the standard deviation over the root of the count.

    It goes along `axis` (None: all dims), which disappears from the shape unless `keepdims`; `ddof`
    is that of `snp.std`. With `nan_policy="omit"` NaNs do not count; "propagate" lets them win.
    Integers become float32 and floats keep their dtype. Raises `ArgumentError` for another policy
    or if `a` is no array.

    >>> spmd.scipy.stats.sem(np.array([1.0, 2.0, 3.0, 4.0]))
    Array(0.6454972, dtype=float32)
    """
    check_arraylike("sem", a)
    _check_policy("sem", nan_policy)
    (a,) = promote_dtypes_inexact(as_array(a))
    if nan_policy == "omit":
        count = snp.sum(~snp.isnan(a), axis=axis, keepdims=keepdims)
        deviation = snp.nanstd(a, axis=axis, ddof=ddof, keepdims=keepdims)
        return deviation / snp.sqrt(count.astype(typeof(a).dtype))
    size = typeof(a).size if axis is None else typeof(a).shape[axis]
    return snp.std(a, axis=axis, ddof=ddof, keepdims=keepdims) / float(size) ** 0.5


class ModeResult(NamedTuple):
    """The result of `mode`: the most frequent values, and their counts."""

    mode: Any
    count: Any


def mode(
    a: Any, axis: int | None = 0, nan_policy: str = "propagate", keepdims: bool = False
) -> ModeResult:
    """Find the most frequent values along `axis`, the smallest of several, and their counts.

    `axis=None` means all dims; it disappears from the shapes unless `keepdims`. The values keep the
    dtype of `a`; counts are integers. NaNs count as one value; `nan_policy` must be "propagate".
    Raises `ArgumentError` for another one or if `a` is no array.

    >>> spmd.scipy.stats.mode(np.array([2, 4, 1, 4, 2]))
    ModeResult(mode=Array(2, dtype=int32), count=Array(2, dtype=int32))
    """
    check_arraylike("mode", a)
    if nan_policy != "propagate":
        raise RefusedError(f"mode: nan_policy must be 'propagate', got {nan_policy!r}")
    a = snp.atleast_1d(as_array(a))
    ndim = typeof(a).ndim
    x = snp.ravel(a) if axis is None else snp.moveaxis(a, canonical_dim(axis, ndim), 0)
    if typeof(x).shape[0] == 0:
        shape = typeof(x).shape[1:]
        found = ModeResult(
            snp.full(shape, snp.nan, default_float()), snp.zeros(shape, default_float())
        )
    else:
        found = _modes(snp.sort(x, axis=0))
    if not keepdims:
        return found
    at = tuple(range(ndim)) if axis is None else canonical_dim(axis, ndim)
    return ModeResult(*(snp.expand_dims(y, at) for y in found))


def _modes(x: Any) -> ModeResult:
    """The longest runs along dim 0 of sorted values."""
    same = x[1:] == x[:-1]
    if snp.issubdtype(typeof(x).dtype, snp.inexact):
        same = same | (snp.isnan(x[1:]) & snp.isnan(x[:-1]))
    n, *rest = typeof(x).shape
    place = snp.reshape(snp.arange(n), (n, *[1] * len(rest)))
    starts = snp.where(snp.concatenate([snp.zeros_like(x[:1], bool), same]), 0, place)
    length = place - lax.cummax(starts, axis=0) + 1
    best = snp.argmax(length, axis=0)
    value = snp.take_along_axis(x, best[None], 0)[0]
    return ModeResult(value, snp.max(length, axis=0))


@promotes_inside()
def rankdata(
    a: Any, method: str = "average", *, axis: int | None = None, nan_policy: str = "propagate"
) -> Array:
    """Compute the ranks of the elements along `axis`, from 1.

    `axis=None` ranks the flattened array. `method` says what equal elements get: the "average",
    "min" or "max" of their ranks, one rank without gaps ("dense"), or ranks in order of position
    ("ordinal"). The shape stays, for `axis=None` that of a vector; the dtype is the default float
    dtype. The ranks of a vector with a NaN are NaN; `nan_policy` must be "propagate". Raises
    `ArgumentError` for another method or policy, or if `a` is no array.

    >>> spmd.scipy.stats.rankdata(np.array([10, 30, 10]))
    Array([1.5, 3. , 1.5], dtype=float32)
    """
    check_arraylike("rankdata", a)
    if method not in _METHODS:
        raise ArgumentError(f"rankdata: method must be one of {_METHODS}, got {method!r}")
    if nan_policy != "propagate":
        raise RefusedError(f"rankdata: nan_policy must be 'propagate', got {nan_policy!r}")
    a = as_array(a)
    if axis is None:
        return _ranks(snp.ravel(a), method)
    axis = canonical_dim(axis, typeof(a).ndim)
    return snp.apply_along_axis(lambda row: _ranks(row, method), axis, a)


def _ranks(a: Any, method: str) -> Any:
    size = typeof(a).shape[0]
    order = snp.argsort(a)
    place = snp.argsort(order)
    if method == "ordinal" or size == 0:
        ranks = place + 1
    else:
        sorted_a = a[order]
        first = snp.concatenate([snp.ones(1, bool), sorted_a[1:] != sorted_a[:-1]])
        dense = snp.cumsum(first)[place]
        # The place after the last element of each group of equals; index 0 is before the first.
        starts = snp.nonzero(first, size=size + 1, fill_value=size)[0]
        low, high = starts[dense - 1] + 1, starts[dense]
        ranks = {"dense": dense, "min": low, "max": high}.get(method)
        ranks = 0.5 * (low + high) if ranks is None else ranks
    ranks = ranks.astype(default_float())
    if snp.issubdtype(typeof(a).dtype, snp.inexact):
        return snp.where(snp.any(snp.isnan(a)), snp.nan, ranks)
    return ranks
