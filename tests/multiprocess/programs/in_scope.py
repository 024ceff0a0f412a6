"""Results under `set_mesh` that no mesh has touched lie over all ranks' devices, and agree."""

from __future__ import annotations

import numpy as np

import spmd
import spmd.numpy as snp
from spmd import P, lax
from spmd.sharding import AxisType


def main() -> None:
    """Compute a few values and look where they lie."""
    count = spmd.device_count()
    mesh = spmd.make_mesh((count,), ("x",), AxisType.Auto)
    rows = 4 * count
    with spmd.set_mesh(mesh):
        ones = snp.ones((rows, 3))
        doubled = spmd.jit(lambda x: x * 2)(np.arange(float(rows)))
        total = ones + doubled[:, None]
        for x in (ones, doubled, total, spmd.random.normal(spmd.random.key(0), (8,))):
            assert x.sharding == spmd.NamedSharding(mesh, P()), x.sharding
        for _ in range(3):  # the general path, and the closure
            split = spmd.jit(lambda x: lax.with_sharding_constraint(x + 1, P("x")))(total)
            assert split.sharding == spmd.NamedSharding(mesh, P("x"))
        mean = float((split - total).mean())
    assert mean == 1.0
    np.testing.assert_array_equal(total, 1 + 2 * np.arange(rows)[:, None] * np.ones((1, 3)))
    assert snp.ones(3).sharding.num_devices == 1
    print(f"rank {spmd.process_index()}: in scope of {count} devices")


if __name__ == "__main__":
    main()
