"""Pytrees as native code: how they are taken apart.

The one idea: what costs in a tree of sixty leaves is Python's own look at each node. Here the plain
containers (tuples, lists, dicts, named tuples, None) are walked by functions with CPython's calling
convention; every other container is handed to `base/tree.py`, whose Python text is the slow twin
and raises the user's errors.

`self` of each function (`tree_unflatten.py`) is a tuple; its first item is a `bytes` object
with the addresses of what the walk asks for. Only functions of the stable ABI are used.
"""

from __future__ import annotations

from spmd.compile.native.cpython.ir.calls import call_python, error, held
from spmd.compile.native.cpython.ir.sequences import call_of_sequence, ret_null_if
from spmd.compile.native.cpython.object_layout import Layout, TreeLayout
from spmd.compile.native.llvm.function_builder import I64, Function, Ptr, Value, define

# The words of a walk: Python's own types; `None`, the registry of containers and the named tuples
# in it; the structures of a leaf and of None and their type; the type of types; the functions that
# take apart, put together and match any container; the types of arrays and of what pending ones
# hold.
(
    TUPLE,
    LIST,
    DICT,
    NONE,
    CONTAINERS,
    NAMED,
    LEAF_TREE,
    NONE_TREE,
    TREE_TYPE,
    TYPE,
    FLATTEN_OTHER,
    UNFLATTEN_OTHER,
    UP_TO_OTHER,
    ARRAY_TYPE,
    PENDING_TYPE,
) = range(15)

# `Py_TPFLAGS_TUPLE_SUBCLASS`, part of the stable ABI: a class that may be a named tuple.
_TUPLE_SUBCLASS = 1 << 26


def _text(name: str, content: str) -> str:
    """A C string as a constant of the module."""
    return f'@{name} = internal constant [{len(content) + 1} x i8] c"{content}\\00"\n'


TREE_TEXTS = (
    _text("where", " in a pytree")
    + _text("arity", "a walk of pytrees was called with the wrong number of operands")
    + _text("no_tree", "a TreeDef is not made of TreeDefs")
)

TREE_DECLARATIONS = """
@PyExc_KeyError = external global ptr
@PyExc_TypeError = external global ptr
declare ptr @PyLong_FromLongLong(i64)
declare ptr @PyBytes_AsString(ptr)
declare ptr @PyBool_FromLong(i64)
declare i32 @Py_EnterRecursiveCall(ptr)
declare void @Py_LeaveRecursiveCall()
declare ptr @PyTuple_New(i64)
declare i64 @PyTuple_Size(ptr)
declare ptr @PyTuple_GetItem(ptr, i64)
declare i32 @PyTuple_SetItem(ptr, i64, ptr)
declare ptr @PyList_New(i64)
declare i64 @PyList_Size(ptr)
declare ptr @PyList_GetItem(ptr, i64)
declare i32 @PyList_SetItem(ptr, i64, ptr)
declare i32 @PyList_Append(ptr, ptr)
declare i32 @PyList_Sort(ptr)
declare ptr @PyList_AsTuple(ptr)
declare ptr @PyDict_New()
declare ptr @PyDict_Keys(ptr)
declare ptr @PyDict_GetItemWithError(ptr, ptr)
declare i32 @PyDict_SetItem(ptr, ptr, ptr)
declare i64 @PyDict_Size(ptr)
declare i32 @PyObject_IsTrue(ptr)
declare i32 @PyDict_Next(ptr, ptr, ptr, ptr)
declare i64 @PyType_GetFlags(ptr)
declare ptr @PyType_GenericAlloc(ptr, i64)
declare ptr @PyObject_CallFunctionObjArgs(ptr, ...)
declare ptr @PyObject_CallObject(ptr, ptr)
declare void @Py_IncRef(ptr)
declare void @Py_DecRef(ptr)
declare ptr @PyErr_Occurred()
declare void @PyErr_Clear()
declare void @PyErr_SetObject(ptr, ptr)
declare void @PyErr_SetString(ptr, ptr)
"""


def word(f: Function, words: Value, index: int) -> Value:
    return f.load("ptr", words, 8 * index)


# ---- taking apart ------------------------------------------------------------------------------
#
# `last` is the address of a word with the type of the leaf seen last: most leaves are arrays, so
# the registry is asked once.


