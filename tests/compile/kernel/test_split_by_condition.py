"""Cutting a space where a condition on an index changes keeps the meaning of kernels."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.compile.executable.executable import compile_jaxpr
from spmd.compile.kernel.builder import Builder
from spmd.compile.kernel.check import check_kernel
from spmd.compile.kernel.ir import Iota, Kernel, Load, Op
from spmd.compile.kernel.split_by_condition import LEAST_POINTS, MOST_PIECES, cut_pieces
from spmd.compile.lower.lowering import lower
from spmd.compile.lower.steps import Launch
from spmd.compile.native.program.steps import BatchStep, walk
from spmd.compile.passes.pipeline import run_passes
from tests.compile.kernel.interpret import interpret
from tests.compile.kernel.random_kernels import random_case

RNG = np.random.default_rng(11)


def run_pieces(kernel: Kernel, arrays: list[np.ndarray], least: int = 1) -> int:
    """Interpret a kernel by its pieces; how many there are."""
    pieces = cut_pieces(kernel, least)
    for piece in pieces:
        check_kernel(piece.kernel)
        parts = [
            arrays[number][start:][: arg.size]
            for number, start, arg in zip(piece.args, piece.starts, piece.kernel.args, strict=True)
        ]
        interpret(piece.kernel, parts)
    return len(pieces)


def assert_same(kernel: Kernel, arrays: list[np.ndarray], count: int) -> None:
    expected = [a.copy() for a in arrays]
    interpret(kernel, expected)
    assert run_pieces(kernel, arrays) == count
    for found, wanted in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def edge_kernel(rng: np.random.Generator) -> tuple[Kernel, list[np.ndarray]]:
    """Reads on both sides of edges along one dim, with guards, fills and a guarded store."""
    rows, columns = (int(n) for n in rng.integers(3, 9, 2))
    b = Builder((rows, columns), ())
    x, y = b.arg("f32", rows * columns), b.arg("f32", rows * columns)
    out, marks = b.arg("f32", 2 * rows * columns, "out"), b.arg("i32", rows * columns, "inout")
    dim = int(rng.integers(2))
    size, strides = (rows, columns)[dim], (columns, 1)
    with b.row():
        index = b.iota(dim, "i32")
        scaled = b.op("sub", b.op("mul", index, b.const(-2, "i32")), b.const(1, "i32"))
        edge = int(rng.integers(-1, size + 2))
        low = b.op("lt", index, b.const(edge, "i32"))
        high = b.op("ge", scaled, b.const(-2 * int(rng.integers(0, size)), "i32"))
        both = b.op("and", low, high)
        first = b.load(x, strides, guard=low)
        second = b.load(y, strides, guard=b.op("not", low), fill=b.const(7.0, "f32"))
        value = b.op("select", both, first, b.op("add", first, second))
        b.store(out, strides, value, int(rng.integers(0, rows * columns)))
        b.store(marks, strides, index, guard=high)
    arrays = [rng.standard_normal(rows * columns).astype(np.float32) for _ in range(2)]
    return b.build(), [*arrays, np.zeros(2 * rows * columns, np.float32), np.arange(
        rows * columns, dtype=np.int32
    )]  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_split_kernels_give_the_values_of_the_whole(seed):
    kernel, arrays = edge_kernel(np.random.default_rng(seed))
    expected = [a.copy() for a in arrays]
    interpret(kernel, expected)
    whole = [a.copy() for a in arrays]
    if not run_pieces(kernel, whole):
        interpret(kernel, whole)  # no edge lies inside
    for found, wanted in zip(whole, expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("seed", range(60))
def test_random_kernels_keep_their_values_when_split(seed):
    case = random_case(seed)
    pieces = cut_pieces(case.kernel, 1)
    if pieces:
        assert_same(case.kernel, case.arrays, len(pieces))


def joined(sizes: tuple[int, ...]) -> Kernel:
    """A concatenation of vectors."""
    total, start = sum(sizes), 0
    b = Builder((total,), ())
    args = [b.arg("f32", size) for size in sizes]
    out = b.arg("f32", total, "out")
    with b.row():
        index, value = b.iota(0, "i32"), b.const(0.0, "f32")
        for arg, size in zip(args, sizes, strict=True):
            inside = b.op("lt", index, b.const(start + size, "i32"))
            inside = b.op("and", inside, b.op("ge", index, b.const(start, "i32")))
            value = b.op("select", inside, b.load(arg, (1,), -start, guard=inside), value)
            start += size
        b.store(out, (1,), value)
    return b.build()


def test_parts_of_a_concatenation_have_no_condition():
    sizes = (5, 9, 2)
    kernel = joined(sizes)
    pieces = cut_pieces(kernel, 1)
    assert [p.args for p in pieces] == [(0, 3), (1, 3), (2, 3)]
    assert [p.starts for p in pieces] == [(0, 0), (0, 5), (0, 14)]
    for piece, size in zip(pieces, sizes, strict=True):
        assert [a.size for a in piece.kernel.args] == [size, size]
        (load,) = piece.kernel.passes[0].instrs
        assert isinstance(load, Load) and load.guard is None and load.map.offset == 0
    arrays = [RNG.standard_normal(n).astype(np.float32) for n in sizes]
    assert_same(kernel, [*arrays, np.zeros(16, np.float32)], 3)


def test_small_or_many_parts_stay_whole():
    assert not cut_pieces(joined((LEAST_POINTS, LEAST_POINTS - 1)))
    assert len(cut_pieces(joined((LEAST_POINTS, LEAST_POINTS)))) == 2
    assert len(cut_pieces(joined((4,) * MOST_PIECES), 1)) == MOST_PIECES
    assert not cut_pieces(joined((4,) * (MOST_PIECES + 1)), 1)


def test_an_index_that_wraps_around_is_not_linear():
    b = Builder((200,), ())
    out = b.arg("f32", 200, "out")
    with b.row():
        narrow = b.convert(b.iota(0, "i32"), "i8")
        low = b.op("lt", narrow, b.const(50, "i8"))
        b.store(out, (1,), b.op("select", low, b.const(1.0, "f32"), b.const(2.0, "f32")))
    assert not cut_pieces(b.build(), 1)


def test_an_index_counts_from_the_start_of_the_whole():
    b = Builder((20,), ())
    out = b.arg("i32", 20, "out")
    with b.row():
        index = b.iota(0, "i32")
        low = b.op("lt", index, b.const(8, "i32"))
        b.store(out, (1,), b.op("select", low, index, b.op("neg", index)))
    second = cut_pieces(b.build(), 1)[1].kernel.passes[0].instrs
    assert isinstance(second[0], Iota) and any(isinstance(i, Op) and i.op == "add" for i in second)
    assert_same(b.build(), [np.zeros(20, np.int32)], 2)


# ---- programs ----------------------------------------------------------------------------------


def join(x, y, axis=0):
    return snp.concatenate([2 * x, y - 1], axis=axis) * 3


@pytest.mark.parametrize("axis", [0, 1])
def test_a_concatenation_between_elementwise_work_is_split(axis):
    x, y = RNG.standard_normal((2, 96, 128)).astype(np.float32)
    found = spmd.jit(join, static_argnums=2)(x, y, axis)
    np.testing.assert_array_equal(found, np.concatenate([2 * x, y - 1], axis) * 3)
    steps = lower(run_passes(spmd.make_jaxpr(lambda x, y: join(x, y, axis))(x, y))).steps
    assert len(steps) == 2 and all(isinstance(s, Launch) for s in steps)


def test_disjoint_parts_are_one_job():
    x, y = RNG.standard_normal((2, 50_000)).astype(np.float32)
    program = compile_jaxpr(spmd.make_jaxpr(join)(x, y))
    native = program.native.program
    assert native is not None
    steps = [s for s in walk(native.steps) if isinstance(s, BatchStep)]
    assert [len(s.steps) for s in steps] == [2]


def test_a_loop_may_carry_the_result_of_a_split_kernel():
    x, y = RNG.standard_normal((2, 20_000)).astype(np.float32)

    def body(carry, _):
        return snp.concatenate([carry[20_000:] * 0.5, carry[:20_000] + 1]) * 2, None

    found, _ = spmd.jit(lambda c: spmd.lax.scan(body, c, None, length=5))(np.concatenate([x, y]))
    expected = np.concatenate([x, y])
    for _ in range(5):
        half, rest = np.split(expected, 2)
        expected = np.concatenate([rest * np.float32(0.5), half + 1]) * 2
    np.testing.assert_array_equal(found, expected)
