"""Random programs over random meshes and specs are what they are on one device, gradients too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.errors import ShardingTypeError
from spmd.sharding import AxisType
from tests.partition.programs import ROWED, WINDOWED, draw, draw_spec

AUTO = AxisType.Auto
MESHES: Sequence[dict[str, int]] = ({"x": 2, "y": 2}, {"x": 4}, {"y": 2, "x": 2})


def placed(seed: int, arguments: Sequence[np.ndarray], kind: AxisType = AUTO) -> list[Any]:
    """The arguments over a random mesh, each split by a random spec."""
    rng = np.random.default_rng(seed)
    axes = MESHES[rng.integers(len(MESHES))]
    mesh = spmd.make_mesh(tuple(axes.values()), tuple(axes), kind)
    specs = [draw_spec(rng, x.shape, axes) for x in arguments]
    return [
        spmd.device_put(x, spmd.NamedSharding(mesh, spec))
        for x, spec in zip(arguments, specs, strict=True)
    ]


def assert_same(found: Any, expected: Any) -> None:
    pairs = zip(spmd.tree.leaves(found), spmd.tree.leaves(expected), strict=True)
    for one, other in pairs:
        assert (one.shape, one.dtype, one.weak_type) == (other.shape, other.dtype, other.weak_type)
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("seed", range(60))
def test_values_and_gradients_are_those_of_one_device(seed: int):
    program, arguments = draw(seed)

    def loss(*args: Any) -> Any:
        return sum(snp.cos(x).sum() / x.size for x in program(*args))

    over_mesh = placed(seed, arguments)
    for f in (program, spmd.grad(loss, (0, 1, 2))):
        assert_same(spmd.jit(f)(*over_mesh), spmd.jit(f)(*arguments))


def assert_rows_are_right(seed: int) -> None:
    """Rows that one device has are computed with, joined, written and stacked."""
    program, arguments = draw(seed, 4 + seed % 4, ROWED)

    def loss(*args: Any) -> Any:
        return sum(snp.cos(x).sum() / x.size for x in program(*args))

    over_mesh = placed(seed, arguments)
    for f in (program, spmd.grad(loss, (0, 1, 2))):
        assert_same(spmd.jit(f)(*over_mesh), spmd.jit(f)(*arguments))


@pytest.mark.parametrize("seed", range(5000, 5012))
def test_rows_of_one_device(seed: int):
    assert_rows_are_right(seed)


@pytest.mark.nightly
def test_more_rows_of_one_device():
    for seed in range(6000, 6500):
        assert_rows_are_right(seed)


def assert_windows_are_right(seed: int) -> None:
    """Only sums leave the program, so that parts inside may have different sizes."""
    program, arguments = draw(seed, 5, WINDOWED)

    def sums(*args: Any) -> Any:
        weighted = [snp.arange(x.size, dtype=x.dtype).reshape(x.shape) % 5 for x in program(*args)]
        pairs = zip(program(*args), weighted, strict=True)
        return [(snp.tanh(x) * w).sum() / x.size for x, w in pairs]

    over_mesh = placed(seed, arguments)
    for f in (sums, program, spmd.grad(lambda *args: sum(sums(*args)), (0, 1, 2))):
        assert_same(spmd.jit(f)(*over_mesh), spmd.jit(f)(*arguments))


@pytest.mark.parametrize("seed", range(200, 240))
def test_windows_of_parts_of_different_sizes(seed: int):
    assert_windows_are_right(seed)


@pytest.mark.nightly
def test_more_windows_of_parts_of_different_sizes():
    for seed in range(1000, 1500):
        assert_windows_are_right(seed)


@pytest.mark.parametrize("seed", range(60, 72))
def test_op_by_op_is_as_under_jit(seed: int):
    program, arguments = draw(seed, steps=4)
    assert_same(program(*placed(seed, arguments)), spmd.jit(program)(*arguments))


def explicit_programs_that_are_typed(seeds: range) -> int:
    """How many programs have types; each is what it is on one device, gradients too."""
    count = 0
    for seed in seeds:
        program, arguments = draw(seed, steps=5)
        over_mesh = placed(seed, arguments, AxisType.Explicit)

        def loss(*args: Any, program: Any = program) -> Any:
            return sum(snp.cos(x).sum() / x.size for x in program(*args))

        for f in (program, spmd.jit(program), spmd.jit(spmd.grad(loss, (0, 1, 2)))):
            try:
                found = f(*over_mesh)
            except ShardingTypeError:
                continue
            count += 1
            want = spmd.jit(program if f is program else f)(*arguments)
            for one, other in zip(spmd.tree.leaves(found), spmd.tree.leaves(want), strict=True):
                assert (one.shape, one.dtype) == (other.shape, other.dtype)
                np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-4)
                if one.aval.explicit is not None:
                    assert one.sharding.explicit_part(one.ndim) == one.aval.explicit
    return count


def test_explicit_programs_are_what_they_are_on_one_device_or_are_refused():
    assert explicit_programs_that_are_typed(range(30)) > 20


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(3000, 4000, 100))
def test_many_more_explicit_programs(first: int):
    assert explicit_programs_that_are_typed(range(first, first + 100)) > 50


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(1000, 3000, 100))
def test_many_more_programs(first: int):
    for seed in range(first, first + 100):
        program, arguments = draw(seed)
        assert_same(spmd.jit(program)(*placed(seed, arguments)), spmd.jit(program)(*arguments))


def assert_seeds_print_the_same(run_python: Any, seeds: Sequence[int]) -> None:
    env = {"SPMD_NUM_CPU_DEVICES": "4"}
    first = ""
    for seed in seeds:
        program = ["-m", "tests.partition.print_programs"]
        done = run_python(program, env={**env, "PYTHONHASHSEED": str(seed)})
        assert done.returncode == 0, done.stderr
        assert "psum" in done.stdout and done.stdout.count("shard_map[") > 30
        first = first or done.stdout
        assert done.stdout == first, f"PYTHONHASHSEED={seed}"


def test_programs_are_partitioned_alike_in_every_process(run_python: Any):
    """The texts of per-device programs depend on no hash, time or rank."""
    assert_seeds_print_the_same(run_python, (0, 1, 77))


@pytest.mark.nightly
def test_programs_are_partitioned_alike_in_a_hundred_processes(run_python: Any):
    assert_seeds_print_the_same(run_python, range(100))
