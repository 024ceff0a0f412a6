"""Collectives between the local devices as native code: memory operations over their frames.

The one idea: when the executor reaches a collective, every device of a group has its operand in
memory, so no device waits for another. First it checks that each group is there as a whole, then it
cuts the result into independent units for the pool. The order of a reduction is that of the group,
whatever thread does it.
"""

from __future__ import annotations

from collections.abc import Sequence

from spmd.compile.native.llvm.function_builder import (
    I64,
    STREAM_ALIGNMENT,
    STREAM_METADATA,
    Function,
    Ptr,
    Value,
    define,
)
from spmd.compile.native.program import byte_code as layout
from spmd.compile.native.program.run_layout import MISMATCH, OK
from spmd.compile.native.runtime.ir.execute import (
    DEVICE_COUNT,
    device_at,
    field,
    next_slot,
    report_reached,
    resolve,
)

# A unit of work: small enough to balance, and to stay in a cache between its reads and writes.
PIECE_ELEMENTS = 8192
PIECE_BYTES = 64 * 1024

# The job handed to the unit bodies: the step, the table of operand addresses, pieces per member.
JOB_STEP, JOB_TABLE, JOB_PIECES = range(0, 24, 8)

(_ALL_REDUCE, _REDUCE_SCATTER, _BROADCAST, _PERMUTE, _ALL_GATHER, _ALL_TO_ALL, _EXCHANGE) = range(7)


def exchange_texts() -> list[str]:
    """The functions of the collectives."""
    functions = (
        resolve(),
        _gather_groups(),
        _reduce_units(),
        _scatter_units(),
        _stream_copy(),
        _copy_units(),
        _box_row(),
        _box_units(),
        _collective(),
    )
    return [*(f.text() for f in functions), STREAM_METADATA]


def _fields(f: Function, step: Value) -> dict[str, Value]:
    names = "kind block rows size groups kernel elements root cost_ps members_at sources_at"
    names += " streams writers"
    return {name: field(f, step, i) for i, name in enumerate(names.split())}


def _gather_groups() -> Function:
    """gather_groups(context, step, active, count, flags, table): the addresses of whole groups.

    A row of the table belongs to a group: the input addresses of its members, then their output
    addresses. Groups without an arrived device are left out. Gives the number of rows, or -1 if a
    group is only partly there.
    """
    params = ["ptr", "ptr", "ptr", "i64", "ptr", "ptr"]
    f = Function("gather_groups", "i64", params, internal=True)
    context, step, active, count, flags, table = f.params
    of = _fields(f, step)
    size, members = of["size"], f.at(step, of["members_at"] * 8)
    with f.range(0, count) as position:
        f.store(f.value("i8", 1), flags, device_at(f, active, position))
    cursor = f.var("ptr", f.at(step, 8 * (layout.HEAD + layout.COLLECTIVE_FIELDS)))
    source = cursor.get()
    next_slot(f, cursor)
    target = cursor.get()
    rows = f.var("i64", 0)
    with f.range(0, of["groups"]) as group:
        present = f.var("i64", 0)
        own = f.at(members, group * size * 8)
        with f.range(0, size) as i:
            flag = f.load("i8", flags, f.load("i64", own, i * 8))
            present.set(present.get() + f.convert("zext", flag, "i64"))
        f.ret_if((present.get() > 0) & (present.get() < size), -1)
        with f.if_(present.get().equals(size)):
            row = f.at(table, rows.get() * size * 16)
            with f.range(0, size) as i:
                device = f.load("i64", own, i * 8)
                f.store(f.call("resolve", "ptr", context, source, device), row, i * 8)
                result = f.call("resolve", "ptr", context, target, device)
                f.store(result, row, (i + size) * 8)
            rows.set(rows.get() + 1)
    f.ret(rows.get())
    return f


def _unit_job(f: Function) -> tuple[Value, Value, dict[str, Value], Value, Value, Value]:
    job, begin, end = f.params
    step, table = f.load("ptr", job, JOB_STEP), f.load("ptr", job, JOB_TABLE)
    return step, table, _fields(f, step), f.load("i64", job, JOB_PIECES), begin, end


@define("reduce_units", "void")
def _reduce_units(f: Function, _job: Ptr, _begin: I64, _end: I64) -> None:
    """Pool body of all_reduce: unit = (group, piece)."""
    _, table, of, pieces, begin, end = _unit_job(f)
    size = of["size"]
    kernel = f.convert("inttoptr", of["kernel"], "ptr")
    elements = of["rows"] * of["elements"]
    counts = f.stack("i64", 2)
    f.store(size, counts)
    f.store(of["writers"], counts, 8)
    now = f.var("i64", begin)
    with f.loop():
        unit = now.get()
        f.break_if(unit >= end)
        group = unit // pieces
        piece = unit - group * pieces
        last = f.smaller(piece + (end - unit), pieces)
        finish = f.smaller(last * PIECE_ELEMENTS, elements)
        row = f.at(table, group * size * 16)
        f.call(kernel, "void", row, counts, piece * PIECE_ELEMENTS, finish)
        now.set(unit + (last - piece))


