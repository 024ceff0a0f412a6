"""Memory of GPUs to and from other libraries: no copy, no wait of the host, and in order."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import spmd
from spmd import errors
from spmd import numpy as snp
from spmd.base.config import config
from spmd.base.errors import CudaError
from spmd.compile.cuda import capsules
from spmd.compile.cuda.driver import driver
from tests.compile.cuda.other_library import Library, TheirArray

pytestmark = pytest.mark.usefixtures("gpus")

X = np.linspace(-2, 2, 24, dtype=np.float32).reshape(4, 6)
DTYPES = [np.bool_, np.int8, np.uint32, np.float16, np.float32, np.complex64]
IN = {"dlpack": snp.from_dlpack, "interface": snp.asarray}
OUT = {"dlpack": Library.from_dlpack, "interface": Library.from_array_interface}


def address_of(x) -> int:
    return x.unsafe_buffer_pointer()


# ---- out ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("protocol", OUT)
def test_arrays_go_out(protocol, dtype):
    x = snp.asarray(X + 2).astype(dtype)
    found = OUT[protocol](Library(), x)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, (X + 2).astype(dtype))


@pytest.mark.parametrize("protocol", OUT)
def test_memory_goes_out_without_a_copy_or_a_wait(protocol, monkeypatch):
    library, x = Library(), snp.sin(snp.asarray(X))
    gpu = driver()
    monkeypatch.setattr(gpu, "synchronize", None)
    monkeypatch.setattr(gpu, "allocate", None)
    monkeypatch.setattr(gpu, "copy", None)
    np.testing.assert_allclose(OUT[protocol](library, x), np.sin(X), 1e-5, 1e-6)
    assert x.__cuda_array_interface__["data"] == (address_of(x), True)


@pytest.mark.parametrize("protocol", OUT)
def test_a_library_that_does_not_wait_reads_too_early(protocol):
    """The order of streams is what makes the other tests pass: without it, each run is told."""
    for _ in range(8):
        x = snp.sin(snp.asarray(X) + 1) * 2
        with pytest.raises(CudaError, match="an event is missing"):
            OUT[protocol](Library(waits=False), x)
            x.block_until_ready()
        del x
        with suppress(CudaError):  # the other of the two, where it came later
            driver().synchronize(0)


def test_values_that_are_on_the_host_move_first():
    x = spmd.device_put(X, spmd.devices()[2])
    assert x.__dlpack_device__() == (2, 2)
    np.testing.assert_array_equal(Library(2).from_dlpack(x), X)
    np.testing.assert_array_equal(Library(2).from_array_interface(x), X)
    assert driver().device_of(address_of(x)) == 2


def test_a_copy_is_other_memory():
    x = snp.asarray(X) + 1
    plain = capsules.read(x.__dlpack__(max_version=(1, 0)))
    copied = capsules.read(x.__dlpack__(max_version=(1, 0), copy=True))
    old = capsules.read(x.__dlpack__())  # one that can't be told that the memory is read-only
    assert plain.address == address_of(x) not in (copied.address, old.address)
    library = Library()
    driver().synchronize(0)
    for each in copied, old:
        np.testing.assert_array_equal(library.read(each.address, each.shape, each.dtype), X + 1)


def test_arrays_of_a_gpu_go_to_the_host_if_asked():
    x = snp.asarray(X) * 2
    np.testing.assert_array_equal(np.from_dlpack(x, device="cpu"), X * 2)
    with pytest.raises(BufferError, match="values of a GPU are copied"):
        x.__dlpack__(dl_device=(1, 0), copy=False, max_version=(1, 0))


def test_bfloat16_and_empty_arrays_go_out():
    x = snp.asarray(X).astype(snp.bfloat16)
    found = Library().from_dlpack(x)
    np.testing.assert_array_equal(found, np.asarray(x))
    assert not hasattr(x, "__cuda_array_interface__")
    empty = snp.zeros((0, 3)) + 1
    assert empty.__cuda_array_interface__["data"] == (0, True)
    assert snp.from_dlpack(empty).shape == (0, 3)
    assert snp.from_dlpack(snp.asarray(1.5) + 0) == 1.5


def test_memory_that_went_out_outlives_the_array():
    library, x = Library(), snp.asarray(X) + 3
    lent = capsules.read(x.__dlpack__(stream=library.stream, max_version=(1, 0)))
    del x
    np.testing.assert_array_equal(library.read(lent.address, lent.shape, lent.dtype), X + 3)


def test_numpy_refuses_memory_of_a_gpu():
    """It lets go of the capsule while it raises: the error stays as it is."""
    x = snp.asarray(X) + 1
    with pytest.raises((RuntimeError, BufferError), match=r"(?i)unsupported device"):
        np.from_dlpack(x)
    assert not capsules.given


def test_a_capsule_gives_its_memory_back():
    gc.collect()  # arrays of earlier tests
    before = driver().memory_in_use(0)[0]
    x = snp.asarray(X) + 1
    unused, taken = x.__dlpack__(max_version=(1, 0)), x.__dlpack__()
    lent = capsules.read(taken)
    assert driver().memory_in_use(0)[0] > before
    del x, unused, taken, lent
    gc.collect()
    assert driver().memory_in_use(0)[0] == before and not capsules.given


# ---- in ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("protocol", IN)
def test_arrays_come_in(protocol, dtype):
    theirs = Library(1).array(X.astype(dtype))
    x = IN[protocol](theirs)
    assert (x.device, x.dtype, address_of(x)) == (spmd.devices()[1], dtype, theirs.address)
    np.testing.assert_array_equal(x, X.astype(dtype))
    np.testing.assert_array_equal(x[1:] * 2 if dtype != np.bool_ else x[1:], _twice(dtype))


def _twice(dtype):
    rows = X.astype(dtype)[1:]
    return rows if dtype == np.bool_ else rows * dtype(2)


@pytest.mark.parametrize("protocol", IN)
def test_memory_comes_in_without_a_copy_or_a_wait(protocol, monkeypatch):
    theirs, gpu = Library().array(X), driver()
    for name in ("synchronize", "allocate", "copy"):
        monkeypatch.setattr(gpu, name, None)
    x = IN[protocol](theirs)
    monkeypatch.undo()
    np.testing.assert_allclose(snp.cos(x), np.cos(X), 1e-5, 1e-6)


@pytest.mark.parametrize("protocol", IN)
def test_values_of_a_library_that_does_not_wait_come_too_early(protocol):
    for _ in range(8):
        library = Library(waits=False)
        y = IN[protocol](library.array(X)) + 0
        with pytest.raises(CudaError, match="an event is missing"):
            np.asarray(y)
            library.synchronize()
        with suppress(CudaError):  # the other of the two, where it came later
            driver().synchronize(0)


@pytest.mark.parametrize("protocol", IN)
def test_their_memory_is_kept_until_work_that_reads_it_is_done(protocol):
    for _ in range(4):
        theirs = Library().array(X)
        memory = weakref.ref(theirs.memory)
        y = snp.tanh(IN[protocol](theirs)) + 1  # not done yet, and nobody else has the memory
        del theirs
        gc.collect()
        np.testing.assert_allclose(y, np.tanh(X) + 1, 1e-5, 1e-6)
    del y
    snp.sin(3.0).block_until_ready()
    assert memory() is None


def test_a_donated_array_of_another_library_is_not_written_over():
    theirs = Library().array(X)
    x = snp.from_dlpack(theirs)
    spmd.jit(lambda x: x + 1, donate_argnums=0)(x).block_until_ready()
    assert x.is_deleted()
    np.testing.assert_array_equal(snp.from_dlpack(theirs), X)


def test_a_copy_is_made_where_it_is_asked_for():
    theirs = Library().array(X)
    for made in (snp.array(theirs), snp.from_dlpack(theirs, copy=True)):
        assert address_of(made) != theirs.address
        np.testing.assert_array_equal(made, X)
    assert address_of(spmd.dlpack.from_dlpack(theirs, copy=False)) == theirs.address


OBSTACLES = {
    "not one after the other": lambda library: library.array(X.T),
    "float64 becomes float32": lambda library: library.array(X.astype(np.float64)),
    "no multiple of 16": lambda library: library.array(X, first=4),
    "backwards": lambda library: _reversed(library.array(X)),
}


def _reversed(x: TheirArray) -> TheirArray:
    x.address += 5 * x.strides[1]
    x.strides, x.source = (x.strides[0], -x.strides[1]), x.source[:, ::-1]
    return x


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_what_cannot_be_shared_is_copied(obstacle):
    theirs = OBSTACLES[obstacle](Library(3))
    x = snp.asarray(theirs)
    assert x.device == spmd.devices()[3] and x.dtype == np.float32
    np.testing.assert_array_equal(x, theirs.source)
    if obstacle == "no multiple of 16":
        with pytest.raises(errors.ArgumentError, match=f"copy=False, .*{obstacle}"):
            snp.from_dlpack(theirs, copy=False)


def test_arrays_come_in_where_the_cpu_is_the_default():
    theirs = Library(1).array(X)
    with config.override("platform", "cpu"):
        x = snp.from_dlpack(theirs)
        assert str(x.device) == "cuda:1"
        np.testing.assert_array_equal(x, X)
        host = snp.from_dlpack(theirs, device=spmd.devices()[0])
        np.testing.assert_array_equal(host + 1, X + 1)


class WithoutVersions(TheirArray):
    """An array of a library from before version 1.0 of the protocol."""

    def __dlpack__(self, *, stream):  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().__dlpack__(stream=stream)


def test_older_libraries_are_understood():
    theirs = Library().array(X)
    theirs.__class__ = WithoutVersions
    x = snp.from_dlpack(theirs)
    assert address_of(x) == theirs.address
    np.testing.assert_array_equal(x, X)


# ---- what cannot be ----------------------------------------------------------------------------


def test_sharing_refuses_what_cannot_be():
    x, theirs = snp.asarray(X) + 1, Library().array(X)
    wrong: tuple[Any, ...] = (0, -2, "first")
    for stream in wrong:
        with pytest.raises(errors.ArgumentError, match="must be the handle of a stream"):
            x.__dlpack__(stream=stream)
    with pytest.raises(errors.ArgumentError, match=r"dl_device=\(2, 1\): the array is on GPU 0"):
        x.__dlpack__(dl_device=(2, 1))
    with pytest.raises(BufferError, match="read-only"):
        x.__dlpack__(copy=False)
    split = spmd.device_put(X, spmd.NamedSharding(spmd.make_mesh((2,), ("i",)), spmd.P("i")))
    with pytest.raises(BufferError, match="2 devices"):
        split.__dlpack_device__()
    assert not hasattr(split, "__cuda_array_interface__")
    assert not hasattr(spmd.device_put(X, spmd.devices("cpu")[0]), "__cuda_array_interface__")
    with pytest.raises(AttributeError, match=r"only an array on one GPU has it; .* cuda:0, cuda:1"):
        _ = split.__cuda_array_interface__
    theirs.library.device = 7
    with pytest.raises(errors.DeviceError, match="TheirArray is on GPU 7, and this process has 4"):
        snp.from_dlpack(theirs)


def test_a_wrong_interface_is_told():
    class Wrong:
        def __init__(self, **given):
            self.__cuda_array_interface__ = {"shape": (2,), "typestr": "<f4", "version": 3, **given}

    address = address_of(snp.asarray(X) + 1)
    with pytest.raises(errors.ArgumentError, match="of Wrong lacks 'data'"):
        snp.asarray(Wrong())
    with pytest.raises(errors.ArgumentError, match="no memory of a GPU"):
        snp.asarray(Wrong(data=(X.ctypes.data, False)))
    with pytest.raises(errors.ArgumentError, match="has a mask"):
        snp.asarray(Wrong(data=(address, False), mask=X))
    with pytest.raises(errors.DtypeError, match="elements of dtype"):
        snp.asarray(Wrong(data=(address, False), typestr="<M8[s]"))
