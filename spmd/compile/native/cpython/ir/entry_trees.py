"""Pytrees at an entry point: operands are taken out of containers, and results put into them.

The one idea: an entry point is made for one structure. It is written down node after node, in the
order of the leaves; native code follows the nodes through the arguments, where any difference means
that nothing fits, and later through new containers for the results.
"""

from __future__ import annotations

from spmd.compile.native.cpython.entry_layout import (
    IS_DICT,
    IS_LEAF,
    IS_LIST,
    IS_NAMED,
    IS_NONE,
    NODE_BYTES,
    NODE_CLASS,
    NODE_COUNT,
    NODE_KEYS,
    NODE_OP,
    NODE_TEMPLATE,
)
from spmd.compile.native.cpython.ir.sequences import call_of_sequence, ret_null_if, ret_sequence
from spmd.compile.native.cpython.object_layout import Layout
from spmd.compile.native.llvm.function_builder import I64, Function, Ptr, Value, define

TREE_DECLARATIONS = """
declare i64 @PyList_Size(ptr)
declare ptr @PyList_GetItem(ptr, i64)
declare ptr @PyList_New(i64)
declare i32 @PyList_SetItem(ptr, i64, ptr)
declare ptr @PyDict_Copy(ptr)
declare ptr @PyDict_GetItemWithError(ptr, ptr)
declare i32 @PyDict_SetItem(ptr, ptr, ptr)
declare i32 @PyDict_Next(ptr, ptr, ptr, ptr)
declare ptr @PyObject_CallObject(ptr, ptr)
"""


# ---- operands ----------------------------------------------------------------------------------


def spread_functions(layout: Layout) -> list[Function]:
    """The functions that take operands out of containers: `spread_node`, `release_objects`."""
    return [_release(), _spread_sequence(), _spread_dict(), _spread_node(layout)]


@define("release_objects", "void")
def _release(f: Function, objects: Ptr, count: I64) -> None:
    """release_objects(objects, count): let go of operands, or of blocks, which the results hold."""
    with f.range(0, count) as i:
        f.call("Py_DecRef", "void", f.load("ptr", objects, i * 8))


# Each of the following takes the address of a word with the next node, the operands, the address of
# a word with their number so far, and an object. It gives 1 if the object fits.


@define("spread_sequence", "i64")
def _spread_sequence(
    f: Function, nodes: Ptr, operands: Ptr, place: Ptr, x: Ptr, op: I64, count: I64
) -> None:
    """spread_sequence(nodes, operands, place, x, op, count): a tuple or a list."""
    is_list = op.equals(IS_LIST)
    f.ret_if(call_of_sequence(f, is_list, "Size", "i64", x).differs(count), 0)
    with f.range(0, count) as i:
        item = call_of_sequence(f, is_list, "GetItem", "ptr", x, i)
        f.ret_if(item.equals(0), 0)
        fits = f.call("spread_node", "i64", nodes, operands, place, item)
        f.ret_if(fits.equals(0), 0)
    f.ret(1)


@define("spread_dict", "i64")
def _spread_dict(
    f: Function, nodes: Ptr, operands: Ptr, place: Ptr, x: Ptr, keys: Ptr, count: I64
) -> None:
    """spread_dict(nodes, operands, place, x, keys, count): a dict, in the order of sorted keys.

    A dict that was made by an entry point has that order itself, so that nothing is looked up.
    """
    f.ret_if(f.call("PyDict_Size", "i64", x).differs(count), 0)
    cursor, found, value = f.var("i64", 0), f.var("ptr", 0), f.var("ptr", 0)
    with f.range(0, count) as i:
        key = f.call("PyTuple_GetItem", "ptr", keys, i)
        more = f.call("PyDict_Next", "i32", x, cursor.pointer, found.pointer, value.pointer)
        with f.if_(more.equals(0) | found.get().differs(key)):
            value.set(f.call("PyDict_GetItemWithError", "ptr", x, key))
            f.ret_if(value.get().equals(0), 0)
        fits = f.call("spread_node", "i64", nodes, operands, place, value.get())
        f.ret_if(fits.equals(0), 0)
    f.ret(1)


