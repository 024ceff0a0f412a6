"""Calls of `lax` beside `jax.lax`: shapes, dtypes and weak types exactly, values to the last bits.

Elementwise functions are called in every dtype that JAX accepts them in, and must refuse those that
JAX refuses.
"""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import spmd
from spmd import lax

jax = pytest.importorskip("jax", reason="the oracle of these tests is JAX")

BF16 = ml_dtypes.bfloat16
DTYPES = [np.bool_, np.int8, np.uint8, np.int32, np.uint32, np.float16, BF16, np.float32,
          np.complex64]  # fmt: skip

# What a result may differ by, relative to its size: a few units in the last place.
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 4e-6, "complex64": 4e-6}


def operand(dtype: Any, shift: int = 0) -> np.ndarray:
    """Twelve numbers of a dtype; those of floating dtypes are inside (0, 1), if `shift` is 0."""
    if dtype == np.bool_:
        return (np.arange(12) + shift) % 3 == 0
    if np.dtype(dtype).kind in "iu":
        return ((np.arange(12) + shift) % 7).astype(dtype)
    x = np.linspace(0.07, 0.93, 12) + shift
    return (x + 0.3j * x if dtype == np.complex64 else x).astype(dtype)


def same(found: Any, wanted: Any, what: str) -> None:
    """Compare two results, trees of arrays."""
    ours, theirs = spmd.tree.leaves(found), jax.tree_util.tree_leaves(wanted)
    assert len(ours) == len(theirs), what
    for x, y in zip(ours, theirs, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), f"{what}: {x.dtype}{x.shape}"
        # Whether a bool is weak makes no difference to anything.
        weak = bool(y.weak_type) and y.dtype != np.bool_
        assert (x.weak_type and x.dtype != np.bool_) == weak, f"{what}: weak type"
        tolerance = TOLERANCE.get(str(x.dtype), 0)
        wide = np.complex64 if np.dtype(x.dtype).kind == "c" else np.float64
        a, b = np.asarray(x).astype(wide), np.asarray(y).astype(wide)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance / 8, err_msg=what)


# ---- elementwise -------------------------------------------------------------------------------

UNARY = """abs neg sign exp exp2 expm1 log log1p sin cos tan asin acos atan sinh cosh tanh asinh
acosh atanh sqrt rsqrt cbrt square reciprocal logistic floor ceil round erf erfc erf_inv lgamma
digamma is_finite real imag conj bitwise_not population_count clz""".split()
BINARY = """add sub mul div rem max min pow atan2 nextafter bitwise_and bitwise_or bitwise_xor
shift_left shift_right_logical shift_right_arithmetic eq ne lt le gt ge complex igamma igammac
zeta""".split()


@functools.cache
def accepted(name: str, arity: int) -> dict[Any, Any]:
    """The dtypes in which JAX has the function, and what it computes, as one program."""
    f = getattr(jax.lax, name)
    shift = 1 if name in ("acosh", "zeta") else 0
    calls = {}
    for dtype in DTYPES:
        args = [operand(dtype, shift + k) for k in range(arity)]
        try:
            jax.eval_shape(f, *args)
        except (TypeError, ValueError):
            continue
        calls[dtype] = args
    # Given as operands: XLA stops the process when it folds an integer division by zero.
    results = jax.jit(lambda every: [f(*args) for args in every])([*calls.values()])
    return {dtype: (args, x) for (dtype, args), x in zip(calls.items(), results, strict=True)}


# erf_inv and the gamma functions are built from other approximations in XLA; bfloat16 and float16
# are computed in float32 and rounded once here.
LOOSE = {"lgamma": 3e-5, "digamma": 3e-5, "erf_inv": 1e-5, "igamma": 3e-5, "igammac": 3e-5,
         "zeta": 3e-5}  # fmt: skip
# Where we accept a dtype that JAX refuses, and refuse one that JAX accepts: the angle of a complex
# vector is no angle.
WIDER = {"abs": {np.uint8, np.uint32}, "reciprocal": {np.int8, np.uint8, np.int32, np.uint32}}
NARROWER = {"atan2": {np.complex64}}


