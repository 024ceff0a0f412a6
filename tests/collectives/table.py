"""One table of SPMD programs around each collective, run by every kind of map we have.

A `Case` is a per-device program of one array. `body(lax, x, n)` gets the module whose functions it
calls (ours or JAX's), so that the same table is compared with JAX; shapes scale with the number of
devices `n`. Whoever runs the table chooses the map: pmap, shard_map, vmap, in one process or many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from spmd.collectives.exchange import exchange
from spmd.collectives.rectangles import Copies, Copy, copies_between, held, part_sizes

BOOLS = ("bool",)
INTEGERS = ("int8", "int32", "uint8", "uint32")
FLOATS = ("float32", "bfloat16", "float16")
COMPLEX = ("complex64",)
REALS = (*BOOLS, *INTEGERS, *FLOATS)
NUMBERS = (*INTEGERS, *FLOATS, *COMPLEX)
ANYTHING = (*BOOLS, *NUMBERS)

AXIS = "i"


@dataclass(frozen=True)
class Case:
    """A per-device program and the operands it accepts."""

    name: str
    body: Callable[[Any, Any, int], Any]
    shape: Callable[[int], tuple[int, ...]] = lambda n: (3,)
    dtypes: tuple[str, ...] = ANYTHING
    fits: Callable[[int], bool] = lambda n: True

    def __str__(self) -> str:
        return self.name

    def example(self, n: int, dtype: str, seed: int = 0) -> np.ndarray:
        """One operand for each of `n` devices, stacked."""
        rng = np.random.default_rng([seed, n])
        shape = (n, *self.shape(n))
        return random_array(rng, shape, dtype)


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Values whose sums stay small; negative ones too where the dtype has them."""
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.startswith("uint"):
        return rng.integers(0, 20, shape).astype(dtype)
    if dtype.startswith("int"):
        return rng.integers(-10, 10, shape).astype(dtype)
    values = rng.normal(size=shape)
    if dtype.startswith("complex"):
        return (values + 1j * rng.normal(size=shape)).astype(dtype)
    return values.astype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)


def halves(n: int) -> list[list[int]]:
    """Index groups of half the devices: the even ones (backwards) and the odd ones."""
    return [list(range(0, n, 2))[::-1], list(range(1, n, 2))]


def is_even(n: int) -> bool:
    return n % 2 == 0


def ring(n: int) -> list[tuple[int, int]]:
    return [(k, (k + 1) % n) for k in range(n)]


def mixed(n: int) -> list[int]:
    """A permutation that is neither the identity nor its own inverse where n > 2."""
    return [(k + 1) % n for k in range(n)]


def exchanged(before: str, after: str, whole: tuple[int, ...], n: int) -> Callable[[Any], Any]:
    """The exchange between two ways to split a whole: the dims, of `ab`, that the axis splits."""
    splits = [[(AXIS,) if d == "ab"[k] else () for k in range(2)] for d in (before, after)]
    have, want = (held(whole, split, {AXIS: n}) for split in splits)
    shape = part_sizes(whole, splits[1], {AXIS: n})
    return lambda x: exchange(x, AXIS, copies_between(have, want), shape)


def swapped_corners(n: int) -> Copies:
    """Each gets two elements of the next, and leaves the others zero; they may be its own."""
    return Copies(tuple(Copy(k, (k + 1) % n, (0, 1), (1, 0), (1, 2)) for k in range(n)))


