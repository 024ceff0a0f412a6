"""The array API standard: who arrays say they are, and DLPack. Its functions: `array_api/`.

SciPy and scikit-learn take arrays by the standard only where that is switched on before they are
imported, so their functions run in a process of their own.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

import spmd
from spmd import errors
from spmd import numpy as snp


def test_arrays_know_their_namespace():
    x = snp.zeros(2)
    assert x.__array_namespace__() is snp
    assert x.__array_namespace__(api_version="2023.12") is snp
    assert spmd.jit(lambda x: x.__array_namespace__().sum(x))(x) == 0
    for version in ("2099.12", "new"):
        with pytest.raises(errors.ArgumentError, match="api_version"):
            x.__array_namespace__(api_version=version)


def test_the_namespace_tells_what_it_can():
    info = snp.__array_namespace_info__()
    assert info.capabilities()["data-dependent shapes"] is True
    assert info.default_device() in info.devices()
    assert info.default_dtypes()["indexing"] == np.int32
    assert "float64" not in info.dtypes() and "float64" not in info.dtypes(kind="real floating")
    assert set(info.dtypes(kind=("bool", "signed integer"))) == {"bool", "int8", "int16", "int32"}
    with spmd.enable_x64(True):
        assert info.default_dtypes()["real floating"] == np.float64
        assert set(info.dtypes(kind="complex floating")) == {"complex64", "complex128"}
    with pytest.raises(errors.ArgumentError, match="kind='float'"):
        info.dtypes(kind="float")


# ---- DLPack ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.uint32, np.float16, np.float32])
def test_memory_goes_out_and_values_come_in(dtype):
    x = snp.arange(6).astype(dtype).reshape(2, 3)
    out = np.from_dlpack(x)
    np.testing.assert_array_equal(out, np.asarray(x))
    assert np.shares_memory(out, np.asarray(x)) and not out.flags.writeable
    back = snp.from_dlpack(np.asarray(x).copy())
    assert back.dtype == x.dtype
    np.testing.assert_array_equal(back, x)


def test_arrays_and_torch_exchange_values():
    torch = pytest.importorskip("torch", reason="the other side of the exchange is PyTorch")
    t = torch.from_dlpack(snp.arange(4.0))
    np.testing.assert_array_equal(t.numpy(), np.arange(4))
    np.testing.assert_array_equal(snp.from_dlpack(t + 1), np.arange(4) + 1)


def test_what_comes_in_is_shared_or_a_copy():
    a = np.zeros(4096, np.float32)
    for copy in (None, False):
        x = spmd.dlpack.from_dlpack(a, copy=copy)
        assert x.unsafe_buffer_pointer() == a.ctypes.data
        assert not np.asarray(x).flags.writeable and a.flags.writeable
    kept = snp.from_dlpack(a, copy=True)
    a[:] = 7
    np.testing.assert_array_equal(kept, np.zeros(4096))
    np.testing.assert_array_equal(x + 1, np.full(4096, 8))  # the memory is the other library's
    for obstacle in (a[1:], a[::2], np.zeros(3)):
        assert snp.from_dlpack(obstacle).unsafe_buffer_pointer() != obstacle.ctypes.data


def test_a_donated_array_of_another_library_is_not_written_over():
    a = np.zeros(4096, np.float32)
    spmd.jit(lambda x: x + 1, donate_argnums=0)(snp.from_dlpack(a))
    np.testing.assert_array_equal(a, 0)


def test_the_buffer_protocol_gives_memory_to_read():
    x = snp.arange(6.0).reshape(2, 3)
    view = x.__buffer__(0)
    assert view.readonly and view.format == "f" and view.shape == (2, 3)
    assert np.shares_memory(np.asarray(view), np.asarray(x))
    if sys.version_info >= (3, 12):
        assert bytes(memoryview(x)) == x.tobytes()


def test_addresses_of_arrays_with_shards_are_refused():
    x = spmd.device_put(
        snp.arange(8.0),
        spmd.NamedSharding(spmd.make_mesh((4,), ("i",)), spmd.P("i")),
    )
    with pytest.raises(errors.DeviceError, match="4 devices"):
        x.unsafe_buffer_pointer()
    gone = snp.arange(3.0)
    gone.delete()
    with pytest.raises(errors.DeletedError):
        gone.unsafe_buffer_pointer()


def test_dlpack_refuses_what_cannot_be():
    x = snp.zeros(2)
    assert x.__dlpack_device__() == (1, 0)
    with pytest.raises(errors.ArgumentError, match="stream"):
        x.__dlpack__(stream=1)
    with pytest.raises(errors.ArgumentError, match="dl_device"):
        x.__dlpack__(dl_device=(2, 0))
    with pytest.raises(errors.DtypeError, match="bfloat16"):
        x.astype(snp.bfloat16).__dlpack__()
    with pytest.raises(BufferError, match="read-only"):
        x.__dlpack__(copy=False)
    with pytest.raises(errors.ArgumentError, match="float64 becomes float32"):
        snp.from_dlpack(np.zeros(2), copy=False)
    with pytest.raises(errors.ArgumentError, match="one after the other"):
        snp.from_dlpack(np.zeros((2, 2), np.float32).T, copy=False)
    with pytest.raises(errors.ArgumentError, match="no multiple of 16"):
        snp.from_dlpack(np.zeros(4, np.float32)[1:], copy=False)
    with pytest.raises(errors.ArgumentError, match="list has no __dlpack__"):
        snp.from_dlpack([1, 2])
    with pytest.raises(errors.ArgumentError, match="traced"):
        spmd.jit(snp.from_dlpack)(x)


# ---- other libraries ---------------------------------------------------------------------------

PROGRAM = """
import json, sys
import numpy as np
import scipy.fft, scipy.integrate, scipy.special, scipy.stats
import spmd, spmd.numpy as snp

