"""A sum over all devices made by hand: the ring, with nothing but `ppermute`.

Every device cuts its vector into as many blocks as there are devices. In n-1 hops the partial sums
travel round the ring (after them, each device holds one finished block); in n-1 more hops the
finished blocks travel round. Each device sends 2(n-1)/n of its vector, however many there are.
The program checks the ring against `lax.psum`, and its gradient against that of `psum` too: the
transpose of a permutation is the permutation backwards, so nothing special is needed.

    python examples/ring_all_reduce.py --devices 4
    spmdrun -n 4 examples/ring_all_reduce.py
    spmdrun -n 2 --devices-per-rank 2 examples/ring_all_reduce.py
"""

from __future__ import annotations

import argparse

import numpy as np

import spmd
import spmd.numpy as snp
from spmd import lax


def ring_psum(x, axis_name: str, devices: int):
    """What `lax.psum(x, axis_name)` gives, for a vector whose length `devices` divides."""
    me = lax.axis_index(axis_name)
    to_the_right = [(i, (i + 1) % devices) for i in range(devices)]
    blocks = x.reshape(devices, -1)

    def add_and_pass(hop, travelling):
        arrived = lax.ppermute(travelling, axis_name, to_the_right)
        # What arrives at hop k started k+1 places to the left and is about that device's block.
        return arrived + lax.dynamic_index_in_dim(blocks, (me - hop - 1) % devices, keepdims=False)

    mine = lax.dynamic_index_in_dim(blocks, me, keepdims=False)
    finished = lax.fori_loop(0, devices - 1, add_and_pass, mine)

    def place_and_pass(hop, carry):
        gathered, travelling = carry
        arrived = lax.ppermute(travelling, axis_name, to_the_right)
        at = (me - hop) % devices  # the left neighbour's finished block is one behind ours
        return lax.dynamic_update_index_in_dim(gathered, arrived, at, 0), arrived

    # After n-1 hops the block that reaches us has collected every device: it is block me+1.
    gathered = lax.dynamic_update_index_in_dim(
        snp.zeros_like(blocks), finished, (me + 1) % devices, 0
    )
    gathered, _ = lax.fori_loop(0, devices - 1, place_and_pass, (gathered, finished))
    return gathered.reshape(x.shape)


def main() -> None:
    """Read the command line, compare the ring with psum, and let rank 0 report."""
    parser = argparse.ArgumentParser(description="All-reduce as a ring of ppermutes.")
    parser.add_argument("--devices", type=int, help="virtual CPU devices in each process")
    parser.add_argument("--length", type=int, default=1000, help="elements per device and block")
    args = parser.parse_args()
    if args.devices is not None:
        spmd.config.update("num_cpu_devices", args.devices)

    devices = spmd.device_count()
    mine = [i for i, d in enumerate(spmd.devices()) if d.process_index == spmd.process_index()]
    everything = np.random.default_rng(0).normal(size=(devices, devices * args.length))
    x = everything[np.array(mine)].astype(np.float32)

    def compare(x):
        ring = ring_psum(x, "ring", devices)
        difference = snp.max(snp.abs(ring - lax.psum(x, "ring")))
        weights = snp.cos(snp.arange(x.size) + lax.axis_index("ring"))  # each its own loss
        by_ring = spmd.grad(lambda x: snp.sum(weights * ring_psum(x, "ring", devices)))(x)
        by_psum = spmd.grad(lambda x: snp.sum(weights * lax.psum(x, "ring")))(x)
        worst_gradient = snp.max(snp.abs(by_ring - by_psum))
        return lax.pmax(difference, "ring"), lax.pmax(worst_gradient, "ring")

    values, gradients = spmd.pmap(compare, axis_name="ring")(x)
    if spmd.process_index() == 0:
        print(
            f"{devices} devices: ring and psum differ by at most {float(values[0]):.1e}, "
            f"their gradients by {float(gradients[0]):.1e}"
        )


if __name__ == "__main__":
    main()
