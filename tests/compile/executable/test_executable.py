"""Executables: memory planning, donation, forwarded and constant results, fallback steps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.api.compiled import jit
from spmd.api.inspect import make_jaxpr
from spmd.base.errors import DeletedError
from spmd.compile.executable.executable import compile_jaxpr
from spmd.compile.lower.steps import Copy, Host, Launch, Loop, Multiply
from spmd.compile.passes import pipeline
from spmd.compile.schedule.memory_plan import plan_memory
from spmd.sharding.array import from_numpy

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def array(value):
    return from_numpy(np.asarray(value))


def executable(f, *args, donated=()):
    return compile_jaxpr(make_jaxpr(f)(*args), donated)


def test_lowered_programs_are_compiled_without_passes(monkeypatch):
    lowered = jit(lambda x: lax.sin(x) + 1).lower(X)

    def refuse(*_):
        raise AssertionError("a pass ran again")

    monkeypatch.setattr(pipeline, "run_passes", refuse)
    np.testing.assert_allclose(lowered.compile()(X), np.sin(X) + 1, rtol=1e-6)


# ---- memory ------------------------------------------------------------------------------------


def chain(x):
    """Products keep the values between them from being fused away."""
    for _ in range(6):
        x = lax.tanh(lax.dot_general(x, x, (((1,), (0,)), ((), ()))))
    return x


def test_dead_values_share_the_arena():
    square = np.eye(32, dtype=np.float32)
    made = executable(chain, square)
    assert max(made.frames.arenas) <= 2 * square.nbytes


def test_values_that_live_together_do_not_overlap():
    square = np.eye(16, dtype=np.float32)
    made = executable(lambda x: [chain(x), chain(lax.sin(x))], square)
    plan = plan_memory(made.schedule.steps)
    spans = [(plan.lives[b], plan.offsets[b], b) for b in plan.offsets]
    for (life, offset, buffer), (other, start, neighbour) in itertools.combinations(spans, 2):
        together = life.first < other.last and other.first < life.last
        apart = offset + buffer.nbytes <= start or start + neighbour.nbytes <= offset
        assert apart or not together, (buffer, neighbour)


def test_a_value_used_in_a_loop_lives_until_its_end():
    def f(x):
        kept = lax.dot_general(x, x, (((1,), (0,)), ((), ())))

        def body(c, _):
            return lax.dot_general(lax.add(c, kept), x, (((1,), (0,)), ((), ()))), None

        return lax.scan(body, x, None, length=5)[0]

    x = (np.eye(4) * 0.5).astype(np.float32)
    wanted = x
    for _ in range(5):
        wanted = (wanted + x @ x) @ x
    np.testing.assert_allclose(jit(f)(x), wanted, rtol=1e-5)


# ---- donation ----------------------------------------------------------------------------------


def test_a_donated_block_becomes_the_result():
    f = jit(lambda x: lax.mul(x, np.float32(2)), donate_argnums=0)
    x = jit(lambda x: lax.add(x, np.float32(1)))(array(X))
    before = x.ptr
    for _ in range(4):
        x = f(x)
        assert x.ptr == before


def test_a_donated_argument_is_deleted():
    f = jit(lambda x: lax.mul(x, np.float32(2)), donate_argnums=0)
    x = array(X)
    f(x)
    assert x.is_deleted()
    with pytest.raises(DeletedError, match="donate"):
        f(x)


def test_memory_with_other_views_is_not_overwritten():
    f = jit(lambda x: lax.mul(x, np.float32(2)), donate_argnums=0)
    for _ in range(4):
        x = jit(lambda x: lax.add(x, np.float32(1)))(array(X))
        view = np.asarray(x)
        f(x)
        np.testing.assert_array_equal(view, X + 1)


def test_a_donated_input_read_later_is_not_overwritten_early():
    def f(x):
        y = lax.dot_general(x, x, (((1,), (1,)), ((), ())))
        return lax.add(x, np.float32(1)), lax.dot_general(y, x, (((1,), (0,)), ((), ())))

    made = jit(f, donate_argnums=0)
    for _ in range(3):
        plus, product = made(jit(lambda x: lax.mul(x, np.float32(1.5)))(array(X)))
        x = X * np.float32(1.5)
        np.testing.assert_allclose(plus, x + 1)
        np.testing.assert_allclose(product, x @ x.T @ x, rtol=1e-5)


# ---- results that nothing computes -------------------------------------------------------------


def test_results_may_be_forwarded_repeated_or_constant():
    table = np.arange(3.0, dtype=np.float32)
    f = jit(lambda x: (x, lax.neg(x), lax.neg(x), table, 7))
    for given in (X, array(X), array(X)):
        same, a, b, constant, seven = f(given)
        np.testing.assert_array_equal(same, X)
        np.testing.assert_array_equal(a, -X)
        np.testing.assert_array_equal(b, -X)
        np.testing.assert_array_equal(constant, table)
        assert int(seven) == 7 and seven.dtype == np.int32


def test_a_forwarded_numpy_argument_is_copied():
    given = X.copy()
    same = jit(lambda x: x)(given)
    given[:] = 0
    np.testing.assert_array_equal(same, X)


def test_arrays_of_size_zero_are_computed():
    empty = np.zeros((0, 4), np.float32)
    outs = jit(lambda x: (lax.sin(x), lax.reduce_sum(x, (0,)), lax.reduce_sum(x, (0, 1))))(empty)
    assert outs[0].shape == (0, 4)
    np.testing.assert_array_equal(outs[1], np.zeros(4))
    assert float(outs[2]) == 0.0


# ---- steps -------------------------------------------------------------------------------------


def test_primitives_without_a_kernel_run_on_the_host():
    made = executable(lambda x: lax.cumlogsumexp(lax.neg(x), axis=1), X)
    assert [type(s) for s in made.schedule.steps] == [Launch, Host]
    np.testing.assert_allclose(made([X])[0], np.logaddexp.accumulate(-X, 1), rtol=1e-5)


def test_an_error_on_the_host_is_raised_from_the_call():
    def f(x):
        return spmd.debug.callback(lambda v: 1 / 0, x)

    if hasattr(spmd, "debug") and hasattr(spmd.debug, "callback"):
        with pytest.raises(ZeroDivisionError):
            jit(f)(X)


def test_scan_reads_and_writes_slices_in_place():
    def f(c, xs):
        return lax.scan(lambda c, x: (lax.add(c, x), lax.mul(c, x)), c, xs)

    made = executable(f, X[0], X)
    (loop,) = [s for s in made.schedule.steps if isinstance(s, Loop)]
    assert all(isinstance(s, Launch) for s in loop.body), str(made.schedule)


def test_an_updated_carry_is_not_copied_in_the_loop():
    def f(x):
        def body(i, c):
            return lax.dynamic_update_slice(c, np.ones((1, 4), np.float32), (i, 0))

        return lax.fori_loop(0, 3, body, x)

    made = executable(f, X)
    (loop,) = [s for s in made.schedule.steps if isinstance(s, Loop)]
    large = [s for s in loop.body if getattr(s, "nbytes", 0) >= X.nbytes]
    assert not large, str(made.schedule)
    np.testing.assert_array_equal(made([X])[0], np.ones((3, 4)))


def test_carried_values_may_change_places():
    def f(a, b):
        return lax.fori_loop(0, 3, lambda i, c: (c[1], lax.add(c[0], np.float32(1))), (a, b))

    a, b = jit(f)(X, -X)
    np.testing.assert_array_equal(a, -X + 1)
    np.testing.assert_array_equal(b, X + 2)


def test_equal_kernels_are_compiled_once():
    made = executable(chain, np.eye(8, dtype=np.float32))
    products = [s for s in made.schedule.steps if isinstance(s, Multiply)]
    assert len(products) == 6 and len({s.product for s in products}) == 1


def reduce_all(x):
    return lax.reduce_sum(lax.sin(x), tuple(range(x.ndim)))


@pytest.mark.parametrize(
    "shape", [(1 << 17,), (600, 700), (131101,), (3, 5, 7, 4096), (1, 1 << 16)]
)
def test_one_long_sum_is_shared_work(shape):
    x = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
    made = executable(reduce_all, x)
    assert len(made.schedule.steps) >= 2, str(made.schedule)
    np.testing.assert_allclose(made([x])[0], np.sin(x.astype(np.float64)).sum(), atol=1e-2)


def test_a_long_sum_does_not_write_its_terms():
    def f(x):
        y = lax.sin(x)
        return y, lax.reduce_sum(y, (0,))

    x = np.linspace(0, 3, 1 << 17, dtype=np.float32)
    made = executable(f, x)
    assert len(made.schedule.steps) == 3, str(made.schedule)
    y, total = made([x])
    np.testing.assert_allclose(y, np.sin(x), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(total, np.sin(x.astype(np.float64)).sum(), rtol=1e-6)


def test_a_carry_updated_by_branches_is_not_copied():
    def f(x):
        def body(i, c):
            odd = lax.rem(i, np.int32(2))
            return lax.cond(odd, lambda c: lax.add(c, np.float32(1)), lambda c: c, c)

        return lax.fori_loop(0, 5, body, x)

    made = executable(f, X)
    (loop,) = [s for s in made.schedule.steps if isinstance(s, Loop)]
    assert not [s for s in loop.body if isinstance(s, Copy) and s.nbytes >= X.nbytes]
    np.testing.assert_array_equal(made([X])[0], X + 2)


def test_carries_may_change_places_in_a_cycle():
    def f(a, b, c):
        return lax.fori_loop(0, 2, lambda i, v: (v[1], v[2], v[0]), (a, b, c))

    outs = jit(f)(X, 2 * X, 3 * X)
    for out, factor in zip(outs, (3, 1, 2), strict=True):
        np.testing.assert_array_equal(out, factor * X)
