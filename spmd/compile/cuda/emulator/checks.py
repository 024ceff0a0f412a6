"""Native functions that check accesses to memory, and give the address to access instead.

Global memory: `granules` holds, for each 16 bytes of the device, how many of them (from the first)
are allocated. An access is as wide as it is aligned, or refused, so it lies in one granule.

Shared memory: for each byte, who wrote it last and who read it, in which epoch. An epoch ends at a
barrier. Two accesses race if they are of one epoch and of two threads, and one writes; inside of a
warp `__syncwarp()` orders them too. So a race is found whatever order the threads ran in. Bytes,
because neighbouring elements of one byte each are no race.

A refused access touches `nowhere`. The first mistake of a launch is kept, with its place.
"""

from __future__ import annotations

from spmd.compile.cuda.emulator import layout
from spmd.compile.cuda.emulator.layout import GRANULE, INDEX, REPORT, TRACE_WORDS, WORDS
from spmd.compile.native.llvm.function_builder import Function, Value, Words

# The last access to a byte: epoch, then 16 bits for the epoch inside of the warp, then 16 bits for
# the thread: its number and 1; or SEVERAL_OF and a warp's number; or ANYBODY.
# A thread's number with UNDER_WAY is a writer whose copy has not landed (late_copies.py).
EPOCH, _WARP_EPOCH, _WHO = 32, 16, 0xFFFF
UNDER_WAY, SEVERAL_OF, ANYBODY = 0x2000, 0x4000, 0xFFFF
# For each byte four words: its writer and the place, its readers and the place of the last.
TOUCHED_WORDS = 4


def report_text(symbol: str) -> str:
    """`void (env, kind, address, nbytes, thread, place, other, other_place)`."""
    f = Function(symbol, "void", ["ptr", *["i64"] * 7], attributes="nounwind noinline cold")
    environment, *given = f.params
    words = Words(f, environment, WORDS)
    report = f.convert("inttoptr", words["report"], "ptr")
    with f.if_(f.load("i64", report).equals(layout.NONE)):
        names = ("kind", "address", "nbytes", "thread", "place", "other", "other_place")
        values = dict(zip(names, given, strict=True)) | {"block": words["block"]}
        for k, name in enumerate(REPORT):
            f.store(values[name], report, 8 * k)
    return f.text()


def check_global_text(symbol: str, report: str) -> str:
    """`ptr (env, address, nbytes, thread, place, write)`: the host's address."""
    f = Function(symbol, "ptr", ["ptr", *["i64"] * 5])
    environment, address, nbytes, thread, place, write = f.params
    words = Words(f, environment, WORDS)
    here = f.convert("inttoptr", address + words["delta"], "ptr")

    def refuse(kind: Value | int) -> None:
        number = f.value("i64", kind)
        zero = f.value("i64", 0)
        f.call(report, "void", environment, number, address, nbytes, thread, place, zero, zero)
        f.ret(f.convert("inttoptr", words["nowhere"], "ptr"))

    with f.if_((address & (nbytes - 1)).differs(0)):
        refuse(layout.MISALIGNED)
    offset = address - words["base"]
    with f.if_(_below(f, offset, words["extent"])):
        granules = f.convert("inttoptr", words["granules"], "ptr")
        valid = f.load("i8", granules, offset >> 4)
        with f.if_(f.convert("zext", valid, "i64") >= (offset & GRANULE - 1) + nbytes):
            accessed = f.at(f.convert("inttoptr", words["accessed"], "ptr"), offset >> 4)
            how = f.convert("trunc", f.select(write.differs(0), f.value("i64", 2), 1), "i8")
            f.store(f.load("i8", accessed) | how, accessed)
            f.ret(here)
    # A function's own constants lie next to its code.
    begin, end = words["tables_begin"], words["tables_end"]
    inside = f.emit("i1", f"icmp uge i64 {address.text}, {begin.text}")
    last = address + nbytes
    inside = inside & f.emit("i1", f"icmp ule i64 {last.text}, {end.text}")
    with f.if_(inside & write.equals(0)):
        f.ret(here)
    refuse(f.select(write.differs(0), layout.WRITE_OUTSIDE, f.value("i64", layout.READ_OUTSIDE)))
    return f.text()


