"""Steps that call Python, as native code."""

from __future__ import annotations

from spmd.compile.native.llvm.function_builder import I64, Function, Ptr, define
from spmd.compile.native.program import byte_code as layout
from spmd.compile.native.program.run_layout import MISMATCH, OK, RAISED
from spmd.compile.native.runtime.ir.execute import (
    CALL,
    DEVICE_COUNT,
    device_at,
    field,
    next_slot,
    report_reached,
    report_step,
    resolve,
)


def callback_texts() -> list[str]:
    """The function of such steps, and its helpers."""
    return [resolve().text(), _callback().text()]


@define("run_callback", "i64")
def _callback(
    f: Function, context: Ptr, step: Ptr, _end: Ptr, active: Ptr, count: I64, args: Ptr
) -> None:
    """Call Python, `callback(step id, device, args)`: for each device, or for all as device -1."""
    devices = f.load("i64", context, DEVICE_COUNT)
    views, together = field(f, step, 0), field(f, step, 1).differs(0)
    with f.if_(together & (count < devices)):
        report_reached(f, context, step, active, count)
        f.ret(MISMATCH)
    width = f.select(together, count, 1)
    table = f.var("ptr", args)
    with f.if_(together):
        table.set(f.stack_bytes(width * views * 8 + 8))
    call, number = f.load("ptr", context, CALL), f.load("i64", step, 16)
    first = f.at(step, 8 * (layout.HEAD + layout.CALLBACK_FIELDS))
    with f.range(0, count) as position:
        device = device_at(f, active, position)
        row = f.at(table.get(), f.select(together, position, 0) * views * 8)
        cursor = f.var("ptr", first)
        with f.range(0, views) as i:
            f.store(f.call("resolve", "ptr", context, cursor.get(), device), row, i * 8)
            next_slot(f, cursor)
        last = position.equals(count - 1)
        with f.if_(last | together.equals(0)):
            who = f.select(together, -1, device)
            status = f.call(call, "i64", number, who, table.get())
            with f.if_(status.differs(0)):
                report_step(f, context, step)
                f.ret(RAISED)
    f.ret(OK)
