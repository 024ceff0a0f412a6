"""Arrays whose parts differ in size over all ranks' devices; each shard is as it must be."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, checkpoints, multihost
from spmd.sharding import AxisType
from tests.multiprocess.programs.partition import check
from tests.sharding.uneven_programs import PROGRAMS


def main(folder: str) -> None:
    """Programs, jitted and not, resharding, gathering and checkpoints."""
    count = spmd.device_count()
    split = 2 if count % 2 == 0 else 1
    row = spmd.make_mesh((count,), ("x",), AxisType.Auto)
    grid = spmd.make_mesh((count // split, split), ("x", "y"), AxisType.Auto)
    x = np.random.default_rng(0).normal(size=(2 * count + 1, 5)).astype(np.float32)
    layouts = [
        NamedSharding(mesh, spec, uneven=True)
        for mesh, spec in ((row, P("x")), (row, P(None, "x")), (grid, P("y", "x")), (grid, P("x")))
    ]
    placed = [spmd.device_put(x, s) for s in layouts]
    piece = math.ceil(x.shape[0] / count)
    for shard in placed[0].addressable_shards:
        start = min(shard.device.id * piece, len(x))
        assert shard.data.shape[0] == min(piece, len(x) - start), shard
    for y in placed:
        check(y, x, f"placed by {y.sharding.spec}")
        np.testing.assert_array_equal(multihost.process_allgather(y, tiled=True), x)
        for there in (*layouts, NamedSharding(row, P())):
            moved = spmd.device_put(y, there)
            assert moved.sharding == there
            check(moved, x, f"from {y.sharding.spec} to {there.spec}")
    for name, f in PROGRAMS.items():
        want: Any = f(snp.asarray(x))
        for y in placed[:3]:
            check(spmd.jit(f)(y), want, f"{name} of {y.sharding.spec}")
        check(f(placed[0]), want, f"{name}, operation by operation")
    out = spmd.jit(lambda x: x * 2, out_shardings=layouts[0])(x)
    check(out, x * 2, "out_shardings")
    checkpoints.save(folder, 1, placed)
    _, found = checkpoints.restore(folder, placed[::-1])
    for y, like in zip(found, placed[::-1], strict=True):
        assert y.sharding == like.sharding
        check(y, x, "restored")
    print(f"rank {spmd.process_index()} of {spmd.process_count()}: all right")


if __name__ == "__main__":
    main(sys.argv[1])
