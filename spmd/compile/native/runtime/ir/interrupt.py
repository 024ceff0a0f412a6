"""Interruption of the loops of a running program, as native code.

The one idea: between two iterations a loop reads one word, which another thread sets (a job of the
queue whose waiter was interrupted), and counts. Every so many iterations it looks at the clock, and
when enough time has passed it asks Python whether a signal has come: Python only serves signals on
its main thread, which is in here. A handler that returns lets the loop go on; one that raises ends
it, and its exception waits in the table until the run is over.
"""

from __future__ import annotations

from collections.abc import Iterator

from spmd.compile.native.llvm.function_builder import Function, Ptr, Value, define
from spmd.compile.native.program.run_layout import INTERRUPTED, OK, PYTHON, RAISED_THERE

# Byte offsets in the context of a run: the address of its stop word; the thread that serves
# signals; the iterations until a look at the clock, and from one look to the next; when that was
# last; when Python was asked; the function that looks.
STOP, SERVES, LEFT, EVERY, LOOKED, ASKED, LOOK, END = range(80, 144, 8)

# Asking takes the lock of the interpreter, for which another thread of Python may make us wait up
# to 5 ms.
ASK_NS = 200_000_000
# So often a loop looks at the clock, about: that costs 25 ns.
_SOON_NS, _LATE_NS = 1_000_000, 20_000_000
_MOST_ROUNDS = 1 << 20
_NEVER = 1 << 62
# In a run's word: its loops are to end; a kernel has left its loop, so its results are none.
_STOP, _UNFINISHED = 1, 2

_ENSURE, _RELEASE, _CHECK, _FETCH = range(PYTHON, PYTHON + 4)


def interrupt_texts() -> list[str]:
    """The functions that loops call."""
    return [_look().text()]


def words(f: Function, stop: Value, serves: Value) -> Iterator[tuple[int, Value]]:
    """The words of a run that begins, with their offsets; `serves` is 0 where no thread does."""
    zero, one = f.value("i64", 0), f.value("i64", 1)
    yield from ((STOP, stop), (SERVES, serves), (EVERY, one), (LOOKED, zero), (ASKED, zero))
    yield LEFT, f.select(serves.equals(0), _NEVER, one)
    yield LOOK, f.symbol("look")


def leave_if_unfinished(f: Function, context: Value) -> None:
    """Return from the executor if a kernel of this run has left its loop early."""
    f.ret_if(_stop_word(f, context).equals(_UNFINISHED), INTERRUPTED)


def between_rounds(f: Function, context: Value, is_kernel: bool = False) -> None:
    """Return from a loop's function if the run is to end.

    A kernel gives no status, and says so in the run's word.
    """
    with f.if_(_stop_word(f, context).differs(0)):
        _leave(f, context, is_kernel)
    left = f.load("i64", context, LEFT) - 1
    f.store(left, context, LEFT)
    with f.if_(left < 0):
        status = f.call(f.load("ptr", context, LOOK), "i64", context)
        with f.if_(status.differs(OK)):
            _leave(f, context, is_kernel)


def _stop_word(f: Function, context: Value) -> Value:
    return f.atomic_load(f.load("ptr", context, STOP), 0, "monotonic")


def _leave(f: Function, context: Value, is_kernel: bool) -> None:
    if is_kernel:
        f.atomic_store(f.value("i64", _UNFINISHED), f.load("ptr", context, STOP), 0)
    f.ret(None if is_kernel else INTERRUPTED)


@define("look", "i64")
def _look(f: Function, context: Ptr) -> None:
    """look(context): look at the clock, and ask Python for signals where it is time to."""
    with f.if_(f.call("pthread_self", "i64").differs(f.load("i64", context, SERVES))):
        # A thread of the pool, which may share the context with the one that serves.
        f.store(f.value("i64", _MOST_ROUNDS), context, LEFT)
        f.ret(OK)
    now = f.call("now", "i64")
    passed = now - f.load("i64", context, LOOKED)
    every = f.var("i64", f.load("i64", context, EVERY))
    with f.if_(passed < _SOON_NS):
        every.set(f.smaller(every.get() * 2, _MOST_ROUNDS))
    with f.if_(passed > _LATE_NS):
        every.set(1)
    for offset, value in ((LOOKED, now), (EVERY, every.get()), (LEFT, every.get())):
        f.store(value, context, offset)
    asked = f.load("i64", context, ASKED)
    f.ret_if(asked.differs(0) & (now - asked < ASK_NS), OK)
    f.store(now, context, ASKED)
    f.ret_if(asked.equals(0), OK)
    table = f.symbol("spmd_table")
    held = f.call(f.load("ptr", table, 8 * _ENSURE), "i32")
    raised = f.call(f.load("ptr", table, 8 * _CHECK), "i32").differs(0)
    with f.if_(raised):
        kept = (f.at(table, 8 * (RAISED_THERE + i)) for i in range(3))
        f.call(f.load("ptr", table, 8 * _FETCH), "void", *kept)
        f.atomic_store(f.value("i64", _STOP), f.load("ptr", context, STOP), 0)
    f.call(f.load("ptr", table, 8 * _RELEASE), "void", held)
    f.ret(f.select(raised, f.value("i64", INTERRUPTED), OK))
