"""Loops as native functions give the bits that the executor's own loops give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.compile.cpu.assemble import compiled_loops
from spmd.compile.executable.executable import Executable, compile_jaxpr
from spmd.compile.native.program.steps import KernelStep, Loop, While, walk

F32 = np.float32


def _floats(*shape: int) -> np.ndarray:
    size = int(np.prod(shape))
    return (np.sin(np.arange(size) * 1.7) + 0.1).reshape(shape).astype(F32)


# ---- programs ----------------------------------------------------------------------------------


def newton(a: Any) -> Any:
    def body(state: Any) -> Any:
        x, k = state
        return x - (x * x - a) / (2 * x), k + 1

    return lax.while_loop(lambda s: s[1] < 20, body, (a, 0))


def collatz(n: Any) -> Any:
    def body(state: Any) -> Any:
        n, count = state
        return snp.where(n % 2 == 0, n // 2, 3 * n + 1), count + 1

    return lax.while_loop(lambda s: s[0] != 1, body, (n, 0))


def swapped(x: Any, y: Any, n: Any) -> Any:
    return lax.fori_loop(0, n, lambda i, c: (c[1], c[0] + 1, c[2] * 2 + i), (x, y, 1))


def stacked_backwards(x: Any, xs: Any) -> Any:
    return lax.scan(lambda c, x: (c * 0.5 + x, (c, x + c)), x, xs, reverse=True)


def three_ways(xs: Any, ks: Any) -> Any:
    branches = [lambda c: c + 1, lambda c: c * 2, lambda c: c - 3]

    def body(c: Any, row: Any) -> Any:
        x, k = row
        return lax.switch(k, branches, c) + x, c

    return lax.scan(body, F32(1), (xs, ks))


def updated(b: Any) -> Any:
    return lax.fori_loop(0, 30, lambda i, b: b.at[i].set(b[i - 1] * 0.5 + i), b)


def nested(xs: Any) -> Any:
    def row(total: Any, x: Any) -> Any:
        inner = lax.fori_loop(0, 3, lambda i, t: t + x[i] * t, total)
        return lax.while_loop(lambda t: t > 2, lambda t: t * 0.4, inner), inner

    return lax.scan(row, F32(1), xs)


def called(w: Any, xs: Any) -> Any:
    def step(h: Any, x: Any) -> Any:
        h = snp.tanh(w @ h + x)
        return h, h.sum()

    return lax.scan(step, snp.zeros(80, F32), xs)


def inside_another(x: Any, a: Any) -> Any:
    """A small loop in a loop whose other steps are too long for a function."""

    def outer(k: Any, state: Any) -> Any:
        x, total = state
        few = lax.fori_loop(0, 5, lambda i, t: t * 0.5 + x[i], total)
        return snp.sin(snp.sort(x) + few) @ snp.cos(a) / 300, few

    return lax.fori_loop(0, 3, outer, (x, F32(0)))


def rows_inside(xs: Any) -> Any:
    """A small loop over rows that the loop around hands it, and stacks what it gives."""

    def outer(c: Any, row: Any) -> Any:
        c, out = lax.scan(lambda c, x: (c + x, c * x), c, row)
        return snp.sort(snp.full(4, c))[0], (out, c)

    return lax.scan(outer, F32(0), xs)


def many_dtypes(n: Any) -> Any:
    def body(i: Any, c: Any) -> Any:
        a, b, d, e = c
        return a + 1, ~b, d * np.uint8(3), e * (1 + 0.5j)

    start = (np.int16(3), np.bool_(True), np.uint8(7), np.complex64(1j))
    return lax.fori_loop(0, n, body, start)


@dataclass(frozen=True)
class Case:
    body: Callable[..., Any]
    args: tuple[Any, ...]
    loops_left: int = 0  # of the executor

    def __str__(self) -> str:
        return self.body.__name__


CASES = [
    Case(newton, (F32(3),)),
    Case(collatz, (np.int32(27),)),
    Case(swapped, (F32(1), F32(2), 7)),
    Case(swapped, (F32(1), F32(2), 0)),
    Case(stacked_backwards, (F32(1), _floats(9))),
    Case(three_ways, (_floats(6), np.array([0, 2, 1, -4, 9, 1], np.int32))),
    Case(updated, (_floats(40),)),
    Case(nested, (_floats(5, 3),)),
    Case(called, (_floats(80, 80) / 10, _floats(6, 80))),
    Case(inside_another, (_floats(300), _floats(300, 300)), loops_left=1),
    Case(rows_inside, (_floats(3, 4),), loops_left=1),
    Case(many_dtypes, (3,)),
    Case(spmd.vmap(newton), (np.arange(1, 9, dtype=F32),)),
    Case(spmd.grad(lambda x, xs: stacked_backwards(x, xs)[1][1].sum()), (F32(1), _floats(9))),
]


# ---- tests -------------------------------------------------------------------------------------


def _compiled(case: Case) -> Executable:
    return compile_jaxpr(spmd.make_jaxpr(case.body)(*case.args))


def _run(case: Case) -> list[np.ndarray]:
    leaves = [snp.asarray(x) for x in spmd.tree_util.tree_leaves(case.args)]
    return [np.asarray(x) for x in _compiled(case)(leaves)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_loops_give_the_bits_of_interpreted_loops(case, monkeypatch):
    fast = _run(case)
    monkeypatch.setattr(compiled_loops, "LONGEST_NS", -1.0)
    monkeypatch.setattr(compiled_loops, "LONGEST_COPY", -1)
    slow = _run(case)
    for a, b in zip(fast, slow, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_loops_give_the_values_of_impl(case):
    with spmd.disable_jit():
        args = spmd.tree_util.tree_map(snp.asarray, case.args)
        expected = spmd.tree_util.tree_leaves(case.body(*args))
    for a, b in zip(_run(case), expected, strict=True):
        np.testing.assert_allclose(a, np.asarray(b), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_small_loops_become_functions(case):
    steps = list(walk(_compiled(case).native.program.steps))
    assert sum(isinstance(s, Loop | While) for s in steps) == case.loops_left
    assert any(isinstance(s, KernelStep) and s.name == "loop" for s in steps)


def test_a_loop_of_unknown_length_releases_the_gil():
    native = _compiled(CASES[0]).native
    assert not native.keeps_gil


def test_a_loop_ends_for_each_device_separately():
    found = spmd.pmap(collatz)(np.array([27, 1, 6, 97], np.int32))[1]
    np.testing.assert_array_equal(found, [111, 0, 8, 118])