@define("spread_node", "i64")
def _spread_node(
    f: Function, nodes: Ptr, operands: Ptr, place: Ptr, x: Ptr, layout: Layout
) -> None:
    """spread_node(nodes, operands, place, x): the operands in `x`, which are held from now on.

    Other threads, and the classes of keys, may change containers while the program runs.
    """
    node = f.load("ptr", nodes)
    f.store(f.at(node, NODE_BYTES), nodes)
    op, count = f.load("i64", node, NODE_OP), f.load("i64", node, NODE_COUNT)
    with f.if_(op.equals(IS_LEAF)):
        number = f.load("i64", place)
        f.call("Py_IncRef", "void", x)
        f.store(x, operands, number * 8)
        f.store(number + 1, place)
        f.ret(1)
    kind = f.load("ptr", x, layout.type)
    f.ret_if(kind.differs(f.load("ptr", node, NODE_CLASS)), 0)
    f.ret_if(op.equals(IS_NONE), 1)
    with f.if_(op.equals(IS_DICT)):
        keys = f.load("ptr", node, NODE_KEYS)
        f.call("Py_IncRef", "void", x)
        fits = f.call("spread_dict", "i64", nodes, operands, place, x, keys, count)
        f.call("Py_DecRef", "void", x)
        f.ret(fits)
    f.ret(f.call("spread_sequence", "i64", nodes, operands, place, x, op, count))


# ---- results -----------------------------------------------------------------------------------


def gather_functions() -> list[Function]:
    """The function that puts results into containers: `gather_node`, which asks `make_next`."""
    return [_gather_sequence(), _gather_dict(), _gather_node()]


# Each takes the address of a word with the next node, and a state to be handed to `make_next`. It
# gives a new object, or null.


@define("gather_sequence", "ptr")
def _gather_sequence(f: Function, nodes: Ptr, state: Ptr, op: I64, count: I64) -> None:
    """gather_sequence(nodes, state, op, count): a tuple or a list."""

    def make_item(_: Value) -> Value:
        return f.call("gather_node", "ptr", nodes, state)

    ret_sequence(f, op.equals(IS_LIST), count, make_item)


@define("gather_dict", "ptr")
def _gather_dict(f: Function, nodes: Ptr, state: Ptr, keys: Ptr, template: Ptr, count: I64) -> None:
    """gather_dict(nodes, state, keys, template, count): a dict."""
    out = f.call("PyDict_Copy", "ptr", template)
    ret_null_if(f, out.equals(0))
    with f.range(0, count) as i:
        item = f.call("gather_node", "ptr", nodes, state)
        ret_null_if(f, item.equals(0), out)
        key = f.call("PyTuple_GetItem", "ptr", keys, i)
        failed = f.call("PyDict_SetItem", "i32", out, key, item).differs(0)
        f.call("Py_DecRef", "void", item)
        ret_null_if(f, failed, out)
    f.ret(out)


@define("gather_node", "ptr")
def _gather_node(f: Function, nodes: Ptr, state: Ptr) -> None:
    """gather_node(nodes, state): the tree of the next results."""
    node = f.load("ptr", nodes)
    f.store(f.at(node, NODE_BYTES), nodes)
    op, count = f.load("i64", node, NODE_OP), f.load("i64", node, NODE_COUNT)
    with f.if_(op.equals(IS_LEAF)):
        f.ret(f.call("make_next", "ptr", state))
    with f.if_(op.equals(IS_NONE)):
        none = f.load("ptr", node, NODE_KEYS)  # which is None for all that is no dict
        f.call("Py_IncRef", "void", none)
        f.ret(none)
    with f.if_(op.equals(IS_DICT)):
        keys, template = f.load("ptr", node, NODE_KEYS), f.load("ptr", node, NODE_TEMPLATE)
        f.ret(f.call("gather_dict", "ptr", nodes, state, keys, template, count))
    items = f.call("gather_sequence", "ptr", nodes, state, op, count)
    f.ret_if(op.differs(IS_NAMED) | items.equals(0), items)
    out = f.call("PyObject_CallObject", "ptr", f.load("ptr", node, NODE_CLASS), items)
    f.call("Py_DecRef", "void", items)
    f.ret(out)
