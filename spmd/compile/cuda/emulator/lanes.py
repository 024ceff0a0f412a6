"""Native functions for what the lanes of a warp do together, after they have met.

A lane gives numbers to its warp, waits, and finds in `taken` what all lanes gave (`coroutines.py`).
PTX ISA, sections 9.7.9 (shfl.sync), 9.7.13 (vote.sync) and 9.7.14 (ldmatrix and mma.sync: whose
registers hold which elements of a tile).
"""

from __future__ import annotations

from spmd.compile.cuda.emulator.layout import LANE_WORDS, WORDS
from spmd.compile.native.llvm.function_builder import Function, Value, Words

SHUFFLES = ("bfly", "up", "down", "idx")
# mma.sync: a lane gives four numbers of A and two of B, each one element of TF32 or two of 16 bits.
A_WORDS, B_WORDS = 4, 2
# The depth of the tiles that are multiplied, by the type of their elements.
DEPTHS = {"f16": 16, "bf16": 16, "tf32": 8}


def shuffle_text(symbol: str, mode: str) -> str:
    """`i64 (env, thread, by, limits)`: a lane's number, and above its 32 bits whether it is one."""
    f = Function(symbol, "i64", ["ptr", "i64", "i64", "i64"])
    environment, thread, by, limits = f.params
    lane = thread & 31
    segment, clamp = (limits >> 8) & 31, limits & 31
    inside = segment ^ 31
    lowest = lane & segment
    highest = lowest | (clamp & inside)
    if mode == "bfly":
        source, valid = lane ^ by, (lane ^ by) <= highest
    elif mode == "up":
        source, valid = lane - by, (lane - by) >= highest
    elif mode == "down":
        source, valid = lane + by, (lane + by) <= highest
    else:
        source = lowest | (by & inside)
        valid = source <= highest
    source = f.select(valid, source, lane)
    number = _taken(f, environment, (thread - lane) + source, 0)
    flag = f.convert("zext", valid, "i64") << 32
    f.ret(f.convert("zext", number, "i64") | flag)
    return f.text()


def ballot_text(symbol: str) -> str:
    """`i64 (env, thread, mask)`: bit k says whether lane k gave something else than zero."""
    f = Function(symbol, "i64", ["ptr", "i64", "i64"])
    environment, thread, mask = f.params
    threads = Words(f, environment, WORDS)
    first = thread - (thread & 31)
    count = f.smaller(threads["block_x"] * threads["block_y"] - first, 32)
    bits = f.var("i64", 0)
    with f.range(0, count) as lane:
        gave = _taken(f, environment, first + lane, 0).differs(0)
        bits.set(bits.get() | (f.convert("zext", gave, "i64") << lane))
    f.ret(bits.get() & mask)
    return f.text()


def matrix_text(symbol: str, transposed: bool) -> str:
    """`i32 (env, thread, k)`: what a lane has of the kth tile of 8 x 8 elements of 16 bits.

    Lanes 8 k to 8 k + 7 gave its rows. Lane L has two neighbours of row L / 4, from column
    2 (L % 4) on; of a tile that is transposed, two of column L / 4.
    """
    f = Function(symbol, "i32", ["ptr", "i64", "i64"])
    environment, thread, k = f.params
    lane = thread & 31
    rows, line, pair = (thread - lane) + k * 8, lane >> 2, lane & 3
    if not transposed:
        f.ret(_taken(f, environment, rows + line, pair))
        return f.text()

    def element(row: Value) -> Value:
        word = _taken(f, environment, rows + row, line >> 1)
        upper = f.convert("trunc", (line & 1) << 4, "i32")
        return f.emit("i32", f"lshr i32 {word.text}, {upper.text}") & 0xFFFF

    f.ret(element(pair << 1) | (element((pair << 1) + 1) << 16))
    return f.text()


def multiply_text(symbol: str, half: str) -> str:
    """`void (env, thread, sums)`: add the products of tiles of 16 x d and d x 8 to four floats.

    Sum k of a lane is C[lane / 4 + 8 (k / 2), 2 (lane % 4) + k % 2]. A's word r of a lane holds
    rows lane / 4 + 8 (r % 2) and columns 2 (lane % 4) + 8 (r / 2) and the next; B's likewise, with
    rows and columns exchanged. A word of TF32 is one element: columns lane % 4 + 4 (r / 2).
    """
    f = Function(symbol, "void", ["ptr", "i64", "ptr"])
    environment, thread, sums = f.params
    lane = thread & 31
    first, row, column = thread - lane, lane & 28, (lane & 3) << 1

    def element(owner: Value, word: Value | int, upper: Value) -> Value:
        bits = _taken(f, environment, first + owner, word)
        if half == "tf32":  # the lower bits are ignored
            return f.convert("bitcast", bits & -(1 << 13), "float")
        shifted = f.emit("i32", f"lshr i32 {bits.text}, {f.convert('trunc', upper, 'i32').text}")
        if half == "bf16":
            return f.convert("bitcast", shifted << 16, "float")
        narrow = f.convert("bitcast", f.convert("trunc", shifted, "i16"), "half")
        return f.convert("fpext", narrow, "float")

    def factors(k: int, depth: Value) -> tuple[Value, Value]:
        if half == "tf32":
            pair, upper, later = depth & 3, depth, depth >> 2
        else:
            pair, upper, later = (depth & 7) >> 1, (depth & 1) << 4, depth >> 3
        a = element(row + pair, (later << 1) + k // 2, upper)
        return a, element(((column + k % 2) << 2) + pair, later + A_WORDS, upper)

    for k in range(4):
        total = f.var("float")
        total.set(f.load("float", sums, 4 * k))
        with f.range(0, DEPTHS[half]) as depth:
            total.set(f.call("llvm.fma.f32", "float", *factors(k, depth), total.get()))
        f.store(total.get(), sums, 4 * k)
    return f.text()


def noise_text(symbol: str) -> str:
    """`double (i64)`: a number between -1 and 1 that looks like chance (splitmix64)."""
    f = Function(symbol, "double", ["i64"])
    x = f.params[0] + (0x9E3779B97F4A7C15 - (1 << 64))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        moved = f.emit("i64", f"lshr i64 {x.text}, {shift}")
        x = (x ^ moved) * (factor - (1 << 64))
    x = x ^ f.emit("i64", f"lshr i64 {x.text}, 31")
    f.ret(f.convert("sitofp", x, "double") * 2.0**-63)
    return f.text()


def _taken(f: Function, environment: Value, thread: Value, word: Value | int) -> Value:
    """A number that a thread gave to its warp."""
    taken = f.convert("inttoptr", Words(f, environment, WORDS)["taken"], "ptr")
    return f.load("i32", taken, (thread * LANE_WORDS + f.value("i64", word)) * 4)
