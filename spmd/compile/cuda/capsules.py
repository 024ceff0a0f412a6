"""Capsules of the DLPack protocol for memory of GPUs: made, and read.

NumPy makes those of the host's memory, and has no others. A capsule is a Python object around a C
structure: an address, a device, shape, strides, dtype, and a function that gives the memory back.
The consumer renames the capsule, and calls that function when it is done.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_char_p, c_int, c_int32, c_int64, c_uint8, c_uint32, c_uint64, c_void_p
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.errors import ArgumentError, DtypeError
from spmd.base.record import record
from spmd.compile.native.llvm.compiler import compile_texts
from spmd.compile.native.llvm.function_builder import Function

CUDA = 2  # kDLCUDA
READ_ONLY = 1
# The version of the protocol that capsules are made for, and the newest that is understood.
VERSION = (1, 0)
_NAMES = {False: b"dltensor", True: b"dltensor_versioned"}
_USED = {False: b"used_dltensor", True: b"used_dltensor_versioned"}
# By NumPy's kind, the code of the protocol; bfloat16 is none of NumPy's.
_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_BFLOAT = 4


class _Device(ctypes.Structure):
    _fields_ = (("kind", c_int32), ("number", c_int32))


class _Dtype(ctypes.Structure):
    _fields_ = (("code", c_uint8), ("bits", c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("device", _Device),
        ("ndim", c_int32),
        ("dtype", _Dtype),
        ("shape", ctypes.POINTER(c_int64)),
        ("strides", ctypes.POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", c_void_p), ("deleter", c_void_p))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", c_uint32),
        ("minor", c_uint32),
        ("context", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", _Tensor),
    )


_KINDS: dict[bool, type[ctypes.Structure]] = {False: _Managed, True: _Versioned}


def _of_python(name: str, result: Any, *args: Any) -> Any:
    """A function of Python's C interface, by its own prototype."""
    return ctypes.PYFUNCTYPE(result, *args)((name, ctypes.pythonapi))


_new = _of_python("PyCapsule_New", ctypes.py_object, c_void_p, c_char_p, c_void_p)
_is_named = _of_python("PyCapsule_IsValid", c_int, ctypes.py_object, c_char_p)
_pointer = _of_python("PyCapsule_GetPointer", c_void_p, ctypes.py_object, c_char_p)
_rename = _of_python("PyCapsule_SetName", c_int, ctypes.py_object, c_char_p)

# ---- making ------------------------------------------------------------------------------------

# By address, the structures that others hold, with their shapes and the owners of the memory.
given: dict[int, tuple[Any, ...]] = {}


@ctypes.CFUNCTYPE(None, c_void_p)
def _give_back(address: int) -> None:
    given.pop(address, None)


_DECLARED = """
declare void @PyErr_Fetch(ptr, ptr, ptr)
declare void @PyErr_Restore(ptr, ptr, ptr)
declare ptr @PyCapsule_GetName(ptr)
declare ptr @PyCapsule_GetPointer(ptr, ptr)
"""


@functools.cache
def _destroy() -> int:
    """The address of a function that gives back a capsule which no library took.

    A consumer may destroy a capsule while it raises an error, during which no Python may be called:
    native code puts the error aside.
    """
    f = Function("spmd_capsule_destroy", "void", ["ptr"])
    (capsule,) = f.params
    raised = f.stack("ptr", 3)
    f.call("PyErr_Fetch", "void", *[f.at(raised, 8 * k) for k in range(3)])
    name = f.call("PyCapsule_GetName", "ptr", capsule)
    with f.if_(f.load("i8", name).equals(ord("d"))):  # "used_..." is another's
        place = f.call("PyCapsule_GetPointer", "ptr", capsule, name)
        is_versioned = f.load("i8", name, len(_NAMES[False])).differs(0)
        new, old = (_KINDS[kind].__dict__["deleter"].offset for kind in (True, False))
        offset = f.select(is_versioned, f.value("i64", new), old)
        f.call(f.load("ptr", f.at(place, offset)), "void", place)
    f.call("PyErr_Restore", "void", *[f.load("ptr", raised, 8 * k) for k in range(3)])
    return dict(compile_texts([_DECLARED + f.text()]))[f.name]


