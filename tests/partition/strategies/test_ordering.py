"""Picks, reversals, reductions by any operator and moves between axes: values bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, debug, lax
from tests.partition.programs import auto_mesh

GRID = auto_mesh((2, 2), ("x", "y"))
SPECS = [
    P(), P("x"), P("y"), P("x", "y"), P("y", "x"), P(None, "x"), P(None, "y"), P(("x", "y")),
    P(("y", "x")), P(None, ("x", "y")), P(None, ("y", "x")),
]  # fmt: skip


def floats() -> np.ndarray:
    """Ties, a NaN and both zeros."""
    x = np.random.default_rng(0).integers(-4, 5, (8, 16)).astype(np.float32)
    x[2, 3], x[5, 5], x[1, 5] = np.nan, -0.0, 0.0
    return x


INTEGERS = np.random.default_rng(1).integers(-4, 5, (8, 16)).astype(np.int32)

ANY: dict[str, Callable[[Any], Any]] = {
    "argmax of columns": lambda a: snp.argmax(a, 0),
    "argmin of columns": lambda a: snp.argmin(a, 0),
    "argmax of rows": lambda a: snp.argmax(a, 1),
    "argmax of all": snp.argmax,
    "three largest": lambda a: lax.top_k(a, 3),
    "five largest of columns": lambda a: lax.top_k(a, 5, axis=0),
    "all of columns, sorted": lambda a: lax.top_k(a, 8, axis=0),
    "reversed": snp.flip,
    "columns reversed": lambda a: snp.flip(a, 0) * 2,
    "any": lambda a: (a > 2).any(0),
    "all": lambda a: (a > -4).all(1),
    "any of all": lambda a: (a > 3).any(),
    "product": lambda a: (a / 2).prod(0),
}
BITS: dict[str, Callable[[Any], Any]] = {
    "and": lambda a: lax.reduce_and(a, (0,)),
    "or": lambda a: lax.reduce_or(a, (0,)),
    "xor": lambda a: lax.reduce_xor(a, (0, 1)),
    "and of unequal parts": lambda a: lax.reduce_and(a[1:], (0,)),
    "xor of unequal parts": lambda a: lax.reduce_xor(a[1:], (0,)),
    "product of unequal parts": lambda a: a[1:].prod(0),
    "argmax of unequal parts": lambda a: snp.argmax(a[1:], 0),
    "unequal parts reversed": lambda a: snp.flip(a[1:], 0),
}


@pytest.mark.parametrize("name", [*ANY, *BITS])
def test_values_are_those_of_one_device(name: str):
    f = (ANY | BITS)[name]
    for x in [INTEGERS, floats()] if name in ANY else [INTEGERS]:
        expected = spmd.tree.leaves(f(x))
        for spec in SPECS:
            found = spmd.jit(f)(spmd.device_put(x, NamedSharding(GRID, spec)))
            for one, other in zip(spmd.tree.leaves(found), expected, strict=True):
                np.testing.assert_array_equal(np.asarray(one), np.asarray(other), str(spec))


@pytest.mark.parametrize("name", ["argmax of columns", "five largest of columns"])
def test_devices_send_what_they_picked(name: str):
    x = np.random.default_rng(0).standard_normal((4096, 16)).astype(np.float32)
    found = debug.collectives(ANY[name])(spmd.device_put(x, NamedSharding(GRID, P(("x", "y")))))
    rows = 5 if "five" in name else 1
    assert [(c.kind, c.received) for c in found] == [("all_gather", 3 * rows * 16 * 4)] * 2


def test_a_reversal_is_one_permute():
    x = spmd.device_put(np.ones((64, 64), np.float32), NamedSharding(GRID, P("x")))
    (found,) = debug.collectives(lambda x: snp.flip(x, 0))(x)
    assert (found.kind, found.received) == ("permute", 64 * 64 * 4 // 2)


def test_every_move_over_a_grid_keeps_all_elements():
    for have, want in itertools.product(SPECS, SPECS):
        f = spmd.jit(lambda a: a, out_shardings=NamedSharding(GRID, want))
        out = f(spmd.device_put(INTEGERS, NamedSharding(GRID, have)))
        np.testing.assert_array_equal(out, INTEGERS, f"{have} to {want}")


@pytest.mark.parametrize("have, want", [(P("x", "y"), P("y", "x")), (P("x"), P("y"))], ids=str)
def test_blocks_that_only_change_places_are_one_permute(have: P, want: P):
    f = spmd.jit(lambda a: a, out_shardings=NamedSharding(GRID, want))
    (found,) = debug.collectives(f)(spmd.device_put(INTEGERS, NamedSharding(GRID, have)))
    shard = INTEGERS.nbytes // int(np.prod([2 for axis in have if axis]))
    assert (found.kind, found.received) == ("permute", shard)
