"""Faults of training runs: loops in programs, loaders, checkpoints, callbacks, libraries."""

import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import spmd
import spmd.as_jax
import spmd.numpy as snp
from spmd import checkpoints, lax
from tests.faults.corpus import fault

X = np.ones((1, 3), np.float32)
LONG = 60  # seconds; the job must end long before
NANS = {"SPMD_DEBUG_NANS": "1"}


def average(x):
    """What all ranks do in each step: here they wait."""
    return lax.pmean(x, "i")  # others


mean = spmd.pmap(average, axis_name="i")


def spread(shape):
    """An array of ones whose rows lie over all ranks."""
    rows = spmd.NamedSharding(spmd.make_mesh((spmd.device_count(),), ("x",)), spmd.P("x"))
    return spmd.make_array_from_callback(shape, rows, lambda i: np.ones(shape, np.float32)[i])


# ---- loops and branches of programs ------------------------------------------------------------


@fault("mismatch", ranks=2, culprits=[1], words=["loop"])
def steps_of_a_scan(rank):
    """Rank 1 accumulates over three micro-batches, rank 0 over two."""
    batches = np.ones((1, 2 + rank, 3), np.float32)

    def accumulate(batches):
        def add(total, x):
            return total + lax.pmean(x, "i"), None  # fault

        return lax.scan(add, snp.zeros(3), batches)[0]

    spmd.pmap(accumulate, axis_name="i")(batches)


@fault("mismatch", ranks=3, culprits=[2], words=["branch|missing"])
def a_branch_that_one_rank_traces(rank):
    """Rank 2's configuration clips by the norm of all, inside of a branch."""

    def step(x):
        def large(x):
            return x / lax.pmax(snp.max(x), "i") if rank == 2 else x  # fault

        scale = lax.pmean(snp.sum(x), "i")
        return lax.cond(scale > 1, large, lambda x: x, x)

    spmd.pmap(step, axis_name="i")(X)


@fault("mismatch", ranks=2, culprits=[1], words=["while"])
def a_condition_that_one_rank_reduces(rank):
    """Rank 1 takes the largest residual of all for its condition, rank 0 the mean."""

    def solve(x):
        reduce = lax.pmax if rank == 1 else lax.pmean
        return lax.while_loop(
            lambda x: reduce(snp.sum(x), "i") > 1,  # fault
            lambda x: x / 2,
            x,
        )

    spmd.pmap(solve, axis_name="i")(X)


@fault("value", ranks=2, culprits=[1], words=["[Nn]a[Nn]"], environ=NANS)
def a_nan_in_a_scan(rank):
    """The recurrence of rank 1 divides by zero in its third step."""

    def run(x):
        def step(c, _):
            c = c - 1
            return c, c / c

        return lax.pmean(lax.scan(step, x, None, length=4)[1], "i")  # fault

    spmd.pmap(run, axis_name="i")(X * (3 if rank == 1 else 9))


@fault("killed", ranks=2, culprits=[1], words=["SIGKILL"], code=137)
def in_the_middle_of_a_scan(rank):
    """The kernel kills rank 1 while a loop with a collective runs, outside of Python."""

    def run(x):
        return lax.fori_loop(0, 100_000_000, lambda _, x: lax.pmean(x, "i"), x)  # others

    mean(X)
    if rank == 1:
        killer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL))
        killer.start()
    spmd.pmap(run, axis_name="i")(X)[0].block_until_ready()


@fault("stopped", ranks=2, culprits=[0], words=["stopped"])
def stopped_in_the_middle_of_a_scan(rank):
    """Someone stops rank 0 while a loop with a collective runs."""

    def run(x):
        return lax.fori_loop(0, 100_000_000, lambda _, x: lax.pmean(x, "i"), x)  # others

    mean(X)
    if rank == 0:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    spmd.pmap(run, axis_name="i")(X)[0].block_until_ready()


# ---- callbacks ---------------------------------------------------------------------------------


@fault("raised", ranks=2, culprits=[1], words=["OSError"], code=1)
def an_ordered_callback_in_a_scan(rank):
    """Rank 1 writes a log from inside of a loop, to a disk that is full."""

    def log(x):
        if rank == 1:
            raise OSError(28, "No space left on device")  # fault
        return np.float32(0)

    def run(x):
        def step(c, _):
            c = lax.pmean(c, "i")
            y = spmd.pure_callback(log, spmd.ShapeDtypeStruct((), np.float32), snp.sum(c))
            return c + y, None

        return lax.scan(step, x, None, length=3)[0]

    spmd.pmap(run, axis_name="i")(X)


@fault("raised", ranks=3, culprits=[0], words=["KeyError"], code=1)
def a_debug_callback(rank):
    """The progress bar of rank 0 fails; no result depends on it."""

    def tell(x):
        if rank == 0:
            {}["loss"]  # fault

    def step(x):
        spmd.debug.callback(tell, snp.sum(x))
        return lax.pmean(x, "i")

    run = spmd.pmap(step, axis_name="i")
    for _ in range(3):
        run(X)
        mean(X)


