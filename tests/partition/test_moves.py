"""Moves between layouts: at most one collective, which brings each device what it lacks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P
from spmd.base.config import config
from spmd.collectives.rectangles import held, most_lacking
from spmd.compile.executable.mesh_program import MeshProgram
from spmd.compile.fingerprint import fingerprint
from spmd.debug.program import compile_call
from spmd.partition.moves import Exchanged, Permuted, route
from tests.partition.programs import auto_mesh


@pytest.fixture(scope="module", autouse=True)
def eight_devices() -> Iterator[None]:
    """Meshes of this file have up to eight devices."""
    with config.override("num_cpu_devices", 8):
        yield


MESHES = [{"x": 8}, {"x": 4, "y": 2}, {"x": 2, "y": 4}, {"x": 2, "y": 2, "z": 2}, {"x": 3, "y": 2}]
Split = tuple[tuple[str, ...], ...]


@st.composite
def moves(draw: st.DrawFn) -> tuple[dict[str, int], tuple[int, ...], Split, Split]:
    """A mesh, a shape whose dims need not divide, and two splits."""
    sizes = draw(st.sampled_from(MESHES))
    shape = tuple(draw(st.lists(st.integers(1, 24), min_size=1, max_size=3)))

    def split() -> Split:
        found: list[tuple[str, ...]] = [()] * len(shape)
        for axis in draw(st.permutations(list(sizes))):
            d = draw(st.integers(-1, len(shape) - 1))
            if d >= 0:
                found[d] = (*found[d], axis)
        return tuple(found)

    return sizes, shape, split(), split()


def spec_of(split: Split) -> P:
    return P(*[None if not a else a[0] if len(a) == 1 else a for a in split])


@settings(deadline=None, max_examples=40)
@given(moves())
def test_a_move_brings_what_lacks_by_at_most_one_collective(drawn: Any):
    sizes, shape, have, want = drawn
    mesh = auto_mesh(tuple(sizes.values()), tuple(sizes))
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)

    def constrained(a: Any) -> Any:
        a = spmd.lax.with_sharding_constraint(a, NamedSharding(mesh, spec_of(have)))
        return spmd.lax.with_sharding_constraint(a * 1, NamedSharding(mesh, spec_of(want)))

    np.testing.assert_array_equal(spmd.jit(constrained)(x), x)
    lacks = most_lacking(*(held(shape, split, sizes) for split in (have, want)))
    found = route(shape, have, want, tuple(sizes.items()))
    assert found.received == lacks and found.collectives <= 1


@pytest.mark.parametrize(
    "sizes, have, want, kind",
    [
        ({"x": 8}, (("x",), ()), ((), ("x",)), "all_to_all"),
        ({"x": 8}, (("x",), ()), ((), ()), "all_gather"),
        ({"x": 2, "y": 2}, (("x",), ("y",)), (("y",), ("x",)), "permute"),
        ({"x": 4, "y": 2}, (("x", "y"), ()), (("y", "x"), ()), "permute"),
        ({"x": 4, "y": 2}, (("x",), ("y",)), (("y",), ("x",)), "exchange"),
        ({"x": 4, "y": 2}, (("x",), ()), (("y",), ()), "exchange"),
        ({"x": 4, "y": 2}, (("x",), ("y",)), ((), ()), "exchange"),
        ({"x": 4, "y": 2}, (("x", "y"), ()), (("y",), ("x",)), "exchange"),
    ],
)
def test_the_kind_of_a_move(sizes: dict[str, int], have: Split, want: Split, kind: str):
    """Also: the bytes that are shown are those that lack, and the result is right."""
    mesh = auto_mesh(tuple(sizes.values()), tuple(sizes))
    x = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    placed = spmd.device_put(x, NamedSharding(mesh, spec_of(have)))
    f = spmd.jit(lambda a: a, out_shardings=NamedSharding(mesh, spec_of(want)))
    (found,) = spmd.debug.collectives(f)(placed)
    lacks = most_lacking(*(held(x.shape, split, sizes) for split in (have, want)))
    assert (found.kind, found.received) == (kind, lacks * 4)
    with spmd.debug.expect_collectives(at_most=lacks * 4, **{kind: 1}):
        out = f(placed)
    np.testing.assert_array_equal(out, x)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, spec_of(want)), 2)


def test_only_the_axes_that_change_take_part():
    sizes = {"x": 2, "y": 2, "z": 2}
    have, want = (("x", "y"), ("z",), ()), (("x",), ("z",), ("y",))
    found = route((8, 8, 8), have, want, tuple(sizes.items()))
    (step,) = found.steps
    assert getattr(step, "axis", None) == "y"
    have, want = (("x", "y"), (), ("z",)), (("x", "z"), (), ())
    (step,) = route((8, 8, 8), have, want, tuple(sizes.items())).steps
    assert isinstance(step, Exchanged | Permuted) and step.axes == ("y", "z")


def test_an_exchange_is_linear_under_gradients_and_vmap():
    mesh = auto_mesh((4, 2), ("x", "y"))
    rows, columns = (NamedSharding(mesh, P(axis)) for axis in "xy")

    def f(a: Any) -> Any:
        return snp.sum(spmd.lax.with_sharding_constraint(snp.sin(a), columns) ** 3)

    x = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
    expected = 3 * np.sin(x) ** 2 * np.cos(x)
    placed = spmd.device_put(x, rows)
    np.testing.assert_allclose(spmd.jit(spmd.grad(f))(placed), expected, rtol=1e-5)
    many = np.stack([x, 2 * x])
    found = spmd.jit(spmd.vmap(spmd.grad(f)))(many)
    for one, y in zip(found, many, strict=True):
        np.testing.assert_allclose(one, 3 * np.sin(y) ** 2 * np.cos(y), rtol=1e-4)


def test_all_moves_of_a_matrix_take_the_least():
    """Exhaustive over two axes of different sizes: no two collectives, no byte too many."""
    sizes = {"x": 4, "y": 2}
    splits = [
        tuple(tuple(axes) for axes in pair)
        for order in (("x", "y"), ("y", "x"))
        for cut in range(3)
        for n in range(3)
        if cut <= n
        for pair in [(order[:cut], order[cut:n])]
    ]
    for have, want in itertools.product(dict.fromkeys(splits), repeat=2):
        found = route((16, 24), have, want, tuple(sizes.items()))
        lacks = most_lacking(*(held((16, 24), split, sizes) for split in (have, want)))
        assert (found.collectives, found.received) == ((1, lacks) if lacks else (0, 0))


def test_programs_of_exchanges_are_told_apart_by_their_rectangles():
    mesh = auto_mesh((4, 2), ("x", "y"))
    x = spmd.device_put(np.zeros((16, 24), np.float32), NamedSharding(mesh, P("x", "y")))

    def written(*spec: Any) -> str | None:
        f = spmd.jit(lambda a: a, out_shardings=NamedSharding(mesh, P(*spec)))
        executable = compile_call(f, (x,), {}).executable
        assert isinstance(executable, MeshProgram)
        return fingerprint(executable.params["jaxpr"])

    one, other = written("y", "x"), written(("y", "x"))
    assert one is not None and one == written("y", "x") and one != other
