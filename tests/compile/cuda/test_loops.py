"""Loops on predicates: the host reads these, and in the long run a body is one launch."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd import numpy as snp
from spmd.base.config import config
from spmd.base.errors import CudaError
from spmd.compile.cuda.driver import driver
from spmd.compile.cuda.stream_steps_ir import CAPTURED_AT
from tests.compile.cuda.test_calls import WARM, asked
from tests.compile.cuda.test_costs import works_of_a_call

pytestmark = pytest.mark.usefixtures("gpus")
assert asked

X = np.linspace(0.1, 1, 12, dtype=np.float32).reshape(3, 4)


def turned(x):
    return snp.tanh(x @ x.T @ x) + 0.1


def loop(x, n):
    return lax.while_loop(lambda s: s[1] < n, lambda s: (turned(s[0]), s[1] + 1), (x, 0))[0]


def wanted(x, n):
    for _ in range(n):
        x = np.tanh(x @ x.T @ x) + np.float32(0.1)
    return x


def launches(monkeypatch, function, *args):
    """How much work, but for events and freed memory, a call puts into streams; its result."""
    works, out = works_of_a_call(monkeypatch, function, *args)
    return works[False], out


def test_an_iteration_is_one_launch(asked, monkeypatch):
    function, x = spmd.jit(loop), snp.asarray(X) + 0
    counts = {}
    for n in (4, 30, 31):
        limit = snp.asarray(np.int32(n)) + 0
        for _ in range(WARM):
            np.testing.assert_allclose(function(x, limit), wanted(X, n), 1e-4)
        asked.clear()
        counts[n], out = launches(monkeypatch, function, x, limit)
        assert asked == {"replay": n}  # no allocation, no wait that a stream does not need
        np.testing.assert_allclose(out, wanted(X, n), 1e-4)
    assert counts[31] == counts[30] + 1 == counts[4] + 27


def test_a_body_is_captured_within_the_first_call(asked):
    function, n = spmd.jit(loop), CAPTURED_AT + 5
    np.testing.assert_allclose(function(snp.asarray(X), n), wanted(X, n), 1e-4)
    assert asked["begin_capture"] == 1 and asked["replay"] == 6


def test_calls_over_other_memory_have_graphs_of_their_own(asked):
    function = spmd.jit(loop)
    several = [snp.asarray(X * k) + 0 for k in range(6)]
    for number in range(4 * WARM):
        k = number % 3 if number < 3 * WARM else number % 6
        np.testing.assert_allclose(function(several[k], 12), wanted(X * k, 12), 1e-3)
    asked.clear()
    outs = [function(several[k % 6], 12) for k in range(6)]
    for k, out in enumerate(outs):
        np.testing.assert_allclose(out, wanted(X * k, 12), 1e-3)


def nested(x):
    def outer(s):
        inner = lax.while_loop(lambda t: t[1] < 9, lambda t: (turned(t[0]), t[1] + 1), (s[0], 0))
        return inner[0] * 0.5, s[1] + 1

    return lax.while_loop(lambda s: s[1] < 3, outer, (x, 0))[0]


def in_a_scan(x):
    def turn(c, row):
        out = lax.while_loop(lambda s: s[1] < 10, lambda s: (turned(s[0]) + row, s[1] + 1), (c, 0))
        return out[0], out[0].sum()

    return lax.scan(turn, x, x)


def two(x):
    return loop(x, 10) + lax.while_loop(lambda s: s.sum() < 99, lambda s: s * 1.5 + 1, x)


def with_a_branch(x):
    def turn(s):
        return lax.cond(s[1] % 2 == 0, turned, lambda y: y * 0.5, s[0]), s[1] + 1

    return lax.while_loop(lambda s: s[1] < 12, turn, (x, 0))[0]


def rows(x):
    """Each iteration writes a row, at an index that the device knows."""
    return lax.while_loop(
        lambda s: s[1] < 12, lambda s: (s[0].at[s[1] % 3].add(s[0][0] + 1), s[1] + 1), (x, 0)
    )[0]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("program", [nested, in_a_scan, two, with_a_branch, rows])
def test_programs(program, graphs, asked):
    with config.override("platform", "cpu"):
        right = spmd.tree.map(np.asarray, spmd.jit(program)(X))
    with config.override("cuda_graphs", graphs):
        function, x = spmd.jit(program), snp.asarray(X) + 0
        for _ in range(WARM):
            spmd.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4), function(x), right)
    # Neither a body in which the host has a part, nor one over another row in each loop around.
    assert bool(asked["replay"]) == (graphs and program not in (with_a_branch, in_a_scan))


@pytest.mark.parametrize("begin", ["with a copy", "with a kernel"])
def test_a_loop_whose_body_fails_ends(begin):
    """The host is told when it waits for the predicate, which says nothing then."""

    def body(x):
        first = x if begin == "with a copy" else snp.zeros_like(x)
        return lax.while_loop(lambda s: s.sum() < 1e9, lambda s: s * 2 + x, first)

    function, x = spmd.jit(body), snp.asarray(X) + 0
    place = x.owner.address
    for _ in range(WARM):
        function(x).block_until_ready()
        x.owner.address = place + (1 << 30)
        try:
            with pytest.raises(CudaError, match=r"not 48 bytes of one|outside of what is"):
                function(x).block_until_ready()
        finally:
            x.owner.address = place


def test_a_capture_that_fails_is_an_error_with_advice(monkeypatch):
    gpu, end = driver(), driver().end_capture

    def refused(*given):
        end(*given)
        raise CudaError("the capture was invalidated")

    monkeypatch.setattr(gpu, "end_capture", refused)
    told = "graph of a loop's body.*: the capture was invalidated; SPMD_CUDA_GRAPHS=0 runs it"
    with pytest.raises(CudaError, match=told):
        spmd.jit(loop)(snp.asarray(X), 20)
    monkeypatch.undo()
    np.testing.assert_allclose(spmd.jit(loop)(snp.asarray(X), 20), wanted(X, 20), 1e-4)
