"""Meshes, specs and shardings as objects: types of axes, the mesh in scope, equality, pickles."""

from __future__ import annotations

import operator
import pickle
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.base.device import Device, platforms
from spmd.errors import ArgumentError, DeviceError, ShardingError
from spmd.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PmapSharding,
    SingleDeviceSharding,
    get_abstract_mesh,
    get_mesh,
    make_mesh,
    set_mesh,
    use_abstract_mesh,
)
from spmd.sharding import PartitionSpec as P

AUTO, EXPLICIT, MANUAL = AxisType.Auto, AxisType.Explicit, AxisType.Manual


def grid(*owners: Any) -> Mesh:
    """A mesh in which the devices of process 0 are ours, and others are of processes not here."""
    mine = iter(spmd.devices())
    devices = np.empty(np.shape(owners), dtype=object)
    for k, (place, owner) in enumerate(np.ndenumerate(np.array(owners))):
        devices[place] = next(mine) if owner == 0 else Device(100 + k, platforms["cpu"], owner, k)
    return Mesh(devices, ("x", "y")[: devices.ndim])


# ---- axes and their types ----------------------------------------------------------------------


def test_make_mesh_makes_explicit_axes_and_mesh_automatic_ones_unless_told():
    mesh = make_mesh((2, 2), ("x", "y"))
    assert mesh.axis_types == (EXPLICIT, EXPLICIT)
    assert jax.make_mesh((1, 1), ("x", "y")).axis_types == (jax.sharding.AxisType.Explicit,) * 2
    assert str(mesh) == "Mesh('x': 2, 'y': 2, axis_types=(Explicit, Explicit))"
    plain = Mesh(mesh.devices, ("x", "y"))
    assert plain.axis_types == (AUTO, AUTO)
    assert plain == make_mesh((2, 2), ("x", "y"), AUTO)
    assert str(plain) == "Mesh('x': 2, 'y': 2, axis_types=(Auto, Auto))"
    assert [t.name for t in AxisType] == [t.name for t in jax.sharding.AxisType]


def test_types_of_axes_are_a_part_of_a_mesh():
    plain = make_mesh((2, 2), ("x", "y"))
    mixed = make_mesh((2, 2), ("x", "y"), (EXPLICIT, AUTO))
    assert plain != mixed and hash(plain) != hash(mixed)
    assert mixed == plain.update(axis_types=(EXPLICIT, AUTO))
    assert str(mixed) == "Mesh('x': 2, 'y': 2, axis_types=(Explicit, Auto))"
    assert Mesh(spmd.devices(), "x", EXPLICIT).axis_types == (EXPLICIT,)
    assert mixed.abstract_mesh.axis_types == (EXPLICIT, AUTO)
    assert pickle.loads(pickle.dumps(mixed)) == mixed


def test_the_compiler_decides_along_explicit_axes():
    mesh = make_mesh((4,), ("x",), (EXPLICIT,))
    x = spmd.device_put(np.arange(8.0), NamedSharding(mesh, P("x")))
    np.testing.assert_array_equal(spmd.jit(lambda x: x * 2)(x), np.arange(8.0) * 2)


@pytest.mark.parametrize("make", [Mesh, make_mesh, AbstractMesh])
def test_wrong_types_of_axes(make: Callable[..., Any]):
    first = spmd.devices()[:2] if make is Mesh else (2,)
    with pytest.raises(ArgumentError, match=r"axis_types.*must hold members of AxisType.*got 1"):
        make(first, ("x",), (1,))
    with pytest.raises(ShardingError, match=r"2 axis_types \(Auto, Auto\) for 1 axis names"):
        make(first, ("x",), (AUTO, AUTO))


def test_an_abstract_mesh_has_axes_and_no_devices():
    mesh = AbstractMesh((2, 4), ("x", "y"))
    assert (mesh.axis_sizes, mesh.axis_names, mesh.size) == ((2, 4), ("x", "y"), 8)
    assert mesh.shape == {"x": 2, "y": 4} and mesh.shape_tuple == (("x", 2), ("y", 4))
    assert mesh.abstract_mesh is mesh and not mesh.empty
    assert mesh == AbstractMesh([2, 4], ["x", "y"]) and hash(mesh) == hash(mesh.update())
    assert mesh != AbstractMesh((4, 2), ("x", "y")) and mesh != mesh.update(axis_types=EXPLICIT_2)
    assert repr(mesh) == "AbstractMesh('x': 2, 'y': 4, axis_types=(Auto, Auto))"
    assert AbstractMesh((2,), "x", EXPLICIT).axis_types == (EXPLICIT,)
    assert pickle.loads(pickle.dumps(mesh)) == mesh
    assert AbstractMesh((), ()).empty
    for name in ("devices", "device_ids", "local_devices", "local_mesh", "is_multi_process"):
        with pytest.raises(ShardingError, match=f"no {name}: an AbstractMesh has axes and no dev"):
            getattr(mesh, name)
        with pytest.raises(ValueError):
            getattr(jax.sharding.AbstractMesh((2, 4), ("x", "y")), name)


