"""The worker pool as native code: parked threads, one job at a time, chunks by atomic ticket.

The one idea: the caller can finish any job alone. Workers that arrive in time take chunks, those
that arrive late find the gate closed, and the caller only ever waits for workers that are inside.
If one of these lost its core to another process, the caller moves it to its own core (see
`thread_affinity`). So a busy process or a descheduled worker slows no caller down.

Each thread has a part of a job's chunks, the same part in each job of that size, so that what it
wrote in one job lies in the caches of its own core in the next. A thread that has finished its part
helps the others.
Every second job goes through its chunks backwards: it first reads the data that was touched last,
the only data still in a cache if the arrays are larger. (`x*x+x` of 4 MB on two threads: 138 us so,
172 always forwards.)

The gate is one word: the number of workers inside, plus OPEN while there is a job. A worker enters
by adding one and looks at the value before; without OPEN it leaves again without having read the
job. The caller closes the gate before it waits for the number to fall to zero, so the fields of a
job are never rewritten while a worker reads them.

Everything lives in one global; a forked child resets it (`spmd_pool_reset`), since its copy
describes threads that it does not have.
"""

from __future__ import annotations

import signal

from spmd.compile.native.llvm.function_builder import I64, Function, Ptr, Value, define
from spmd.compile.native.runtime.pool_layout import (
    AVOIDED,
    BACKWARDS,
    BODY,
    BUSY,
    CALLER_PARKED,
    CHUNK,
    CHUNKS,
    CONTENDED,
    CONTEXT,
    CORES,
    DONE,
    EPOCH,
    GATE,
    INSIDE,
    LINE_BYTES,
    LINES,
    MOST_PLACED,
    MOST_WORKERS,
    MUTEX,
    PARTS,
    POOL_BYTES,
    SIGNALS,
    SLEEPERS,
    STARTED,
    STOPPING,
    THREADS,
    TICKET_BYTES,
    TICKETS,
    UNITS,
    WORK,
    WORKERS,
)

OPEN = 1 << 40
_EPOCH_STEP = 2 * (MOST_WORKERS + 1)

# So long the caller looks for workers that have not finished, and a worker for the next job, if the
# one before came as soon. An idle process is no load, and one that calls now and then a small one.
CALLER_NS = 1_000_000
WORKER_NS = 1_000_000
# So often a caller that waits looks whether those that it waits for get on.
LOOK_NS = 50_000

_POOL = f"@spmd_pool = global [{POOL_BYTES} x i8] zeroinitializer, align 64"


def pool_texts() -> list[str]:
    """The words and functions of the pool."""
    functions = (
        _take_chunks(),
        _leave(),
        _worker(),
        _start(),
        _place(),
        _wait_for_workers(),
        _parallel_for(),
        _stop(),
        _reset(),
        _call_kernel(),
        _parallel_kernel(),
    )
    return [_POOL, *(f.text() for f in functions)]


def _one(f: Function, number: int = 1) -> Value:
    return f.value("i64", number)


@define("take_chunks", "void")
def _take_chunks(f: Function, thread: I64) -> None:
    """take_chunks(thread): run chunks of the present job, of one's own part first, while any is
    left."""
    pool = f.symbol("spmd_pool")
    body, context = f.load("ptr", pool, BODY), f.load("ptr", pool, CONTEXT)
    units, chunk = f.load("i64", pool, UNITS), f.load("i64", pool, CHUNK)
    chunks, parts = f.load("i64", pool, CHUNKS), f.load("i64", pool, PARTS)
    backwards = f.load("i64", pool, BACKWARDS).differs(0)
    with f.range(0, parts) as i:
        part = (thread + i) % parts
        first, end = chunks * part // parts, chunks * (part + 1) // parts
        ticket = f.at(f.at(pool, TICKETS), part * TICKET_BYTES)
        with f.loop():
            # A look before the ticket leaves the cache line to the threads that write to it.
            f.break_if(f.atomic_load(ticket, 0) >= end - first)
            taken = f.atomic("add", ticket, 0, _one(f))
            f.break_if(taken >= end - first)
            begin = f.select(backwards, end - 1 - taken, first + taken) * chunk
            f.call(body, "void", context, begin, f.smaller(begin + chunk, units))


@define("leave", "void")
def _leave(f: Function) -> None:
    """Leave the gate, and wake the caller if it waits for the last one to leave."""
    pool = f.symbol("spmd_pool")
    before = f.atomic("sub", pool, GATE, _one(f))
    with f.if_(before.equals(1)):  # the gate was closed, and no worker is inside any more
        with f.if_(f.atomic_load(pool, CALLER_PARKED, "seq_cst").differs(0)):
            f.call("pthread_mutex_lock", "i32", f.at(pool, MUTEX))
            f.call("pthread_cond_signal", "i32", f.at(pool, DONE))
            f.call("pthread_mutex_unlock", "i32", f.at(pool, MUTEX))


