"""Programs whose arguments, constraints, results or maps have their devices in another order."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, lax
from spmd.base.config import config
from spmd.sharding import AxisType, Mesh

NAMES = {1: ("x",), 2: ("x", "y"), 3: ("a", "b", "c")}
SHAPES = [(8,), (4, 2), (2, 4), (2, 2, 2)]


@pytest.fixture(autouse=True)
def _eight_devices():
    with config.override("num_cpu_devices", 8):
        yield


def draw(rng: np.random.Generator) -> NamedSharding:
    """A sharding of matrices over all devices in a random order."""
    shape = SHAPES[rng.integers(len(SHAPES))]
    names = NAMES[len(shape)]
    devices = np.array(spmd.devices(), dtype=object)[rng.permutation(8)].reshape(shape)
    entries: list[tuple[str, ...]] = [(), ()]
    for axis in rng.permutation(list(names)):
        d = int(rng.integers(-1, 2))
        if d >= 0:
            entries[d] = (*entries[d], str(axis))
    mesh = Mesh(devices, names, (AxisType.Auto,) * len(names))
    return NamedSharding(mesh, P(*[own or None for own in entries]))


def check(out: spmd.Array, want: np.ndarray, sharding: NamedSharding | None = None) -> None:
    np.testing.assert_allclose(out, want, 1e-4, 1e-4)
    if sharding is not None:
        assert out.sharding == sharding
        places = sharding.devices_indices_map(want.shape)
        for shard in out.addressable_shards:
            np.testing.assert_allclose(shard.data, want[places[shard.device]], 1e-4, 1e-4)


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_devices(seed: int):
    rng = np.random.default_rng(seed)
    value = rng.standard_normal((16, 16)).astype(np.float32)
    shardings = [draw(rng) for _ in range(4)]
    a, b, c = (spmd.device_put(value * k, s) for k, s in enumerate(shardings[:3], 1))
    out, inside = shardings[3], shardings[0]

    def f(a, b, c):
        held = lax.with_sharding_constraint(snp.sin(a @ b), inside)
        return held + c.T, held

    plain = f(*[np.asarray(x) for x in (a, b, c)])
    both = spmd.jit(f, out_shardings=(out, inside))(a, b, c)
    for got, want, sharding in zip(both, plain, (out, inside), strict=True):
        check(got, np.asarray(want), sharding)
    check(a + b, value * 3)
    check(snp.matmul(b, c), 6 * value @ value)

    def loss(a, b, c):
        return (f(a, b, c)[0] ** 2).sum()

    slopes = spmd.jit(spmd.grad(loss, (0, 1, 2)))(a, b, c)
    for got, want in zip(
        slopes, spmd.grad(loss, (0, 1, 2))(value, value * 2, value * 3), strict=True
    ):
        check(got, np.asarray(want))


def test_an_argument_in_another_order_is_one_exchange():
    devices = np.array(spmd.devices(), dtype=object)
    order = devices[[0, 3, 1, 2, 7, 4, 6, 5]]
    one, other = (Mesh(d.reshape(4, 2), ("x", "y")) for d in (devices, order))
    value = np.arange(256, dtype=np.float32).reshape(16, 16)
    a, b = (spmd.device_put(value, NamedSharding(m, P("x", "y"))) for m in (one, other))
    with spmd.debug.expect_collectives(exchange=1, at_most=value.nbytes // 8):
        total = spmd.jit(lambda a, b: a + b)(a, b)
    check(total, value * 2, NamedSharding(one, P("x", "y")))
    with spmd.debug.expect_collectives(exchange=1, at_most=value.nbytes // 8):
        moved = spmd.jit(lambda a: a * 2, out_shardings=b.sharding)(a)
    check(moved, value * 2, b.sharding)
    # The same order by another grid is nothing but names.
    turned = Mesh(devices.reshape(4, 2).T, ("y", "x"))
    c = spmd.device_put(value, NamedSharding(turned, P("x", "y")))
    with spmd.debug.expect_collectives(at_most=0):
        check(spmd.jit(lambda a, c: a + c)(a, c), value * 2, a.sharding)
    lowered = spmd.jit(lambda a, b: a + b).lower(a, b).compile()
    assert lowered.input_shardings[0] == (a.sharding, b.sharding)
    given = spmd.device_put(value, b.sharding)
    step = spmd.jit(lambda a, b: a - b, donate_argnums=1)
    check(step(a, given), np.zeros_like(value))
    assert given.is_deleted()


def test_a_map_over_another_order_is_partitioned_with_the_rest():
    rng = np.random.default_rng(0)
    devices = np.array(spmd.devices(), dtype=object)
    one, other = (Mesh(d.reshape(4, 2), ("x", "y")) for d in (devices, rng.permutation(devices)))
    value = rng.standard_normal((16, 16)).astype(np.float32)
    spec = P("x", "y")

    def body(x):
        return x - lax.psum(x, "x")

    want = spmd.shard_map(body, mesh=one, in_specs=spec, out_specs=spec)(value * 2)
    mapped = spmd.shard_map(body, mesh=other, in_specs=spec, out_specs=spec)
    out = spmd.jit(lambda a: mapped(a * 2) + 1)(spmd.device_put(value, NamedSharding(one, spec)))
    check(out, np.asarray(want) + 1, NamedSharding(other, spec))


def test_other_devices_are_an_error():
    devices = np.array(spmd.devices(), dtype=object)
    few, all_ = Mesh(devices[:4], ("x",)), Mesh(devices, ("x",))
    a, b = (spmd.device_put(np.ones((8, 8)), NamedSharding(m, P("x"))) for m in (few, all_))
    for f in (lambda a, b: a + b, spmd.jit(lambda a, b: a + b)):
        with pytest.raises(spmd.errors.DeviceError, match="committed to different devices"):
            f(a, b)
