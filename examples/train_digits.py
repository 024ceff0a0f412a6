"""Data-parallel training of a network on real handwritten digits, over whatever devices there are.

Each device computes gradients on its own shard of every batch; `pmean` averages them; all devices
then take the same step. The order of the data depends on the seed and the number of devices in all,
not on how they are spread over processes, so these three give the same loss curve:

    python examples/train_digits.py --devices 4                 # 1 process  × 4 devices
    spmdrun -n 4 examples/train_digits.py                       # 4 ranks    × 1 device
    spmdrun -n 2 --devices-per-rank 2 examples/train_digits.py  # 2 ranks    × 2 devices

A run that is killed goes on by itself, and ends with the same bits as one that was not; or, where
MPI has ULFM (Open MPI), without a restart on the ranks that are left:

    spmdrun -n 4 --max-restarts 3 examples/train_digits.py --checkpoint runs/digits/saved
    spmdrun -n 4 --elastic 2 examples/train_digits.py --checkpoint runs/digits/saved

Plain `mpirun -n 4 python examples/train_digits.py` works as well. Rank 0 shows progress and writes
loss.json and loss.png into the folder `--out`.

Needs `pip install ".[examples]"`: the digits come with scikit-learn, nothing is downloaded.

Shapes: B batch of one device, D local devices, P pixels, C classes.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import numpy as np
from sklearn.datasets import load_digits
from tqdm import tqdm

import spmd
import spmd.numpy as snp
from spmd import checkpoints, lax, nn, random

matplotlib.use("Agg")  # a job has no screen
from matplotlib import pyplot

CLASSES = 10
SIZES = (64, 256, 128, CLASSES)
BATCH = 32  # per device
RATE = 2e-3

# ---- the model ---------------------------------------------------------------------------------


def init(key):
    """He-normal weights and zero biases, a list of layers."""
    layers = zip(random.split(key, len(SIZES) - 1), SIZES[:-1], SIZES[1:], strict=True)
    return [
        {"w": random.normal(k, (rows, columns)) * math.sqrt(2 / rows), "b": snp.zeros(columns)}
        for k, rows, columns in layers
    ]


def logits(params, x_BP):
    """Unnormalised log-probabilities of the ten digits."""
    hidden, last = params[:-1], params[-1]
    for layer in hidden:
        x_BP = nn.relu(x_BP @ layer["w"] + layer["b"])
    return x_BP @ last["w"] + last["b"]


def cross_entropy(params, x_BP, y_B):
    """Mean negative log-probability of the right digit."""
    right_BC = nn.one_hot(y_B, CLASSES) * nn.log_softmax(logits(params, x_BP))
    return -snp.mean(snp.sum(right_BC, axis=-1))


# ---- one step on one device --------------------------------------------------------------------


def adam(params, grads, moments, count, decay=(0.9, 0.999)):
    """One step of Adam, written out; returns new parameters and moments."""
    first = spmd.tree.map(lambda m, g: decay[0] * m + (1 - decay[0]) * g, moments[0], grads)
    second = spmd.tree.map(lambda v, g: decay[1] * v + (1 - decay[1]) * g * g, moments[1], grads)
    # Both moments start at zero; these factors take that bias out again.
    grown_1, grown_2 = 1 - decay[0] ** count, 1 - decay[1] ** count
    params = spmd.tree.map(
        lambda p, m, v: p - RATE * (m / grown_1) / (snp.sqrt(v / grown_2) + 1e-8),
        params,
        first,
        second,
    )
    return params, (first, second)


def train_step(state, x_BP, y_B):
    """What each device does with its shard; the two `pmean` are all the communication there is."""
    params, moments, count = state
    loss, grads = spmd.value_and_grad(cross_entropy)(params, x_BP, y_B)
    grads = lax.pmean(grads, "batch")
    params, moments = adam(params, grads, moments, count + 1)
    return (params, moments, count + 1), lax.pmean(loss, "batch")


# ---- data --------------------------------------------------------------------------------------


def split_digits(seed: int):
    """Shuffled digits: (train images, labels), (test images, labels); a fifth is for testing."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(images))
    images, labels = (images[order] / 16).astype(np.float32), labels[order].astype(np.int32)
    cut = len(images) // 5
    return (images[cut:], labels[cut:]), (images[:cut], labels[:cut])


