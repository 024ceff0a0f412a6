"""Tuples and lists filled by native code: for pytrees that are put together, and for results."""

from __future__ import annotations

from collections.abc import Callable

from spmd.compile.native.llvm.function_builder import Function, Value


def ret_null_if(f: Function, condition: Value, *references: Value) -> None:
    """Return null under a condition, and let go of what is held."""
    with f.if_(condition):
        for value in references:
            f.call("Py_DecRef", "void", value)
        f.ret(f.null())


def ret_sequence(
    f: Function, is_list: Value, count: Value, make_item: Callable[[Value], Value]
) -> None:
    """Return a list or a tuple of so many items, each a new reference, or null where one is."""
    out = f.var("ptr")
    with f.if_else(is_list) as it:
        out.set(f.call("PyList_New", "ptr", count))
        it.otherwise()
        out.set(f.call("PyTuple_New", "ptr", count))
    ret_null_if(f, out.get().equals(0))
    with f.range(0, count) as i:
        item = make_item(i)
        ret_null_if(f, item.equals(0), out.get())
        with f.if_else(is_list) as it:
            f.call("PyList_SetItem", "i32", out.get(), i, item)
            it.otherwise()
            f.call("PyTuple_SetItem", "i32", out.get(), i, item)
    f.ret(out.get())
