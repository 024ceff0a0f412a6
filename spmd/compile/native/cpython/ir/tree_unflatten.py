"""Pytrees as native code: how they are put together, and asked whether all arrays are there.

Taking them apart is in `tree_flatten.py`; the built-in functions are here.
"""

from __future__ import annotations

from spmd.compile.native.cpython.ir.calls import call_python, error, held
from spmd.compile.native.cpython.ir.sequences import call_of_sequence, ret_null_if, ret_sequence
from spmd.compile.native.cpython.ir.tree_flatten import (
    ARRAY_TYPE,
    DICT,
    LIST,
    NAMED,
    NONE,
    NONE_TREE,
    PENDING_TYPE,
    TREE_DECLARATIONS,
    TREE_TEXTS,
    TREE_TYPE,
    TUPLE,
    TYPE,
    UNFLATTEN_OTHER,
    is_plain,
    walk_functions,
    word,
)
from spmd.compile.native.cpython.object_layout import Layout, TreeLayout
from spmd.compile.native.llvm.function_builder import I64, Function, Ptr, Value, define


def tree_text(layout: Layout, tree: TreeLayout) -> str:
    """The module of all walks."""
    functions = (
        *walk_functions(layout, tree),
        _build_sequence(),
        _build_dict(),
        _build_other(),
        _build_inside(layout),
        _build(layout, tree),
        _settled_leaf(layout),
        _settled_inside(),
        _settled_items(),
        _settled(layout),
        *_entrances(),
    )
    return "\n".join([TREE_DECLARATIONS + TREE_TEXTS, *(f.text() for f in functions)])


# ---- putting together --------------------------------------------------------------------------
#
# `cursor` is the address of the number of leaves that were used.


@define("build_sequence", "ptr")
def _build_sequence(
    f: Function, words: Ptr, cursor: Ptr, leaves: Ptr, children: Ptr, is_list: I64
) -> None:
    """build_sequence(words, cursor, leaves, children, is_list): a tuple or a list, or null."""
    count = f.call("PyTuple_Size", "i64", children)
    ret_null_if(f, count < 0)

    def make_item(i: Value) -> Value:
        child = f.call("PyTuple_GetItem", "ptr", children, i)
        return f.call("build_node", "ptr", words, cursor, leaves, child)

    ret_sequence(f, is_list.differs(0), count, make_item)


@define("build_dict", "ptr")
def _build_dict(
    f: Function, words: Ptr, cursor: Ptr, leaves: Ptr, children: Ptr, keys: Ptr
) -> None:
    """build_dict(words, cursor, leaves, children, keys): a dict, or null."""
    out = f.call("PyDict_New", "ptr")
    ret_null_if(f, out.equals(0))
    with f.range(0, f.call("PyTuple_Size", "i64", children)) as i:
        child = f.call("PyTuple_GetItem", "ptr", children, i)
        key = f.call("PyTuple_GetItem", "ptr", keys, i)
        ret_null_if(f, key.equals(0), out)
        item = f.call("build_node", "ptr", words, cursor, leaves, child)
        ret_null_if(f, item.equals(0), out)
        failed = f.call("PyDict_SetItem", "i32", out, key, item).differs(0)
        f.call("Py_DecRef", "void", item)
        ret_null_if(f, failed, out)
    f.ret(out)


@define("build_other", "ptr")
def _build_other(
    f: Function, words: Ptr, cursor: Ptr, leaves: Ptr, kind: Ptr, aux: Ptr, children: Ptr
) -> None:
    """build_other(words, cursor, leaves, kind, aux, children): what Python makes, or null."""
    listed = f.value("i64", 1)
    items = f.call("build_sequence", "ptr", words, cursor, leaves, children, listed)
    ret_null_if(f, items.equals(0))
    out = call_python(f, word(f, words, UNFLATTEN_OTHER), kind, aux, items)
    f.call("Py_DecRef", "void", items)
    f.ret(out)


