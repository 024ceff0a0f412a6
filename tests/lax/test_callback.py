"""Callbacks: as often as said, in order, with the right values, under every transformation."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.base.config import config
from spmd.errors import ArgumentError, DtypeError, PytreeError, RefusedError, ShapeError


def like(x):
    return spmd.ShapeDtypeStruct(snp.shape(x), snp.asarray(x).dtype)


def host_sin(x, method=None):
    return spmd.pure_callback(np.sin, like(x), x, vmap_method=method)


def recorder():
    """A list, and a callback that appends its argument's value to it."""
    seen = []
    return seen, lambda x: seen.append(np.asarray(x).tolist())


# ---- pure_callback -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.float16])
@pytest.mark.parametrize("shape", [(), (3,), (0, 2)])
def test_pure_value(dtype, shape):
    with config.override("enable_x64", True):
        x = np.full(shape, 0.5, dtype)
        for f in (host_sin, spmd.jit(host_sin)):
            out = f(snp.asarray(x))
            assert out.dtype == dtype
            np.testing.assert_array_equal(np.asarray(out), np.sin(x))


def test_pure_pytrees_and_fixed_arguments():
    def split(tree, scale, *, mode):
        assert mode == "both" and isinstance(tree["x"], spmd.Array)
        return {"a": tree["x"] * scale, "b": tree["x"].sum()}

    shapes = {"a": spmd.ShapeDtypeStruct((3,), np.float32), "b": np.float32(0)}
    f = spmd.jit(lambda x: spmd.pure_callback(split, shapes, {"x": x}, np.float32(2), mode="both"))
    out = f(snp.arange(3.0))
    np.testing.assert_array_equal(np.asarray(out["a"]), [0, 2, 4])
    assert out["b"] == 3.0


def test_pure_arguments_may_be_kept():
    kept = []

    def keep(x):
        kept.append(x)
        return x + 1

    f = spmd.jit(lambda x: spmd.pure_callback(keep, like(x), x * 2) - x)
    np.testing.assert_array_equal(np.asarray(f(snp.ones(4))), np.full(4, 2.0))
    f(snp.full(4, 7.0))
    np.testing.assert_array_equal(kept[0], np.full(4, 2.0))  # memory of its own


def test_unneeded_pure_call_is_dropped_and_equal_ones_are_merged():
    calls = []

    def count(x):
        calls.append(1)
        return x

    spmd.jit(lambda x: (spmd.pure_callback(count, like(x), x), x)[1])(1.0)
    assert not calls
    spmd.jit(lambda x: sum(spmd.pure_callback(count, like(x), x) for _ in range(3)))(1.0)
    assert len(calls) == 1


