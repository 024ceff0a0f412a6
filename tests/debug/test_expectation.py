"""`debug.expect_collectives`: what calls in a block move, counted each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import spmd
from spmd import NamedSharding, P, lax
from spmd.debug import expect_collectives
from spmd.errors import ArgumentError, ExpectationError
from spmd.sharding import AxisType

X = np.arange(32, dtype=np.float32).reshape(8, 4)
MESH = spmd.make_mesh((4,), ("x",), AxisType.Auto)


def rows() -> spmd.Array:
    return spmd.device_put(X, NamedSharding(MESH, P("x")))


def by_shard_map(x: Any) -> Any:
    return spmd.shard_map(
        lambda x: lax.psum(x.sum(0), "x"), mesh=MESH, in_specs=P("x"), out_specs=P()
    )(x)


SUMS: dict[str, Callable[[Any], Any]] = {
    "jit": spmd.jit(lambda x: x.sum(0)),
    "shard_map": by_shard_map,
    "jit of shard_map": spmd.jit(by_shard_map),
    "op by op": lambda x: x.sum(0),
    "pmap": spmd.pmap(lambda x: lax.psum(x, "i"), axis_name="i"),
}


@pytest.mark.parametrize("how", SUMS)
def test_each_call_counts_though_closures_were_made_before(how: str):
    x = rows().reshape(4, 2, 4) if how == "pmap" else rows()
    for _ in range(10):
        SUMS[how](x)
    with expect_collectives(all_reduce=5) as moved:
        for _ in range(5):
            SUMS[how](x)
    assert len(moved.collectives) == 5 and moved.received > 0
    with expect_collectives(all_reduce=1):
        SUMS[how](x)


def test_iterations_count():
    def loop(x: Any) -> Any:
        return lax.scan(lambda c, _: (c + (x * c).sum(), None), 1.0, None, length=3)[0]

    with expect_collectives(all_reduce=3):
        spmd.jit(loop)(rows())


def test_what_was_not_expected_is_named_with_its_line():
    with pytest.raises(ExpectationError) as error, expect_collectives(all_gather=1):
        spmd.jit(lambda x: x.sum(0))(rows())
    text = str(error.value)
    assert "0 all_gather, expected 1; 1 all_reduce, expected 0" in text
    assert "test_expectation.py" in text and "x.sum(0)" in text and "all_reduce f32[4]" in text
    assert isinstance(error.value, AssertionError)


def test_bytes_alone_and_with_kinds():
    f = SUMS["jit"]
    with expect_collectives(at_most="1 KB"):
        f(rows())
    with expect_collectives(all_reduce=1, at_most=24):
        f(rows())
    with pytest.raises(ExpectationError, match=r"24 B received, expected at most 20 B"):
        with expect_collectives(at_most=20):
            f(rows())


def test_an_error_inside_is_what_is_raised():
    with pytest.raises(ZeroDivisionError), expect_collectives(all_reduce=3):
        _ = 1 // 0


@pytest.mark.parametrize("wrong", [{"allreduce": 1}, {"at_most": "8 MiB"}, {"at_most": "much"}])
def test_unknown_kinds_and_units_are_errors(wrong: Any):
    with pytest.raises(ArgumentError, match="expect_collectives"):
        expect_collectives(**wrong)
