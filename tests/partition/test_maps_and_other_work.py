"""jit of maps and other work: one program of the mesh, with the values of its parts."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.compile.executable.executable import Executable
from spmd.compile.executable.mesh_program import MeshProgram
from spmd.compile.executable.select import compile_program
from spmd.sharding import Mesh, NamedSharding
from spmd.sharding import PartitionSpec as P
from tests.partition.programs import auto_mesh

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32)
W = np.random.default_rng(2).normal(size=(4, 3)).astype(np.float32)


def line() -> Mesh:
    return auto_mesh((4,), ("data",))


def grid() -> Mesh:
    return auto_mesh((2, 2), ("data", "model"))


def on(mesh: Mesh, in_specs: Any, out_specs: Any) -> Any:
    return partial(spmd.shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def loss(w: Any, x: Any, y: Any) -> Any:
    return snp.mean((x @ w - y) ** 2)


@on(line(), (P(), P("data"), P("data")), P())
def gradient(w: Any, x: Any, y: Any) -> Any:
    return spmd.grad(lambda w: lax.pmean(loss(w, x, y), "data"))(w)


@on(line(), (P(), P("data"), P("data")), P("data"))
def errors(w: Any, x: Any, y: Any) -> Any:
    """One number for each example."""
    return ((x @ w - y) ** 2).sum(1)


@on(line(), P(None, "data"), P(None, "data"))
def columns(x: Any) -> Any:
    return x + lax.axis_index("data")


@on(grid(), (P("data", "model"), P("model")), P("data"))
def split_over_the_sum(x: Any, w: Any) -> Any:
    return lax.psum(x @ w, "model")


@on(grid(), P(("data", "model")), P(("data", "model")))
def over_both(x: Any) -> Any:
    return x * (1 + lax.axis_index(("data", "model")))


# ---- programs ----------------------------------------------------------------------------------


def step(w: Any, x: Any, y: Any) -> Any:
    g = gradient(w, x, y)
    return w - 0.1 * g, snp.sum(g * g)


def update_before_and_after(w: Any, x: Any, y: Any) -> Any:
    scale = snp.sqrt(snp.sum(w * w))
    return gradient(w / scale, x, y) * scale + w, scale


def mean_of_shards(w: Any, x: Any, y: Any) -> Any:
    """The whole of what a map gave in shards."""
    each = errors(w, x, y)
    return snp.mean(each), each, each - snp.sort(each)


def whole_and_cut(w: Any, x: Any, y: Any) -> Any:
    """An argument that the work around reads too, and one map's shards for another, cut anew."""
    return columns(errors(w, x, y).reshape(2, 4)) + snp.sum(x), x - snp.mean(x)


def gradient_of_a_map(w: Any, x: Any, y: Any) -> Any:
    return spmd.value_and_grad(lambda w: snp.mean(errors(w, x, y)))(w)


def loop(w: Any, x: Any, y: Any) -> Any:
    """Steps over batches, whose examples are shards; the weights are whole."""

    def body(w: Any, batch: Any) -> Any:
        x, y = batch
        g = gradient(w, x, y)
        return w - 0.1 * g, snp.sqrt((g * g).sum())

    return lax.scan(body, w, (snp.stack([x, x + 1]), snp.stack([y, 2 * y])))


def while_and_cond(w: Any, x: Any, y: Any) -> Any:
    def body(state: Any) -> Any:
        k, w = state
        less = lax.cond(k % 2 == 0, lambda w: gradient(w, x, y), lambda w: w * 0.1, w)
        return k + 1, w - less

    return lax.while_loop(lambda s: s[0] < 5, body, (0, w))


def captured(w: Any, x: Any, y: Any) -> Any:
    return gradient(w, X, Y) + W + gradient(w, x, y)


def two_dims(w: Any, x: Any, y: Any) -> Any:
    return split_over_the_sum(x, w) - over_both(y) + 1.0


def passed_through(w: Any, x: Any, y: Any) -> Any:
    return x, errors(w, x, y), w, 3.0


def nested_calls(w: Any, x: Any, y: Any) -> Any:
    return spmd.jit(step)(spmd.jit(lambda w: w * 2)(w), x, y)


PROGRAMS = [
    step,
    update_before_and_after,
    mean_of_shards,
    whole_and_cut,
    gradient_of_a_map,
    loop,
    while_and_cond,
    captured,
    two_dims,
    passed_through,
    nested_calls,
]


