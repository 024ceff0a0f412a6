"""The way from Python into a program, as native code: a built-in function takes the operands.

The one idea: a `ctypes` call converts each argument through Python-level descriptors and needs a
buffer that was packed before; a function with CPython's own calling convention reads the operands
off the interpreter's stack, in a quarter of the time. It is told how arrays lie in memory
(`native/cpython/object_layout.py`), checks that the operands are the arrays that the program was
made for, and makes the results, which in Python costs more than running a small program.

`spmd_entry_point(self, args, count)` is a METH_FASTCALL function. `self` is a tuple; its first item
is a `bytes` object with the entry point's words: what to call, the frames' constant words, how to
read each operand and how to make each result. It uses only functions of the stable ABI.
"""

from __future__ import annotations

from spmd.compile.native.cpython.entry_layout import (
    ADDRESS,
    ARRAY,
    ARRAY_TYPE,
    BLOCK,
    BLOCK_TYPE,
    BLOCKS,
    BOOL,
    BUFFER,
    BUFFERS,
    COUNT,
    F32,
    F64,
    FAIL,
    FIRST_BLOCK,
    GIVEN,
    HEADER,
    I32,
    MISS,
    NONE,
    OF_SLAB,
    OFFSETS,
    OPERANDS,
    OUT,
    RELEASES,
    RESULTS,
    SLAB,
    SLAB_WORD,
    TEMPLATE,
    WORDS,
)
from spmd.compile.native.cpython.ir.blocks import BLOCK_DECLARATIONS, block_functions
from spmd.compile.native.cpython.ir.entry_trees import (
    TREE_DECLARATIONS,
    gather_functions,
    spread_functions,
)
from spmd.compile.native.cpython.object_layout import DIGIT_BITS, Layout
from spmd.compile.native.llvm.function_builder import I64, Function, Ptr, Value, define
from spmd.compile.native.program import run_layout

# `Py_buffer` as the stable ABI fixes it, with room to spare; its first field is the address.
VIEW_BYTES = 128
# C-contiguous memory of any format, only to be read.
_PYBUF_SIMPLE = 0

_OPERAND_BYTES, _OFFSET_BYTES, _RESULT_BYTES, _BLOCK_BYTES = 24, 24, 32, 16

_DECLARATIONS = """
declare i64 @PyLong_AsLongLong(ptr)
declare ptr @PyLong_FromLongLong(i64)
declare ptr @PyBytes_AsString(ptr)
declare ptr @PyBytes_FromStringAndSize(ptr, i64)
declare double @PyFloat_AsDouble(ptr)
declare i32 @PyObject_IsTrue(ptr)
declare i32 @PyObject_GetBuffer(ptr, ptr, i32)
declare void @PyBuffer_Release(ptr)
declare ptr @PyObject_CallFunctionObjArgs(ptr, ...)
declare i64 @PyTuple_Size(ptr)
declare ptr @PyTuple_GetItem(ptr, i64)
declare ptr @PyTuple_New(i64)
declare i32 @PyTuple_SetItem(ptr, i64, ptr)
declare i64 @PyDict_Size(ptr)
declare ptr @PyType_GenericAlloc(ptr, i64)
declare void @Py_IncRef(ptr)
declare void @Py_DecRef(ptr)
declare ptr @PyErr_Occurred()
declare void @PyErr_Clear()
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare ptr @memcpy(ptr, ptr, i64)
"""


def entry_point_source(layout: Layout) -> str:
    """The module of the entry point."""
    functions = [_release(), _address(layout), _read(layout), *spread_functions(layout)]
    functions += [*block_functions(layout), _make_blocks(layout)]
    functions += [_make(layout), _make_next(layout), *gather_functions()]
    functions += [_run_entry_point(), _entry_point()]
    return "\n".join(
        [_DECLARATIONS, TREE_DECLARATIONS, BLOCK_DECLARATIONS, *(f.text() for f in functions)]
    )


@define("release_views", "void")
def _release(f: Function, views: Ptr, taken: I64) -> None:
    """release_views(views, taken): give back the buffers that were taken."""
    with f.range(0, taken) as i:
        f.call("PyBuffer_Release", "void", f.at(views, i * VIEW_BYTES))


def _address(layout: Layout) -> Function:
    """address_of(number): an int of Python, which mostly has two digits; 0 if it is none."""
    attributes = "alwaysinline nounwind"
    f = Function("address_of", "i64", ["ptr"], internal=True, attributes=attributes)
    (number,) = f.params
    f.ret_if(number.equals(0), 0)
    with f.if_(f.load("i64", number, layout.int_tag).equals(layout.two_digits)):
        digits = f.load("i64", number, layout.int_digits)
        low = digits & ((1 << DIGIT_BITS) - 1)
        f.ret(low + ((digits >> 32) << DIGIT_BITS))
    f.ret(f.call("PyLong_AsLongLong", "i64", number))
    return f


