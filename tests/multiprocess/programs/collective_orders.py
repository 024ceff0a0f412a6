"""Ranks whose programs differ, one way after the other; each prints what it was told.

`python schedules.py NAME...` under mpirun, with at least two ranks. A case gets the rank and calls
what that rank calls; `fine` at the end of all says that errors left the ranks in step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import spmd
from spmd import lax
from spmd.base.errors import CollectiveError

RANK, HERE = spmd.process_index(), spmd.local_device_count()
X = np.ones((HERE, 3), np.float32)


def mapped(f: Callable[..., Any]) -> Callable[..., Any]:
    return spmd.pmap(f, axis_name="i")


total = mapped(lambda x: lax.psum(x, "i"))
double = mapped(lambda x: lax.psum(2 * x, "i"))


def another_kind() -> None:
    mapped(lambda x: lax.pmin(x, "i") if RANK == 1 else lax.pmax(x, "i"))(X)


def another_program() -> None:
    if RANK == 0:
        mapped(lambda x: lax.psum(x, "i"))(X)
    else:
        mapped(lambda x: lax.all_gather(x, "i"))(X)


def another_known_program() -> None:
    (double if RANK == 1 else total)(X)


def another_shape() -> None:
    mapped(lambda batch: lax.psum(batch["x"], "i"))({"x": X[:, : 2 + (RANK != 1)]})


def only_one_compiles() -> None:
    total(X[:, :2] if RANK == 1 else X)


def another_length() -> None:
    def f(x: Any) -> Any:
        return lax.fori_loop(0, 3 + RANK, lambda _, c: lax.psum(c, "i"), x)

    mapped(f)(X)


def one_runs_out() -> None:
    def f(x: Any) -> Any:
        x = lax.psum(x, "i")
        return x if RANK == 1 else lax.pmax(x, "i")

    mapped(f)(X)


def op_by_op() -> None:
    with spmd.disable_jit():
        another_kind()


def looked_at_on_one_rank() -> None:
    """No fault: a rank may compile what it does not run."""
    f = spmd.jit(
        spmd.shard_map(
            lambda x: lax.psum(x, "i"),
            mesh=spmd.sharding.Mesh(np.array(spmd.devices()), ("i",)),
            in_specs=spmd.sharding.PartitionSpec("i"),
            out_specs=spmd.sharding.PartitionSpec(),
        )
    )
    if RANK == 1:
        f.lower(spmd.ShapeDtypeStruct((len(spmd.devices()), 3), np.float32)).compile()


def not_communicating() -> None:
    """No fault: what needs no other rank may run on one alone."""
    if RANK == 1:
        mapped(lambda x: x * 2)(X)


def main(names: list[str]) -> None:
    total(X), double(X)
    for name in names:
        try:
            globals()[name]()
            said = "fine"
        except CollectiveError as error:
            said = str(error)
        print(json.dumps([RANK, name, said]), flush=True)
    assert np.asarray(total(X)).ravel()[0] == len(spmd.devices())
    print(json.dumps([RANK, "end", "fine"]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
