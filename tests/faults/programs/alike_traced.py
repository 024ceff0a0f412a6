"""Look-alikes inside programs: rank-dependent code with one schedule of collectives for all."""

import os

import numpy as np

import spmd
import spmd.numpy as snp
from spmd import lax, nn, random
from spmd.sharding import Mesh
from spmd.sharding import PartitionSpec as P
from tests.faults.corpus import alike

NANS = {"SPMD_DEBUG_NANS": "1"}
X = np.ones((1, 3), np.float32)


def mapped(f, *args, **settings):
    """`f` over all devices, its axis called "i"."""
    return spmd.pmap(f, axis_name="i", **settings)(*args)


def square_mesh():
    """Four devices as two by two."""
    return Mesh(np.array(spmd.devices()).reshape(2, 2), ("row", "column"))


# ---- one schedule, other numbers ---------------------------------------------------------------


@alike(ranks=3, like="mismatch", hosts=True, ci=True)
def constants_of_the_rank(rank):
    """The rank is a constant of each rank's program."""
    total = mapped(lambda x: lax.psum(x * (1.0 + rank), "i"), X)
    assert float(total[0, 0]) == 6


@alike(ranks=2, like="mismatch")
def other_work_on_each_rank(rank):
    """The programs differ, their collectives do not."""

    def step(x):
        y = snp.sin(x) if rank == 0 else snp.cumsum(x * x)
        return lax.psum(y, "i")

    mapped(step, X)


@alike(ranks=2, like="mismatch")
def order_of_a_plain_dictionary(rank):
    """A dict is a pytree in the order of its keys, not of their insertion."""
    names = ["w", "b"] if rank == 0 else ["b", "w"]
    params = {name: X * (1 + (name == "b")) for name in names}
    out = mapped(lambda p: lax.pmean(p, "i"), params)
    assert float(out["b"][0, 0]) == 2


@alike(ranks=3, like="mismatch")
def padded_batches(rank):
    """Other numbers of examples, one shape: padded and masked."""
    count = 2 + rank
    batch = np.zeros((1, 8), np.float32)
    batch[0, :count] = 1

    def loss(batch):
        return lax.psum(snp.sum(batch), "i") / lax.psum(snp.sum(batch > 0), "i")

    assert float(mapped(loss, batch)[0]) == 1


@alike(ranks=3, like="mismatch")
def a_rank_with_nothing(rank):
    """Rank 1 has an empty list of examples and adds nothing."""
    examples = [] if rank == 1 else [1.0, 2.0]
    total = np.full((1,), sum(examples), np.float32)
    assert float(mapped(lambda x: lax.psum(x, "i"), total)[0]) == 6


@alike(ranks=2, like="mismatch")
def one_line_from_two_callers(rank):
    """The same collective reached by other ways through the program."""

    def reduce(x):
        return lax.pmean(x, "i")

    def short(x):
        return reduce(x)

    def long(x):
        return short(x + 0)

    mapped(short if rank == 0 else long, X)


@alike(ranks=4, like="mismatch")
def index_groups(rank):
    """Pairs of ranks reduce among themselves."""
    total = mapped(lambda x: lax.psum(x, "i", axis_index_groups=[[0, 1], [2, 3]]), X * rank)
    assert float(total[0, 0]) == (1 if rank < 2 else 5)


@alike(ranks=4, like="mismatch", hosts=True)
def rows_and_columns(rank):
    """All ranks sum along rows, then along columns."""
    mesh = square_mesh()
    x = spmd.device_put(np.ones((2, 2), np.float32), spmd.NamedSharding(mesh, P("row", "column")))

    def both(x):
        return lax.psum(lax.psum(x, "row"), "column")

    out = spmd.shard_map(both, mesh=mesh, in_specs=P("row", "column"), out_specs=P())(x)
    assert float(out[0, 0]) == 4


