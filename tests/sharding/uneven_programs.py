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
    "cumsum, reversed": lambda x: lax.cumsum(x, axis=0, reverse=True),
    "cumulative product": lambda x: lax.cumprod(x / 9 + 1, axis=0, reverse=True),
    "cumulative maximum": lambda x: lax.cummax(x, axis=0, reverse=True),
    "largest two": lambda x: lax.top_k(-snp.abs(x).T - 1, min(2, x.shape[0])),
    "places": lambda x: snp.argsort(x, axis=0),
    "rows or 7": lambda x: x.at[snp.array([0, 99, -99, -1])].get(mode="fill", fill_value=7.0),
    "nearest rows": lambda x: x.at[snp.array([0, 99, -1])].get(mode="clip"),
    "rows from a place": lambda x: lax.dynamic_slice_in_dim(x, x.shape[0], 1, 0),
    "rows at a place": lambda x: lax.dynamic_update_slice_in_dim(x, x[:1] * 2, x.shape[0], 0),
    "far addition": lambda x: x.at[snp.array([99, 0, -99])].add(1.0),
    "sums of classes": lambda x: spmd.ops.segment_sum(x, snp.arange(len(x)) % 2, num_segments=2),
    "map": lambda x: lax.map(lambda row: snp.sin(row).sum(), x),
    "inverses": lambda x: snp.linalg.inv(x[:, :, None] * x[:, None] + 3 * snp.eye(x.shape[1])),
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
