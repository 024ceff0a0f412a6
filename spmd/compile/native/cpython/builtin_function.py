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
    """The definition of a function, and CPython's maker of functions."""
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.POINTER(_MethodDef), ctypes.py_object, ctypes.c_void_p]
    return _defined(name, address, _METH_FASTCALL), make


def make_method(cls: type, name: str, address: int) -> Any:
    """The method `name` of a class, without operands, whose code is at `address`."""
    make = ctypes.pythonapi.PyDescr_NewMethod
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.py_object, ctypes.POINTER(_MethodDef)]
    return make(cls, _defined(name, address, _METH_NOARGS))


def _defined(name: str, address: int, flags: int) -> _MethodDef:
    """A definition, which lives for ever.

    It must outlive the functions made of it: CPython reads it even to free one. At exit the order
    in which the two would go is open: the modules are emptied in between.
    """
    definition = _MethodDef(name.encode(), address, flags, None)
    keep_for_ever(definition)
    return definition


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