@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_elementwise_in_every_dtype(name, monkeypatch):
    if name in LOOSE:
        monkeypatch.setitem(TOLERANCE, "float32", LOOSE[name])
    arity = 1 if name in UNARY else 2
    calls = accepted(name, arity)
    f = getattr(lax, name)
    for dtype in DTYPES:
        if dtype in calls and dtype not in NARROWER.get(name, ()):
            args, wanted = calls[dtype]
            same(f(*args), wanted, f"{name} of {np.dtype(dtype)}")
        elif dtype not in WIDER.get(name, ()):
            with pytest.raises(TypeError):
                f(*[operand(dtype, k) for k in range(arity)])


@pytest.mark.parametrize("name", ["add", "mul", "max", "lt", "atan2", "pow"])
@pytest.mark.parametrize("scalar", [2, 2.0, True], ids=repr)
def test_with_python_numbers(name, scalar):
    """Beside an array a Python number takes its dtype, on either side.

    JAX takes fewer: its `lax.add` refuses 2 beside float32. What both take, gives the same.
    """
    f, theirs = getattr(lax, name), getattr(jax.lax, name)
    for dtype in (np.int32, np.float32, BF16, np.bool_):
        x = operand(dtype)
        for args in ((x, scalar), (scalar, x), (scalar, scalar)):
            try:
                wanted = theirs(*args)
            except (TypeError, ValueError):
                try:
                    found = f(*args)
                except (TypeError, ValueError):
                    continue
                assert found.dtype in (x.dtype, np.bool_), f"{name}{args}"
            else:
                same(f(*args), wanted, f"{name}{args}")


# ---- everything else ---------------------------------------------------------------------------

