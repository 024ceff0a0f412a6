"""`spmd.debug.show`: its figures are the program's, its text names what a reader looks for."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.errors import ArgumentError

X = np.ones((64, 32), np.float32)
W = np.ones((32, 16), np.float32)


@pytest.fixture
def shown(capsys):
    """`show`'s object and what it printed."""

    def call(f, *args, **options):
        found = spmd.debug.show(f, **options)(*args)
        text = capsys.readouterr().out
        assert text == f"{found}\n"
        return found, text

    return call


def test_kernels_and_products_with_what_they_move(shown):
    found, text = shown(lambda x, w: snp.tanh(x @ w) * 2, X, W)
    assert [step.kind for step in found.steps if step.kind != "kernel"] == ["product"]
    # The two operations that follow are done to the product's result.
    assert found.products[0].cost.flops == 2 * 64 * 32 * 16 + 2 * 64 * 16
    assert found.products[0].cost.read == X.nbytes + W.nbytes
    assert found.bytes == found.cost.read + found.cost.written > X.nbytes + W.nbytes
    assert "product 64x16x32 dot+tanh+mul" in text and "67.6 k" in text and __file__ in text
    assert found.peak_bytes >= X.nbytes + W.nbytes + 64 * 16 * 4
    assert repr(found).startswith("<compiled <lambda>: ")


def test_passes_say_what_they_left(shown):
    found, text = shown(lambda x: snp.exp(x) * snp.exp(x) + 1, X)
    left = {info.name: (info.equations, info.fused) for info in found.passes}
    assert left["trace"][0] == 4 and left["simplify"][0] == 3 and left["fuse"] == (1, 1)
    assert "fused groups" in text and "simplify" in text


def test_steps_in_python_are_marked_with_the_reason(shown):
    found, text = shown(lambda x: snp.linalg.eigvals(x @ x.T), X)
    assert [step.name for step in found.host_steps] == ["eig"]
    assert "! host eig" in text and "no native step for eig" in text


def test_loops_show_their_rounds(shown):
    found, text = shown(lambda x: lax.fori_loop(0, 7, lambda i, c: snp.sin(c), x), X)
    inside = [step for step in found.kernels if step.depth]
    assert {step.rounds for step in inside} == {7}
    assert found.flops >= 7 * X.size
    assert "loop 7 rounds" in text


def test_mapped_functions_show_the_program_of_a_device(shown):
    f = spmd.pmap(lambda x: lax.psum(snp.sin(x), "i"), axis_name="i")
    found, text = shown(f, np.ones((4, 100), np.float32))
    assert found.devices == 4 and [step.name for step in found.collectives]
    assert "psum" in found.collectives[0].name
    assert found.memory.argument_size_in_bytes == 400
    assert "on each of 4 devices" in text and "memory on each device" in text


def test_donated_arguments_are_counted_once(shown):
    found, text = shown(spmd.jit(lambda x: x + 1, donate_argnums=0), X)
    assert found.memory.alias_size_in_bytes == X.nbytes
    assert "8.19 kB of them in the place of arguments" in text


def test_long_lists_are_cut(shown):
    def f(x):
        for k in range(30):
            x = lax.linalg.lu(x + 2)[0] + k
        return x

    found, text = shown(f, X, lines=5)
    assert "lines more; see .jaxpr" in text and "lines more; see .steps" in text
    assert len(found.host_steps) + len(found.kernels) + len(found.products) >= 30
    with pytest.raises(ArgumentError, match="lines=0 must be at least 1"):
        spmd.debug.show(f, lines=0)


def test_memory_stats_count_blocks():
    before = spmd.debug.memory_stats()
    x = spmd.jit(lambda: snp.ones(1_000_000))()
    now = spmd.debug.memory_stats()
    assert now["bytes_in_use"] - before["bytes_in_use"] >= x.nbytes
    assert now["bytes_reserved"] == now["bytes_in_use"] + now["bytes_waiting"]
    # The largest block may be one that an earlier test had, and has been given back since.
    assert now["peak_bytes_reserved"] >= max(now["bytes_reserved"], now["largest_alloc_size"])
    del x
    after = spmd.debug.memory_stats()
    assert after["bytes_in_use"] == before["bytes_in_use"]
    assert after["bytes_waiting"] >= 4_000_000
