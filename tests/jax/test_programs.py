"""The same programs under both libraries: values, types, derivatives to order two, vmap, jit.

JAX compiles everything of one kind as one program, which takes a tenth of the time.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import spmd
from tests.jax.programs import PROGRAMS, Program

jax = pytest.importorskip("jax", reason="the oracle of these tests is JAX")


def floating(p: Program) -> tuple[int, ...]:
    return tuple(k for k, x in enumerate(p.args) if x.dtype.kind == "f")


def weights(lib: Any, x: Any) -> Any:
    """Numbers of an array's shape, all different, so that no derivative cancels."""
    return lib.numpy.cos(lib.numpy.arange(x.size, dtype=np.float32)).reshape(x.shape)


def weighted_sum(lib: Any, tree: Any) -> Any:
    return sum(lib.numpy.sum(weights(lib, x) * x) for x in lib.tree_util.tree_leaves(tree))


def value(p: Program, lib: Any) -> Any:
    return p.of(lib)(*map(lib.numpy.asarray, p.args))


def gradient(p: Program, lib: Any) -> Any:
    f = p.of(lib)
    return lib.grad(lambda *args: weighted_sum(lib, f(*args)), argnums=floating(p))(*p.args)


def forward(p: Program, lib: Any) -> Any:
    """The derivative in the direction of the arguments themselves."""
    nums, f = floating(p), p.of(lib)

    def of_floats(*some: Any) -> Any:
        args = list(p.args)
        for k, x in zip(nums, some, strict=True):
            args[k] = x
        return f(*args)

    some = tuple(p.args[k] for k in nums)
    return lib.jvp(of_floats, some, some)


def second(p: Program, lib: Any) -> Any:
    """The gradient of a weighted sum of the gradient."""
    f = p.of(lib)
    first = lib.grad(lambda *args: weighted_sum(lib, f(*args)), argnums=floating(p))
    total = lambda *args: weighted_sum(lib, first(*args))  # noqa: E731
    return lib.grad(total, argnums=floating(p))(*p.args)


def batched(p: Program, lib: Any) -> Any:
    """Mapped over two copies of each argument, the second scaled."""
    both = [np.stack([x, (x * 0.5).astype(x.dtype)]) for x in p.args]
    return lib.vmap(p.of(lib))(*both)


def batched_gradient(p: Program, lib: Any) -> Any:
    """Per-example gradients, the batch in the first argument only, at its last dim."""
    f = p.of(lib)
    loss = lambda *args: weighted_sum(lib, f(*args))  # noqa: E731
    axes = (-1, *[None] * (len(p.args) - 1))
    both = np.stack([p.args[0], (p.args[0] * 0.5).astype(p.args[0].dtype)], -1)
    return lib.vmap(lib.grad(loss, floating(p)), in_axes=axes)(both, *p.args[1:])


KINDS = [value, gradient, forward, second, batched, batched_gradient]


@functools.cache
def jax_answers(kind: Any) -> list[Any]:
    """What JAX computes for all programs, and the weak types it infers."""
    traced = jax.jit(lambda: [kind(p, jax) for p in PROGRAMS]).trace()
    answers = traced.lower().compile()()
    weak = iter([a.weak_type for a in traced.jaxpr.out_avals])
    return [[(x, next(weak)) for x in jax.tree_util.tree_leaves(a)] for a in answers]


@pytest.mark.parametrize("k", range(len(PROGRAMS)), ids=lambda k: str(PROGRAMS[k]))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_program(kind, k):
    p = PROGRAMS[k]
    wanted = jax_answers(kind)[k]
    for found in (kind(p, spmd), spmd.jit(lambda: kind(p, spmd))()):
        leaves = spmd.tree.leaves(found)
        assert len(leaves) == len(wanted)
        for x, (y, weak) in zip(leaves, wanted, strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            scale = max(1.0, float(np.abs(y).max(initial=0)))
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=4e-6 * scale)
            assert bool(x.weak_type) == weak