EXPLICIT_2 = (EXPLICIT, EXPLICIT)


def test_wrong_axes_of_an_abstract_mesh():
    with pytest.raises(ShardingError, match=r"2 axis sizes \(2, 3\) for 1 axis names \('x',\)"):
        AbstractMesh((2, 3), ("x",))
    with pytest.raises(ShardingError, match="must be different"):
        AbstractMesh((2, 3), ("x", "x"))


def test_facts_about_a_mesh():
    mesh = make_mesh((2, 2), ("x", "y"))
    assert mesh.abstract_mesh == AbstractMesh((2, 2), ("x", "y"), EXPLICIT)
    assert mesh.device_ids.tolist() == [[0, 1], [2, 3]]
    assert mesh.local_devices == spmd.devices() and not mesh.is_multi_process
    assert mesh.local_mesh == mesh
    assert (mesh.axis_sizes, mesh.size, mesh.empty) == ((2, 2), 4, False)


@pytest.mark.parametrize("axes", [(), ("x",), ("x", "y")])
def test_an_empty_mesh(axes: tuple[str, ...]):
    mesh = Mesh(np.empty((0,) * len(axes), dtype=object), axes)
    assert mesh.empty and mesh.size == 0 and mesh.flat_devices() == []
    assert mesh.local_mesh == mesh and mesh.local_devices == []
    assert pickle.loads(pickle.dumps(mesh)) == mesh


def test_the_local_part_of_a_mesh():
    mesh = grid([0, 0], [1, 1])
    assert mesh.is_multi_process and mesh.local_devices == spmd.devices()[:2]
    assert mesh.local_mesh.device_ids.tolist() == [[0, 1]]
    assert mesh.local_mesh.axis_names == ("x", "y")
    assert grid([1, 0], [2, 0]).local_mesh.shape == {"x": 2, "y": 1}
    for scattered in (grid([0, 1], [1, 0]), grid(0, 1, 0), grid(1, 2)):
        with pytest.raises(ShardingError, match=r"no box in the grid of .*neighbours along each"):
            _ = scattered.local_mesh


def test_a_pickled_mesh_is_of_the_devices_with_its_ids():
    mesh = Mesh(np.array(spmd.devices()[::-1]).reshape(2, 2), ("x", "y"))
    again = pickle.loads(pickle.dumps(mesh))
    assert again == mesh and hash(again) == hash(mesh)
    assert again.devices[0, 0] is spmd.devices()[-1]
    with pytest.raises(DeviceError, match="there is no device 101 here"):
        pickle.loads(pickle.dumps(grid(0, 1)))


# ---- the mesh in scope -------------------------------------------------------------------------


def doubled() -> Any:
    return spmd.shard_map(lambda x: x * 2, in_specs=P("x"), out_specs=P("x"))(np.arange(8.0))


def test_set_mesh_in_a_block():
    mesh, other = make_mesh((4,), ("x",)), make_mesh((2, 2), ("x", "y"))
    with set_mesh(mesh) as nothing:
        assert nothing is None
        assert get_mesh() is mesh and get_abstract_mesh() == mesh.abstract_mesh
        assert doubled().sharding == NamedSharding(mesh, P("x"))
        with set_mesh(other):
            assert get_mesh() is other
            with set_mesh(mesh), set_mesh(None):
                assert get_mesh().empty
            assert get_mesh() is other
        assert get_mesh() is mesh
    assert get_mesh().empty and get_abstract_mesh().empty