@define("read_operand", "i64")
def _read(
    f: Function, fields: Ptr, entry: Ptr, operand: Ptr, cell: Ptr, view: Ptr, layout: Layout
) -> None:
    """read_operand(fields, entry, object, cell, view): the address of an operand, or 0 or -1.

    Numbers are written to `cell`; `view` is filled by a buffer. Without an address a Python error
    may be set.
    """
    kind, expected = f.load("i64", entry), f.load("ptr", entry, 16)
    here = f.convert("ptrtoint", cell, "i64")
    kind_of = f.load("ptr", operand, layout.type)
    with f.if_(kind.equals(ARRAY)):
        f.ret_if(kind_of.differs(f.load("ptr", fields, 8 * ARRAY_TYPE)), 0)
        same = f.load("ptr", operand, layout.aval).equals(expected)
        none = f.load("ptr", fields, 8 * NONE)
        with f.if_(same & f.load("ptr", operand, layout.sharding).equals(none)):
            f.ret(f.call("address_of", "i64", f.load("ptr", operand, layout.ptr)))
        f.ret(0)
    with f.if_(kind.equals(BLOCK)):
        f.ret_if(kind_of.differs(f.load("ptr", fields, 8 * BLOCK_TYPE)), 0)
        address = f.load("ptr", operand, layout.block_address)
        f.ret(f.call("address_of", "i64", address))
    f.ret_if(expected.differs(0) & expected.differs(kind_of), 0)
    with f.if_(kind.equals(ADDRESS)):
        f.ret(f.call("PyLong_AsLongLong", "i64", operand))
    with f.if_(kind.equals(BUFFER)):
        failed = f.call("PyObject_GetBuffer", "i32", operand, view, f.value("i32", _PYBUF_SIMPLE))
        f.ret_if(failed.differs(0), 0)
        f.ret(f.load("i64", view))
    with f.if_((kind.equals(F32)) | (kind.equals(F64))):
        number = f.call("PyFloat_AsDouble", "double", operand)
        with f.if_(number.equals(-1.0)):
            f.ret_if(f.call("PyErr_Occurred", "ptr").differs(0), 0)
        f.store(number, cell)
        with f.if_(kind.equals(F32)):
            f.store(f.convert("fptrunc", number, "float"), cell)
        f.ret(here)
    with f.if_(kind.equals(BOOL)):
        truth = f.call("PyObject_IsTrue", "i32", operand)
        f.store(f.convert("trunc", truth, "i8"), cell)
        f.ret(f.select(truth < 0, f.value("i64", 0), here))
    whole = f.call("PyLong_AsLongLong", "i64", operand)
    with f.if_(whole.equals(-1)):
        f.ret_if(f.call("PyErr_Occurred", "ptr").differs(0), 0)
    f.store(whole, cell)
    narrow = f.convert("sext", f.convert("trunc", whole, "i32"), "i64")
    f.ret(f.select(kind.equals(I32) & narrow.differs(whole), f.value("i64", 0), here))


# ---- results -----------------------------------------------------------------------------------


@define("make_array", "ptr")
def _make(
    f: Function,
    kind: Ptr,
    none: Ptr,
    aval: Ptr,
    owner: Ptr,
    address: I64,
    sharding: Ptr,
    layout: Layout,
) -> None:
    """make_array(type, none, aval, owner, address, sharding): a new array, or null."""
    out = f.call("PyType_GenericAlloc", "ptr", kind, f.value("i64", 0))
    f.ret_if(out.equals(0), f.null())
    number = f.call("PyLong_FromLongLong", "ptr", address)
    with f.if_(number.equals(0)):
        f.call("Py_DecRef", "void", out)
        f.ret(f.null())
    f.store(number, out, layout.ptr)
    slots = (
        (layout.aval, aval),
        (layout.owner, owner),
        (layout.sharding, sharding),
        (layout.shards, none),
        (layout.numpy, none),
    )
    for offset, value in slots:
        f.call("Py_IncRef", "void", value)
        f.store(value, out, offset)
    f.ret(out)


