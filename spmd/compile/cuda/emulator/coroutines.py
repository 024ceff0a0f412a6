"""Native functions that run the blocks of a launch, and the threads of one that meet.

A thread that meets others is an LLVM coroutine. It suspends where it waits and writes down for
whom: for lanes of its warp, or for all threads of its block. The scheduler runs every thread of a
warp until all wait or have ended, lets lanes that wait for each other go on, then goes to the next
warp; when all threads of the block wait at the barrier, an epoch ends. A thread that waits
for one that ended, or for a lane that waits elsewhere, is reported: a GPU would hang or worse.

The beginning of a coroutine's memory is a fixed interface of LLVM's: the address of the function
that resumes it, then of the one that frees it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from spmd.compile.cuda.emulator import layout
from spmd.compile.cuda.emulator.layout import INDEX, LANE_WORDS, WARP, WORDS
from spmd.compile.native.llvm.function_builder import Function, Value, Words

# A thread's state. At MEET and MEET_IN_ORDER it waits for lanes; the second orders memory too.
READY, MEET, MEET_IN_ORDER, BARRIER, ENDED = range(5)
_RESUME, _DESTROY = 0, 8
_WARP_FUNCTION = "run_warp"


def begin_block_text(symbol: str) -> str:
    """`i1 (env, k)`: prepare the kth block; whether the launch stops, as a mistake was found."""
    f = Function(symbol, "i1", ["ptr", "i64"])
    environment, k = f.params
    words = Words(f, environment, WORDS)
    block = (k * words["block_step"] + words["block_first"]) % words["grid"]
    f.store(block, environment, 8 * INDEX["block"])
    next_epoch(f, environment)
    f.store(Words(f, environment, WORDS)["epoch"], environment, 8 * INDEX["block_epoch"])
    # A block must not rely on what shared memory holds at first: NaN, and indices far outside.
    shared, count = f.convert("inttoptr", words["shared"], "ptr"), words["shared_bytes"]
    f.call("llvm.memset.p0.i64", "void", shared, f.value("i8", -1), count, f.value("i1", 0))
    report = f.convert("inttoptr", words["report"], "ptr")
    f.ret(f.load("i64", report).differs(layout.NONE))
    return f.text()


def next_epoch(f: Function, environment: Value) -> None:
    """Nothing that was touched before races with what follows."""
    where = 8 * INDEX["epoch"]
    f.store(f.load("i64", environment, where) + 1, environment, where)


def run_text(symbol: str, begin_block: str, report: str) -> str:
    """`void (env, body)`: run all blocks of a launch whose threads are coroutines."""
    f = Function(symbol, "void", ["ptr", "ptr"])
    environment, body = f.params
    words = Words(f, environment, WORDS)
    threads = words["block_x"] * words["block_y"]
    states, handles = _pointer(f, words, "states"), _pointer(f, words, "handles")
    with f.range(0, words["grid"]) as block:
        f.break_if(f.call(begin_block, "i1", environment, block))
        with f.range(0, threads) as thread:
            f.store(f.value("i8", READY), states, thread)
            x, y = thread % words["block_x"], thread // words["block_x"]
            x, y = f.convert("trunc", x, "i32"), f.convert("trunc", y, "i32")
            f.store(f.call(body, "ptr", environment, x, y), handles, thread * 8)
        with f.loop():
            failed = f.var("i64", 0)
            with f.range(0, threads, WARP) as first:
                last = f.smaller(first + WARP, threads)
                failed.set(f.call(_WARP_FUNCTION, "i64", environment, first, last))
                f.break_if(failed.get().differs(0))
            f.break_if(failed.get().differs(0))
            waiting = f.var("i64", 0)
            with _threads_at(f, states, threads, BARRIER):
                waiting.set(waiting.get() + 1)
            f.break_if(waiting.get().equals(0))
            with f.if_(waiting.get() < threads):
                # All others have ended; one of those that wait is told.
                with _threads_at(f, states, threads, BARRIER) as thread:
                    _tell(f, words, environment, report, layout.THREAD_ENDED, thread)
            f.break_if(waiting.get() < threads)
            with f.range(0, threads) as thread:
                f.store(f.value("i8", READY), states, thread)
            next_epoch(f, environment)
        with f.range(0, threads) as thread:
            handle = f.load("ptr", handles, thread * 8)
            _call_coroutine(f, handle, _DESTROY)
    return f"{f.text()}\n{_warp_text(_WARP_FUNCTION, report)}"


def _warp_text(symbol: str, report: str) -> str:
    """`i64 (env, first, last)`: run a warp until all threads wait at the barrier or have ended."""
    f = Function(symbol, "i64", ["ptr", "i64", "i64"], internal=True)
    environment, first, last = f.params
    words = Words(f, environment, WORDS)
    states, handles = _pointer(f, words, "states"), _pointer(f, words, "handles")
    masks, warp_epochs = _pointer(f, words, "masks"), _pointer(f, words, "warp_epochs")
    nbytes = (last - first) * LANE_WORDS * 4
    given, taken = (
        f.at(_pointer(f, words, name), first * (LANE_WORDS * 4)) for name in ("given", "taken")
    )
    full = (f.value("i64", 1) << (last - first)) - 1
    with f.loop():
        with f.range(first, last) as thread:
            with f.if_(f.load("i8", states, thread).equals(READY)):
                _call_coroutine(f, f.load("ptr", handles, thread * 8), _RESUME)
        waiting = f.var("i64", 0)
        with f.range(first, last) as thread:
            state = f.load("i8", states, thread)
            meets = state.equals(MEET) | state.equals(MEET_IN_ORDER)
            bit = f.convert("zext", meets, "i64") << (thread - first)
            waiting.set(waiting.get() | bit)
        with f.if_(waiting.get().equals(0)):
            f.ret(0)
        # The lanes that the first waiting one waits for.
        lane = f.call("llvm.cttz.i64", "i64", waiting.get(), f.value("i1", 1))
        wanted = f.load("i64", masks, (first + lane) * 8)
        mask = wanted & full
        with f.if_((mask & (waiting.get() ^ -1)).differs(0)):
            _tell(f, words, environment, report, layout.LANE_MISSING, first + lane)
            f.ret(1)
        copy = "llvm.memcpy.p0.p0.i64"
        f.call(copy, "void", taken, given, nbytes, f.value("i1", 0))
        in_order = f.var("i64", 0)
        with f.range(first, last) as thread:
            with f.if_(((mask >> (thread - first)) & 1).differs(0)):
                with f.if_(f.load("i64", masks, thread * 8).differs(wanted)):
                    _tell(f, words, environment, report, layout.MASKS_DIFFER, thread)
                    f.ret(1)
                with f.if_(f.load("i8", states, thread).equals(MEET_IN_ORDER)):
                    in_order.set(1)
                f.store(f.value("i8", READY), states, thread)
        where = (first >> 5) * 8
        f.store(f.load("i64", warp_epochs, where) + in_order.get(), warp_epochs, where)
        with f.if_(((mask >> lane) & 1).equals(0)):
            # It waits for others and not for itself.
            _tell(f, words, environment, report, layout.MASKS_DIFFER, first + lane)
            f.ret(1)
    f.ret(0)
    return f.text()


def suspend(f: Function, final: bool = False) -> None:
    """Give control back until the thread is resumed, or for good."""
    resumed = f.label()
    last = "true" if final else "false"
    result = f.emit("i8", f"call i8 @llvm.coro.suspend(token none, i1 {last})")
    to = f"[i8 0, label %{resumed} i8 1, label %cleanup]"
    f.do(f"switch i8 {result.text}, label %suspended {to}")
    f.start(resumed)


def begin(f: Function, nbytes: int) -> Value:
    """The first lines of a coroutine: memory for what lives while it is suspended.

    Behind that are so many bytes, whose address this gives: LLVM keeps variables there only if it
    sees them used later, and it does not follow an address that became a number.
    """
    f.do("%id = call token @llvm.coro.id(i32 0, ptr null, ptr null, ptr null)")
    f.do("%size = call i64 @llvm.coro.size.i64()")
    f.do("%above = add i64 %size, 15")
    f.do("%behind = and i64 %above, -16")
    f.do(f"%room = add i64 %behind, {nbytes}")
    f.do("%memory = call ptr @malloc(i64 %room)")
    f.do("%handle = call ptr @llvm.coro.begin(token %id, ptr %memory)")
    f.do("%local = getelementptr i8, ptr %handle, i64 %behind")
    return Value(f, "ptr", "%local")


def end(f: Function) -> None:
    """The last lines: the thread has ended, its memory is freed when it is destroyed."""
    suspend(f, final=True)
    f.do("unreachable")
    f.start("cleanup")
    f.do("%freed = call ptr @llvm.coro.free(token %id, ptr %handle)")
    f.do("call void @free(ptr %freed)")
    f.goto("suspended")
    f.start("suspended")
    f.do("call void @llvm.coro.end(ptr %handle, i1 false, token none)")
    f.ret(Value(f, "ptr", "%handle"))


@contextmanager
def _threads_at(f: Function, states: Value, threads: Value, state: int) -> Iterator[Value]:
    """Each thread in a state."""
    with f.range(0, threads) as thread, f.if_(f.load("i8", states, thread).equals(state)):
        yield thread


def _tell(
    f: Function, words: Words, environment: Value, report: str, kind: int, thread: Value
) -> None:
    """Report a thread at the place where it waits."""
    place = f.load("i64", _pointer(f, words, "places"), thread * 8)
    zero = f.value("i64", 0)
    given = f.value("i64", kind), zero, zero, thread, place, zero, zero
    f.call(report, "void", environment, *given)


def _call_coroutine(f: Function, handle: Value, which: int) -> None:
    f.do(f"call fastcc void {f.load('ptr', handle, which).text}(ptr {handle.text})")


def _pointer(f: Function, words: Words, name: str) -> Value:
    return f.convert("inttoptr", words[name], "ptr")
