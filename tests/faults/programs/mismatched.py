"""Faults: ranks that compile or call different collectives. Each would hang or mix up numbers."""

import collections
import threading

import numpy as np

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.sharding import Mesh
from spmd.sharding import PartitionSpec as P
from tests.faults.corpus import fault


def ones(*shape, dtype=np.float32):
    """One device's part of an array: `pmap` wants the dim of the devices first."""
    return np.ones((1, *shape), dtype)


# ---- one collective differs --------------------------------------------------------------------


@fault("mismatch", ranks=3, culprits=[1], words=["max", "sum"], hosts=True, ci=True)
def operator(rank):
    """Rank 1 reduces by the maximum, the others by the sum."""

    def total(x):
        if rank == 1:
            return lax.pmax(x, "i")  # fault
        return lax.psum(x, "i")  # others

    spmd.pmap(total, axis_name="i")(ones(3))


@fault("mismatch", ranks=3, culprits=[2], words=["gather"], hosts=True)
def kind(rank):
    """Rank 2 gathers where the others sum."""

    def exchange(x):
        if rank == 2:
            return snp.sum(lax.all_gather(x, "i"), 0)  # fault
        return lax.psum(x, "i")  # others

    spmd.pmap(exchange, axis_name="i")(ones(3))


@fault("mismatch", ranks=2, culprits=[1], words=["i(nt)?32", "f(loat)?32"], hosts=True)
def dtype(rank):
    """Rank 1 counts in integers: the sums of the others would be read as integers."""
    x = ones(3, dtype=np.int32) if rank == 1 else ones(3)
    spmd.pmap(lambda x: lax.psum(x, "i"), axis_name="i")(x)  # fault


@fault("mismatch", ranks=2, culprits=[0], words=["f(loat)?16", "f(loat)?32"])
def precision(rank):
    """Rank 0 sends its gradients in half precision."""

    def reduce(g):
        g = g.astype(snp.float16) if rank == 0 else g
        return lax.pmean(g, "i")  # fault

    spmd.pmap(reduce, axis_name="i")(ones(8))


@fault("mismatch", ranks=3, culprits=[1], words=[r"\b4\b", r"\b5\b"], hosts=True)
def batch_size(rank):
    """The last batch of rank 1 is larger, and a sum per example goes over the ranks."""
    batch = ones(5 if rank == 1 else 4, 2)

    def errors(batch):
        return lax.psum(snp.sum(batch, 1), "i")  # fault

    spmd.pmap(errors, axis_name="i")(batch)


@fault("mismatch", ranks=2, culprits=[1])
def same_count_other_shape(rank):
    """Rank 1 has its matrix transposed: as many bytes, other places."""
    x = ones(2, 6) if rank == 0 else ones(6, 2)
    spmd.pmap(lambda x: lax.psum(x, "i"), axis_name="i")(x)  # fault


@fault("mismatch", ranks=2, culprits=[1])
def scalar_or_vector(rank):
    """Rank 1 sums a vector of one element, rank 0 a scalar."""
    x = ones(1) if rank == 1 else ones()
    spmd.pmap(lambda x: lax.psum(x, "i"), axis_name="i")(x)  # fault


@fault("mismatch", ranks=4, culprits=[3], hosts=True)
def axis(rank):
    """Rank 3 sums along the other axis of the mesh."""
    mesh = Mesh(np.array(spmd.devices()).reshape(2, 2), ("x", "y"))

    def total(x):
        return lax.psum(x, "x" if rank == 3 else "y")  # fault

    spmd.shard_map(total, mesh=mesh, in_specs=P("x", "y"), out_specs=P("x", "y"), check_vma=False)(
        spmd.device_put(np.ones((4, 4), np.float32), spmd.NamedSharding(mesh, P("x", "y")))
    )


@fault("mismatch", ranks=4, culprits=[1])
def index_groups(rank):
    """Rank 1 pairs the ranks in another way."""
    groups = [[0, 2], [1, 3]] if rank == 1 else [[0, 1], [2, 3]]

    def total(x):
        return lax.psum(x, "i", axis_index_groups=groups)  # fault

    spmd.pmap(total, axis_name="i")(ones(3))


@fault("mismatch", ranks=3, culprits=[2], words=["permut"], hosts=True)
def permutation(rank):
    """Rank 2 believes that the ring goes the other way."""
    step = -1 if rank == 2 else 1
    ring = [(k, (k + step) % 3) for k in range(3)]

    def shift(x):
        return lax.ppermute(x, "i", ring)  # fault

    spmd.pmap(shift, axis_name="i")(ones(3))


