"""`spmd.nn.initializers`: functions that make functions `init(key, shape, dtype)` of weights.

Each takes `out_sharding` last, a sharding or spec over `Explicit` mesh axes: the layout of the
weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from spmd import lax, random
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, ShapeError
from spmd.core.aval import typeof
from spmd.core.explicit import lays_out_result
from spmd.numpy.creation import canonical_shape, full
from spmd.numpy.creation import ones as _ones
from spmd.numpy.creation import zeros as _zeros
from spmd.numpy.manipulation import moveaxis
from spmd.numpy.promotion import default_float
from spmd.numpy.reductions import canonical_axis
from spmd.numpy.ufuncs import exp, log, multiply, sqrt

if TYPE_CHECKING:
    from spmd.sharding.array import Array

__all__ = [
    "Initializer",
    "constant",
    "delta_orthogonal",
    "glorot_normal",
    "glorot_uniform",
    "he_normal",
    "he_uniform",
    "kaiming_normal",
    "kaiming_uniform",
    "lecun_normal",
    "lecun_uniform",
    "normal",
    "ones",
    "orthogonal",
    "truncated_normal",
    "uniform",
    "variance_scaling",
    "xavier_normal",
    "xavier_uniform",
    "zeros",
]

Initializer: TypeAlias = Callable[..., "Array"]
Dims: TypeAlias = int | Sequence[int]


def _dtype(dtype: Any) -> np.dtype:
    return default_float() if dtype is None else dtypes.canonical(dtype)


# ---- without regard to the shape ---------------------------------------------------------------


@lays_out_result
def zeros(key: Any, shape: Any, dtype: Any = None, out_sharding: Any = None) -> Array:
    """Make weights that are all 0; `key` is not used.

    `shape` is the result's, and `dtype` by default the default float dtype. `out_sharding`, a
    sharding or spec over `Explicit` mesh axes, is the layout of the result. Raises `ShapeError` if
    a size is negative.

    >>> spmd.nn.initializers.zeros(spmd.random.key(0), (2,))
    Array([0., 0.], dtype=float32)
    """
    return _zeros(shape, _dtype(dtype))


@lays_out_result
def ones(key: Any, shape: Any, dtype: Any = None, out_sharding: Any = None) -> Array:
    """Make weights that are all 1; `key` is not used.

    `shape` is the result's, and `dtype` by default the default float dtype. `out_sharding`, a
    sharding or spec over `Explicit` mesh axes, is the layout of the result. Raises `ShapeError` if
    a size is negative.

    >>> spmd.nn.initializers.ones(spmd.random.key(0), (2,))
    Array([1., 1.], dtype=float32)
    """
    return _ones(shape, _dtype(dtype))


def constant(value: Any, dtype: Any = None) -> Initializer:
    """Make an initializer `init(key, shape, dtype)` of weights that all are `value`.

    `value` broadcasts to the shape; `dtype` is by default the default float dtype.

    >>> init = spmd.nn.initializers.constant(0.5)
    >>> init(spmd.random.key(0), (2,))
    Array([0.5, 0.5], dtype=float32)
    """

    @lays_out_result
    def init(key: Any, shape: Any, dtype: Any = dtype, out_sharding: Any = None) -> Any:
        return full(shape, value, _dtype(dtype))

    return init


def uniform(scale: Any = 1e-2, dtype: Any = None) -> Initializer:
    """Make an initializer `init(key, shape, dtype)` of weights uniform in [0, `scale`).

    `dtype` is by default the default float dtype. The initializer raises `DtypeError` for a dtype
    that is not floating, and `ShapeError` if a size is negative.

    >>> init = spmd.nn.initializers.uniform(0.5)
    >>> bool((init(spmd.random.key(0), (100,)) < 0.5).all())
    True
    """

    @lays_out_result
    def init(key: Any, shape: Any, dtype: Any = dtype, out_sharding: Any = None) -> Any:
        found = _dtype(dtype)
        return multiply(random.uniform(key, shape, found), np.array(scale, found))

    return init


def normal(stddev: Any = 1e-2, dtype: Any = None) -> Initializer:
    """Make an initializer `init(key, shape, dtype)` of normal weights of deviation `stddev`.

    The mean is 0; `dtype` is by default the default float dtype. The initializer raises
    `DtypeError` for a dtype that is not floating or complex, and `ShapeError` if a size is
    negative.

    >>> init = spmd.nn.initializers.normal(0.1)
    >>> round(float(init(spmd.random.key(0), (1000,)).std()), 2)
    0.1
    """

    @lays_out_result
    def init(key: Any, shape: Any, dtype: Any = dtype, out_sharding: Any = None) -> Any:
        found = _dtype(dtype)
        return multiply(random.normal(key, shape, found), np.array(stddev, found))

    return init


def truncated_normal(
    stddev: Any = 1e-2, dtype: Any = None, lower: Any = -2.0, upper: Any = 2.0
) -> Initializer:
    """Make an initializer `init(key, shape, dtype)` of normal weights without outliers.

    Standard normal numbers between `lower` and `upper` are multiplied by `stddev`, so the bounds
    are in units of it. `dtype` is by default the default float dtype. The initializer raises
    `DtypeError` for a dtype that is not floating, and `ShapeError` if a size is negative.

    >>> init = spmd.nn.initializers.truncated_normal(0.1)
    >>> bool((abs(init(spmd.random.key(0), (1000,))) < 0.2).all())
    True
    """

    @lays_out_result
    def init(key: Any, shape: Any, dtype: Any = dtype, out_sharding: Any = None) -> Any:
        found = _dtype(dtype)
        samples = random.truncated_normal(key, lower, upper, shape, found)
        return multiply(samples, np.array(stddev, found))

    return init


# ---- scaled by the number of inputs and outputs ------------------------------------------------


def _fans(shape: tuple[int, ...], in_axis: Dims, out_axis: Dims, batch_axis: Dims) -> Any:
    """The numbers of inputs and outputs of one unit."""
    if len(shape) <= 1 and in_axis == -2:
        raise ArgumentError(
            f"variance_scaling: weights of shape {shape} have no dim -2 for inputs; give in_axis"
        )

    def size(axis: Dims) -> int:
        return math.prod(shape[d] for d in ((axis,) if isinstance(axis, int) else axis))

    inputs, outputs = size(in_axis), size(out_axis)
    window = math.prod(shape) / inputs / outputs / size(batch_axis)
    return inputs * window, outputs * window


def variance_scaling(
    scale: Any,
    mode: str,
    distribution: str,
    in_axis: Dims = -2,
    out_axis: Dims = -1,
    batch_axis: Dims = (),
    dtype: Any = None,
) -> Initializer:
    """Make an initializer `init(key, shape, dtype)` of weights of variance `scale / n`.

    n is the number of inputs (`mode="fan_in"`), of outputs ("fan_out"), or their arithmetic or
    geometric mean ("fan_avg", "fan_geo_avg"). Inputs and outputs are the sizes of the dims
    `in_axis` and `out_axis` (integers or tuples), times those of all others but `batch_axis`.
    `distribution` is "truncated_normal", "normal" or "uniform"; `dtype` is by default the default
    float dtype, and may be complex.

    Raises `ArgumentError` for another mode or distribution; the initializer does if the shape has
    no dim for inputs.

    >>> init = spmd.nn.initializers.variance_scaling(2.0, "fan_in", "normal")
    >>> round(float(init(spmd.random.key(0), (200, 50)).std()), 2)
    0.1
    """
    means: dict[str, Callable[[float, float], float]] = {
        "fan_in": lambda inputs, outputs: inputs,
        "fan_out": lambda inputs, outputs: outputs,
        "fan_avg": lambda inputs, outputs: (inputs + outputs) / 2,
        "fan_geo_avg": lambda inputs, outputs: (inputs * outputs) ** 0.5,
    }
    if mode not in means or distribution not in ("truncated_normal", "normal", "uniform"):
        raise ArgumentError(
            f"variance_scaling: unknown mode={mode!r} or distribution={distribution!r}"
        )

    @lays_out_result
    def init(key: Any, shape: Any, dtype: Any = dtype, out_sharding: Any = None) -> Any:
        found = _dtype(dtype)
        whole = canonical_shape(shape, "variance_scaling")
        count = means[mode](*_fans(whole, in_axis, out_axis, batch_axis))
        variance = np.array(scale / count, found)
        return _scaled(key, whole, found, variance, distribution)

    return init


def _scaled(
    key: Any, shape: tuple[int, ...], dtype: np.dtype, variance: np.ndarray, distribution: str
) -> Any:
    if dtypes.is_complex(dtype) and distribution != "normal":
        return _complex(key, shape, dtype, variance, distribution)
    if distribution == "normal":
        return multiply(random.normal(key, shape, dtype), sqrt(variance))
    if distribution == "uniform":
        return multiply(random.uniform(key, shape, dtype, -1.0), sqrt(multiply(3, variance)))
    # Cutting the normal distribution at 2 lowers its standard deviation to this.
    stddev = sqrt(variance) / np.array(0.87962566103423978, dtype)
    return multiply(random.truncated_normal(key, -2.0, 2.0, shape, dtype), stddev)


def _complex(
    key: Any, shape: tuple[int, ...], dtype: np.dtype, variance: np.ndarray, distribution: str
) -> Any:
    """Uniform in a disc, or normal within a disc of radius 2, by radius and angle."""
    radius_key, angle_key = random.split(key)
    real = dtypes.real_of(dtype)
    u = lax.convert_element_type(random.uniform(radius_key, shape, real), dtype)
    if distribution == "uniform":
        radius = sqrt(multiply(2, u))
        stddev = sqrt(variance)
    else:
        inside = multiply(np.array(1 - np.exp(-4.0), dtype), u)
        radius = sqrt(-log(1 - inside))
        stddev = sqrt(variance) / np.array(0.95311164380491208, dtype)
    angle = multiply(2 * np.pi, random.uniform(angle_key, shape, real))
    direction = exp(multiply(1j, angle))
    return multiply(multiply(radius, direction), stddev)


_FAMILY = """Make an initializer of weights {summary}.

