"""Faults in programs over meshes: `jit` of arrays over all ranks, `shard_map`, groups of ranks."""

import textwrap
import time
import types

import numpy as np

import spmd
import spmd.numpy as snp
from spmd import lax, multihost
from spmd.sharding import Mesh
from spmd.sharding import PartitionSpec as P
from tests.faults.corpus import fault


def mesh_of(*sizes):
    """All devices as a mesh with axes x, y, ..."""
    sizes = sizes or (spmd.device_count(),)
    return Mesh(np.array(spmd.devices()).reshape(sizes), ("x", "y")[: len(sizes)])


def spread(shape, spec=None, mesh=None, dtype=np.float32):
    """An array of ones over a mesh, its first dim split if nothing else is said."""
    sharding = spmd.NamedSharding(mesh or mesh_of(), P("x") if spec is None else spec)
    return spmd.make_array_from_callback(
        shape, sharding, lambda index: np.ones(shape, dtype)[index]
    )


# ---- the ranks have other arrays ---------------------------------------------------------------


@fault(
    "mismatch", ranks=3, culprits=[1], words=[r"\[2,2\] on each device", r"\[3,2\] on each device"]
)
def the_size_of_a_spread_batch(rank):
    """Rank 1 believes that the whole batch has nine rows, the others six."""
    x = spread((9 if rank == 1 else 6, 2))
    spmd.jit(lambda x: snp.sum(x * x))(x)  # fault


@fault("mismatch", ranks=2, culprits=[1], words=["laid out"])
def another_layout_of_the_weights(rank):
    """Rank 1 splits the columns of the weights, rank 0 the rows."""
    w = spread((4, 4), P(None, "x") if rank == 1 else P("x"))
    spmd.jit(lambda w: snp.sum(w @ w))(w)  # fault


@fault("mismatch", ranks=2, culprits=[0], words=["bf16|bfloat16"])
def half_precision_over_a_mesh(rank):
    """Rank 0 was started with the option for half precision."""
    x = spread((4, 4), dtype=snp.bfloat16 if rank == 0 else np.float32)
    spmd.jit(lambda x: snp.sum(x))(x)  # fault


@fault("mismatch", ranks=4, culprits=[2])
def the_shape_of_the_mesh(rank):
    """Rank 2 has four data-parallel groups where the others have two by two."""
    mesh = mesh_of(4, 1) if rank == 2 else mesh_of(2, 2)
    x = spread((4, 4), P("x", "y"), mesh)
    spmd.jit(lambda x: snp.sum(x, 0))(x)  # fault


@fault("mismatch", ranks=3, culprits=[1])
def devices_in_another_order(rank):
    """Rank 1 sorts the devices of its mesh the other way round."""
    mesh = Mesh(np.array(spmd.devices())[:: -1 if rank == 1 else 1], ("x",))
    spmd.jit(lambda x: snp.sum(x))(spread((6, 2), P("x"), mesh))  # fault


@fault("left", ranks=2, culprits=[1])
def a_mesh_of_local_devices(rank):
    """Rank 1 builds its mesh of its own devices: it needs nobody, and rank 0 waits."""
    devices = spmd.local_devices() if rank == 1 else spmd.devices()
    x = spread((4, 2), P("x"), Mesh(np.array(devices), ("x",)))
    total = spmd.jit(lambda x: snp.sum(x))(x)  # others
    float(total)


@fault("value", ranks=2, culprits=[1], words=["differ"], environ={"SPMD_DEBUG": "collectives"})
def a_seed_of_each_rank(rank):
    """The table is the same for all ranks by its sharding, and each has made its own."""
    table = np.random.default_rng(rank).normal(size=(4,)).astype(np.float32)
    total = spmd.jit(lambda x, table: snp.sum(x * table))
    total(spread((4, 4)), table)  # fault


@fault("value", ranks=3, culprits=[2], words=["differ"], environ={"SPMD_DEBUG": "collectives"})
def values_placed_as_replicated(rank):
    """`device_put` to all devices of all ranks; rank 2 read another file."""
    value = np.full(3, 2.0 if rank == 2 else 1.0, np.float32)
    spmd.device_put(value, spmd.NamedSharding(mesh_of(), P()))  # fault


# ---- the ranks have other programs -------------------------------------------------------------


@fault("mismatch", ranks=2, culprits=[1], words=[r"0\.1", r"0\.2"])
def a_rate_of_each_rank(rank):
    """The rate is a number of the closure, and rank 1 decays it once more."""
    rate = 0.2 if rank == 1 else 0.1

    def step(w):
        return w - rate * snp.mean(w)  # fault

    spmd.jit(step)(spread((4, 2)))


@fault("mismatch", ranks=3, culprits=[0])
def a_sum_of_rank_0_outside_of_jit(rank):
    """Rank 0 alone looks at the norm of an array over all ranks."""
    step = spmd.jit(lambda x: x - snp.mean(x))  # others
    x = step(spread((6, 2)))
    if rank == 0:
        print("norm", snp.sum(x * x))  # fault
    step(x)


@fault("raised", ranks=2, culprits=[0], words=["ShardingError|addressable"], code=1)
def printing_what_lies_elsewhere(rank):
    """Rank 0 wants the NumPy value of an array of which it has a half."""
    x = spread((4, 2))
    if rank == 0:
        np.asarray(x)  # fault
    spmd.jit(lambda x: snp.sum(x))(x)