@fault("exited", ranks=2, culprits=[1], words=["exit code 4"], code=4)
def an_exit_in_a_callback(rank):
    """A watchdog inside of the program of rank 1 ends the process."""

    def watch(x):
        if rank == 1:
            os._exit(4)
        return x

    def step(x):
        x = spmd.pure_callback(watch, spmd.ShapeDtypeStruct(x.shape, x.dtype), x)
        return lax.pmean(x, "i")  # others

    spmd.pmap(step, axis_name="i")(X)


@fault("killed", ranks=3, culprits=[2], words=["SIGKILL"], code=137)
def killed_in_a_callback(rank):
    """The kernel kills rank 2 for its memory in a callback of the host."""

    def augment(x):
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    def step(x):
        x = spmd.pure_callback(augment, spmd.ShapeDtypeStruct(x.shape, x.dtype), x)
        return lax.pmean(x, "i")  # others

    spmd.pmap(step, axis_name="i")(X)


# ---- data --------------------------------------------------------------------------------------


@fault("raised", ranks=2, culprits=[1], words=["UnicodeDecodeError"], code=1)
def a_future_of_a_pool(rank):
    """A thread of a pool decodes a record; its error comes where the result is asked for."""

    def decode(k):
        return len((b"\xff" if (rank, k) == (1, 2) else b"a").decode())  # fault

    with ThreadPoolExecutor(2) as pool:
        for size in pool.map(decode, range(4)):
            mean(X * size)


def serve(requests, answers):
    """The worker process: it dies at its third request."""
    for k in iter(requests.get, None):
        if k == 2:
            os._exit(1)
        answers.put(k)


def next_batch(answers):
    """Wait for the answer of a worker."""
    return answers.get()  # fault


@fault("loading", ranks=2, culprits=[0], helpers=(next_batch,))
def a_worker_process_that_died(rank):
    """A worker of rank 0's loader was killed; its queue stays empty for ever."""
    context = multiprocessing.get_context("spawn")
    requests, answers = (context.Queue() if rank == 0 else queue.Queue() for _ in range(2))
    if rank == 0:
        context.Process(target=serve, args=(requests, answers), daemon=True).start()
    for k in range(4):
        if rank == 0:
            requests.put(k)
            next_batch(answers)
        mean(X)


@fault("loading", ranks=2, culprits=[1], code=0)
def a_loader_from_a_slow_disk(rank):
    """The batches of rank 1 take seconds."""

    def load_batch():
        time.sleep(4.5 * rank)  # fault
        return X

    mean(X)
    for _ in range(2):
        mean(load_batch())


@fault("left", ranks=3, culprits=[1], words=["left"])
def a_generator_that_ends(rank):
    """The files of rank 1 hold fewer examples: its generator ends, and its epoch."""

    def batches():
        for _ in range(2 if rank == 1 else 4):
            yield X

    for batch in batches():
        mean(batch)  # others


@fault("mismatch", ranks=2, culprits=[1], words=[r"\b2\b", r"\b4\b"])
def the_last_batch_of_one_rank(rank):
    """The last batch of rank 1 is smaller, in a loss with a loop over layers."""
    w = np.ones((3, 3), np.float32)

    def loss(w, x):
        h, _ = lax.scan(lambda h, _: (snp.tanh(h @ w), None), x, None, length=2)
        return lax.all_gather(h, "i")  # fault

    step = spmd.pmap(loss, axis_name="i", in_axes=(None, 0))
    for k in range(3):
        step(w, np.ones((1, 2 if (rank, k) == (1, 2) else 4, 3), np.float32))


# ---- memory ------------------------------------------------------------------------------------


@fault("raised", ranks=2, culprits=[1], words=["[Mm]emory"], code=1)
def out_of_memory_in_a_program(rank):
    """The table of rank 1 is a million times too large for the host."""

    def table(x):
        return snp.zeros((1 << (44 if rank == 1 else 2), 3)) + x

    mean(X)
    rows = spmd.jit(table)(X)  # fault
    mean(X * rows[0, 0])


# ---- errors and the calls that handle them -----------------------------------------------------


@fault("raised", ranks=2, culprits=[1], words=["ValueError", "bad label"], code=1)
def a_finally_with_a_collective(rank):
    """Rank 1 raises, and its `finally` still averages: it meets the others' next step."""

    def summary(x):
        return lax.pmax(x, "i")

    try:
        mean(X)
        if rank == 1:
            raise ValueError("bad label")  # fault
        mean(X)
    finally:
        spmd.pmap(summary, axis_name="i")(X)