METHODS = ["sequential", "sequential_unrolled", "expand_dims", "broadcast_all", "legacy_vectorized"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("axes", [(0, None), (None, 1), (1, 0)])
def test_pure_vmap(method, axes):
    def f(x, y):
        if method == "legacy_vectorized":
            y = snp.broadcast_to(y, (3,)) + 0 * x
            x = x + 0 * y
        shape = spmd.ShapeDtypeStruct((3,), np.float32)
        return spmd.pure_callback(lambda x, y: x * 2 + y, shape, x, y, vmap_method=method)

    x, y = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((3, 2), np.float32)
    x = x if axes[0] == 0 else x.T if axes[0] == 1 else x[0]
    y = y if axes[1] == 1 else y.T if axes[1] == 0 else y[:, 0]
    wanted = [
        np.take(x, k, axes[0]) * 2 + np.take(y, k, axes[1])
        if None not in axes
        else (x if axes[0] is None else np.take(x, k, axes[0])) * 2
        + (y if axes[1] is None else np.take(y, k, axes[1]))
        for k in range(2)
    ]
    for g in (spmd.vmap(f, axes), spmd.jit(spmd.vmap(f, axes))):
        np.testing.assert_array_equal(np.asarray(g(x, y)), np.stack(wanted))


@pytest.mark.parametrize("method, shape", [("expand_dims", (1, 3)), ("broadcast_all", (2, 3))])
def test_pure_vmap_shapes(method, shape):
    seen = []

    def f(x, y):
        seen.append((x.shape, y.shape))
        return x + y

    def g(x, y):
        return spmd.pure_callback(f, like(x), x, y, vmap_method=method)

    spmd.vmap(g, (0, None))(snp.ones((2, 3)), snp.ones(3))
    assert seen == [((2, 3), shape)]


def test_pure_nested_and_empty_vmap():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for method in ("sequential", "broadcast_all"):
        f = spmd.vmap(spmd.vmap(lambda x, m=method: host_sin(x, m)))
        np.testing.assert_array_equal(np.asarray(f(x)), np.sin(x))
        assert spmd.vmap(lambda x, m=method: host_sin(x, m))(snp.ones((0, 2))).shape == (0, 2)


def test_pure_refusals():
    with pytest.raises(RefusedError, match="custom_jvp"):
        spmd.grad(host_sin)(1.0)
    with pytest.raises(RefusedError, match="vmap_method"):
        spmd.vmap(host_sin)(snp.ones(2))
    with pytest.raises(ArgumentError, match="vmap_method='twice'"):
        spmd.pure_callback(np.sin, like(1.0), 1.0, vmap_method="twice")
    with pytest.raises(ArgumentError, match="64-bit types are off"):
        spmd.pure_callback(np.sin, np.zeros(2), 1.0)
    with pytest.raises(ArgumentError, match="leaf 0 is 'x'"):
        spmd.pure_callback(np.sin, "x", 1.0)


@pytest.mark.parametrize(
    "returned, error",
    [
        (np.ones(2, np.float32), ShapeError),
        (np.ones((), np.int32), DtypeError),
        ((np.float32(1), np.float32(2)), PytreeError),
    ],
)
def test_pure_wrong_result(returned, error):
    for wrap in (spmd.jit, lambda f: f):
        with pytest.raises(error, match="result_shape_dtypes says"):
            wrap(lambda x: spmd.pure_callback(lambda _: returned, like(1.0), x))(1.0)


def test_pure_with_custom_derivative():
    @spmd.custom_jvp
    def f(x):
        return host_sin(x, "sequential")

    f.defjvp(lambda primals, tangents: (f(primals[0]), snp.cos(primals[0]) * tangents[0]))
    assert spmd.grad(f)(0.3) == pytest.approx(np.cos(0.3), rel=1e-6)
    second = spmd.vmap(spmd.grad(spmd.grad(spmd.jit(f))))(snp.array([0.3, 0.4]))
    np.testing.assert_allclose(np.asarray(second), -np.sin([0.3, 0.4]), rtol=1e-6)


def test_callback_may_use_spmd():
    w = snp.ones((300, 300))

    def inner(x):
        return spmd.grad(lambda x: snp.sum(snp.sin(x) @ w))(snp.asarray(x))

    f = spmd.jit(lambda x: spmd.pure_callback(inner, like(w), x + 0) + x @ w)
    x = np.full((300, 300), 0.1, np.float32)
    np.testing.assert_allclose(
        np.asarray(spmd.vmap(f, axis_size=1, in_axes=None, out_axes=None)(x)),
        np.cos(x) * 300 + x @ np.asarray(w),
        rtol=1e-4,
    )


# ---- effects -----------------------------------------------------------------------------------


def test_effects_are_never_dropped_and_keep_their_order():
    seen, record = recorder()

    @spmd.jit
    def f(x):
        y = snp.sin(x)
        spmd.debug.callback(record, x)
        spmd.io_callback(record, None, x + 1)
        spmd.debug.callback(record, x)
        spmd.io_callback(lambda v: (seen.append("last"), v)[1], like(x), y * 0)
        return x * 3

    assert f(1.0) == 3.0
    assert seen == [1.0, 2.0, 1.0, "last"]


def test_io_callback_result():
    counter = iter(range(100))

    def draw():
        return np.int32(next(counter))

    def f():
        kind = spmd.ShapeDtypeStruct((), np.int32)
        a = spmd.io_callback(draw, kind, ordered=True)
        b = spmd.io_callback(draw, kind, ordered=True)
        return b - a

    assert f() == 1
    assert spmd.jit(f)() == 1
    assert next(counter) == 4


def test_io_callback_under_vmap():
    seen, record = recorder()

    def f(x, ordered=False):
        spmd.io_callback(record, None, x, ordered=ordered)

    spmd.vmap(f)(snp.arange(3))
    spmd.jit(spmd.vmap(spmd.vmap(f)))(snp.arange(4).reshape(2, 2))
    assert seen == [0, 1, 2, 0, 1, 2, 3]
    with pytest.raises(ArgumentError, match="cannot be vmapped"):
        spmd.vmap(lambda x: f(x, ordered=True))(snp.arange(3))
    with pytest.raises(RefusedError, match="no derivative"):
        spmd.jvp(lambda x: spmd.io_callback(np.sin, like(1.0), x), (1.0,), (1.0,))


@pytest.mark.parametrize("wrap", [lambda f: f, spmd.jit, lambda f: spmd.grad(spmd.jit(f))])
def test_debug_callback_in_control_flow(wrap):
    seen, record = recorder()

    def step(c, k):
        lax.cond(k % 2 == 0, lambda: spmd.debug.callback(record, c), lambda: None)
        return c + k, None

    f = wrap(lambda x: lax.scan(step, x, snp.arange(4.0))[0])
    f(10.0)
    assert seen == [10.0, 11.0]
    seen.clear()
    wrap(lambda x: lax.fori_loop(0, 3, lambda k, c: (spmd.debug.callback(record, k), c)[1], x))(1.0)
    assert seen == [0, 1, 2]


def test_debug_callback_in_while_under_vmap():
    seen, record = recorder()

    def body(c):
        spmd.debug.callback(record, c)
        return c + 1

    spmd.vmap(lambda x: lax.while_loop(lambda c: c < 3, body, x))(snp.array([1, 2]))
    assert seen[:2] == [1, 2] and seen[2] == 2


def test_loop_without_a_carry_keeps_its_order():
    seen, record = recorder()
    n = 50
    spmd.jit(lambda x: lax.map(lambda v: (spmd.debug.callback(record, v), v)[1], x))(snp.arange(n))
    assert seen == list(range(n))


def test_debug_callback_shows_primals():
    seen, record = recorder()

    def f(x):
        spmd.debug.callback(record, x)
        return x * x

    assert spmd.grad(spmd.grad(f))(3.0) == 2.0
    assert set(seen) == {3.0}
    seen.clear()
    spmd.jvp(f, (3.0,), (1.0,))
    spmd.linearize(f, 3.0)
    spmd.hessian(f)(3.0)
    assert set(seen) == {3.0}


def test_checkpoint_makes_the_call_again():
    seen, record = recorder()

    def f(x):
        y = snp.sin(x)
        spmd.debug.callback(record, x)
        return snp.sin(y)

    spmd.grad(spmd.checkpoint(f))(3.0)
    assert seen == [3.0, 3.0]


def test_debug_callback_on_a_tangent():
    seen, record = recorder()

    @spmd.custom_jvp
    def f(x):
        return x

    @f.defjvp
    def _(primals, tangents):
        spmd.debug.callback(record, tangents[0])
        return primals[0], tangents[0]

    spmd.jvp(f, (1.0,), (5.0,))
    assert seen == [5.0]
    with pytest.raises(RefusedError, match="forward mode"):
        spmd.grad(f)(1.0)


# ---- devices -----------------------------------------------------------------------------------


def program(record):
    def f(x):
        total = lax.psum(x, "i")
        spmd.debug.callback(lambda t: record((spmd.debug.here().index("i"), float(t))), total)
        spmd.io_callback(lambda v: record(float(v)), None, x)
        return spmd.pure_callback(lambda v: v + 1, like(x), x)

    return f


WANTED = [[k, 6.0] for k in range(4)] + [0.0, 1.0, 2.0, 3.0]


def test_pmap():
    seen = []
    f = program(lambda x: seen.append(list(x) if isinstance(x, tuple) else x))
    out = spmd.pmap(f, axis_name="i")(snp.arange(4.0))
    np.testing.assert_array_equal(np.asarray(out), np.arange(4) + 1)
    assert seen == WANTED
    seen.clear()
    with spmd.disable_jit():
        spmd.pmap(f, axis_name="i")(snp.arange(4.0))
    assert seen == WANTED


def test_shard_map_on_two_axes():
    seen = []
    mesh = spmd.make_mesh((2, 2), ("a", "b"))

    def f(x):
        here = spmd.debug.here
        spmd.debug.callback(lambda v: seen.append((here().axes, here().device.id, int(v))), x[0, 0])
        return x

    spec = spmd.P("a", "b")
    spmd.jit(spmd.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec))(
        snp.arange(4).reshape(2, 2)
    )
    assert seen == [((("a", k // 2), ("b", k % 2)), k, k) for k in range(4)]


def test_axis_of_vmap():
    seen = []

    def f(x):
        spmd.debug.callback(lambda v: seen.append((spmd.debug.here().index("n"), int(v))), x)

    spmd.vmap(f, axis_name="n")(snp.array([5, 6]))
    assert seen == [(0, 5), (1, 6)]
    assert spmd.debug.here().axes == ()
    with pytest.raises(ArgumentError, match="no axis 'i'"):
        spmd.debug.here().index("i")


# ---- exceptions --------------------------------------------------------------------------------


class Ours(Exception):
    pass


def fail(x):
    if x > 1:
        raise Ours("too much")
    return x


@pytest.mark.parametrize(
    "call",
    [
        lambda x: spmd.pure_callback(fail, like(x), x),
        lambda x: spmd.io_callback(fail, like(x), x),
        lambda x: spmd.debug.callback(fail, x),
    ],
    ids=["pure", "io", "debug"],
)
def test_an_exception_arrives_with_the_users_line(call):
    def f(x):
        out = call(x)
        return x if out is None else out

    runs = [
        lambda: f(snp.float32(2)),
        lambda: spmd.jit(f)(snp.float32(2)),
        lambda: spmd.pmap(f, axis_name="i")(snp.arange(4.0)),
    ]
    for run in runs:
        with pytest.raises(Ours, match="too much") as caught:
            run()
        (note,) = caught.value.__notes__
        assert "test_callback.py" in note
    assert "(i=2)" in note
    spmd.jit(f)(snp.float32(0))  # the program is whole


def test_a_token_waits_for_others_and_orders_values():
    def f(x):
        y, token = lax.optimization_barrier((x + 1, lax.create_token()))
        both = lax.after_all(token, lax.create_token(), lax.after_all())
        return lax.optimization_barrier((y, both))[0] * 2

    assert float(spmd.jit(f)(2.0)) == 6
    assert float(spmd.grad(f)(2.0)) == 2
    names = [eqn.primitive.name for eqn in spmd.make_jaxpr(f)(2.0).eqns]
    assert names.count("optimization_barrier") == 6  # none joins another


def test_a_value_is_no_token():
    with pytest.raises(ArgumentError, match=r"after_all: operand 1 is float32\[2\], and no token"):
        lax.after_all(lax.create_token(), np.ones(2, np.float32))


def test_what_a_sink_takes_is_computed():
    def f(x):
        lax.dce_sink({"a": spmd.numpy.sin(x)})
        return x * 2

    assert float(spmd.jit(f)(1.0)) == 2
    assert float(spmd.grad(f)(1.0)) == 2
    assert spmd.vmap(f)(np.arange(3.0)).tolist() == [0, 2, 4]
    shown = spmd.debug.show(f)(np.float32(1.0))
    assert "kernel sin+mul" in str(shown)


def test_shapes_and_numbers_become_values():
    assert lax.shape_as_value(()).shape == (0,)
    assert lax.shape_as_value((4, 5)).tolist() == [4, 5]
    assert isinstance(spmd.jit(lambda: lax.stage(2.5))(), spmd.Array)
    assert lax.stage(2.5).weak_type