def test_a_with_block_of_a_mesh_is_where_specs_look_if_none_is_set():
    mesh, other = make_mesh((4,), ("x",)), make_mesh((2,), ("x",))
    x = np.arange(8.0)
    with other:
        assert get_mesh().empty and get_abstract_mesh().empty
        assert lax.with_sharding_constraint(x, P("x")).sharding.mesh is other
        assert spmd.numpy.ones(3).sharding.num_devices == 1
        with mesh:
            assert doubled().sharding.mesh is mesh
        with set_mesh(mesh):
            assert lax.with_sharding_constraint(x, P("x")).sharding.mesh is mesh
    with set_mesh(mesh), other:
        assert get_mesh() is mesh
        assert lax.with_sharding_constraint(x, P("x")).sharding.mesh is mesh
        assert spmd.numpy.ones(3).sharding.mesh is mesh


def test_set_mesh_as_a_call():
    mesh = make_mesh((4,), ("x",))
    before = get_mesh()
    set_mesh(mesh)
    try:
        assert get_mesh() is mesh
        assert doubled().sharding == NamedSharding(mesh, P("x"))
    finally:
        set_mesh(before)
    assert get_mesh().empty


def test_the_mesh_in_scope_is_left_when_the_block_fails():
    mesh = make_mesh((4,), ("x",))
    with pytest.raises(KeyError), mesh, set_mesh(mesh), set_mesh(None):
        raise KeyError
    assert get_mesh().empty
    with pytest.raises(ShardingError, match="without a mesh"):
        spmd.device_put(np.arange(8.0), P("x"))


def test_each_thread_has_its_own_mesh_in_scope():
    seen = []
    with set_mesh(make_mesh((4,), ("x",))):
        thread = threading.Thread(target=lambda: seen.append(get_mesh().empty))
        thread.start()
        thread.join()
    assert seen == [True]


def test_one_mesh_in_two_threads_at_once():
    mesh, other = make_mesh((4,), ("x",)), make_mesh((2,), ("x",))
    inside, done, seen = threading.Event(), threading.Event(), []

    def run():
        with set_mesh(other), set_mesh(mesh):
            inside.set()
            done.wait(10)
            seen.append(get_mesh() is mesh)
        seen.append(get_mesh().empty)

    thread = threading.Thread(target=run)
    with set_mesh(mesh):
        thread.start()
        inside.wait(10)
    done.set()
    thread.join()
    assert seen == [True, True] and get_mesh().empty


def test_specs_refer_to_the_mesh_in_scope():
    mesh = make_mesh((4,), ("x",))
    with set_mesh(mesh):
        tree = spmd.device_put({"a": np.arange(8.0), "b": np.arange(4)}, {"a": P("x"), "b": P()})
    assert tree["a"].sharding == NamedSharding(mesh, P("x"))
    assert tree["b"].sharding == NamedSharding(mesh, P())
    with pytest.raises(ShardingError, match=r"device_put: x\['a'\].*without a mesh.*set_mesh"):
        spmd.device_put({"a": np.arange(8.0)}, P("x"))
    with set_mesh(mesh), pytest.raises(ShardingError, match=r"x has shape \(6,\).*not a multiple"):
        spmd.device_put(np.arange(6), P("x"))


def test_traced_code_sees_axes_and_no_devices():
    mesh = make_mesh((2, 2), ("x", "y"))
    seen = []

    def look(x):
        seen.append(get_abstract_mesh())
        return x

    with set_mesh(mesh):
        spmd.jit(look)(1.0)
        spmd.shard_map(look, in_specs=P("x"), out_specs=P("x"))(np.arange(4.0))
        spmd.vmap(look, axis_name="y2")(np.arange(4.0))
        for ask in (get_mesh, lambda: set_mesh(mesh)):
            with pytest.raises(ShardingError, match="can only be used outside of jit"):
                spmd.jit(lambda x, ask=ask: ask() and x)(1.0)
    spmd.shard_map(lambda x: look(x), mesh=mesh, in_specs=P("x"), out_specs=P("x"))(np.arange(4.0))
    axes = AbstractMesh((2, 2), ("x", "y"), EXPLICIT)
    manual = axes.update(axis_types=(MANUAL, MANUAL))
    assert seen == [axes, manual, axes, manual]


def test_a_jitted_function_follows_the_mesh_in_scope():
    meshes = make_mesh((4,), ("x",)), make_mesh((2,), ("x",))
    size = spmd.jit(lambda x: x * get_abstract_mesh().size)
    mapped = spmd.jit(lambda x: doubled() + x)
    for _ in range(3):
        for mesh in meshes:
            with set_mesh(mesh):
                assert float(size(1.0)) == mesh.size
                assert mapped(1.0).sharding.device_set == set(mesh.flat_devices())