plain = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
x, y = snp.asarray(plain), plain
calls = {
    "softmax": lambda x: scipy.special.softmax(x, axis=1),
    "skew": lambda x: scipy.stats.skew(x, axis=0),
    "trapezoid": lambda x: scipy.integrate.trapezoid(x, axis=0),
    "fft": lambda x: scipy.fft.fft(x, axis=0),
}
if sys.argv[1] == "sklearn":
    import sklearn
    from sklearn.decomposition import PCA
    from sklearn.metrics import accuracy_score, mean_squared_error
    sklearn.set_config(array_api_dispatch=True)
    calls = {
        "pca": lambda x: abs(PCA(2, svd_solver="full").fit_transform(x)),
        "mean squared error": lambda x: mean_squared_error(x[:, 0], x[:, 1]),
        "accuracy": lambda x: accuracy_score(x[:, 0] > 0, x[:, 1] > 0),
    }
for name, call in calls.items():
    found, expected = call(x), call(y)
    assert isinstance(found, (spmd.Array, float)), (name, type(found))
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5, err_msg=name)
print(json.dumps(list(calls)))
"""


@pytest.mark.parametrize("library", ["scipy", "sklearn"])
def test_functions_of_other_libraries_take_our_arrays(library, run_python):
    pytest.importorskip(library, reason=f"calls functions of {library}")
    done = run_python(["-W", "ignore", "-c", PROGRAM, library], env={"SCIPY_ARRAY_API": "1"})
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) >= 3


def test_einsum_path_takes_lists_of_labels(from_jax):
    a, b = np.ones((2, 3)), np.ones((3, 4))
    calls = [(a, [0, 1], b, [1, 2]), (a, [0, 1], b, [1, 2], [2, 0]), (a @ a.T, [0, 0], [0])]

    def ask():
        import jax

        return [[list(step) for step in jax.numpy.einsum_path(*c)[0]] for c in calls]

    assert [[list(step) for step in snp.einsum_path(*c)[0]] for c in calls] == from_jax(ask)
