"""Native code as built-in functions of Python, with CPython's fastest calling convention."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

_METH_FASTCALL = 0x80


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


def make_builtin(name: str, address: int, me: Any) -> Callable[..., Any]:
    """The function `name(*operands)` whose code is at `address`; `me` is its `self`."""
    definition, make = _definition(name, address)
    return make(definition, me, None)