@define("scatter_units", "void")
def _scatter_units(f: Function, _job: Ptr, _begin: I64, _end: I64) -> None:
    """Pool body of reduce_scatter: unit = (group, member, piece)."""
    _, table, of, pieces, begin, end = _unit_job(f)
    size, block = of["size"], of["block"]
    kernel = f.convert("inttoptr", of["kernel"], "ptr")
    counts = f.stack("i64", 2)
    f.store(size, counts)
    f.store(f.value("i64", 1), counts, 8)
    args = f.stack_bytes((size + 1) * 8)
    with f.range(begin, end) as unit:
        owner = unit // pieces
        piece = unit - owner * pieces
        group = owner // size
        member = owner - group * size
        row = f.at(table, group * size * 16)
        finish = f.smaller((piece + 1) * PIECE_ELEMENTS, of["elements"])
        with f.range(0, of["rows"]) as r:
            with f.range(0, size) as i:
                origin = f.load("ptr", row, i * 8)
                f.store(f.at(origin, (r * size + member) * block), args, i * 8)
            target = f.load("ptr", row, (size + member) * 8)
            f.store(f.at(target, r * block), args, size * 8)
            f.call(kernel, "void", args, counts, piece * PIECE_ELEMENTS, finish)


@define("stream_copy", "void")
def _stream_copy(f: Function, to: Ptr, origin: Ptr, nbytes: I64) -> None:
    """stream_copy(to, from, bytes): a copy that leaves the caches alone."""
    odd = f.convert("ptrtoint", to, "i64") % STREAM_ALIGNMENT
    streamed = f.select(odd.equals(0), nbytes - nbytes % (4 * STREAM_ALIGNMENT), 0)
    with f.range(0, streamed, 4 * STREAM_ALIGNMENT) as at:
        vector = f.load(f"<{STREAM_ALIGNMENT} x i32>", f.at(origin, at), align=1)
        f.stream(vector, f.at(to, at))
    # Such stores are not ordered by the release that says a unit is done.
    f.do("fence seq_cst")
    rest = nbytes - streamed
    f.call("memmove", "ptr", f.at(to, streamed), f.at(origin, streamed), rest)


@define("copy_units", "void")
def _copy_units(f: Function, _job: Ptr, _begin: I64, _end: I64) -> None:
    """Pool body of the collectives that only move data: unit = (group, writing member, piece)."""
    step, table, of, pieces, begin, end = _unit_job(f)
    size, block, kind = of["size"], of["block"], of["kind"]
    gathers = kind >= _ALL_GATHER
    columns = f.select(gathers, size, 1)
    with f.range(begin, end) as unit:
        owner = unit // pieces
        offset = (unit - owner * pieces) * PIECE_BYTES
        length = f.smaller(block - offset, PIECE_BYTES)
        group = owner // of["writers"]
        member = owner - group * of["writers"]
        row = f.at(table, group * size * 16)
        target = f.load("ptr", row, (size + member) * 8)
        with f.range(0, of["rows"]) as r, f.range(0, columns) as column:
            to = f.at(target, (r * columns + column) * block + offset)
            sender = f.var("i64", column)
            with f.if_(kind.equals(_BROADCAST)):
                sender.set(of["root"])
            with f.if_(kind.equals(_PERMUTE)):
                sender.set(f.load("i64", f.at(step, of["sources_at"] * 8), member * 8))
            with f.if_else(sender.get() < 0) as it:
                f.call("memset", "ptr", to, f.value("i32", 0), length)
                it.otherwise()
                origin = f.load("ptr", row, sender.get() * 8)
                place = f.select(kind.equals(_ALL_TO_ALL), r * size + member, r)
                start = f.at(origin, place * block + offset)
                with f.if_else(of["streams"].differs(0)) as how:
                    f.call("stream_copy", "void", to, start, length)
                    how.otherwise()
                    f.call("memmove", "ptr", to, start, length)