@fault("mismatch", ranks=3, culprits=[0])
def source_of_a_broadcast(rank):
    """Rank 0 sends its parameters to the others, who wait for those of rank 1."""
    root = 0 if rank == 0 else 1

    def receive(x):
        x = snp.where(lax.axis_index("i") == root, x, 0)
        return lax.ppermute(x, "i", [(root, (root + 1) % 3)])  # fault

    spmd.pmap(receive, axis_name="i")(ones(3))


@fault("mismatch", ranks=2, culprits=[1])
def gathered_dim(rank):
    """Rank 1 gathers along the last dim, rank 0 along the first; the shapes are square."""

    def gather(x):
        return lax.all_gather(x, "i", axis=rank, tiled=True)  # fault

    spmd.pmap(gather, axis_name="i")(ones(2, 2))


@fault("mismatch", ranks=2, culprits=[1])
def scattered_dim(rank):
    """Rank 1 scatters the columns of the sum, rank 0 its rows."""

    def scatter(x):
        return lax.psum_scatter(x, "i", scatter_dimension=rank, tiled=True)  # fault

    spmd.pmap(scatter, axis_name="i")(ones(2, 2))


@fault("mismatch", ranks=2, culprits=[1])
def split_dim(rank):
    """Rank 1 sends columns where rank 0 sends rows."""

    def swap(x):
        return lax.all_to_all(x, "i", rank, rank, tiled=True)  # fault

    spmd.pmap(swap, axis_name="i")(ones(2, 2))


# ---- a program has more, fewer or other collectives --------------------------------------------


@fault("mismatch", ranks=3, culprits=[0], hosts=True, ci=True)
def a_metric_of_rank_0(rank):
    """Rank 0 alone averages a metric to print it: its pmean meets the next step's psum."""

    def step(x):
        return lax.psum(x, "i")  # others

    def metric(x):
        return lax.pmean(x * x, "i")  # fault

    train, measure = (spmd.pmap(f, axis_name="i") for f in (step, metric))
    for _ in range(4):
        x = train(ones(3))
        if rank == 0:
            print("loss", measure(x))  # fault


@fault("mismatch", ranks=3, culprits=[1])
def the_same_but_from_elsewhere(rank):
    """Rank 1 evaluates while the others train; both sum three floats."""

    def loss(x):
        return lax.psum(x, "i")  # others

    def accuracy(x):
        return lax.psum(x, "i")  # fault

    for step in range(4):
        spmd.pmap(accuracy if (rank, step) == (1, 2) else loss, axis_name="i")(ones(3))


@fault("mismatch", ranks=2, culprits=[1])
def order_of_two_sums(rank):
    """Rank 1 sums the count first and the loss second: the shapes agree, the numbers mix."""

    def means(loss, count):
        if rank == 1:
            count = lax.psum(count, "i")  # fault
            return lax.psum(loss, "i") / count
        loss = lax.psum(loss, "i")  # others
        return loss / lax.psum(count, "i")

    spmd.pmap(means, axis_name="i")(ones(), ones())


@fault("mismatch", ranks=3, culprits=[2])
def length_of_a_loop(rank):
    """Rank 2 unrolls one step more in its program."""

    def steps(x):
        for _ in range(4 if rank == 2 else 3):
            x = lax.pmean(x, "i")  # fault
        return x

    spmd.pmap(steps, axis_name="i")(ones(3))


@fault("mismatch", ranks=2, culprits=[1])
def trips_of_a_compiled_loop(rank):
    """The loop inside the program runs five times on rank 1, four times on rank 0."""

    def steps(x):
        return lax.fori_loop(0, 4 + rank, lambda _, x: lax.pmean(x, "i"), x)  # fault

    spmd.pmap(steps, axis_name="i")(ones(3))


@fault("mismatch", ranks=2, culprits=[0])
def depth_of_the_model(rank):
    """Rank 0 reads a configuration with three layers, rank 1 one with two."""
    layers = [ones(4, 4) for _ in range(3 if rank == 0 else 2)]

    def loss(layers):
        return sum(snp.sum(w * w) for w in layers)

    def step(layers):
        return lax.pmean(spmd.grad(loss)(layers), "i")  # fault

    spmd.pmap(step, axis_name="i")(layers)


