"""Programs on emulated GPUs: control flow, operations outside of jit, meshes, callbacks."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import spmd
from spmd import P, export, lax
from spmd import numpy as snp
from spmd.base.config import config
from spmd.base.errors import ArgumentError, DeviceError

pytestmark = pytest.mark.usefixtures("gpus")

X = np.linspace(-2, 2, 24, dtype=np.float32).reshape(4, 6)


def on_cpu(function, *args):
    with config.override("platform", "cpu"):
        return spmd.tree_util.tree_map(np.asarray, spmd.jit(function)(*args))


def assert_as_on_cpu(function, *args):
    found = spmd.jit(function)(*args)
    leaves = spmd.tree_util.tree_leaves
    for x, y in zip(leaves(found), leaves(on_cpu(function, *args)), strict=True):
        assert x.device.platform == "gpu"
        np.testing.assert_allclose(x, y, 1e-5, 1e-5)


def test_devices_have_two_names():
    assert spmd.devices("gpu") == spmd.devices("cuda") == spmd.devices()
    assert [str(d) for d in spmd.devices()] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert repr(spmd.devices()[3]) == "CudaDevice(id=3)"


def test_programs_are_told_of_gpus_as_jax_tells_them():
    """JAX calls the platform "gpu", and CUDA by its name where a program depends on whose it is."""
    gpu = spmd.devices()[1]
    assert spmd.default_backend() == gpu.platform == gpu.client.platform == "gpu"
    assert gpu.device_kind == "emulated GPU 1" and "cuda" in gpu.client.platform_version
    for name in ("gpu", "cuda"):
        with config.override("platform", name):
            assert spmd.default_backend() == "gpu"
            assert export.default_export_platform() == "cuda"
        assert spmd.jit(lambda x: x + 1, backend=name)(2.0).device.platform == "gpu"
    assert pickle.loads(pickle.dumps(gpu)) is gpu

    def chosen(x):
        return lax.platform_dependent(x, cpu=snp.sin, cuda=lambda x: x + 5, default=snp.cos)

    assert spmd.jit(chosen)(2.0) == chosen(2.0) == 7
    with pytest.raises(ArgumentError, match="gpu= is the name of several platforms; use cuda="):
        lax.platform_dependent(2.0, gpu=snp.sin, default=snp.cos)
    with pytest.raises(ArgumentError, match="default= must be a function, got 3"):
        lax.platform_dependent(2.0, cuda=snp.sin, default=3)


def test_what_is_exported_for_gpus_runs_there():
    kind = spmd.ShapeDtypeStruct((3,), np.float32)
    for name in ("gpu", "cuda"):
        exported = export.export(spmd.jit(lambda x: x * 2), platforms=(name,))(kind)
        assert exported.platforms == ("cuda",)
        np.testing.assert_array_equal(exported.call(np.ones(3, np.float32)), [2, 2, 2])
        with (
            config.override("platform", "cpu"),
            pytest.raises(ArgumentError, match=r"exported for the platforms \('cuda',\)"),
        ):
            exported.call(np.ones(3, np.float32))


def test_programs_are_lowered_for_where_their_arguments_are():
    traced = spmd.jit(lambda x: x + 1).trace(np.ones(3, np.float32))
    for name in ("gpu", "cuda"):
        assert traced.lower(lowering_platforms=(name,)).compile()(np.ones(3, np.float32))[0] == 2
    with pytest.raises(ArgumentError, match="where their arguments are, here 'cuda'"):
        traced.lower(lowering_platforms=("cpu",))


def test_without_a_driver_there_are_none():
    with config.override("cuda_driver", "cupy"):
        for name in ("gpu", "cuda"):
            with pytest.raises(RuntimeError, match="'cuda' is not available here: "):
                spmd.devices(name)


def layers(w, x):
    def layer(h, w):
        return snp.tanh(h @ w), h.sum()

    h, sums = lax.scan(layer, x, w)
    return ((h - h.mean(-1, keepdims=True)) ** 2).sum() + sums.sum()


CONTROL = {
    "while": lambda x: lax.while_loop(lambda s: s.sum() < 90, lambda s: s * 1.5 + 1, x),
    "fori": lambda x: lax.fori_loop(0, 5, lambda k, s: s * 0.5 + k, x),
    "scan": lambda x: lax.scan(lambda c, row: (c + row, c * row), x[0], x),
    "cond": lambda x: lax.cond(x.sum() > 1, snp.cos, snp.sin, x),
    "switch": lambda x: lax.switch(x.shape[0] + (x[0, 0] > 0), [snp.sin] * 3 + [snp.exp], x),
    "cond in a loop": lambda x: lax.fori_loop(
        0, 4, lambda k, s: lax.cond(k % 2 == 0, lambda s: s + 1, lambda s: s * 2, s), x
    ),
    "sort": lambda x: snp.sort(x, axis=0),
    "long reduction": lambda x: snp.tile(x, 1000).sum(1),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONTROL)
def test_control_flow(name):
    assert_as_on_cpu(CONTROL[name], X)


@pytest.mark.gpu
def test_a_gradient_through_a_loop():
    w = np.random.default_rng(0).standard_normal((3, 6, 6)).astype(np.float32)
    assert_as_on_cpu(spmd.value_and_grad(layers, (0, 1)), w, X)


@pytest.mark.gpu
def test_operations_outside_of_jit():
    x = snp.asarray(X)
    y = (snp.sin(x)[1:] * 2 + x[:-1]).sum(axis=0).at[2].set(7)
    assert y.device == spmd.devices()[0]
    wanted = (np.sin(X)[1:] * 2 + X[:-1]).sum(axis=0)
    wanted[2] = 7
    np.testing.assert_allclose(y, wanted, 1e-6)


def test_results_lie_where_operands_are_committed():
    x = spmd.device_put(X, spmd.devices()[2])
    assert {(x + 1).device, spmd.jit(snp.sin)(x).device} == {spmd.devices()[2]}
    host = spmd.device_put(x, spmd.devices("cpu")[0])
    assert (host * 2).device.platform == "cpu"
    np.testing.assert_array_equal(host * 2, X * 2)


def test_operands_on_two_devices_are_an_error():
    x, y = (spmd.device_put(X, d) for d in spmd.devices()[1:3])
    with pytest.raises(DeviceError, match=r"operand 0 \(f32\[4,6\]\) to cuda:1 and operand 1"):
        x + y
    with pytest.raises(DeviceError, match="committed to different devices"):
        spmd.jit(snp.add)(x, spmd.device_put(X, spmd.devices("cpu")[0]))


@pytest.mark.gpu
def test_donated_memory_is_given_back():
    x = snp.asarray(X) + 1
    y = spmd.jit(lambda x: x * 2, donate_argnums=0)(x)
    assert x.is_deleted()
    np.testing.assert_allclose(y, (X + 1) * 2)


def bytes_in_use(device) -> int:
    stats = device.memory_stats()
    assert stats is not None
    return stats["bytes_in_use"]


def test_memory_is_counted():
    device = spmd.devices()[3]
    before = bytes_in_use(device)
    x = spmd.device_put(np.zeros((64, 64), np.float32), device)
    y = x + 1
    y.block_until_ready()
    assert bytes_in_use(device) == before + 2 * x.nbytes
    del x, y
    assert bytes_in_use(device) == before
    stats = device.memory_stats() or {}
    assert before + 2 * 64 * 64 * 4 <= stats["peak_bytes_in_use"] <= stats["bytes_limit"]
    assert spmd.devices("cpu")[0].memory_stats() is None


@pytest.mark.gpu
def test_callbacks_get_values_of_the_device(capfd):
    def call(x):
        spmd.debug.print("sum {}", x.sum())
        return spmd.pure_callback(np.cumsum, spmd.ShapeDtypeStruct((6,), np.float32), x[0] * 2)

    np.testing.assert_allclose(spmd.jit(call)(X), np.cumsum(X[0] * 2), 1e-6)
    spmd.effects_barrier()
    assert "sum " in capfd.readouterr().out


@pytest.mark.gpu
def test_an_exception_in_a_callback_is_raised():
    def refuse(x):
        raise KeyError("no such row")

    with pytest.raises(Exception, match="no such row"):
        spmd.jit(lambda x: spmd.pure_callback(refuse, x, x))(X)


# ---- several devices ---------------------------------------------------------------------------

COLLECTIVES = {
    "psum": lambda x: lax.psum(x, "i"),
    "pmax": lambda x: lax.pmax(x, "i"),
    "all_gather": lambda x: lax.all_gather(x, "i"),
    "psum_scatter": lambda x: lax.psum_scatter(snp.tile(x[:4], 2)[:4], "i", tiled=True),
    "all_to_all": lambda x: lax.all_to_all(x[:4], "i", 0, 0),
    "ppermute": lambda x: lax.ppermute(x, "i", [(0, 1), (1, 3), (3, 2)]),
    "in a loop": lambda x: lax.fori_loop(0, 3, lambda k, s: lax.pmean(s * 2, "i") + k, x),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_between_devices(name):
    function, rows = COLLECTIVES[name], X.reshape(4, 6)
    found = spmd.pmap(function, axis_name="i")(rows)
    assert {d.platform for d in found.devices()} == {"gpu"}
    wanted = on_cpu(spmd.vmap(function, axis_name="i"), rows)
    np.testing.assert_allclose(found, wanted, 1e-5)


def test_sharded_arrays_under_plain_jit():
    mesh = spmd.make_mesh((2, 2), ("x", "y"), axis_types=(spmd.sharding.AxisType.Auto,) * 2)
    x = spmd.device_put(X, spmd.NamedSharding(mesh, P("x")))
    w = spmd.device_put(X.T.copy(), spmd.NamedSharding(mesh, P(None, "y")))

    def loss(w, x):
        return (snp.tanh(x @ w) ** 2).sum()

    value, gradient = spmd.jit(spmd.value_and_grad(loss))(w, x)
    assert gradient.sharding.spec == P(None, "y")
    wanted = on_cpu(spmd.value_and_grad(loss), np.asarray(w), np.asarray(x))
    np.testing.assert_allclose(value, wanted[0], 1e-5)
    np.testing.assert_allclose(gradient, wanted[1], 1e-4, 1e-5)
    np.testing.assert_allclose(x[1], X[1])
    np.testing.assert_allclose((x + 1).sum(axis=0), (X + 1).sum(axis=0), 1e-5)