@define("make_tree", "ptr")
def _make_tree(
    f: Function, words: Ptr, kind: Ptr, aux: Ptr, children: Ptr, leaves: I64, tree: TreeLayout
) -> None:
    """make_tree(words, kind, aux, children, leaves): a TreeDef, or null; takes over `children`."""
    number = f.call("PyLong_FromLongLong", "ptr", leaves)
    ret_null_if(f, number.equals(0), children)
    out = f.call("PyType_GenericAlloc", "ptr", word(f, words, TREE_TYPE), f.value("i64", 0))
    ret_null_if(f, out.equals(0), children, number)
    f.store(held(f, kind), out, tree.kind)
    f.store(held(f, aux), out, tree.aux)
    f.store(held(f, word(f, words, NONE)), out, tree.hash)
    f.store(children, out, tree.children)
    f.store(number, out, tree.num_leaves)
    f.ret(out)


@define("is_leaf", "i64")
def _is_leaf(f: Function, words: Ptr, last: Ptr, x: Ptr, layout: Layout) -> None:
    """is_leaf(words, last, x): 1 for a leaf, 0 for a named tuple, 2 for other containers, or -1."""
    kind = f.load("ptr", x, layout.type)
    f.ret_if(kind.equals(f.load("ptr", last)), 1)
    found = f.call("PyDict_GetItemWithError", "ptr", word(f, words, CONTAINERS), kind)
    with f.if_else(found.equals(0)) as it:
        f.ret_if(f.call("PyErr_Occurred", "ptr").differs(0), -1)
        may_be_named = f.call("PyType_GetFlags", "i64", kind) & _TUPLE_SUBCLASS
        with f.if_(may_be_named.equals(0)):
            f.store(kind, last)
            f.ret(1)
        it.otherwise()
        named = f.call("PyDict_GetItemWithError", "ptr", word(f, words, NAMED), kind)
        f.ret_if(named.differs(0), 0)
    f.ret(2)


@define("flatten_sequence", "ptr")
def _flatten_sequence(
    f: Function, words: Ptr, last: Ptr, leaves: Ptr, x: Ptr, kind: Ptr, is_list: I64
) -> None:
    """flatten_sequence(words, last, leaves, x, kind, is_list): the TreeDef of the items."""
    listed = is_list.differs(0)
    count = call_of_sequence(f, listed, "Size", "i64", x)
    children = f.call("PyTuple_New", "ptr", count)
    ret_null_if(f, children.equals(0))
    before = f.call("PyList_Size", "i64", leaves)
    with f.range(0, count) as i:
        item = call_of_sequence(f, listed, "GetItem", "ptr", x, i)
        ret_null_if(f, item.equals(0), children)
        _put_child(f, words, last, leaves, item, i, children)
    found = f.call("PyList_Size", "i64", leaves) - before
    f.ret(f.call("make_tree", "ptr", words, kind, word(f, words, NONE), children, found))


def _put_child(
    f: Function, words: Value, last: Value, leaves: Value, item: Value, i: Value, *kept: Value
) -> None:
    """Flatten a child, which Python may let go of meanwhile, and put its TreeDef in its place.

    `kept` is the tuple of the children, and what else is let go of where that fails.
    """
    f.call("Py_IncRef", "void", item)
    child = f.call("flatten_node", "ptr", words, last, leaves, item)
    f.call("Py_DecRef", "void", item)
    ret_null_if(f, child.equals(0), *kept)
    f.call("PyTuple_SetItem", "i32", kept[0], i, child)


@define("flatten_dict", "ptr")
def _flatten_dict(f: Function, words: Ptr, last: Ptr, leaves: Ptr, x: Ptr) -> None:
    """flatten_dict(words, last, leaves, x): the TreeDef of the values by sorted keys."""
    listed = f.call("PyDict_Keys", "ptr", x)
    ret_null_if(f, listed.equals(0))
    with f.if_(f.call("PyList_Sort", "i32", listed).differs(0)):
        f.call("Py_DecRef", "void", listed)
        f.call("PyErr_Clear", "void")  # Python finds the same error, and words it
        f.ret(call_python(f, word(f, words, FLATTEN_OTHER), x, leaves))
    keys = f.call("PyList_AsTuple", "ptr", listed)
    f.call("Py_DecRef", "void", listed)
    ret_null_if(f, keys.equals(0))
    count = f.call("PyTuple_Size", "i64", keys)
    children = f.call("PyTuple_New", "ptr", count)
    ret_null_if(f, children.equals(0), keys)
    before = f.call("PyList_Size", "i64", leaves)
    with f.range(0, count) as i:
        key = f.call("PyTuple_GetItem", "ptr", keys, i)
        item = f.call("PyDict_GetItemWithError", "ptr", x, key)
        with f.if_(item.equals(0)):
            with f.if_(f.call("PyErr_Occurred", "ptr").equals(0)):
                f.call("PyErr_SetObject", "void", error(f, "KeyError"), key)
            ret_null_if(f, item.equals(0), children, keys)
        _put_child(f, words, last, leaves, item, i, children, keys)
    found = f.call("PyList_Size", "i64", leaves) - before
    out = f.call("make_tree", "ptr", words, word(f, words, DICT), keys, children, found)
    f.call("Py_DecRef", "void", keys)
    f.ret(out)


