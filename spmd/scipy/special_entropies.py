"""Logarithms, odds and entropies: elementwise functions whose limits at 0 and infinity are exact.

All are public in `spmd.scipy.special`. A product with a logarithm has its own derivative where the
product's rule would give `0 * inf`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd import lax
from spmd import numpy as snp
from spmd.core.aval import typeof
from spmd.core.custom import custom_jvp
from spmd.nn import log_softmax as _log_softmax
from spmd.nn import softmax as _softmax
from spmd.numpy.promotion import (
    as_array,
    check_real,
    constant_like,
    promote_args_inexact,
    select,
)

if TYPE_CHECKING:
    from spmd.sharding.array import Array


def reals_of_one_shape(name: str, *xs: Any) -> list[Any]:
    """The operands, promoted to one float dtype and one shape."""
    out = promote_args_inexact(name, *xs)
    check_real(name, *out)
    shape = np.broadcast_shapes(*(typeof(x).shape for x in out))
    return [snp.broadcast_to(x, shape) if typeof(x).shape != shape else x for x in out]


def strong_reals(name: str, *xs: Any) -> list[Any]:
    """`reals_of_one_shape`, for functions whose results are not weakly typed, as in JAX."""
    return [lax.convert_element_type(x, typeof(x).dtype) for x in reals_of_one_shape(name, *xs)]


# ---- logarithms and odds -----------------------------------------------------------------------


def logit(x: Any) -> Array:
    """Compute the logarithm of the odds, `log(x / (1 - x))`, elementwise.

    `x` keeps its shape; integers become float32 and floats keep their dtype. Raises `ArgumentError`
    if `x` is no array, and `DtypeError` for complex numbers.

    >>> spmd.scipy.special.logit(np.array([0.0, 0.5, 1.0]))
    Array([-inf,   0.,  inf], dtype=float32)
    """
    (x,) = reals_of_one_shape("logit", x)
    return lax.sub(lax.log(x), lax.log1p(lax.neg(x)))


def expit(x: Any) -> Array:
    """Compute the logistic function, `1 / (1 + exp(-x))`, elementwise.

    `x` keeps its shape; integers become float32, floats and complex numbers keep their dtype.
    Raises `ArgumentError` if `x` is no array.

    >>> spmd.scipy.special.expit(np.array([-np.inf, 0.0, np.inf]))
    Array([0. , 0.5, 1. ], dtype=float32)
    """
    return lax.logistic(*promote_args_inexact("expit", x))


def _times_logarithm(name: str, log: Callable[[Any], Any], offset: float) -> Any:
    """`x log(y + offset)` by a function for the logarithm; 0 for x = 0, where it has no slope."""

    def value(x: Any, y: Any) -> Any:
        zero = constant_like(x, 0.0)
        is_zero = snp.logical_and(lax.eq(x, zero), lax.eq(y, y))
        return select(is_zero, zero, lax.mul(x, log(y)))

    value.__name__ = name
    function = custom_jvp(value)

    @function.defjvp
    def jvp(primals: Any, tangents: Any) -> Any:
        (x, y), (tx, ty) = primals, tangents
        slope = _ratio(x, lax.add(y, constant_like(y, offset)) if offset else y)
        return function(x, y), lax.add(lax.mul(tx, log(y)), lax.mul(ty, slope))

    return function


def _ratio(x: Any, y: Any) -> Any:
    """`x / y`, and 0 for x = 0 even where y is."""
    nothing = snp.logical_and(lax.eq(x, constant_like(x, 0.0)), lax.eq(y, constant_like(y, 0.0)))
    return select(nothing, constant_like(x, 0.0), lax.div(x, select(nothing, _one(y), y)))


def _one(y: Any) -> Any:
    return constant_like(y, 1.0)


_xlogy = _times_logarithm("_xlogy", lax.log, 0.0)
_xlog1py = _times_logarithm("_xlog1py", lax.log1p, 1.0)


def xlogy(x: Any, y: Any) -> Array:
    """Compute `x log(y)`, elementwise; it is 0 for `x = 0`, and so is its derivative in `y`.

    `x` and `y` broadcast and are promoted to one float dtype. Raises `ArgumentError` if one is no
    array, `ShapeError` if they do not broadcast, and `DtypeError` for complex numbers.

    >>> spmd.scipy.special.xlogy(np.array([0.0, 2.0]), np.array([0.0, 1.0]))
    Array([0., 0.], dtype=float32)
    """
    return _xlogy(*reals_of_one_shape("xlogy", x, y))


def xlog1py(x: Any, y: Any) -> Array:
    """Compute `x log1p(y)`, elementwise; it is 0 for `x = 0`, and so is its derivative in `y`.

    `x` and `y` broadcast and are promoted to one float dtype. Raises `ArgumentError` if one is no
    array, `ShapeError` if they do not broadcast, and `DtypeError` for complex numbers.

    >>> spmd.scipy.special.xlog1py(np.array([0.0, 2.0]), np.array([-1.0, 0.0]))
    Array([0., 0.], dtype=float32)
    """
    return _xlog1py(*reals_of_one_shape("xlog1py", x, y))


# ---- entropies ---------------------------------------------------------------------------------


def entr(x: Any) -> Array:
    """Compute `-x log(x)`, the term of an entropy, elementwise; minus infinity for negative `x`.

    `x` keeps its shape; integers become float32 and floats keep their dtype. Raises `ArgumentError`
    if `x` is no array, and `DtypeError` for complex numbers.

    >>> spmd.scipy.special.entr(np.array([-1.0, 0.5]))
    Array([     -inf, 0.3465736], dtype=float32)
    """
    return _entr(*reals_of_one_shape("entr", x))


@custom_jvp
def _entr(x: Any) -> Any:
    negative = lax.lt(x, constant_like(x, 0.0))
    return select(negative, constant_like(x, -np.inf), lax.neg(_xlogy(x, x)))


@_entr.defjvp
def _entr_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    negative = lax.lt(x, constant_like(x, 0.0))
    slope = lax.neg(lax.add(lax.log(select(negative, _one(x), x)), _one(x)))
    return _entr(x), lax.mul(t, select(negative, constant_like(x, 0.0), slope))


@custom_jvp
def _relative(p: Any, q: Any) -> Any:
    """`p log(p / q)` of positive numbers."""
    return lax.mul(p, lax.sub(lax.log(p), lax.log(q)))


@_relative.defjvp
def _relative_jvp(primals: Any, tangents: Any) -> Any:
    (p, q), (tp, tq) = primals, tangents
    in_p = lax.add(lax.sub(lax.log(p), lax.log(q)), _one(p))
    return _relative(p, q), lax.sub(lax.mul(tp, in_p), lax.mul(tq, lax.div(p, q)))


def rel_entr(p: Any, q: Any) -> Array:
    """Compute `p log(p / q)`, the term of a relative entropy, elementwise.

    It is 0 for `p = 0` and infinite outside of its domain. `p` and `q` broadcast and are promoted
    to one float dtype. Raises `ArgumentError` if one is no array, `ShapeError` if they do not
    broadcast, and `DtypeError` for complex numbers.

    >>> spmd.scipy.special.rel_entr(np.array([0.0, 0.5, 0.5]), np.array([0.5, 0.5, 0.0]))
    Array([ 0.,  0., inf], dtype=float32)
    """
    p, q = reals_of_one_shape("rel_entr", p, q)
    zero = constant_like(p, 0.0)
    both = snp.logical_and(lax.gt(p, zero), lax.gt(q, zero))
    empty = snp.logical_and(lax.eq(p, zero), lax.ge(q, zero))
    safe_p, safe_q = select(both, p, _one(p)), select(both, q, _one(q))
    return select(both, _relative(safe_p, safe_q), select(empty, zero, constant_like(p, np.inf)))


def kl_div(p: Any, q: Any) -> Array:
    """Compute `p log(p / q) - p + q`, the term of a Kullback-Leibler divergence, elementwise.

    It is infinite outside of its domain. `p` and `q` broadcast and are promoted to one float dtype.
    Raises `ArgumentError` if one is no array, `ShapeError` if they do not broadcast, and
    `DtypeError` for complex numbers.

    >>> spmd.scipy.special.kl_div(np.array([0.0, 0.5]), np.array([0.5, 0.5]))
    Array([0.5, 0. ], dtype=float32)
    """
    p, q = reals_of_one_shape("kl_div", p, q)
    return lax.add(lax.sub(rel_entr(p, q), p), q)


# ---- transformations ---------------------------------------------------------------------------


def boxcox(x: Any, lmbda: Any) -> Array:
    """Compute the Box-Cox transformation, `(x**lmbda - 1) / lmbda`, elementwise.

    For `lmbda = 0` it is `log(x)`. `x` and `lmbda` broadcast and are promoted to one float dtype.
    Raises `ArgumentError` if one is no array, `ShapeError` if they do not broadcast, and
    `DtypeError` for complex numbers.

    >>> spmd.scipy.special.boxcox(3.0, np.array([0.0, 1.0, 2.0]))
    Array([1.0986123, 2.       , 4.       ], dtype=float32)
    """
    x, lmbda = reals_of_one_shape("boxcox", x, lmbda)
    return _power_over(lmbda, lax.log(x))


def boxcox1p(x: Any, lmbda: Any) -> Array:
    """Compute the Box-Cox transformation of `1 + x`, elementwise.

    `x` and `lmbda` broadcast and are promoted to one float dtype. Raises `ArgumentError` if one is
    no array, `ShapeError` if they do not broadcast, and `DtypeError` for complex numbers.

    >>> spmd.scipy.special.boxcox1p(2.0, np.array([0.0, 1.0, 2.0]))
    Array([1.0986123, 2.       , 4.       ], dtype=float32)
    """
    x, lmbda = reals_of_one_shape("boxcox1p", x, lmbda)
    return _power_over(lmbda, lax.log1p(x))


def _power_over(lmbda: Any, log_x: Any) -> Any:
    """`expm1(lmbda log_x) / lmbda`."""
    zero = lax.eq(lmbda, constant_like(lmbda, 0.0))
    safe = select(zero, _one(lmbda), lmbda)
    return select(zero, log_x, lax.div(lax.expm1(lax.mul(safe, log_x)), safe))


def softmax(x: Any, /, *, axis: Any = None) -> Array:
    """Compute the exponentials of `x` divided by their sum along `axis`; over all dims by default.

    The shape stays; the dtype rule and the errors are those of `spmd.nn.softmax`: `ArgumentError`,
    `DimensionError`, `DtypeError`.

    >>> spmd.scipy.special.softmax(np.zeros((2, 2)))
    Array([[0.25, 0.25],
           [0.25, 0.25]], dtype=float32)
    """
    return _softmax(as_array(x), axis)


def log_softmax(x: Any, /, *, axis: Any = None) -> Array:
    """Compute the logarithm of `softmax` along `axis`; over all dims by default.

    The shape stays; the dtype rule and the errors are those of `spmd.nn.log_softmax`:
    `ArgumentError`, `DimensionError`, `DtypeError`.

    >>> spmd.scipy.special.log_softmax(np.zeros((2, 2)))
    Array([[-1.3862944, -1.3862944],
           [-1.3862944, -1.3862944]], dtype=float32)
    """
    return _log_softmax(as_array(x), axis)
