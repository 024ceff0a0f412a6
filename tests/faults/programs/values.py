"""Faults in the numbers, and programs that are wrong for any numbers."""

import os

import numpy as np

import spmd
import spmd.numpy as snp
from spmd import lax, random
from spmd.sharding import Mesh
from spmd.sharding import PartitionSpec as P
from tests.faults.corpus import fault

NANS = {"SPMD_DEBUG_NANS": "1"}
X = np.ones((1, 3), np.float32)
mean = spmd.pmap(lambda x: lax.pmean(x, "i"), axis_name="i")


# ---- NaNs and checks ---------------------------------------------------------------------------


@fault("value", ranks=3, culprits=[1], words=["[Nn]a[Nn]"], environ=NANS, hosts=True)
def a_nan(rank):
    """Rank 1's data give 0/0; the others go on to the collective."""
    x = np.zeros((1, 3), np.float32) if rank == 1 else X

    def step(x):
        return lax.pmean(x / x, "i")  # fault

    spmd.pmap(step, axis_name="i")(x)


@fault("value", ranks=2, culprits=[0], words=["[Nn]a[Nn]"], environ=NANS)
def the_logarithm_of_a_negative(rank):
    """Rank 0 takes the logarithm of a negative probability, in a jitted function."""
    x = snp.asarray([-1.0 if rank == 0 else 1.0])

    @spmd.jit
    def loss(x):
        return snp.sum(snp.log(x))  # fault

    mean(X * loss(x))


@fault("value", ranks=2, culprits=[1], words=["[Nn]a[Nn]"], environ=NANS)
def a_nan_in_a_gradient(rank):
    """The derivative of sqrt at zero times zero, on rank 1 only."""
    x = X * (1 - rank)

    def loss(x):
        return snp.sum(snp.where(x > 0, snp.sqrt(x), 0.0))  # fault

    spmd.pmap(lambda x: lax.pmean(spmd.grad(loss)(x), "i"), axis_name="i")(x)


@fault("raised", ranks=2, culprits=[1], words=["FloatingPointError"], code=1)
def a_check_of_the_host(rank):
    """Rank 1 looks at its own loss and raises."""
    x = X * (np.inf if rank == 1 else 1)
    if not np.isfinite(x).all():
        raise FloatingPointError("the loss is not finite")  # fault
    mean(x)


@fault("raised", ranks=2, culprits=[1], words=["must be positive"], code=1)
def a_check_inside_the_program(rank):
    """checkify: the condition fails on rank 1 only, after the collective of all."""

    def step(x):
        spmd.checkify.check(snp.all(x > 0), "x must be positive")
        return x * 2

    error, y = spmd.checkify.checkify(spmd.jit(step))(X[0] * (1 - 2 * rank))
    error.throw()  # fault
    mean(y[None])


@fault("value", ranks=2, culprits=[1], words=["[Nn]a[Nn]"], environ={"SPMD_DEBUG_NANS": "1"})
def a_nan_over_a_mesh(rank):
    """The rows of rank 1 have a zero in the denominator."""
    rows = spmd.NamedSharding(spmd.make_mesh((2,), ("x",)), P("x"))
    whole = np.array([[1.0], [2.0], [0.0], [3.0]], np.float32)
    x = spmd.make_array_from_callback((4, 1), rows, lambda i: whole[i])

    def loss(x):
        return snp.sum(x / x)  # fault

    spmd.jit(loss)(x)


# ---- replicas that are none --------------------------------------------------------------------


@fault("value", ranks=3, culprits=[1], words=["differ"], hosts=True)
def other_seeds(rank):
    """Rank 1 initialises its parameters from another seed."""
    key = random.key(1 if rank == 1 else 0)
    params = {"bias": snp.zeros(3), "weight": random.normal(key, (4, 3))}
    spmd.debug.assert_replicated(params)  # fault


@fault("value", ranks=2, culprits=[1], words=["differ"])
def another_checkpoint(rank):
    """Rank 1 resumes from an older checkpoint."""
    params = {"step": np.int32(100 - 50 * rank), "weight": np.full(3, 0.5 - 0.25 * rank)}
    spmd.debug.assert_replicated(params)  # fault


@fault("value", ranks=3, culprits=[2], words=["differ", "bias"])
def a_gradient_that_was_not_reduced(rank):
    """The bias is updated by each rank's own gradient: the replicas drift apart."""
    params = {"bias": snp.zeros(3), "weight": snp.zeros(3)}
    own = snp.ones(3) * (2.0 if rank == 2 else 1.0)
    params["weight"] = params["weight"] - mean(own[None])[0]
    params["bias"] = params["bias"] - own
    spmd.debug.assert_replicated(params)  # fault


@fault("value", ranks=2, culprits=[1], words=["differ"])
def dropout_with_the_ranks_key_in_the_parameters(rank):
    """A key folded with the rank reaches what must be equal on all ranks."""
    key = random.fold_in(random.key(0), rank)
    spmd.debug.assert_replicated({"scale": random.uniform(key, (2,))})  # fault


