"""Requests of native code to CPython that are one call: references, calls, exceptions."""

from __future__ import annotations

from spmd.compile.native.llvm.function_builder import Function, Value


def error(f: Function, name: str) -> Value:
    """One of Python's exceptions."""
    return f.load("ptr", f.symbol(f"PyExc_{name}"))


def held(f: Function, value: Value) -> Value:
    """A new reference to an object."""
    f.call("Py_IncRef", "void", value)
    return value


def call_python(f: Function, target: Value, *operands: Value) -> Value:
    """Call a Python function; gives a new reference, or null."""
    variadic = "ptr (ptr, ...)"
    return f.call("PyObject_CallFunctionObjArgs", "ptr", target, *operands, f.null(), type=variadic)