@define("make_blocks", "i64")
def _make_blocks(
    f: Function, entries: Ptr, count: I64, blocks: Ptr, frames: Ptr, layout: Layout
) -> None:
    """make_blocks(entries, count, blocks, frames): 1 if all blocks were made, else 0."""
    with f.range(0, count) as i:
        entry = f.at(entries, i * _BLOCK_BYTES)
        block = f.call("make_block", "ptr", f.load("ptr", entry))
        with f.if_(block.equals(0)):
            f.call("release_objects", "void", blocks, i)
            f.ret(0)
        f.store(block, blocks, i * 8)
        address = f.call("address_of", "i64", f.load("ptr", block, layout.block_address))
        f.store(address, frames, f.load("i64", entry, 8) * 8)
    f.ret(1)


# The fields that `make_next` gets: the entry point, the entry of the next result, the frames, the
# operands, the bytes object for results, and the blocks.
_FIELDS, _ENTRY, _FRAMES, _GIVEN, _SLAB, _MADE = range(0, 48, 8)


@define("make_next", "ptr")
def _make_next(f: Function, state: Ptr, layout: Layout) -> None:
    """make_next(state): the next result, or null."""
    fields, entry = f.load("ptr", state, _FIELDS), f.load("ptr", state, _ENTRY)
    operands = f.load("ptr", state, _GIVEN)
    f.store(f.at(entry, _RESULT_BYTES), state, _ENTRY)
    kind, none = f.load("ptr", fields, 8 * ARRAY_TYPE), f.load("ptr", fields, 8 * NONE)
    source = f.load("i64", entry, 8)
    owner = f.var("ptr", f.load("ptr", state, _SLAB))
    with f.if_(source >= FIRST_BLOCK):
        blocks = f.load("ptr", state, _MADE)
        owner.set(f.load("ptr", blocks, (source - FIRST_BLOCK) * 8))
    with f.if_((source >= 0) & (source < FIRST_BLOCK)):
        owner.set(f.load("ptr", operands, source * 8))
    with f.if_(source < OF_SLAB):
        place = (f.value("i64", -2) - source) * 8
        owner.set(f.load("ptr", f.load("ptr", operands, place), layout.owner))
    address = f.load("i64", f.load("ptr", state, _FRAMES), f.load("i64", entry) * 8)
    aval, sharding = f.load("ptr", entry, 16), f.load("ptr", entry, 24)
    f.ret(f.call("make_array", "ptr", kind, none, aval, owner.get(), address, sharding))


# ---- the entry point -----------------------------------------------------------------------------


def _ret_miss(f: Function, fields: Value) -> None:
    """Return that nothing fits."""
    miss = f.load("ptr", fields, 8 * MISS)
    f.call("Py_IncRef", "void", miss)
    f.ret(miss)


@define("spmd_entry_point", "ptr", exported=True)
def _entry_point(f: Function, me: Ptr, args: Ptr, given: I64) -> None:
    """spmd_entry_point(self, args, count): find the operands, and run.

    An entry point with trees is called like the matchers of jitted functions, with a tuple of
    positional and a dict of keyword arguments.
    """
    fields = f.call(
        "PyBytes_AsString", "ptr", f.call("PyTuple_GetItem", "ptr", me, f.value("i64", 0))
    )
    count, trees = f.load("i64", fields, 8 * COUNT), f.load("i64", fields, 8 * GIVEN)
    with f.if_(trees.differs(0)):
        with f.if_(given.differs(2)):
            _ret_miss(f, fields)
        operands = f.stack_bytes(count * 8)
        nodes, place = f.var("ptr", f.at(fields, trees)), f.var("i64", 0)
        places = nodes.pointer, operands, place.pointer
        for k in range(2):
            fits = f.call("spread_node", "i64", *places, f.load("ptr", args, 8 * k))
            with f.if_(fits.equals(0)):
                f.call("PyErr_Clear", "void")
                f.call("release_objects", "void", operands, place.get())
                _ret_miss(f, fields)
        out = f.call("run_entry_point", "ptr", fields, operands)
        f.call("release_objects", "void", operands, count)
        f.ret(out)
    with f.if_(given.differs(count)):
        _ret_miss(f, fields)
    f.ret(f.call("run_entry_point", "ptr", fields, args))