@define("build_inside", "ptr")
def _build_inside(
    f: Function,
    words: Ptr,
    cursor: Ptr,
    leaves: Ptr,
    kind: Ptr,
    aux: Ptr,
    children: Ptr,
    layout: Layout,
) -> None:
    """build_inside(words, cursor, leaves, kind, aux, children): the container, or null."""
    is_list = kind.equals(word(f, words, LIST))
    with f.if_(is_list | kind.equals(word(f, words, TUPLE))):
        listed = f.convert("zext", is_list, "i64")
        f.ret(f.call("build_sequence", "ptr", words, cursor, leaves, children, listed))
    is_tuple = f.load("ptr", aux, layout.type).equals(word(f, words, TUPLE))
    with f.if_(kind.equals(word(f, words, DICT)) & is_tuple):
        count = f.call("PyTuple_Size", "i64", children)
        with f.if_(count.equals(f.call("PyTuple_Size", "i64", aux)) & (count >= 0)):
            f.ret(f.call("build_dict", "ptr", words, cursor, leaves, children, aux))
    ret_null_if(f, f.call("PyErr_Occurred", "ptr").differs(0))
    named = f.call("PyDict_GetItemWithError", "ptr", word(f, words, NAMED), kind)
    with f.if_(named.differs(0)):
        unlisted = f.value("i64", 0)
        items = f.call("build_sequence", "ptr", words, cursor, leaves, children, unlisted)
        ret_null_if(f, items.equals(0))
        out = f.call("PyObject_CallObject", "ptr", kind, items)
        f.call("Py_DecRef", "void", items)
        f.ret(out)
    ret_null_if(f, f.call("PyErr_Occurred", "ptr").differs(0))
    f.ret(f.call("build_other", "ptr", words, cursor, leaves, kind, aux, children))


@define("build_node", "ptr")
def _build(
    f: Function, words: Ptr, cursor: Ptr, leaves: Ptr, node: Ptr, layout: Layout, tree: TreeLayout
) -> None:
    """build_node(words, cursor, leaves, node): the tree of a TreeDef, or null."""
    is_tree = f.load("ptr", node, layout.type).equals(word(f, words, TREE_TYPE))
    kind, aux, children = (f.load("ptr", node, at) for at in (tree.kind, tree.aux, tree.children))
    whole = kind.differs(0) & aux.differs(0) & children.differs(0)
    with f.if_((is_tree & whole).equals(0)):
        f.call("PyErr_SetString", "void", error(f, "TypeError"), f.symbol("no_tree"))
        f.ret(f.null())
    with f.if_(kind.equals(word(f, words, NONE))):
        used = f.load("i64", cursor)
        leaf = f.call("PyList_GetItem", "ptr", leaves, used)
        ret_null_if(f, leaf.equals(0))
        f.store(used + 1, cursor)
        f.ret(held(f, leaf))
    with f.if_(node.equals(word(f, words, NONE_TREE))):
        f.ret(held(f, word(f, words, NONE)))
    deep = f.call("Py_EnterRecursiveCall", "i32", f.symbol("where"))
    ret_null_if(f, deep.differs(0))
    out = f.call("build_inside", "ptr", words, cursor, leaves, kind, aux, children)
    f.call("Py_LeaveRecursiveCall", "void")
    f.ret(out)


# ---- asking ------------------------------------------------------------------------------------


@define("settled_leaf", "i64")
def _settled_leaf(f: Function, words: Ptr, last: Ptr, x: Ptr, layout: Layout) -> None:
    """settled_leaf(words, last, x): 1 if it is certain that nothing of `x` is pending, else 0."""
    with f.if_(f.load("ptr", x, layout.type).equals(word(f, words, ARRAY_TYPE))):
        owner, none = f.load("ptr", x, layout.owner), word(f, words, NONE)
        whole = f.load("ptr", x, layout.shards).equals(none) & owner.differs(0)
        f.ret_if(whole.equals(0), 0)
        pending = f.load("ptr", owner, layout.type).equals(word(f, words, PENDING_TYPE))
        f.ret(f.convert("zext", pending.equals(0), "i64"))
    metaclass = f.load("ptr", f.load("ptr", x, layout.type), layout.type)
    f.ret_if(metaclass.differs(word(f, words, TYPE)), 0)
    what = f.call("is_leaf", "i64", words, last, x)
    with f.if_(what.equals(0)):
        f.ret(f.call("settled_inside", "i64", words, last, x, word(f, words, TUPLE)))
    f.ret(f.convert("zext", what.equals(1), "i64"))


