"""Mutable arrays beside JAX's: reads, writes, loops, branches, jit, derivatives, batching."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import spmd
import spmd.ref
from tests.jax.compare import OURS, THEIRS, assert_same, cases, jax

jax_ref = pytest.importorskip("jax.ref", reason="the oracle of these tests is a newer JAX")
OURS.ref, OURS.new_ref, OURS.freeze = spmd.ref, spmd.new_ref, spmd.freeze
X = np.array([1.0, 2.0, -3.0, 0.5], np.float32)


def reads_and_writes(j: Any) -> Any:
    ref = j.new_ref(j.np.arange(12.0).reshape(3, 4))
    ref[0, 1] = 5.0
    ref[1] = j.np.ones(4)
    ref[:, 2:] = ref[:, 2:] * 10
    ref[2, 0] += 1.0
    j.ref.addupdate(ref, (0, slice(0, 2)), j.np.ones(2))
    old = j.ref.swap(ref, (2, slice(None)), j.np.zeros(4))
    return ref[...], old, j.ref.get(ref, 1), ref[j.np.array([0, 2]), 1], ref[::2, -1]


def local(j: Any, x: Any) -> Any:
    ref = j.new_ref(x)
    ref[0] = ref[1] * j.np.sin(ref[0])
    ref[...] = ref[...] * 2 + x
    ref[2] += ref[0]
    return j.freeze(ref)


def looped(j: Any, x: Any) -> Any:
    x, ref = j.np.asarray(x), j.new_ref(j.np.zeros(4))

    def body(carry: Any, k: Any) -> Any:
        ref[k] += carry * x[k]
        ref[0] = ref[0] + 1
        return carry * 2, ref[k]

    carry, ys = j.lax.scan(body, 1.5, j.np.arange(4))
    return carry, ys, ref[...]


def nested(j: Any, x: Any) -> Any:
    total, row = j.new_ref(j.np.float32(0)), j.new_ref(x)

    def outer(carry: Any, k: Any) -> Any:
        def inner(i: Any, value: Any) -> Any:
            total[...] += value * row[i]
            return value + 1

        last = j.lax.fori_loop(0, 3, inner, carry)
        row[k] = last
        return last, total[...]

    return j.lax.scan(outer, x[0], j.np.arange(3)), total[...], row[...]


def branches(j: Any, x: Any) -> Any:
    ref = j.new_ref(x)

    def big() -> Any:
        ref[0] = 10.0
        return ref[1]

    def small() -> Any:
        ref[1:3] = ref[0:2]
        return ref[0] * 3

    first = j.lax.cond(x[0] > 0, big, small)
    second = j.lax.cond(x[0] > 5, big, small)
    third = j.lax.switch(2, [big, small, lambda: x[3]])
    return first, second, third, ref[...]


def repeated(j: Any, x: Any) -> Any:
    ref = j.new_ref(j.np.float32(1))

    def body(i: Any) -> Any:
        ref[...] = ref[...] * 2 + x[0]
        return i + 1

    count = j.lax.while_loop(lambda i: i < 4, body, 0)
    return count, ref[...]


def closed_over(j: Any) -> Any:
    ref = j.new_ref(j.np.zeros(3))

    @j.jit
    def step(x: Any) -> Any:
        ref[0] += x
        return ref[...] * 2

    @j.jit
    def look() -> Any:
        return ref[0]

    a, seen, b = step(1.0), look(), step(2.0)
    ref[1] = 7.0
    return a, seen, b, look(), step(3.0), ref[...]


def passed(j: Any) -> Any:
    ref, other = j.new_ref(j.np.zeros(3)), j.new_ref(j.np.arange(2))

    @j.jit
    def step(refs: Any, x: Any) -> Any:
        refs["a"][1] += x
        refs["b"][0] = refs["b"][1] * 3
        return refs["a"][1] + 1

    outs = [step({"a": ref, "b": other}, 2.0), step({"a": ref, "b": other}, 5.0)]
    return outs, ref[...], other[...]


def inside_of_jits(j: Any, x: Any) -> Any:
    ref = j.new_ref(x)

    @j.jit
    def write(k: Any) -> Any:
        ref[k] = ref[k] * 2
        return ref[0]

    def body(c: Any, k: Any) -> Any:
        return c + write(k), None

    return j.lax.scan(body, 0.0, j.np.arange(3))[0], ref[...]


def rows_of_a_loop(j: Any, x: Any) -> Any:
    ref = j.new_ref(j.np.stack([x, x * 2, x * 3]))

    def body(carry: Any, row: Any) -> Any:
        row[0] = carry
        return carry + row[1], row[2]

    return j.lax.scan(body, 0.5, ref), ref[...]


def recomputed(j: Any, x: Any) -> Any:
    ref = j.new_ref(j.np.float32(0))

    @j.checkpoint
    def f(x: Any) -> Any:
        ref[...] += j.np.sum(x * x)
        return j.np.sin(x)

    return f(f(x)), ref[...]


def gradient_seen(j: Any) -> Any:
    seen = j.new_ref(j.np.zeros(2))

    @j.custom_vjp
    def watch(x: Any) -> Any:
        return x

    def backward(_: Any, ct: Any) -> Any:
        seen[...] = ct
        return (ct,)

    watch.defvjp(lambda x: (x, None), backward)
    g = j.grad(lambda x: (watch(x * 3) ** 2).sum())
    first = g(j.np.array([1.0, 2.0])), seen[...]
    return first, j.jit(g)(j.np.array([3.0, 4.0])), seen[...]


def over_examples(j: Any) -> Any:
    ref, shared = j.new_ref(j.np.zeros((3, 2))), j.new_ref(j.np.ones(2))

    def f(r: Any, x: Any) -> Any:
        r[0] = x
        r[1] += x * shared[0]
        return r[...].sum()

    return j.vmap(f)(ref, j.np.arange(3.0)), ref[...]


WHOLE = {
    "reads and writes": reads_and_writes,
    "closed over by jit": closed_over,
    "passed to jit": passed,
    "a gradient seen": gradient_seen,
    "over examples": over_examples,
}
OF_X = {
    "local": local,
    "looped": looped,
    "nested": nested,
    "branches": branches,
    "inside of jits": inside_of_jits,
    "rows of a loop": rows_of_a_loop,
    "recomputed": recomputed,
}


@cases(**WHOLE)
def test_programs(case):
    assert_same(case)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", [*OF_X, "repeated"])
def test_programs_of_a_value(name, jitted):
    case = (OF_X | {"repeated": repeated})[name]
    assert_same(lambda j: (j.jit if jitted else lambda f: f)(lambda x: case(j, x))(X))


def loss(j: Any, case: Any, x: Any) -> Any:
    leaves = j.tree.leaves(case(j, x))
    return sum((k + 1.0) * j.np.sum(v * v) for k, v in enumerate(leaves))


@pytest.mark.parametrize("name", OF_X)
def test_derivatives(name):
    case = OF_X[name]
    if name in ("branches", "recomputed"):  # reverse mode of these fails inside of JAX
        forward = spmd.jacfwd(lambda x: loss(OURS, case, x))(X)
        backward = spmd.jit(spmd.grad(lambda x: loss(OURS, case, x)))(X)
        np.testing.assert_allclose(backward, forward, rtol=1e-5)
    else:
        assert_same(lambda j: j.jit(j.grad(lambda x: loss(j, case, x)))(X), rtol=1e-4, atol=1e-4)
    assert_same(
        lambda j: j.jvp(lambda x: loss(j, case, x), (X,), (np.ones_like(X),)), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("name", ["local", "looped", "branches", "inside of jits"])
def test_examples_at_once(name):
    """Of JAX one example at a time: under `vmap` it refuses what some of these programs write."""
    case, xs = OF_X[name], np.stack([X, X * 2 - 1, X + 5])
    ours = spmd.vmap(lambda x: case(OURS, x))(xs)
    for k, x in enumerate(xs):
        theirs = jax.tree.leaves(case(THEIRS, x))
        for a, b in zip(spmd.tree.leaves(ours), theirs, strict=True):
            np.testing.assert_allclose(a[k] if np.ndim(a) > np.ndim(b) else a, b, rtol=1e-5)
