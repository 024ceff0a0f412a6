"""Doors: a program as a built-in function of its operands, the cheapest call there is.

A door is opened once for a program and a kind of call: which words of the frames are constant, and
how each operand is given (an address, a buffer, a number). Its call returns the address of its last
operand when all went well; a negative number, whose opposite is to be handed to
`NativeProgram.fail`, if not; or `UNFIT` if an operand was not what it should be and nothing ran.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from spmd.compile.cpu.loader import compile_texts
from spmd.compile.cpu.runner import NativeProgram
from spmd.compile.cpu.runtime_ir_door import (
    ADDRESS,
    BOOL,
    BUFFER,
    BYTES,
    F32,
    F64,
    I32,
    I64,
    UNFIT,
    door_text,
)

__all__ = ["ADDRESS", "BUFFER", "BYTES", "NUMBERS", "UNFIT", "open_door"]

# The kind of an operand that is a Python number, by the dtype of the element it becomes.
NUMBERS = {"float32": F32, "float64": F64, "int32": I32, "int64": I64, "bool": BOOL}

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
def _method() -> tuple[_MethodDef, Callable[..., Any]]:
    """The definition that all doors share, and CPython's maker of built-in functions."""
    address = compile_texts([door_text()], optimize=True)["spmd_door"]
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.POINTER(_MethodDef), ctypes.py_object, ctypes.c_void_p]
    return _MethodDef(b"spmd_door", address, _METH_FASTCALL, None), make


class Door:
    """What a door's function refers to by address; keep it as long as the function."""

    __slots__ = ("_program", "_template", "_words", "call")

    def __init__(
        self,
        program: NativeProgram,
        template: Sequence[int],
        operands: Sequence[tuple[int, int]],
        offsets: Sequence[tuple[int, int, int]],
    ):
        self._program = program
        self._template = np.array(template, np.int64)
        flat = [number for entry in (*operands, *offsets) for number in entry]
        head = [
            program.header_address,
            len(operands),
            program.frame_words,
            int(not program.keeps_gil),
            _address(self._template),
            sum(kind == BUFFER for kind, _ in operands),
            len(offsets),
        ]
        self._words = np.array([*head, *flat], np.int64)
        definition, make = _method()
        self.call: Callable[..., int] = make(definition, _address(self._words), None)


def open_door(
    program: NativeProgram,
    template: Sequence[int],
    operands: Sequence[tuple[int, int]],
    offsets: Sequence[tuple[int, int, int]] = (),
) -> Door:
    """The door of a program for one kind of call.

    `template` has all words of the frames (device after device, one per base); `operands` gives
    for each positional argument of `door.call` its kind and the word that gets its address. Then
    for each `(word, origin, nbytes)` of `offsets` a word becomes `nbytes` more than another.
    """
    if len(template) != program.frame_words:
        raise ValueError(f"{len(template)} words for frames of {program.frame_words}")
    named = [w for _, w in operands] + [w for word, origin, _ in offsets for w in (word, origin)]
    if any(not 0 <= word < len(template) for word in named):
        raise ValueError(f"frames of {len(template)} words do not have all of {named}")
    return Door(program, template, operands, offsets)


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]
