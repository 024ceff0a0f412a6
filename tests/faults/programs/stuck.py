"""Faults: a rank is alive and does not come. It must be found without its help."""

import asyncio
import ctypes
import fcntl
import io
import os
import pdb
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

import spmd
import spmd.numpy as snp
from spmd import lax
from tests.faults.corpus import fault

X = np.ones((1, 3), np.float32)
LONG = 60  # seconds; the job must end long before


def average(x):
    """What all ranks do in each step: here they wait."""
    return lax.pmean(x, "i")  # others


mean = spmd.pmap(average, axis_name="i")


# ---- code of the host --------------------------------------------------------------------------


@fault("stuck", ranks=3, culprits=[1], hosts=True, ci=True)
def sleeping(rank):
    """Rank 1 sleeps, as in a retry with a growing delay."""
    mean(X)
    if rank == 1:
        time.sleep(LONG)  # fault
    mean(X)  # others


@fault("stuck", ranks=2, culprits=[0])
def a_lock_taken_twice(rank):
    """Rank 0 takes a lock that it holds already."""
    mean(X)
    lock = threading.Lock()
    if rank == 0:
        lock.acquire()
        lock.acquire()  # fault
    mean(X)


@fault("stuck", ranks=3, culprits=[2])
def reading_a_socket(rank):
    """Rank 2 waits for an answer that nobody sends."""
    mean(X)
    if rank == 2:
        here, _there = socket.socketpair()
        here.recv(1)  # fault
    mean(X)


@fault("stuck", ranks=2, culprits=[1])
def a_loop_without_end(rank):
    """Rank 1 polls for a file that never comes."""
    mean(X)
    while rank == 1 and not os.path.exists("/nonexistent/ready"):  # fault
        pass  # fault
    mean(X)


@fault("stuck", ranks=2, culprits=[1])
def waiting_for_a_child(rank):
    """Rank 1 waits for a program that does not end."""
    mean(X)
    if rank == 1:
        subprocess.run([sys.executable, "-c", f"import time; time.sleep({LONG})"])  # fault
    mean(X)


@fault("stuck", ranks=2, culprits=[0])
def joining_a_thread(rank):
    """Rank 0 joins a thread that waits for an event."""
    mean(X)
    if rank == 0:
        helper = threading.Thread(target=threading.Event().wait, daemon=True)
        helper.start()
        helper.join()  # fault
    mean(X)


@fault("stuck", ranks=3, culprits=[1])
def a_lock_on_a_file(rank):
    """Rank 0 holds the lock on the cache while it waits in a collective; rank 1 wants it."""
    path = os.path.join(tempfile.gettempdir(), "faults-cache.lock")
    with open(path, "w") as file:
        if rank == 0:
            fcntl.flock(file, fcntl.LOCK_EX)
        mean(X)
        if rank == 1:
            fcntl.flock(file, fcntl.LOCK_EX)  # fault
        mean(X)


@fault("stuck", ranks=2, culprits=[1])
def reading_a_pipe(rank):
    """Rank 1 reads from a pipe whose other end is open in itself."""
    mean(X)
    if rank == 1:
        end, _other = os.pipe()
        os.read(end, 1)  # fault
    mean(X)


@fault("stuck", ranks=2, culprits=[1], ci=True)
def native_code_that_keeps_the_lock(rank):
    """Rank 1 waits in C without letting other Python threads run."""
    mean(X)
    semaphore = ctypes.create_string_buffer(64)
    if rank == 1:
        ctypes.PyDLL(None).sem_wait(semaphore)  # fault
    mean(X)


@fault("stuck", ranks=2, culprits=[0])
def rank_0_writes_a_checkpoint_to_a_dead_disk(rank):
    """Rank 0 writes, the others are in the next step; the writing never returns."""
    mean(X)
    if rank == 0:
        end, other = os.pipe()
        with os.fdopen(other, "wb") as file:
            file.write(bytes(1 << 22))  # fault
        os.close(end)
    mean(X)


@fault("stuck", ranks=3, culprits=[0])
def before_the_first_collective(rank):
    """Rank 0 never arrives at its first step."""
    if rank == 0:
        time.sleep(LONG)  # fault
    mean(X)


@fault("stuck", ranks=4, culprits=[1, 3])
def two_of_four(rank):
    """Two ranks are missing, at the same place."""
    mean(X)
    if rank % 2:
        time.sleep(LONG)  # fault
    mean(X)


@fault("stuck", ranks=2, culprits=[0])
def a_file_from_the_rank_that_waits(rank):
    """Rank 0 waits for a file that rank 1 writes after the collective."""
    path = os.path.join(tempfile.mkdtemp(), "result")
    mean(X)
    while rank == 0 and not os.path.exists(path):  # fault
        time.sleep(0.01)  # fault
    mean(X)
    if rank == 1:
        open(path, "w").close()


