"""Generators with a state against JAX's numbers; contexts that place or annotate operations."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.random as jax_random
import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.experimental import random
from spmd.experimental.compute_on import compute_on
from spmd.experimental.layout import Layout, with_layout_constraint
from spmd.experimental.xla_metadata import set_xla_metadata

oracle: Any = jax

DRAWS: dict[str, Any] = {
    "uniform": lambda rng: rng.uniform(),
    "uniform between arrays": lambda rng: rng.uniform(np.zeros(3), np.arange(1.0, 4.0)),
    "random": lambda rng: rng.random((2, 3)),
    "normal": lambda rng: rng.normal(1, np.array([1.0, 2.0])),
    "half": lambda rng: rng.normal(size=3, dtype=np.float16),
    "integers": lambda rng: rng.integers(-3, 10, 5),
    "integers from 0": lambda rng: rng.integers(7, size=(2, 2)),
    "spawned": lambda rng: rng.spawn(3)[2].uniform(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_jaxs(name: str):
    rng, theirs = random.stateful_rng(42), jax_random.stateful_rng(42)
    for _ in range(2):  # the second draw is another one
        found, wanted = DRAWS[name](rng), np.asarray(DRAWS[name](theirs))
        assert found.dtype == wanted.dtype and found.shape == wanted.shape
        rtol = 1e-3 if found.dtype == np.float16 else 1e-5
        np.testing.assert_allclose(np.asarray(found), wanted, rtol=rtol)


def test_state_changes_inside_compiled_programs():
    rng, theirs = random.stateful_rng(5), jax_random.stateful_rng(5)
    draw: Any = spmd.jit(rng.uniform)
    wanted = oracle.jit(theirs.uniform)
    for _ in range(3):
        assert float(draw()) == float(wanted())
    assert float(rng.uniform()) == float(theirs.uniform())
    argument = spmd.jit(lambda rng: rng.uniform(0))
    assert float(argument(rng)) == float(theirs.uniform())
    assert float(rng.uniform()) == float(theirs.uniform())


def test_split_generators_are_mapped_over():
    rng, theirs = random.stateful_rng(123), jax_random.stateful_rng(123)
    found = spmd.vmap(lambda r, x: x + r.uniform())(rng.split(3), snp.zeros(3))
    wanted = oracle.vmap(lambda r, x: x + r.uniform())(theirs.split(3), np.zeros(3, np.float32))
    np.testing.assert_array_equal(np.asarray(found), wanted)
    with pytest.raises(ValueError, match=r"was split into \(3,\); map over it with vmap"):
        rng.split(3).uniform()


def test_seeds():
    assert float(random.stateful_rng().uniform()) != float(random.stateful_rng().uniform())
    with pytest.raises(TypeError, match="stateful_rng: give a seed"):
        spmd.jit(lambda: random.stateful_rng().uniform())()
    rbg = random.stateful_rng(3, impl="rbg")
    assert rbg.key().dtype == spmd.random.key(0, impl="rbg").dtype
    assert rbg.key(4).shape == (4,)


@pytest.mark.parametrize("where", ["device_host", "device"])
def test_operations_run_on_the_host_and_on_the_device(where: str):
    @compute_on(where)
    @spmd.jit
    def twice(x):
        return x * 2

    np.testing.assert_array_equal(np.asarray(twice(snp.arange(3))), [0, 2, 4])
    with compute_on(where):
        assert float(spmd.grad(lambda x: x * x)(3.0)) == 6.0


def test_other_places_are_refused():
    with (
        pytest.raises(ValueError, match="compute_type='tpu_sparsecore' must be"),
        compute_on("tpu_sparsecore"),
    ):
        pass


def test_hints_change_nothing():
    x = snp.arange(6.0).reshape(2, 3)
    assert set_xla_metadata(x, a="1") is x
    with set_xla_metadata(a="1"):
        assert float(x.sum()) == 15
    assert with_layout_constraint({"a": x, "b": x}, Layout((0, 1)))["a"] is x
    with pytest.raises(ValueError, match="arrays lie in row-major order"):
        with_layout_constraint(x, Layout((1, 0)))
