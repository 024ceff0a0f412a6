"""Arrays over all ranks' devices, moved between random layouts: each gets what it lacks."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import spmd
from spmd import NamedSharding, P
from spmd.collectives.rectangles import lacking
from spmd.sharding import AxisType, Mesh


def draw(rng: np.random.Generator, count: int) -> NamedSharding:
    """A sharding of all devices in some order, of arrays of three dims."""
    sizes = [[count]]
    sizes += [[count // n, n] for n in (2, 3) if count % n == 0 and count > n]
    shape = sizes[rng.integers(len(sizes))]
    axes = "xy"[: len(shape)]
    order = rng.permutation(count) if rng.integers(2) else np.arange(count)
    devices = np.array([spmd.devices()[k] for k in order]).reshape(shape)
    entries: list[tuple[str, ...]] = [(), (), ()]
    for axis in rng.permutation(list(axes)):
        d = int(rng.integers(-1, 3))
        if d >= 0:
            entries[d] = (*entries[d], str(axis))
    mesh = Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    return NamedSharding(mesh, P(*[own or None for own in entries]))


def lacks(one: NamedSharding, other: NamedSharding, shape: tuple[int, ...]) -> int:
    """What the device that lacks the most lacks, in elements."""

    def rectangles(sharding: NamedSharding) -> dict[Any, Any]:
        return {
            device: tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
            for device, index in sharding.devices_indices_map(shape).items()
        }

    have, want = rectangles(one), rectangles(other)
    return max(lacking(have[d], want[d]) for d in have)


def check(out: Any, value: np.ndarray, sharding: NamedSharding) -> None:
    """Raise unless every local shard is the right part on the right device."""
    assert out.sharding.is_equivalent_to(sharding, value.ndim)
    places = sharding.addressable_devices_indices_map(value.shape)
    assert {s.device for s in out.addressable_shards} == set(places)
    for shard in out.addressable_shards:
        np.testing.assert_array_equal(shard.data, value[places[shard.device]])


def main(seeds: int) -> None:
    """Moves by `device_put`, by `reshard` and inside of a program."""
    count = spmd.device_count()
    exchanges = 0
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        shape = tuple(int(n) * count for n in rng.integers(1, 4, 3))
        value = rng.integers(-99, 99, shape).astype([np.float32, np.int8, np.float64][seed % 3])
        have, want = draw(rng, count), draw(rng, count)
        x = spmd.device_put(value, have)
        most = lacks(have, want, shape) * x.dtype.itemsize
        with spmd.debug.expect_collectives(at_most=most) as moved:
            check(spmd.device_put(x, want), value, want)
        assert moved.received == most, (seed, moved.received, most)
        exchanges += sum(c.kind == "exchange" for c in moved.collectives)
        check(x, value, have)
        # Inside of a program, over one mesh.
        inside = NamedSharding(have.mesh, P(*reversed(have.spec)))
        moving = spmd.jit(lambda a: a, out_shardings=inside)
        with spmd.debug.expect_collectives(at_most=lacks(have, inside, shape) * x.dtype.itemsize):
            check(moving(x), value, inside)
        # Arguments and results of one program in two orders of the devices.
        both = spmd.jit(lambda a, b: (a * 2, b - a), out_shardings=(want, have))
        double, nothing = both(x, spmd.device_put(value, want))
        check(double, value * 2, want)
        check(nothing, value - value, have)
    assert exchanges > seeds // 4
    if spmd.process_index() == 0:
        print(f"moved over {spmd.process_count()} ranks, {count} devices: all right")


if __name__ == "__main__":
    main(int(sys.argv[1]))
