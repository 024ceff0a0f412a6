"""Operations over a mesh that come again and again: native calls with the same results."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, debug
from spmd.base.config import config
from spmd.compile.dispatch.eager_cache import COMPILE_AFTER
from spmd.errors import DeletedError, DeviceError
from tests.compile.dispatch.fast_calls import forget
from tests.partition.programs import auto_mesh

OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "x + 1": lambda x: x + 1,
    "x * x": lambda x: x * x,
    "-x": lambda x: -x,
    "x[0]": lambda x: x[0],
    "x[-1]": lambda x: x[-1],
    "x[2:4]": lambda x: x[2:4],
    "x.T": lambda x: x.T,
    "x.sum()": lambda x: x.sum(),
    "x.max(0)": lambda x: x.max(0),
    "x @ x": lambda x: x @ x,
    "exp": lambda x: snp.exp(x),
    "x > 1": lambda x: x > 1,
    "reshape": lambda x: x.reshape(4, 16),
}
SPECS = [P("x", "y"), P("x"), P(None, ("y", "x")), P()]


@pytest.fixture(autouse=True)
def cold():
    """Nothing was called before; there are eight devices."""
    forget()
    with config.override("num_cpu_devices", 8):
        yield


def put(spec: P, mesh: Any = None) -> Any:
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    return spmd.device_put(x, NamedSharding(mesh or auto_mesh((4, 2), ("x", "y")), spec))


def facts(x: Any) -> Any:
    return x.aval, x.sharding, np.asarray(x).tobytes()


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_call_gives_the_same_bits_and_layout(name: str, spec: P):
    x, f = put(spec), OPERATIONS[name]
    first = facts(f(x))
    for _ in range(COMPILE_AFTER + 3):
        assert facts(f(x)) == first
    # Other arrays of this type and layout, and one that is laid out otherwise.
    assert np.asarray(f(x + 1)).tobytes() == np.asarray(f(put(spec) + 1)).tobytes()
    other = put(P("y"))
    assert facts(f(other)) == facts(f(other))


@pytest.mark.parametrize("name", ["x + 1", "x[0]", "x.sum()", "x @ x"])
def test_a_frequent_operation_takes_few_calls_of_functions(name: str):
    x, f = put(P("x", "y")), OPERATIONS[name]
    for _ in range(2 * COMPILE_AFTER):
        f(x)
    with cProfile.Profile() as profile:
        for _ in range(100):
            f(x)
    assert pstats.Stats(profile).total_calls <= 2500  # type: ignore[attr-defined]


def test_frequent_operations_look_at_the_mesh_in_scope_and_at_deletion():
    x = put(P("x"))
    for _ in range(2 * COMPILE_AFTER):
        y = x + 1
        x.sum()
    with debug.expect_collectives(all_reduce=1):
        x.sum()
    with spmd.set_mesh(auto_mesh((2,), ("z",))), pytest.raises(DeviceError, match="committed"):
        _ = x + 1
    y.delete()
    with pytest.raises(DeletedError):
        _ = y + 1


def test_numbers_and_indices_are_operands():
    x = put(P("x", "y"))
    value = np.asarray(x)
    for k in range(2 * COMPILE_AFTER):
        np.testing.assert_array_equal(x * (k / 4), value * np.float32(k / 4))
        np.testing.assert_array_equal(x[k % 8], value[k % 8])


def test_explicit_types_stay():
    x = put(P("x"), spmd.make_mesh((4, 2), ("x", "y")))
    for _ in range(2 * COMPILE_AFTER):
        assert (x + 1).aval.short() == x.aval.short() == "f32[8@x,8]"
        assert x.sum(1).aval.short() == "f32[8@x]"
