"""Random programs mean the same however they are transformed, and what they mean in JAX."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import spmd
from spmd.testing import check_jvp, check_vjp
from tests.api.random_programs import RandomProgram
from tests.jax.compare import OURS, assert_same

SEEDS = range(5)


def close(found, wanted, rtol=2e-4, atol=2e-5):
    for x, y in zip(spmd.tree.leaves(found), spmd.tree.leaves(wanted), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)


@pytest.fixture(params=SEEDS)
def program(request):
    return RandomProgram(request.param)


@pytest.mark.parametrize("seed", range(100, 102))
def test_value_and_gradient_are_jax_s(seed):
    program = RandomProgram(seed)
    floats, index = program.arguments()
    assert_same(lambda j: j.jit(partial(program, j))(floats, index), rtol=1e-4, atol=1e-4)
    assert_same(
        lambda j: j.jit(j.grad(partial(program.loss, j)))(floats, index), rtol=2e-3, atol=2e-3
    )


def test_compiled_is_evaluated(program):
    floats, index = program.arguments()
    f = partial(program, OURS)
    wanted = f(floats, index)
    close(spmd.jit(f)(floats, index), wanted)
    with spmd.disable_jit():
        close(f(floats, index), wanted)


def test_gradients_agree_however_they_are_made(program):
    floats, index = program.arguments()
    loss = partial(program.loss, OURS)
    wanted = spmd.grad(loss)(floats, index)
    close(spmd.jit(spmd.grad(loss))(floats, index), wanted, 1e-3, 1e-4)
    close(spmd.grad(spmd.jit(loss))(floats, index), wanted, 1e-3, 1e-4)
    close(spmd.grad(spmd.checkpoint(loss))(floats, index), wanted, 1e-3, 1e-4)
    close(spmd.jit(spmd.jacfwd(loss))(floats, index), wanted, 1e-3, 1e-4)


def test_vmap_is_a_loop(program):
    rng = np.random.default_rng(program.seed)
    examples = [RandomProgram(100 * program.seed + k).arguments() for k in range(3)]
    floats, axes = {}, {}
    for name in examples[0][0]:
        columns = [example[0][name] for example in examples]
        # Any argument may be shared, and the mapped dim may be anywhere.
        shared = bool(rng.integers(3) == 0)
        at = int(rng.integers(columns[0].ndim + 1))
        floats[name] = columns[0] if shared else np.stack(columns, at)
        axes[name] = None if shared else at
    index = np.array([e[1] for e in examples])
    one = bool(rng.integers(2))
    f = spmd.jit(spmd.grad(partial(program.loss, OURS)))
    found = spmd.vmap(f, in_axes=(axes, None if one else 0))(floats, index[0] if one else index)
    for k, (given, i) in enumerate(examples):
        own = {n: examples[0][0][n] if axes[n] is None else x for n, x in given.items()}
        wanted = f(own, index[0] if one else i)
        close({n: x[k] for n, x in found.items()}, wanted, 1e-3, 1e-4)


def test_pmap_is_a_loop(program):
    count = 3
    examples = [RandomProgram(100 * program.seed + k).arguments() for k in range(count)]
    floats = {name: np.stack([e[0][name] for e in examples]) for name in examples[0][0]}
    index = np.array([e[1] for e in examples])

    def f(floats, index):
        # The mean over devices is that of the loop's results; its gradient goes to each of them.
        value, gradient = spmd.value_and_grad(partial(program.loss, OURS))(floats, index)
        return gradient, spmd.lax.pmean(value, "device")

    with spmd.config.override("num_cpu_devices", count):
        gradient, mean = spmd.pmap(f, axis_name="device")(floats, index)
    loss = spmd.jit(spmd.value_and_grad(partial(program.loss, OURS)))
    wanted = [loss(*example) for example in examples]
    for k, (_, own) in enumerate(wanted):
        close({n: x[k] for n, x in gradient.items()}, own, 1e-3, 1e-4)
    close(mean, np.full(count, np.mean([value for value, _ in wanted])), 1e-3, 1e-4)


@pytest.mark.parametrize("seed", range(8))
def test_derivatives_are_finite_differences(seed):
    program = RandomProgram(seed, length=12)
    with spmd.config.override("enable_x64", True):
        floats, index = program.arguments(np.float64)
        f = spmd.jit(lambda x: program(OURS, x, index))
        check_jvp(f, lambda p, t: spmd.jvp(f, p, t), (floats,), rtol=1e-6, atol=1e-6)
        check_vjp(f, lambda *p: spmd.vjp(f, *p), (floats,), rtol=1e-6, atol=1e-6)
        gradient = spmd.jit(spmd.grad(lambda x: program.loss(OURS, x, index)))
        check_jvp(gradient, lambda p, t: spmd.jvp(gradient, p, t), (floats,), rtol=1e-5, atol=1e-5)
        check_vjp(gradient, lambda *p: spmd.vjp(gradient, *p), (floats,), rtol=1e-5, atol=1e-5)