@alike(ranks=4, like="mismatch")
def groups_in_turn(rank):
    """Programs over rows and over columns, in the same order everywhere."""
    mesh = square_mesh()
    x = spmd.device_put(np.ones((2, 2), np.float32), spmd.NamedSharding(mesh, P("row", "column")))
    for axis in ("row", "column", "row"):
        spmd.shard_map(
            lambda x: lax.psum(x, axis),  # noqa: B023
            mesh=mesh,
            in_specs=P("row", "column"),
            out_specs=P("row", "column"),
            check_vma=False,
        )(x)


@alike(ranks=3, like="mismatch")
def programs_in_any_number(rank):
    """Many programs of many shapes, all in one order."""
    for size in range(1, 8):
        mapped(lambda x: lax.psum(x, "i"), np.ones((1, size), np.float32))


@alike(ranks=2, like="mismatch", options=("--devices-per-rank", "2"))
def two_devices_a_rank(rank):
    """Four devices on two ranks."""
    out = mapped(lambda x: lax.psum(x, "i"), np.ones((2, 3), np.float32))
    assert float(out[0, 0]) == 4


@alike(ranks=2, like="mismatch")
def every_collective(rank):
    """One of each, in one program."""

    def step(x):
        x = lax.pmax(x, "i") + lax.pmin(x, "i") + lax.pmean(x, "i")
        x = lax.ppermute(x, "i", [(0, 1), (1, 0)])
        x = snp.sum(lax.all_gather(x, "i"), 0)
        x = lax.all_to_all(x.reshape(2, -1), "i", 0, 0)
        return lax.psum_scatter(x, "i", scatter_dimension=0)

    mapped(step, np.ones((1, 4), np.float32))


@alike(ranks=2, like="mismatch")
def other_types_in_turn(rank):
    """Floats, integers, booleans, complex numbers, each in its own program."""
    for dtype in (np.float32, np.int32, np.complex64, np.float16):
        mapped(lambda x: lax.psum(x, "i"), np.ones((1, 3), dtype))


@alike(ranks=2, like="mismatch")
def a_jit_of_one_rank_only_before_all(rank):
    """Rank 1 has compiled a program already that rank 0 compiles later."""
    program = spmd.jit(lambda x: x * 2)
    if rank == 1:
        program(X)
    mapped(lambda x: lax.psum(x, "i"), X)
    program(X)
    mapped(lambda x: lax.psum(x, "i"), X)


@alike(ranks=2, like="mismatch")
def static_arguments_of_the_rank(rank):
    """A static argument without influence on the collectives."""

    @spmd.jit
    def scale(x, by=1.0 + rank):
        return x * by

    mapped(lambda x: lax.psum(scale(x), "i"), X)


@alike(ranks=2, like="mismatch")
def a_cache_on_one_rank(rank):
    """Rank 0 reads compiled programs from the disk, rank 1 compiles."""
    spmd.config.update("cache_dir", "" if rank else os.environ.get("SPMD_CACHE_DIR", ""))
    mapped(lambda x: lax.psum(snp.tanh(x), "i"), X)


@alike(ranks=3, like="mismatch", ci=True)
def a_print_of_rank_0(rank):
    """Rank 0 prints what all have: the others' programs lack that, and no result depends on it."""
    rows = spmd.NamedSharding(spmd.make_mesh((spmd.device_count(),), ("i",)), P("i"))
    x = spmd.make_array_from_callback(
        (6, 2), rows, lambda index: np.ones((6, 2), np.float32)[index]
    )

    def step(x, rate):
        if rank == 0:
            spmd.debug.print("rate {}", rate)
        return snp.sum(x) * rate

    assert float(spmd.jit(step)(x, np.float32(0.5))) == 6


# ---- control flow round collectives ------------------------------------------------------------


@alike(ranks=3, like="static")
def a_branch_that_all_take(rank):
    """The predicate is a sum over all devices: equal everywhere."""

    def step(x):
        agreed = lax.psum(x[0], "i") > 1
        return lax.cond(agreed, lambda x: lax.psum(x, "i"), lambda x: x, x)

    mapped(step, X * (1 + rank))


