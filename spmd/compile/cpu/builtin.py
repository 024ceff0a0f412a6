"""Native code as built-in functions and methods of Python, with CPython's fastest conventions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

_METH_NOARGS, _METH_FASTCALL = 0x04, 0x80


class _MethodDef(ctypes.Structure):
    """`PyMethodDef`, whose layout is part of CPython's stable ABI."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("method", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


@cache
def _definition(name: str, address: int) -> tuple[_MethodDef, Callable[..., Any]]:
    """The definition of a function, which must outlive it, and CPython's maker of functions."""
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.POINTER(_MethodDef), ctypes.py_object, ctypes.c_void_p]
    return _MethodDef(name.encode(), address, _METH_FASTCALL, None), make


def make_method(cls: type, name: str, address: int) -> Any:
    """The method `name` of a class, without operands, whose code is at `address`."""
    make = ctypes.pythonapi.PyDescr_NewMethod
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.py_object, ctypes.POINTER(_MethodDef)]
    # It lives as long as the class may: till the end of the process.
    definition = _MethodDef(name.encode(), address, _METH_NOARGS, None)
    _definitions.append(definition)
    return make(cls, definition)


_definitions: list[_MethodDef] = []


def keep_for_ever(x: Any) -> int:
    """The address of an object that native code may use as long as the process lives."""
    keep = ctypes.pythonapi.Py_IncRef
    keep.restype, keep.argtypes = None, [ctypes.py_object]
    keep(x)
    return id(x)


def make_builtin(name: str, address: int, me: Any) -> Callable[..., Any]:
    """The function `name(*operands)` whose code is at `address`; `me` is its `self`."""
    definition, make = _definition(name, address)
    return make(definition, me, None)
