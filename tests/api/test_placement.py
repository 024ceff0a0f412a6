"""Arrays are where their sharding says, or there is an error: placing, joining parts, meeting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.base.device import Device, platforms
from spmd.errors import ArgumentError, DeviceError, ShapeError, ShardingError
from spmd.sharding import Mesh, NamedSharding
from spmd.sharding import PartitionSpec as P

X = np.arange(16, dtype=np.float32).reshape(4, 4)


def line(*numbers: int, name: str = "i") -> Mesh:
    return Mesh(np.array([spmd.devices()[k] for k in numbers], dtype=object), (name,))


def rows(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P("i"))


def test_what_no_device_can_hold_is_an_error_about_the_value():
    with pytest.raises(ArgumentError, match=r"argument x is 'a' of type str.*keep other values"):
        spmd.device_put("a")


# ---- parts of processes ------------------------------------------------------------------------


class OfSeveral:
    """Devices of several processes, of which this is the first: what a rank computes with."""

    def __init__(self, owners: list[list[int]]):
        grid = np.empty(np.shape(owners), dtype=object)
        mine = iter(spmd.devices())
        for k, (place, owner) in enumerate(np.ndenumerate(np.array(owners))):
            grid[place] = next(mine) if owner == 0 else Device(100 + k, platforms["cpu"], owner, k)
        self.mesh = Mesh(grid, ("a", "b"))

    def array(self, spec: P, part: np.ndarray, shape: Any = None) -> Any:
        return spmd.make_array_from_process_local_data(NamedSharding(self.mesh, spec), part, shape)


SPECS = [P(), P("i"), P(None, "i"), P("i", "j"), P(("j", "i")), P(None, ("i", "j")), P("j", None)]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("shape", [None, (8, 4)])
def test_one_process_gives_the_whole_array(spec: P, shape: Any):
    whole = np.arange(32, dtype=np.float32).reshape(8, 4)
    sharding = NamedSharding(spmd.make_mesh((2, 2), ("i", "j")), spec)
    made = spmd.make_array_from_process_local_data(sharding, whole, shape)
    np.testing.assert_array_equal(made, whole)
    assert made.sharding == sharding
    for shard in made.addressable_shards:
        np.testing.assert_array_equal(shard.data, whole[shard.index])


# What process 0 holds of a mesh whose devices are of these processes, and the global shape.
CASES = [
    ([[0, 0], [1, 1]], P("a"), (2, 3), (4, 3)),
    ([[0, 0], [1, 1]], P(None, "a"), (3, 2), (3, 4)),
    ([[0, 0], [1, 1]], P("b"), (4, 3), (4, 3)),
    ([[0, 0], [1, 1]], P(("a", "b")), (2, 3), (4, 3)),
    ([[0, 0], [1, 1]], P(), (4, 3), (4, 3)),
    ([[0, 1], [0, 1]], P("a", "b"), (4, 2), (4, 4)),
    ([[0, 1], [0, 1]], P(("a", "b")), (2, 3), (4, 3)),  # the first and the third quarter
    ([[0, 1], [2, 3]], P("a", "b"), (2, 2), (4, 4)),
    ([[0, 1], [2, 3]], P("b", None), (2, 3), (4, 3)),
]


@pytest.mark.parametrize("owners, spec, part, whole", CASES)
@pytest.mark.parametrize("gives_all", [False, True])
def test_parts_of_processes_are_joined(
    owners: Any, spec: P, part: Any, whole: Any, gives_all: bool
):
    several = OfSeveral(owners)
    values = np.arange(np.prod(whole), dtype=np.float32).reshape(whole)
    places = NamedSharding(several.mesh, spec).addressable_devices_indices_map(whole)
    held = [
        sorted({k for i in places.values() for k in np.arange(n)[i[d]]})
        for d, n in enumerate(whole)
    ]
    local = values if gives_all else values[np.ix_(*held)]
    assert gives_all or local.shape == part
    made = several.array(spec, local, whole if gives_all else None)
    assert made.shape == whole and made.sharding.spec == spec
    assert len(made.addressable_shards) == len(places)
    for shard in made.addressable_shards:
        np.testing.assert_array_equal(shard.data, values[places[shard.device]])


def test_parts_that_do_not_fit_are_refused():
    halves = OfSeveral([[0, 0], [1, 1]])
    with pytest.raises(ShapeError, match=r"hold 2 along dim 0.*must have 2 there, or all 4"):
        halves.array(P("a"), np.ones((3, 3)), (4, 3))
    with pytest.raises(ShapeError, match=r"\(3, 3\) \(2 dims\).*global_shape=\(6,\) has 1"):
        halves.array(P("a"), np.ones((3, 3)), (6,))
    with pytest.raises(ShardingError, match="not a multiple of 4"):
        halves.array(P(("a", "b")), np.ones((3, 3)))
    mixed = OfSeveral([[0, 1], [0, 2]])
    with pytest.raises(ShapeError, match=r"along dim 0.*overlap or differ.*pass global_shape="):
        mixed.array(P(("a", "b")), np.ones((2, 3)))


def test_parts_may_be_a_pytree():
    sharding = rows(line(0, 1))
    tree = {"w": X, "b": [X[0], X[1].astype(np.int32)]}
    made = spmd.make_array_from_process_local_data(sharding, tree)
    for one, other in zip(spmd.tree.leaves(made), spmd.tree.leaves(tree), strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.sharding == sharding and one.dtype == other.dtype


# ---- placing what is traced --------------------------------------------------------------------


def put(x: Any, place: Any) -> Any:
    return spmd.device_put(x, place) * 2


TRACED: dict[str, Callable[[Any], Any]] = {
    "jit": lambda place: spmd.jit(lambda x: put(x, place))(X),
    "grad": lambda place: spmd.grad(lambda x: put(x, place).sum())(X),
    "vmap": lambda place: spmd.vmap(lambda x: put(x, place))(X),
    "pmap": lambda place: spmd.pmap(lambda x: put(x, place))(X),
    "scan": lambda place: lax.scan(lambda c, x: (put(c, place), x), X[0], X),
}


@pytest.mark.parametrize("name", TRACED)
def test_a_value_that_a_program_computes_is_not_moved_to_a_device(name: str):
    there = spmd.devices()[2]
    for one in spmd.tree.leaves(TRACED[name](there)):
        # As in JAX, a program runs where its arguments are, and vmap moves the whole array.
        assert name == "pmap" or one.device == spmd.devices()[2 if name == "vmap" else 0]
    for place in (None, spmd.devices()[0]):
        TRACED[name](place)


@pytest.mark.parametrize("name", [name for name in TRACED if name != "pmap"])
def test_a_sharding_of_a_traced_value_is_a_constraint(name: str):
    expected = TRACED[name](None)
    for place in (NamedSharding(line(0, 1), P()), NamedSharding(line(1), P())):
        for one, other in zip(
            spmd.tree.leaves(TRACED[name](place)), spmd.tree.leaves(expected), strict=True
        ):
            np.testing.assert_array_equal(one, other)
            assert one.sharding.device_set == place.device_set
    with pytest.raises(ShardingError, match="inside a map over axis"):
        TRACED["pmap"](NamedSharding(line(0, 1), P()))


def test_device_put_inside_jit_lays_the_value_out():
    made = spmd.jit(lambda x: put(x, rows(line(0, 1))))(X)
    assert made.sharding.spec == P("i")
    np.testing.assert_array_equal(made, X * 2)


# ---- the axes of a map -------------------------------------------------------------------------


@pytest.mark.parametrize("names", [None, set(), {"i", "j"}, frozenset(["j", "i"])])
def test_all_axes_of_a_map_are_manual(names: Any):
    mesh = spmd.make_mesh((2, 2), ("i", "j"))
    specs = {"in_specs": P("i", "j"), "out_specs": P("i", "j"), "axis_names": names}
    for f in (spmd.shard_map(lambda x: x * 2, mesh=mesh, **specs),):
        np.testing.assert_array_equal(f(X), 2 * X)
    with mesh:
        np.testing.assert_array_equal(spmd.shard_map(lambda x: x * 2, **specs)(X), 2 * X)


def test_other_axes_of_a_map_are_refused():
    mesh = spmd.make_mesh((2, 2), ("i", "j"))
    specs = {"in_specs": P("i"), "out_specs": P("i"), "axis_names": {"i", "k"}}
    text = r"'k', but the axes .* 'i', 'j'"
    with pytest.raises(ShardingError, match=text):
        spmd.shard_map(lambda x: x, mesh=mesh, **specs)
    with mesh, pytest.raises(ShardingError, match=text):
        spmd.shard_map(lambda x: x, **specs)(X)


# ---- devices that meet -------------------------------------------------------------------------

MEETINGS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y,
    "product": lambda x, y: x @ y,
    "concatenate": lambda x, y: snp.concatenate([x, y]),
    "jit": lambda x, y: spmd.jit(lambda x, y: x - y)(x, y),
    "jit of a map": lambda x, y: spmd.jit(lambda x, y: double(x) + y)(x, y),
    "jit that donates": lambda x, y: spmd.jit(lambda x, y: x - y, donate_argnums=0)(x, y),
    "grad": lambda x, y: spmd.grad(lambda x: snp.sum(x * y))(x),
    "map": lambda x, y: spmd.shard_map(
        lambda x, y: x + y, mesh=line(0, 1), in_specs=P("i"), out_specs=P("i")
    )(x, y),
}


def double(x: Any) -> Any:
    f = spmd.shard_map(lambda x: 2 * x, mesh=line(0, 1), in_specs=P("i"), out_specs=P("i"))
    return f(x)


@pytest.mark.parametrize("name", [n for n in MEETINGS if n != "map"])
def test_arrays_in_another_order_of_the_devices_are_moved(name: str):
    x, y = spmd.device_put(X, rows(line(0, 1))), spmd.device_put(X, rows(line(1, 0)))
    want = MEETINGS[name](X, X)
    donates = name == "jit that donates"
    with spmd.debug.expect_collectives(at_most=2 * X.nbytes) as moved:
        got = MEETINGS[name](spmd.device_put(X, rows(line(0, 1))) if donates else x, y)
    np.testing.assert_array_equal(got, want)
    assert "exchange" in {c.kind for c in moved.collectives}
    np.testing.assert_array_equal(x, X)  # nothing was written over it
    np.testing.assert_array_equal(y, X)


@pytest.mark.parametrize(
    "name, other",
    [(n, o) for n in MEETINGS for o in [(2, 3), (0, 1, 2, 3)]] + [("map", (1, 0))],
    ids=str,
)
def test_arrays_on_other_devices_are_refused_together(name: str, other: tuple[int, ...]):
    x, y = spmd.device_put(X, rows(line(0, 1))), spmd.device_put(X, rows(line(*other)))
    with pytest.raises(DeviceError) as caught:
        MEETINGS[name](x, y)
    text = str(caught.value).replace("cpu:", "")
    # The one to be moved is named: the other lies where the map is.
    moved = "y" if "is committed to devices" in text else "x"
    assert "[0, 1]" in text and str(list(other)) in text and f"device_put({moved}, " in text
    np.testing.assert_array_equal(x, X)  # nothing was written over it


@pytest.mark.parametrize("name", [n for n in MEETINGS if n != "map"])
def test_an_array_on_one_device_is_refused_beside_one_on_several(name: str):
    x, y = spmd.device_put(X, rows(line(0, 1))), spmd.device_put(X, spmd.devices()[0])
    for pair in ((x, y), (y, x)):
        with pytest.raises(DeviceError, match=r"cpu:0.*device_put"):
            MEETINGS[name](*pair)


@pytest.mark.parametrize("name", MEETINGS)
def test_arrays_on_the_same_devices_compute_together(name: str):
    x, y = spmd.device_put(X, rows(line(0, 1))), spmd.device_put(X, NamedSharding(line(0, 1), P()))
    wanted = MEETINGS[name](spmd.device_put(X, rows(line(0, 1))), X)  # X is on no device yet
    np.testing.assert_array_equal(MEETINGS[name](x, y), wanted)


# ---- arrays like others ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["zeros_like", "ones_like", "empty_like", "full_like"])
def test_an_array_like_a_sharded_one_is_sharded_alike(name):
    make = getattr(snp, name)
    value = (7,) if name == "full_like" else ()
    mesh = Mesh(np.array(spmd.devices()[:4], dtype=object).reshape(2, 2), ("x", "y"))
    for spec in (P("x", "y"), P(None, "x"), P()):
        x = spmd.device_put(X, NamedSharding(mesh, spec))
        out = make(x, *value)
        assert out.sharding == x.sharding
        assert [s.device for s in out.addressable_shards] == [
            s.device for s in x.addressable_shards
        ]
        np.testing.assert_array_equal(out, make(X, *value))
        assert make(x, *value, dtype="int8").sharding == x.sharding
        # As in JAX, what is replicated is so in any shape.
        other = make(x, *value, shape=(3,)).sharding
        assert other == x.sharding if spec == P() else other.device_set == {spmd.devices()[0]}
        assert make(x, *value, device=spmd.devices()[1]).device == spmd.devices()[1]


def test_an_array_like_one_of_another_device_is_there():
    x = spmd.device_put(X, spmd.devices()[3])
    assert snp.zeros_like(x).device == spmd.devices()[3]
    np.testing.assert_array_equal(snp.full_like(x, X[0]), np.full_like(X, X[0]))
    assert snp.full_like(x, X[0]).device == spmd.devices()[3]


def test_an_array_like_a_sharded_one_is_staged_under_transformations():
    x = spmd.device_put(X, rows(line(0, 1)))
    np.testing.assert_array_equal(spmd.jit(lambda a: a + snp.ones_like(x))(X), X + 1)
    np.testing.assert_array_equal(spmd.vmap(lambda a: a + snp.ones_like(x)[0])(X), X + 1)


def test_device_put_moves_values_and_tangents():
    here, there = spmd.devices()[1:3]
    x = spmd.device_put(X, here)
    y, tangent = spmd.jvp(lambda x: spmd.device_put(x, there) ** 2, (x,), (x,))
    assert y.device is there and tangent.device is there
    np.testing.assert_array_equal(tangent, 2 * X * X)
    g = spmd.grad(lambda x: (spmd.device_put(x, there) ** 2).sum())(x)
    np.testing.assert_array_equal(g, 2 * X)
    rows = spmd.vmap(lambda x: spmd.device_put(x, there))(x)
    assert rows.device is there


def test_shards_that_are_no_arrays():
    rows = NamedSharding(spmd.make_mesh((2,), ("x",)), P("x"))
    for given in ([X[:2], X[2:]], X):
        with pytest.raises(ArgumentError, match=r"arrays\[0\] is of type ndarray"):
            spmd.make_array_from_single_device_arrays((4, 2), rows, given)


@pytest.mark.parametrize("kind", ["devices", "meshes"])
@pytest.mark.parametrize("is_jitted", [False, True])
def test_layers_on_different_devices_have_gradients_there(kind: str, is_jitted: bool):
    """A cotangent goes back to where `device_put` took the value from."""
    first, second = _places(kind)
    weights = [np.arange(16, dtype=np.float32).reshape(4, 4) / k for k in (30, 40)]
    x = np.ones((4, 4), np.float32)

    def layer(w: Any, x: Any) -> Any:
        return snp.tanh(x @ w)

    run = spmd.jit(layer) if is_jitted else layer

    def loss(ws: Any, x: Any, place: Any) -> Any:
        h = run(ws[0], x)
        h = h if place is None else spmd.device_put(h, place)
        return (run(ws[1], h) ** 2).sum()

    placed = [spmd.device_put(w, p) for w, p in zip(weights, (first, second), strict=True)]
    given = spmd.device_put(x, first)
    want = spmd.grad(loss)(weights, x, None)
    for slope in (
        spmd.grad(loss)(placed, given, second),
        spmd.vjp(lambda ws: loss(ws, given, second), placed)[1](np.float32(1))[0],
    ):
        for got, w, own in zip(slope, want, placed, strict=True):
            np.testing.assert_allclose(got, w, rtol=1e-5)
            assert got.sharding.device_set == own.sharding.device_set


def _places(kind: str) -> tuple[Any, Any]:
    devices = spmd.devices()
    if kind == "devices":
        return devices[1], devices[2]
    meshes = (spmd.Mesh(np.array(own), ("x",)) for own in (devices[:2], devices[2:4]))
    first, second = (spmd.NamedSharding(mesh, spmd.P("x")) for mesh in meshes)
    return first, second


def test_device_put_of_what_is_differentiated_has_all_derivatives():
    first, second = _places("devices")
    x = spmd.device_put(np.float32(0.5), first)

    def f(x: Any) -> Any:
        return spmd.device_put(snp.sin(x), second) ** 2

    plain = lambda x: snp.sin(x) ** 2  # noqa: E731
    for order in (spmd.grad, lambda f: spmd.grad(spmd.grad(f))):
        got = order(f)(x)
        np.testing.assert_allclose(got, order(plain)(0.5), rtol=1e-5)
        assert got.device is first
    out, tangent = spmd.jvp(f, (x,), (x,))
    assert out.device is tangent.device is second
    np.testing.assert_allclose(tangent, spmd.jvp(plain, (0.5,), (0.5,))[1], rtol=1e-6)
    out, pull = spmd.vjp(f, x)
    np.testing.assert_allclose(spmd.jit(pull)(1.0)[0], spmd.grad(plain)(0.5), rtol=1e-6)
    _, push = spmd.linearize(f, x)
    np.testing.assert_allclose(spmd.jit(push)(x), tangent, rtol=1e-6)
    xs = np.arange(3, dtype=np.float32)
    rows = spmd.vmap(spmd.grad(f))(spmd.device_put(xs, first))
    np.testing.assert_allclose(rows, spmd.vmap(spmd.grad(plain))(xs), rtol=1e-6)
    rows = spmd.grad(lambda xs: spmd.vmap(f)(xs).sum())(spmd.device_put(xs, first))
    np.testing.assert_allclose(rows, spmd.vmap(spmd.grad(plain))(xs), rtol=1e-6)


def test_shardings_of_jit_say_the_memory():
    mesh = spmd.make_mesh((4,), ("x",), axis_types=(spmd.sharding.AxisType.Auto,))
    device = spmd.NamedSharding(mesh, spmd.P("x"))
    host = device.with_memory_kind("pinned_host")
    values = np.arange(8, dtype=np.float32)
    x, there = (spmd.device_put(values, s) for s in (device, host))
    moves = {
        "to the host": (spmd.jit(lambda x: x * 2, out_shardings=host), x, host),
        "as it is": (spmd.jit(lambda x: x, out_shardings=host), x, host),
        "back": (spmd.jit(lambda x: x, in_shardings=host, out_shardings=device), there, device),
        "from NumPy": (spmd.jit(lambda x: x + 1, in_shardings=host), values, device),
    }
    for f, operand, place in moves.values():
        for _ in range(4):
            out = f(operand)
            assert out.sharding == place and out.sharding.memory_kind == place.memory_kind
    both = spmd.jit(lambda x: {"a": x, "b": x.sum()}, out_shardings={"a": host, "b": None})(x)
    assert both["a"].sharding.memory_kind == "pinned_host"
    assert both["b"].sharding.memory_kind == "device"
    compiled = spmd.jit(lambda x: x * 2, out_shardings=host).lower(x).compile()
    assert compiled.output_shardings.memory_kind == "pinned_host"
    with pytest.raises(ShardingError, match=r"p\['w'\].*'device'.*in_shardings.*'pinned_host'"):
        spmd.jit(lambda p: p["w"], in_shardings=({"w": host},))({"w": x})