@alike(ranks=3, like="static")
def a_loop_by_the_common_residual(rank):
    """The condition is the largest residual of all devices."""

    def solve(x):
        def unfinished(state):
            return lax.pmax(state[0], "i") > 0.5

        return lax.while_loop(unfinished, lambda x: 0.5 * lax.pmean(x, "i"), x)

    mapped(solve, X + rank)


@alike(ranks=2, like="static")
def a_branch_without_a_collective(rank):
    """Each device chooses by its own data; the collective follows for all."""

    def step(x):
        y = lax.cond(x[0] > 1, lambda x: x * 2, lambda x: x, x)
        return lax.psum(y, "i")

    mapped(step, X + rank)


@alike(ranks=2, like="static")
def a_loop_without_a_collective(rank):
    """Each device iterates as often as it likes, and reduces after that."""

    def step(x):
        x = lax.while_loop(lambda x: x[0] > 1, lambda x: x / 2, x)
        return lax.psum(x, "i")

    mapped(step, X * 2.0 ** (3 * rank))


@alike(ranks=2, like="static")
def a_branch_by_a_constant(rank):
    """The predicate is an argument that is the same on all devices."""

    def step(x, warm):
        return lax.cond(warm, lambda x: lax.pmean(x, "i"), lambda x: x, x)

    mapped(step, X, np.bool_(True), in_axes=(0, None))


@alike(ranks=3, like="static")
def a_scan_with_a_collective(rank):
    """A fixed number of steps, each with a mean."""

    def steps(x):
        return lax.scan(lambda x, _: (lax.pmean(x, "i"), None), x, None, length=4)[0]

    mapped(steps, X * rank)


@alike(ranks=3, like="static")
def a_partial_permutation(rank):
    """Not every device sends or receives: zeros arrive at the first."""
    out = mapped(lambda x: lax.ppermute(x, "i", [(0, 1), (1, 2)]), X)
    assert float(out[0, 0]) == (rank > 0)


@alike(ranks=2, like="static")
def a_choice_by_the_device(rank):
    """`where` on the number of the device, on both sides of a collective."""

    def step(x):
        mine = snp.where(lax.axis_index("i") == 0, x, 2 * x)
        return snp.where(lax.axis_index("i") == 0, lax.psum(mine, "i"), x)

    mapped(step, X)


# ---- gradients ---------------------------------------------------------------------------------


@alike(ranks=2, like="static", ci=True)
def gradients_averaged_after(rank):
    """The usual training step: a local loss, then the mean of gradients and loss."""

    def loss(w, x):
        return snp.mean((x @ w - 1) ** 2)

    def step(w, x):
        value, gradient = spmd.value_and_grad(loss)(w, x)
        return w - 0.1 * lax.pmean(gradient, "i"), lax.pmean(value, "i")

    w = np.zeros((1, 3), np.float32)
    for _ in range(3):
        w, _ = mapped(step, w, np.ones((1, 4, 3), np.float32) * (1 + rank))


@alike(ranks=2, like="static")
def a_metric_beside_the_loss(rank):
    """A psum in the auxiliary output, of which no derivative is taken."""

    def loss(w, x):
        error = snp.sum((w - x) ** 2)
        return error, lax.psum(lax.stop_gradient(error), "i")

    def step(w, x):
        gradient, _ = spmd.grad(loss, has_aux=True)(w, x)
        return lax.pmean(gradient, "i")

    mapped(step, X, X * rank)


@alike(ranks=2, like="static")
def batch_norm_inside_grad(rank):
    """Statistics over all devices inside the loss: a mean of activations, not of the loss."""

    def loss(w, x):
        y = x * w
        centred = y - lax.pmean(snp.mean(y), "i")
        return snp.mean(centred**2)

    mapped(lambda w, x: lax.pmean(spmd.grad(loss)(w, x), "i"), X, X * (1 + rank))