@define("run_entry_point", "ptr")
def _run_entry_point(f: Function, fields: Ptr, operands: Ptr) -> None:
    """run_entry_point(fields, operands): fill the frames, run, make the results."""

    def word(index: int, type: str = "i64") -> Value:
        return f.load(type, fields, 8 * index)

    count, words = word(COUNT), word(WORDS)
    header = word(HEADER, "ptr")
    devices = f.load("i64", header, 8 * run_layout.DEVICES)
    frames = f.stack_bytes((words + devices + 1) * 8)
    cells = f.stack_bytes(count * 8)
    views = f.stack_bytes(word(BUFFERS) * VIEW_BYTES)
    f.call("memcpy", "ptr", frames, word(TEMPLATE, "ptr"), words * 8)
    taken = f.var("i64", 0)
    with f.range(0, count) as i:
        entry = f.at(fields, i * _OPERAND_BYTES + 8 * OPERANDS)
        operand, view = f.load("ptr", operands, i * 8), f.at(views, taken.get() * VIEW_BYTES)
        address = f.call("read_operand", "i64", fields, entry, operand, f.at(cells, i * 8), view)
        with f.if_(address <= 0):
            f.call("PyErr_Clear", "void")
            f.call("release_views", "void", views, taken.get())
            _ret_miss(f, fields)
        with f.if_(f.load("i64", entry).equals(BUFFER)):
            taken.set(taken.get() + 1)
        f.store(address, frames, f.load("i64", entry, 8) * 8)
    offsets = f.at(fields, count * _OPERAND_BYTES + 8 * OPERANDS)
    entries = f.at(offsets, word(OFFSETS) * _OFFSET_BYTES)
    blocks = f.stack_bytes(word(BLOCKS) * 8)
    fresh = f.at(entries, word(RESULTS) * _RESULT_BYTES)
    made = f.call("make_blocks", "i64", fresh, word(BLOCKS), blocks, frames)
    with f.if_(made.equals(0)):
        f.call("release_views", "void", views, taken.get())
        f.ret(f.null())
    slab = f.var("ptr", 0)
    with f.if_(word(SLAB).differs(0)):
        slab.set(f.call("PyBytes_FromStringAndSize", "ptr", f.null(), word(SLAB)))
        with f.if_(slab.get().equals(0)):
            f.call("release_views", "void", views, taken.get())
            f.call("release_objects", "void", blocks, word(BLOCKS))
            f.ret(f.null())
        start = f.call("PyBytes_AsString", "ptr", slab.get())
        f.store(start, frames, word(SLAB_WORD) * 8)
    with f.range(0, word(OFFSETS)) as i:
        entry = f.at(offsets, i * _OFFSET_BYTES)
        origin = f.load("i64", frames, f.load("i64", entry, 8) * 8)
        f.store(origin + f.load("i64", entry, 16), frames, f.load("i64", entry) * 8)
    result = f.var("i64")
    run = f.load("ptr", header, 8 * run_layout.RUN)
    with f.if_else(word(RELEASES).differs(0)) as it:
        thread = f.call("PyEval_SaveThread", "ptr")
        result.set(f.call(run, "i64", header, frames))
        f.call("PyEval_RestoreThread", "void", thread)
        it.otherwise()
        result.set(f.call(run, "i64", header, frames))
    f.call("release_views", "void", views, taken.get())
    with f.if_(result.get().differs(run_layout.OK)):
        report = f.load("ptr", header, 8 * run_layout.FAILURE)
        with f.range(0, devices + 1) as i:
            f.store(f.load("i64", f.at(frames, words * 8), i * 8), report, i * 8)
        f.call("release_objects", "void", blocks, word(BLOCKS))
        _ret_failure(f, word(FAIL, "ptr"), result.get(), slab.get())
    out = _gathered(f, fields, entries, frames, operands, slab.get(), blocks)
    f.call("release_objects", "void", blocks, word(BLOCKS))
    with f.if_(slab.get().differs(0)):
        f.call("Py_DecRef", "void", slab.get())  # the results hold it
    f.ret(out)


def _gathered(
    f: Function, fields: Value, entries: Value, frames: Value, operands: Value, slab, blocks: Value
) -> Value:
    """The tree of results, or null."""
    state = f.stack("i64", 6)
    for k, value in enumerate((fields, entries, frames, operands, slab, blocks)):
        f.store(value, state, 8 * k)
    nodes = f.var("ptr", f.at(fields, f.load("i64", fields, 8 * OUT)))
    return f.call("gather_node", "ptr", nodes.pointer, state)


def _ret_failure(f: Function, fail: Value, status: Value, slab: Value) -> None:
    """Return what `fail` raises for a status."""
    with f.if_(slab.differs(0)):
        f.call("Py_DecRef", "void", slab)
    number = f.call("PyLong_FromLongLong", "ptr", status)
    f.ret_if(number.equals(0), f.null())
    raised = f.call(
        "PyObject_CallFunctionObjArgs", "ptr", fail, number, f.null(), type="ptr (ptr, ...)"
    )
    f.call("Py_DecRef", "void", number)
    f.ret(raised)
