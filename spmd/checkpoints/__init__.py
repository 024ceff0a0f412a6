"""Checkpoints of a training run: a pytree on disk, written so that it is whole or not there.

`save` writes a folder under a hidden name, makes the disk have it, and renames it: a job that is
killed at any moment leaves the former checkpoint untouched. Of an array over the devices of several
processes each writes the shards that it is the first to hold, and each reads what its own devices
need, checked against digests. `restore` falls back to the step before where the newest is damaged.

Not to be confused with `spmd.checkpoint`, JAX's name for rematerialisation.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from spmd import tree_util
from spmd.base.errors import ArgumentError, CollectiveError
from spmd.base.source import current_source
from spmd.checkpoints.folder import (
    Step,
    begin,
    hidden_path,
    open_step,
    path_of,
    publish,
    steps,
)
from spmd.checkpoints.leaves import (
    box_of,
    check_fit,
    check_leaf,
    dtype_named,
    is_spread,
    made_like,
    parts_of,
    text_of,
)
from spmd.checkpoints.parts import Box, write_parts
from spmd.checkpoints.single_file import SingleFile
from spmd.transport import world as bootstrap
from spmd.transport.call_signature import ranks_text
from spmd.transport.origin import Origin

__all__ = ["latest_step", "restore", "save"]

T = TypeVar("T")


def save(folder: str | os.PathLike, step: int, tree: Any, *, keep: int = 2) -> None:
    """Write a pytree as the checkpoint of a step; the newest `keep` stay in the folder.

    Leaves are arrays (of any dtype, typed keys too) and Python numbers. Of an array with shards on
    other processes each process writes those that it is the first to hold, so **every process must
    call it**, and hosts must share the folder. All other leaves are whole on each process, and
    process 0 writes them: if there are no others, the rest return at once, and need not call. It
    takes the time of the disk: files and folders are synced.

    Raises `ArgumentError` that names the leaf if it cannot be saved, `CollectiveError` if processes
    save different leaves or steps, and `OSError` on every process if one cannot write.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> save(folder, 3, {"w": np.arange(4.0), "epoch": 1})
    >>> restore(folder, like={"w": np.zeros(4), "epoch": 0})
    (3, {'epoch': 1, 'w': array([0., 1., 2., 3.])})
    """
    if step < 0 or keep < 1:
        raise ArgumentError(
            f"{current_source()}: checkpoints.save: step={step}, keep={keep}; they start at 0 and 1"
        )
    rank = bootstrap.process_index()
    pairs = [(tree_util.keystr(p), x) for p, x in tree_util.tree_flatten_with_path(tree)[0]]
    spread = any(is_spread(leaf) for _, leaf in pairs)
    if rank and not spread:
        return
    leaves = [check_leaf(name, leaf) for name, leaf in pairs]
    target, everyone = Path(folder), _Everyone(spread)
    texts = [text_of(said, is_spread(x)) for said, (_, x) in zip(leaves, pairs, strict=True)]
    everyone.agree([f"step {step}", *texts])
    everyone.do(lambda: begin(target, step) if rank == 0 else None)

    def write() -> tuple[dict[str, Any], list[tuple[int, Box]]]:
        """This process's file, and of which leaf each of its parts is, and which."""
        parts = [(k, part) for k, (name, x) in enumerate(pairs) for part in parts_of(name, x, rank)]
        path = hidden_path(target, step) / f"process-{rank:05d}.safetensors"
        about = {"writer": "spmd.checkpoints", "step": str(step), "process": str(rank)}
        file = write_parts(path, [part for _, part in parts], about)
        return file, [(k, part.box) for k, part in parts]

    written = everyone.do(write)
    if rank == 0:
        for said in leaves:
            said["parts"] = []
        for number, (_, parts) in enumerate(written):
            for place, (k, box) in enumerate(parts):
                leaves[k]["parts"].append({"file": number, "number": place, "box": box})
    files = [file for file, _ in written]
    everyone.do(lambda: publish(target, step, leaves, files, keep) if rank == 0 else None)


class _Everyone:
    """All processes that take part in a save: this one alone, or all."""

    def __init__(self, spread: bool):
        self._world = bootstrap.world() if spread else None

    def agree(self, texts: list[str]) -> None:
        """Raise, on all processes alike, unless they save the same: the step, then the leaves."""
        if self._world is None:
            return
        told = self._world.all_gather_object(texts, Origin("checkpoints.save"))
        for row in itertools.zip_longest(*told, fillvalue="no further leaf"):
            sides = {text: [k for k, x in enumerate(row) if x == text] for text in row}
            if len(sides) > 1:
                lines = [f"  {ranks_text(ranks)}: {text}" for text, ranks in sides.items()]
                raise CollectiveError(
                    "\n".join(["checkpoints.save: ranks save different checkpoints:", *lines])
                    + "\nEvery rank must save the same tree under the same step."
                )

    def do(self, work: Callable[[], T]) -> list[T]:
        """Do this process's part; the results of all. Raises OSError if one could not do it."""
        if self._world is None:
            return [work()]
        found, failure = None, None
        try:
            found = work()
        except OSError as error:
            failure = error
        told = self._world.all_gather_object(
            (found, None if failure is None else str(failure)), Origin("checkpoints.save")
        )
        if failure is not None:
            raise failure
        for rank, (_, text) in enumerate(told):
            if text is not None:
                raise OSError(f"checkpoints.save: process {rank} could not write: {text}")
        return [result for result, _ in told]


