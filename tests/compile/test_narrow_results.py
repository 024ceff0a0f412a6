"""Masks and narrow values that are results and are used again, through casts and reductions.

From 4,096 bytes on a pass may make a value again instead of keeping it, from others that are
results of the program, too. Each pass keeps the law and the meaning, and so does the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.compile.executable.executable import compile_jaxpr
from spmd.compile.passes.fusion.rematerialize import LEAST_BYTES
from spmd.compile.passes.pipeline import PASSES
from spmd.core.check import check_jaxpr
from tests.compile.programs import by_impl

SHAPES = ((64, 64), (32, 128), (8192,), (4, 32, 64))
KINDS = ("float32", "int32", "int8", "uint8", "uint16", "bool", "bfloat16", "float16")
WIDE = ("float32", "bfloat16", "float16")


def random_program(seed: int) -> tuple[Callable[[Any], list[Any]], np.ndarray]:
    """A function that gives some of the values it makes and uses, and its argument."""
    rng = np.random.default_rng(seed)
    shape, length = SHAPES[rng.integers(len(SHAPES))], int(rng.integers(2, 14))

    def function(x: Any) -> list[Any]:
        choose = np.random.default_rng(seed + 1)
        values = [x]
        for _ in range(length):
            a = values[int(choose.integers(max(0, len(values) - 5), len(values)))]
            b = values[int(choose.integers(len(values)))]
            made = operation(choose, a, b)
            if made.dtype in WIDE:
                made = snp.clip(made, -8, 8)
            values.append(snp.broadcast_to(made, shape))
        picked = [values[int(k)] for k in choose.choice(len(values), size=choose.integers(1, 5))]
        return [*picked, values[-1], wide(values[-1]).mean()]

    return function, rng.integers(-4, 5, shape).astype(np.float32)


def wide(x: Any) -> Any:
    return x.astype("float32")


def operation(choose: np.random.Generator, a: Any, b: Any) -> Any:
    """One random operation on two values of any dtype."""
    axis = (None, -1, 0)[choose.integers(3)]
    kind = KINDS[choose.integers(len(KINDS))]
    makers: list[Callable[[], Any]] = [
        lambda: wide(a) > 1,
        lambda: a.astype(kind),
        lambda: wide(a) - wide(a).mean(axis=axis, keepdims=True),
        lambda: snp.where(wide(b) > 0, wide(a), wide(b) * 0.5),
        lambda: wide(a) - wide(b),
        lambda: (wide(a) > 0) & (wide(b) < 2),
        lambda: wide(a) * wide(b).max(axis=-1, keepdims=True) * 0.125,
        lambda: (a > 1).any(axis=-1, keepdims=True) | (wide(b) < 0),
        lambda: abs(wide(a)),
        lambda: (wide(a) > 0).astype("int8") + (wide(b) > 1).astype("int8"),
    ]
    return makers[choose.integers(len(makers))]()


def assert_same(found: list[Any], wanted: list[np.ndarray]) -> None:
    """Values agree; next to a jump, one in a thousand may be on its other side."""
    for got, expected in zip(found, wanted, strict=True):
        got = np.asarray(got)
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        apart = ~np.isclose(got.astype(float), expected.astype(float), rtol=1e-2, atol=1e-3)
        assert apart.mean() <= 1e-3


@pytest.mark.parametrize("seed", range(24))
def test_random_programs(seed: int):
    function, x = random_program(seed)
    assert x.nbytes >= LEAST_BYTES
    closed = spmd.make_jaxpr(function)(x)
    wanted = by_impl(closed, [x])
    made = closed
    for step in PASSES:
        made = step(made)
        check_jaxpr(made, after=step.__name__)
    assert_same(by_impl(made, [x]), wanted)
    assert_same(compile_jaxpr(closed)([x]), wanted)


@pytest.mark.parametrize("dtype", KINDS)
def test_a_result_is_read_again_through_a_cast(dtype: str):
    def function(x: Any) -> tuple[Any, Any]:
        narrow = (x > 3).astype(dtype)
        return narrow, wide(narrow) - wide(narrow).sum()

    x = np.arange(8192).reshape(128, 64) % 7
    narrow = x > 3
    for got, wanted in zip(
        spmd.jit(function)(x), (narrow, narrow - np.float32(narrow.sum())), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(got).astype(np.float32), wanted)
