"""A PTX function as LLVM IR: its threads as rounds of a loop, or as coroutines where they meet.

    text = translate(module, "kernel_...", "checked").text
    # defines void @emulated_checked_kernel_...(ptr environment): a whole launch

A text has everything that only its function needs: functions that it calls, constants. A family of
instructions has its meaning in a file of its own; `_FAMILIES` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spmd.base.record import record
from spmd.compile.cuda.emulator import (
    approximate,
    checks,
    coroutines,
    floats,
    integers,
    layout,
    meetings,
    memory,
    moves,
)
from spmd.compile.cuda.emulator.declared import with_declarations
from spmd.compile.cuda.emulator.layout import INDEX, WORDS, Mode, native_symbol
from spmd.compile.cuda.emulator.native_functions import BEGIN_BLOCK, REPORT, RUN
from spmd.compile.cuda.emulator.ptx import Code, Instruction, Label, Module, Table
from spmd.compile.cuda.emulator.thread import Thread
from spmd.compile.cuda.emulator.types import UnknownPtxError, is_float, is_type
from spmd.compile.native.llvm.function_builder import Function, Value, Words

_FAMILIES = (memory.HANDLERS, meetings.HANDLERS, moves.HANDLERS)
# Names that mean one thing for numbers with a point and another for the others.
_OF_FLOATS = floats.HANDLERS | approximate.HANDLERS
_ARGUMENT_BYTES = 8
_DONE = "done"


@record
class Translated:
    """LLVM IR of a launch, and (space, writes, bytes, place) of the accesses that it counts."""

    symbol: str
    text: str
    accesses: tuple[tuple[str, bool, int, int], ...]


def translate(module: Module, name: str, mode: Mode) -> Translated:
    """Translate one entry of a PTX module.

    Raises:
        UnknownPtxError: it has an instruction that the emulator does not know.
    """
    entry = module.entries[name]
    tables = _tables_of(module, entry)
    together = meetings.meets(entry)
    thread = _entry(entry, mode, together, tables, module.shared)
    parts = [
        thread.f.text(),
        _launch(native_symbol(name, mode), f"{name}_thread", together, tables),
    ]
    parts += [_function(code, mode, tables) for code in _called(module, entry)]
    if tables:
        parts.append(_constants(tables))
    text = with_declarations("\n".join(parts))
    return Translated(native_symbol(name, mode), text, tuple(thread.accesses))


# ---- bodies ------------------------------------------------------------------------------------


def _entry(
    code: Code, mode: Mode, together: bool, tables: dict[Table, int], shared: Sequence[str]
) -> Thread:
    """`ptr or void (env, x, y)`: one thread of a kernel."""
    attributes = "nounwind presplitcoroutine" if together else "nounwind alwaysinline"
    returns = "ptr" if together else "void"
    f = Function(
        f"{code.name}_thread",
        returns,
        ["ptr", "i32", "i32"],
        internal=True,
        attributes=attributes,
    )
    places = _places_of_local(code)
    local = coroutines.begin(f, sum(places.values())) if together else None
    thread = Thread(f, mode)
    if local is not None:
        offset = 0
        for name, nbytes in places.items():
            slot = f.at(local, offset)
            thread.symbols[name] = lambda slot=slot: f.convert("ptrtoint", slot, "i64")
            offset += nbytes
    # All of the shared memory is one array, which begins at 0.
    thread.symbols |= dict.fromkeys(shared, lambda: thread.constant("i64", 0))
    words = Words(f, thread.environment, WORDS)
    arguments = f.convert("inttoptr", words["arguments"], "ptr")
    for k, (name, nbytes) in enumerate(code.parameters):
        if nbytes > _ARGUMENT_BYTES:
            raise UnknownPtxError(f"a parameter of {nbytes} bytes")
        thread.slots[name] = f.at(arguments, k * _ARGUMENT_BYTES)
    if together:
        coroutines.suspend(f)  # created now, run later
    late = memory.copies(code)
    if late:
        memory.begin_copies(thread)
    _write_body(thread, code, tables)
    if late:
        memory.end_copies(thread)
    if together:
        states = f.convert("inttoptr", thread.word("states"), "ptr")
        f.store(f.value("i8", coroutines.ENDED), states, thread.cast(thread.number, "i64"))
        coroutines.end(f)
    else:
        f.ret()
    return thread


def _function(code: Code, mode: Mode, tables: dict[Table, int]) -> str:
    """`void (env, x, y, result, parameters...)`: a device function; places by their addresses."""
    slots = [name for name, _ in code.parameters]
    f = Function(
        code.name, "void", ["ptr", "i32", "i32", "ptr", *["ptr"] * len(slots)], internal=True
    )
    # Its accesses are to constants and to its own memory: those of the tables are not counted.
    thread = Thread(f, "plain" if mode == "counted" else mode)
    if code.result is not None:
        thread.slots[code.result[0]] = f.params[3]
    thread.slots |= dict(zip(slots, f.params[4:], strict=True))
    _write_body(thread, code, tables)
    f.ret()
    return f.text()


def _write_body(t: Thread, code: Code, tables: dict[Table, int]) -> None:
    for table, offset in tables.items():
        t.symbols[table.name] = lambda offset=offset: _table_address(t.f, t.environment, offset)
    for each in code.body:
        if isinstance(each, Label):
            t.f.goto(_label(each.name))
            t.f.start(_label(each.name))
            continue
        t.at(each)
        if each.opcode[0].startswith("."):
            _declare(t, each)
        elif each.guard and each.opcode[0] != "bra":
            condition = t.read(each.guard, "i1") ^ t.constant("i1", int(each.negated))
            with t.f.if_(condition):
                _write(t, each)
        else:
            _write(t, each)
    t.f.goto(_DONE)
    t.f.start(_DONE)


def _write(t: Thread, i: Instruction) -> None:
    name = i.opcode[0]
    if name == "bra":
        _branch(t, i)
    elif name in ("ret", "exit"):
        t.f.goto(_DONE)
    elif name == "call":
        _call(t, i)
    elif name == "trap":
        kind, zero = t.constant("i64", layout.TRAP), t.constant("i64", 0)
        number, place = t.cast(t.number, "i64"), t.constant("i64", t.place)
        given = kind, zero, zero, number, place, zero, zero
        t.f.call(REPORT, "void", t.environment, *given)
        t.f.goto(_DONE)
    else:
        _handler(i)(t, i)


def _handler(i: Instruction) -> Callable[[Thread, Instruction], None]:
    name = i.opcode[0]
    for family in _FAMILIES:
        if name in family:
            return family[name]
    last = i.opcode[-1]
    family = _OF_FLOATS if is_type(last) and is_float(last) else integers.HANDLERS
    if name not in family:
        raise UnknownPtxError(str(i))
    return family[name]


def _declare(t: Thread, i: Instruction) -> None:
    first, second = i.operands
    if i.opcode == (".reg",):
        t.declare(second, first)
        return
    if first in t.symbols:  # in the memory of a coroutine
        return
    slot = t.f.stack("i8", int(second), align=16)
    if i.opcode == (".param",):
        t.slots[first] = slot
    else:
        t.symbols[first] = lambda: t.f.convert("ptrtoint", slot, "i64")


def _places_of_local(code: Code) -> dict[str, int]:
    """The bytes of each array of local memory, in units of 16."""
    declared = [each for each in code.body if not isinstance(each, Label)]
    arrays = [each.operands for each in declared if each.opcode == (".local",)]
    return {name: -(-int(nbytes) // 16) * 16 for name, nbytes in arrays}


def _branch(t: Thread, i: Instruction) -> None:
    target = _label(i.operands[0])
    if not i.guard:
        t.f.goto(target)
        return
    after = t.f.label()
    then, otherwise = (after, target) if i.negated else (target, after)
    t.f.branch(t.read(i.guard, "i1"), then, otherwise)
    t.f.start(after)


def _call(t: Thread, i: Instruction) -> None:
    result, name, *arguments = i.operands
    slots = [t.slots[each] for each in arguments]
    into = t.slots[result] if result else t.f.null()
    t.f.call(name, "void", t.environment, t.x, t.y, into, *slots)


def _label(name: str) -> str:
    return name.replace("$", "S.")


# ---- what a body needs beside it -----------------------------------------------------------------


def _launch(symbol: str, thread: str, together: bool, tables: dict[Table, int]) -> str:
    """`void (env)`: all threads of all blocks."""
    f = Function(symbol, "void", ["ptr"])
    (environment,) = f.params
    words = Words(f, environment, WORDS)
    nbytes = sum(len(table.values) for table in tables)
    begin = _table_address(f, environment, 0) if tables else f.value("i64", 0)
    end = begin + max(offset + len(t.values) for t, offset in tables.items()) if nbytes else begin
    checks.tables_text(f, environment, begin, end)
    if together:
        f.call(RUN, "void", environment, f.symbol(thread))
        return f.text()
    with f.range(0, words["grid"]) as block:
        f.break_if(f.call(BEGIN_BLOCK, "i1", environment, block))
        with f.range(0, words["block_y"]) as y, f.range(0, words["block_x"]) as x:
            both = [f.convert("trunc", each, "i32") for each in (x, y)]
            f.call(thread, "void", environment, *both)
    return f.text()


def _called(module: Module, entry: Code) -> list[Code]:
    """The functions that an entry calls, and those that these call."""
    found: dict[str, Code] = {}
    following = [entry]
    for code in following:  # grows
        for each in code.instructions():
            if each.opcode == ("call",) and each.operands[1] not in found:
                callee = module.functions[each.operands[1]]
                if meetings.meets(callee):
                    raise UnknownPtxError(f"{callee.name} meets other threads: inline it")
                found[callee.name] = callee
                following.append(callee)
    return list(found.values())


def _tables_of(module: Module, entry: Code) -> dict[Table, int]:
    """The constants that an entry and its functions name, each with its offset in one array."""
    tables, end = {}, 0
    named = {
        operand
        for code in (entry, *_called(module, entry))
        for each in code.instructions()
        for operand in each.operands
    }
    for name, table in module.tables.items():
        if name in named:
            end = -(-end // 16) * 16
            tables[table] = end
            end += len(table.values)
    return tables


def _constants(tables: dict[Table, int]) -> str:
    values = b""
    for table, offset in tables.items():
        values = values.ljust(offset, b"\0") + table.values
    numbers = ", ".join(f"i8 {value}" for value in values)
    return f"@tables = internal constant [{len(values)} x i8] [{numbers}], align 16"


def _table_address(f: Function, environment: Value, offset: int) -> Value:
    """The address of a constant as the device sees it."""
    host = f.convert("ptrtoint", f.symbol("tables"), "i64")
    return host - f.load("i64", environment, 8 * INDEX["delta"]) + offset
