"""What devices do alike is done once: the same bits, one buffer, and kernels that run on one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import P, lax
from spmd.base.config import config
from spmd.compile.executable import mesh_executable
from spmd.compile.executable.mesh_executable import MeshExecutable
from spmd.compile.lower.mesh_layout import Topology
from spmd.compile.lower.steps import Exchange, Once
from spmd.compile.native.program.steps import walk
from spmd.compile.schedule import share_work
from spmd.debug import program as debug_program
from spmd.debug import timing
from tests.partition.programs import auto_mesh, draw
from tests.partition.test_random_programs import placed

N = 128
RNG = np.random.default_rng(0)
A = RNG.normal(size=(N, N)).astype(np.float32) / 8
X = RNG.normal(size=(4 * N, N)).astype(np.float32)


@pytest.fixture
def compiled_with(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """`compiled_with(seconds)`: new programs share work from so many seconds on, without a disk."""
    folder = config.cache_dir
    config.update("cache_dir", "")

    def choose(seconds: float) -> None:
        monkeypatch.setattr(share_work, "LEAST_SECONDS", seconds)
        mesh_executable.programs_by_map.clear()
        spmd.clear_caches()

    yield choose
    config.update("cache_dir", folder)
    mesh_executable.programs_by_map.clear()
    spmd.clear_caches()


ALL, NOTHING = 0.0, float("inf")


def bits(f: Callable[..., Any], *args: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in spmd.tree.leaves(f(*args))]


def core_of(f: Any, *args: Any) -> MeshExecutable:
    made = debug_program.compile_call(f, args, {}).core
    assert isinstance(made, MeshExecutable)
    return made


# ---- the same bits -------------------------------------------------------------------------------


def loss_of(program: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: sum(snp.cos(x).sum() / x.size for x in program(*args))


@pytest.mark.parametrize("seed", range(300, 330))
def test_random_programs_have_the_bits_of_work_done_by_each_device(seed: int, compiled_with: Any):
    program, arguments = draw(seed)
    over_mesh = placed(seed, arguments)
    functions = program, spmd.grad(loss_of(program), (0, 1, 2))
    found = []
    for seconds in (NOTHING, ALL):
        compiled_with(seconds)
        found.append([bits(spmd.jit(f), *over_mesh) for f in functions])
    assert found[0] == found[1]


def by_a_shared_test(a: Any, x: Any) -> Any:
    """Loops and branches that all devices take alike, around work that they do not."""

    def body(state: Any) -> Any:
        k, a, x = state
        a = lax.cond(a.sum() > 0, lambda a: a @ a * 0.5, lambda a: snp.tanh(a), a)
        return k + 1, a, snp.tanh(x @ a) + lax.psum(x.sum(), "x") * 1e-3

    return lax.while_loop(lambda s: (s[0] < 5) & (abs(s[1]).max() > 1e-6), body, (0, a, x))[1:]


def by_a_test_of_each_device(a: Any, x: Any) -> Any:
    """Devices leave the loop at different times: what they carry is not alike."""
    limit = lax.axis_index("x") + 2
    a = lax.pcast(a, "x", to="varying")
    _, b = lax.while_loop(
        lambda s: s[0] < limit, lambda s: (s[0] + 1, s[1] @ a), (lax.axis_index("x") * 0, a)
    )
    chosen = lax.cond(lax.axis_index("x") % 2 == 0, lambda a: a @ a, lambda a: a * 3, a)
    return lax.psum(b + chosen, "x"), x @ b


def by_layers(a: Any, x: Any) -> Any:
    """Weights that are split, gathered in each round, and updated alike."""
    rows = lax.dynamic_slice_in_dim(a, lax.axis_index("x") * (N // 4), N // 4, 0)

    def layer(x: Any, k: Any) -> Any:
        whole = lax.all_gather(rows * k, "x", tiled=True)
        return snp.tanh(x @ whole), lax.psum(x.sum(), "x") + whole.sum()

    x, sums = lax.scan(layer, x, snp.arange(1, 4, dtype=np.float32))
    return lax.psum(x.T @ x, "x") + a, x + sums.sum()


def exchanged(a: Any, x: Any) -> Any:
    """Exchanges of values that devices have alike, and in groups."""
    turned = lax.ppermute(lax.pcast(a, "x", to="varying"), "x", [(0, 1), (1, 2), (2, 3)])
    part = lax.psum_scatter(lax.pcast(a @ a, "x", to="varying"), "x", tiled=True)
    largest = lax.pmax(x @ a, "x")
    return lax.psum(turned, "x") + largest[:N], x[: N // 4] * 2 + part


MAPS = [by_a_shared_test, by_a_test_of_each_device, by_layers, exchanged]


@pytest.mark.parametrize("f", MAPS, ids=lambda f: f.__name__)
def test_maps_have_the_bits_of_work_done_by_each_device(f: Any, compiled_with: Any):
    mesh = auto_mesh((4,), ("x",))
    mapped = spmd.shard_map(f, mesh=mesh, in_specs=(P(), P("x")), out_specs=(P(), P("x")))
    found = []
    for seconds in (NOTHING, ALL):
        compiled_with(seconds)
        found.append(bits(spmd.jit(mapped), A, X))
    assert found[0] == found[1]
    with spmd.disable_jit():
        expected = mapped(A, X)
    for one, other in zip(spmd.jit(mapped)(A, X), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


def test_a_value_that_differs_along_one_axis_is_made_once_for_each_of_its_positions():
    mesh = auto_mesh((2, 2), ("x", "y"))
    w = spmd.device_put(A, spmd.NamedSharding(mesh, P("x")))
    f = spmd.jit(lambda w: snp.sort(snp.tanh(w @ w.T), 1))
    core = core_of(f, w)
    once = [step for step in core.schedule.steps if isinstance(step, Once)]
    assert once and all(step.devices == (0, 2) for step in once)
    found = f(w)
    assert len({shard.data.ptr for shard in found.addressable_shards}) == 2
    np.testing.assert_allclose(found, np.sort(np.tanh(A @ A.T), 1), rtol=1e-4, atol=1e-5)


# ---- how often -----------------------------------------------------------------------------------


def runs_by_device(f: Any, *args: Any) -> list[int]:
    """How many steps each device runs in a call, counted by a twin that stamps each of them."""
    program = debug_program.compile_call(f, args, {})
    twin, builder, records = timing.watched_twin(program)
    timing.run_once(twin, program.traced.split.leaves)
    count = len(builder.infos)
    return [int(r[1:].reshape(-1)[: 2 * (1 + count)].reshape(-1, 2)[1:, 1].sum()) for r in records]


def test_replicated_work_runs_on_one_device_into_one_buffer():
    whole = spmd.device_put(A, spmd.NamedSharding(auto_mesh((4,), ("x",)), P()))
    f = spmd.jit(lambda a: snp.sort(a @ a @ a, 0))
    first, *others = runs_by_device(f, whole)
    assert first >= 3
    assert others == [1, 1, 1]  # the step around, which they pass
    out = f(whole)
    assert len({shard.data.ptr for shard in out.addressable_shards}) == 1
    np.testing.assert_allclose(out, np.sort(A @ A @ A, 0), rtol=1e-4, atol=1e-5)


def test_a_gather_writes_one_buffer():
    mesh = auto_mesh((4,), ("x",))
    split = spmd.device_put(A, spmd.NamedSharding(mesh, P("x")))
    f = spmd.jit(lambda a: lax.with_sharding_constraint(a, spmd.NamedSharding(mesh, P())) * 1)
    gathers = [s for s in walk(core_of(f, split).schedule.steps) if isinstance(s, Exchange)]
    assert [(s.kind, s.is_one) for s in gathers] == [("all_gather", True)]
    out = f(split)
    assert len({shard.data.ptr for shard in out.addressable_shards}) == 1
    np.testing.assert_array_equal(out, A)


def test_a_callback_without_effects_is_called_once():
    calls = []

    def double(a: Any) -> Any:
        calls.append(1)
        return np.asarray(a) * 2

    def f(a: Any) -> Any:
        return spmd.pure_callback(double, spmd.ShapeDtypeStruct(a.shape, a.dtype), a)

    mesh = auto_mesh((4,), ("x",))
    mapped = spmd.jit(spmd.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P()))
    np.testing.assert_array_equal(mapped(A), A * 2)
    assert len(calls) == 1


def test_maps_without_types_and_small_steps_stay_with_each_device():
    mesh = auto_mesh((4,), ("x",))

    def f(a: Any) -> Any:
        return a @ a

    untyped = spmd.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    assert "once" not in str(core_of(untyped, A).schedule)
    whole = spmd.NamedSharding(mesh, P())
    assert "once" not in str(core_of(f, spmd.device_put(A[:4, :4], whole)).schedule)
    assert "once" in str(core_of(f, spmd.device_put(A, whole)).schedule)


# ---- memory --------------------------------------------------------------------------------------


def test_a_donated_array_that_devices_share_is_written_over():
    whole = spmd.NamedSharding(auto_mesh((4,), ("x",)), P())
    f = spmd.jit(lambda a: a * 0.5 + 1, donate_argnums=0)
    x = f(spmd.device_put(np.tile(A, (16, 1)), whole))
    for _ in range(4):  # the general path, then the fast one
        before = {shard.data.ptr for shard in x.addressable_shards}
        x = f(x)
        assert {shard.data.ptr for shard in x.addressable_shards} == before
    view = np.asarray(x.addressable_shards[2].data)
    value = view.copy()
    f(x)  # NumPy reads what one of its shards held: that stays as it is
    np.testing.assert_array_equal(view, value)


def test_devices_that_are_home_to_nothing_have_smaller_arenas(compiled_with: Any):
    whole = spmd.device_put(A, spmd.NamedSharding(auto_mesh((4,), ("x",)), P()))
    f = spmd.jit(lambda a: snp.sort(snp.sort(a @ a, 0) @ a, 1))
    compiled_with(NOTHING)
    (each,) = set(core_of(f, whole).frames.arenas)
    compiled_with(ALL)
    first, *others = core_of(f, whole).frames.arenas
    assert (first, set(others)) == (each, {0})


# ---- what is alike -------------------------------------------------------------------------------


def test_classes_follow_from_axes():
    mesh = Topology({"x": 2, "y": 3}, (0,) * 6, 0)
    assert share_work.classes_along(mesh, ()) == (0,) * 6
    assert share_work.classes_along(mesh, ("x",)) == (0, 0, 0, 3, 3, 3)
    assert share_work.classes_along(mesh, ("y",)) == (0, 1, 2, 0, 1, 2)
    assert share_work.classes_along(mesh, ("y", "x")) == tuple(range(6))


def test_stored_programs_know_what_devices_share(run_python: Any, tmp_path: Any):
    env = {"SPMD_NUM_CPU_DEVICES": "4", "SPMD_CACHE_DIR": str(tmp_path), "SPMD_CHECK": "0"}
    first, second = (run_python(["-c", STORED], env=env) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert second.stdout == first.stdout.replace("loaded False", "loaded True")
    assert "loaded False" in first.stdout and "buffers 1 2" in first.stdout


STORED = """
import sys
import numpy as np, spmd, spmd.numpy as snp
mesh = spmd.make_mesh((2, 2), ("x", "y"), spmd.sharding.AxisType.Auto)
put = lambda x, *spec: spmd.device_put(x, spmd.NamedSharding(mesh, spmd.P(*spec)))
a = np.random.default_rng(0).normal(size=(256, 256)).astype("f")
f = spmd.jit(lambda a, b: (snp.sort(a @ a, 0), snp.sort(b, 1) * 2))
outs = f(put(a), put(a, "x"))
for one, other in zip(outs, (np.sort(a @ a, 0), np.sort(a, 1) * 2)):
    np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)
print("buffers", *(len({s.data.ptr for s in out.addressable_shards}) for out in outs))
print("loaded", "spmd.compile.lower.lowering" not in sys.modules)
"""