@fault("mismatch", ranks=3, culprits=[2])
def a_step_skipped_for_its_loss(rank):
    """Rank 2 skips a step whose loss is not finite; then it counts one fewer."""

    def count(x):
        return lax.psum(snp.sum(x), "i")  # fault

    for k in range(3):
        loss = np.nan if (rank, k) == (2, 1) else 1.0
        if np.isfinite(loss):
            mean(X)
        spmd.pmap(count, axis_name="i")(X)


@fault("raised", ranks=2, culprits=[1], words=["BdbQuit"], code=1)
def a_breakpoint_without_a_terminal(rank):
    """`breakpoint()` was left in the code of rank 1, and no one is at its prompt."""
    mean(X)
    if rank == 1:
        sys.stdin = open(os.devnull)
        breakpoint()
    mean(X)  # fault


@fault("raised", ranks=2, culprits=[1], words=["TimeoutError"], code=1)
def an_alarm(rank):
    """An alarm of rank 1's own watchdog interrupts its collective."""

    def expired(signum, frame):
        raise TimeoutError("no step for a second")  # fault

    mean(X)
    if rank == 1:
        signal.signal(signal.SIGALRM, expired)
        signal.alarm(1)
        mean(X)
    time.sleep(3)
    mean(X)


# ---- checkpoints -------------------------------------------------------------------------------


@fault("mismatch", ranks=2, culprits=[0], words=[r"checkpoints\.save"])
def a_spread_state_saved_by_rank_0(rank):
    """Rank 0 alone writes the checkpoint, and the state is spread over all ranks."""
    folder = os.path.join(os.environ["SPMD_FAULTS_FOLDER"], "run")
    state = spread((4, 3))
    mean(X)
    if rank == 0:
        checkpoints.save(folder, 1, {"w": state})  # fault
    mean(X)


@fault("raised", ranks=2, culprits=[1], words=["bias"], code=1)
def a_checkpoint_of_another_model(rank):
    """Rank 1 runs a model with a bias, which the checkpoint does not have."""
    folder = os.path.join(os.environ["SPMD_FAULTS_FOLDER"], "run")
    checkpoints.save(folder, 1, {"w": np.ones(3, np.float32)})
    mean(X)
    like = {"w": np.ones(3, np.float32)} | ({"bias": np.ones(2)} if rank == 1 else {})
    checkpoints.restore(folder, like=like)  # fault
    mean(X)


@fault("killed", ranks=3, culprits=[0], words=["SIGKILL"], code=137)
def rank_0_while_it_saves(rank):
    """Rank 0 is killed while all save a spread state."""
    folder = os.path.join(os.environ["SPMD_FAULTS_FOLDER"], "run")
    state = spread((6, 100_000))
    if rank == 0:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for k in range(1000):
        checkpoints.save(folder, k, {"w": state})  # others


@fault("mismatch", ranks=2, culprits=[1], words=["step 3", "step 4"])
def a_step_number_of_each_rank(rank):
    """The ranks save under different numbers."""
    folder = os.path.join(os.environ["SPMD_FAULTS_FOLDER"], "run")
    checkpoints.save(folder, 3 + rank, {"w": spread((4, 2))})  # fault


# ---- programs for JAX --------------------------------------------------------------------------


@fault("mismatch", ranks=2, culprits=[1], words=["trace|mu|nu|count|argument|missing"])
def another_optimizer(rank):
    """Under as_jax: rank 1 was started with SGD, rank 0 with Adam, whose state is averaged."""
    spmd.as_jax.install()
    import jax
    import optax

    optimizer = optax.sgd(0.1) if rank == 1 else optax.adam(0.1)

    def step(params):
        state = optimizer.init(params)
        updates, state = optimizer.update(params, state)
        return jax.lax.pmean((updates, state), "i")  # fault

    jax.pmap(step, axis_name="i")({"w": X})


@fault("raised", ranks=2, culprits=[1], words=["ScopeParamShapeError|shape"], code=1)
def features_of_a_layer(rank):
    """Under as_jax: the parameters of rank 1 are those of a wider layer of Flax."""
    spmd.as_jax.install()
    import flax.linen as nn
    import jax

    def layer(features):
        return nn.Dense(features)

    params = layer(4 + rank).init(jax.random.key(0), X[0])

    def step(x):
        y = layer(4).apply(params, x)  # fault
        return jax.lax.pmean(y, "i")

    jax.pmap(step, axis_name="i")(X)


@fault("mismatch", ranks=2, culprits=[1])
def statistics_of_one_rank(rank):
    """Under as_jax: BatchNorm of rank 1 has no axis name, and its statistics are its own."""
    spmd.as_jax.install()
    import flax.linen as nn
    import jax

    norm = nn.BatchNorm(use_running_average=False, axis_name=None if rank == 1 else "i")
    variables = norm.init(jax.random.key(0), X)

    def step(x):
        y, _ = norm.apply(variables, x, mutable=["batch_stats"])  # fault
        return jax.lax.pmean(y, "i")  # fault

    jax.pmap(step, axis_name="i")(np.ones((1, 4, 3), np.float32))