def test_an_abstract_mesh_in_scope():
    mesh, axes = make_mesh((2, 2), ("x", "y")), AbstractMesh((4, 1), ("x", "y"))
    with use_abstract_mesh(axes) as nothing:
        assert nothing is None and get_abstract_mesh() is axes and get_mesh().empty
        assert float(spmd.jit(lambda x: x * 2)(1.0)) == 2.0
        with pytest.raises(ShardingError, match="is a mesh without devices; pass mesh="):
            doubled()
        with pytest.raises(ShardingError, match="without a mesh"):
            spmd.device_put(np.arange(8.0), P("x"))
    with set_mesh(mesh):
        with use_abstract_mesh(axes):
            assert get_abstract_mesh() is axes and get_mesh() is mesh
            with pytest.raises(ShardingError, match="is a mesh without devices; pass mesh="):
                doubled()
        with use_abstract_mesh(mesh.abstract_mesh):
            assert doubled().sharding.mesh is mesh
        with use_abstract_mesh(AbstractMesh((), ())), pytest.raises(ShardingError, match="no mesh"):
            doubled()
        with pytest.raises(ShardingError, match=r"has 8 devices, and the mesh in scope.*has 4"):
            with use_abstract_mesh(AbstractMesh((8,), ("x",))):
                pass
        assert get_abstract_mesh() == mesh.abstract_mesh
    assert get_abstract_mesh().empty


def test_what_is_no_mesh():
    wrong: Any = 3
    with pytest.raises(ArgumentError, match="mesh must be a Mesh or None, got a int"):
        set_mesh(wrong)
    with pytest.raises(ArgumentError, match="mesh must be an AbstractMesh, got a Mesh"):
        use_abstract_mesh(make_mesh((4,), ("x",)))  # type: ignore[arg-type]
    with pytest.raises(ShardingError, match="has a Manual axis; only shard_map"):
        set_mesh(make_mesh((4,), ("x",), (MANUAL,)))
    assert get_mesh().empty


# ---- specs -------------------------------------------------------------------------------------


# Each means the same in both libraries.
QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "a tuple": lambda P: (P("x") == ("x",), ("x",) == P("x"), P("x") != ("x",)),
    "one axis in a tuple": lambda P: P("x") == P(("x",)) == P(["x"]),
    "no axis in a tuple": lambda P: (P(()) == P(None), P(()) == P()),
    "trailing None": lambda P: P("x", None) == P("x"),
    "a list": lambda P: P(["x", "y"]) == P(("x", "y")),
    "hashes": lambda P: len({P("x"), P(("x",)), P("y"), P("x", unreduced={"y"})}),
    "joined": lambda P: P("x") + P("y") == P("x", "y"),
    "joined with tuples": lambda P: (
        operator.add(("y",), P("x")) == P("y", "x"),
        operator.add(P("x"), ("y",)) == P("x", "y"),
    ),
    "joined sets": lambda P: (
        P("x", unreduced={"y"}) + P(reduced={"z"}) == P("x", unreduced={"y"}, reduced={"z"})
    ),
    "sets": lambda P: (
        P("x", unreduced={"y"}) == P("x", unreduced=frozenset("y")),
        P("x", unreduced={"y"}) == P("x"),
        P("x", unreduced={"y"}) == P("x", reduced={"y"}),
        P("x").unreduced,
        P("x", unreduced={"y"}).unreduced,
        P("x", reduced={"y"}).reduced,
    ),
    "entries": lambda P: (P("x", ("y", "z")).partitions, P("x", None)[1], P("x", None)[:1]),
    "length and search": lambda P: (len(P("x", None)), P("x", "y").index("y"), "x" in P("x")),
    "unconstrained": lambda P: (
        P(P.UNCONSTRAINED) == P(P.UNCONSTRAINED),
        P(P.UNCONSTRAINED) == P(None),
        repr(P.UNCONSTRAINED),
        pickle.loads(pickle.dumps(P.UNCONSTRAINED)) is P.UNCONSTRAINED,
    ),
    "update": lambda P: (
        P("x").update(partitions=("y",)) == P("y"),
        P("x").update(unreduced={"y"}) == P("x", unreduced={"y"}),
        P("x", unreduced={"y"}).update() == P("x", unreduced={"y"}),
    ),
    "pickles": lambda P: [
        pickle.loads(pickle.dumps(spec)) == spec
        for spec in (P(), P("x", ("y", "z")), P(P.UNCONSTRAINED), P("x", unreduced={"y"}))
    ],
}


