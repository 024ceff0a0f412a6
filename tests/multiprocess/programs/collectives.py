"""Run the table of collectives over all ranks' devices; vmap on this rank alone says what is right.

mpirun -n 2 python -m tests.multiprocess.programs.collectives [dtype ...]
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.sharding import PartitionSpec as P
from tests.collectives.compare import assert_close, assert_same
from tests.collectives.programs import example, random_program
from tests.collectives.table import cases_for

N = spmd.device_count()
HERE = spmd.local_device_count()
MINE = slice(spmd.process_index() * HERE, (spmd.process_index() + 1) * HERE)


def main(dtypes: list[str]) -> None:
    count = check_table(dtypes)
    check_gradients()
    check_random_programs()
    check_op_by_op()
    check_shard_map()
    check_work_around_maps()
    if spmd.process_index() == 0:
        ranks = spmd.process_count()
        print(f"{count} cases on {ranks} ranks x {HERE} devices: all right", flush=True)


def mine(tree: Any) -> Any:
    """This process's rows of what all devices give."""
    return spmd.tree.map(lambda x: np.asarray(x)[MINE], tree)


def check_table(dtypes: list[str]) -> int:
    cases = [(c, d) for c, d in cases_for(N) if not dtypes or d in dtypes]
    for case, dtype in cases:
        x = case.example(N, dtype)

        def f(x: Any, body: Any = case.body) -> Any:
            return body(lax, x, N)

        found = spmd.pmap(f, axis_name="i")(x[MINE])
        assert_close(found, mine(spmd.vmap(f, axis_name="i")(x)), f"{case} {dtype}")
        assert_same(spmd.pmap(f, axis_name="i")(x[MINE]), found, f"{case} {dtype} again")
    return len(cases)


def check_gradients() -> None:
    """Inside the map: a data-parallel step; the batch differs by device, the weights do not."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(5, 3)).astype(np.float32)
    x = rng.normal(size=(N, 7, 5)).astype(np.float32)

    def step(w: Any, x: Any) -> Any:
        loss, gradient = spmd.value_and_grad(lambda w: snp.mean(snp.tanh(x @ w) ** 2))(w)
        return lax.pmean(loss, "i"), w - 0.1 * lax.pmean(gradient, "i")

    expected = spmd.vmap(step, axis_name="i", in_axes=(None, 0))(w, x)
    mapped = spmd.pmap(step, axis_name="i", in_axes=(None, 0))
    assert_close(mapped(w, x[MINE]), mine(expected), "step")
    # The same weights on every device, as one array of all processes.
    shared = spmd.pmap(step, axis_name="i", in_axes=(None, 0), out_axes=None)
    loss, new = shared(w, x[MINE])
    assert new.shape == w.shape and loss.shape == ()
    assert_close(new, np.asarray(expected[1])[0], "shared")
    assert_close(shared(new, x[MINE])[0], np.asarray(mapped(new, x[MINE])[0])[0], "again")


def check_random_programs() -> None:
    for seed in range(4):
        f, x = random_program(seed, N), example(seed, N)
        expected = mine(spmd.vmap(f, axis_name="i")(x))
        assert_close(spmd.pmap(f, axis_name="i")(x[MINE]), expected, f"seed {seed}", 100)


def check_op_by_op() -> None:
    """`disable_jit` over processes: each prints its own devices; values agree."""
    seen = []

    def f(x: Any) -> Any:
        seen.append(str(x))
        total = lax.psum(x, "i")
        if total > 0:  # the same on all devices, so Python may branch
            x = x + lax.axis_index("i")
        return x * total

    x = np.arange(1.0, N + 1, dtype=np.float32)
    with spmd.disable_jit():
        found = spmd.pmap(f, axis_name="i")(x[MINE])
    total = x.sum()
    assert_close(found, ((x + np.arange(N)) * total)[MINE].astype(np.float32), "op by op")
    first = MINE.start
    assert f"cpu:{first} (i={first}): {first + 1}." in seen[0], seen[0]


def check_shard_map() -> None:
    """Global arrays: each process has its pieces, and says so."""
    mesh = spmd.make_mesh((N,), ("i",))
    x = np.arange(4.0 * N, dtype=np.float32)
    placed = spmd.device_put(x, spmd.sharding.NamedSharding(mesh, P("i")))
    assert len(placed.addressable_shards) == HERE
    assert not placed.is_fully_addressable
    assert "here: " in repr(placed)
    centre = spmd.shard_map(
        lambda x: (x - lax.pmean(x.mean(), "i"), lax.psum(x.sum(), "i")),
        mesh=mesh,
        in_specs=P("i"),
        out_specs=(P("i"), P()),
    )
    for argument in (x, placed):
        centred, total = centre(argument)
        assert float(total) == x.sum()
        for shard in centred.addressable_shards:
            assert_close(shard.data, (x - x.mean())[shard.index])
    with spmd.disable_jit():
        assert float(centre(placed)[1]) == x.sum()
    try:
        np.asarray(placed)
    except spmd.errors.ShardingError as error:
        assert "other processes" in str(error)
    else:
        raise AssertionError("the whole value is not here")


def check_work_around_maps() -> None:
    """A jitted step with an update around its map: one program over all processes."""
    mesh = spmd.make_mesh((N,), ("i",), spmd.sharding.AxisType.Auto)
    rng = np.random.default_rng(0)
    w = rng.normal(size=(5, 3)).astype(np.float32)
    x = rng.normal(size=(N * 2, 5)).astype(np.float32)

    def loss(w: Any, x: Any) -> Any:
        return snp.mean(snp.tanh(x @ w) ** 2)

    def errors(w: Any, x: Any) -> Any:
        gradient = spmd.grad(lambda w: lax.pmean(loss(w, x), "i"))(w)
        return gradient, snp.sum(snp.tanh(x @ w) ** 2, 1)

    in_specs, out_specs = (P(), P("i")), (P(), P("i"))
    mapped = spmd.shard_map(errors, mesh=mesh, in_specs=in_specs, out_specs=out_specs)

    def step(w: Any, x: Any) -> Any:
        gradient, each = mapped(w * 1.0, x)
        return w - 0.1 * gradient, snp.sort(each), each

    def steps(w: Any, xs: Any) -> Any:
        return lax.scan(lambda w, x: step(w, x)[:2], w, xs)

    placed = spmd.device_put(x, spmd.sharding.NamedSharding(mesh, P("i")))
    each = np.sum(np.tanh(x @ w) ** 2, 1)
    updated = w - 0.1 * np.asarray(spmd.grad(loss)(w, x))
    for argument in (x, placed):
        new, ordered, pieces = spmd.jit(step)(w, argument)
        assert_close(new, updated, "an update around a map")
        assert_close(ordered, np.sort(each), "pieces gathered for what is around")
        for shard in pieces.addressable_shards:
            assert_close(shard.data, each[shard.index])
    last, _ = spmd.jit(steps)(w, np.stack([x, x]))
    again = updated - 0.1 * np.asarray(spmd.grad(loss)(updated, x))
    assert_close(last, again, "steps in a loop")


if __name__ == "__main__":
    main(sys.argv[1:])