@fault("mismatch", ranks=2, culprits=[1], words=["bias|scale"])
def a_frozen_parameter(rank):
    """Rank 1 does not train the bias: its gradients are one array fewer."""
    params = {"bias": ones(4), "scale": ones(4), "weight": ones(4, 4)}
    if rank == 1:
        del params["bias"]

    def step(params):
        return lax.pmean(params, "i")  # fault

    spmd.pmap(step, axis_name="i")(params)


@fault("mismatch", ranks=2, culprits=[1])
def order_of_a_dictionary(rank):
    """An OrderedDict keeps the order of insertion, which differs: w meets b of the same shape."""
    names = ["w", "b"] if rank == 0 else ["b", "w"]
    params = collections.OrderedDict((name, ones(4)) for name in names)

    def step(params):
        return lax.pmean(params, "i")  # fault

    spmd.pmap(step, axis_name="i")(params)


@fault("mismatch", ranks=2, culprits=[1])
def loss_without_gradient(rank):
    """Rank 1 evaluates, the others differentiate: they have one collective more."""

    def loss(w):
        return snp.sum(lax.pmean(w * w, "i"))  # fault

    def step(w):
        if rank == 1:
            return loss(w)
        value, gradient = spmd.value_and_grad(loss)(w)
        return value + snp.sum(lax.psum(gradient, "i"))

    spmd.pmap(step, axis_name="i")(ones(4))


@fault("mismatch", ranks=2, culprits=[1])
def size_under_vmap(rank):
    """A psum under vmap carries the batch; rank 1 maps over more examples."""
    examples = ones(6 if rank == 1 else 4, 3)

    def each(x):
        return lax.psum(x, "i")  # fault

    spmd.pmap(spmd.vmap(each), axis_name="i")(examples)


@fault("mismatch", ranks=3, culprits=[1], words=["device|mesh"])
def order_of_the_devices(rank):
    """Rank 1 builds its mesh with the devices in another order."""
    devices = np.array(spmd.devices())
    mesh = Mesh(devices[::-1] if rank == 1 else devices, ("i",))

    def shift(x):
        return lax.ppermute(x, "i", [(0, 1), (1, 2), (2, 0)])  # fault

    x = spmd.make_array_from_callback(
        (3,), spmd.NamedSharding(mesh, P("i")), lambda index: np.ones(3, np.float32)[index]
    )
    spmd.shard_map(shift, mesh=mesh, in_specs=P("i"), out_specs=P("i"))(x)  # fault


@fault("mismatch", ranks=2, culprits=[1], words=["f(loat)?64", "f(loat)?32"])
def wide_types_on_one_rank(rank):
    """SPMD_ENABLE_X64 is set on one host only."""
    spmd.config.update("enable_x64", rank == 1)

    def total(x):
        return lax.psum(x * snp.asarray(0.5), "i")  # fault

    spmd.pmap(total, axis_name="i")(ones(3, dtype=np.float64))


@fault("mismatch", ranks=3, culprits=[1])
def a_swallowed_exception(rank):
    """Rank 1 catches its error, skips the first sum, and meets the others' next one."""

    def parse(step):
        if (rank, step) == (1, 1):
            raise ValueError("bad record")
        return ones(3)

    def gradient(x):
        return lax.psum(x, "i")  # others

    def count(x):
        return lax.psum(snp.sum(x), "i")  # fault

    for step in range(3):
        try:
            spmd.pmap(gradient, axis_name="i")(parse(step))
        except ValueError:
            pass
        spmd.pmap(count, axis_name="i")(ones(3))


@fault("mismatch", ranks=2, culprits=[1])
def a_branch_by_data(rank):
    """Python's `if` on a rank's own loss decides whether it reduces."""
    loss = 0.5 + rank

    def clip(x):
        return lax.pmax(x, "i")  # fault

    def total(x):
        return lax.psum(x, "i")  # others

    if loss > 1:
        spmd.pmap(clip, axis_name="i")(ones(3))
    spmd.pmap(total, axis_name="i")(ones(3))


@fault("mismatch", ranks=2, culprits=[1])
def a_thread_that_evaluates(rank):
    """A thread of rank 1 evaluates while the main thread trains."""
    mean = spmd.pmap(lambda x: lax.pmean(x, "i"), axis_name="i")
    evaluate = spmd.pmap(lambda x: lax.pmax(x, "i"), axis_name="i")  # fault
    mean(ones(3))
    if rank == 1:
        thread = threading.Thread(target=lambda: evaluate(ones(3)))  # fault
        thread.start()
        thread.join()
    mean(ones(3))


