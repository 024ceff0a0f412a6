"""The trace cache: what it must not keep, and what it is kept by."""

from __future__ import annotations

import dis
import gc
import weakref

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.sharding.named import NamedSharding

X = np.ones(4, np.float32)


def counted(f):
    calls = []

    def g(*args):
        calls.append(1)
        return f(*args)

    return g, calls


def test_a_variable_that_is_bound_anew_is_seen_inside_of_transformations():
    scale = 2.0

    def body(carry, _):
        return carry * scale, None

    def total(c):
        return lax.scan(body, c, None, 2)[0]

    assert float(spmd.grad(total)(1.0)) == 4
    scale = 3.0
    assert float(spmd.grad(total)(1.0)) == 9
    assert float(spmd.grad(spmd.checkpoint(total))(1.0)) == 9


def test_a_static_value_that_has_no_hash_is_traced_each_time():
    f, calls = counted(lambda x, table: x * table[0])
    g = spmd.checkpoint(f, static_argnums=1)
    assert float(g(2.0, [3.0])) == 6 and float(g(2.0, [5.0])) == 10
    assert len(calls) == 2


def test_static_values_of_two_types_are_two():
    g = spmd.checkpoint(lambda x, n: x + (1 if n is True else 5), static_argnums=1)
    assert float(g(1.0, True)) == 2 and float(g(1.0, 1)) == 6


def test_mutable_arrays_are_read_each_time():
    ref = spmd.new_ref(snp.float32(2))

    def f(x):
        return x * ref[...]

    g = spmd.checkpoint(f)
    assert float(g(3.0)) == 6
    ref[...] = snp.float32(5)
    assert float(g(3.0)) == 15
    assert float(spmd.jit(lambda x: g(x))(3.0)) == 15


def test_a_function_of_the_mesh_in_scope_is_not_kept():
    """The constraint's spec is over another mesh in the second call."""

    def f(x):
        return lax.with_sharding_constraint(x * 2, spmd.P("a"))

    g = spmd.checkpoint(f)
    found = []
    for count in (2, 4):
        mesh = spmd.sharding.Mesh(np.array(spmd.devices()[:count]), ("a",))
        with mesh:
            found.append(spmd.jit(lambda x: g(x))(X).sharding)
    assert [s.mesh.size for s in found if isinstance(s, NamedSharding)] == [2, 4]


@pytest.mark.parametrize("use", [spmd.checkpoint, spmd.make_jaxpr, spmd.pmap])
def test_a_function_is_not_kept_alive(use):
    def f(x):
        return x + 4

    use(f)(X[:1])
    known = weakref.ref(f)
    del f
    gc.collect()
    assert known() is None


def test_the_axes_in_scope_are_part_of_what_a_jaxpr_is_kept_for():
    def f(x):
        return x * lax.axis_size("i")

    g = spmd.checkpoint(f)
    for size in (2, 3):
        out = spmd.vmap(g, axis_name="i")(np.ones(size, np.float32))
        np.testing.assert_array_equal(out, np.full(size, size))


def test_eval_shape_keeps_no_values_of_a_transformation():
    def outer(y):
        f = lambda x: x + y  # noqa: E731
        shapes = [spmd.eval_shape(f, X), spmd.eval_shape(f, X)]
        return spmd.jit(f)(X).sum() * len(shapes)

    assert float(spmd.grad(outer)(1.0)) == 8
    with spmd.checking_leaks():
        assert float(spmd.jit(outer)(1.0)) == 16


def test_code_that_writes_no_outer_name_is_not_disassembled(monkeypatch):
    def refuse(code):
        raise AssertionError(code)

    monkeypatch.setattr(dis, "get_instructions", refuse)
    total = lax.scan(lambda c, x: (c + snp.sin(x) * len(X), None), 0.0, X)[0]
    assert np.isclose(float(total), 16 * np.sin(1))