@pytest.mark.parametrize("ask", QUESTIONS.values(), ids=QUESTIONS)
def test_specs_are_as_in_jax(ask: Callable[[Any], Any]):
    assert ask(P) == ask(jax.P)


WRONG: dict[str, Callable[[Any], Any]] = {
    "a list": lambda P: P("x", unreduced=["y"]),
    "None": lambda P: P("x", reduced={None}),
    "split and unreduced": lambda P: P(("x", "y"), unreduced={"y"}),
    "split and reduced": lambda P: P("x", reduced={"x"}),
    "in both sets": lambda P: P(unreduced={"x"}, reduced={"x"}),
    "sets and a tuple": lambda P: operator.add(P(unreduced={"x"}), ("y",)),
    "a tuple and sets": lambda P: operator.add(("y",), P(unreduced={"x"})),
}


@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
def test_wrong_specs_are_errors_as_in_jax(make: Callable[[Any], Any]):
    for namespace in (P, jax.P):
        with pytest.raises((TypeError, ValueError)):
            make(namespace)


def test_how_specs_are_shown():
    assert repr(P("x", None, ("y", "z"))) == "P('x', None, ('y', 'z'))"
    assert repr(P(P.UNCONSTRAINED)) == "P(UNCONSTRAINED,)"
    assert (
        repr(P("x", unreduced={"b", "a"}, reduced={"c"}))
        == "P('x', unreduced={'a', 'b'}, reduced={'c'})"
    )


# ---- shardings ---------------------------------------------------------------------------------


def test_a_dim_that_is_left_to_the_compiler():
    free = NamedSharding(make_mesh((4,), ("x",)), P(P.UNCONSTRAINED, "x"))
    assert free.spec.axes_of(0) == () and free.spec.all_axes() == ("x",)
    assert free.shard_shape((3, 8)) == (3, 2)
    places: list[Callable[[], Any]] = [
        lambda: spmd.device_put(np.ones((4, 4)), free),
        lambda: spmd.make_array_from_callback((4, 4), free, lambda index: np.ones((4, 1))),
        lambda: spmd.make_array_from_process_local_data(free, np.ones((4, 4))),
        lambda: spmd.make_array_from_single_device_arrays((4, 4), free, []),
    ]
    for place in places:
        with pytest.raises(ShardingError, match=r"leaves dim 0 to the compiler.*Name a mesh axis"):
            place()


def test_layouts_of_terms_of_a_sum_differ_from_others():
    mesh = make_mesh((2, 2), ("x", "y"))
    whole, terms, reduced = (
        NamedSharding(mesh, spec)
        for spec in (P("x"), P("x", unreduced={"y"}), P("x", reduced={"y"}))
    )
    assert whole.layout == reduced.layout != terms.layout
    assert terms.shard_shape((4, 4)) == (2, 4)
    assert not NamedSharding(mesh, P(unreduced={"y"})).is_fully_replicated
    assert NamedSharding(mesh, P(reduced={"y"})).is_fully_replicated
    assert terms.cotangent() == reduced and whole.cotangent() is whole


@pytest.mark.parametrize("wrong", [None, "x", ("x",)], ids=repr)
def test_what_is_no_spec(wrong: Any):
    with pytest.raises(ArgumentError, match="spec must be a PartitionSpec, got"):
        NamedSharding(make_mesh((4,), ("x",)), wrong)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises((TypeError, AttributeError)):
        jax.NamedSharding(mesh, wrong)


def test_facts_about_shardings():
    mesh = grid([0, 0], [1, 1])
    sharding = NamedSharding(mesh, P("x"))
    assert sharding.num_devices == 4
    assert sharding.addressable_devices == set(spmd.devices()[:2])
    assert sharding.memory_kind == "device"
    assert sharding.update(spec=P("y")) == NamedSharding(mesh, P("y"))
    assert sharding.update(spec=("y", None)) == NamedSharding(mesh, P("y", None))
    other = make_mesh((2,), ("x",))
    assert sharding.update(mesh=other) == NamedSharding(other, P("x"))
    on_one = SingleDeviceSharding(spmd.devices()[1])
    assert on_one.num_devices == 1 and on_one.addressable_devices == {spmd.devices()[1]}
    here = NamedSharding(other, P("x"))
    assert pickle.loads(pickle.dumps(here)) == here


