"""Mutable arrays: what they are under transformations that JAX refuses, and errors."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.ref
from spmd import errors, lax
from spmd import numpy as snp

X = np.arange(3, dtype=np.float32)


def add_up(x):
    """The sum of squares, in a mutable array that a loop writes to."""
    ref = spmd.new_ref(np.zeros((), np.float32))

    def body(_, value):
        ref[...] += value * value
        return None, None

    lax.scan(body, None, x)
    return spmd.freeze(ref)


def test_a_program_has_values_only():
    text = str(spmd.make_jaxpr(add_up)(X))
    assert "scan" in text and "Ref" not in text
    assert spmd.make_jaxpr(add_up)(X).effects == frozenset()


def test_a_loop_ends_by_what_its_body_writes():
    ref = spmd.new_ref(1.0)

    def body(i):
        ref[...] = ref[...] * 2
        return i + 1

    assert int(lax.while_loop(lambda i: ref[...] < 50, body, 0)) == 6
    assert float(ref[...]) == 64


def test_any_number_of_derivatives():
    hessian = spmd.hessian(lambda x: add_up(x) ** 2)(X)
    np.testing.assert_allclose(hessian, 8 * np.outer(X, X) + 4 * (X @ X) * np.eye(3), rtol=1e-5)
    np.testing.assert_allclose(spmd.vmap(spmd.grad(add_up))(np.stack([X, -X])), [2 * X, -2 * X])


def test_devices_have_their_own():
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    out = spmd.pmap(lambda x: lax.psum(add_up(x), "i"), axis_name="i")(x)
    np.testing.assert_allclose(out, np.full(4, (x * x).sum()))
    mesh = spmd.make_mesh((4,), ("i",))
    mapped = spmd.shard_map(
        lambda x: lax.psum(add_up(x), "i"), mesh=mesh, in_specs=spmd.P("i"), out_specs=spmd.P()
    )
    np.testing.assert_allclose(mapped(x.reshape(8)), (x * x).sum())
    np.testing.assert_allclose(
        spmd.grad(lambda x: mapped(x))(snp.asarray(x.reshape(8))), 2 * x.reshape(8)
    )


def test_jit_reads_what_is_there_at_each_call():
    ref = spmd.new_ref(1.0)
    traced = []

    @spmd.jit
    def f(x):
        traced.append(x)
        return x + ref[...]

    seen = []
    for value in (1.0, 2.0, 3.0):
        ref[...] = value
        seen.append(float(f(10.0)))
    assert seen == [11, 12, 13]
    count = len(traced)
    f(10.0)
    assert len(traced) == count  # nothing is traced again


def test_jit_of_methods_with_mutable_state():
    class Counter:
        def __init__(self):
            self.count = spmd.new_ref(np.int32(0))

        def step(self, by):
            self.count[...] += by
            return self.count[...]

    counter = Counter()
    step = spmd.jit(counter.step)
    assert [int(step(np.int32(k))) for k in (1, 2, 3)] == [1, 3, 6]
    assert int(counter.count[...]) == 6


def test_disable_jit_runs_the_same_program():
    with spmd.disable_jit():
        np.testing.assert_allclose(add_up(X), 5)


def test_a_part_of_a_mutable_array():
    ref = spmd.new_ref(np.zeros((2, 3), np.float32))
    row = ref.at[1]
    row[0] = 5.0
    row.at[1:][...] = np.ones(2, np.float32)
    assert row.shape == (3,) and row.dtype == np.float32
    np.testing.assert_array_equal(ref[...], [[0, 0, 0], [5, 1, 1]])


def test_what_mutable_arrays_tell():
    ref = spmd.new_ref(X)
    assert isinstance(ref, spmd.Ref) and (ref.shape, ref.ndim, ref.size) == ((3,), 1, 3)
    assert ref.dtype == np.float32 and len(ref) == 3 and not isinstance(ref, spmd.Array)
    assert repr(ref) == "Ref([0., 1., 2.], dtype=float32)"
    assert spmd.tree.leaves({"a": ref}) == [ref]
    ref.set(np.ones(3, np.float32))
    ref.addupdate(1.0, 0)
    assert float(ref.swap(4.0, 1)) == 1
    np.testing.assert_array_equal(ref.get(), [2, 4, 1])


def test_writes_have_the_type_of_what_is_there():
    ref = spmd.new_ref(X)
    with pytest.raises(errors.ShapeError, match=r"value has shape \(2,\).*to has shape \(\)"):
        ref[0] = np.ones(2, np.float32)
    with pytest.raises(errors.ShapeError, match="nothing is broadcast"):
        ref[...] = 1.0
    with pytest.raises(ValueError, match=r"dtype int32, and the mutable array float32.*\.astype"):
        ref[0] = 1
    with pytest.raises(errors.ArgumentError, match="index 3 is out of bounds for dim 0"):
        ref[3]
    with pytest.raises(ValueError, match="is no array"):
        np.asarray(ref)
    with pytest.raises(TypeError, match="no truth value"):
        bool(ref)
    with pytest.raises(TypeError, match="sin requires"):
        snp.sin(ref)  # type: ignore[arg-type]
    with pytest.raises(errors.ArgumentError, match="needs a mutable array, got 1"):
        spmd.ref.get(1)  # type: ignore[arg-type]
    with pytest.raises(errors.ArgumentError, match="memory_space='any'"):
        spmd.new_ref(1.0, memory_space="any")


def test_a_frozen_array_is_none_any_more():
    ref = spmd.new_ref(X)
    spmd.freeze(ref)
    for use in (lambda: ref[0], lambda: spmd.freeze(ref), lambda: spmd.jit(lambda r: r[0])(ref)):
        with pytest.raises(errors.RefError, match=r"was frozen at .*test_ref\.py"):
            use()
    assert repr(ref) == "Ref(frozen, float32[3])"
    spmd.free_ref(spmd.empty_ref(spmd.ShapeDtypeStruct((2,), np.int8)))


def test_mutable_arrays_are_not_returned_and_not_aliased():
    ref = spmd.new_ref(1.0)
    for f in (spmd.jit(lambda x: spmd.new_ref(x)), spmd.jit(lambda _: ref)):
        with pytest.raises(ValueError, match=r"returned a mutable array.*can't be returned"):
            f(1.0)
    with pytest.raises(ValueError, match="passed as a and as b"):
        spmd.jit(lambda a, b: a[...] + b[...])(ref, ref)
    with pytest.raises(ValueError, match="passed as a, and the function closes over it too"):
        spmd.jit(lambda a: a[...] + ref[...])(ref)
    with pytest.raises(ValueError, match="carry holds a mutable array"):
        lax.scan(lambda c, _: (c, None), ref, None, length=2)
    with pytest.raises(errors.RefError, match="is mutable"):
        spmd.new_ref(ref)


def test_values_of_a_transformation_do_not_leave_it():
    ref = spmd.new_ref(X)

    def write(x):
        ref[0] = x * x
        return x

    for transformed in (spmd.grad(write), lambda x: spmd.vmap(write)(np.ones(3))):
        with pytest.raises(errors.RefError, match="transformation that this mutable array"):
            transformed(3.0)
    np.testing.assert_array_equal(ref[...], X)
    # A value that does not depend on what is differentiated may be written.
    assert spmd.grad(lambda x: (ref.set(9.0, 0), x * ref[1])[1])(3.0) == 1
    np.testing.assert_array_equal(ref[...], [9, 1, 2])


def test_programs_that_are_only_looked_at_leave_what_was_there():
    ref = spmd.new_ref(1.0)

    def f(x):
        ref[...] = x
        return x

    assert spmd.eval_shape(f, 2.0).shape == ()
    # The jaxpr is that of a pure function: what is left in the array is one more result.
    assert len(spmd.make_jaxpr(f)(2.0).out_avals) == 2
    closed, shape = spmd.make_jaxpr(lambda r: r[...], return_shape=True)(ref)
    assert len(closed.in_avals) == len(closed.out_avals) == 1 and shape.shape == ()
    assert float(ref[...]) == 1


def test_stages_of_calls_that_write():
    ref, other = spmd.new_ref(X), spmd.new_ref(0.0)

    def f(scale, ref, x):
        other[...] += 1
        ref[0] = x * scale
        return {"sum": ref[...].sum()}

    traced = spmd.jit(f, static_argnums=0).trace(2.0, ref, 5.0)
    assert traced.out_info["sum"].shape == () and traced.fun_name == "f"
    lowered = traced.lower()
    (first, second), _ = lowered.in_avals
    assert first.shape == X.shape and second.shape == ()
    compiled = lowered.compile()
    np.testing.assert_array_equal(ref[...], X)
    assert float(compiled(ref, 5.0)["sum"]) == 10 + X[1:].sum()
    np.testing.assert_array_equal(ref[...], [10, *X[1:]])
    compiled(X, 5.0)  # an array in its place is not written to
    assert float(other[...]) == 2
    with pytest.raises(errors.ArgumentError, match="compiled for arguments"):
        compiled(ref)


def test_a_failed_trace_leaves_what_was_there():
    ref = spmd.new_ref(X)

    @spmd.jit
    def f(x):
        ref[0] = x
        raise KeyError("on purpose")

    with pytest.raises(KeyError):
        f(5.0)
    np.testing.assert_array_equal(ref[...], X)