def restore(
    folder: str | os.PathLike, like: Any, *, step: int | None = None
) -> tuple[int, Any] | None:
    """The newest whole checkpoint of a folder (or that of `step`) as `(step, tree)`, or None.

    `like` gives the structure, and what each leaf becomes: an array laid out as that of `like`,
    over any mesh and any number of processes, a NumPy array, a Python number. A `ShapeDtypeStruct`
    stands for an array with its `sharding`. Shapes and dtypes must agree, else `ArgumentError`
    names the leaf; `ShardingError` does where a target cannot be split so. **Every process must
    call it**, at the same place. Each reads the elements that its own devices need; on hosts that
    do not share the folder they get them from process 0.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> save(folder, 1, np.arange(8.0, dtype=np.float32))
    >>> rows = spmd.NamedSharding(spmd.make_mesh((4,), ("x",)), spmd.P("x"))
    >>> step, x = restore(folder, spmd.ShapeDtypeStruct((8,), np.float32, sharding=rows))
    >>> x.addressable_shards[3].data
    Array([6., 7.], dtype=float32)
    """
    world, place = bootstrap.world(), Path(folder)
    paths, structure = tree_util.tree_flatten_with_path(like)
    wanted = [(tree_util.keystr(path), leaf) for path, leaf in paths]
    numbers = [n for n in steps(place) if step in (None, n)] if world.rank == 0 else []
    for number in world.all_gather_object(numbers, Origin("checkpoints.restore"))[0]:
        leaves = _restored(place, number, wanted)
        if leaves is not None:
            return number, tree_util.tree_unflatten(structure, leaves)
    return None


def _restored(folder: Path, step: int, wanted: list[tuple[str, Any]]) -> list[Any] | None:
    """The leaves of a checkpoint; None on all processes if one finds it damaged."""
    world = bootstrap.world()
    opened, state = _tried(folder, step, lambda: open_step(folder, step))
    own = (opened.leaves if world.rank == 0 else None, opened.digest) if opened else (None, None)
    told = world.all_gather_object(own, Origin("checkpoints.restore"))
    said, digest = told[0]
    if said is None:
        return None  # which process 0 has said
    check_fit(step, said, wanted)
    made = None
    if opened is not None and opened.digest == digest:
        made, state = _tried(folder, step, lambda: _read_all(opened, wanted))
    elif state == "whole":
        state = "absent"  # another folder, with a checkpoint of its own
    states = world.all_gather_object(state, Origin("checkpoints.restore"))
    if all(state == "whole" for state in states):
        return made
    if states[0] != "whole" or "damaged" in states:
        return None
    return _sent(folder, step, opened, said, wanted)


def _tried(folder: Path, step: int, work: Callable[[], T]) -> tuple[T | None, str]:
    """The checkpoint that was read, and "whole", "absent" or "damaged", of which stderr tells."""
    try:
        return work(), "whole"
    except FileNotFoundError as error:
        found, why = "absent", error
    except Exception as error:  # zipfile and json have many words for damage
        found, why = "damaged", error
    if found == "damaged" or bootstrap.process_index() == 0:
        sys.stderr.write(f"spmd: {path_of(folder, step)} is damaged, not used: {why}\n")
    return None, found


def _read_all(opened: Step | SingleFile, wanted: list[tuple[str, Any]]) -> list[Any]:
    """The leaves, as far as this process needs them, of the kinds that are wanted."""
    return [
        made_like(said, leaf, lambda box, k=k: opened.read(k, box))
        for k, (said, (_, leaf)) in enumerate(zip(opened.leaves, wanted, strict=True))
    ]


def _sent(
    folder: Path, step: int, opened: Any, said: list[dict[str, Any]], wanted: list[tuple[str, Any]]
) -> list[Any] | None:
    """The leaves, which process 0 alone can read and sends to all; None if it finds damage."""
    world, made = bootstrap.world(), []
    for k, (row, (_, leaf)) in enumerate(zip(said, wanted, strict=True)):
        shape, dtype = tuple(row["shape"]), dtype_named(row["dtype"])
        value, state = np.empty(shape, dtype), "whole"
        if world.rank == 0:
            box = box_of((), shape)
            found, state = _tried(folder, step, lambda k=k, box=box: opened.read(k, box))
            value = value if found is None else np.array(found)
        if world.all_gather_object(state, Origin("checkpoints.restore"))[0] != "whole":
            return None
        if value.nbytes:
            world.broadcast(value.reshape(-1).view(np.uint8), 0)
        made.append(made_like(row, leaf, lambda box, v=value: v[tuple(slice(*s) for s in box)]))
    return made


def latest_step(folder: str | os.PathLike) -> int | None:
    """The step of the newest checkpoint in a folder, as process 0 sees it, or None.

    **Every process must call it.** It looks at names only: `restore` may find the checkpoint
    damaged and fall back to the one before.
    """
    world = bootstrap.world()
    found = steps(Path(folder)) if world.rank == 0 else []
    return world.all_gather_object(found[0] if found else None)[0]
