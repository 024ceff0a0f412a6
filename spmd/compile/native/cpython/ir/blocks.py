"""Blocks of the allocator as native code: made for results, and given back with the last reference.

The free lists stay those of `native/runtime/allocator.py`: Python lists of addresses, which only
the holder of the GIL changes. Python serves requests that the lists cannot.
"""

from __future__ import annotations

from spmd.compile.native.cpython.ir.calls import call_python
from spmd.compile.native.cpython.object_layout import Layout
from spmd.compile.native.llvm.function_builder import Function, Ptr, Value, define

# The words of `spmd_block_setup`: the function for a block of a class whose list is empty, that for
# memory whose list is full, the type of blocks, None.
_ALLOC_OF, _GIVE_BACK, _BLOCK, _NONE = range(0, 32, 8)

BLOCK_DECLARATIONS = """
@block_words = internal global [4 x i64] zeroinitializer
declare i32 @PyList_SetSlice(ptr, i64, i64, ptr)
declare i32 @PyList_Append(ptr, ptr)
"""


def block_functions(layout: Layout) -> list[Function]:
    """`make_block`, and what Python calls."""
    return [_make_block(layout), _delete(layout), _setup()]


def _noted(f: Function, place: int) -> Value:
    return f.load("ptr", f.symbol("block_words"), place)


@define("make_block", "ptr")
def _make_block(f: Function, home: Ptr, layout: Layout) -> None:
    """make_block(home): a block of a size class, or null."""
    # First the object: making it may collect garbage, and that change the list.
    block = f.call("PyType_GenericAlloc", "ptr", _noted(f, _BLOCK), f.value("i64", 0))
    f.ret_if(block.equals(0), f.null())
    free = f.load("ptr", home, layout.class_free)
    last = f.call("PyList_Size", "i64", free) - 1
    with f.if_(last < 0):
        f.call("Py_DecRef", "void", block)
        f.ret(call_python(f, _noted(f, _ALLOC_OF), home))
    address = f.call("PyList_GetItem", "ptr", free, last)
    f.call("Py_IncRef", "void", address)
    with f.if_(f.call("PyList_SetSlice", "i32", free, last, last + 1, f.null()).differs(0)):
        f.call("Py_DecRef", "void", address)
        f.call("Py_DecRef", "void", block)
        f.ret(f.null())
    f.call("Py_IncRef", "void", home)
    f.store(address, block, layout.block_address)
    f.store(home, block, layout.block_home)
    f.ret(block)


@define("spmd_block_del", "ptr", exported=True)
def _delete(f: Function, block: Ptr, _: Ptr, layout: Layout) -> None:
    """spmd_block_del(block, null): the method `__del__` of blocks."""
    none = _noted(f, _NONE)
    home = f.load("ptr", block, layout.block_home)
    address = f.load("ptr", block, layout.block_address)
    f.call("Py_IncRef", "void", none)
    # A block that was not finished has no memory.
    f.ret_if(home.equals(0) | address.equals(0), none)
    free = f.load("ptr", home, layout.class_free)
    most = f.call("PyLong_AsLongLong", "i64", f.load("ptr", home, layout.class_most))
    result = f.var("ptr", none)
    with f.if_else(f.call("PyList_Size", "i64", free) < most) as it:
        with f.if_(f.call("PyList_Append", "i32", free, address).differs(0)):
            result.set(f.null())
        it.otherwise()
        result.set(call_python(f, _noted(f, _GIVE_BACK), home, address))
    with f.if_(result.get().differs(none)):
        f.call("Py_DecRef", "void", none)
    f.ret(result.get())


@define("spmd_block_setup", "void", exported=True)
def _setup(f: Function, words: Ptr) -> None:
    """spmd_block_setup(words): note what the others call."""
    f.call("memcpy", "ptr", f.symbol("block_words"), words, f.value("i64", 32))
