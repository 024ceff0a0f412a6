"""Sorts along a split dim, by all devices together: those of one device, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, debug, lax
from spmd.partition.strategies.sorting import write_sort
from spmd.sharding import AxisType

# The fewest rows that the pattern takes, on so many devices, and more.
ROWS = {3: (12, 18, 60), 4: (24, 40, 64)}


def mesh_of(count: int) -> spmd.Mesh:
    return spmd.make_mesh((count,), ("x",), AxisType.Auto, devices=spmd.devices()[:count])


def put(x: Any, count: int, *spec: Any) -> spmd.Array:
    return spmd.device_put(x, NamedSharding(mesh_of(count), P(*spec)))


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Few values, many of them equal; of floats NaN, both zeros and infinities too."""
    x = rng.integers(-4, 5, shape)
    if dtype == "bool":
        return x > 0
    if dtype == "int32":
        return x.astype(np.int32)
    special = np.array([np.nan, -0.0, 0.0, np.inf, -np.inf], np.float32)
    return np.where(rng.integers(0, 3, shape) == 0, special[x % 5], x).astype(np.float32)


def assert_same_bits(found: Any, expected: Any) -> None:
    for one, other in zip(spmd.tree.leaves(found), spmd.tree.leaves(expected), strict=True):
        one, other = np.atleast_1d(one), np.atleast_1d(other)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))


def together(xs: list[np.ndarray], count: int, dimension: int, num_keys: int) -> Any:
    """The pattern by itself, whatever it costs."""
    spec = P(*[None] * dimension, "x")
    params = {"dimension": dimension, "num_keys": num_keys}
    body = lambda *parts: write_sort(parts, params, ("x",), {"x": count})  # noqa: E731
    spread = spmd.shard_map(
        body, mesh=mesh_of(count), in_specs=(spec,) * len(xs), out_specs=[spec] * len(xs)
    )
    return spmd.jit(spread)(*xs)


@pytest.mark.parametrize("count", ROWS)
@pytest.mark.parametrize("dtype", ["int32", "float32", "bool"])
def test_one_operand(count: int, dtype: str):
    rng = np.random.default_rng(count)
    for rows in ROWS[count]:
        for x in (
            numbers(rng, (rows * count,), dtype),
            np.sort(numbers(rng, (rows * count,), dtype))[::-1].copy(),
            np.roll(np.sort(numbers(rng, (rows * count,), dtype)), rows // 2),
        ):
            assert_same_bits(together([x], count, 0, 1), [lax.sort(x)])


@pytest.mark.parametrize("count", ROWS)
def test_zeros_and_ones_in_any_number(count: int):
    """What sorts all of these sorts everything that is compared in a fixed pattern."""
    rng, rows = np.random.default_rng(0), ROWS[count][0]
    size = rows * count
    columns = np.stack([rng.permutation(size) < k for k in range(size + 1)], 1).astype(np.int32)
    assert_same_bits(together([columns], count, 0, 1), [np.sort(columns, 0)])


@pytest.mark.parametrize("count", ROWS)
@pytest.mark.parametrize("num_keys", [1, 2, 3])
def test_several_operands_and_dims(count: int, num_keys: int):
    rng, rows = np.random.default_rng(num_keys), ROWS[count][0]
    for shape, d in (((rows * count,), 0), ((2, rows * count, 3), 1)):
        xs = [numbers(rng, shape, kind) for kind in ("float32", "int32")]
        xs.append(np.arange(np.prod(shape), dtype=np.int32).reshape(shape))
        found = together(xs, count, d, num_keys)
        assert_same_bits(found, list(lax.sort(tuple(xs), d, num_keys=num_keys)))


LARGE = np.random.default_rng(5).integers(-1000, 1000, 1 << 17).astype(np.int32)
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "ascending": snp.sort,
    "descending": lambda a: snp.sort(a, descending=True),
    "median": snp.median,
    "two keys": lambda a: lax.sort((a // 100, a % 100), num_keys=2),
    "positions": snp.argsort,
    "the derivative": spmd.grad(lambda a: (snp.sort(a * 1.0) ** 2)[:100].sum()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sorts_in_programs(name: str):
    f = FUNCTIONS[name]
    x = LARGE.astype(np.float32) if name == "the derivative" else LARGE
    assert_same_bits(spmd.jit(f)(put(x, 4, "x")), spmd.jit(f)(x))


def test_devices_receive_what_the_formula_says():
    found = debug.collectives(snp.sort)(put(LARGE, 4, "x"))
    n, size = 4, LARGE.nbytes
    exchanges, halves = size * (n - 1) // n**2, size // n // 2
    assert [(c.kind, c.received) for c in found] == [
        ("all_to_all", exchanges), ("all_to_all", exchanges),
        ("permute", halves), ("permute", halves),
    ]  # fmt: skip
    assert spmd.jit(snp.sort)(put(LARGE, 4, "x")).sharding.spec == P("x")


def test_where_the_pattern_does_not_fit_rows_are_gathered():
    for x, count in ((LARGE, 2), (LARGE[: 3 * 43690], 3), (LARGE[:64], 4), (LARGE[:-4], 4)):
        given = put(x, count, "x")
        assert [c.kind for c in debug.collectives(snp.sort)(given)] == ["all_gather"]
        assert_same_bits(spmd.jit(snp.sort)(given), np.sort(x))