@define("flatten_inside", "ptr")
def _flatten_inside(f: Function, words: Ptr, last: Ptr, leaves: Ptr, x: Ptr, kind: Ptr) -> None:
    """flatten_inside(words, last, leaves, x, kind): the TreeDef of a plain container."""
    deep = f.call("Py_EnterRecursiveCall", "i32", f.symbol("where"))
    ret_null_if(f, deep.differs(0))
    out = f.var("ptr")
    with f.if_else(kind.equals(word(f, words, DICT))) as it:
        out.set(f.call("flatten_dict", "ptr", words, last, leaves, x))
        it.otherwise()
        is_list = f.convert("zext", kind.equals(word(f, words, LIST)), "i64")
        out.set(f.call("flatten_sequence", "ptr", words, last, leaves, x, kind, is_list))
    f.call("Py_LeaveRecursiveCall", "void")
    f.ret(out.get())


def is_plain(f: Function, words: Value, kind: Value) -> Value:
    """Whether a type is that of tuples, lists or dicts."""
    is_sequence = kind.equals(word(f, words, TUPLE)) | kind.equals(word(f, words, LIST))
    return is_sequence | kind.equals(word(f, words, DICT))


@define("flatten_node", "ptr")
def _flatten(f: Function, words: Ptr, last: Ptr, leaves: Ptr, x: Ptr, layout: Layout) -> None:
    """flatten_node(words, last, leaves, x): append the leaves of `x`; its TreeDef, or null."""
    with f.if_(x.equals(word(f, words, NONE))):
        f.ret(held(f, word(f, words, NONE_TREE)))
    kind = f.load("ptr", x, layout.type)
    with f.if_(is_plain(f, words, kind)):
        f.ret(f.call("flatten_inside", "ptr", words, last, leaves, x, kind))
    what = f.call("is_leaf", "i64", words, last, x)
    with f.if_(what.equals(1)):
        failed = f.call("PyList_Append", "i32", leaves, x).differs(0)
        ret_null_if(f, failed)
        f.ret(held(f, word(f, words, LEAF_TREE)))
    ret_null_if(f, what < 0)
    with f.if_(what.equals(0)):
        f.ret(f.call("flatten_inside", "ptr", words, last, leaves, x, kind))
    f.ret(call_python(f, word(f, words, FLATTEN_OTHER), x, leaves))


# ---- taking apart down to a structure's leaves --------------------------------------------------
#
# The functions give 1; 0 where something does not match, which Python words; -1 for an error.


def _up_to_children(f: Function, words: Value, leaves: Value, child: Value, item: Value) -> None:
    """Go on with one child, which Python may let go of meanwhile; return if it does not match."""
    f.call("Py_IncRef", "void", item)
    matched = f.call("up_to_node", "i64", words, leaves, child, item)
    f.call("Py_DecRef", "void", item)
    f.ret_if(matched.differs(1), matched)


@define("up_to_sequence", "i64")
def _up_to_sequence(
    f: Function, words: Ptr, leaves: Ptr, node: Ptr, x: Ptr, is_list: I64, tree: TreeLayout
) -> None:
    """up_to_sequence(words, leaves, node, x, is_list): match the items."""
    children = f.load("ptr", node, tree.children)
    listed = is_list.differs(0)
    count = call_of_sequence(f, listed, "Size", "i64", x)
    f.ret_if(count.differs(f.call("PyTuple_Size", "i64", children)), 0)
    with f.range(0, count) as i:
        item = call_of_sequence(f, listed, "GetItem", "ptr", x, i)
        f.ret_if(item.equals(0), -1)
        child = f.call("PyTuple_GetItem", "ptr", children, i)
        _up_to_children(f, words, leaves, child, item)
    f.ret(1)


