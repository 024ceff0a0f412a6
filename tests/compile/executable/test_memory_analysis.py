"""What programs are said to need: bytes and operations, counted by hand here."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.compile.schedule.cost_model import Cost, cost_of

F = np.float32


def compiled(f, *args, **options):
    return spmd.jit(f, **options).trace(*args).lower().compile()


def memory(f, *args):
    return compiled(f, *args).memory_analysis()


def cost(f, *args):
    return cost_of(compiled(f, *args).executable.schedule.steps)


X = np.ones((50, 40), F)


def test_an_operand_is_read_once_however_often_it_is_used():
    assert cost(lambda x: x * x + snp.sin(x), X) == Cost(X.nbytes, X.nbytes, 3 * X.size)
    assert cost(lambda x: x[:, :10] + x[:, 10:20], X).read == 2 * 50 * 10 * 4


def test_broadcast_operands_count_their_own_elements():
    found = cost(lambda x, row: x + row, X, np.ones(40, F))
    assert found == Cost(X.nbytes + 160, X.nbytes, X.size)


def test_reductions_and_softmax_read_their_operand_once():
    assert cost(lambda x: x.sum(), X) == Cost(X.nbytes, 4, X.size)
    softmax = cost(spmd.nn.softmax, X)
    assert (softmax.read, softmax.written) == (X.nbytes, X.nbytes)


def test_loops_count_all_iterations_and_branches_the_costliest():
    once = cost(lambda x: snp.sin(x), X)
    loop = cost(lambda x: lax.fori_loop(0, 5, lambda i, c: snp.sin(c), x), X)
    assert loop.flops == 5 * once.flops
    branch = cost(lambda p, x: lax.cond(p, lambda x: snp.sin(snp.cos(x)), lambda x: x, x), True, X)
    assert branch.flops == 2 * once.flops


def test_a_gather_reads_the_elements_of_its_result():
    tall = np.ones((10_000, 40), F)
    found = cost(lambda x, at: x[at], tall, np.array([1, 1, 3]))
    assert 3 * 40 * 4 <= found.written and found.moved < 2000


def test_products_count_their_matrices_and_jax_agrees():
    jax = pytest.importorskip("jax")
    a, b = np.ones((7, 30, 20), F), np.ones((7, 20, 10), F)
    mine = compiled(lambda a, b: a @ b, a, b).cost_analysis()
    theirs = jax.jit(lambda a, b: a @ b).lower(a, b).compile().cost_analysis()
    assert mine["flops"] == theirs["flops"] == 2 * 7 * 30 * 20 * 10
    assert mine["bytes accessed"] == theirs["bytes accessed"]


def test_arguments_results_and_constants_are_counted():
    table = np.arange(1000, dtype=F)
    found = memory(lambda x: (x.sum(), table * x[0, 0]), X)
    assert found.argument_size_in_bytes == X.nbytes
    assert found.output_size_in_bytes == 4 + table.nbytes
    assert found.constant_size_in_bytes >= table.nbytes
    assert found.alias_size_in_bytes == 0
    assert found.peak_memory_in_bytes >= X.nbytes + 2 * table.nbytes


def test_a_result_that_is_an_argument_takes_no_memory():
    found = memory(lambda x: x, X)
    assert found.output_size_in_bytes == found.alias_size_in_bytes == X.nbytes
    assert found.peak_memory_in_bytes == X.nbytes


def test_temporaries_with_disjoint_lifetimes_share_bytes():
    def chain(x):
        for _ in range(6):
            x = snp.sort(x, axis=0)[::-1] @ np.eye(40, dtype=F)
        return x

    found = memory(chain, X)
    assert found.temp_buffers >= 6
    assert found.live_temp_size_in_bytes <= found.temp_size_in_bytes
    assert found.temp_size_in_bytes <= found.temp_buffer_size_in_bytes // 3


def network(depth, wrap):
    def layer(w, x):
        return snp.tanh(x @ w)

    def loss(ws, x):
        for w in ws:
            x = wrap(lambda w, x: layer(w, layer(w, layer(w, x))))(w, x)
        return snp.sum(x)

    return spmd.grad(loss), [np.eye(64, dtype=F) for _ in range(depth)], np.ones((256, 64), F)


def test_checkpoint_lowers_the_peak():
    """Kept: one activation a block instead of three; made anew: those of one block at a time."""
    depth, activation = 8, 256 * 64 * 4
    plain = memory(*network(depth, lambda f: f)).temp_size_in_bytes
    saving = memory(*network(depth, spmd.checkpoint)).temp_size_in_bytes
    assert plain >= 3 * depth * activation
    assert saving <= (depth + 8) * activation


def test_checkpoint_of_a_scanned_layer_lowers_the_peak():
    def loss(wrap):
        def step(x, w):
            return snp.tanh(snp.sin(snp.tanh(x @ w) @ w) @ w), None

        return spmd.grad(lambda ws, x: snp.sum(lax.scan(wrap(step), x, ws)[0]))

    ws, x = np.ones((10, 64, 64), F), np.ones((256, 64), F)
    plain = memory(loss(lambda f: f), ws, x).temp_size_in_bytes
    saving = memory(loss(spmd.checkpoint), ws, x).temp_size_in_bytes
    assert saving < 0.6 * plain