It is `variance_scaling({scale}, {mode!r}, {distribution!r})`. `in_axis`, `out_axis` and
`batch_axis`, integers or tuples of them, are the dims of inputs, of outputs, and of units that
share neither; `dtype` is by default the default float dtype, and may be complex. The initializer
raises `ArgumentError` if the shape has no dim for inputs.

>>> init = spmd.nn.initializers.{name}()
>>> round(float(init(spmd.random.key(0), (200, 50)).std()), 2)
{deviation}
"""


def _family(
    name: str, summary: str, scale: float, mode: str, distribution: str, deviation: float
) -> Callable[..., Initializer]:
    """`variance_scaling` with its first arguments; `deviation` is that of weights (200, 50)."""

    def make(
        in_axis: Dims = -2, out_axis: Dims = -1, batch_axis: Dims = (), dtype: Any = None
    ) -> Initializer:
        return variance_scaling(scale, mode, distribution, in_axis, out_axis, batch_axis, dtype)

    make.__name__ = make.__qualname__ = name
    make.__doc__ = _FAMILY.format(
        summary=summary,
        scale=scale,
        mode=mode,
        distribution=distribution,
        name=name,
        deviation=deviation,
    )
    return make


_NORMAL, _UNIFORM = "truncated_normal", "uniform"
glorot_uniform = xavier_uniform = _family(
    "glorot_uniform", "after Glorot and Bengio (2010), uniform", 1.0, "fan_avg", _UNIFORM, 0.09
)
glorot_normal = xavier_normal = _family(
    "glorot_normal", "after Glorot and Bengio (2010), normal", 1.0, "fan_avg", _NORMAL, 0.09
)
lecun_uniform = _family(
    "lecun_uniform", "after LeCun et al. (1998), uniform", 1.0, "fan_in", _UNIFORM, 0.07
)
lecun_normal = _family(
    "lecun_normal", "after LeCun et al. (1998), normal", 1.0, "fan_in", _NORMAL, 0.07
)
he_uniform = kaiming_uniform = _family(
    "he_uniform", "for relu after He et al. (2015), uniform", 2.0, "fan_in", _UNIFORM, 0.1
)
he_normal = kaiming_normal = _family(
    "he_normal", "for relu after He et al. (2015), normal", 2.0, "fan_in", _NORMAL, 0.1
)

# ---- orthogonal matrices -----------------------------------------------------------------------


def orthogonal(scale: Any = 1.0, column_axis: int = -1, dtype: Any = None) -> Initializer:
    """Make an initializer `init(key, shape, dtype)` of orthogonal matrices times `scale`.

    The matrix's columns are the dim `column_axis`, its rows all others; orthonormal are those of
    the two that are fewer. The matrices are uniformly distributed, as Saxe et al. (2013) propose.
    `dtype` is by default the default float dtype. The initializer raises `ShapeError` for less than
    2 dims, and `DimensionError` if `column_axis` is out of range.

    >>> w = spmd.nn.initializers.orthogonal()(spmd.random.key(0), (3, 3))
    >>> bool(snp.allclose(w @ w.T, snp.eye(3), atol=1e-6))
    True
    """

    @lays_out_result
    def init(key: Any, shape: Any, dtype: Any = dtype, out_sharding: Any = None) -> Any:
        found = _dtype(dtype)
        whole = canonical_shape(shape, "orthogonal")
        if len(whole) < 2:
            raise ShapeError(f"orthogonal: weights need at least 2 dims, got shape {whole}")
        if 0 in whole:
            return _zeros(whole, found)
        axis = canonical_axis(column_axis, len(whole), "orthogonal")
        columns, others = whole[axis], whole[:axis] + whole[axis + 1 :]
        matrix = random.orthogonal(key, math.prod(others), (), found, columns)
        weights = moveaxis(lax.reshape(matrix, (*others, columns)), -1, axis)
        return multiply(np.array(scale, found), weights)

    return init


def delta_orthogonal(scale: Any = 1.0, column_axis: int = -1, dtype: Any = None) -> Initializer:
    """Make an initializer of convolution kernels that are orthogonal in the middle, zero elsewhere.

    Shapes are (window dims, inputs, outputs) with one to three window dims and no more inputs than
    outputs: Xiao et al. (2018). `scale`, `column_axis` and `dtype` are those of `orthogonal`. The
    initializer raises `ShapeError` for other shapes.

    >>> w = spmd.nn.initializers.delta_orthogonal()(spmd.random.key(0), (3, 2, 2))
    >>> bool(w[0].any()), bool(snp.allclose(w[1] @ w[1].T, snp.eye(2), atol=1e-6))
    (False, True)
    """
    inner = orthogonal(scale, column_axis, dtype)

    @lays_out_result
    def init(key: Any, shape: Any, dtype: Any = dtype, out_sharding: Any = None) -> Any:
        whole = canonical_shape(shape, "delta_orthogonal")
        if len(whole) not in (3, 4, 5):
            raise ShapeError(f"delta_orthogonal: kernels have 3, 4 or 5 dims, got shape {whole}")
        if whole[-1] < whole[-2]:
            raise ShapeError(
                f"delta_orthogonal: {whole[-2]} inputs (dim -2) are more than the {whole[-1]} "
                "outputs (dim -1)"
            )
        matrix = inner(key, whole[-2:], dtype)
        widths = [((n - 1) // 2, n // 2, 0) for n in whole[:-2]]
        matrix = lax.expand_dims(matrix, range(len(widths)))
        zero = np.zeros((), typeof(matrix).dtype)
        return lax.pad(matrix, zero, [*widths, (0, 0, 0), (0, 0, 0)])

    return init
