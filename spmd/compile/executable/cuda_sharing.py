"""Memory of GPUs that spmd and other libraries share: DLPack and `__cuda_array_interface__`.

The one idea: no library waits on the host. Each puts its work into a stream of its own, and the
stream of the reader waits for that of the writer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.aligned_copy import why_copied
from spmd.base.device import Device, local_devices
from spmd.base.errors import ArgumentError, DeviceError, DtypeError
from spmd.base.source import current_source
from spmd.compile.cuda import capsules
from spmd.compile.cuda.capsules import Lent
from spmd.compile.cuda.driver import driver
from spmd.compile.executable.backend import pointer
from spmd.compile.executable.cuda_backend import BACKEND, CudaMemory, uploaded
from spmd.core.aval import ShapedArray
from spmd.sharding.array import Array, from_memory
from spmd.sharding.named import SingleDeviceSharding

# CUDA's name of its default stream, which the protocols mean where they name none.
_DEFAULT_STREAM = 1

# ---- out ---------------------------------------------------------------------------------------


def capsule(x: Array, stream: Any, versioned: bool, copy: bool | None) -> Any:
    """A DLPack capsule of an array on one GPU, whose values are there for work of `stream`."""
    if stream is not None and (type(stream) is not int or stream < -1 or stream == 0):
        raise ArgumentError(
            f"__dlpack__: stream={stream!r} must be the handle of a stream as an int, 1 or 2 for "
            "CUDA's default streams, -1 if nothing is to wait, or None, which is 1"
        )
    memory, gpu = _memory(x), driver()
    if copy:
        memory = _copied(memory)
    if stream != -1:
        then = _DEFAULT_STREAM if stream is None else stream
        gpu.order(memory.device, gpu.stream(memory.device), then)
    address = memory.address if x.nbytes else 0
    return capsules.make(address, memory, memory.device, x.shape, x.dtype, versioned)


def array_interface(x: Array) -> dict[str, Any]:
    """`__cuda_array_interface__`, version 3, of an array on one GPU: readers wait for `stream`.

    The memory is that of the array, which must be kept as long as it is used.
    """
    if x.dtype.kind == "V":
        raise AttributeError(
            f"__cuda_array_interface__: it has no {x.dtype.name}; DLPack has bfloat16"
        )
    memory = _memory(x)
    return {
        "shape": x.shape,
        "typestr": x.dtype.str,
        "data": (memory.address if x.nbytes else 0, True),
        "version": 3,
        "strides": None,
        "stream": driver().stream(memory.device),
    }


def _memory(x: Array) -> CudaMemory:
    """The memory of an array on one GPU; values that are still on the host move."""
    (shard,) = x.shards or (x,)
    return BACKEND.operand(shard, shard.aval, shard.device)


def _copied(memory: CudaMemory) -> CudaMemory:
    made = CudaMemory(memory.driver, memory.device, memory.nbytes)
    if memory.nbytes:
        memory.driver.copy(memory.device, made.address, memory.address, memory.nbytes)
    return made


# ---- in ----------------------------------------------------------------------------------------


def from_dlpack(x: Any, number: int, copy: bool | None) -> Array:
    """An array over the memory of one that says by DLPack that it is on GPU `number`."""
    gpu, _ = driver(), _device(number, x)
    stream = gpu.stream(number)
    try:
        given = x.__dlpack__(stream=stream, max_version=capsules.VERSION)
    except TypeError:  # a library from before version 1.0
        given = x.__dlpack__(stream=stream)
    return _array(capsules.read(given), x, "from_dlpack", copy)


def from_array_interface(x: Any, copy: bool | None) -> Array:
    """An array over the memory of one with `__cuda_array_interface__`."""
    given = x.__cuda_array_interface__
    try:
        dtype, shape = np.dtype(given["typestr"]), tuple(given["shape"])
        address, strides = given["data"][0] or 0, given.get("strides")
    except (KeyError, TypeError, IndexError) as error:
        raise ArgumentError(
            f"array: __cuda_array_interface__ of {type(x).__name__} lacks {error}"
        ) from None
    if given.get("mask") is not None:
        raise ArgumentError(f"array: {type(x).__name__} has a mask; fill its elements first")
    if dtype.kind not in "biufc":
        raise DtypeError(f"array: {type(x).__name__} on a GPU has elements of dtype {dtype}")
    gpu = driver()
    number = gpu.device_of(address) if address else 0
    if number is None:
        raise ArgumentError(
            f"array: __cuda_array_interface__ of {type(x).__name__} gives {address:#x}, which is "
            "no memory of a GPU"
        )
    _device(number, x)
    stream = given.get("stream")
    if stream is not None:
        gpu.order(number, stream, gpu.stream(number))
    strides = capsules.row_major(shape, dtype.itemsize) if strides is None else tuple(strides)
    return _array(Lent(address, number, shape, strides, dtype, x), x, "array", copy)


def _device(number: int, x: Any) -> Device:
    """A GPU of this process by its number."""
    here = local_devices(backend="cuda")
    for device in here:
        if device.local_hardware_id == number:
            return device
    raise DeviceError(
        f"{current_source()}: the {type(x).__name__} is on GPU {number}, and this process has "
        f"{len(here)}: {', '.join(map(str, here))}"
    )


def _array(lent: Lent, x: Any, what: str, copy: bool | None) -> Array:
    rows = capsules.row_major(lent.shape, lent.dtype.itemsize)
    steps = zip(lent.shape, lent.strides, rows, strict=True)
    in_order = 0 in lent.shape or all(s == r or n == 1 for n, s, r in steps)
    obstacle = why_copied(lent.dtype, in_order, lent.address)
    if copy is False and obstacle is not None:
        raise ArgumentError(
            f"{current_source()}: {what}: copy=False, but the result can't share the memory: "
            f"{obstacle}. Leave copy None"
        )
    aval = ShapedArray(lent.shape, dtypes.canonical(lent.dtype))
    home = SingleDeviceSharding(_device(lent.device, x))
    if 0 in lent.shape:
        return from_memory(0, CudaMemory(driver(), lent.device, 0), aval, home)
    if obstacle is not None:
        memory = _moved(lent, aval)
    else:
        memory = CudaMemory(driver(), lent.device, aval.nbytes, lent.address, lent.lender)
        memory = _copied(memory) if copy else memory
    return from_memory(0, memory, aval, home)


def _moved(lent: Lent, aval: ShapedArray) -> CudaMemory:
    """The elements one after the other and in the dtype that they have here, by the host."""
    ends = [(n - 1) * s for n, s in zip(lent.shape, lent.strides, strict=True)]
    first = sum(min(0, end) for end in ends)
    last = sum(max(0, end) for end in ends) + lent.dtype.itemsize
    span, gpu = np.empty(last - first, np.uint8), driver()
    gpu.copy(lent.device, pointer(span), lent.address + first, span.nbytes)
    gpu.synchronize(lent.device)
    values = np.ndarray(lent.shape, lent.dtype, span.data, -first, lent.strides)
    return uploaded(np.ascontiguousarray(values, aval.dtype), lent.device)
