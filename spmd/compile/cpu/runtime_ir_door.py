"""The way from Python into a program, as native code: a built-in function takes the operands.

The one idea: a `ctypes` call converts each argument through Python-level descriptors and needs a
buffer that was packed before; a function with CPython's own calling convention reads the operands
off the interpreter's stack, in a quarter of the time. It uses only functions of the stable ABI and
the layout of no object.

`spmd_door(self, args, count)` is a METH_FASTCALL function. `self` is the address of the door's
words: what to call, the frames' constant words, and how to read each operand (see `DOOR_WORDS`).
"""

from __future__ import annotations

from spmd.compile.cpu import runtime_ir_execute as execute
from spmd.compile.cpu.runtime_ir import Function, Value

# The words of a door: program header, number of operands, words of all frames, whether the run
# releases the GIL, address of the frames' template, number of buffers, number of offsets; then for
# each operand its kind and the word of the frames that gets its address; then for each offset a
# word, the word that it starts from, and the bytes in between.
HEADER, COUNT, WORDS, RELEASES, TEMPLATE, BUFFERS, OFFSETS, OPERANDS = range(8)

# How an operand is given: the address itself, a bytes object that gets results, an object with the
# buffer protocol, or a Python number that is stored as an element.
ADDRESS, BYTES, BUFFER, F32, F64, I32, I64, BOOL = range(8)

# The result is the address of the last operand if all went well; the negative status of the run if
# not; or this, if an operand was not what the door expects and nothing has run.
UNFIT = -64

# `Py_buffer` as the stable ABI fixes it, with room to spare; its first field is the address.
VIEW_BYTES = 128
# C-contiguous memory of any format, only to be read.
_PYBUF_SIMPLE = 0

_DECLARATIONS = """
declare i64 @PyLong_AsLongLong(ptr)
declare ptr @PyLong_FromLongLong(i64)
declare ptr @PyBytes_AsString(ptr)
declare double @PyFloat_AsDouble(ptr)
declare i32 @PyObject_IsTrue(ptr)
declare i32 @PyObject_GetBuffer(ptr, ptr, i32)
declare void @PyBuffer_Release(ptr)
declare ptr @PyErr_Occurred()
declare void @PyErr_Clear()
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare ptr @memcpy(ptr, ptr, i64)
"""


def door_text() -> str:
    """The module of the door."""
    return "\n".join([_DECLARATIONS, _release().text(), _read().text(), _door().text()])


def _release() -> Function:
    """release_views(views, taken): give back the buffers that were taken."""
    f = Function("release_views", "void", ["ptr", "i64"], internal=True)
    views, taken = f.params
    with f.range(0, taken) as i:
        f.call("PyBuffer_Release", "void", f.at(views, i * VIEW_BYTES))
    return f


def _read() -> Function:
    """read_operand(kind, object, cell, view): the address of an operand's elements, or 0 or -1.

    Numbers are written to `cell`; `view` is filled by a buffer. Without an address a Python error
    may be set.
    """
    f = Function("read_operand", "i64", ["i64", "ptr", "ptr", "ptr"], internal=True)
    kind, operand, cell, view = f.params
    here = f.convert("ptrtoint", cell, "i64")
    with f.if_(kind.equals(ADDRESS)):
        f.ret(f.call("PyLong_AsLongLong", "i64", operand))
    with f.if_(kind.equals(BYTES)):
        f.ret(f.convert("ptrtoint", f.call("PyBytes_AsString", "ptr", operand), "i64"))
    with f.if_(kind.equals(BUFFER)):
        failed = f.call("PyObject_GetBuffer", "i32", operand, view, f.value("i32", _PYBUF_SIMPLE))
        with f.if_(failed.differs(0)):
            f.ret(0)
        f.ret(f.load("i64", view))
    with f.if_((kind.equals(F32)) | (kind.equals(F64))):
        number = f.call("PyFloat_AsDouble", "double", operand)
        with f.if_(number.equals(-1.0)):
            with f.if_(f.call("PyErr_Occurred", "ptr").differs(0)):
                f.ret(0)
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
        with f.if_(f.call("PyErr_Occurred", "ptr").differs(0)):
            f.ret(0)
    f.store(whole, cell)
    narrow = f.convert("sext", f.convert("trunc", whole, "i32"), "i64")
    f.ret(f.select(kind.equals(I32) & narrow.differs(whole), f.value("i64", 0), here))
    return f


def _door() -> Function:
    """spmd_door(self, args, count): fill the frames from the operands, and run."""
    f = Function("spmd_door", "ptr", ["ptr", "ptr", "i64"])
    me, args, given = f.params
    door = f.convert("inttoptr", f.call("PyLong_AsLongLong", "i64", me), "ptr")

    def word(index: int) -> Value:
        return f.load("i64", door, 8 * index)

    def status(number: Value) -> Value:
        return f.call("PyLong_FromLongLong", "ptr", number)

    count, words = word(COUNT), word(WORDS)
    with f.if_(given.differs(count)):
        f.ret(status(f.value("i64", UNFIT)))
    header = f.load("ptr", door, 8 * HEADER)
    devices = f.load("i64", header, 8 * execute.DEVICES)
    frames = f.stack_bytes((words + devices + 1) * 8)
    cells = f.stack_bytes(count * 8)
    views = f.stack_bytes(word(BUFFERS) * VIEW_BYTES)
    f.call("memcpy", "ptr", frames, f.load("ptr", door, 8 * TEMPLATE), words * 8)
    taken, last = f.var("i64", 0), f.var("i64", 0)
    with f.range(0, count) as i:
        entry = f.at(door, i * 16 + 8 * OPERANDS)
        kind = f.load("i64", entry)
        operand, view = f.load("ptr", args, i * 8), f.at(views, taken.get() * VIEW_BYTES)
        address = f.call("read_operand", "i64", kind, operand, f.at(cells, i * 8), view)
        with f.if_(address <= 0):
            f.call("PyErr_Clear", "void")
            f.call("release_views", "void", views, taken.get())
            f.ret(status(f.value("i64", UNFIT)))
        with f.if_(kind.equals(BUFFER)):
            taken.set(taken.get() + 1)
        f.store(address, frames, f.load("i64", entry, 8) * 8)
        last.set(address)
    offsets = f.at(door, count * 16 + 8 * OPERANDS)
    with f.range(0, word(OFFSETS)) as i:
        entry = f.at(offsets, i * 24)
        origin = f.load("i64", frames, f.load("i64", entry, 8) * 8)
        f.store(origin + f.load("i64", entry, 16), frames, f.load("i64", entry) * 8)
    result = f.var("i64")
    run = f.load("ptr", header, 8 * execute.RUN)
    with f.if_else(word(RELEASES).differs(0)) as it:
        thread = f.call("PyEval_SaveThread", "ptr")
        result.set(f.call(run, "i64", header, frames))
        f.call("PyEval_RestoreThread", "void", thread)
        it.otherwise()
        result.set(f.call(run, "i64", header, frames))
    f.call("release_views", "void", views, taken.get())
    with f.if_(result.get().differs(execute.OK)):
        report = f.load("ptr", header, 8 * execute.FAILURE)
        with f.range(0, devices + 1) as i:
            f.store(f.load("i64", f.at(frames, words * 8), i * 8), report, i * 8)
        f.ret(status(f.value("i64", 0) - result.get()))
    f.ret(status(last.get()))
    return f
