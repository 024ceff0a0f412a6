"""Tuples and lists in native code, and which of both an object is, decided when the code runs."""

from __future__ import annotations

from collections.abc import Callable

from spmd.compile.native.llvm.function_builder import Function, Value


def ret_null_if(f: Function, condition: Value, *references: Value) -> None:
    """Return null under a condition, and let go of what is held."""
    with f.if_(condition):
        for value in references:
            f.call("Py_DecRef", "void", value)
        f.ret(f.null())


def call_of_sequence(
    f: Function, is_list: Value, function: str, returns: str, *operands: Value
) -> Value:
    """Call `PyList_<function>` or `PyTuple_<function>`."""
    out = f.var(returns)
    with f.if_else(is_list) as it:
        out.set(f.call(f"PyList_{function}", returns, *operands))
        it.otherwise()
        out.set(f.call(f"PyTuple_{function}", returns, *operands))
    return out.get()


def ret_sequence(
    f: Function, is_list: Value, count: Value, make_item: Callable[[Value], Value]
) -> None:
    """Return a list or a tuple of so many items, each a new reference, or null where one is."""
    out = call_of_sequence(f, is_list, "New", "ptr", count)
    ret_null_if(f, out.equals(0))
    with f.range(0, count) as i:
        item = make_item(i)
        ret_null_if(f, item.equals(0), out)
        call_of_sequence(f, is_list, "SetItem", "i32", out, i, item)
    f.ret(out)
