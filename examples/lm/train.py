"""A language model on real text, Python's own manual, split over devices by a plan.

The model (model.py) is written for one device; a plan (plans.py) places its weights and data, and
the compiler does the rest. All plans give the same losses, on any number of devices:

    python examples/lm/train.py --plan tp --devices 4
    spmdrun -n 4 examples/lm/train.py --plan fsdp
    spmdrun -n 2 --devices-per-rank 2 examples/lm/train.py --plan dp+tp

Rank 0 shows progress, prints what a step moves between devices, writes loss.json and loss.png into
the folder `--out`, and ends with a sample of the model's own.

Needs `pip install ".[examples]"`.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import time
from pathlib import Path
from typing import Any

import matplotlib
import model
import numpy as np
from plans import PLANS
from tqdm import tqdm

import spmd
import spmd.numpy as snp
from spmd import random

matplotlib.use("Agg")  # a job has no screen
from matplotlib import pyplot

TIME = 64


def read_text() -> np.ndarray:
    """All topics of `help()`, as ASCII codes."""
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int32)


def batches(text: np.ndarray, count: int, size: int) -> Any:
    """Random windows of the text, the same on every rank."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        starts = rng.integers(0, len(text) - TIME - 1, size)
        yield np.stack([text[k : k + TIME + 1] for k in starts])


def sample(params: Any, prompt: str, length: int) -> str:
    """Continue a prompt by the model's own draws."""

    @spmd.jit
    def draw(params: Any, window: Any, last: Any, key: Any) -> Any:
        found = model.scores(params, window[None])[0, last]
        return random.categorical(key, found / 0.7)

    tokens = [ord(c) for c in prompt]
    for key in random.split(random.key(1), length):
        window = np.zeros(TIME, np.int32)
        recent = tokens[-TIME:]
        window[: len(recent)] = recent
        tokens.append(int(draw(params, window, len(recent) - 1, key)))
    return "".join(map(chr, tokens))


def main() -> None:
    """Train, and write down how it went."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", choices=PLANS, default="dp")
    parser.add_argument("--devices", type=int, help="virtual devices of this process")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--batch", type=int, default=16, help="windows in a batch, over all devices"
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--sample", type=int, default=200, help="characters of the sample")
    parser.add_argument("--out", type=Path, default=Path("runs/lm"))
    options = parser.parse_args()
    if options.devices:
        spmd.config.update("num_cpu_devices", options.devices)
    plan = PLANS[options.plan]
    is_first = spmd.process_index() == 0
    with spmd.set_mesh(plan.mesh()) as _:
        params = model.init(random.key(0), options.layers, options.width)
        params = {name: spmd.device_put(w, plan.spec(name)) for name, w in params.items()}
        moments = (spmd.tree.map(snp.zeros_like, params),) * 2
        step = spmd.jit(model.update)
        losses: list[float] = []
        started = time.perf_counter()
        windows = batches(read_text(), options.steps, options.batch)
        progress = tqdm(windows, total=options.steps, disable=not is_first)
        for count, tokens in enumerate(progress, 1):
            batch = spmd.device_put(tokens, plan.batch)
            arguments = params, moments, np.float32(count), batch
            if count == 1 and is_first:
                progress.write(str(spmd.debug.sharding(step, show=False)(*arguments)))
            value, params, moments = step(*arguments)
            losses.append(float(value))
            progress.set_description(f"{options.plan}: {losses[-1]:.3f} nats")
        seconds = time.perf_counter() - started
        text = sample(params, "The statement ", options.sample) if options.sample else ""
    if is_first:
        options.out.mkdir(parents=True, exist_ok=True)
        record = {"plan": options.plan, "losses": losses, "seconds": seconds}
        (options.out / "loss.json").write_text(json.dumps(record))
        pyplot.plot(losses)
        pyplot.xlabel("step")
        pyplot.ylabel("loss, nats a character")
        pyplot.savefig(options.out / "loss.png")
        print(f"{options.plan} over {spmd.device_count()} devices: loss {losses[-1]:.5f}")
        print(text)


if __name__ == "__main__":
    main()