def _box_row() -> Function:
    """box_row(to, from, width, trips, far, near, streams): the innermost loop of a box.

    Rows of one number of 4 or 8 bytes, as a dim cut in single columns has, are moved without a
    call. Without `from` the rows become zeros.
    """
    params = ["ptr", "ptr", "i64", "i64", "i64", "i64", "i64"]
    f = Function("box_row", "void", params, internal=True)
    to, origin, width, trips, far, near, streams = f.params
    with f.if_(origin.equals(f.null())):
        with f.range(0, trips) as k:
            f.call("memset", "ptr", f.at(to, k * far), f.value("i32", 0), width)
        f.ret()
    for bits in (32, 64):
        with f.if_(width.equals(bits // 8)):
            with f.range(0, trips) as k:
                number = f.load(f"i{bits}", origin, k * near, align=1)
                f.store(number, to, k * far, align=1)
            f.ret()
    with f.range(0, trips) as k:
        place, start = f.at(to, k * far), f.at(origin, k * near)
        with f.if_else(streams.differs(0)) as how:
            f.call("stream_copy", "void", place, start, width)
            how.otherwise()
            f.call("memmove", "ptr", place, start, width)
    f.ret()
    return f


@define("box_units", "void")
def _box_units(f: Function, _job: Ptr, _begin: I64, _end: I64) -> None:
    """Pool body of an exchange: unit = (group, box, piece of its outermost loop)."""
    step, table, of, pieces, begin, end = _unit_job(f)
    size, boxes = of["size"], of["root"]
    with f.range(begin, end) as unit:
        owner = unit // pieces
        piece = unit - owner * pieces
        group = owner // boxes
        number = owner - group * boxes
        box = f.at(step, (of["sources_at"] + number * layout.BOX_FIELDS) * 8)
        source, target, start, place, width = (f.load("i64", box, 8 * k) for k in range(5))
        loops = [
            [f.load("i64", box, 8 * (5 + 3 * n + k)) for k in range(3)]
            for n in range(layout.BOX_LOOPS)
        ]
        row = f.at(table, group * size * 16)
        to = f.at(f.load("ptr", row, (size + target) * 8), place)
        origin = f.var("ptr", f.null())
        with f.if_(source >= 0):
            origin.set(f.at(f.load("ptr", row, source * 8), start))
        # The outermost loop that runs at all is the one that is cut.
        cut = f.var("i64", layout.BOX_LOOPS - 1)
        for n in reversed(range(layout.BOX_LOOPS - 1)):
            with f.if_(loops[n][0] > 1):
                cut.set(n)
        bounds = []
        for n, (trips, _, _) in enumerate(loops):
            is_cut = cut.get().equals(n)
            first = f.select(is_cut, trips * piece // pieces, 0)
            bounds.append((first, f.select(is_cut, trips * (piece + 1) // pieces, trips)))
        _box_loops(f, to, origin.get(), loops, bounds, width, of["streams"])
    f.ret()


def _box_loops(
    f: Function,
    to: Value,
    origin: Value,
    loops: Sequence[Sequence[Value]],
    bounds: Sequence[tuple[Value, Value]],
    width: Value,
    streams: Value,
) -> None:
    """The loops of a box, from outside to inside; zeros have no origin to move."""
    (first, last), (_, near, far) = bounds[0], loops[0]
    has_origin = origin.differs(f.null())
    if len(loops) == 1:
        place = f.at(to, first * far)
        start = f.select(has_origin, f.at(origin, first * near), f.null())
        f.call("box_row", "void", place, start, width, last - first, far, near, streams)
        return
    with f.range(first, last) as k:
        start = f.select(has_origin, f.at(origin, k * near), f.null())
        _box_loops(f, f.at(to, k * far), start, loops[1:], bounds[1:], width, streams)


@define("run_collective", "i64")
def _collective(
    f: Function, context: Ptr, step: Ptr, _end: Ptr, active: Ptr, count: I64, _args: Ptr
) -> None:
    """Run a collective step for the groups whose devices are all active."""
    of = _fields(f, step)
    devices = f.load("i64", context, DEVICE_COUNT)
    flags = f.stack_bytes(devices)
    f.call("memset", "ptr", flags, f.value("i32", 0), devices)
    table = f.stack_bytes(of["groups"] * of["size"] * 16)
    rows = f.call("gather_groups", "i64", context, step, active, count, flags, table)
    with f.if_(rows < 0):
        report_reached(f, context, step, active, count)
        f.ret(MISMATCH)
    f.ret_if(of["block"].equals(0) | of["rows"].equals(0) | rows.equals(0), OK)
    job = f.stack("i64", 3)
    f.store(step, job, JOB_STEP)
    f.store(table, job, JOB_TABLE)
    members = rows * of["size"]
    work = members * of["cost_ps"]

    def share(body: str, owners: Value, pieces: Value) -> None:
        f.store(pieces, job, JOB_PIECES)
        units = owners * pieces
        f.call("share", "void", context, f.symbol(body), job, units, work // units)
        f.ret(OK)

    with f.if_(of["kind"].equals(_ALL_REDUCE)):
        elements = of["rows"] * of["elements"]
        share("reduce_units", rows, (elements + (PIECE_ELEMENTS - 1)) // PIECE_ELEMENTS)
    with f.if_(of["kind"].equals(_REDUCE_SCATTER)):
        pieces = (of["elements"] + (PIECE_ELEMENTS - 1)) // PIECE_ELEMENTS
        share("scatter_units", members, pieces)
    with f.if_(of["kind"].equals(_EXCHANGE)):
        share("box_units", rows * of["root"], of["elements"])
    writers = rows * of["writers"]
    share("copy_units", writers, (of["block"] + (PIECE_BYTES - 1)) // PIECE_BYTES)
    f.ret(OK)
