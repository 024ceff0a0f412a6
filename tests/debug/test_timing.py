"""`spmd.debug.profile`: steps are timed as often as they run, and results stay what they are."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.compile.native.llvm.compiler import available_cores
from spmd.debug.program import compile_call
from spmd.debug.timing import watched_twin
from spmd.errors import ArgumentError


def rows(profile):
    return [(step.info.kind, step.calls) for step in profile.steps]


def test_steps_are_counted_in_nested_loops_and_branches():
    def turn(i, c):
        def rarely(c):
            return lax.fori_loop(0, 3, lambda k, d: snp.sin(d @ d), c)

        return lax.cond(i == 2, rarely, lambda c: c, c)

    profile = spmd.debug.profile(lambda x: lax.fori_loop(0, 4, turn, x), repeats=2)
    found = profile(np.ones((4, 4), np.float32))
    assert ("loop", 1) in rows(found) and ("branch", 4) in rows(found)
    assert ("product", 3) in rows(found), "one of four rounds makes three products"
    outer = next(step for step in found.steps if step.info.kind == "loop")
    assert outer.seconds >= sum(s.seconds for s in found.steps if s.info.depth == 1) > 0
    assert found.seconds == pytest.approx(sum(s.own for s in found.steps))


def test_while_loops_count_their_rounds():
    profile = spmd.debug.profile(
        lambda x: lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, snp.cos(c[1])), (0, x))
    )
    found = profile(np.ones(8, np.float32))
    kernels = [step.calls for step in found.steps if step.info.kind == "kernel"]
    assert sorted(kernels)[-1] == 6 and 5 in kernels, "six tests, five rounds"


def test_the_lines_are_the_users():
    found = spmd.debug.profile(lambda x: snp.sum(snp.exp(x)))(np.ones(100, np.float32))
    assert [step.info.source.file for step in found.steps] == [__file__]
    assert __file__ in str(found) and __file__ in next(iter(found.by_line))
    assert found.steps[0].info.cost.read == 400 and found.steps[0].info.cost.flops == 200


def test_rounds_on_several_threads_have_records_of_their_own():
    def body(a):
        return snp.sum(a @ a.T)

    found = spmd.debug.profile(lambda x: lax.map(body, x))(np.ones((40, 16, 16), np.float32))
    assert ("product", 40) in rows(found)
    if available_cores() > 1:
        assert ("parallel", 1) in rows(found)
    assert "40 rounds" in str(found)


def test_mapped_functions_show_what_each_device_does():
    function = spmd.pmap(lambda x: lax.psum(snp.sin(x), "i") * 2, axis_name="i")
    found = spmd.debug.profile(function)(np.ones((4, 8), np.float32))
    assert found.devices == 4 and "on each of 4 devices" in str(found)
    assert ("collective", 1) in rows(found)


@pytest.mark.parametrize("mapped", [False, True])
def test_the_twin_computes_the_same(mapped):
    def function(x):
        return snp.sort(lax.fori_loop(0, 3, lambda i, c: snp.tanh(c) * i, x)), x.sum()

    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    program = compile_call(spmd.pmap(function) if mapped else function, (x,), {})
    twin, _, records = watched_twin(program)
    for mine, theirs in zip(twin([x]), program.executable([x]), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert all(record.any() for record in records)


def test_donated_arguments_stay():
    x = snp.ones(8)
    function = spmd.jit(lambda x: x + 1, donate_argnums=0)
    spmd.debug.profile(function)(x)
    assert float(x.sum()) == 8.0


def test_repeats_must_be_positive():
    with pytest.raises(ArgumentError, match="repeats=0 must be at least 1"):
        spmd.debug.profile(lambda x: x, repeats=0)