# ---- wrong for any data ------------------------------------------------------------------------


@fault("static", ranks=2, culprits=[], words=["cond"], ci=True)
def a_collective_in_one_branch(rank):
    """Each device decides by its own value whether it takes part."""

    def step(x):
        return lax.cond(
            x[0] > 0,
            lambda x: lax.psum(x, "i"),  # fault
            lambda x: x,
            x,
        )

    spmd.pmap(step, axis_name="i")(X * (1 - rank))


@fault("static", ranks=3, culprits=[], words=["while"])
def a_collective_in_a_loop_by_data(rank):
    """Each device iterates until its own residual is small."""

    def solve(x):
        return lax.while_loop(
            lambda x: x[0] > 0.5,
            lambda x: x - 0.1 * lax.pmean(x, "i"),  # fault
            x,
        )

    spmd.pmap(solve, axis_name="i")(X + rank)


@fault("static", ranks=2, culprits=[], words=["twice|more than once|duplicate|distinct"])
def a_permutation_with_one_source_twice(rank):
    """Device 0 cannot send to both: that is no permutation."""

    def send(x):
        return lax.ppermute(x, "i", [(0, 0), (0, 1)])  # fault

    spmd.pmap(send, axis_name="i")(X)


@fault("static", ranks=2, culprits=[], words=["twice|more than once|duplicate|distinct"])
def a_permutation_with_one_target_twice(rank):
    """Both devices send to device 0."""

    def send(x):
        return lax.ppermute(x, "i", [(0, 0), (1, 0)])  # fault

    spmd.pmap(send, axis_name="i")(X)


@fault("static", ranks=2, culprits=[], words=["unbound|axis"])
def an_axis_that_nobody_named(rank):
    """The collective says "batch", the map says "i"."""

    def step(x):
        return lax.psum(x, "batch")  # fault

    spmd.pmap(step, axis_name="i")(X)


@fault("static", ranks=2, culprits=[], words=["grad", "psum"], code=None)
def a_loss_summed_inside_grad(rank):
    """Under pmap the gradient of a psum'ed loss is as many times too large as there are devices."""

    def loss(w, x):
        return lax.psum(snp.sum(w * x), "i")  # fault

    def step(w, x):
        return spmd.grad(loss)(w, x)

    spmd.pmap(step, axis_name="i", in_axes=(None, 0))(np.ones(3, np.float32), X)


@fault("static", ranks=2, culprits=[], words=["divi|multiple"])
def a_batch_that_does_not_divide(rank):
    """An array of five rows over two devices."""
    mesh = Mesh(np.array(spmd.devices()), ("i",))
    spmd.device_put(np.ones((5, 2), np.float32), spmd.NamedSharding(mesh, P("i")))  # fault


@fault("static", ranks=2, culprits=[], words=["axis"])
def a_collective_outside_of_its_map(rank):
    """The psum stands after the map."""
    y = spmd.pmap(lambda x: x * 2, axis_name="i")(X)
    lax.psum(y, "i")  # fault


# ---- the job is not what its ranks believe -----------------------------------------------------


@fault("launch", ranks=3, culprits=[], words=["8", "3"], ci=True)
def more_devices_than_there_are(rank):
    """A mesh of eight devices on three ranks with one each."""
    spmd.make_mesh((8,), ("i",))  # fault


@fault("launch", ranks=2, culprits=[1], words=["devices"])
def other_numbers_of_devices(rank):
    """Rank 1 has two virtual devices: the ranks see different worlds."""
    spmd.config.update("num_cpu_devices", 1 + rank)
    x = np.ones((spmd.local_device_count(), 3), np.float32)
    mean(x)


@fault("launch", ranks=2, culprits=[], words=["4 ranks", "MPI says 2"])
def another_number_of_ranks(rank):
    """The script was written for four ranks."""
    spmd.distributed.initialize(process_count=4)  # fault


@fault("launch", ranks=2, culprits=[], words=["different MPIs|mpirun"], launcher="other-mpi")
def the_mpirun_of_another_mpi(rank):
    """mpirun belongs to another MPI than mpi4py: N ranks that each believe to be alone."""
    mean(X)


@fault(
    "launch",
    ranks=1,
    culprits=[],
    words=["Slurm"],
    launcher="python",
    code=0,
    environ={
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "4",
        "SLURM_JOB_NAME": "interactive",
    },
)
def a_shell_inside_an_allocation(rank):
    """Half of Slurm's variables are set: this is a single process, and says why."""
    assert spmd.process_count() == 1 and os.environ["SLURM_NTASKS"] == "4"


@fault(
    "launch",
    ranks=2,
    culprits=[],
    words=["process_count|SPMD_PROCESS_COUNT|says"],
    environ={"SPMD_PROCESS_COUNT": "3", "SPMD_PROCESS_INDEX": "0"},
)
def variables_of_a_former_job(rank):
    """SPMD_PROCESS_COUNT=3 was left in the environment."""
    mean(X)