@define("settled_inside", "i64")
def _settled_inside(f: Function, words: Ptr, last: Ptr, x: Ptr, kind: Ptr) -> None:
    """settled_inside(words, last, x, kind): the same of all that is in a plain container.

    No Python runs meanwhile that could change a container: even the hash of a type is not asked
    where its metaclass might have its own.
    """
    deep = f.call("Py_EnterRecursiveCall", "i32", f.symbol("where"))
    f.ret_if(deep.differs(0), 0)
    answer = f.call("settled_items", "i64", words, last, x, kind)
    f.call("Py_LeaveRecursiveCall", "void")
    f.ret(answer)


@define("settled_items", "i64")
def _settled_items(f: Function, words: Ptr, last: Ptr, x: Ptr, kind: Ptr) -> None:
    """settled_items(words, last, x, kind): the same, in a depth that is counted."""
    with f.if_(kind.equals(word(f, words, DICT))):
        place, key, value = f.var("i64", 0), f.var("ptr"), f.var("ptr")
        places = place.pointer, key.pointer, value.pointer
        with f.loop():
            f.break_if(f.call("PyDict_Next", "i32", x, *places).equals(0))
            f.ret_if(f.call("settled_node", "i64", words, last, value.get()).equals(0), 0)
        f.ret(1)
    is_list = kind.equals(word(f, words, LIST))
    with f.range(0, call_of_sequence(f, is_list, "Size", "i64", x)) as i:
        item = call_of_sequence(f, is_list, "GetItem", "ptr", x, i)
        f.ret_if(f.call("settled_node", "i64", words, last, item).equals(0), 0)
    f.ret(1)


@define("settled_node", "i64")
def _settled(f: Function, words: Ptr, last: Ptr, x: Ptr, layout: Layout) -> None:
    """settled_node(words, last, x): 1 if it is certain that nothing in `x` is pending, else 0."""
    kind = f.load("ptr", x, layout.type)
    f.ret_if(x.equals(word(f, words, NONE)), 1)
    with f.if_(is_plain(f, words, kind).equals(0)):
        f.ret(f.call("settled_leaf", "i64", words, last, x))
    f.ret(f.call("settled_inside", "i64", words, last, x, kind))


# ---- as Python calls them ----------------------------------------------------------------------


def _entrance(name: str, operands: int) -> tuple[Function, Value, list[Value]]:
    """A built-in function of some operands: its words, and the operands."""
    f = Function(name, "ptr", ["ptr", "ptr", "i64"])
    me, args, count = f.params
    first = f.call("PyTuple_GetItem", "ptr", me, f.value("i64", 0))
    words = f.call("PyBytes_AsString", "ptr", first)
    with f.if_(count.differs(operands)):
        f.call("PyErr_SetString", "void", error(f, "TypeError"), f.symbol("arity"))
        f.ret(f.null())
    return f, words, [f.load("ptr", args, 8 * k) for k in range(operands)]


def _zero(f: Function) -> Value:
    """A word on the stack."""
    return f.var("i64", 0).pointer


def _entrances() -> list[Function]:
    """The functions that Python calls."""
    flatten, words, (x, leaves) = _entrance("spmd_flatten", 2)
    f = flatten
    f.ret(f.call("flatten_node", "ptr", words, _zero(f), leaves, x))
    unflatten, words, (node, leaves) = _entrance("spmd_unflatten", 2)
    f = unflatten
    f.ret(f.call("build_node", "ptr", words, _zero(f), leaves, node))
    up_to, words, (node, x, leaves) = _entrance("spmd_flatten_up_to", 3)
    f = up_to
    matched = f.call("up_to_node", "i64", words, leaves, node, x)
    ret_null_if(f, matched < 0)
    f.ret(f.call("PyBool_FromLong", "ptr", matched))
    settled, words, (x,) = _entrance("spmd_settled", 1)
    f = settled
    answer = f.call("settled_node", "i64", words, _zero(f), x)
    f.call("PyErr_Clear", "void")
    f.ret(f.call("PyBool_FromLong", "ptr", answer))
    return [flatten, unflatten, up_to, settled]
