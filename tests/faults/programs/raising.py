"""Faults: a rank raises, exits or is killed. The others must not wait, and it must be named."""

import asyncio
import ctypes
import faulthandler
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings

import numpy as np

import spmd
import spmd.numpy as snp
from spmd import lax
from tests.faults.corpus import fault

X = np.ones((1, 3), np.float32)


def average(x):
    """What all ranks do in each step: here they wait."""
    return lax.pmean(x, "i")  # others


mean = spmd.pmap(average, axis_name="i")


# ---- exceptions --------------------------------------------------------------------------------


@fault("raised", ranks=3, culprits=[1], words=["KeyError"], code=1, hosts=True, ci=True)
def before_any_collective(rank):
    """Rank 1 misses an entry of its configuration."""
    config = {"rate": 0.1} if rank == 1 else {"rate": 0.1, "steps": 3}
    for _ in range(config["steps"]):  # fault
        mean(X)


@fault("raised", ranks=3, culprits=[2], words=["ZeroDivisionError"], code=1, hosts=True)
def between_steps(rank):
    """Rank 2 divides by the number of examples it has."""
    for step in range(5):
        mean(X)
        if rank == 2:
            step // (3 - step)  # fault


@fault("raised", ranks=2, culprits=[0], words=["ShapeError"], code=1)
def while_tracing(rank):
    """The shapes of rank 0's layers do not fit; the others trace and compile."""
    w = np.ones((1, 4 if rank == 0 else 3, 2), np.float32)

    def apply(w, x):
        return lax.pmean(x @ w, "i")  # fault

    spmd.pmap(apply, axis_name="i")(w, X)


@fault("raised", ranks=2, culprits=[1], words=["GradError|TypeError"], code=1)
def in_grad(rank):
    """Rank 1 differentiates a function that returns a vector."""

    def loss(x):
        return x * x if rank == 1 else snp.sum(x * x)

    def step(x):
        return lax.pmean(spmd.grad(loss)(x), "i")  # fault

    spmd.pmap(step, axis_name="i")(X)


@fault("raised", ranks=2, culprits=[1], words=["in_axes"], code=1)
def in_vmap(rank):
    """Rank 1 gives in_axes for two arguments."""
    axes = (0, 0) if rank == 1 else 0
    y = spmd.vmap(lambda x: x + 1, in_axes=axes)(X)  # fault
    mean(y)


@fault("raised", ranks=2, culprits=[1], words=["TracerBoolConversionError"], code=1)
def an_if_on_a_tracer(rank):
    """Rank 1's code has a Python `if` on a traced value."""

    def step(x):
        if rank == 1 and x.sum() > 0:  # fault
            x = -x
        return lax.pmean(x, "i")

    spmd.pmap(step, axis_name="i")(X)


@fault("raised", ranks=3, culprits=[0], words=["OSError"], code=1, ci=True)
def in_a_thread(rank):
    """The prefetching thread of rank 0 dies; its main thread waits in the collective."""

    def prefetch():
        time.sleep(0.3)
        raise OSError("no such shard")  # fault

    mean(X)
    if rank == 0:
        threading.Thread(target=prefetch).start()
    for _ in range(100):
        mean(X)
        time.sleep(0.05)


@fault("raised", ranks=2, culprits=[1], words=["ValueError"], code=1)
def in_a_callback(rank):
    """A host callback inside the compiled program raises on rank 1."""

    def check(x):
        if rank == 1:
            raise ValueError("too large")  # fault
        return x

    def step(x):
        x = spmd.pure_callback(check, spmd.ShapeDtypeStruct(x.shape, x.dtype), x)
        return lax.pmean(x, "i")

    spmd.pmap(step, axis_name="i")(X)


@fault("raised", ranks=3, culprits=[2], words=["StopIteration"], code=1, hosts=True)
def a_shorter_dataset(rank):
    """Rank 2 has fewer batches: its iterator ends one step early."""
    batches = iter([X] * (3 if rank == 2 else 4))
    for _ in range(4):
        mean(next(batches))  # fault


@fault("raised", ranks=2, culprits=[1], words=["MemoryError"], code=1)
def out_of_memory(rank):
    """Rank 1 asks for more memory than there is."""
    mean(X)
    if rank == 1:
        np.empty(1 << 60, np.uint8)  # fault
    mean(X)


