"""Programs on arrays whose parts differ in size, tried over one process and over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import spmd
import spmd.numpy as snp
from spmd import lax

PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "elementwise": lambda x: snp.sin(x) * 2 + x,
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.sum(0),
    "mean": lambda x: snp.mean(x, axis=0),
    "largest": lambda x: (-snp.abs(x) - 1).max(0),
    "product": lambda x: (x / 10 + 1.5).prod(0),
    "all": lambda x: (x > -100).all(),
    "any": lambda x: (x > 100).any(0),
    "argmin": lambda x: snp.argmin(snp.abs(x) + 1, axis=0),
    "softmax": lambda x: spmd.nn.softmax(x, axis=0),
    "product of matrices": lambda x: x @ x.T,
    "contraction": lambda x: x.T @ x,
    "transpose": lambda x: x.T,
    "sort": lambda x: snp.sort(-x, axis=0),
    "cumsum": lambda x: snp.cumsum(x, axis=0),
    "reshape": lambda x: x.reshape(-1),
    "reversal": lambda x: x[::-1],
    "roll": lambda x: snp.roll(x, 2, 0),
    "first row": lambda x: x[0],
    "last row": lambda x: x[-1],
    "rows": lambda x: x[snp.array([0, -1, 0])],
    "update": lambda x: x.at[-1].set(0.5),
    "addition": lambda x: x.at[snp.array([0, -1])].add(x[:1]),
    "joined": lambda x: snp.concatenate([x, x * 2]),
    "scan": lambda x: lax.scan(lambda c, r: (c + r, c * r), snp.zeros(x.shape[1:]), x),
    "loop": lambda x: lax.fori_loop(0, 3, lambda i, c: c * 0.5 + 1, x),
    "branch": lambda x: lax.cond(x.sum() > 0, snp.sin, snp.cos, x),
    "fft": lambda x: snp.fft.fft(x, axis=0).real,
    "gradient": spmd.grad(lambda x: (snp.sin(x @ x.T) ** 2).sum()),
    "batched": spmd.vmap(lambda row: row / (1 + snp.abs(row).sum())),
}
