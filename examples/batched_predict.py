"""From one example to a batch to many devices, without rewriting the function for one example.

`predict` knows a single image. `vmap` with `in_axes=(None, 0)` gives the batched version:
parameters shared, images mapped. `vmap` of `grad` gives each example's own gradient, which a
batched loss alone can't. `pmap` of that spreads the batch over devices.

    python examples/batched_predict.py --devices 4
    spmdrun -n 2 --devices-per-rank 2 examples/batched_predict.py
"""

from __future__ import annotations

import argparse

import numpy as np

import spmd
import spmd.numpy as snp
from spmd import nn, random

SIZES = (784, 512, 512, 10)


def init(key):
    """Small random weights and biases for each layer."""
    pairs = zip(random.split(key, len(SIZES) - 1), SIZES[:-1], SIZES[1:], strict=True)
    return [_init_layer(k, inputs, outputs) for k, inputs, outputs in pairs]


def _init_layer(key, inputs: int, outputs: int):
    weight_key, bias_key = random.split(key)
    weights = random.normal(weight_key, (outputs, inputs)) / np.sqrt(inputs)
    return weights, 0.01 * random.normal(bias_key, (outputs,))


def predict(params, image):
    """Log-probabilities of ten classes for one flat image."""
    activations = image
    for w, b in params[:-1]:
        activations = nn.relu(snp.dot(w, activations) + b)
    w, b = params[-1]
    return nn.log_softmax(snp.dot(w, activations) + b)


def loss(params, image, label):
    """Negative log-probability of the right class, for one image."""
    return -predict(params, image)[label]


def gradient_norm(params, image, label):
    """How strongly one example pulls at the parameters."""
    grads = spmd.grad(loss)(params, image, label)
    return snp.sqrt(sum(snp.sum(g**2) for g in spmd.tree.leaves(grads)))


def main() -> None:
    """Read the command line; predict one by one, batched, and over devices; compare."""
    parser = argparse.ArgumentParser(description="vmap and pmap of a function of one image.")
    parser.add_argument("--devices", type=int, help="virtual CPU devices in each process")
    parser.add_argument("--batch", type=int, default=16, help="images per device")
    args = parser.parse_args()
    if args.devices is not None:
        spmd.config.update("num_cpu_devices", args.devices)

    param_key, program_key = random.split(random.key(0))
    params = init(param_key)
    shape = (spmd.local_device_count(), args.batch)
    program_key = random.fold_in(program_key, spmd.process_index())
    images = random.normal(program_key, (*shape, SIZES[0]))
    labels = snp.arange(shape[0] * shape[1]).reshape(shape) % SIZES[-1]

    one_by_one = snp.stack([predict(params, image) for image in images[0]])
    batched = spmd.jit(spmd.vmap(predict, in_axes=(None, 0)))(params, images[0])
    norms = spmd.pmap(spmd.vmap(gradient_norm, in_axes=(None, 0, 0)), in_axes=(None, 0, 0))(
        params, images, labels
    )
    if spmd.process_index() == 0:
        difference = float(snp.max(snp.abs(one_by_one - batched)))
        print(f"batched predictions {batched.shape} differ from single ones by {difference:.1e}")
        print(
            f"{norms.size} gradient norms over {spmd.local_device_count()} local devices: "
            f"{float(snp.min(norms)):.3f} to {float(snp.max(norms)):.3f}"
        )


if __name__ == "__main__":
    main()