@alike(ranks=2, like="static")
def a_sharded_loss(rank):
    """grad of a whole shard_map: there the sum inside is right."""
    mesh = Mesh(np.array(spmd.devices()), ("i",))
    total = spmd.shard_map(
        lambda x: lax.psum(snp.sum(x * x), "i"), mesh=mesh, in_specs=P("i"), out_specs=P()
    )
    x = spmd.device_put(np.ones(4, np.float32), spmd.NamedSharding(mesh, P("i")))
    spmd.grad(total)(x)


@alike(ranks=2, like="raised")
def a_training_run(rank):
    """A small network, trained for some steps."""

    def loss(params, x):
        hidden = nn.relu(x @ params["in"])
        return snp.mean((hidden @ params["out"]) ** 2)

    def step(params, x):
        gradient = lax.pmean(spmd.grad(loss)(params, x), "i")
        return spmd.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

    keys = random.split(random.key(0))
    params = {"in": random.normal(keys[0], (1, 3, 8)), "out": random.normal(keys[1], (1, 8, 1))}
    for _ in range(5):
        params = mapped(step, params, np.ones((1, 4, 3), np.float32) * (1 + rank))


# ---- values ------------------------------------------------------------------------------------


@alike(ranks=2, like="value")
def infinities(rank):
    """log(0) is no NaN."""
    mapped(lambda x: lax.psum(snp.exp(snp.log(x)), "i"), X * rank)


@alike(ranks=2, like="value", environ=NANS)
def a_guarded_division(rank):
    """0/0 is avoided by a safe denominator, under SPMD_DEBUG_NANS."""

    def safe(x):
        return snp.where(x > 0, 1 / snp.where(x > 0, x, 1), 0)

    mapped(lambda x: lax.psum(safe(x), "i"), X * rank)


@alike(ranks=3, like="value", hosts=True)
def equal_replicas(rank):
    """Parameters from one seed, updated by averaged gradients."""
    params = {"w": random.normal(random.key(0), (4, 3))}
    params["w"] = params["w"] - mapped(lambda x: lax.pmean(x, "i"), X * rank)[0]
    spmd.debug.assert_replicated(params)


@alike(ranks=2, like="value")
def equal_nans(rank):
    """A masked entry is NaN on all ranks: the replicas agree."""
    spmd.debug.assert_replicated({"w": np.array([1.0, np.nan], np.float32)})


@alike(ranks=2, like="raised")
def a_check_that_holds(rank):
    """checkify over ranks, and nothing to say."""

    def step(x):
        spmd.checkify.check(snp.all(x > 0), "x must be positive")
        return x * 2

    error, _ = spmd.checkify.checkify(spmd.jit(step))(X[0])
    error.throw()


@alike(ranks=2, like="raised")
def op_by_op(rank):
    """disable_jit: the program runs as plain Python, over the ranks."""
    with spmd.disable_jit():
        out = mapped(lambda x: lax.psum(x, "i"), X)
    assert float(out[0, 0]) == 2


# ---- the job -----------------------------------------------------------------------------------


@alike(ranks=3, like="launch")
def the_right_number_of_ranks(rank):
    """initialize with what is true, twice."""
    for _ in range(2):
        spmd.distributed.initialize(process_count=3)
    mapped(lambda x: lax.psum(x, "i"), X)


@alike(ranks=1, like="launch")
def a_job_of_one(rank):
    """One rank: collectives are copies."""
    assert float(mapped(lambda x: lax.psum(x, "i"), X)[0, 0]) == 1


@alike(ranks=2, like="launch")
def devices_asked_before_the_first_collective(rank):
    """Questions about the job in any order."""
    assert spmd.process_count() == 2 == len(spmd.devices())
    assert spmd.process_index() == rank and len(spmd.local_devices()) == 1
    mapped(lambda x: lax.psum(x, "i"), X)