@fault("raised", ranks=2, culprits=[1], words=["DeletedError", "state"], code=1)
def a_donated_state_used_again(rank):
    """Rank 1 logs the state that it has given away."""
    update = spmd.jit(lambda state: state - snp.mean(state), donate_argnums=0)
    state = spread((4, 2))
    new = update(state)
    if rank == 1:
        state.addressable_shards[0].data.sum()  # fault
    update(new)


@fault("mismatch", ranks=2, culprits=[1])
def results_laid_out_otherwise(rank):
    """Rank 1 asks for a replicated result, rank 0 for one that is split."""
    out = spmd.NamedSharding(mesh_of(), P() if rank == 1 else P("x"))
    spmd.jit(lambda x: x * 2, out_shardings=out)(spread((4, 2)))  # fault


@fault("mismatch", ranks=2, culprits=[1])
def over_both_axes(rank):
    """Rank 1 sums over x and y, rank 0 over x alone, where y has one device."""
    mesh = mesh_of(2, 1)

    def total(x):
        return lax.psum(x, ("x", "y") if rank == 1 else "x")  # fault

    f = spmd.shard_map(total, mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False)
    f(spread((4, 2), P("x"), mesh))


@fault("stuck", ranks=2, culprits=[1])
def a_callback_that_sleeps_over_a_mesh(rank):
    """In a map over a mesh the callback of rank 1's device hangs."""

    def look(x):
        if spmd.process_index() == 1:
            time.sleep(60)  # fault
        return x

    def step(x):
        y = spmd.pure_callback(look, spmd.ShapeDtypeStruct(x.shape, x.dtype), x)
        return lax.psum(y, "x")

    f = spmd.shard_map(step, mesh=mesh_of(), in_specs=P("x"), out_specs=P(), check_vma=False)
    f(spread((4, 2))).block_until_ready()


@fault("mismatch", ranks=2, culprits=[1])
def a_branch_of_each_rank_over_a_mesh(rank):
    """The predicate is static, a number of each rank's host."""

    def total(p, x):
        return lax.cond(p, snp.sum, snp.max, x)  # fault

    spmd.jit(total, static_argnums=0)(rank == 1, spread((4, 2)))  # fault


@fault("value", ranks=2, culprits=[1], words=["differ"], environ={"SPMD_DEBUG": "collectives"})
def a_predicate_of_each_rank(rank):
    """The predicate is an argument, and no rank has that of the other."""
    f = spmd.jit(lambda p, x: lax.cond(p, snp.sum, snp.max, x))
    float(f(rank == 1, spread((4, 2))))  # fault


def program(text):
    """A module as a rank's host has it."""
    module = types.ModuleType("model")
    code = compile(textwrap.dedent(text), "model.py", "exec")
    exec(code, {**vars(module), "lax": lax}, vars(module))
    return module


@fault("mismatch", ranks=3, culprits=[2], words=[r"model\.py:3", r"model\.py:5"])
def another_version_of_the_file(rank):
    """The host of rank 2 has a newer file: the same sum, some lines further down."""
    new = "\n# with a note\n" if rank == 2 else ""
    model = program(f"{new}\ndef loss(x):\n    return lax.psum(x, 'i')\n")
    spmd.pmap(model.loss, axis_name="i")(np.ones((1, 3), np.float32))


# ---- groups, meetings --------------------------------------------------------------------------


@fault("mismatch", ranks=2, culprits=[0], words=["sync_global_devices|barrier"])
def a_meeting_of_rank_0(rank):
    """Rank 0 waits at a barrier for the checkpoint; rank 1 goes on with the next step."""
    step = spmd.pmap(lambda x: lax.psum(x, "i"), axis_name="i")  # others
    x = step(np.ones((1, 3), np.float32))
    if rank == 0:
        multihost.sync_global_devices("saved")  # fault
    step(x)


@fault("mismatch", ranks=2, culprits=[1], words=["saved", "loaded"])
def two_names_of_a_meeting(rank):
    """The ranks meet, but not for the same reason."""
    multihost.sync_global_devices("loaded" if rank == 1 else "saved")  # fault


@fault("mismatch", ranks=2, culprits=[1], words=[r"\b3\b", r"\b4\b"])
def gathering_other_shapes(rank):
    """Each rank gives as many predictions as it has examples."""
    multihost.process_allgather(np.ones(3 + rank, np.float32))  # fault


@fault("static", ranks=3, culprits=[], words=["devices of all 3"])
def a_mesh_of_two_of_three_ranks(rank):
    """A map over the devices of ranks 0 and 1: rank 2 would not come, and could not know."""
    mesh = Mesh(np.array(spmd.devices())[:2], ("x",))
    total = spmd.shard_map(lambda x: lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
    total(np.ones((2, 2), np.float32))  # fault


@fault("mismatch", ranks=2, culprits=[0], words=["process_allgather"])
def an_allgather_of_rank_0(rank):
    """Rank 0 gathers metrics for its log, while rank 1 goes on."""
    step = spmd.pmap(lambda x: lax.psum(x, "i"), axis_name="i")  # others
    x = step(np.ones((1, 3), np.float32))
    if rank == 0:
        multihost.process_allgather(np.ones(2))  # fault
    step(x)


@fault("mismatch", ranks=2, culprits=[0], words=["broadcast_one_to_all|True on one"])
def two_sources(rank):
    """Both ranks believe to be the source."""
    multihost.broadcast_one_to_all(np.ones(2), is_source=True)  # fault
