"""Activation functions, elementwise: `relu`, `gelu`, `silu`, `softplus`, ...

Those with a kink have the derivative that JAX gives them there (`relu`: 0 at 0).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from spmd import lax
from spmd.base.errors import ShapeError
from spmd.core.aval import typeof
from spmd.core.custom import custom_jvp
from spmd.numpy.creation import full_like
from spmd.numpy.floats import logaddexp
from spmd.numpy.joining import split
from spmd.numpy.programs import one_program
from spmd.numpy.promotion import (
    as_array,
    operand,
    promote_args_inexact,
    promote_dtypes_inexact,
)
from spmd.numpy.reductions import canonical_axis
from spmd.numpy.searching import where
from spmd.numpy.selection import clip
from spmd.numpy.ufuncs import absolute, expm1, maximum, minimum, sqrt, square, tanh

if TYPE_CHECKING:
    from spmd.sharding.array import Array


def _array(name: str, x: Any) -> Any:
    return as_array(operand(name, x))


# ---- with kinks --------------------------------------------------------------------------------


@custom_jvp
def relu(x: Any) -> Array:
    """Compute `max(x, 0)`, elementwise; its derivative at 0 is 0.

    The shape and the dtype of `x` stay, for integers too; booleans become int32. Raises
    `ArgumentError` if `x` is no array.

    >>> spmd.nn.relu(np.array([-1.0, 0.0, 2.0]))
    Array([0., 0., 2.], dtype=float32)
    """
    return maximum(x, 0)


# The result tells as well as `x` where the slope is 1, so only the result is kept.
relu.defjvps(lambda g, out, x: lax.select(out > 0, g, full_like(g, 0)))


@custom_jvp
@one_program()
def relu6(x: Any) -> Array:
    """Compute `min(max(x, 0), 6)`, elementwise; its derivative is 0 at 0 and at 6.

    The shape of `x` stays; integers become float32 and floats keep their dtype. Raises
    `ArgumentError` if `x` is no array.

    >>> spmd.nn.relu6(np.array([-1.0, 3.0, 8.0]))
    Array([0., 3., 6.], dtype=float32)
    """
    return minimum(maximum(x, 0), 6.0)


relu6.defjvps(lambda g, out, x: lax.select((x > 0) & (x < 6), g, full_like(g, 0)))


@one_program()
def leaky_relu(x: Any, negative_slope: Any = 0.01) -> Array:
    """Compute `x` above 0 and `negative_slope * x` below, elementwise.

    `x` and `negative_slope` broadcast; integers become float32 and floats keep their dtype. Raises
    `ArgumentError` if `x` is no array.

    >>> spmd.nn.leaky_relu(np.array([-1.0, 2.0]))
    Array([-0.01,  2.  ], dtype=float32)
    """
    x = _array("leaky_relu", x)
    return where(x >= 0, x, negative_slope * x)


@one_program()
def hard_tanh(x: Any) -> Array:
    """Limit `x` to at least -1 and at most 1, elementwise.

    The shape and the dtype of `x` stay, for integers too; booleans become int32. Raises
    `ArgumentError` if `x` is no array.

    >>> spmd.nn.hard_tanh(np.array([-3.0, 0.5, 3.0]))
    Array([-1. ,  0.5,  1. ], dtype=float32)
    """
    x = _array("hard_tanh", x)
    return where(x > 1, 1, where(x < -1, -1, x))


@one_program()
def hard_sigmoid(x: Any) -> Array:
    """Compute `relu6(x + 3) / 6`, elementwise: a sigmoid of three lines.

    The shape of `x` stays; integers become float32 and floats keep their dtype. Raises
    `ArgumentError` if `x` is no array.

    >>> spmd.nn.hard_sigmoid(np.array([-4.0, 0.0, 1.5]))
    Array([0.  , 0.5 , 0.75], dtype=float32)
    """
    return relu6(_array("hard_sigmoid", x) + 3.0) / 6.0


@one_program()
def hard_silu(x: Any) -> Array:
    """Compute `x * hard_sigmoid(x)`, elementwise.

    The shape of `x` stays; integers become float32 and floats keep their dtype. Raises
    `ArgumentError` if `x` is no array.

    >>> spmd.nn.hard_silu(np.array([-4.0, 1.5, 4.0]))
    Array([-0.   ,  1.125,  4.   ], dtype=float32)
    """
    x = _array("hard_silu", x)
    return x * hard_sigmoid(x)


hard_swish = hard_silu


@one_program()
def sparse_plus(x: Any) -> Array:
    """Compute 0 below -1, `x` above 1, and `(x + 1)**2 / 4` between, elementwise.

    The shape of `x` stays; integers become float32 and floats keep their dtype. Raises
    `ArgumentError` if `x` is no array.

    >>> spmd.nn.sparse_plus(np.array([-2.0, 0.0, 2.0]))
    Array([0.  , 0.25, 2.  ], dtype=float32)
    """
    x = _array("sparse_plus", x)
    return where(x <= -1.0, 0.0, where(x >= 1.0, x, (x + 1.0) ** 2 / 4))


@one_program()
def sparse_sigmoid(x: Any) -> Array:
    """Compute 0 below -1, 1 above 1, and `(x + 1) / 2` between, elementwise.

    The shape of `x` stays; integers become float32 and floats keep their dtype. Raises
    `ArgumentError` if `x` is no array.

    >>> spmd.nn.sparse_sigmoid(np.array([-2.0, 0.5, 2.0]))
    Array([0.  , 0.75, 1.  ], dtype=float32)
    """
    return 0.5 * clip(_array("sparse_sigmoid", x) + 1.0, 0.0, 2.0)


# ---- smooth ------------------------------------------------------------------------------------


def identity(x: Any) -> Array:
    """Return `x` itself, as an array.

    The shape and the dtype of `x` stay. Raises `ArgumentError` if `x` is no array.

    >>> spmd.nn.identity(np.array([1, 2]))
    Array([1, 2], dtype=int32)
    """
    return _array("identity", x)


def sigmoid(x: Any) -> Array:
    """Compute the logistic function `1 / (1 + exp(-x))`, elementwise.

    The shape of `x` stays; integers become float32 and floats keep their dtype. Raises
    `ArgumentError` if `x` is no array.

    >>> spmd.nn.sigmoid(np.array([-np.inf, 0.0, np.inf]))
    Array([0. , 0.5, 1. ], dtype=float32)
    """
    return lax.logistic(*promote_args_inexact("sigmoid", x))


@one_program()
def softplus(x: Any) -> Array:
    """Compute `log(1 + exp(x))`, elementwise and without overflow.

    The shape of `x` stays; integers become float32 and floats keep their dtype. Raises
    `ArgumentError` if `x` is no array, and `DtypeError` for complex numbers.

    >>> spmd.nn.softplus(np.array([0.0, 1000.0]))
    Array([6.931472e-01, 1.000000e+03], dtype=float32)
    """
    return logaddexp(x, 0)


@one_program()
def log_sigmoid(x: Any) -> Array:
    """Compute `log(sigmoid(x))`, elementwise and without underflow.

    The shape of `x` stays; integers become float32 and floats keep their dtype. Raises
    `ArgumentError` if `x` is no array, and `DtypeError` for complex numbers and booleans.

    >>> spmd.nn.log_sigmoid(np.array([0.0, -1000.0]))
    Array([-6.931472e-01, -1.000000e+03], dtype=float32)
    """
    return -softplus(-_array("log_sigmoid", x))


@one_program()
def silu(x: Any) -> Array:
    """Compute `x * sigmoid(x)`, elementwise; `swish` is the same function.

    The shape of `x` stays; integers become float32 and floats keep their dtype. Raises
    `ArgumentError` if `x` is no array.

    >>> spmd.nn.silu(np.array([0.0, 1.0, 100.0]))
    Array([  0.        ,   0.73105854, 100.        ], dtype=float32)
    """
    x = _array("silu", x)
    return x * sigmoid(x)


swish = silu


@one_program()
def mish(x: Any) -> Array:
    """Compute `x * tanh(softplus(x))`, elementwise.

    The shape of `x` stays; integers become float32 and floats keep their dtype. Raises
    `ArgumentError` if `x` is no array, and `DtypeError` for complex numbers.

    >>> spmd.nn.mish(np.array([0.0, 1.0, 100.0]))
    Array([  0.       ,   0.8650984, 100.       ], dtype=float32)
    """
    x = _array("mish", x)
    return x * tanh(softplus(x))


@one_program()
def soft_sign(x: Any) -> Array:
    """Compute `x / (|x| + 1)`, elementwise.

    The shape of `x` stays; integers become float32 and floats keep their dtype. Raises
    `ArgumentError` if `x` is no array.

    >>> spmd.nn.soft_sign(np.array([-1.0, 0.0, 3.0]))
    Array([-0.5 ,  0.  ,  0.75], dtype=float32)
    """
    x = _array("soft_sign", x)
    return x / (absolute(x) + 1)


@one_program()
def squareplus(x: Any, b: Any = 4) -> Array:
    """Compute `(x + sqrt(x**2 + b)) / 2`, elementwise.

    `x` and `b`, which sets the width of the bend, broadcast; integers become float32 and floats
    keep their dtype. Raises `ArgumentError` if one is no array.

    >>> spmd.nn.squareplus(np.array([0.0, 1.5]))
    Array([1., 2.], dtype=float32)
    """
    x, b = _array("squareplus", x), _array("squareplus", b)
    return (x + sqrt(square(x) + b)) / 2


@one_program()
def elu(x: Any, alpha: Any = 1.0) -> Array:
    """Compute `x` above 0 and `alpha * (exp(x) - 1)` below, elementwise.

    `x` and `alpha` broadcast; integers become float32 and floats keep their dtype. Raises
    `ArgumentError` if `x` is no array.

    >>> spmd.nn.elu(np.array([-100.0, 0.0, 2.0]))
    Array([-1.,  0.,  2.], dtype=float32)
    """
    x = _array("elu", x)
    # The inner `where` keeps the gradient of the side not taken finite.
    return where(x > 0, x, alpha * expm1(where(x > 0, 0.0, x)))


@one_program()
def celu(x: Any, alpha: Any = 1.0) -> Array:
    """Compute `max(x, 0) + min(0, alpha * (exp(x / alpha) - 1))`, elementwise.

    `x` and `alpha` broadcast; integers become float32 and floats keep their dtype. Raises
    `ArgumentError` if `x` is no array.

    >>> spmd.nn.celu(np.array([-100.0, 0.0, 2.0]), alpha=2.0)
    Array([-2.,  0.,  2.], dtype=float32)
    """
    x = _array("celu", x)
    return maximum(x, 0.0) + alpha * expm1(minimum(x, 0.0) / alpha)


@one_program()
def selu(x: Any) -> Array:
    """Compute the self-normalising `elu`, with the two fixed scales of Klambauer et al. (2017).

    The shape of `x` stays; integers become float32 and floats keep their dtype. Raises
    `ArgumentError` if `x` is no array.

    >>> spmd.nn.selu(np.array([0.0, 1.0]))
    Array([0.      , 1.050701], dtype=float32)
    """
    return 1.0507009873554805 * elu(x, 1.6732632423543772)


@one_program("approximate")
def gelu(x: Any, approximate: bool = True) -> Array:
    """Compute `x` times the normal distribution function of `x`, elementwise.

    With `approximate` that function is a formula with tanh, as in JAX's default; otherwise it is
    computed with erfc. The shape of `x` stays; integers become float32 and floats keep their dtype.
    Raises `ArgumentError` if `x` is no array.

    >>> spmd.nn.gelu(np.array([-1.0, 0.0, 1.0]))
    Array([-0.158808,  0.      ,  0.841192], dtype=float32)
    >>> spmd.nn.gelu(np.array([-1.0, 0.0, 1.0]), approximate=False)
    Array([-0.15865526,  0.        ,  0.8413447 ], dtype=float32)
    """
    (x,) = promote_args_inexact("gelu", x)
    x = as_array(x)
    dtype = typeof(x).dtype
    if approximate:
        scale = np.array(np.sqrt(2 / np.pi), dtype)
        return x * (0.5 * (1.0 + tanh(scale * (x + 0.044715 * (x**3)))))
    return 0.5 * x * lax.erfc(-x * np.array(np.sqrt(0.5), dtype))


@one_program("axis")
def glu(x: Any, axis: int = -1) -> Array:
    """Multiply the first half of `x` along `axis` by the sigmoid of the second half.

    The size of that dim is halved in the result's shape; integers become float32 and floats keep
    their dtype. Raises `ShapeError` if the size is odd, and `DimensionError` if `axis` is out of
    range.

    >>> spmd.nn.glu(np.array([1.0, 2.0, 0.0, 0.0]))
    Array([0.5, 1. ], dtype=float32)
    """
    x = _array("glu", x)
    d = canonical_axis(axis, typeof(x).ndim, "glu")
    if typeof(x).shape[d] % 2:
        raise ShapeError(f"glu: dim {d} of shape {typeof(x).shape} must have an even size")
    first, second = split(x, 2, d)
    return first * sigmoid(second)


@custom_jvp
@one_program()
def log1mexp(x: Any) -> Array:
    """Compute `log(1 - exp(-x))` for positive `x`, elementwise, exact for small and for large ones.

    The shape of `x` stays; integers become float32 and floats keep their dtype. Of a negative
    number it is NaN. As Mächler (2012) advises, it uses `expm1` below `log(2)` and `log1p` above.
    Raises `ArgumentError` if `x` is no array.

    >>> spmd.nn.log1mexp(np.array([1e-10, 1.0, 50.0]))
    Array([-2.3025850e+01, -4.5867515e-01, -1.9287499e-22], dtype=float32)
    """
    (x,) = promote_dtypes_inexact(_array("log1mexp", x))
    near = lax.log(lax.neg(lax.expm1(lax.neg(x))))
    far = lax.log1p(lax.neg(lax.exp(lax.neg(x))))
    return where(x < float(np.log(2.0)), near, far)


log1mexp.defjvps(lambda g, out, x: g / expm1(x))