@fault("raised", ranks=2, culprits=[1], words=["MemoryError"], code=1)
def out_of_its_share(rank):
    """A limit on rank 1's address space, as a container sets it."""
    mean(X)
    if rank == 1:
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), -1))
        np.ones(32 << 20)  # fault
    mean(X)


@fault("raised", ranks=2, culprits=[0], words=["ModuleNotFoundError"], code=1)
def a_missing_package(rank):
    """A package is not installed where rank 0 runs."""
    if rank == 0:
        import package_that_is_only_on_the_other_host  # noqa: F401  # fault
    mean(X)


@fault("raised", ranks=3, culprits=[1], words=["JSONDecodeError"], code=1)
def a_truncated_file(rank):
    """Rank 1 reads a file that was not written to its end."""
    text = '{"rate": 0.1' if rank == 1 else '{"rate": 0.1}'
    mean(X * json.loads(text)["rate"])  # fault


@fault("raised", ranks=2, culprits=[1], words=["FileNotFoundError"], code=1)
def a_checkpoint_of_rank_0(rank):
    """Rank 0 writes the checkpoint on its own disk; rank 1 does not find it."""
    mean(X)
    if rank == 1:
        np.load("/nonexistent/checkpoint-100.npz")  # fault
    mean(X)


@fault("raised", ranks=3, culprits=[1], words=["AssertionError"], code=1)
def an_assertion(rank):
    """Rank 1's loss is out of bounds."""
    loss = float(mean(X)[0, 0]) + 100 * rank * (2 - rank)
    assert loss < 10, f"loss {loss}"  # fault
    mean(X)


@fault("raised", ranks=2, culprits=[0], words=["RecursionError"], code=1)
def without_end(rank):
    """Rank 0 walks a tree that contains itself."""

    def depth(tree):
        return 1 + depth(tree)  # fault

    if rank == 0:
        depth({})
    mean(X)


@fault("raised", ranks=2, culprits=[1], words=["RuntimeError"], code=1)
def while_handling_another(rank):
    """The clean-up of an error raises itself."""
    try:
        assert rank == 0
        mean(X)
    except AssertionError:
        raise RuntimeError("and the log could not be written")  # noqa: B904  # fault


@fault("raised", ranks=2, culprits=[1], words=["KeyboardInterrupt"], code=130)
def an_interrupt(rank):
    """Someone interrupts one rank by hand."""
    mean(X)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGINT)  # fault
        time.sleep(5)  # fault
    mean(X)


@fault("raised", ranks=2, culprits=[1], words=["TypeError"], code=1)
def in_a_rule_of_a_derivative(rank):
    """The user's own backward rule raises on rank 1."""

    @spmd.custom_vjp
    def double(x):
        return 2 * x

    def backward(_, g):
        return (g * (None if rank == 1 else 2),)  # fault

    double.defvjp(lambda x: (double(x), None), backward)
    gradient = spmd.grad(lambda x: snp.sum(double(x)))
    spmd.pmap(lambda x: lax.pmean(gradient(x), "i"), axis_name="i")(X)


@fault("raised", ranks=2, culprits=[1], words=["CalledProcessError"], code=1)
def a_failing_child(rank):
    """A program that rank 1 starts fails."""
    mean(X)
    if rank == 1:
        subprocess.run([sys.executable, "-c", "raise SystemExit(3)"], check=True)  # fault
    mean(X)


@fault("raised", ranks=2, culprits=[1], words=["RuntimeError", "is no rank"], ci=True)
def a_collective_in_a_forked_child(rank):
    """A child made by os.fork calls a collective: it is no rank."""
    mean(X)
    if rank == 1:
        child = os.fork()
        if child == 0:
            try:
                mean(X)  # the parent's page of shared memory is not the child's
            except BaseException as error:
                print(f"the child: {error}", file=sys.stderr, flush=True)
                os._exit(3)
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            raise RuntimeError("the child failed")  # fault
    mean(X)


@fault("raised", ranks=2, culprits=[1], words=["ValueError"], code=1)
def in_a_coroutine(rank):
    """The loader of rank 1 is asynchronous."""

    async def load(k):
        await asyncio.sleep(0.01)
        if (rank, k) == (1, 2):
            raise ValueError("bad shard")  # fault
        return X

    for k in range(4):
        mean(asyncio.run(load(k)))


