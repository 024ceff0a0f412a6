"""Debugging over ranks: NaNs and copies that differ, found on one rank and raised on all."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.debug import assert_replicated

RANK, COUNT = spmd.process_index(), spmd.process_count()


def step(x: Any) -> Any:
    return lax.psum(snp.log(x), "i") * x


def nan_on_one_rank() -> None:
    with spmd.config.override("debug_nans", True):
        spmd.pmap(step, axis_name="i")(np.full((1, 2), -1.0 if RANK == 1 else 1.0, np.float32))


def copies_of_ranks() -> None:
    assert_replicated({"w": np.ones(3), "b": np.full(2, 1.5 if RANK == COUNT - 1 else 1.0)})


def copies_on_devices() -> None:
    """No fault: the rows of a sum, here and on the other ranks."""
    total = spmd.pmap(lambda x: lax.psum(x, "i"), axis_name="i")
    assert_replicated(total(np.full((1, 2), RANK, np.float32)), stacked=True)


def copies_while_running() -> None:
    def f(x: Any) -> Any:
        assert_replicated({"x": x}, "i")
        return x

    spmd.pmap(f, axis_name="i")(np.full((1, 2), RANK * 0.25, np.float32))


def op_by_op() -> None:
    x = np.arange(2.0, dtype=np.float32)[None] + RANK

    def f(x: Any) -> Any:
        y = lax.psum(x * 2, "i") + lax.ppermute(
            x, "i", [(k, (k + 1) % COUNT) for k in range(COUNT)]
        )
        return lax.fori_loop(0, 3, lambda _, c: c * 0.5 + lax.pmax(c, "i"), y)

    compiled = np.asarray(spmd.pmap(f, axis_name="i")(x))
    with spmd.disable_jit():
        np.testing.assert_allclose(np.asarray(spmd.pmap(f, axis_name="i")(x)), compiled, rtol=1e-6)


CASES: tuple[Callable[[], None], ...] = (
    nan_on_one_rank,
    copies_of_ranks,
    copies_on_devices,
    copies_while_running,
    op_by_op,
)

if __name__ == "__main__":
    for case in CASES:
        try:
            case()
            said = "fine"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        print(json.dumps([RANK, case.__name__, said]), flush=True)
