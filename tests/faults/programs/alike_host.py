"""Look-alikes outside of programs: handled errors, uneven work, threads, exits, signals."""

import atexit
import contextlib
import faulthandler
import gc
import logging
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings

import numpy as np

import spmd
import spmd.numpy as snp
from spmd import checkpoints, lax, random
from tests.faults.corpus import alike

X = np.ones((1, 3), np.float32)


def average(x):
    """What all ranks do in each step."""
    return lax.pmean(x, "i")


mean = spmd.pmap(average, axis_name="i")
largest = spmd.pmap(lambda x: lax.pmax(x, "i"), axis_name="i")


# ---- errors that are handled -------------------------------------------------------------------


@alike(ranks=3, like="raised")
def an_error_of_all_ranks(rank):
    """All ranks raise and catch the same error, and go on together."""
    for step in range(3):
        try:
            if step == 1:
                raise ValueError("bad record")
            mean(X)
        except ValueError:
            mean(X)


@alike(ranks=2, like="raised")
def an_error_handled_on_one_rank(rank):
    """Rank 1 misses an entry and takes the default."""
    config = {} if rank == 1 else {"rate": 1.0}
    try:
        rate = config["rate"]
    except KeyError:
        rate = 1.0
    mean(X * rate)


@alike(ranks=3, like="mismatch")
def a_bad_record_replaced(rank):
    """Rank 1 drops a bad record and takes the next: all ranks make as many steps."""
    records = [1.0, "bad", 2.0, 3.0] if rank == 1 else [1.0, 2.0, 3.0]
    for record in records:
        with contextlib.suppress(TypeError, ValueError):
            mean(X * float(record))


@alike(ranks=2, like="raised")
def an_error_in_a_thread_that_is_caught(rank):
    """The prefetching thread retries."""
    found = queue.Queue()

    def fetch():
        for attempt in range(2):
            try:
                found.put(X / (attempt if attempt else int("no")))
            except ValueError:
                continue

    threading.Thread(target=fetch).start()
    mean(found.get())


@alike(ranks=2, like="raised")
def a_failing_child_that_is_expected(rank):
    """Rank 0 asks a tool that is not there."""
    if rank == 0:
        subprocess.run([sys.executable, "-c", "raise SystemExit(3)"], check=False)
    mean(X)


@alike(ranks=2, like="raised")
def a_warning_on_one_rank(rank):
    """Warnings and lines on stderr that look like errors."""
    if rank == 1:
        warnings.warn("Traceback (most recent call last): nothing", stacklevel=1)
        print("ERROR: ValueError at train.py:3", file=sys.stderr)
    mean(X)


@alike(ranks=3, like="raised")
def a_stack_on_request(rank):
    """Rank 1 writes its stack to stderr, as a profiler does."""
    if rank == 1:
        faulthandler.dump_traceback()
    mean(X)


@alike(ranks=2, like="raised")
def an_interrupt_that_is_caught(rank):
    """Rank 1 takes SIGINT as the request to save, and goes on."""
    try:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    except KeyboardInterrupt:
        pass
    mean(X)


@alike(ranks=2, like="killed")
def a_signal_with_a_handler(rank):
    """SIGUSR1 asks rank 1 for a checkpoint."""
    asked = []
    signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    mean(X)
    assert len(asked) == rank


# ---- leaving -----------------------------------------------------------------------------------


@alike(ranks=3, like="exited")
def all_exit(rank):
    """All ranks call sys.exit(0) after the same step."""
    mean(X)
    sys.exit(0)


@alike(ranks=3, like="left")
def ends_at_other_times(rank):
    """After the last collective rank 0 writes its results while the others have left."""
    mean(X)
    if rank == 0:
        time.sleep(4)


@alike(ranks=2, like="exited")
def an_exit_that_is_caught(rank):
    """A command line parser calls sys.exit, and the program goes on."""
    try:
        sys.exit(2)
    except SystemExit:
        pass
    mean(X)


@alike(ranks=3, like="left", hosts=True, ci=True)
def stopping_together(rank):
    """Early stopping, decided by all: the maximum of the flags."""
    for step in range(10):
        mean(X)
        enough = np.full((1, 1), float(rank == 1 and step == 3), np.float32)
        if largest(enough)[0, 0] > 0:
            break
    assert step == 3


@alike(ranks=3, like="left", hosts=True)
def uneven_datasets(rank):
    """Ranks without data take part with zeros until nobody has data."""
    batches = [X] * (rank + 1)
    steps = 0
    while largest(np.full((1, 1), float(bool(batches)), np.float32))[0, 0]:
        mean(batches.pop() if batches else 0 * X)
        steps += 1
    assert steps == 3


@alike(ranks=2, like="left")
def no_collective_at_all(rank):
    """Each rank works for itself, one longer than the other."""
    time.sleep(rank)
    assert float(spmd.jit(snp.sum)(X)) == 3


@alike(ranks=2, like="left")
def no_spmd_at_all(rank):
    """A program that does not use spmd."""
    assert sum(range(rank)) == 0


@alike(ranks=2, like="stuck")
def a_daemon_thread_at_the_end(rank):
    """A thread still waits when the program ends."""
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    mean(X)


@alike(ranks=2, like="raised")
def work_at_exit(rank):
    """An atexit function of rank 0 writes a file."""
    if rank == 0:
        atexit.register(lambda: tempfile.TemporaryFile().write(b"done"))
    mean(X)


@alike(ranks=2, like="exited", ci=True)
def a_forked_child_that_exits(rank):
    """A child made by os.fork ends with a code of its own; it is no rank."""
    mean(X)
    child = os.fork()
    if child == 0:
        sys.exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    mean(X)


