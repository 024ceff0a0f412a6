"""Activation functions, elementwise: `relu`, `gelu`, `silu`, `softplus`, ...

Those with a kink have the derivative that JAX gives them there (`relu`: 0 at 0).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd import lax
from spmd.base.errors import ShapeError
from spmd.core.aval import typeof
from spmd.core.custom import custom_jvp
from spmd.numpy.creation import full_like
from spmd.numpy.joining import split
from spmd.numpy.programs import one_program
from spmd.numpy.promotion import (
    as_array,
    check_arraylike,
    plain,
    promote_args_inexact,
    promote_dtypes_inexact,
)
from spmd.numpy.reductions import canonical_axis
from spmd.numpy.searching import where
from spmd.numpy.selection import clip
from spmd.numpy.ufuncs import absolute, expm1, logaddexp, maximum, minimum, sqrt, square, tanh


def _array(name: str, x: Any) -> Any:
    check_arraylike(name, x)
    return as_array(plain(x))


# ---- with kinks --------------------------------------------------------------------------------


@custom_jvp
def relu(x: Any) -> Any:
    """`max(x, 0)`; its derivative at 0 is 0."""
    return maximum(x, 0)


# The result says as well as `x` where the slope is 1, and of both only it is kept for what follows.
relu.defjvps(lambda g, out, x: lax.select(out > 0, g, full_like(g, 0)))


@custom_jvp
@one_program()
def relu6(x: Any) -> Any:
    """`min(max(x, 0), 6)`; its derivative is 0 at 0 and at 6."""
    return minimum(maximum(x, 0), 6.0)


relu6.defjvps(lambda g, out, x: lax.select((x > 0) & (x < 6), g, full_like(g, 0)))


@one_program()
def leaky_relu(x: Any, negative_slope: Any = 0.01) -> Any:
    """`x`, times `negative_slope` below 0."""
    x = _array("leaky_relu", x)
    return where(x >= 0, x, negative_slope * x)


@one_program()
def hard_tanh(x: Any) -> Any:
    """`x` between -1 and 1."""
    x = _array("hard_tanh", x)
    return where(x > 1, 1, where(x < -1, -1, x))


@one_program()
def hard_sigmoid(x: Any) -> Any:
    """`relu6(x + 3) / 6`."""
    return relu6(_array("hard_sigmoid", x) + 3.0) / 6.0


@one_program()
def hard_silu(x: Any) -> Any:
    """`x * hard_sigmoid(x)`."""
    x = _array("hard_silu", x)
    return x * hard_sigmoid(x)


hard_swish = hard_silu


@one_program()
def sparse_plus(x: Any) -> Any:
    """0 below -1, `x` above 1, a parabola between."""
    x = _array("sparse_plus", x)
    return where(x <= -1.0, 0.0, where(x >= 1.0, x, (x + 1.0) ** 2 / 4))


@one_program()
def sparse_sigmoid(x: Any) -> Any:
    """0 below -1, 1 above 1, a line between."""
    return 0.5 * clip(_array("sparse_sigmoid", x) + 1.0, 0.0, 2.0)


# ---- smooth ------------------------------------------------------------------------------------


def identity(x: Any) -> Any:
    """The argument itself."""
    return _array("identity", x)


def sigmoid(x: Any) -> Any:
    """`1 / (1 + exp(-x))`."""
    return lax.logistic(*promote_args_inexact("sigmoid", x))


@one_program()
def softplus(x: Any) -> Any:
    """`log(1 + exp(x))` without overflow."""
    return logaddexp(x, 0)


@one_program()
def log_sigmoid(x: Any) -> Any:
    """`log(sigmoid(x))` without underflow."""
    return -softplus(-_array("log_sigmoid", x))


@one_program()
def silu(x: Any) -> Any:
    """`x * sigmoid(x)`, also known as swish."""
    x = _array("silu", x)
    return x * sigmoid(x)


swish = silu


@one_program()
def mish(x: Any) -> Any:
    """`x * tanh(softplus(x))`."""
    x = _array("mish", x)
    return x * tanh(softplus(x))


@one_program()
def soft_sign(x: Any) -> Any:
    """`x / (|x| + 1)`."""
    x = _array("soft_sign", x)
    return x / (absolute(x) + 1)


@one_program()
def squareplus(x: Any, b: Any = 4) -> Any:
    """`(x + sqrt(x**2 + b)) / 2`."""
    x, b = _array("squareplus", x), _array("squareplus", b)
    return (x + sqrt(square(x) + b)) / 2


@one_program()
def elu(x: Any, alpha: Any = 1.0) -> Any:
    """`x` above 0, `alpha * (exp(x) - 1)` below."""
    x = _array("elu", x)
    # The inner `where` keeps the gradient of the side not taken finite.
    return where(x > 0, x, alpha * expm1(where(x > 0, 0.0, x)))


@one_program()
def celu(x: Any, alpha: Any = 1.0) -> Any:
    """`max(x, 0) + min(0, alpha * (exp(x / alpha) - 1))`."""
    x = _array("celu", x)
    return maximum(x, 0.0) + alpha * expm1(minimum(x, 0.0) / alpha)


@one_program()
def selu(x: Any) -> Any:
    """The self-normalising `elu`, with fixed scales."""
    return 1.0507009873554805 * elu(x, 1.6732632423543772)


@one_program("approximate")
def gelu(x: Any, approximate: bool = True) -> Any:
    """`x` times the normal distribution function of `x`; by tanh, or exactly by erfc."""
    (x,) = promote_args_inexact("gelu", x)
    x = as_array(x)
    dtype = typeof(x).dtype
    if approximate:
        scale = np.array(np.sqrt(2 / np.pi), dtype)
        return x * (0.5 * (1.0 + tanh(scale * (x + 0.044715 * (x**3)))))
    return 0.5 * x * lax.erfc(-x * np.array(np.sqrt(0.5), dtype))


@one_program("axis")
def glu(x: Any, axis: int = -1) -> Any:
    """The first half along `axis`, times the sigmoid of the second half."""
    x = _array("glu", x)
    d = canonical_axis(axis, typeof(x).ndim, "glu")
    if typeof(x).shape[d] % 2:
        raise ShapeError(f"glu: dim {d} of shape {typeof(x).shape} must have an even size")
    first, second = split(x, 2, d)
    return first * sigmoid(second)


@custom_jvp
@one_program()
def log1mexp(x: Any) -> Any:
    """`log(1 - exp(-x))` for positive `x`, exact for small and for large ones."""
    (x,) = promote_dtypes_inexact(_array("log1mexp", x))
    near = lax.log(lax.neg(lax.expm1(lax.neg(x))))
    far = lax.log1p(lax.neg(lax.exp(lax.neg(x))))
    return where(x < float(np.log(2.0)), near, far)


log1mexp.defjvps(lambda g, out, x: g / expm1(x))
