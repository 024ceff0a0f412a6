"""The functions that the Python array API standard adds: namespace information, and DLPack.

Libraries that take arrays of any kind call `x.__array_namespace__()` and go on with what that
returns: `spmd.numpy`. DLPack hands an array's memory to another library, or takes one's.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.aligned_copy import why_copied
from spmd.base.device import devices as all_devices
from spmd.base.errors import ArgumentError, DtypeError
from spmd.base.source import current_source
from spmd.compile.lazy import cuda_sharing
from spmd.core.aval import typeof
from spmd.core.trace import Tracer
from spmd.numpy.creation import asarray, placed
from spmd.sharding.array import Array, from_numpy, in_scope

API_VERSION = "2025.12"
# A device of kind 1 of the DLPack protocol: memory that the CPU reads. Kind 2 are GPUs of CUDA.
_DLPACK_CPU = (1, 0)
_DLPACK_CUDA = 2

# ---- what the namespace is ---------------------------------------------------------------------

_KINDS = {
    "bool": ("bool",),
    "signed integer": ("int8", "int16", "int32", "int64"),
    "unsigned integer": ("uint8", "uint16", "uint32", "uint64"),
    "real floating": ("float32", "float64"),
    "complex floating": ("complex64", "complex128"),
}
_KINDS["integral"] = _KINDS["signed integer"] + _KINDS["unsigned integer"]
_KINDS["numeric"] = _KINDS["integral"] + _KINDS["real floating"] + _KINDS["complex floating"]
_DEFAULTS = {
    "real floating": "float64",
    "complex floating": "complex128",
    "integral": "int64",
    "indexing": "int64",
}


class NamespaceInfo:
    """The result of `__array_namespace_info__()`: devices, dtypes and abilities."""

    def capabilities(self) -> dict[str, Any]:
        """The abilities; shapes may depend on data outside of transformations only."""
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}

    def default_device(self) -> Any:
        """The device of new arrays: the first of this process."""
        return all_devices()[0]

    def devices(self) -> list[Any]:
        """All devices of the job."""
        return list(all_devices())

    def default_dtypes(self, *, device: Any = None) -> dict[str, np.dtype]:
        """The dtypes of new arrays: of 32 bits, or with `enable_x64` of 64."""
        return {kind: dtypes.canonical(name) for kind, name in _DEFAULTS.items()}

    def dtypes(self, *, device: Any = None, kind: Any = None) -> dict[str, np.dtype]:
        """The dtypes of the standard that arrays have, of one kind or several."""
        kinds = (kind,) if isinstance(kind, str) else tuple(_KINDS) if kind is None else tuple(kind)
        unknown = [k for k in kinds if k not in _KINDS]
        if unknown:
            raise ArgumentError(
                f"{current_source()}: dtypes: kind={kind!r} must be of {', '.join(_KINDS)}"
            )
        names = dict.fromkeys(name for k in kinds for name in _KINDS[k])
        return {n: np.dtype(n) for n in names if dtypes.canonical(n) == np.dtype(n)}


def __array_namespace_info__() -> NamespaceInfo:
    """Devices, dtypes and abilities of this namespace, as the array API standard asks.

    >>> snp.__array_namespace_info__().default_dtypes()["real floating"]
    dtype('float32')
    """
    return NamespaceInfo()


def namespace_of(self: Any, *, api_version: str | None = None) -> Any:
    """The namespace with the functions for this array: `spmd.numpy`."""
    if api_version is not None and not _known(api_version):
        raise ArgumentError(
            f"{current_source()}: __array_namespace__: api_version={api_version!r} must be of the "
            f"form 'YYYY.MM' and not after {API_VERSION}"
        )
    return sys.modules["spmd.numpy"]


def _known(version: str) -> bool:
    return len(version) == 7 and version[4] == "." and "2021.12" <= version <= API_VERSION


# ---- DLPack ------------------------------------------------------------------------------------


def to_dlpack(
    self: Any,
    *,
    stream: int | None = None,
    max_version: tuple[int, int] | None = None,
    dl_device: tuple[int, int] | None = None,
    copy: bool | None = None,
) -> Any:
    """A capsule with the array's memory, which the other library must only read.

    The capsule says so; a consumer that cannot be told (`max_version` before 1.0) gets a copy.
    PyTorch does not look at what it is told: a tensor made of an array must not be written to.

    Of an array on a GPU the capsule has that memory, which work of `stream`, a handle of CUDA, may
    read: 1 and 2 are the default streams, None means 1, and -1 that nothing waits. `dl_device` may
    be (1, 0) for a copy on the host.
    """
    device = dlpack_device(self)
    on_gpu = device[0] == _DLPACK_CUDA and (dl_device is None or dl_device == device)
    if stream is not None and device == _DLPACK_CPU:
        raise ArgumentError("__dlpack__: stream must be None for arrays on the CPU")
    if not on_gpu and dl_device not in (None, _DLPACK_CPU):
        where = "the CPU, (1, 0)" if device == _DLPACK_CPU else f"GPU {device[1]}, {device}"
        raise ArgumentError(f"__dlpack__: dl_device={dl_device}: the array is on {where}")
    old = max_version is None or max_version[0] < 1
    if old and copy is False:
        raise BufferError("__dlpack__: without a copy the memory is read-only: DLPack 1.0 says so")
    if on_gpu:
        return cuda_sharing.capsule(self, stream, not old, old or copy)
    if copy is False and device != _DLPACK_CPU:
        raise BufferError("__dlpack__: copy=False, and values of a GPU are copied to the CPU")
    value = np.asarray(self)
    if value.dtype.kind == "V":
        raise DtypeError(f"__dlpack__: the protocol has no {value.dtype.name}")
    if old or copy:
        value = value.copy()
    return value.__dlpack__(max_version=max_version)


def dlpack_device(self: Any) -> tuple[int, int]:
    """The device of the memory, in the words of DLPack: (1, 0) is the CPU, (2, 3) GPU 3.

    Raises a BufferError if several devices hold the array.
    """
    if isinstance(self, Array) and self.sharding.num_devices > 1:
        raise BufferError(
            f"__dlpack__: {self.sharding.num_devices} devices hold the array, and the protocol "
            "knows arrays of one; take np.asarray(x), or one of x.addressable_shards"
        )
    gpu = _gpu_of(self)
    return _DLPACK_CPU if gpu is None else (_DLPACK_CUDA, gpu)


def _gpu_of(x: Any) -> int | None:
    """The number of the one GPU that holds an array; None if it is not on one."""
    if not isinstance(x, Array) or x.sharding.num_devices > 1:
        return None
    (device,) = x.devices()
    return device.local_hardware_id if device.platform == "gpu" else None


def cuda_array_interface(self: Array) -> dict[str, Any]:
    """The memory of an array on a GPU, by version 3 of the protocol of Numba and CuPy."""
    if _gpu_of(self) is None:
        raise AttributeError(
            "__cuda_array_interface__: only an array on one GPU has it; this is on "
            + ", ".join(sorted(map(str, self.devices())))
        )
    return cuda_sharing.array_interface(self)


def from_dlpack(x: Any, /, *, device: Any = None, copy: bool | None = None) -> Array:
    """Make an array of another library's array, in the same memory where that can be.

    `x` is an object with `__dlpack__`, whose shape and dtype the result has; 64-bit dtypes are
    halved unless x64 is on. The memory is shared, and must not be written to as long as the result
    is in use, unless `copy` is True, or None and a copy is needed. Memory of a GPU stays there, and
    the host doesn't wait. `device` is a device or sharding for the result. Raises an
    `ArgumentError` if `copy` is False and a copy is needed, if `x` is traced, or if it knows
    nothing of the protocol, and a `DeviceError` if it is on a GPU of another process.

    >>> from_dlpack(np.arange(3.0, dtype=np.float32))
    Array([0., 1., 2.], dtype=float32)
    """
    if isinstance(x, Tracer):
        raise ArgumentError(
            f"{current_source()}: from_dlpack: {typeof(x)} is traced, it has no memory"
        )
    if not hasattr(x, "__dlpack__") or not hasattr(x, "__dlpack_device__"):
        raise ArgumentError(
            f"{current_source()}: from_dlpack: {type(x).__name__} has no __dlpack__ or no "
            "__dlpack_device__, which hand over the memory; asarray takes lists and numbers"
        )
    kind, number = x.__dlpack_device__()
    if kind == _DLPACK_CUDA:
        lent = cuda_sharing.from_dlpack(x, number, copy)
        return lent if device is None else placed(lent, device)
    value = np.from_dlpack(x)
    obstacle = why_copied(value.dtype, value.flags.c_contiguous, value.ctypes.data)
    if copy is False and obstacle is not None:
        raise ArgumentError(
            f"{current_source()}: from_dlpack: copy=False, but the result can't share the memory: "
            f"{obstacle}. Leave copy None"
        )
    if copy or obstacle is not None:
        return asarray(value, copy=True, device=device)
    shared = in_scope(from_numpy(value, copy=False))
    return shared if device is None else placed(shared, device)
