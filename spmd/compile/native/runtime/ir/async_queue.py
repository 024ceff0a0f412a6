"""The queue as native code: programs that run one after the other beside Python.

The one idea: the queue runs without the interpreter, so that a long program goes on while Python
computes, and the next one begins without waiting for the lock of the interpreter. The thread that
has set RUNNING runs the job at the head: the queue's own thread, or one that waits for a job which
has not begun yet (to wake another thread for it would take longer than many programs do).

A job is a few words in memory that its maker keeps until the job is done. All others are in one
global, guarded by a mutex that no thread holds while a job runs; a forked child resets it.
"""

from __future__ import annotations

import signal
import time

from spmd.compile.native.llvm.function_builder import I64, Function, Ptr, Value, define
from spmd.compile.native.runtime.ir.module import clock
from spmd.compile.native.runtime.queue_layout import (
    AT_ONCE,
    CANCELLED,
    CAUSE,
    CAUSES,
    DONE,
    FINISHED,
    FRAMES,
    HEAD,
    HEADER,
    MUTEX,
    NUMBER,
    QUEUE_BYTES,
    RECORD,
    RING,
    RING_JOBS,
    RUNNING,
    SEQUENCE,
    SIGNALS,
    STARTED,
    STATUS,
    STOP,
    STOPPING,
    TAIL,
    THREAD,
    WORK,
)
from spmd.transport import flight_recorder as flight

# A thread that is woken for a job lets the job's maker take it first, if the maker waits at once:
# the maker is awake already, and the data of its core stays in the caches. (The timers of the
# system add about 50 us.)
GRACE_NS = 20_000

_NANOSECONDS = 1_000_000_000

_QUEUE = f"@spmd_queue = global [{QUEUE_BYTES} x i8] zeroinitializer, align 64"


def queue_texts() -> list[str]:
    """The words and functions of the queue."""
    functions = (
        clock(),
        _stamp(),
        _run_job(),
        _run_next(),
        _serve(),
        _start(),
        _submit(),
        _wait(),
        _done(),
        _cancel(),
        _stop(),
        _reset(),
    )
    return [_QUEUE, *(f.text() for f in functions)]


def _number(f: Function, offset: int) -> Value:
    return f.load("i64", f.symbol("spmd_queue"), offset)


def _set(f: Function, offset: int, value: Value | int) -> None:
    f.store(f.value("i64", value), f.symbol("spmd_queue"), offset)


def _lock(f: Function) -> None:
    f.call("pthread_mutex_lock", "i32", f.at(f.symbol("spmd_queue"), MUTEX))


def _unlock(f: Function) -> None:
    f.call("pthread_mutex_unlock", "i32", f.at(f.symbol("spmd_queue"), MUTEX))


def _signal(f: Function) -> None:
    f.call("pthread_cond_signal", "i32", f.at(f.symbol("spmd_queue"), WORK))


def _next_job(f: Function, number: Value) -> Value:
    """The ring's slot of the job that follows `number` others."""
    return f.at(f.symbol("spmd_queue"), number % RING_JOBS * 8 + RING)


# ---- running -----------------------------------------------------------------------------------


@define("stamp", "void")
def _stamp(f: Function, job: Ptr, word: I64) -> None:
    """stamp(job, word): write the time into a word of the job's record, if it still is its own."""
    record = f.load("ptr", job, 8 * RECORD)
    f.ret_if(record.equals(0))
    with f.if_(f.load("i64", record, 8 * flight.SEQUENCE).equals(f.load("i64", job, 8 * SEQUENCE))):
        f.store(f.call("now", "i64"), record, word * 8)


@define("run_job", "i64")
def _run_job(f: Function, job: Ptr) -> None:
    """run_job(job): its status, CANCELLED if it was, or if a job failed that it needs."""
    header = f.load("ptr", job, 8 * HEADER)
    f.ret_if(header.equals(0), CANCELLED)
    with f.range(0, f.load("i64", job, 8 * CAUSES)) as i:
        cause = f.load("ptr", f.at(job, i * 8), 8 * CAUSE)
        f.ret_if(f.load("i64", cause, 8 * STATUS).differs(0), CANCELLED)
    f.call("stamp", "void", job, f.value("i64", flight.ENTERED))
    given = header, f.load("ptr", job, 8 * FRAMES), f.at(job, 8 * STOP), f.value("i64", 0)
    f.ret(f.call("run_steps", "i64", *given))


@define("run_next", "void")
def _run_next(f: Function) -> None:
    """run_next(): run the job at the head, which must exist and not run yet.

    The mutex is held before and after, not meanwhile.
    """
    queue = f.symbol("spmd_queue")
    head = _number(f, HEAD)
    job = f.load("ptr", _next_job(f, head))
    _set(f, RUNNING, 1)
    _set(f, HEAD, head + 1)
    _unlock(f)
    status = f.call("run_job", "i64", job)
    f.call("stamp", "void", job, f.value("i64", flight.COMPLETED))
    f.atomic_store(status, job, 8 * STATUS)
    _lock(f)
    _set(f, RUNNING, 0)
    f.atomic_store(head + 1, queue, DONE)
    f.call("pthread_cond_broadcast", "i32", f.at(queue, FINISHED))
    with f.if_(_number(f, HEAD) < _number(f, TAIL)):
        _signal(f)