def make(
    address: int, owner: Any, device: int, shape: Sequence[int], dtype: np.dtype, versioned: bool
) -> Any:
    """A capsule of row-major memory of a GPU, which `owner` keeps; others must only read it."""
    sizes = (c_int64 * len(shape))(*shape)
    strides = [int(np.prod(shape[k + 1 :], dtype=np.int64)) for k in range(len(shape))]
    steps = (c_int64 * len(shape))(*strides)
    code = _BFLOAT if dtype == dtypes.bfloat16 else _CODES.get(dtype.kind)
    if code is None:
        raise DtypeError(f"__dlpack__: the protocol has no {dtype.name}")
    made: Any = _KINDS[versioned]()
    made.tensor = _Tensor(
        address, (CUDA, device), len(shape), (code, 8 * dtype.itemsize, 1), sizes, steps, 0
    )
    made.deleter = ctypes.cast(_give_back, c_void_p).value
    if versioned:
        made.major, made.minor, made.flags = *VERSION, READ_ONLY
    place = ctypes.addressof(made)
    given[place] = made, sizes, steps, owner
    return _new(place, _NAMES[versioned], _destroy())


# ---- reading -----------------------------------------------------------------------------------


class _Lender:
    """The memory of a capsule that was taken; it is given back with the last reference."""

    def __init__(self, place: int, deleter: int | None):
        self.place, self.deleter = place, deleter

    def __del__(self) -> None:
        if self.deleter:
            ctypes.CFUNCTYPE(None, c_void_p)(self.deleter)(self.place)


@record
class Lent:
    """Memory of another library on a GPU; `strides` are in bytes, and `lender` keeps it."""

    address: int
    device: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype
    lender: Any


def read(capsule: Any) -> Lent:
    """Take the memory of a capsule, which says that it is of a GPU."""
    versioned = bool(_is_named(capsule, _NAMES[True]))
    if not versioned and not _is_named(capsule, _NAMES[False]):
        raise ArgumentError("from_dlpack: __dlpack__ returned no capsule that is still to be taken")
    place = _pointer(capsule, _NAMES[versioned])
    found: Any = _KINDS[versioned].from_address(place)
    if versioned and found.major > VERSION[0]:
        raise ArgumentError(
            f"from_dlpack: a capsule of version {found.major}.{found.minor} of the protocol; "
            f"{VERSION[0]}.{VERSION[1]} was asked for"
        )
    tensor = found.tensor
    dtype = _dtype(tensor.dtype)
    shape = tuple(tensor.shape[k] for k in range(tensor.ndim))
    if tensor.strides:
        strides = tuple(dtype.itemsize * tensor.strides[k] for k in range(tensor.ndim))
    else:
        strides = row_major(shape, dtype.itemsize)
    address = (tensor.data or 0) + tensor.byte_offset
    number = tensor.device.number
    _rename(capsule, _USED[versioned])  # from here on the memory is ours to give back
    return Lent(address, number, shape, strides, dtype, _Lender(place, found.deleter))


def row_major(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The strides in bytes of an array whose elements lie one after the other."""
    strides, step = [], itemsize
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def _dtype(given: _Dtype) -> np.dtype:
    kinds = {code: kind for kind, code in _CODES.items()}
    if (given.code, given.bits, given.lanes) == (_BFLOAT, 16, 1):
        return np.dtype(dtypes.bfloat16)
    kind = kinds.get(given.code)
    try:
        if kind is None or given.lanes != 1:
            raise TypeError
        return np.dtype(f"{kind}{given.bits // 8}")
    except TypeError:
        raise DtypeError(
            f"from_dlpack: elements of code {given.code} with {given.bits} bits and "
            f"{given.lanes} lanes; arrays here have none of these"
        ) from None
