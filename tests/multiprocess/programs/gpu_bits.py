"""Print the bits of collectives between GPUs, of each device and of each result.

However processes share eight devices, the lines are the same. With `STANDIN_NCCL` the stand-in for
NCCL carries them, and the last line says what it was asked for.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

import numpy as np

import spmd
from spmd import lax
from spmd import numpy as snp
from spmd.sharding import PartitionSpec as P
from spmd.transport import nccl

N, HERE = spmd.device_count(), spmd.local_device_count()
MESH = {"a": N // 2, "b": 2}


def collectives(x: Any) -> dict[str, Any]:
    """Each kind, over the axis of the processes, that within them, and both; `x` is (1, 8, 4)."""
    x = x[0]
    found: dict[str, Any] = {}
    for axes in "a", "b", ("a", "b"):
        n = N if axes == ("a", "b") else MESH[axes]
        found |= {
            f"psum {axes}": lax.psum(x * 1.5, axes),
            f"pmax {axes}": lax.pmax(x, axes),
            f"gather {axes}": lax.all_gather(x, axes),
            f"gather columns {axes}": lax.all_gather(x, axes, axis=1, tiled=True),
            f"scatter {axes}": lax.psum_scatter(x, axes, tiled=True),
            f"all_to_all {axes}": lax.all_to_all(x, axes, 0, 1, tiled=True),
            f"ring {axes}": lax.ppermute(x, axes, [(k, (k + 1) % n) for k in range(n - 1)]),
        }
    found["integers"] = lax.psum((x * 10).astype("int32"), "a"), lax.pmin(x.astype("int8"), "a")
    found["truth"] = lax.psum(x > 0, "a"), lax.pmin(x > 0, "a")
    found["complex"] = lax.psum(x + 1j * x, "a")
    found["half"] = lax.psum(x.astype("bfloat16"), "a"), lax.all_gather(x.astype("float16"), "a")
    found["short"] = lax.psum((x * 9000).astype("int16"), "a")
    found["parts"] = lax.psum_scatter(x.astype("float16"), "b", tiled=True)
    y, z = (f(snp.where(x > 1, np.nan, x), "a") for f in (lax.pmax, lax.pmin))
    found["NaN"] = snp.isnan(y), snp.nan_to_num(y), snp.isnan(z), snp.nan_to_num(z)
    found["loop"] = lax.fori_loop(0, 3, lambda k, y: lax.psum(y, "a") / 4 + x, x)
    return spmd.tree.map(lambda y: y[None], found)


def main() -> None:
    """All devices have values of their own."""
    made: list[str] = []
    way = ""
    if path := os.environ.get("STANDIN_NCCL"):
        from tests.compile.cuda.nccl import standin

        way = standin.connect(path)
        call = nccl.NcclGroup.call

        def noted(group: Any, what: str, calls: Any) -> None:
            made.extend(name for _, name, _ in calls)
            call(group, what, calls)

        nccl.NcclGroup.call = noted  # type: ignore[method-assign]
    x = np.random.default_rng(0).normal(size=(N, 8, 4)).astype(np.float32)
    mesh = spmd.make_mesh(tuple(MESH.values()), tuple(MESH))
    place = spmd.sharding.NamedSharding(mesh, P(("a", "b")))
    step = spmd.jit(
        spmd.shard_map(collectives, mesh=mesh, in_specs=P(("a", "b")), out_specs=P(("a", "b")))
    )
    placed = spmd.device_put(x, place)
    lines = []
    for name, y in spmd.tree.flatten_with_path(step(placed))[0]:
        for shard in y.addressable_shards:
            bits = hashlib.blake2b(np.asarray(shard.data).tobytes(), digest_size=8).hexdigest()
            lines.append(f"{shard.device.id} {name} {bits}")
    print("\n".join(lines), flush=True)
    if way and spmd.process_index() == 0:
        print(f"through {way}: {' '.join(sorted(set(made)))}", flush=True)


if __name__ == "__main__":
    main()
