"""Combining psums: fewer exchanges, the same values, and nothing joined that depends on another."""

from __future__ import annotations

import numpy as np
import pytest

from spmd import lax
from spmd.compile.passes.combine_psums import (
    BUCKET_BYTES,
    COMBINE_UP_TO_BYTES,
    bucket_psums,
    combine_psums,
)
from spmd.core.aval import ShapedArray
from spmd.core.axis import AxisFrame, extend_axes
from spmd.core.check import check_jaxpr
from spmd.core.ir import all_eqns
from spmd.core.rewrite import close
from spmd.sharding.lockstep_interpreter import Lockstep

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


# ---- buckets that are sent one by one ------------------------------------------------------------


def sizes_of(closed):
    return [e.invars[0].aval.size for e in psums(closed)]


def test_buckets_are_closed_when_they_are_full():
    quarter = BUCKET_BYTES // 16
    closed = trace(lambda *xs: [lax.psum(x, "i") for x in xs], *[(quarter,)] * 10)
    assert sizes_of(combine_psums(closed)) == [10 * quarter]
    found = bucket_psums(closed)
    assert sizes_of(found) == [4 * quarter, 4 * quarter, 2 * quarter]
    assert_same(closed, found)


def test_buckets_are_in_the_order_in_which_operands_are_ready():
    """Gradients of the last layer come first, however the user's tree orders them."""

    def f(x, y):
        last = lax.sin(x)
        first = lax.sin(last)
        return [lax.psum(first, "i"), lax.psum(last, "i"), lax.psum(y, "i")]

    half = BUCKET_BYTES // 8
    closed = trace(f, (half,), (half,))
    found = bucket_psums(closed)
    kinds = [e.prim.name for e in found.eqns]
    # y is there from the start; with the last layer's it fills a bucket, before the first's is made
    assert sizes_of(found) == [2 * half, half]
    assert kinds.index("psum") < len(kinds) - 1 - kinds[::-1].index("sin")
    assert_same(closed, found)


def test_large_operands_do_not_close_a_bucket():
    n = COMBINE_UP_TO_BYTES // 4 + 1
    closed = trace(lambda x, y, z: [lax.psum(v, "i") for v in (x, y, z)], (3,), (n,), (4,))
    assert sorted(sizes_of(bucket_psums(closed))) == [7, n]
    assert_same(closed, bucket_psums(closed))


def test_no_psum_passes_another_collective():
    closed = trace(
        lambda x, y: [lax.psum(x, "i"), lax.all_gather(y, "i"), lax.psum(y, "i")], (3,), (3,)
    )
    kinds = [e.prim.name for e in bucket_psums(closed).eqns if e.prim.members is not None]
    assert kinds == ["psum", "all_gather", "psum"]


def test_chains_of_psums_stay_in_order_in_buckets_too():
    def f(x, y):
        z = lax.psum(x, "i")
        return [lax.psum(z * y, "i"), lax.psum(lax.psum(y, "i"), "j"), z]

    closed = trace(f, (3,), (3,))
    found = bucket_psums(closed)
    assert_same(closed, found)


def test_operands_begin_at_cache_lines():
    closed = trace(lambda x, y, z: [lax.psum(v, "i") for v in (x, y, z)], (3,), (16,), (4, 8))
    (joined,) = [e for e in combine_psums(closed).eqns if e.prim.name == "concatenate"]
    assert [v.aval.size for v in joined.invars] == [16, 32, 3]
