"""pmap: which dims are mapped, what comes back, on which devices, and maps inside maps."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.errors import DeviceError

X = np.arange(8, dtype=np.float32).reshape(4, 2)
Params = namedtuple("Params", ["w", "b"])


def same_as_vmap(f: Any, *args: Any, **options: Any) -> Any:
    """pmap's result, which must be vmap's with the same options."""
    found = spmd.pmap(f, axis_name="i", **options)(*args)
    expected = spmd.vmap(f, axis_name="i", **options)(*args)
    with spmd.disable_jit():
        by_op = spmd.pmap(f, axis_name="i", **options)(*args)
    for other in (expected, by_op):
        assert spmd.tree.structure(found) == spmd.tree.structure(other)
        for a, b in zip(spmd.tree.leaves(found), spmd.tree.leaves(other), strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-6)
    return found


# ---- axes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_axes", [0, -2, (0,), [0]], ids=str)
def test_rows(in_axes: Any):
    same_as_vmap(lambda x: x * lax.psum(x.sum(), "i"), X, in_axes=in_axes)


@pytest.mark.parametrize("in_axes", [1, -1])
@pytest.mark.parametrize("out_axes", [0, 1, -1])
def test_columns(in_axes: int, out_axes: int):
    same_as_vmap(lambda x: x + lax.axis_index("i"), X.T, in_axes=in_axes, out_axes=out_axes)


def test_shared_arguments_and_results():
    f = lambda w, x: (w * x, lax.psum(x, "i") + w)  # noqa: E731
    out, total = same_as_vmap(f, np.float32(3), X, in_axes=(None, 0), out_axes=(0, None))
    assert total.shape == (2,)
    assert out.shape == X.shape


def test_trees_of_axes():
    params = Params(w=X, b={"u": np.float32(1), "v": X.T})

    def f(p: Params, k: list[Any]) -> Any:
        return {"a": p.w + p.b["u"] * k[0], "b": (p.b["v"], None)}

    axes = (Params(w=0, b={"u": None, "v": 1}), None)
    same_as_vmap(f, params, [2.0], in_axes=axes, out_axes={"a": 0, "b": (1, None)})


def test_no_mapped_argument_but_a_size():
    f = lambda x: x + lax.axis_index("i")  # noqa: E731
    same_as_vmap(f, 3.0, in_axes=None, axis_size=4)


def test_keyword_arguments_are_mapped_over_dim_0():
    f = spmd.pmap(lambda x, *, scale: x * scale)
    np.testing.assert_array_equal(f(X, scale=X), X * X)


def test_static_arguments():
    traced = []

    def f(x: Any, power: int, name: str) -> Any:
        traced.append(name)
        return x**power if name == "power" else x

    mapped = spmd.pmap(f, static_broadcasted_argnums=(1, 2))
    for _ in range(3):
        np.testing.assert_array_equal(mapped(X, 2, "power"), X**2)
        np.testing.assert_array_equal(mapped(X, 2, "none"), X)
    assert traced == ["power", "none"]


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "float16", "complex64"])
def test_dtypes(dtype: str):
    x = X.astype(dtype)
    same_as_vmap(lambda x: (x, x == x[0], snp.sum(x)), x)


def test_keys_are_split_over_devices():
    keys = spmd.random.split(spmd.random.PRNGKey(0), 4)
    found = spmd.pmap(lambda key: spmd.random.normal(key, (3,)))(keys)
    expected = np.stack([np.asarray(spmd.random.normal(k, (3,))) for k in np.asarray(keys)])
    np.testing.assert_array_equal(found, expected)
    typed = spmd.random.split(spmd.random.key(0), 4)
    again = spmd.pmap(lambda key: spmd.random.normal(key, (3,)))(typed)
    np.testing.assert_array_equal(again, expected)


def test_empty_and_constant_results():
    def f(x: Any) -> Any:
        return x[:0], 3, np.arange(2), None, ()

    empty, number, constant, nothing, unit = spmd.pmap(f)(X)
    assert empty.shape == (4, 0)
    np.testing.assert_array_equal(number, [3] * 4)
    np.testing.assert_array_equal(constant, [[0, 1]] * 4)
    assert nothing is None and unit == ()


# ---- tracing and devices -----------------------------------------------------------------------


def test_one_trace_for_equal_types():
    count = []
    f = spmd.pmap(lambda x: count.append(1) or x + 1)
    for x in (X, X + 1, f(X)):
        f(x)
    assert len(count) == 1
    f(X[:2])
    f(X.astype(np.int32))
    assert len(count) == 3


def test_results_stay_on_their_devices():
    y = spmd.pmap(lambda x: x + 1)(X)
    assert [s.device for s in y.addressable_shards] == spmd.devices()[:4]
    assert y.addressable_shards[2].index == (slice(2, 3), slice(None))
    chosen = spmd.devices()[::-1][:2]
    z = spmd.pmap(lambda x: x, devices=chosen)(X[:2])
    assert [s.device for s in z.addressable_shards] == chosen
    np.testing.assert_array_equal(z, X[:2])


def test_committed_arrays_are_not_moved_silently():
    there = spmd.pmap(lambda x: x, devices=spmd.devices()[2:4])(X[:2])
    double = spmd.pmap(lambda x: x * 2, devices=spmd.devices()[:2])
    double(X[:2]), double(X[:2])  # also where a closure makes calls
    for elsewhere in there, spmd.device_put(X[:2], spmd.devices()[3]):
        with pytest.raises(DeviceError, match=r"x \(f32\[2,2\]\) is committed to .*device_put\(x"):
            double(elsewhere)
    rows = spmd.NamedSharding(spmd.make_mesh((2,), ("i",)), spmd.P("i"))
    here = double(spmd.device_put(there, rows))
    assert [s.device for s in here.addressable_shards] == spmd.devices()[:2]
    np.testing.assert_array_equal(here, 2 * X[:2])


def test_fewer_rows_than_devices():
    y = spmd.pmap(lambda x: x - lax.pmean(x, "i"), axis_name="i")(X[:3])
    np.testing.assert_allclose(y, X[:3] - X[:3].mean(0))


def test_closed_over_arrays_are_shared():
    w = spmd.device_put(np.float32(2))
    sharded = spmd.pmap(lambda x: x)(X)
    f = spmd.pmap(lambda x: x * w + sharded.sum(), axis_name="i")
    np.testing.assert_array_equal(f(X), X * 2 + X.sum())


def test_closed_over_tracers():
    def loss(w: Any) -> Any:
        return spmd.pmap(lambda x: snp.sin(w * x).sum(), axis_name="i")(X).sum()

    expected = spmd.grad(lambda w: snp.sin(w * X).sum())(np.float32(0.3))
    np.testing.assert_allclose(spmd.grad(loss)(np.float32(0.3)), expected, rtol=1e-5)
    np.testing.assert_allclose(spmd.jit(spmd.grad(loss))(0.3), expected, rtol=1e-5)


# ---- maps inside maps --------------------------------------------------------------------------


def test_nested():
    x = X.reshape(2, 2, 2)

    def inner(x: Any) -> Any:
        index = lax.axis_index("i") * 10 + lax.axis_index("j")
        return x - lax.pmean(x, ("i", "j")), lax.psum(x, "j"), lax.psum(x, "i"), index

    mapped = spmd.pmap(spmd.pmap(inner, axis_name="j"), axis_name="i")
    expected = spmd.vmap(spmd.vmap(inner, axis_name="j"), axis_name="i")(x)
    with spmd.disable_jit():
        by_op = mapped(x)
    for a, b, c in zip(mapped(x), expected, by_op, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
        np.testing.assert_allclose(c, b, rtol=1e-6)


def test_nested_with_work_around_and_in_loops():
    x = X.reshape(2, 2, 2)

    def outer(x: Any) -> Any:
        y = spmd.pmap(lambda x: x * lax.axis_index("j") + lax.psum(x, "i"), axis_name="j")(x + 1)
        step = spmd.pmap(lambda c: snp.sin(c) + lax.pmean(c, "j"), axis_name="j")
        return lax.fori_loop(0, 3, lambda k, c: step(c), y) * lax.psum(y.sum(), "i")

    def twin(x: Any) -> Any:
        y = spmd.vmap(lambda x: x * lax.axis_index("j") + lax.psum(x, "i"), axis_name="j")(x + 1)
        step = spmd.vmap(lambda c: snp.sin(c) + lax.pmean(c, "j"), axis_name="j")
        return lax.fori_loop(0, 3, lambda k, c: step(c), y) * lax.psum(y.sum(), "i")

    expected = spmd.vmap(twin, axis_name="i")(x)
    np.testing.assert_allclose(spmd.pmap(outer, axis_name="i")(x), expected, rtol=1e-5)


def test_gradient_of_nested():
    x = X.reshape(2, 2, 2)

    def inner(x: Any) -> Any:
        return snp.sin(x) * lax.psum(x, ("i", "j"))

    def total(outer: Any, nested: Any) -> Any:
        mapped = outer(nested(inner, axis_name="j"), axis_name="i")
        return spmd.grad(lambda x: mapped(x).sum())(x)

    np.testing.assert_allclose(
        total(spmd.pmap, spmd.pmap), total(spmd.vmap, spmd.vmap), rtol=1e-4, atol=1e-5
    )