@define("serve", "ptr")
def _serve(f: Function, _argument: Ptr) -> None:
    """serve(): the life of the queue's thread."""
    queue = f.symbol("spmd_queue")
    grace = f.stack("i64", 2)
    f.store(f.value("i64", 0), grace)
    f.store(f.value("i64", GRACE_NS), grace, 8)
    _lock(f)
    with f.loop():
        with f.loop():
            f.break_if((_number(f, HEAD) < _number(f, TAIL)) & _number(f, RUNNING).equals(0))
            with f.if_(_number(f, STOPPING).differs(0)):
                _unlock(f)
                f.ret(f.null())
            f.call("pthread_cond_wait", "i32", f.at(queue, WORK), f.at(queue, MUTEX))
            with f.if_(_number(f, HEAD) < _number(f, TAIL)):
                job = f.load("ptr", _next_job(f, _number(f, HEAD)))
                with f.if_(f.load("i64", job, 8 * AT_ONCE).differs(0)):
                    _unlock(f)
                    f.call("nanosleep", "i32", grace, f.null())
                    _lock(f)
        f.call("run_next", "void")
    f.ret(f.null())


@define("start_serving", "void")
def _start(f: Function) -> None:
    """start_serving(): make the thread, with all signals blocked: those are for Python's threads.

    If no thread can be made, the threads that wait do the work.
    """
    queue = f.symbol("spmd_queue")
    f.call("pthread_mutex_init", "i32", f.at(queue, MUTEX), f.null())
    f.call("pthread_cond_init", "i32", f.at(queue, WORK), f.null())
    f.call("pthread_cond_init", "i32", f.at(queue, FINISHED), f.null())
    blocked, before = f.at(queue, SIGNALS), f.at(queue, SIGNALS + 128)
    mask = f.value("i32", int(signal.SIG_SETMASK))
    f.call("sigfillset", "i32", blocked)
    f.call("pthread_sigmask", "i32", mask, blocked, before)
    failed = f.call(
        "pthread_create", "i32", f.at(queue, THREAD), f.null(), f.symbol("serve"), f.null()
    ).differs(0)
    f.call("pthread_sigmask", "i32", mask, before, f.null())
    _set(f, STARTED, f.select(failed, f.value("i64", -1), 1))


# ---- called by Python --------------------------------------------------------------------------


@define("spmd_queue_submit", "void", exported=True)
def _submit(f: Function, job: Ptr) -> None:
    """spmd_queue_submit(job): put a job behind the others, and its number into it.

    Both steps are native: an interrupt between two steps in Python would leave a running job
    without a number. At most RING_JOBS may be under way. The very first call must be alone.
    """
    with f.if_(_number(f, STARTED).equals(0)):
        f.call("start_serving", "void")
    _lock(f)
    tail = _number(f, TAIL)
    f.store(job, _next_job(f, tail))
    f.store(tail + 1, job, 8 * NUMBER)
    _set(f, TAIL, tail + 1)
    with f.if_(_number(f, RUNNING).equals(0)):
        _signal(f)
    _unlock(f)


@define("spmd_queue_wait", "i64", exported=True)
def _wait(f: Function, number: I64, helps: I64, nanoseconds: I64) -> None:
    """spmd_queue_wait(number, helps, nanoseconds): whether the job has ended within that time.

    A caller that helps runs the jobs that have not started, and may then take longer.
    """
    queue = f.symbol("spmd_queue")
    until = f.stack("i64", 2)
    f.call("clock_gettime", "i32", f.value("i32", int(time.CLOCK_REALTIME)), until)
    end = f.load("i64", until, 8) + nanoseconds
    f.store(f.load("i64", until) + end // _NANOSECONDS, until)
    f.store(end % _NANOSECONDS, until, 8)
    alone = _number(f, STARTED) < 1
    _lock(f)
    with f.loop():
        f.break_if(_number(f, DONE) >= number)
        open = (_number(f, HEAD) < number) & _number(f, RUNNING).equals(0)
        with f.if_else(open & (helps.differs(0) | alone)) as it:
            f.call("run_next", "void")
            it.otherwise()
            late = f.call(
                "pthread_cond_timedwait", "i32", f.at(queue, FINISHED), f.at(queue, MUTEX), until
            )
            f.break_if(late.differs(0))
    done = _number(f, DONE) >= number
    _unlock(f)
    f.ret(f.convert("zext", done, "i64"))


@define("spmd_queue_done", "i64", exported=True)
def _done(f: Function) -> None:
    """spmd_queue_done(): the number of the last job that has ended; its results can be read."""
    f.ret(f.atomic_load(f.symbol("spmd_queue"), DONE))


@define("spmd_queue_cancel", "void", exported=True)
def _cancel(f: Function) -> None:
    """spmd_queue_cancel(): jobs that have not begun will not run."""
    _lock(f)
    with f.range(_number(f, HEAD), _number(f, TAIL)) as i:
        f.store(f.null(), f.load("ptr", _next_job(f, i)), 8 * HEADER)
    _unlock(f)


@define("spmd_queue_stop", "void", exported=True)
def _stop(f: Function) -> None:
    """spmd_queue_stop(): end the thread, when the queue is empty."""
    queue = f.symbol("spmd_queue")
    with f.if_(_number(f, STARTED) > 0):
        _lock(f)
        _set(f, STOPPING, 1)
        _signal(f)
        _unlock(f)
        f.call("pthread_join", "i32", f.load("i64", queue, THREAD), f.null())
        _set(f, STOPPING, 0)
        _set(f, STARTED, 0)


@define("spmd_queue_reset", "void", exported=True)
def _reset(f: Function) -> None:
    """spmd_queue_reset(): forget thread and jobs, in a forked child: it has neither."""
    bytes = f.value("i64", QUEUE_BYTES)
    f.call("memset", "ptr", f.symbol("spmd_queue"), f.value("i32", 0), bytes)
