"""Parallel random matrices: each device draws its own, multiplies, and agrees on a common result.

Random numbers are a function of a key. Splitting one key gives each device a stream of its own that
depends only on its number, so the matrices are the same however the devices are spread:

    python examples/random_matrices.py --devices 4
    spmdrun -n 4 examples/random_matrices.py
    spmdrun -n 2 --devices-per-rank 2 examples/random_matrices.py

The program estimates the spectral radius of random matrices by power iteration: by the circular law
the eigenvalues of an n × n matrix with entries of variance 1/n fill the unit disc, so the average
over the devices comes out near 1.
"""

from __future__ import annotations

import argparse

import numpy as np

import spmd
import spmd.numpy as snp
from spmd import lax, random


def draw(key, size: int):
    """One matrix with independent normal entries of variance 1/size."""
    return random.normal(key, (size, size)) / np.sqrt(size)


def growth(matrix, key, steps: int):
    """Average growth of a vector's norm per multiplication, after it settled."""

    def multiply(vector, _):
        longer = matrix @ vector
        norm = snp.linalg.norm(longer)
        return longer / norm, snp.log(norm)

    start = random.normal(key, (matrix.shape[0],))
    _, logs = lax.scan(multiply, start, None, length=steps)
    return snp.exp(snp.mean(logs[steps // 2 :]))


def local_slice(keys):
    """The keys of this process's devices, out of one key for each device of the job."""
    mine = [i for i, d in enumerate(spmd.devices()) if d.process_index == spmd.process_index()]
    return keys[np.array(mine)]


def main() -> None:
    """Read the command line, run on all devices, and let rank 0 report."""
    parser = argparse.ArgumentParser(description="Spectral radii of random matrices, in parallel.")
    parser.add_argument("--devices", type=int, help="virtual CPU devices in each process")
    parser.add_argument("--size", type=int, default=500)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    if args.devices is not None:
        spmd.config.update("num_cpu_devices", args.devices)

    def experiment(key):
        matrix_key, vector_key = random.split(key)
        matrix = draw(matrix_key, args.size)
        radius = growth(matrix, vector_key, args.steps)
        mean = lax.pmean(radius, "devices")
        spread = lax.pmax(radius, "devices") - lax.pmin(radius, "devices")
        return radius, mean, spread, lax.pmean(snp.var(matrix) * args.size, "devices")

    keys = local_slice(random.split(random.key(2024), spmd.device_count()))
    radius, mean, spread, variance = spmd.pmap(experiment, axis_name="devices")(keys)
    if spmd.process_index() == 0:
        shown = ", ".join(f"{float(r):.4f}" for r in radius)
        print(f"spectral radii on this process: {shown}")
        print(
            f"{spmd.device_count()} devices: mean radius {float(mean[0]):.4f}, "
            f"spread {float(spread[0]):.4f}, variance × size {float(variance[0]):.4f}"
        )


if __name__ == "__main__":
    main()