CASES = [
    Case("psum", lambda lax, x, n: lax.psum(x, AXIS)),
    Case("psum_scalar", lambda lax, x, n: lax.psum(x, AXIS), lambda n: ()),
    Case("psum_empty", lambda lax, x, n: lax.psum(x, AXIS), lambda n: (0, 2)),
    Case("psum_large", lambda lax, x, n: lax.psum(x, AXIS), lambda n: (37, 211), FLOATS),
    Case("psum_of_one", lambda lax, x, n: x * np.array(lax.psum(1, AXIS), x.dtype), dtypes=NUMBERS),
    Case(
        "psum_groups",
        lambda lax, x, n: lax.psum(x, AXIS, axis_index_groups=halves(n)),
        fits=is_even,
    ),
    Case("psum_tree", lambda lax, x, n: lax.psum({"a": x, "b": (x[0], x[1:])}, AXIS)["b"][1]),
    Case("psum_twice", lambda lax, x, n: lax.psum(x * lax.psum(x, AXIS), AXIS), dtypes=NUMBERS),
    Case("pmean", lambda lax, x, n: lax.pmean(x, AXIS), dtypes=(*FLOATS, *COMPLEX)),
    Case("pmean_int", lambda lax, x, n: lax.pmean(x, AXIS), dtypes=(*BOOLS, *INTEGERS)),
    Case(
        "pmean_groups",
        lambda lax, x, n: lax.pmean(x, AXIS, axis_index_groups=halves(n)),
        dtypes=FLOATS,
        fits=is_even,
    ),
    Case("pmax", lambda lax, x, n: lax.pmax(x, AXIS), dtypes=REALS),
    Case("pmin", lambda lax, x, n: lax.pmin(x, AXIS), dtypes=REALS),
    Case(
        "pmax_groups",
        lambda lax, x, n: lax.pmax(x, AXIS, axis_index_groups=halves(n)),
        dtypes=REALS,
        fits=is_even,
    ),
    Case("ppermute_ring", lambda lax, x, n: lax.ppermute(x, AXIS, ring(n))),
    Case("ppermute_some", lambda lax, x, n: lax.ppermute(x, AXIS, [(0, n - 1)])),
    Case("ppermute_none", lambda lax, x, n: lax.ppermute(x, AXIS, [])),
    Case("ppermute_self", lambda lax, x, n: lax.ppermute(x, AXIS, [(k, k) for k in range(n)])),
    Case("pshuffle", lambda lax, x, n: lax.pshuffle(x, AXIS, mixed(n))),
    Case("all_gather", lambda lax, x, n: lax.all_gather(x, AXIS)),
    Case("all_gather_scalar", lambda lax, x, n: lax.all_gather(x, AXIS), lambda n: ()),
    Case("all_gather_dim1", lambda lax, x, n: lax.all_gather(x, AXIS, axis=1), lambda n: (2, 3)),
    Case("all_gather_last", lambda lax, x, n: lax.all_gather(x, AXIS, axis=-1), lambda n: (2, 3)),
    Case("all_gather_tiled", lambda lax, x, n: lax.all_gather(x, AXIS, tiled=True)),
    Case(
        "all_gather_tiled_dim1",
        lambda lax, x, n: lax.all_gather(x, AXIS, axis=1, tiled=True),
        lambda n: (2, 3),
    ),
    Case(
        "all_gather_groups",
        lambda lax, x, n: lax.all_gather(x, AXIS, axis_index_groups=halves(n)),
        fits=is_even,
    ),
    Case(
        "all_gather_groups_tiled",
        lambda lax, x, n: lax.all_gather(x, AXIS, axis=1, axis_index_groups=halves(n), tiled=True),
        lambda n: (2, 3),
        fits=is_even,
    ),
    Case("psum_scatter", lambda lax, x, n: lax.psum_scatter(x, AXIS), lambda n: (n, 3), NUMBERS),
    Case(
        "psum_scatter_dim1",
        lambda lax, x, n: lax.psum_scatter(x, AXIS, scatter_dimension=1),
        lambda n: (2, n),
        NUMBERS,
    ),
    Case(
        "psum_scatter_tiled",
        lambda lax, x, n: lax.psum_scatter(x, AXIS, tiled=True),
        lambda n: (2 * n, 3),
        NUMBERS,
    ),
    Case(
        "psum_scatter_tiled_dim1",
        lambda lax, x, n: lax.psum_scatter(x, AXIS, scatter_dimension=1, tiled=True),
        lambda n: (2, 3 * n),
        NUMBERS,
    ),
    Case(
        "psum_scatter_groups",
        lambda lax, x, n: lax.psum_scatter(x, AXIS, axis_index_groups=halves(n)),
        lambda n: (n // 2, 3),
        NUMBERS,
        is_even,
    ),
    Case("all_to_all", lambda lax, x, n: lax.all_to_all(x, AXIS, 0, 0), lambda n: (n, 2)),
    Case("all_to_all_0_1", lambda lax, x, n: lax.all_to_all(x, AXIS, 0, 1), lambda n: (n, 2)),
    Case("all_to_all_1_0", lambda lax, x, n: lax.all_to_all(x, AXIS, 1, 0), lambda n: (2, n, 3)),
    Case(
        "all_to_all_tiled",
        lambda lax, x, n: lax.all_to_all(x, AXIS, 0, 1, tiled=True),
        lambda n: (2 * n, 3),
    ),
    Case(
        "all_to_all_tiled_same",
        lambda lax, x, n: lax.all_to_all(x, AXIS, 1, 1, tiled=True),
        lambda n: (2, 2 * n),
    ),
    Case(
        "all_to_all_groups",
        lambda lax, x, n: lax.all_to_all(x, AXIS, 0, 0, axis_index_groups=halves(n)),
        lambda n: (n // 2, 2),
        fits=is_even,
    ),
    Case("pswapaxes", lambda lax, x, n: lax.pswapaxes(x, AXIS, 1), lambda n: (2, n)),
    Case(
        "axis_index",
        lambda lax, x, n: x + lax.axis_index(AXIS).astype(x.dtype),
        dtypes=NUMBERS,
    ),
    Case("axis_size", lambda lax, x, n: x * np.array(lax.axis_size(AXIS), x.dtype), dtypes=NUMBERS),
    Case(
        "own_row_of_sum",
        lambda lax, x, n: lax.psum(x, AXIS)[lax.axis_index(AXIS)],
        lambda n: (n, 2),
    ),
    Case(
        "ring_sum",
        lambda lax, x, n: lax.fori_loop(
            0, n - 1, lambda k, c: (lax.ppermute(c[0], AXIS, ring(n)), c[1] + c[0]), (x, x)
        )[1],
        dtypes=("int32", "float32"),
    ),
]

# JAX has no counterpart that is spelled the same.
OURS = [
    Case("pbroadcast", lambda lax, x, n: lax.pbroadcast(x, AXIS, n - 1)),
    Case(
        "exchange",
        lambda lax, x, n: exchanged("a", "b", (2 * n, 3 * n), n)(x),
        lambda n: (2, 3 * n),
    ),
    Case(
        "exchange_uneven",
        lambda lax, x, n: exchanged("a", "b", (2 * n - 1, n + 1), n)(x),
        lambda n: (2, n + 1),
    ),
    Case(
        "exchange_to_all",
        lambda lax, x, n: exchanged("b", "", (2, 3 * n), n)(x),
        lambda n: (2, 3),
        dtypes=("float32", "int8", "complex64"),
    ),
    Case(
        "exchange_some",
        lambda lax, x, n: exchange(x, AXIS, swapped_corners(n), (2, 4)),
        lambda n: (2, 3),
        dtypes=("float32", "bool"),
    ),
]


def cases_for(n: int) -> list[tuple[Case, str]]:
    """Every case that `n` devices can run, with every dtype it takes."""
    return [(c, d) for c in (*CASES, *OURS) if c.fits(n) for d in c.dtypes]
