"""Instructions at which threads meet: barriers, shuffles, votes, tiles and products of tiles.

Each gives what it has to give, suspends its coroutine, and goes on when those it waits for are
there. PTX ISA, sections 9.7.9 (shfl.sync), 9.7.13 (bar, vote) and 9.7.14 (ldmatrix, mma).
"""

from __future__ import annotations

from collections.abc import Callable

from spmd.compile.cuda.emulator.coroutines import BARRIER, MEET, MEET_IN_ORDER, suspend
from spmd.compile.cuda.emulator.lanes import DEPTHS, SHUFFLES
from spmd.compile.cuda.emulator.layout import LANE_WORDS
from spmd.compile.cuda.emulator.memory import host_address
from spmd.compile.cuda.emulator.native_functions import BALLOT, MATRIX, MULTIPLY, SHUFFLE
from spmd.compile.cuda.emulator.ptx import Code, Instruction
from spmd.compile.cuda.emulator.thread import Thread
from spmd.compile.cuda.emulator.types import UnknownPtxError
from spmd.compile.native.llvm.function_builder import Value

_NAMES = ("bar", "barrier", "shfl", "vote", "ldmatrix", "mma")
_EVERYONE = "-1"


def meets(code: Code) -> bool:
    """Whether threads of a function meet."""
    return any(each.opcode[0] in _NAMES for each in code.instructions())


def barrier(t: Thread, i: Instruction) -> None:
    """`bar.sync 0`, `barrier.sync.aligned 0`, and `bar.warp.sync`."""
    if "warp" in i.opcode:
        _wait(t, MEET_IN_ORDER, i.operands[0])
        return
    if "sync" not in i.opcode or i.operands != ("0",):
        raise UnknownPtxError(str(i))
    _wait(t, BARRIER, _EVERYONE)


def shuffle(t: Thread, i: Instruction) -> None:
    """`shfl.sync`: a number from another lane, and whether there is such a lane."""
    mode = i.opcode[2]
    if mode not in SHUFFLES:
        raise UnknownPtxError(str(i))
    into, value, by, limits, mask = i.operands
    name, _, valid = into.partition("|")
    _give(t, [t.read(value, "i32")])
    distance, segments = (t.cast(t.read(each, "i32"), "i64", True) for each in (by, limits))
    _wait(t, MEET, mask)
    number = t.cast(t.number, "i64")
    got = t.f.call(SHUFFLE[mode], "i64", t.environment, number, distance, segments)
    t.write(name, t.cast(got, "i32"))
    if valid:
        t.write(valid.strip(), (got >> 32).differs(0))


def vote(t: Thread, i: Instruction) -> None:
    """`vote.sync`: `.ballot`, `.all`, `.any`, `.uni` of a predicate."""
    mode = i.opcode[2]
    into, source, mask = i.operands
    value = t.read(source.removeprefix("!"), "i1")
    value = value ^ t.constant("i1", int(source.startswith("!")))
    _give(t, [t.cast(value, "i32")])
    lanes = t.cast(t.read(mask, "i32"), "i64")
    _wait(t, MEET, mask)
    bits = t.f.call(BALLOT, "i64", t.environment, t.cast(t.number, "i64"), lanes)
    # Lanes that a block does not have neither agree nor differ.
    threads = t.word("block_x") * t.word("block_y")
    first = t.cast(t.number, "i64") & -32
    count = t.f.smaller(threads - first, 32)
    lanes = lanes & ((t.constant("i64", 1) << count) - 1)
    none, every = bits.equals(0), bits.equals(lanes)
    results = {"any": none ^ t.constant("i1", 1), "all": every, "uni": none | every}
    if mode == "ballot":
        t.write(into, t.cast(bits, "i32"))
    elif mode in results:
        t.write(into, results[mode])
    else:
        raise UnknownPtxError(str(i))


def load_matrices(t: Thread, i: Instruction) -> None:
    """`ldmatrix.sync.aligned.m8n8.x1/x2/x4{.trans}.shared.b16`: tiles of 8 rows of 16 bytes.

    A lane reads the row whose address it has, which its warp then divides.
    """
    transposed = "trans" in i.opcode
    trans = ("trans",) if transposed else ()
    counts = {f"x{n}": n for n in (1, 2, 4)}
    count = counts.get(i.opcode[4] if len(i.opcode) > 4 else "", 0)
    expected = ("ldmatrix", "sync", "aligned", "m8n8", f"x{count}", *trans, "shared", "b16")
    if i.opcode != expected:
        raise UnknownPtxError(str(i))
    number = t.cast(t.number, "i64")
    with t.f.if_((number & 31) < 8 * count):
        row = host_address(t, i, i.operands[1], 16, write=False)
        _give(t, [t.f.load("i32", row, 4 * k, align=4) for k in range(4)])
    _wait(t, MEET, _EVERYONE)
    for k, name in enumerate(x.strip() for x in i.operands[0].strip("{} ").split(",")):
        got = t.f.call(MATRIX[transposed], "i32", t.environment, number, t.constant("i64", k))
        t.write(name, got)


def multiply(t: Thread, i: Instruction) -> None:
    """`mma.sync.aligned.m16n8k16.row.col.f32.*.*.f32` of f16 or bf16, `m16n8k8` of TF32."""
    half = i.opcode[7] if len(i.opcode) == 10 else ""
    shape = f"m16n8k{DEPTHS.get(half, 0)}"
    expected = ("mma", "sync", "aligned", shape, "row", "col", "f32", half, half, "f32")
    if i.opcode != expected:
        raise UnknownPtxError(str(i))
    groups = [[x.strip() for x in each.strip("{} ").split(",")] for each in i.operands]
    into, a, b, c = groups
    _give(t, [t.read(name, "i32") for name in (*a, *b)])
    _wait(t, MEET, _EVERYONE)
    sums = t.f.stack("float", 4)
    for k, name in enumerate(c):
        t.f.store(t.read(name, "float"), sums, 4 * k)
    t.f.call(MULTIPLY[half], "void", t.environment, t.cast(t.number, "i64"), sums)
    for k, name in enumerate(into):
        t.write(name, t.f.load("float", sums, 4 * k))


def _give(t: Thread, numbers: list[Value]) -> None:
    """Numbers of 32 bits for the lanes of the warp."""
    given = t.f.convert("inttoptr", t.word("given"), "ptr")
    for k, number in enumerate(numbers):
        t.f.store(number, given, (t.cast(t.number, "i64") * LANE_WORDS + k) * 4)


def _wait(t: Thread, state: int, mask: str) -> None:
    """Suspend in a state, for the lanes of a mask, at the present place."""
    f, number = t.f, t.cast(t.number, "i64")
    lanes = t.cast(t.read(mask, "i32"), "i64")
    for name, value in (("masks", lanes), ("places", t.constant("i64", t.place))):
        f.store(value, f.convert("inttoptr", t.word(name), "ptr"), number * 8)
    f.store(t.constant("i8", state), f.convert("inttoptr", t.word("states"), "ptr"), number)
    suspend(f)


HANDLERS: dict[str, Callable[[Thread, Instruction], None]] = {
    "bar": barrier,
    "barrier": barrier,
    "shfl": shuffle,
    "vote": vote,
    "ldmatrix": load_matrices,
    "mma": multiply,
}