@fault("stuck", ranks=2, culprits=[1])
def a_callback_that_does_not_return(rank):
    """A host callback inside the program waits on rank 1."""

    def look(x):
        if rank == 1:
            time.sleep(LONG)  # fault
        return x

    def step(x):
        x = spmd.pure_callback(look, spmd.ShapeDtypeStruct(x.shape, x.dtype), x)
        return lax.pmean(x, "i")

    spmd.pmap(step, axis_name="i")(X)


@fault("stuck", ranks=2, culprits=[0])
def a_coroutine_that_awaits_nothing(rank):
    """Rank 0 awaits a future that nobody sets."""

    async def wait():
        await asyncio.get_running_loop().create_future()

    mean(X)
    if rank == 0:
        asyncio.run(wait())  # fault
    mean(X)


@fault("stuck", ranks=3, culprits=[0])
def input_of_a_person(rank):
    """Rank 0 asks a person."""
    mean(X)
    if rank == 0:
        end, _other = os.pipe()
        sys.stdin = os.fdopen(end)
        input()  # fault
    mean(X)


# ---- waiting for data --------------------------------------------------------------------------


class DataLoader:
    """Batches from a queue that a thread fills; the thread of one rank dies quietly."""

    def __init__(self, rank):
        self.batches = queue.Queue()
        threading.Thread(target=self.fill, args=(2 if rank == 1 else 100,), daemon=True).start()

    def fill(self, count):
        """Make batches, as many as there are files."""
        for _ in range(count):
            self.batches.put(X)

    def __iter__(self):
        return self

    def __next__(self):
        """Wait for the next batch."""
        return self.batches.get()  # fault


@fault("loading", ranks=3, culprits=[1], helpers=(DataLoader,), ci=True)
def a_queue_that_stays_empty(rank):
    """The data loader of rank 1 waits for a batch that nobody makes."""
    for _, batch in zip(range(5), DataLoader(rank), strict=False):
        mean(batch)


@fault("loading", ranks=2, culprits=[1])
def a_file_system_that_hangs(rank):
    """Rank 1 loads a batch from a file that does not answer (a named pipe stands for it)."""
    mean(X)

    def load_batch(path):
        with open(path, "rb") as file:  # fault
            return np.frombuffer(file.read(), np.float32)

    if rank == 1:
        path = os.path.join(tempfile.mkdtemp(), "shard-7")
        os.mkfifo(path)
        load_batch(path)
    mean(X)


# ---- stopped -----------------------------------------------------------------------------------


@fault("stopped", ranks=3, culprits=[1], words=["stopped"], hosts=True, ci=True)
def by_a_signal(rank):
    """Someone stopped rank 1 with SIGSTOP."""
    mean(X)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    mean(X)  # others


@fault("stuck", ranks=2, culprits=[1])
def in_a_debugger(rank):
    """A forgotten breakpoint: rank 1 waits for commands at its prompt."""
    mean(X)
    if rank == 1:
        end, _other = os.pipe()
        pdb.Pdb(stdin=os.fdopen(end), stdout=io.StringIO()).set_trace()
    mean(X)  # fault


# ---- compiled code, tracing, compiling ---------------------------------------------------------


@fault("computing", ranks=2, culprits=[1])
def a_compiled_loop_without_end(rank):
    """A while_loop whose condition stays true on rank 1: no Python runs, no collective comes."""

    def halve(x):
        return lax.while_loop(lambda x: snp.max(x) > 0, lambda x: x * (1 - 0.5 * (1 - rank)), x)

    mean(X)
    done = spmd.jit(halve)(X)  # fault
    mean(done)  # fault


@fault("computing", ranks=2, culprits=[0])
def tracing_without_end(rank):
    """Rank 0 unrolls a loop that never ends."""

    def step(x):
        while rank == 0:
            x = x + 1  # fault
        return lax.pmean(x, "i")

    spmd.pmap(step, axis_name="i")(X)


@fault("computing", ranks=2, culprits=[1])
def a_large_product(rank):
    """Rank 1 computes a product that takes a minute."""
    n = 20_000 if rank == 1 else 20
    mean(X)
    a = snp.ones((n, n))
    y = spmd.jit(lambda a: (a @ a)[0, :3])(a)  # fault
    mean(np.asarray(y)[None])  # fault


# ---- slow --------------------------------------------------------------------------------------


@fault("slow", ranks=3, culprits=[2], code=0)
def one_rank_is_late(rank):
    """Rank 2 takes seconds for what the others do at once."""
    mean(X)
    for _ in range(2):
        if rank == 2:
            time.sleep(4.5)  # fault
        mean(X)


@fault("slow", ranks=2, culprits=[1], code=0)
def more_work_on_one_rank(rank):
    """Rank 1 sorts a hundred times as much."""
    mean(X)
    for _ in range(2):
        began = time.monotonic()
        while rank == 1 and time.monotonic() < began + 4.5:
            sorted(range(100_000))  # fault
        mean(X)