def test_a_sharding_of_an_abstract_mesh():
    sharding = NamedSharding(AbstractMesh((4, 2), ("x", "y")), P("x"))
    assert sharding.shard_shape((8, 3)) == (2, 3) and sharding.num_devices == 8
    assert not sharding.is_fully_replicated
    assert sharding.is_equivalent_to(NamedSharding(AbstractMesh((4, 2), ("a", "b")), P("a")), 1)
    assert sharding != NamedSharding(make_mesh((4,), ("x",)), P("x"))
    needs_devices: list[Callable[[], Any]] = [
        lambda: sharding.device_set,
        lambda: sharding.is_fully_addressable,
        lambda: sharding.devices_indices_map((8,)),
        lambda: spmd.device_put(np.arange(8), sharding),
    ]
    for ask in needs_devices:
        with pytest.raises(ShardingError, match="an AbstractMesh has axes and no devices"):
            ask()


def shardings(sharding: Any, devices: list[Any], spec: Any, mesh: Any) -> list[Any]:
    """The same shardings in either library."""
    square = mesh(np.array(devices).reshape(2, 2), ("x", "y"))
    row = mesh(np.array(devices), ("a",))
    swapped = mesh(np.array(devices).reshape(2, 2).T, ("y", "x"))
    specs = [spec(), spec("x"), spec(("x", "y")), spec(("y", "x")), spec("x", "y"), spec(None, "x")]
    return [
        *(sharding(square, s) for s in specs),
        *(sharding(swapped, s) for s in specs),
        *(sharding(row, s) for s in (spec(), spec("a"), spec(None, "a"), spec(None))),
        *(sharding(mesh(np.array(devices[::-1]), ("a",)), s) for s in (spec(), spec("a"))),
        sharding(mesh(np.array(devices[:1]), ("a",)), spec("a")),
    ]


def test_equivalent_shardings_are_those_of_jax():
    ours = shardings(NamedSharding, spmd.devices(), P, Mesh)
    ours.append(SingleDeviceSharding(spmd.devices()[0]))
    theirs = shardings(jax.NamedSharding, jax.devices()[:4], jax.P, jax.sharding.Mesh)
    theirs.append(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    for a, first in zip(ours, theirs, strict=True):
        for b, second in zip(ours, theirs, strict=True):
            assert a.is_equivalent_to(b, 2) == first.is_equivalent_to(second, 2), (a, b)


def test_equivalence_of_the_shardings_of_pmap():
    row = make_mesh((4,), ("x",))
    rows = PmapSharding(spmd.devices())
    assert rows.is_equivalent_to(NamedSharding(row, P("x")), 2)
    assert not rows.is_equivalent_to(NamedSharding(row, P(None, "x")), 2)
    assert PmapSharding(spmd.devices(), None).is_equivalent_to(NamedSharding(row, P()), 2)
    with pytest.raises(ShardingError, match="2 entries; it may have at most one for each dim"):
        rows.is_equivalent_to(NamedSharding(row, P(None, "x")), 1)


def test_all_shards_of_an_array():
    value = np.arange(8.0, dtype=np.float32)
    x = spmd.device_put(value, NamedSharding(make_mesh((2, 2), ("x", "y")), P("x")))
    assert [s.replica_id for s in x.global_shards] == [0, 1, 0, 1]
    assert [s.device for s in x.global_shards] == [s.device for s in x.addressable_shards]
    part = spmd.make_array_from_process_local_data(NamedSharding(grid(1, 0), P("x")), value, (8,))
    there, here = part.global_shards
    assert there.data is None and there.index == (slice(0, 4),)
    np.testing.assert_array_equal(here.data, value[4:])
    assert part.addressable_shards[0].device == here.device and len(part.addressable_shards) == 1
    assert spmd.numpy.ones(2).global_shards[0].replica_id == 0


def test_gathering_under_the_mesh_in_scope():
    with spmd.set_mesh(make_mesh((4,), ("x",))):
        total = spmd.shard_map(lambda x: lax.psum(x.sum(), "x"), in_specs=P("x"), out_specs=P())
        assert float(total(np.arange(8.0))) == 28.0


def test_an_operation_on_a_device_stays_there_in_the_scope_of_its_mesh():
    device = spmd.devices()[1]
    x = spmd.device_put(np.arange(4.0), device)
    with spmd.set_mesh(spmd.Mesh(np.array([device]), ("x",))):
        assert spmd.lax.slice_in_dim(x, 0, 2).device is device
        assert isinstance(spmd.numpy.zeros(3).sharding, spmd.NamedSharding)
