"""Combining psums: fewer exchanges, the same values, and nothing joined that depends on another."""

from __future__ import annotations

import numpy as np
import pytest

from spmd import lax
from spmd.compile.passes.combine import COMBINE_UP_TO_BYTES, combine_psums
from spmd.core.aval import ShapedArray
from spmd.core.axis import AxisFrame, extend_axes
from spmd.core.check import check_jaxpr
from spmd.core.ir import all_eqns
from spmd.core.rewrite import close
from spmd.sharding.lockstep import Lockstep

SIZES = {"i": 2, "j": 2}


def trace(f, *shapes, dtype=np.float32):
    with extend_axes([AxisFrame(n, s, "pmap") for n, s in SIZES.items()]):
        return close(f, [ShapedArray(s, dtype) for s in shapes], "f")


def psums(closed):
    return [e for e in all_eqns(closed) if e.prim.name == "psum"]


def run(closed, seed=0):
    rng = np.random.default_rng(seed)
    args = [
        [rng.standard_normal(a.shape).astype(a.dtype) for _ in range(4)] for a in closed.in_avals
    ]
    return Lockstep(SIZES).run(closed, args)


def assert_same(before, after):
    check_jaxpr(after, after="combine_psums")
    for x, y in zip(run(before), run(after), strict=True):
        for a, b in zip(x, y, strict=True):
            np.testing.assert_array_equal(a, b)


def test_independent_psums_become_one():
    closed = trace(
        lambda x, y, z: [lax.psum(x, "i"), lax.psum(lax.sin(y), "i"), lax.psum(z, "i")],
        (3,),
        (),
        (2, 2),
    )
    combined = combine_psums(closed)
    assert len(psums(combined)) == 1
    assert psums(combined)[0].invars[0].aval.shape == (3 + 1 + 4,)
    assert_same(closed, combined)


def test_a_psum_of_a_psum_waits_for_it():
    closed = trace(lambda x, y: [lax.psum(lax.psum(x, "i") * y, "i"), lax.psum(y, "i")], (3,), (3,))
    combined = combine_psums(closed)
    assert len(psums(combined)) == 2
    assert_same(closed, combined)


@pytest.mark.parametrize(
    "second",
    [
        lambda y: lax.psum(y, "j"),
        lambda y: lax.psum(y.astype(np.int32), "i"),
        lambda y: lax.psum(y, "i", axis_index_groups=[[0], [1]]),
    ],
    ids=["other axis", "other dtype", "groups"],
)
def test_different_psums_stay_apart(second):
    closed = trace(lambda x, y: [lax.psum(x, "i"), second(y)], (3,), (3,))
    combined = combine_psums(closed)
    assert len(psums(combined)) == 2
    assert_same(closed, combined)


def test_other_collectives_keep_their_place():
    closed = trace(
        lambda x, y: [lax.psum(x, "i"), lax.all_gather(y, "i"), lax.psum(y, "i")], (3,), (3,)
    )
    combined = combine_psums(closed)
    kinds = [e.prim.name for e in combined.eqns if e.prim.members is not None]
    assert kinds == ["psum", "all_gather", "psum"]
    assert_same(closed, combined)


def test_large_operands_travel_alone():
    n = COMBINE_UP_TO_BYTES // 4 + 1
    closed = trace(lambda x, y, z: [lax.psum(v, "i") for v in (x, y, z)], (n,), (3,), (4,))
    assert len(psums(combine_psums(closed))) == 2


def test_psums_inside_a_loop_are_combined_too():
    def step(carry, _):
        x, y = carry
        return (lax.psum(x, "i") * 0.25, lax.psum(y, "i") * 0.25), None

    closed = trace(lambda x, y: list(lax.scan(step, (x, y), None, 3)[0]), (3,), (2,))
    combined = combine_psums(closed)
    assert len(psums(combined)) == 1
    assert_same(closed, combined)