def batches(
    images, labels, seed: int, epoch: int, seen: int = 0
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """This process's slices x_DBP, y_DB of each global batch of what is left of an epoch."""
    devices = spmd.devices()
    mine = [i for i, d in enumerate(devices) if d.process_index == spmd.process_index()]
    whole = BATCH * len(devices)
    order = np.random.default_rng((seed, epoch)).permutation(len(images))
    for start in range(seen, len(images) - whole + 1, whole):
        rows_DB = order[start : start + whole].reshape(len(devices), BATCH)[mine]
        yield images[rows_DB], labels[rows_DB]


# ---- the loop ----------------------------------------------------------------------------------


def train(epochs: int, seed: int, folder: Path | None = None, every: int = 10) -> dict:
    """Train, show progress on rank 0, and return the loss of every step and the test accuracy.

    With a `folder` it goes on from the newest checkpoint there, and writes one `every` few steps.
    """
    (images, labels), (test_images, test_labels) = split_digits(seed)
    steps = len(images) // (BATCH * spmd.device_count())
    if steps == 0:
        raise SystemExit(
            f"{spmd.device_count()} devices × {BATCH} images are more than one epoch's "
            f"{len(images)}; use at most {len(images) // BATCH} devices"
        )
    run = begin(seed, epochs * (len(images) // BATCH))
    if folder is not None and (found := checkpoints.restore(folder, like=run)):
        run = found[1]
    # Every device starts from the same state: pmap maps over the leading dim, a copy each.
    state = spmd.tree.map(lambda a: snp.stack([a] * spmd.local_device_count()), run["state"])

    step = spmd.pmap(train_step, axis_name="batch", donate_argnums=0)
    accuracy = spmd.jit(lambda p, x, y: snp.mean(snp.argmax(logits(p, x), axis=-1) == y))
    bar = tqdm(total=epochs * steps, unit="step", disable=spmd.process_index() != 0)
    bar.update(run["steps"])
    while run["epoch"] < epochs:
        start, before, recent = time.perf_counter(), run["steps"], []
        for x_DBP, y_DB in batches(images, labels, seed, run["epoch"], run["seen"]):
            spmd.debug.step(run["steps"] + len(recent))  # for the report, should a rank fail
            state, loss_D = step(state, x_DBP, y_DB)
            recent.append(loss_D)
            run["seen"] += BATCH * spmd.device_count()
            bar.update()
            if folder is not None and (run["steps"] + len(recent)) % every == 0:
                note(run, state, recent)
                checkpoints.save(folder, run["steps"], run)
        note(run, state, recent)  # waits for the devices, once an epoch
        run["epoch"], run["seen"] = run["epoch"] + 1, 0
        done = (run["steps"] - before) * BATCH * spmd.device_count()
        rate = done / (time.perf_counter() - start)
        right = float(accuracy(run["state"][0], test_images, test_labels))
        last = run["loss"][run["steps"] - 1]
        bar.set_postfix_str(f"loss {last:.4f}, test accuracy {right:.2%}, {rate:,.0f} images/s")
    bar.close()
    return {
        "loss": run["loss"][: run["steps"]].tolist(),
        "test_accuracy": float(accuracy(run["state"][0], test_images, test_labels)),
        "devices": spmd.device_count(),
        "processes": spmd.process_count(),
    }


def begin(seed: int, most_steps: int) -> dict:
    """All that a checkpoint holds, before the first step.

    Progress is counted in images `seen` of an epoch, and there is room for the losses of one device
    alone: a run can go on with another number of devices.
    """
    params = init(random.key(seed))
    zeros = spmd.tree.map(snp.zeros_like, params)
    state = (params, (zeros, zeros), snp.float32(0))
    loss = np.full(most_steps, np.nan)
    return {"state": state, "epoch": 0, "seen": 0, "steps": 0, "loss": loss}


def note(run: dict, state, recent: list) -> None:
    """Take over the state of one device (all have the same), and the losses of recent steps."""
    run["state"] = spmd.tree.map(lambda a: a[0], state)
    for loss_D in recent:
        run["loss"][run["steps"]] = float(loss_D[0])
        run["steps"] += 1
    recent.clear()


def save(result: dict, out: Path) -> None:
    """Write the curve as loss.json and as loss.png."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "loss.json").write_text(json.dumps(result, indent=1) + "\n")
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.semilogy(result["loss"])
    axes.set(xlabel="step", ylabel="cross entropy")
    axes.set_title(
        f"{result['processes']} processes, {result['devices']} devices: "
        f"test accuracy {result['test_accuracy']:.2%}"
    )
    figure.savefig(out / "loss.png", dpi=120)
    pyplot.close(figure)


def main() -> None:
    """Read the command line, train, and let rank 0 report."""
    parser = argparse.ArgumentParser(description="Train a digit classifier over many devices.")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--devices", type=int, help="virtual CPU devices in each process")
    parser.add_argument("--out", type=Path, default=Path("runs/digits"), help="folder for results")
    parser.add_argument("--checkpoint", type=Path, help="folder to go on from, and to save in")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error("--epochs must be at least 1")
    if args.devices is not None:
        spmd.config.update("num_cpu_devices", args.devices)

    while True:
        try:
            result = train(args.epochs, args.seed, args.checkpoint, args.every)
            break
        except spmd.errors.PeerError:  # if that rank died: go on without it
            if args.checkpoint is None or not spmd.distributed.recover():
                raise
    if spmd.process_index() == 0:
        save(result, args.out)
        print(
            f"{result['processes']} processes, {result['devices']} devices: "
            f"loss {result['loss'][0]:.4f} -> {result['loss'][-1]:.4f}, "
            f"test accuracy {result['test_accuracy']:.2%}; plot in {args.out / 'loss.png'}"
        )


if __name__ == "__main__":
    main()
