"""Layers as pairs of functions, `init_fun(rng, shape)` and `apply_fun(params, x)`, as in JAX.

`init_fun` returns the shape of the output and the parameters. Constructors and combinators of
layers return such pairs.

>>> init_fun, apply_fun = serial(Dense(8), Relu, Dense(1))
>>> out_shape, params = init_fun(spmd.random.key(0), (-1, 3))
>>> out_shape, apply_fun(params, np.ones((5, 3), np.float32)).shape
((-1, 1), (5, 1))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import spmd.numpy as snp
import spmd.random as random
from spmd import lax
from spmd.base.errors import ArgumentError
from spmd.nn import (
    elu,
    gelu,
    leaky_relu,
    log_softmax,
    relu,
    selu,
    sigmoid,
    softmax,
    softplus,
    standardize,
)
from spmd.nn.initializers import glorot_normal, normal, ones, zeros

# JAX's names of these here.
glorot, randn, logsoftmax = glorot_normal, normal, log_softmax

Layer = tuple[Callable[..., Any], Callable[..., Any]]


def Dense(out_dim: int, W_init: Any = None, b_init: Any = None) -> Layer:
    """A matrix product and a bias."""
    W_init, b_init = W_init or glorot_normal(), b_init or normal()

    def init_fun(rng: Any, input_shape: Any) -> Any:
        k1, k2 = random.split(rng)
        weights = W_init(k1, (input_shape[-1], out_dim)), b_init(k2, (out_dim,))
        return (*input_shape[:-1], out_dim), weights

    def apply_fun(params: Any, inputs: Any, **kwargs: Any) -> Any:
        W, b = params
        return snp.dot(inputs, W) + b

    return init_fun, apply_fun


def GeneralConv(
    dimension_numbers: Any,
    out_chan: int,
    filter_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Any = "VALID",
    W_init: Any = None,
    b_init: Any = None,
) -> Layer:
    """A convolution and a bias, of arrays whose dims are in any order."""
    given = dimension_numbers, out_chan, filter_shape, strides, padding, W_init, b_init
    return _convolution(lax.conv_general_dilated, *given)


def GeneralConvTranspose(
    dimension_numbers: Any,
    out_chan: int,
    filter_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Any = "VALID",
    W_init: Any = None,
    b_init: Any = None,
) -> Layer:
    """A transposed convolution and a bias, of arrays whose dims are in any order."""
    given = dimension_numbers, out_chan, filter_shape, strides, padding, W_init, b_init
    return _convolution(lax.conv_transpose, *given)


def _convolution(
    convolve: Callable[..., Any],
    dimension_numbers: Any,
    out_chan: int,
    filter_shape: Sequence[int],
    strides: Sequence[int] | None,
    padding: Any,
    W_init: Any,
    b_init: Any,
) -> Layer:
    """A layer of a convolution and a bias: its function of the input shape, and its application."""
    lhs_spec, rhs_spec, out_spec = dimension_numbers
    strides = strides or (1,) * len(filter_shape)
    W_init = W_init or glorot_normal(rhs_spec.index("I"), rhs_spec.index("O"))
    b_init = b_init or normal(1e-6)

    def apply(params: Any, inputs: Any, **kwargs: Any) -> Any:
        W, b = params
        out = convolve(inputs, W, strides, padding, dimension_numbers=dimension_numbers)
        return out + b

    def init_fun(rng: Any, input_shape: Any) -> Any:
        sizes = iter(filter_shape)
        known = {"O": out_chan, "I": input_shape[lhs_spec.index("C")]}
        kernel = [known[c] if c in known else next(sizes) for c in rhs_spec]
        bias = [out_chan if c == "C" else 1 for c in out_spec]
        k1, k2 = random.split(rng)
        params = W_init(k1, tuple(kernel)), b_init(k2, tuple(bias))
        batch = lhs_spec.index("N")
        concrete = tuple(1 if k == batch else n for k, n in enumerate(input_shape))
        struct = snp.zeros(concrete)
        shape = list(apply(params, struct).shape)
        shape[out_spec.index("N")] = input_shape[batch]
        return tuple(shape), params

    return init_fun, apply


def Conv(
    out_chan: int,
    filter_shape: Sequence[int],
    strides: Any = None,
    padding: Any = "VALID",
    W_init: Any = None,
    b_init: Any = None,
) -> Layer:
    """A convolution of images (N, H, W, C) and a bias."""
    dims = ("NHWC", "HWIO", "NHWC")
    return GeneralConv(dims, out_chan, filter_shape, strides, padding, W_init, b_init)


def ConvTranspose(
    out_chan: int,
    filter_shape: Sequence[int],
    strides: Any = None,
    padding: Any = "VALID",
    W_init: Any = None,
    b_init: Any = None,
) -> Layer:
    """A transposed convolution of images (N, H, W, C) and a bias."""
    dims = ("NHWC", "HWIO", "NHWC")
    return GeneralConvTranspose(dims, out_chan, filter_shape, strides, padding, W_init, b_init)


def Conv1DTranspose(
    out_chan: int,
    filter_shape: Sequence[int],
    strides: Any = None,
    padding: Any = "VALID",
    W_init: Any = None,
    b_init: Any = None,
) -> Layer:
    """A transposed convolution of sequences (N, H, C) and a bias."""
    dims = ("NHC", "HIO", "NHC")
    return GeneralConvTranspose(dims, out_chan, filter_shape, strides, padding, W_init, b_init)


def BatchNorm(
    axis: Sequence[int] = (0, 1, 2),
    epsilon: float = 1e-5,
    center: bool = True,
    scale: bool = True,
    beta_init: Any = zeros,
    gamma_init: Any = ones,
) -> Layer:
    """Normalisation by the mean and variance of a batch over the dims `axis`."""
    over = (axis,) if isinstance(axis, int) else tuple(axis)

    def init_fun(rng: Any, input_shape: Any) -> Any:
        shape = tuple(n for k, n in enumerate(input_shape) if k not in over)
        k1, k2 = random.split(rng)
        beta = beta_init(k1, shape) if center else ()
        gamma = gamma_init(k2, shape) if scale else ()
        return input_shape, (beta, gamma)

    def apply_fun(params: Any, x: Any, **kwargs: Any) -> Any:
        beta, gamma = params
        spread = tuple(None if k in over else slice(None) for k in range(snp.ndim(x)))
        z = standardize(x, over, epsilon=epsilon)
        z = gamma[spread] * z if scale else z
        return z + beta[spread] if center else z

    return init_fun, apply_fun


def elementwise(fun: Callable[..., Any], **fun_kwargs: Any) -> Layer:
    """A layer without parameters that applies a function."""
    return (
        lambda rng, input_shape: (input_shape, ()),
        lambda params, inputs, **kwargs: fun(inputs, **fun_kwargs),
    )


Tanh = elementwise(snp.tanh)
Relu = elementwise(relu)
Exp = elementwise(snp.exp)
LogSoftmax = elementwise(log_softmax, axis=-1)
Softmax = elementwise(softmax, axis=-1)
Softplus = elementwise(softplus)
Sigmoid = elementwise(sigmoid)
Elu = elementwise(elu)
LeakyRelu = elementwise(leaky_relu)
Selu = elementwise(selu)
Gelu = elementwise(gelu)
Identity = elementwise(lambda x: x)


def _pooling(reducer: Any, init: float, rescale: Any = None) -> Callable[..., Layer]:
    def pool(
        window_shape: Sequence[int],
        strides: Sequence[int] | None = None,
        padding: str = "VALID",
        spec: str | None = None,
    ) -> Layer:
        """Combine the elements of each window of images (N, H, W, C)."""
        wide = list(window_shape)
        steps = list(strides or (1,) * len(window_shape))
        for k in sorted((0, len(wide) + 1) if spec is None else (spec.index("N"), spec.index("C"))):
            wide.insert(k, 1)
            steps.insert(k, 1)

        def apply_fun(params: Any, inputs: Any, **kwargs: Any) -> Any:
            over = lambda x: lax.reduce_window(x, init, reducer, wide, steps, padding)  # noqa: E731
            out = over(inputs)
            return out if rescale is None else rescale(out, over(snp.ones_like(inputs)))

        def init_fun(rng: Any, input_shape: Any) -> Any:
            known = tuple(1 if n < 0 else n for n in input_shape)
            found = apply_fun((), snp.zeros(known)).shape
            pairs = zip(found, input_shape, strict=True)
            return tuple(old if old < 0 else new for new, old in pairs), ()

        return init_fun, apply_fun

    return pool


MaxPool = _pooling(lax.max, -math.inf)
SumPool = _pooling(lax.add, 0.0)
AvgPool = _pooling(lax.add, 0.0, lambda total, count: total / count)


def _flatten_shape(rng: Any, input_shape: Any) -> Any:
    return (input_shape[0], math.prod(input_shape[1:])), ()


Flatten: Layer = (
    _flatten_shape,
    lambda params, inputs, **kwargs: snp.reshape(inputs, (inputs.shape[0], -1)),
)


def FanOut(num: int) -> Layer:
    """The input, `num` times."""
    return (
        lambda rng, input_shape: ([input_shape] * num, ()),
        lambda params, inputs, **kwargs: [inputs] * num,
    )


FanInSum: Layer = (
    lambda rng, input_shape: (input_shape[0], ()),
    lambda params, inputs, **kwargs: sum(inputs),
)


def FanInConcat(axis: int = -1) -> Layer:
    """The inputs joined along a dim."""

    def init_fun(rng: Any, input_shape: Any) -> Any:
        k = axis % len(input_shape[0])
        total = sum(shape[k] for shape in input_shape)
        return (*input_shape[0][:k], total, *input_shape[0][k + 1 :]), ()

    return init_fun, lambda params, inputs, **kwargs: snp.concatenate(inputs, axis)


def Dropout(rate: float, mode: str = "train") -> Layer:
    """Keep each element with probability `rate`, while `mode` is "train"; needs `rng=`."""

    def apply_fun(params: Any, inputs: Any, **kwargs: Any) -> Any:
        rng = kwargs.get("rng")
        if rng is None:
            raise ArgumentError(
                "Dropout: apply_fun needs a key, apply_fun(params, inputs, rng=key)"
            )
        if mode != "train":
            return inputs
        keep = random.bernoulli(rng, rate, inputs.shape)
        return snp.where(keep, inputs / rate, 0)

    return lambda rng, input_shape: (input_shape, ()), apply_fun


# ---- layers of layers --------------------------------------------------------------------------


def serial(*layers: Layer) -> Layer:
    """Layers in sequence."""
    inits = [init for init, _ in layers]
    applies = [apply for _, apply in layers]

    def init_fun(rng: Any, input_shape: Any) -> Any:
        params = []
        for init in inits:
            rng, key = random.split(rng)
            input_shape, param = init(key, input_shape)
            params.append(param)
        return input_shape, params

    def apply_fun(params: Any, inputs: Any, **kwargs: Any) -> Any:
        keys = _split(kwargs.pop("rng", None), len(applies))
        for apply, param, key in zip(applies, params, keys, strict=True):
            inputs = apply(param, inputs, rng=key, **kwargs)
        return inputs

    return init_fun, apply_fun


def parallel(*layers: Layer) -> Layer:
    """Layers in parallel, each with its own input."""
    inits = [init for init, _ in layers]
    applies = [apply for _, apply in layers]

    def init_fun(rng: Any, input_shape: Any) -> Any:
        keys = random.split(rng, len(inits))
        pairs = [f(k, s) for f, k, s in zip(inits, keys, input_shape, strict=True)]
        return [shape for shape, _ in pairs], [params for _, params in pairs]

    def apply_fun(params: Any, inputs: Any, **kwargs: Any) -> Any:
        keys = _split(kwargs.pop("rng", None), len(applies))
        rows = zip(applies, params, inputs, keys, strict=True)
        return [f(p, x, rng=key, **kwargs) for f, p, x, key in rows]

    return init_fun, apply_fun


def _split(rng: Any, count: int) -> Any:
    return random.split(rng, count) if rng is not None and count else (None,) * count


def shape_dependent(make_layer: Callable[[Any], Layer]) -> Layer:
    """A layer that is made when the shape of its input is known."""
    return (
        lambda rng, input_shape: make_layer(input_shape)[0](rng, input_shape),
        lambda params, inputs, **kwargs: make_layer(inputs.shape)[1](params, inputs, **kwargs),
    )