@define("worker", "ptr")
def _worker(f: Function, argument: Ptr) -> None:
    """The life of a worker: wait for a job, enter if the gate is open, take chunks, leave.

    Its argument is the number of the last job times `_EPOCH_STEP`, plus its own from 1.
    """
    pool = f.symbol("spmd_pool")
    begun = f.convert("ptrtoint", argument, "i64")
    thread, seen = begun % _EPOCH_STEP, f.var("i64", begun // _EPOCH_STEP)
    patience, line = f.var("i64", WORKER_NS), f.at(f.at(pool, LINES), thread * LINE_BYTES)
    with f.loop():
        idle = f.call("now", "i64")
        waited = f.at(pool, EPOCH), seen.get(), patience.get(), f.at(line, CONTENDED)
        with f.if_(f.call("spin_until_differs", "i64", *waited).equals(0)):
            _park(f, pool, seen.get())
            soon = f.call("now", "i64") - idle < WORKER_NS
            patience.set(f.select(soon, f.value("i64", WORKER_NS), 0))
        seen.set(f.atomic_load(pool, EPOCH))
        f.ret_if(f.atomic_load(pool, STOPPING).differs(0), f.null())
        before = f.atomic("add", pool, GATE, _one(f))
        with f.if_((before & OPEN).differs(0)):
            f.atomic_store(_one(f), line, INSIDE)
            f.call("take_chunks", "void", thread)
            f.atomic_store(_one(f, 0), line, INSIDE)
        f.call("leave", "void")
    f.ret(f.null())


def _park(f: Function, pool: Value, seen: Value) -> None:
    """Sleep until the epoch moves on.

    The sleeper counts itself before it looks at the epoch, the caller moves the epoch before it
    looks at the count (both sequentially consistent): one of them sees the other.
    """
    f.call("pthread_mutex_lock", "i32", f.at(pool, MUTEX))
    f.atomic("add", pool, SLEEPERS, _one(f))
    with f.loop():
        f.break_if(f.atomic_load(pool, EPOCH, "seq_cst").differs(seen))
        f.call("pthread_cond_wait", "i32", f.at(pool, WORK), f.at(pool, MUTEX))
    f.atomic("sub", pool, SLEEPERS, _one(f))
    f.call("pthread_mutex_unlock", "i32", f.at(pool, MUTEX))


@define("start", "void")
def _start(f: Function) -> None:
    """Create the workers, with all signals blocked: those belong to the Python threads."""
    pool = f.symbol("spmd_pool")
    f.call("pthread_mutex_init", "i32", f.at(pool, MUTEX), f.null())
    f.call("pthread_cond_init", "i32", f.at(pool, WORK), f.null())
    f.call("pthread_cond_init", "i32", f.at(pool, DONE), f.null())
    blocked, before = f.at(pool, SIGNALS), f.at(pool, SIGNALS + 128)
    mask = f.value("i32", int(signal.SIG_SETMASK))
    f.call("sigfillset", "i32", blocked)
    f.call("pthread_sigmask", "i32", mask, blocked, before)
    epoch = f.atomic_load(pool, EPOCH)
    started = f.var("i64", 0)
    with f.range(0, f.load("i64", pool, WORKERS)):
        thread = f.at(pool, started.get() * 8 + THREADS)
        begun = f.convert("inttoptr", epoch * _EPOCH_STEP + started.get() + 1, "ptr")
        failed = f.call(
            "pthread_create", "i32", thread, f.null(), f.symbol("worker"), begun
        ).differs(0)
        f.break_if(failed)
        started.set(started.get() + 1)
    f.call("pthread_sigmask", "i32", mask, before, f.null())
    f.call("note_cores", "void", f.at(pool, CORES))
    f.call("memset", "ptr", f.at(pool, AVOIDED), f.value("i32", 0), _one(f, 8 * MOST_PLACED))
    f.atomic_store(started.get(), pool, STARTED)
    # If no thread can be made, do not try again at each job.
    f.store(started.get(), pool, WORKERS)


@define("wait_for_workers", "void")
def _wait_for_workers(f: Function) -> None:
    """Close the gate and wait until no worker is inside."""
    pool = f.symbol("spmd_pool")
    f.atomic("and", pool, GATE, _one(f, ~OPEN))
    zero, patience = _one(f, 0), _one(f, LOOK_NS)
    brought = f.var("i64", 0)
    placed = (
        f.at(pool, THREADS),
        f.at(pool, AVOIDED),
        f.at(pool, LINES + LINE_BYTES),
        f.load("i64", pool, STARTED),
    )
    contended = f.at(pool, LINES + CONTENDED)
    with f.range(0, CALLER_NS // LOOK_NS):
        waited = f.at(pool, GATE), zero, patience, contended
        f.ret_if(f.call("spin_until_equals", "i64", *waited).differs(0))
        brought.set(f.call("bring_held", "i64", *placed))
        f.break_if((brought.get() > 0) | (f.load("i64", contended) > f.call("now", "i64")))
    f.call("pthread_mutex_lock", "i32", f.at(pool, MUTEX))
    f.atomic_store(_one(f), pool, CALLER_PARKED)
    with f.loop():
        f.break_if(f.atomic_load(pool, GATE, "seq_cst").equals(0))
        f.call("pthread_cond_wait", "i32", f.at(pool, DONE), f.at(pool, MUTEX))
    f.atomic_store(_one(f, 0), pool, CALLER_PARKED)
    f.call("pthread_mutex_unlock", "i32", f.at(pool, MUTEX))
    with f.if_(brought.get() > 0):
        f.call("place", "void")


@define("place", "void")
def _place(f: Function) -> None:
    """Keep the workers off the core of the caller."""
    pool = f.symbol("spmd_pool")
    threads, avoided = f.at(pool, THREADS), f.at(pool, AVOIDED)
    f.call("keep_off", "void", threads, avoided, f.load("i64", pool, STARTED), f.at(pool, CORES))


@define("parallel_for", "void")
def _parallel_for(f: Function, body: Ptr, context: Ptr, units: I64, chunk: I64) -> None:
    """parallel_for(body, context, units, chunk): `body(context, begin, end)` over all units.

    A job inside a job, and a second job beside one, run on their caller alone.
    """
    pool = f.symbol("spmd_pool")
    with f.if_(f.atomic("xchg", pool, BUSY, _one(f)).differs(0)):
        f.call(body, "void", context, _one(f, 0), units)
        f.ret()
    with f.if_(f.load("i64", pool, STARTED).equals(0)):
        f.call("start", "void")
    f.store(body, pool, BODY)
    f.store(context, pool, CONTEXT)
    f.store(units, pool, UNITS)
    f.store(chunk, pool, CHUNK)
    chunks = (units + chunk - 1) // chunk
    parts = f.smaller(f.load("i64", pool, STARTED) + 1, chunks)
    f.store(chunks, pool, CHUNKS)
    f.store(parts, pool, PARTS)
    f.store(f.atomic_load(pool, EPOCH) & 1, pool, BACKWARDS)
    with f.range(0, parts) as part:
        f.store(_one(f, 0), f.at(pool, TICKETS), part * TICKET_BYTES)
    f.call("place", "void")
    # Not a plain store: a worker that came late may just be adding and taking back its one.
    f.atomic("or", pool, GATE, _one(f, OPEN))
    f.atomic("add", pool, EPOCH, _one(f))
    asleep = f.atomic_load(pool, SLEEPERS, "seq_cst")
    with f.if_(asleep > 0):
        f.call("pthread_mutex_lock", "i32", f.at(pool, MUTEX))
        with f.range(0, f.smaller(chunks - 1, asleep)):
            f.call("pthread_cond_signal", "i32", f.at(pool, WORK))
        f.call("pthread_mutex_unlock", "i32", f.at(pool, MUTEX))
    f.call("take_chunks", "void", _one(f, 0))
    f.call("wait_for_workers", "void")
    f.atomic_store(_one(f, 0), pool, BUSY)


@define("spmd_pool_stop", "i64", exported=True)
def _stop(f: Function) -> None:
    """End all workers and wait for them; give 0 if a job is running, else 1."""
    pool = f.symbol("spmd_pool")
    f.ret_if(f.atomic("xchg", pool, BUSY, _one(f)).differs(0), 0)
    started = f.load("i64", pool, STARTED)
    with f.if_(started > 0):
        f.atomic_store(_one(f), pool, STOPPING)
        f.call("pthread_mutex_lock", "i32", f.at(pool, MUTEX))
        f.atomic("add", pool, EPOCH, _one(f))
        f.call("pthread_cond_broadcast", "i32", f.at(pool, WORK))
        f.call("pthread_mutex_unlock", "i32", f.at(pool, MUTEX))
        with f.range(0, started) as i:
            thread = f.load("i64", pool, i * 8 + THREADS)
            f.call("pthread_join", "i32", thread, f.null())
        f.atomic_store(_one(f, 0), pool, STARTED)
        f.atomic_store(_one(f, 0), pool, STOPPING)
    f.atomic_store(_one(f, 0), pool, BUSY)
    f.ret(1)


@define("spmd_pool_reset", "void", exported=True)
def _reset(f: Function, workers: I64) -> None:
    """Forget all threads and jobs, in a forked child: it has neither."""
    pool = f.symbol("spmd_pool")
    f.call("memset", "ptr", pool, f.value("i32", 0), f.value("i64", POOL_BYTES))
    f.store(workers, pool, WORKERS)


@define("call_kernel", "void")
def _call_kernel(f: Function, context: Ptr, begin: I64, end: I64) -> None:
    """A job body: the kernel call described by context = [function, args, sizes]."""
    function, args, sizes = (f.load("ptr", context, 8 * i) for i in range(3))
    f.call(function, "void", args, sizes, begin, end)


@define("spmd_parallel_kernel", "void", exported=True)
def _parallel_kernel(
    f: Function, function: Ptr, args: Ptr, sizes: Ptr, units: I64, chunk: I64
) -> None:
    """spmd_parallel_kernel(function, args, sizes, units, chunk): one kernel call on the pool."""
    context = f.stack("ptr", 3)
    for i, value in enumerate((function, args, sizes)):
        f.store(value, context, 8 * i)
    f.call("parallel_for", "void", f.symbol("call_kernel"), context, units, chunk)