def check_shared_text(symbol: str, report: str) -> str:
    """`ptr (env, address, nbytes, thread, place, write)`: the host's address."""
    f = Function(symbol, "ptr", ["ptr", *["i64"] * 5])
    environment, address, nbytes, thread, place, write = f.params
    words = Words(f, environment, WORDS)

    def tell(kind: int, *other: Value) -> None:
        who = other or [f.value("i64", 0)] * 2
        what = f.value("i64", kind)
        f.call(report, "void", environment, what, address, nbytes, thread, place, *who)

    nowhere = f.convert("inttoptr", words["nowhere"], "ptr")
    room = words["shared_bytes"] - nbytes
    with f.if_(f.emit("i1", f"icmp ugt i64 {address.text}, {room.text}") | (room < 0)):
        tell(layout.SHARED_OUTSIDE)
        f.ret(nowhere)
    with f.if_((address & (nbytes - 1)).differs(0)):
        tell(layout.MISALIGNED)
        f.ret(nowhere)
    warp = thread >> 5
    warp_epochs = f.convert("inttoptr", words["warp_epochs"], "ptr")
    epoch, warp_epoch = words["epoch"], f.load("i64", warp_epochs, warp * 8) & _WHO
    now = (epoch << EPOCH) | (warp_epoch << _WARP_EPOCH)
    me = now | (thread + 1)
    touched = f.convert("inttoptr", words["touched"], "ptr")

    def of_warp(who: Value) -> Value:
        """The warp of the threads that touched a byte; -1 for several warps."""
        single = (who - 1) >> 5
        several = f.select(who.equals(ANYBODY), -1, who - SEVERAL_OF)
        return f.select(who < SEVERAL_OF, single, several)

    def conflicts(entry: Value) -> Value:
        who = entry & _WHO
        this_epoch = (entry >> EPOCH).equals(epoch) & who.differs(thread + 1)
        ordered = of_warp(who).equals(warp) & ((entry >> _WARP_EPOCH) & _WHO).differs(warp_epoch)
        return this_epoch & (ordered ^ f.value("i1", 1))

    def is_under_way(entry: Value) -> Value:
        who = entry & _WHO
        found = (who >= UNDER_WAY) & (who < SEVERAL_OF)
        return found & ((entry >> EPOCH) >= words["block_epoch"])

    with f.range(address, address + nbytes) as byte:
        entry = f.at(touched, byte * (8 * TOUCHED_WORDS))
        writer, reader = f.load("i64", entry), f.load("i64", entry, 16)
        with f.if_(is_under_way(writer)):
            owner = (writer & _WHO) - (1 + UNDER_WAY)
            tell(layout.UNDER_WAY, owner, f.load("i64", entry, 8))
        with f.if_(conflicts(writer)):
            tell(layout.RACE, (writer & _WHO) - 1, f.load("i64", entry, 8))
        with f.if_else(write.differs(0)) as it:
            with f.if_(conflicts(reader)):
                tell(layout.RACE, (reader & _WHO) - 1, f.load("i64", entry, 24))
            f.store(me, entry)
            f.store(place, entry, 8)
            it.otherwise()
            who = reader & _WHO
            fresh = (reader >> EPOCH).differs(epoch) | who.equals(thread + 1)
            same_warp = of_warp(who).equals(warp)
            same_time = ((reader >> _WARP_EPOCH) & _WHO).equals(warp_epoch)
            several = f.select(same_time, now | SEVERAL_OF | warp, me)
            shared = f.select(same_warp, several, now | ANYBODY)
            f.store(f.select(fresh, me, shared), entry, 16)
            f.store(place, entry, 24)
    f.ret(f.convert("inttoptr", words["shared"] + address, "ptr"))
    return f.text()


def trace_text(symbol: str) -> str:
    """`void (env, number, address, thread)`: note an access, while there is room."""
    f = Function(symbol, "void", ["ptr", *["i64"] * 3])
    environment, number, address, thread = f.params
    words = Words(f, environment, WORDS)
    trace = f.convert("inttoptr", words["trace"], "ptr")
    used, room = f.load("i64", trace), f.load("i64", trace, 8)
    f.store(used + TRACE_WORDS, trace)  # more than there is room for says how much is lacking
    with f.if_(used + TRACE_WORDS <= room):
        for k, value in enumerate((number, address, thread, words["block"])):
            f.store(value, trace, (used + 2 + k) * 8)
    return f.text()


def _below(f: Function, x: Value, y: Value) -> Value:
    return f.emit("i1", f"icmp ult i64 {x.text}, {y.text}")


def tables_text(f: Function, environment: Value, begin: Value, end: Value) -> None:
    """Note where a function's constants are, as device addresses."""
    for name, value in (("tables_begin", begin), ("tables_end", end)):
        f.store(value, environment, 8 * INDEX[name])