@alike(ranks=2, like="raised")
def a_child_that_imports_spmd(rank):
    """Rank 1 starts another Python that uses spmd by itself."""
    code = "import spmd; assert spmd.process_count() == 1"
    mean(X)
    if rank == 1:
        subprocess.run([sys.executable, "-c", code], check=True)
    mean(X)


# ---- time --------------------------------------------------------------------------------------


@alike(ranks=3, like="slow")
def uneven_work(rank):
    """Rank 2 has three times as much to do in each step."""
    for _ in range(5):
        time.sleep(0.05 * (1 + 2 * (rank == 2)))
        mean(X)


@alike(ranks=2, like="stuck")
def a_slow_loader(rank):
    """The first batch of rank 1 takes a second, as from a cold disk."""
    if rank == 1:
        time.sleep(1)
    for _ in range(3):
        mean(X)


@alike(ranks=3, like="stuck", options=("--stall-timeout", "10"), ci=True)
def all_sleep(rank):
    """All ranks do host work for longer than the stall limit: nobody waits for anybody."""
    mean(X)
    time.sleep(6)
    mean(X)


@alike(ranks=2, like="stuck")
def evaluation_on_rank_0(rank):
    """Rank 0 evaluates between steps; the others wait for a second."""
    for _ in range(2):
        mean(X)
        if rank == 0:
            time.sleep(0.7)
            spmd.jit(lambda x: snp.sum(x * x))(X)
    mean(X)


@alike(ranks=2, like="stuck")
def a_lock_between_threads(rank):
    """Two threads of rank 1 pass a lock on."""
    lock = threading.Lock()

    def work():
        with lock:
            time.sleep(0.2)

    if rank == 1:
        threading.Thread(target=work).start()
        time.sleep(0.05)
        with lock:
            pass
    mean(X)


@alike(ranks=2, like="loading")
def a_loader_with_a_thread(rank):
    """Batches come from a queue, a little late each."""
    batches = queue.Queue(2)

    def fill():
        for _ in range(5):
            time.sleep(0.1 * (1 + rank))
            batches.put(X)

    threading.Thread(target=fill).start()
    for _ in range(5):
        mean(batches.get())


@alike(ranks=3, like="stopped")
def stopped_for_a_moment(rank):
    """Rank 1 is stopped and continued within the limit."""
    mean(X)
    if rank == 1:
        subprocess.Popen(["sh", "-c", f"sleep 0.7; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    mean(X)


@alike(ranks=2, like="slow")
def garbage_collection(rank):
    """Rank 0 collects its garbage now and then."""
    for _ in range(20):
        if rank == 0:
            gc.collect()
        mean(X)


@alike(ranks=4, like="slow")
def more_ranks_than_cores(rank):
    """Four busy ranks on few cores."""
    for _ in range(20):
        sum(range(20_000))
        mean(X)


@alike(ranks=2, like="computing", options=("--stall-timeout", "6"))
def a_long_compile_on_one_rank(rank):
    """Rank 1 compiles a program of its own for longer than the others like to wait."""
    mean(X)
    if rank == 1:

        def deep(x):
            for k in range(400):
                x = snp.sin(x) * (1 + k) + snp.cumsum(x)[::-1]
            return x

        spmd.jit(deep)(snp.ones(64))
    mean(X)


# ---- what only rank 0 does ---------------------------------------------------------------------


@alike(ranks=3, like="mismatch", hosts=True)
def printing_on_rank_0(rank):
    """The metric is reduced by all and printed by one."""
    for step in range(3):
        loss = float(mean(X)[0, 0])
        if rank == 0:
            print(f"step {step} loss {loss:.3f}")


@alike(ranks=2, like="mismatch")
def logging_on_rank_0(rank):
    """Log levels by rank."""
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR)
    for step in range(3):
        logging.info("step %d: %s", step, mean(X))


@alike(ranks=2, like="stuck")
def checkpoints_of_rank_0(rank):
    """Rank 0 writes, all wait at a barrier, all read."""
    folder = os.path.join(tempfile.gettempdir(), "faults-shared")
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, "checkpoint.npz")
    params = mean(X)
    if rank == 0:
        np.savez(path, w=np.asarray(params))
        time.sleep(0.5)
    mean(X)
    assert np.array_equal(np.load(path)["w"], np.asarray(params))


@alike(ranks=2, like="raised")
def a_folder_that_is_not_shared(rank):
    """Rank 0 has the checkpoint on its own disk, and sends it to rank 1."""
    folder = os.path.join(tempfile.mkdtemp(), f"host-{rank}")
    checkpoints.save(folder, 1, {"w": np.full(3, 2.0)})
    found = checkpoints.restore(folder, like={"w": np.ones(3)})
    assert found is not None and found[1]["w"].tolist() == [2.0] * 3
    mean(X * found[0])


@alike(ranks=3, like="mismatch")
def a_program_of_rank_0(rank):
    """Rank 0 compiles and runs a program without collectives."""
    for _ in range(3):
        if rank == 0:
            float(spmd.jit(lambda x: snp.linalg.norm(x))(X))
        mean(X)


@alike(ranks=2, like="mismatch")
def messages_of_its_own(rank):
    """The program uses mpi4py itself, beside spmd."""
    from mpi4py import MPI

    for step in range(3):
        mean(X)
        assert MPI.COMM_WORLD.allreduce(step) == 2 * step


@alike(ranks=2, like="mismatch")
def many_lines(rank):
    """Both ranks print thousands of lines."""
    for k in range(2000):
        print(rank, k, "rank 1 raised KeyError at loader.py:41")
    mean(X)


@alike(ranks=3, like="value")
def each_rank_its_own_data(rank):
    """Random data from a key folded with the rank."""
    key = random.fold_in(random.key(0), rank)
    assert np.isfinite(np.asarray(mean(random.normal(key, (1, 8))))).all()
