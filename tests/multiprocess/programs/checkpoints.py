"""Saving and restoring over ranks: the functions below, by name, in a folder."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

import spmd
import spmd.numpy as snp
from spmd import P, checkpoints, random
from spmd.checkpoints import parts
from spmd.errors import CollectiveError
from spmd.sharding import AxisType

X = np.arange(24 * 12, dtype=np.float32).reshape(24, 12)


def meshes() -> list[Any]:
    """One and two axes over all devices, explicit and automatic."""
    count = spmd.device_count()
    split = 2 if count % 2 == 0 else 1
    return [
        spmd.make_mesh((count // split, split), ("x", "y"), AxisType.Explicit),
        spmd.make_mesh((count,), ("rows",), AxisType.Auto),
    ]


def values(shift: float) -> dict[str, Any]:
    """What is saved, whole on each rank."""
    return {
        "w": X + shift,
        "h": snp.arange(24, dtype=snp.bfloat16) / 3 + shift,
        "keys": random.split(random.key(int(shift)), 12),
        "whole": np.arange(5.0) + shift,
        "step": int(shift),
    }


def placed(tree: dict[str, Any], mesh: Any) -> dict[str, Any]:
    """The same over a mesh: split along two dims, along one, replicated, not at all."""
    axes = mesh.axis_names
    specs = {"w": P(axes[0], axes[1] if len(axes) > 1 else None), "h": P(axes[-1]), "keys": P()}
    shardings = {name: spmd.NamedSharding(mesh, spec) for name, spec in specs.items()}
    return tree | {name: spmd.device_put(tree[name], s) for name, s in shardings.items()}


def host(x: Any) -> np.ndarray:
    """The values of an array; of keys their words."""
    is_key = snp.issubdtype(getattr(x, "dtype", np.int32), spmd.dtypes.prng_key)
    return np.asarray(random.key_data(x) if is_key else x)


def same(found: Any, want: Any, name: str) -> None:
    """Each shard that is here is that of the whole value."""
    whole = host(want)
    if not isinstance(found, spmd.Array) or found.shards is None:
        assert host(found).tobytes() == whole.tobytes(), name
        return
    for shard in found.addressable_shards:
        assert host(shard.data).tobytes() == whole[shard.index].tobytes(), (name, shard)


def check(found: dict[str, Any], shift: float, like: dict[str, Any]) -> None:
    """A restored tree has the values that were saved, laid out as the template is."""
    for name, want in values(shift).items():
        same(found[name], want, name)
        if isinstance(like[name], spmd.Array):
            assert found[name].sharding == like[name].sharding, name
            assert spmd.typeof(found[name]) is spmd.typeof(like[name]), name
    assert type(found["step"]) is int


def save(folder: str) -> None:
    """Save two steps, the first over rows."""
    first, second = meshes()
    checkpoints.save(folder, 1, placed(values(1), second))
    checkpoints.save(folder, 2, placed(values(2), first))


def restore(folder: str) -> None:
    """Restore what other ranks wrote, over each mesh of these, and whole."""
    newest = checkpoints.latest_step(folder)
    assert newest is not None
    for mesh in meshes():
        like = placed(values(0), mesh)
        step, found = checkpoints.restore(folder, like)
        assert step == newest
        check(found, newest, like)
    step, found = checkpoints.restore(folder, values(0))
    check(found, newest, values(0))
    parts.BLOCK, read = 8, 0  # too late for what is there: its digests are of whole parts
    digest = parts.digest_of_bytes

    def counted(data: Any) -> str:
        nonlocal read
        read += len(data)
        return digest(data)

    mesh = meshes()[1]
    big = {
        "x": spmd.device_put(np.zeros((240, 64), np.float32), spmd.NamedSharding(mesh, P("rows")))
    }
    parts.BLOCK = 1024
    checkpoints.save(folder, newest + 1, big, keep=3)
    parts.digest_of_bytes = counted
    checkpoints.restore(folder, big)
    parts.digest_of_bytes = digest
    own = sum(shard.data.nbytes for shard in big["x"].addressable_shards)
    assert own <= read <= own + 1024, (own, read)  # and the head of a file


def killed(folder: str) -> None:
    """The last rank dies while it writes."""
    tree = placed(values(3), meshes()[0])
    if spmd.process_index() == spmd.process_count() - 1:
        write = parts.as_bytes

        def dies(value: np.ndarray) -> np.ndarray:
            if value.dtype == np.float32:
                os.kill(os.getpid(), signal.SIGKILL)
            return write(value)

        parts.as_bytes = dies
    checkpoints.save(folder, 3, tree)


def alone(folder: str) -> None:
    """Whole values are saved by process 0, and a folder that others don't see serves them too."""
    own = folder if spmd.process_index() == 0 else f"{folder}/{spmd.process_index()}"
    if spmd.process_index() == 0:
        checkpoints.save(own, 1, values(1))
    for mesh in meshes():
        like = placed(values(0), mesh)
        step, found = checkpoints.restore(own, like)
        assert step == 1
        check(found, 1, like)
    _, found = checkpoints.restore(own, values(0))
    check(found, 1, values(0))


def apart(folder: str) -> None:
    """Arrays over ranks are not saved into folders that these don't share."""
    own = f"{folder}/{spmd.process_index()}"
    try:
        checkpoints.save(own, 1, placed(values(1), meshes()[1]))
    except OSError as error:
        told = str(error)
    else:
        raise AssertionError("saved into folders of one rank each")
    if spmd.process_index() == 0:
        assert "process 1 could not write" in told and "process-00001.safetensors" in told, told
    assert checkpoints.restore(own, values(0)) is None


def differ(folder: str) -> None:
    """Ranks that save other leaves, or under other steps, raise the same, and write nothing."""
    rank, tree = spmd.process_index(), placed(values(1), meshes()[1])
    renamed = {("v" if rank == 1 and name == "w" else name): x for name, x in tree.items()}
    for step, saved, told in (
        (3 + rank, tree, "rank 0: step 3\n  rank 1: step 4\n"),
        (
            3,
            renamed,
            "rank 0: tree['w'] (float32[24, 12])\n  rank 1: tree['v'] (float32[24, 12])\n",
        ),
        (3, tree if rank else tree | {"x": tree["w"]}, "\n  rank 1: no further leaf\n"),
    ):
        try:
            checkpoints.save(folder, step, saved)
        except CollectiveError as error:
            assert told in str(error), error
        else:
            raise AssertionError("saved what differs")


if __name__ == "__main__":
    {f.__name__: f for f in (save, restore, killed, alone, apart, differ)}[sys.argv[1]](sys.argv[2])
    assert Path(sys.argv[2]).exists()
    print(f"{sys.argv[1]} on {spmd.process_count()} ranks: all right")