def program(f: Any, *args: Any) -> Executable | MeshProgram:
    return compile_program(spmd.make_jaxpr(f)(*args))


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_merged_maps_agree_with_single_operations(f):
    assert isinstance(program(f, W, X, Y), MeshProgram)
    with spmd.disable_jit():
        expected = f(W, X, Y)
    shards = spmd.device_put(X, NamedSharding(line(), P("data")))
    for x in (X, snp.asarray(X), shards):
        found = spmd.jit(f)(W, x, Y)
        for a, b in zip(spmd.tree.leaves(found), spmd.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_results_are_on_the_mesh():
    """Whole on every device, or in the shards that a map gave; as arguments they stay there."""
    f = spmd.jit(lambda w, x, y: (*step(w, x, y), errors(w, x, y)))
    w, norm, each = f(W, X, Y)
    assert w.sharding == norm.sharding == NamedSharding(line(), P())
    assert each.sharding == NamedSharding(line(), P("data"))
    again, *_ = f(w, X, Y)
    with spmd.disable_jit():
        expected = step(step(W, X, Y)[0], X, Y)[0]
    np.testing.assert_allclose(again, expected, rtol=1e-5, atol=1e-5)


def test_arguments_that_only_maps_read_are_never_whole():
    """Arguments that only maps read are cut as they want them, in loops too."""
    made = program(step, W, X, Y)
    assert made.params["in_specs"] == (P(), P("data"), P("data"))
    batches = np.stack([X, X]), np.stack([Y, Y])

    def steps(w: Any, xs: Any, ys: Any) -> Any:
        return lax.scan(lambda w, b: step(w, *b), w, (xs, ys))

    made = program(steps, W, *batches)
    assert made.params["in_specs"] == (P(), P(None, "data"), P(None, "data"))
    with spmd.disable_jit():
        expected = steps(W, *batches)
    for a, b in zip(spmd.jit(steps)(W, *batches), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_donated_weights_are_written_over():
    f = spmd.jit(step, donate_argnums=0)
    w, _ = f(W, X, Y)
    places = [shard.data.ptr for shard in w.addressable_shards]
    assert len(set(places)) == 4
    new, _ = f(w, X, Y)
    assert w.is_deleted()
    assert [shard.data.ptr for shard in new.addressable_shards] == places


def test_merged_maps_are_batched_and_differentiated_from_outside():
    ws = np.stack([W, W + 1])
    found = spmd.jit(spmd.vmap(lambda w: step(w, X, Y)[1]))(ws)
    np.testing.assert_allclose(found, [step(w, X, Y)[1] for w in ws], rtol=1e-5)
    second = spmd.jit(spmd.grad(lambda w: step(w, X, Y)[1]))(W)
    with spmd.disable_jit():
        np.testing.assert_allclose(second, spmd.grad(lambda w: step(w, X, Y)[1])(W), rtol=1e-4)


# ---- what stays apart ----------------------------------------------------------------------------


def test_effects_around_maps_happen_once(capfd):
    def f(w: Any) -> Any:
        g = gradient(w, X, Y)
        spmd.debug.print("norm {}", snp.sum(g * g) * 0 + 7)
        return g

    assert isinstance(program(f, W), MeshProgram)
    np.testing.assert_allclose(spmd.jit(f)(W), gradient(W, X, Y), rtol=1e-5)
    spmd.effects_barrier()
    assert capfd.readouterr().out.count("norm 7.0") == 1


def test_maps_over_different_meshes_stay_apart():
    def f(w: Any, x: Any) -> Any:
        return columns(split_over_the_sum(x, w).reshape(6, 4)) * 2

    assert isinstance(program(f, W, X), Executable)
    with spmd.disable_jit():
        expected = f(W, X)
    np.testing.assert_allclose(spmd.jit(f)(W, X), expected, rtol=1e-5)


def test_a_pmap_inside_is_a_map_of_the_same_program():
    def f(x: Any) -> Any:
        return spmd.pmap(lambda x: lax.psum(x, "i"), axis_name="i")(x) + 1

    assert isinstance(program(f, X[:4]), MeshProgram)
    np.testing.assert_allclose(spmd.jit(f)(X[:4]), np.tile(X[:4].sum(0), (4, 1)) + 1, rtol=1e-5)


# ---- loops in maps along some axes --------------------------------------------------------------


def test_loops_may_end_at_other_times_along_the_axes_of_a_map():
    """The sums along the compiler's axis are reached by all devices that have the same rows."""
    mesh = grid()

    @partial(
        spmd.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    def turns(rows: Any) -> Any:
        last = lax.axis_index("data")

        def step(state: Any) -> Any:
            k, rows = state
            return k + 1, rows - rows.sum(1, keepdims=True) / 3

        start = lax.pcast(np.int32(0), "data", to="varying")
        return lax.while_loop(lambda state: state[0] <= last, step, (start, rows))[1]

    x = spmd.device_put(X, NamedSharding(mesh, P("data", "model")))
    expected = []
    for count, rows in enumerate(np.split(X, 2)):
        for _ in range(count + 1):
            rows = rows - rows.sum(1, keepdims=True) / 3
        expected.append(rows)

    def f(x: Any) -> Any:
        return turns(x * 1) + 0

    (move,) = spmd.debug.collectives(f)(x)
    assert (move.kind, move.axes) == ("all_reduce", ("model",))
    np.testing.assert_allclose(spmd.jit(f)(x), np.concatenate(expected), rtol=1e-4, atol=1e-5)