@define("up_to_dict", "i64")
def _up_to_dict(f: Function, words: Ptr, leaves: Ptr, node: Ptr, x: Ptr, tree: TreeLayout) -> None:
    """up_to_dict(words, leaves, node, x): match the values; the keys have to be the same."""
    children, keys = f.load("ptr", node, tree.children), f.load("ptr", node, tree.aux)
    count = f.call("PyTuple_Size", "i64", keys)
    f.ret_if(count.differs(f.call("PyDict_Size", "i64", x)), 0)
    with f.range(0, count) as i:
        key = f.call("PyTuple_GetItem", "ptr", keys, i)
        item = f.call("PyDict_GetItemWithError", "ptr", x, key)
        with f.if_(item.equals(0)):
            failed = f.call("PyErr_Occurred", "ptr").differs(0)
            f.ret(f.select(failed, f.value("i64", -1), 0))
        child = f.call("PyTuple_GetItem", "ptr", children, i)
        _up_to_children(f, words, leaves, child, item)
    f.ret(1)


@define("up_to_inside", "i64")
def _up_to_inside(
    f: Function, words: Ptr, leaves: Ptr, node: Ptr, x: Ptr, tree: TreeLayout
) -> None:
    """up_to_inside(words, leaves, node, x): match one container."""
    kind = f.load("ptr", node, tree.kind)
    for index in (TUPLE, LIST):
        with f.if_(kind.equals(word(f, words, index))):
            is_list = f.value("i64", int(index == LIST))
            f.ret(f.call("up_to_sequence", "i64", words, leaves, node, x, is_list))
    with f.if_(kind.equals(word(f, words, DICT))):
        f.ret(f.call("up_to_dict", "i64", words, leaves, node, x))
    named = f.call("PyDict_GetItemWithError", "ptr", word(f, words, NAMED), kind)
    with f.if_(named.differs(0)):
        unlisted = f.value("i64", 0)
        f.ret(f.call("up_to_sequence", "i64", words, leaves, node, x, unlisted))
    f.ret_if(f.call("PyErr_Occurred", "ptr").differs(0), -1)
    answer = call_python(f, word(f, words, UP_TO_OTHER), node, x, leaves)
    f.ret_if(answer.equals(0), -1)
    truth = f.convert("sext", f.call("PyObject_IsTrue", "i32", answer), "i64")
    f.call("Py_DecRef", "void", answer)
    f.ret(truth)


@define("up_to_node", "i64")
def _up_to(
    f: Function, words: Ptr, leaves: Ptr, node: Ptr, x: Ptr, layout: Layout, tree: TreeLayout
) -> None:
    """up_to_node(words, leaves, node, x): append the subtrees of `x` at the leaves of a TreeDef."""
    is_tree = f.load("ptr", node, layout.type).equals(word(f, words, TREE_TYPE))
    kind, aux, children = (f.load("ptr", node, at) for at in (tree.kind, tree.aux, tree.children))
    whole = kind.differs(0) & aux.differs(0) & children.differs(0)
    f.ret_if((is_tree & whole).equals(0), 0)
    with f.if_(kind.equals(word(f, words, NONE))):
        f.ret(f.convert("sext", f.call("PyList_Append", "i32", leaves, x), "i64") + 1)
    f.ret_if(kind.differs(f.load("ptr", x, layout.type)), 0)
    f.ret_if(x.equals(word(f, words, NONE)), 1)
    deep = f.call("Py_EnterRecursiveCall", "i32", f.symbol("where"))
    f.ret_if(deep.differs(0), -1)
    out = f.call("up_to_inside", "i64", words, leaves, node, x)
    f.call("Py_LeaveRecursiveCall", "void")
    f.ret(out)


def walk_functions(layout: Layout, tree: TreeLayout) -> list[Function]:
    """The functions that take trees apart: `flatten_node` and `up_to_node`."""
    return [
        _make_tree(tree),
        _is_leaf(layout),
        _flatten_sequence(),
        _flatten_dict(),
        _flatten_inside(),
        _flatten(layout),
        _up_to_sequence(tree),
        _up_to_dict(tree),
        _up_to_inside(tree),
        _up_to(layout, tree),
    ]