@fault("raised", ranks=3, culprits=[1], words=["ExceptionGroup|ValueError"], code=1)
def several_errors_at_once(rank):
    """A group of tasks of rank 1 fails."""
    mean(X)
    if rank == 1:
        raise ExceptionGroup("two shards", [ValueError("a"), OSError("b")])  # fault
    mean(X)


@fault("raised", ranks=2, culprits=[1], words=["DeprecationWarning"], code=1)
def a_warning_as_an_error(rank):
    """Rank 1 has a newer library, which warns; warnings are errors."""
    warnings.simplefilter("error")
    mean(X)
    if rank == 1:
        warnings.warn("old name", DeprecationWarning, stacklevel=1)  # fault
    mean(X)


@fault("raised", ranks=2, culprits=[1], words=["ConnectionRefusedError"], code=1)
def a_server_that_is_down(rank):
    """Rank 1 cannot reach the tracking server."""
    mean(X)
    if rank == 1:
        socket.create_connection(("127.0.0.1", 1), 1)  # fault
    mean(X)


@fault("raised", ranks=2, culprits=[1], words=["IndexError"], code=1)
def a_label_out_of_range(rank):
    """A label of rank 1 is outside of the classes."""
    labels = np.array([0, 1, 7 if rank == 1 else 2])
    table = np.eye(3)
    mean(table[labels][None])  # fault


@fault("raised", ranks=2, culprits=[1], words=["OSError|No space|disk"], code=1)
def a_full_disk(rank):
    """Rank 1 writes its shard to a disk that is full."""
    mean(X)
    if rank == 1:
        with open("/dev/full", "wb") as file:
            file.write(bytes(100_000))  # fault
    mean(X)


@fault("raised", ranks=2, culprits=[1], words=["ShapeError", r"args\[1\]"], code=1)
def another_signature(rank):
    """Rank 1 has an older version of the step, without an argument."""

    def new(w, lr):
        return lax.pmean(w * lr, "i")

    def old(w):
        return lax.pmean(w, "i")

    step = old if rank == 1 else new
    spmd.pmap(step, axis_name="i", in_axes=(0, None) if rank == 0 else 0)(X, 0.1)  # fault


@fault("raised", ranks=2, culprits=[1], words=["ValueError"], code=1)
def while_long_steps_are_under_way(rank):
    """Rank 1 raises between calls whose results no one has asked for yet."""

    def long(x):
        return lax.fori_loop(0, 300_000, lambda _, x: snp.sin(x), lax.pmean(x, "i"))

    f, x = spmd.pmap(long, axis_name="i"), X
    for step in range(6):
        x = f(x)
        if (rank, step) == (1, 3):
            raise ValueError("bad record")  # fault
    x.block_until_ready()


@fault("raised", ranks=2, culprits=[1], words=["KeyboardInterrupt"], code=130)
def an_interrupt_of_a_long_program(rank):
    """Someone interrupts rank 1 in a compiled loop of some minutes."""
    count = 2_000_000_000 if rank == 1 else 3
    mean(X)
    if rank == 1:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    run = spmd.jit(lambda x: lax.fori_loop(0, count, lambda _, x: snp.sin(x), x))
    run(X).block_until_ready()  # fault
    mean(X)


# ---- exits -------------------------------------------------------------------------------------


@fault("exited", ranks=3, culprits=[1], words=["exit code 3"], code=3)
def sys_exit(rank):
    """Rank 1 gives up with an exit code."""
    mean(X)
    if rank == 1:
        sys.exit(3)
    mean(X)  # others


@fault("exited", ranks=2, culprits=[0], words=["exit code 5"], code=5)
def os_exit(rank):
    """Rank 0 leaves without any clean-up, as a crashing library does."""
    mean(X)
    if rank == 0:
        os._exit(5)
    mean(X)  # others


@fault("exited", ranks=3, culprits=[1], words=["exit code 0|left|ended"], ci=True)
def os_exit_without_an_error(rank):
    """Rank 1 leaves with code 0 and without a word, while the others wait."""
    mean(X)
    if rank == 1:
        os._exit(0)
    mean(X)  # others


