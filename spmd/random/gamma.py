"""Distributions made of gamma distributed numbers, which are found by rejection: `gamma`, `beta`.

Marsaglia and Tsang's method with JAX's sequence of keys, so that samples agree. A sample is the
result of a loop that ends when a candidate is accepted; its derivative in the parameter is implicit
in the distribution function.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd import lax
from spmd.api.vectorize import vmap
from spmd.base import dtypes
from spmd.base.errors import DtypeArgumentError, ShapeError
from spmd.core.aval import typeof
from spmd.core.custom import custom_jvp
from spmd.core.explicit import lays_out_result
from spmd.numpy.creation import full_like
from spmd.numpy.programs import one_program
from spmd.numpy.promotion import broadcast_to, constant_like, default_int, plain, select, user_dtype
from spmd.numpy.reductions import any as _any
from spmd.numpy.reductions import max as _max
from spmd.numpy.reductions import sum as _sum
from spmd.numpy.ufuncs import divide, subtract
from spmd.random.continuous import exponential_typed, normal_typed, uniform_typed
from spmd.random.keys import (
    float_dtype,
    pair,
    parameters_shape,
    sample_shape,
    several,
    single,
    split_typed,
)

if TYPE_CHECKING:
    from spmd.sharding.array import Array

# ---- one gamma distributed number --------------------------------------------------------------


def _gamma_one(key: Any, alpha: Any, log_space: bool) -> Any:
    """One sample for one key and one parameter; `log_space` gives its logarithm."""
    dtype = typeof(alpha).dtype

    def const(value: float) -> np.ndarray:
        return np.array(value, dtype)

    one, third = const(1), const(1 / 3)
    # Below 1 the method needs a boost: a sample for alpha + 1, times u**(1 / alpha).
    large = lax.ge(alpha, one)
    d = lax.sub(select(large, alpha, lax.add(alpha, one)), third)
    c = lax.div(third, lax.sqrt(d))

    def rejected(state: Any) -> Any:
        _, x, v, u = state
        quick = lax.ge(u, lax.sub(one, lax.mul(const(0.0331), lax.mul(x, x))))
        bound = lax.add(lax.mul(x, const(0.5)), lax.mul(d, lax.add(lax.sub(one, v), lax.log(v))))
        return lax.bitwise_and(quick, lax.ge(lax.log(u), bound))

    def candidate(state: Any) -> Any:
        key, x_key, u_key = several(state[0], 3)
        _, x, v = lax.while_loop(
            lambda s: lax.le(s[2], const(0)), lambda s: _positive(s, c, dtype),
            (x_key, const(0), const(-1)),
        )  # fmt: skip
        cube = lax.mul(lax.mul(v, v), v)
        return key, lax.mul(x, x), cube, uniform_typed(u_key, (), dtype)

    key, boost_key = pair(key)
    start = (key, const(0), const(1), const(2))
    v = lax.while_loop(rejected, candidate, start)[2]
    power = lax.div(one, alpha)
    if not log_space:
        u = lax.sub(one, uniform_typed(boost_key, (), dtype))
        return lax.mul(lax.mul(d, v), select(large, one, lax.pow(u, power)))
    logs = lax.neg(exponential_typed(boost_key, (), dtype))
    unneeded = lax.bitwise_or(large, lax.eq(logs, const(0)))
    boost = select(unneeded, const(0), lax.mul(logs, power))
    return lax.add(lax.add(lax.log(d), lax.log(v)), boost)


def _positive(state: Any, c: Any, dtype: np.dtype) -> Any:
    """The next candidate x with 1 + c x; it is wanted positive."""
    key, fresh = pair(state[0])
    x = normal_typed(fresh, (), dtype)
    return key, x, lax.add(np.array(1, dtype), lax.mul(x, c))


@one_program("log_space")
def _draw(key: Any, a: Any, log_space: bool) -> Any:
    shape = typeof(a).shape
    keys = split_typed(key, (math.prod(shape),))
    flat = lax.reshape(a, (math.prod(shape),))
    if typeof(key).dtype == dtypes.key_dtype:
        return lax.reshape(vmap(lambda k, x: _gamma_one(k, x, log_space))(keys, flat), shape)
    # Vectorised, the other generators may draw the bits of all samples from the first key.
    drawn = lax.map(lambda each: _gamma_one(each[0], each[1], log_space), (keys, flat))
    return lax.reshape(drawn, shape)


def _with_derivative(log_space: bool) -> Any:
    """`_draw` with its derivative, where that of a loop would be silently wrong.

    A sample moves with the parameter so that its place in the distribution, P(a, sample), stays:
    the derivative is implicit in that equation.
    """

    @custom_jvp
    def draw(key: Any, a: Any) -> Any:
        return _draw(key, a, log_space)

    @draw.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        key, a = primals
        out = draw(key, a)
        if not log_space:
            return out, lax.mul(tangents[1], lax.random_gamma_grad(a, out))
        dtype = typeof(out).dtype
        sample = lax.exp(out)
        tiny = lax.full_like(sample, dtypes.finfo(dtype).tiny)
        sample = select(lax.eq(sample, np.array(0, dtype)), tiny, sample)
        slope = lax.div(lax.random_gamma_grad(a, sample), sample)
        return out, lax.mul(tangents[1], slope)

    return draw


_samples = {False: _with_derivative(False), True: _with_derivative(True)}


def gamma_typed(
    key: Any, a: Any, shape: tuple[int, ...], dtype: np.dtype, log_space: bool = False
) -> Any:
    """`gamma` (or its logarithm) of a typed key."""
    a = broadcast_to(lax.convert_element_type(plain(a), dtype), shape)
    return _samples[log_space](key, a)


# ---- the distributions -------------------------------------------------------------------------


@lays_out_result
def gamma(
    key: Any, a: Any, shape: Any = None, dtype: Any = None, *, out_sharding: Any = None
) -> Array:
    """Draw gamma distributed numbers with shape parameter `a` and scale 1.

    `a` broadcasts to `shape`, which is by default its own; `dtype` is a float dtype, by default
    float32. Marsaglia and Tsang's method (2000) rejects candidates in a loop; the derivative with
    respect to `a` is that of the sample whose place in the distribution stays. `out_sharding`,
    a sharding or spec over `Explicit` mesh axes, is the layout of the result. Raises `DtypeError`
    for another dtype, `ShapeError` if `a` does not broadcast, and `ArgumentError` if `key` is no
    single key.

    >>> x = spmd.random.gamma(spmd.random.key(0), 3.0, (10_000,))
    >>> round(float(x.mean()), 1)
    3.0
    """
    found, whole = float_dtype(dtype, "gamma"), sample_shape("gamma", shape, a)
    return gamma_typed(single(key, "gamma"), a, whole, found)


@lays_out_result
def loggamma(
    key: Any, a: Any, shape: Any = None, dtype: Any = None, *, out_sharding: Any = None
) -> Array:
    """Draw logarithms of gamma distributed numbers, exact also where those underflow.

    `a`, `shape`, `dtype` (a float) and the errors are those of `gamma`: `DtypeError`,
    `ShapeError` and `ArgumentError`.
    `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout of the result.

    >>> bool(snp.isfinite(spmd.random.loggamma(spmd.random.key(0), 1e-6)))
    True
    """
    found, whole = float_dtype(dtype, "loggamma"), sample_shape("loggamma", shape, a)
    return gamma_typed(single(key, "loggamma"), a, whole, found, log_space=True)


@lays_out_result
def beta(
    key: Any, a: Any, b: Any, shape: Any = None, dtype: Any = None, *, out_sharding: Any = None
) -> Array:
    """Draw beta distributed numbers with parameters `a` and `b`.

    The parameters broadcast to `shape`, which is by default theirs; `dtype` is a float dtype,
    by default float32. The result is `x / (x + y)` of two gamma distributed numbers.
    `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout of the result.
    Raises `DtypeError` for another dtype, `ShapeError` if a parameter does not broadcast, and
    `ArgumentError` if `key` is no single key.

    >>> x = spmd.random.beta(spmd.random.key(0), 1.0, 3.0, (10_000,))
    >>> round(float(x.mean()), 2)
    0.25
    """
    found = float_dtype(dtype, "beta")
    whole = parameters_shape("beta", shape, found, a, b)
    first, second = pair(single(key, "beta"))
    log_a = gamma_typed(first, a, whole, found, log_space=True)
    log_b = gamma_typed(second, b, whole, found, log_space=True)
    larger = lax.max(log_a, log_b)
    x, y = (lax.exp(lax.sub(v, larger)) for v in (log_a, log_b))
    return lax.div(x, lax.add(x, y))


@lays_out_result
def dirichlet(
    key: Any, alpha: Any, shape: Any = None, dtype: Any = None, *, out_sharding: Any = None
) -> Array:
    """Draw Dirichlet distributed vectors, which sum to 1.

    The last dim of `alpha` is the vectors'; the others broadcast to `shape`, which is by
    default theirs and to which that dim is appended. `dtype` is a float dtype, by default
    float32. `out_sharding`, a
    sharding or spec over `Explicit` mesh axes, is the layout of the result. Raises `DtypeError`
    for another dtype, `ShapeError` if `alpha` is a scalar or does not broadcast, and
    `ArgumentError` if `key` is no single key.

    >>> x = spmd.random.dirichlet(spmd.random.key(0), np.ones(3), (4,))
    >>> x.shape, bool(snp.allclose(x.sum(-1), 1))
    ((4, 3), True)
    """
    found = float_dtype(dtype, "dirichlet")
    own = typeof(plain(alpha)).shape
    if not own:
        raise ShapeError("dirichlet: alpha must have at least one dim")
    lead = sample_shape("dirichlet", shape, np.empty(own[:-1], bool))
    logs = gamma_typed(single(key, "dirichlet"), alpha, (*lead, own[-1]), found, log_space=True)
    # Normalised by the largest, so that small ones may underflow but the sum does not.
    scaled = lax.exp(subtract(logs, _max(logs, -1, keepdims=True)))
    return divide(scaled, _sum(scaled, -1, keepdims=True))


@lays_out_result
def chisquare(
    key: Any, df: Any, shape: Any = None, dtype: Any = None, *, out_sharding: Any = None
) -> Array:
    """Draw chi-square distributed numbers with `df` degrees of freedom.

    `df` broadcasts to `shape`, which is by default its own; `dtype` is a float dtype, by
    default float32. `out_sharding`, a
    sharding or spec over `Explicit` mesh axes, is the layout of the result. Raises `DtypeError`
    for another dtype, `ShapeError` if `df` does not broadcast, and `ArgumentError` if `key` is
    no single key.

    >>> x = spmd.random.chisquare(spmd.random.key(0), 4.0, (10_000,))
    >>> round(float(x.mean()), 1)
    4.0
    """
    found = float_dtype(dtype, "chisquare")
    whole = parameters_shape("chisquare", shape, found, df)
    half = lax.div(lax.convert_element_type(plain(df), found), np.array(2, found))
    logs = gamma_typed(single(key, "chisquare"), half, whole, found, log_space=True)
    return lax.mul(lax.exp(logs), np.array(2, found))


@lays_out_result
def t(
    key: Any, df: Any, shape: Any = None, dtype: Any = None, *, out_sharding: Any = None
) -> Array:
    """Draw numbers of Student's t distribution with `df` degrees of freedom.

    `df` broadcasts to `shape`, which is by default its own; `dtype` is a float dtype, by
    default float32. `out_sharding`, a
    sharding or spec over `Explicit` mesh axes, is the layout of the result. Raises `DtypeError`
    for another dtype, `ShapeError` if `df` does not broadcast, and `ArgumentError` if `key` is
    no single key.

    >>> spmd.random.t(spmd.random.key(0), 4.0, (2, 3)).shape
    (2, 3)
    """
    found = float_dtype(dtype, "t")
    whole = parameters_shape("t", shape, found, df)
    first, second = pair(single(key, "t"))
    half = lax.div(lax.convert_element_type(plain(df), found), np.array(2, found))
    half = broadcast_to(half, whole)
    scale = lax.sqrt(lax.div(half, gamma_typed(second, half, whole, found)))
    return lax.mul(normal_typed(first, whole, found), scale)


# ---- poisson -----------------------------------------------------------------------------------


@lays_out_result
def poisson(
    key: Any, lam: Any, shape: Any = None, dtype: Any = None, *, out_sharding: Any = None
) -> Array:
    """Draw Poisson distributed integers with mean `lam`.

    `lam` broadcasts to `shape`, which is by default its own; `dtype` is by default the default
    integer dtype. Below a mean of 10 waiting times are counted (Knuth), above it candidates are
    rejected (Hörmann 1993). `out_sharding`, a sharding or spec over `Explicit` mesh axes, is
    the layout of the result. Raises `ShapeError` if `lam` does not broadcast, and
    `ArgumentError` if `key` is no single key.

    >>> x = spmd.random.poisson(spmd.random.key(0), 4.0, (10_000,))
    >>> round(float(x.mean()), 1), x.dtype
    (4.0, dtype('int32'))
    """
    found = default_int() if dtype is None else user_dtype(dtype, "poisson")
    if not dtypes.is_integer(found):
        raise DtypeArgumentError(f"poisson: dtype must be an integer dtype, got {found.name}")
    whole = sample_shape("poisson", shape, lam)
    lam = broadcast_to(lax.convert_element_type(plain(lam), np.dtype(np.float32)), whole)
    key = single(key, "poisson")
    small = lax.bitwise_or(lax.ne(lam, lam), lax.lt(lam, constant_like(lam, 10)))
    # Each method gets parameters in its own range; its results for other elements are not used.
    few = _poisson_by_waiting(key, select(small, lam, constant_like(lam, 0)), found)
    many = _poisson_by_rejection(key, select(small, constant_like(lam, 1e5), lam), found)
    result = select(small, few, many)
    return select(lax.eq(lam, constant_like(lam, 0)), constant_like(result, 0), result)


@one_program("dtype")
def _poisson_by_waiting(key: Any, lam: Any, dtype: np.dtype) -> Any:
    """Knuth: how many exponential waiting times fit into `lam`."""
    shape = typeof(lam).shape
    limit, one = lax.neg(lam), np.array(1, dtype)

    def step(state: Any) -> Any:
        i, k, key, logs = state
        key, fresh = pair(key)
        k = select(lax.gt(logs, limit), lax.add(k, one), k)
        u = uniform_typed(fresh, shape, np.dtype(np.float32))
        return lax.add(i, np.int32(1)), k, key, lax.add(logs, lax.log(u))

    def goes_on(state: Any) -> Any:
        i, _, _, logs = state
        return lax.bitwise_and(_any(lax.gt(logs, limit)), lax.lt(i, np.int32(2**31 - 1)))

    start = (np.int32(0), full_like(lam, 0, dtype), key, full_like(lam, 0))
    return lax.sub(lax.while_loop(goes_on, step, start)[1], one)


@one_program("dtype")
def _poisson_by_rejection(key: Any, lam: Any, dtype: np.dtype) -> Any:
    """Hormann's transformed rejection, for large `lam`."""
    shape = typeof(lam).shape

    def const(value: float) -> np.ndarray:
        return np.array(value, np.float32)

    b = lax.add(lax.mul(lax.sqrt(lam), const(2.53)), const(0.931))
    a = lax.add(lax.mul(b, const(0.02483)), const(-0.059))
    inverse_alpha = lax.add(lax.div(const(1.1328), lax.sub(b, const(3.4))), const(1.1239))
    v_r = lax.sub(const(0.9277), lax.div(const(3.6224), lax.sub(b, const(2))))
    log_lam = lax.log(lam)

    def step(state: Any) -> Any:
        i, found, accepted, key = state
        key, u_key, v_key = several(key, 3)
        u = lax.sub(uniform_typed(u_key, shape, np.dtype(np.float32)), const(0.5))
        v = uniform_typed(v_key, shape, np.dtype(np.float32))
        room = lax.sub(const(0.5), lax.abs(u))
        spread = lax.add(lax.div(lax.mul(a, const(2)), room), b)
        k = lax.floor(lax.add(lax.add(lax.mul(spread, u), lam), const(0.43)))
        height = lax.add(lax.div(a, lax.mul(room, room)), b)
        s = lax.log(lax.div(lax.mul(v, inverse_alpha), height))
        likelihood = lax.sub(
            lax.add(lax.neg(lam), lax.mul(k, log_lam)), lax.lgamma(lax.add(k, const(1)))
        )
        surely = lax.bitwise_and(lax.ge(room, const(0.07)), lax.le(v, v_r))
        outside = lax.bitwise_and(lax.lt(room, const(0.013)), lax.gt(v, room))
        outside = lax.bitwise_or(lax.lt(k, const(0)), outside)
        fits = lax.bitwise_and(lax.bitwise_not(outside), lax.le(s, likelihood))
        accept = lax.bitwise_or(surely, fits)
        found = select(accept, k, found)
        return lax.add(i, np.int32(1)), found, lax.bitwise_or(accepted, accept), key

    def goes_on(state: Any) -> Any:
        i, _, accepted, _ = state
        return lax.bitwise_and(_any(lax.bitwise_not(accepted)), lax.lt(i, np.int32(2**31 - 1)))

    none = full_like(lam, False, dtypes.bool_)
    start = (np.int32(0), full_like(lam, -1.0), none, key)
    return lax.convert_element_type(lax.while_loop(goes_on, step, start)[1], dtype)
