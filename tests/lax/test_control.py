"""The functions of loops and branches are traced once outside of transformations.

They are traced again when a name in their code stands for something else.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import jax
import numpy as np
import pytest

import spmd
from spmd import lax

XS = np.arange(3, dtype=np.float32)
ONE = np.float32(1)
OFFSET = 1.0

LOOPS = {
    "while_loop": lambda f: lax.while_loop(lambda c: c < 9, f, ONE),
    "cond": lambda f: lax.cond(ONE > 0, f, lambda c: c, ONE),
    "switch": lambda f: lax.switch(np.int32(1), [lambda c: c, f], ONE),
}


@pytest.mark.parametrize("m", [lax, jax.lax], ids=["spmd", "jax"])
def test_a_body_is_traced_once_for_its_types(m):
    traced = []

    def body(carry, x):
        traced.append(x.dtype)
        return carry + 1, x

    for _ in range(3):
        m.scan(body, ONE, XS)
    assert len(traced) == 1
    m.scan(body, ONE, XS.astype(np.int32))
    assert len(traced) == 2


class Body:
    """A body that is an object."""

    def __init__(self, step):
        self.step, self.traced = step, []

    def __call__(self, carry, x):
        self.traced.append(x)
        return carry + self.step, x


@pytest.mark.parametrize("m", [lax, jax.lax], ids=["spmd", "jax"])
def test_a_body_that_is_an_object_is_traced_once(m):
    body = Body(2)
    for _ in range(3):
        assert m.scan(body, ONE, XS)[0] == ONE + 2 * len(XS)
    assert len(body.traced) == 1


def test_an_object_with_another_attribute_is_traced_again():
    body = Body(2)
    lax.scan(body, ONE, XS)
    body.step = 3
    assert lax.scan(body, ONE, XS)[0] == ONE + 3 * len(XS)
    assert len(body.traced) == 2


@pytest.mark.parametrize("name", LOOPS)
def test_the_functions_of_users_are_kept(name):
    traced = []

    def f(c):
        traced.append(c)
        return c + 4

    first = LOOPS[name](f)
    assert np.array_equal(first, LOOPS[name](f)) and len(traced) == 1


@pytest.mark.parametrize("bound", [3, spmd.numpy.int32(3)])
def test_the_body_of_a_fori_loop_is_kept(bound):
    traced = []

    def f(i, c):
        traced.append(i)
        return c + i

    assert [float(lax.fori_loop(0, bound, f, ONE)) for _ in range(3)] == [4, 4, 4]
    assert len(traced) == 1
    assert float(spmd.jit(lambda n: lax.fori_loop(0, n, f, ONE))(4)) == 7


def test_a_variable_that_is_bound_anew_is_seen(monkeypatch):
    scale = 2.0

    def body(carry, _):
        return carry * scale + OFFSET, None

    assert float(lax.scan(body, ONE, None, 1)[0]) == 3
    scale = 5.0
    assert float(lax.scan(body, ONE, None, 1)[0]) == 6
    monkeypatch.setitem(globals(), "OFFSET", 10.0)
    assert float(lax.scan(body, ONE, None, 1)[0]) == 15


def test_a_count_of_its_own_does_not_trace_a_body_again():
    count = 0

    def body(carry, _):
        nonlocal count
        count += 1
        return carry + 1, None

    for _ in range(3):
        lax.scan(body, ONE, None, 2)
    assert count == 1


def test_a_mutable_array_is_read_each_time():
    ref = spmd.new_ref(spmd.numpy.float32(1))

    def body(carry, _):
        return carry + ref[...], None

    assert float(lax.scan(body, ONE, None, 1)[0]) == 2
    ref[...] = spmd.numpy.float32(7)
    assert float(lax.scan(body, ONE, None, 1)[0]) == 8


def test_values_of_a_transformation_are_not_kept():
    def outer(y):
        def body(carry, _):
            return carry * y, None

        return [lax.scan(body, y, None, 1)[0] for _ in range(2)][-1]

    assert float(spmd.grad(outer)(3.0)) == 6
    assert float(spmd.grad(outer)(4.0)) == 8
    with spmd.checking_leaks():
        assert float(spmd.jit(outer)(3.0)) == 9


def test_a_setting_is_part_of_what_a_jaxpr_is_kept_for():
    context = spmd.make_user_context(1)

    def body(carry, _):
        return carry + context.value, None

    assert float(lax.scan(body, ONE, None, 1)[0]) == 2
    with context(4):
        assert float(lax.scan(body, ONE, None, 1)[0]) == 5


def test_a_function_is_not_kept_alive():
    def f(c):
        return c + 4

    lax.while_loop(lambda c: c < 9, f, ONE)
    gone = weakref.ref(f)
    del f
    gc.collect()
    assert gone() is None


def test_a_function_that_names_itself_is_freed():
    def looped() -> Any:
        def body(c):
            assert body
            return c + 1.0

        lax.while_loop(lambda c: c < 3.0, body, 0.0)
        return weakref.ref(body)

    found = looped()
    gc.collect()
    assert found() is None


def test_a_result_that_all_branches_pass_on_stays_shared_under_vmap():
    y = np.float32(3)

    def f(p, x, y):
        return lax.cond(p, lambda x, y: (x + 1, y), lambda x, y: (x, y), x, y)

    x = np.arange(2, dtype=np.float32)
    outs = spmd.vmap(f, in_axes=(0, 0, None), out_axes=(0, None))(x > 0, x, y)
    np.testing.assert_array_equal(outs[0], [0, 2])
    np.testing.assert_array_equal(outs[1], y)
    swapped = lambda p, y: lax.cond(p, lambda y: y, lambda y: -y, y)  # noqa: E731
    with pytest.raises(ValueError, match="out_axes is None"):
        spmd.vmap(swapped, in_axes=(0, None), out_axes=None)(x > 0, y)
    given = spmd.vmap(spmd.grad(lambda y, p: sum(f(p, y * 2, y))), in_axes=(None, 0))(y, x > 0)
    np.testing.assert_array_equal(given, [3, 3])