X = np.linspace(-2, 2, 24, dtype=np.float32).reshape(2, 3, 4)
V = np.array([3.0, -1.0, 2.0, 0.5, -4.0, 2.0], np.float32)
INTS = np.array([4, 1, 3, 1, 0, 2], np.int32)
B = np.array([True, False, True, True, False, True])
C = (V + 1j * V[::-1]).astype(np.complex64)
GATHER = dict(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
SCATTER = dict(update_window_dims=(1,), inserted_window_dims=(0,),
               scatter_dims_to_operand_dims=(0,))  # fmt: skip


def scattered(kind: str):
    def call(m):
        numbers = m.ScatterDimensionNumbers(**SCATTER)
        return getattr(m, kind)(X[0], np.array([[2], [0], [2]]), X[1], numbers)

    return call


CALLS = {
    "argmax": lambda m: m.argmax(X, 1, np.int32),
    "argmin": lambda m: m.argmin(INTS, 0, np.int8),
    "argmax nan": lambda m: m.argmax(np.array([1, np.nan, 3], np.float32), 0, np.int32),
    "associative_scan": lambda m: m.associative_scan(m.add, V),
    "associative_scan reverse": lambda m: m.associative_scan(m.mul, X, reverse=True, axis=1),
    "batch_matmul": lambda m: m.batch_matmul(X, np.swapaxes(X, 1, 2)),
    "bitcast down": lambda m: m.bitcast_convert_type(V, np.uint8),
    "bitcast same": lambda m: m.bitcast_convert_type(V, np.int32),
    "broadcast": lambda m: m.broadcast(V, (2, 3)),
    "broadcast_in_dim": lambda m: m.broadcast_in_dim(X[0], (3, 2, 4), (0, 2)),
    "broadcasted_iota": lambda m: m.broadcasted_iota(np.int16, (2, 3), 1),
    "clamp": lambda m: m.clamp(np.float32(-1), V, np.float32(1)),
    "clamp ints": lambda m: m.clamp(1, INTS, 3),
    "collapse": lambda m: m.collapse(X, 0, 2),
    "concatenate": lambda m: m.concatenate([X, X[:, :1]], 1),
    "cond": lambda m: m.cond(True, lambda x: x + 1, lambda x: x * 2, V),
    "cond float predicate": lambda m: m.cond(0.0, lambda x: x + 1, lambda x: x * 2, 3),
    "convert to int": lambda m: m.convert_element_type(V, np.int8),
    "convert to bool": lambda m: m.convert_element_type(V, np.bool_),
    "convert to bf16": lambda m: m.convert_element_type(X, BF16),
    "convert out of range": lambda m: m.convert_element_type(V * 1e9, np.int32),
    "convert complex": lambda m: m.convert_element_type(V, np.complex64),
    "convert weak": lambda m: m.convert_element_type(1, np.float32),
    "cumlogsumexp": lambda m: m.cumlogsumexp(X, 2),
    "cummax": lambda m: m.cummax(X[:, ::-1], 1),
    "cummin reverse": lambda m: m.cummin(INTS, reverse=True),
    "cumprod": lambda m: m.cumprod(INTS, 0),
    "cumsum": lambda m: m.cumsum(X, 1),
    "dot": lambda m: m.dot(X[0], X[0].T),
    "dot vectors": lambda m: m.dot(V, V),
    "dot ints": lambda m: m.dot(INTS, INTS),
    "dot_general": lambda m: m.dot_general(X, X, (((2,), (2,)), ((0,), (0,)))),
    "dot_general preferred": lambda m: m.dot_general(
        X.astype(BF16), X.astype(BF16), (((1, 2), (1, 2)), ((), ())),
        preferred_element_type=np.float32,
    ),
    "dynamic_index_in_dim": lambda m: m.dynamic_index_in_dim(X, np.int32(2), 1, keepdims=False),
    "dynamic_slice": lambda m: m.dynamic_slice(X, (0, np.int32(1), 9), (2, 2, 2)),
    "dynamic_slice negative": lambda m: m.dynamic_slice(V, (-2,), (2,)),
    "dynamic_slice_in_dim": lambda m: m.dynamic_slice_in_dim(X, 1, 2, axis=1),
    "dynamic_update_index": lambda m: m.dynamic_update_index_in_dim(X, X[:, 0], 2, 1),
    "dynamic_update_slice": lambda m: m.dynamic_update_slice(V, V[:2], (np.int32(5),)),
    "dynamic_update_slice_in_dim": lambda m: m.dynamic_update_slice_in_dim(X, X[:, :2], 1, 1),
    "expand_dims": lambda m: m.expand_dims(X, (0, -1)),
    "fori_loop": lambda m: m.fori_loop(0, 5, lambda i, x: x * 0.5 + i, V),
    "fori_loop traced": lambda m: m.fori_loop(0, np.int32(5), lambda i, x: x + i, 0),
    "full": lambda m: m.full((2, 3), 7),
    "full dtype": lambda m: m.full((2,), 7, np.float16),
    "full_like": lambda m: m.full_like(INTS, 2.7),
    "full_like shape": lambda m: m.full_like(V, 1, shape=(2,)),
    "gather": lambda m: m.gather(X[0], np.array([[2], [0]]), m.GatherDimensionNumbers(**GATHER),
                                 (1, 4)),
    "gather fill": lambda m: m.gather(X[0], np.array([[5], [1]]),
                                      m.GatherDimensionNumbers(**GATHER), (1, 4), mode="fill"),
    "gather clip": lambda m: m.gather(X[0], np.array([[5], [-1]]),
                                      m.GatherDimensionNumbers(**GATHER), (1, 4), mode="clip"),
    "index_in_dim": lambda m: m.index_in_dim(X, -1, 1),
    "integer_pow": lambda m: m.integer_pow(V, -3),
    "iota": lambda m: m.iota(np.float32, 5),
    "reduce_max": lambda m: m.reduce_max(X, (0, 2)),
    "map": lambda m: m.map(lambda x: x @ x, V[:, None] * V),
    "map batched": lambda m: m.map(lambda x: x * 2, V, batch_size=4),
    "pad": lambda m: m.pad(X[0], np.float32(9), [(1, 2, 0), (0, 1, 1)]),
    "pad negative": lambda m: m.pad(V, np.float32(0), [(-1, -2, 2)]),
    "polygamma": lambda m: m.polygamma(np.float32(1), np.abs(V)),
    "reduce_sum": lambda m: m.reduce_sum(X, (1,)),
    "reduce_prod": lambda m: m.reduce_prod(INTS, (0,)),
    "reduce_min": lambda m: m.reduce_min(X, (0, 1, 2)),
    "reduce_and": lambda m: m.reduce_and(B, (0,)),
    "reduce_or ints": lambda m: m.reduce_or(INTS, (0,)),
    "reduce_xor": lambda m: m.reduce_xor(B, (0,)),
    "reduce": lambda m: m.reduce(X, np.float32(1), m.mul, (2,)),
    "reduce_precision": lambda m: m.reduce_precision(V * 1.001, 5, 3),
    "reshape": lambda m: m.reshape(X, (4, 6)),
    "reshape dimensions": lambda m: m.reshape(X, (24,), dimensions=(2, 0, 1)),
    "rev": lambda m: m.rev(X, (0, 2)),
    "round half to even": lambda m: m.round(V / 2, m.RoundingMethod.TO_NEAREST_EVEN),
    "scan": lambda m: m.scan(lambda c, x: (c + x, c * x), np.float32(1), V),
    "scan reverse": lambda m: m.scan(lambda c, x: (c + x, x), 0, INTS, reverse=True),
    "scan unrolled": lambda m: m.scan(lambda c, x: (c * 0.5 + x, x), 0.0, V, unroll=4),
    "scan no xs": lambda m: m.scan(lambda c, _: (c * 2, c), 1, None, length=5),
    "scatter": scattered("scatter"),
    "scatter_add": scattered("scatter_add"),
    "scatter_mul": scattered("scatter_mul"),
    "scatter_min": scattered("scatter_min"),
    "scatter_max": scattered("scatter_max"),
    "select": lambda m: m.select(B, V, -V),
    "select_n": lambda m: m.select_n(INTS % 3, V, V * 2, V * 3),
    "slice": lambda m: m.slice(X, (0, 1, 0), (2, 3, 4), (1, 1, 3)),
    "slice_in_dim": lambda m: m.slice_in_dim(X, 1, None, axis=1),
    "slice_in_dim negative": lambda m: m.slice_in_dim(V, -4, -1),
    "sort": lambda m: m.sort(V),
    "sort nan": lambda m: m.sort(np.array([np.nan, 1, -np.inf, -0.0, 0.0], np.float32)),
    "sort complex": lambda m: m.sort(C),
    "sort dim": lambda m: m.sort(-X, 1),
    "sort many": lambda m: m.sort((INTS, V, np.arange(6)), num_keys=2),
    "sort_key_val": lambda m: m.sort_key_val(INTS, V),
    "split": lambda m: m.split(V, (2, 3, 1)),
    "squeeze": lambda m: m.squeeze(X[:, :1], (1,)),
    "switch": lambda m: m.switch(7, [lambda x: x, lambda x: x * 2, lambda x: -x], V),
    "tile": lambda m: m.tile(X[0], (2, 3)),
    "top_k": lambda m: m.top_k(V, 3),
    "top_k rows": lambda m: m.top_k(X, 2),
    "transpose": lambda m: m.transpose(X, (2, 0, 1)),
    "while_loop": lambda m: m.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, s[1] * 2),
                                         (0, V)),
    "zeta": lambda m: m.zeta(np.float32(2.5), np.abs(V)),
}  # fmt: skip


@functools.cache
def jax_results() -> dict[str, Any]:
    """What JAX computes for all calls, compiled as one program."""
    return jax.jit(lambda: {name: call(jax.lax) for name, call in CALLS.items()})()


@pytest.mark.parametrize("name", CALLS)
def test_call(name):
    found = CALLS[name](lax)
    same(found, jax_results()[name], name)
    same(spmd.jit(lambda: CALLS[name](lax))(), jax_results()[name], f"{name} under jit")
