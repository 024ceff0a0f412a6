"""Dtypes of 8 bits and fewer beside JAX's: every operation computes wide and rounds its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import spmd
from tests.jax.compare import OURS, THEIRS, jax

FLOATS = """float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2
float8_e5m2fnuz float4_e2m1fn""".split()
# XLA has no sound code for int2: only what moves and converts is compared.
INTEGERS = ["int4", "uint4"]

Program = Callable[[Any, Any, Any], Any]

COMMON: dict[str, Program] = {
    "convert": lambda j, x, t: x.astype(j.np.float32),
    "from float": lambda j, x, t: j.np.array([300, -9.3, 7.5, np.nan, 0.3], np.float32).astype(t),
    "from int": lambda j, x, t: j.np.arange(-10, 20, 3).astype(t),
    "add": lambda j, x, t: x + x[::-1],
    "add a number": lambda j, x, t: x + 1,
    "negative": lambda j, x, t: -x,
    "mul and add": lambda j, x, t: j.jit(lambda x: x * x + x)(x),
    "divide": lambda j, x, t: x // (x + 1) if t.startswith("i") else x / x,
    "product": lambda j, x, t: x @ x,
    "outer": lambda j, x, t: j.np.einsum("i,j->ij", x, x),
    "largest": lambda j, x, t: (j.np.max(x), j.np.argmax(x), j.np.maximum(x, x[::-1])),
    "compare": lambda j, x, t: (x < x[::-1], x == x),
    "sort": lambda j, x, t: j.np.sort(x[::-1]),
    "move": lambda j, x, t: (x.reshape(2, 3).T, j.np.concatenate([x, x]), j.np.stack([x, x])),
    "index": lambda j, x, t: (x[np.array([3, 1])], x[1:4], j.np.take(x, np.array([1, 2]))),
    "update": lambda j, x, t: (x.at[2].set(1), x.at[2].add(1)),
    "make": lambda j, x, t: (j.np.zeros(3, t), j.np.ones((2, 2), t), j.np.arange(3, dtype=t)),
    "where": lambda j, x, t: j.np.where(x > 2, x, 0),
    "clip": lambda j, x, t: j.np.clip(x, 1, 2),
    "pad": lambda j, x, t: j.np.pad(x, 1),
    "power": lambda j, x, t: x**2,
    "remainder": lambda j, x, t: x % 2,
    "floor": lambda j, x, t: x // x,
    "scan": lambda j, x, t: j.lax.scan(lambda c, x: (c + x, c * x), x[0], x),
    "cond": lambda j, x, t: j.jit(lambda x: j.lax.cond(x[0] > 0, lambda x: x + x, lambda x: x, x))(
        x
    ),
    "vmap": lambda j, x, t: j.vmap(lambda x: x * x)(x),
    "cast under jit": lambda j, x, t: j.jit(
        lambda x: (x.astype(j.np.float32) * 1.5).astype(x.dtype)
    )(x),
    "bits": lambda j, x, t: j.lax.bitcast_convert_type(x, np.uint8 if "8" in t else x.dtype),
    "gradient": lambda j, x, t: j.grad(lambda y: (y.astype(t) * 2).astype(j.np.float32).sum())(
        j.np.arange(3.0)
    ),
}
OF_FLOATS: dict[str, Program] = {
    "sin": lambda j, x, t: j.np.sin(x),
    "exp": lambda j, x, t: j.np.exp(x),
    "add a float": lambda j, x, t: (x + 1.5, x + np.int32(1)),
    "is finite": lambda j, x, t: j.np.isfinite(x),
    "gradient in small": lambda j, x, t: j.grad(lambda x: (x * x).sum())(x),
    "limits": lambda j, x, t: np.float32(j.np.finfo(t).max),
}
OF_INTEGERS: dict[str, Program] = {
    "limits": lambda j, x, t: (int(j.np.iinfo(t).min), int(j.np.iinfo(t).max)),
    "bitwise": lambda j, x, t: (x & 3, x | 1, x ^ x, ~x, x << 1),
}
CASES = [
    *((t, name, f) for t in FLOATS for name, f in (COMMON | OF_FLOATS).items()),
    *((t, name, f) for t in INTEGERS for name, f in (COMMON | OF_INTEGERS).items()),
]


def values(j: Any, program: Program, dtype: str) -> list[Any]:
    x = j.np.arange(1, 7).astype(dtype)
    return [np.asarray(v) for v in j.tree.leaves(program(j, x, dtype))]


@pytest.mark.parametrize(
    ("dtype", "program"), [(t, f) for t, _, f in CASES], ids=[f"{t} {n}" for t, n, _ in CASES]
)
def test_operations_on_small_dtypes(dtype, program, from_jax):
    wanted = from_jax(lambda: values(THEIRS, program, dtype))
    for ours, theirs in zip(values(OURS, program, dtype), wanted, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours.astype(np.float32), theirs.astype(np.float32))


@pytest.mark.parametrize("dtype", ["int2", "uint2", "float8_e8m0fnu"])
def test_conversions_of_the_smallest_dtypes(dtype):
    for given in (np.arange(-9, 9), np.array([0.4, 1.6, -7.0, 1e9, np.nan], np.float32)):
        ours = spmd.numpy.asarray(given).astype(dtype)
        theirs = jax.numpy.asarray(given).astype(dtype)
        np.testing.assert_array_equal(
            np.asarray(ours).astype(np.float32), np.asarray(theirs).astype(np.float32)
        )


@pytest.mark.parametrize("small", [*FLOATS, *INTEGERS])
def test_promotion_of_small_dtypes(small):
    """What JAX promotes has the same dtype here, and what it does not is an error."""
    for other in ("float32", "bfloat16", "int32", "uint8", "bool", "complex64", "int4", small):
        try:
            theirs = jax.numpy.promote_types(small, other)
        except jax.dtypes.TypePromotionError:
            with pytest.raises(spmd.dtypes.TypePromotionError):
                spmd.numpy.promote_types(small, other)
        else:
            assert spmd.numpy.promote_types(small, other) == theirs