@fault("left", ranks=3, culprits=[2], words=["left"], hosts=True, ci=True)
def too_early(rank):
    """Rank 2 has no data and returns; the others wait for it."""
    if rank == 2:
        return
    mean(X)  # others


@fault("left", ranks=2, culprits=[1], words=["left"], hosts=True)
def one_step_fewer(rank):
    """Rank 1's dataset is shorter, and a `for` loop ends quietly."""
    for _ in range(4 - rank):
        mean(X)  # others


@fault("left", ranks=3, culprits=[0], words=["left"])
def stopping_by_its_own_loss(rank):
    """Rank 0 stops early by its own loss, not by the common one."""
    for step in range(10):
        loss = 1 / (1 + step) if rank == 0 else 1.0
        if loss < 0.3:
            break
        mean(X)  # others


@fault("left", ranks=2, culprits=[1], words=["left"])
def sys_exit_without_an_error(rank):
    """Rank 1 calls sys.exit() in the middle."""
    mean(X)
    if rank == 1:
        sys.exit()
    mean(X)  # others


@fault("exited", ranks=2, culprits=[1], words=["exit code 1|no GPU"])
def an_exit_with_a_message(rank):
    """sys.exit with a text."""
    mean(X)
    if rank == 1:
        sys.exit("no GPU left")
    mean(X)  # others


# ---- signals -----------------------------------------------------------------------------------


@fault("killed", ranks=3, culprits=[1], words=["SIGKILL"], code=137, hosts=True, ci=True)
def by_the_kernel(rank):
    """SIGKILL, as the kernel sends it when memory runs out."""
    mean(X)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    mean(X)  # others


@fault("killed", ranks=2, culprits=[0], words=["SIGSEGV"], code=139)
def by_a_bad_pointer(rank):
    """A library of rank 0 reads through a null pointer."""
    mean(X)
    if rank == 0:
        faulthandler.disable()
        ctypes.string_at(0)
    mean(X)  # others


@fault("killed", ranks=2, culprits=[1], words=["SIGABRT"], code=134)
def by_its_own_abort(rank):
    """A failed assertion in native code aborts rank 1."""
    mean(X)
    if rank == 1:
        faulthandler.disable()
        os.abort()
    mean(X)  # others


@fault("killed", ranks=3, culprits=[2], words=["SIGBUS"], code=135)
def by_a_truncated_mapping(rank):
    """SIGBUS: a mapped file became shorter."""
    mean(X)
    if rank == 2:
        faulthandler.disable()
        os.kill(os.getpid(), signal.SIGBUS)
    mean(X)  # others


@fault("killed", ranks=2, culprits=[1], words=["SIGTERM"], code=143)
def by_a_scheduler(rank):
    """SIGTERM to one rank only."""
    mean(X)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    mean(X)  # others


@fault("killed", ranks=2, culprits=[1], words=["SIGKILL"], code=137, hosts=True)
def inside_a_collective(rank):
    """Rank 1 is killed while it waits in a collective that rank 0 reaches late."""
    mean(X)
    if rank == 1:
        kill = f"import os, time; time.sleep(0.5); os.kill({os.getpid()}, 9)"
        subprocess.Popen([sys.executable, "-c", kill])
    else:
        time.sleep(3)
    mean(X)


@fault("killed", ranks=3, culprits=[1], words=["SIGKILL"], code=137)
def while_the_others_compute(rank):
    """Rank 1 is killed while no rank is in a collective."""
    mean(X)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.5)
    mean(X)


@fault("killed", ranks=2, culprits=[1], words=["SIGKILL"], code=137)
def while_compiling(rank):
    """Rank 1 is killed while it compiles."""
    mean(X)
    if rank == 1:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def deep(x):
        for k in range(3000):
            x = snp.sin(x) * k + snp.cumsum(x)
        return lax.pmean(x, "i")  # others

    spmd.pmap(deep, axis_name="i")(X)


@fault("killed", ranks=4, culprits=[2], words=["SIGKILL"], code=137)
def in_a_group_of_two(rank):
    """Rank 2 dies while it and rank 3 sum in their group."""
    groups = [[0, 1], [2, 3]]
    f = spmd.pmap(lambda x: lax.psum(x, "i", axis_index_groups=groups), axis_name="i")  # others
    f(X)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(3):
        f(X)