@fault("mismatch", ranks=3, culprits=[2])
def a_retry_of_one_rank(rank):
    """Rank 2 repeats a step after a timeout of its own storage."""

    def count(x):
        return lax.psum(snp.sum(x), "i")  # others

    mean, total = (spmd.pmap(f, axis_name="i") for f in (lambda x: lax.pmean(x, "i"), count))
    for k in range(3):
        for _ in range(2 if (rank, k) == (2, 1) else 1):
            mean(ones(3))  # fault
        total(ones(3))


@fault("mismatch", ranks=2, culprits=[1], words=["key|fry|rbg|u(int)?32"])
def another_random_generator(rank):
    """Rank 1 has another default of the random generator."""
    key = spmd.random.key(0, impl="rbg" if rank == 1 else "threefry2x32")
    keys = spmd.random.key_data(key)[None]

    def share(k):
        return lax.psum(k, "i")  # fault

    spmd.pmap(share, axis_name="i")(keys)


@fault("mismatch", ranks=2, culprits=[1])
def remat_on_one_rank(rank):
    """Rank 1 rematerialises in a map, so that its gradient gathers the weights twice."""

    def layer(w, x):
        whole = lax.all_gather(w, "i", tiled=True)  # fault
        return snp.tanh(x @ whole)

    f = spmd.checkpoint(layer) if rank == 1 else layer

    def step(w, x):
        return spmd.grad(lambda w: snp.sum(f(w, x) ** 2))(w)

    spmd.pmap(step, axis_name="i")(np.ones((1, 3, 6), np.float32), np.ones((1, 2, 6), np.float32))


@fault("mismatch", ranks=2, culprits=[1])
def an_assert_that_one_rank_has_not(rank):
    """python -O on rank 1: its check with a collective is gone."""

    def check(x):
        return lax.pmin(x, "i")  # others

    if rank == 0:
        spmd.pmap(check, axis_name="i")(ones(3))

    def go(x):
        return lax.psum(x, "i")  # fault

    spmd.pmap(go, axis_name="i")(ones(3))


# ---- ranks that wait for each other ------------------------------------------------------------


@fault("mismatch", ranks=4, culprits=[1])
def rows_before_columns(rank):
    """Rank 1 sums columns first, the others rows: each waits in another group."""
    mesh = Mesh(np.array(spmd.devices()).reshape(2, 2), ("row", "column"))
    x = spmd.device_put(np.ones((2, 2), np.float32), spmd.NamedSharding(mesh, P("row", "column")))

    def over(axis):
        return spmd.shard_map(
            lambda x: lax.psum(x, axis),  # fault
            mesh=mesh,
            in_specs=P("row", "column"),
            out_specs=P("row", "column"),
            check_vma=False,
        )

    for axis in ("column", "row") if rank == 1 else ("row", "column"):
        over(axis)(x)


@fault("mismatch", ranks=2, culprits=[1])
def order_of_two_programs(rank):
    """Rank 1 calls the two programs the other way round; both have been compiled in order."""

    def loss(x):
        return lax.psum(x, "i")  # others

    def norm(x):
        return lax.psum(x, "i")  # fault

    first, second = (spmd.pmap(f, axis_name="i") for f in (loss, norm))
    first(ones(3)), second(ones(3))
    for program in (second, first) if rank == 1 else (first, second):
        program(ones(3))


# ---- one program over a mesh, written differently ----------------------------------------------


@fault("mismatch", ranks=3, culprits=[1], words=["mul", r"2\.0", r"3\.0"], ci=True)
def a_static_argument_of_a_program_over_a_mesh(rank):
    """The collectives are the same; rank 1 multiplies by another number, which is in its code."""
    rows = spmd.NamedSharding(spmd.make_mesh((spmd.device_count(),), ("i",)), P("i"))
    x = spmd.make_array_from_callback(
        (6, 2), rows, lambda index: np.ones((6, 2), np.float32)[index]
    )

    def total(x, by):
        return snp.sum(x) * by  # fault

    spmd.jit(total, static_argnums=1)(x, 3.0 if rank == 1 else 2.0)


@fault("mismatch", ranks=2, culprits=[1], words=["div"])
def a_mean_instead_of_a_sum_over_a_mesh(rank):
    """Both sum over devices; rank 1 divides after it."""
    rows = spmd.NamedSharding(spmd.make_mesh((spmd.device_count(),), ("i",)), P("i"))
    x = spmd.make_array_from_callback(
        (6, 2), rows, lambda index: np.ones((6, 2), np.float32)[index]
    )
    reduce = snp.mean if rank == 1 else snp.sum
    spmd.jit(lambda x: reduce(x))(x)  # fault
