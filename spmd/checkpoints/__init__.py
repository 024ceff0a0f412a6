"""Checkpoints of a training run: a pytree in one file, written so that it is whole or not there.

`save` writes to a temporary file beside the target, makes the disk have it, and renames it: a job
that is killed at any moment leaves the former checkpoint untouched. `restore` checks every array
against its digest, and falls back to the one before where the newest is damaged. Process 0 writes
and reads; the others get everything from it, so the folder need not be shared between hosts.

Not to be confused with `spmd.checkpoint`, JAX's name for rematerialisation.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from spmd import numpy as snp
from spmd import random, tree_util
from spmd.base import dtypes
from spmd.base.errors import ArgumentError
from spmd.numpy.array_type import Array
from spmd.transport import world as bootstrap

__all__ = ["latest_step", "restore", "save"]

FORMAT = 1
_NAME = re.compile(r"step-(\d+)\.npz")
_MANIFEST = "manifest"


def save(folder: str | os.PathLike, step: int, tree: Any, *, keep: int = 2) -> None:
    """Write a pytree as the checkpoint of a step; the newest `keep` stay in the folder.

    Leaves are arrays (of any dtype, typed keys too) and Python numbers, whole on every process: of
    a value that `pmap` keeps one a device, save one (`tree.map(lambda a: a[0], state)`). **Only
    process 0 writes**; the others return at once, and may call or not. It takes the time of the
    disk: the file and its folder are synced.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> save(folder, 3, {"w": np.arange(4.0), "epoch": 1})
    >>> restore(folder, like={"w": np.zeros(4), "epoch": 0})
    (3, {'epoch': 1, 'w': array([0., 1., 2., 3.])})
    """
    if step < 0 or keep < 1:
        raise ArgumentError(f"checkpoints.save: step={step}, keep={keep}; they start at 0 and 1")
    if bootstrap.process_index():
        return
    leaves, manifest = [], []
    for path, leaf in tree_util.tree_flatten_with_path(tree)[0]:
        name = tree_util.keystr(path)
        array, dtype = _as_plain(name, leaf)
        leaves.append(array)
        manifest.append(
            {"path": name, "dtype": dtype, "shape": np.shape(leaf), "digest": _digest(array)}
        )
    text = json.dumps({"format": FORMAT, "step": step, "leaves": manifest})
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    arrays = {_member(k): leaf for k, leaf in enumerate(leaves)}
    _write(target / f"step-{step:08d}.npz", {_MANIFEST: np.array(text), **arrays})
    for old in _steps(target)[keep:]:
        _path(target, old).unlink(missing_ok=True)


def restore(
    folder: str | os.PathLike, like: Any, *, step: int | None = None
) -> tuple[int, Any] | None:
    """The newest whole checkpoint of a folder (or that of `step`) as `(step, tree)`, or None.

    `like` gives the structure, and what each leaf becomes: an `spmd` array, a NumPy array, a Python
    number. Shapes and dtypes must agree, else `ArgumentError` names the leaf. **Every process must
    call it**, at the same place: process 0 reads, the others get the values from it.
    """
    world = bootstrap.world()
    found = _find(Path(folder), step) if world.rank == 0 else None
    agreed = world.all_gather_object(found and (found[0], found[1]))[0]
    if agreed is None:
        return None
    number, manifest = agreed
    paths, structure = tree_util.tree_flatten_with_path(like)
    _check(number, manifest, [(tree_util.keystr(path), leaf) for path, leaf in paths])
    leaves = []
    for k, (_, leaf) in enumerate(paths):
        if found is not None:
            array = np.asarray(found[2][k], order="C")
        else:
            array = np.empty(*_plain_kind(manifest[k]))
        world.broadcast(array, 0)
        leaves.append(_like(array, manifest[k]["dtype"], leaf))
    return number, tree_util.tree_unflatten(structure, leaves)


def latest_step(folder: str | os.PathLike) -> int | None:
    """The step of the newest checkpoint in a folder, as process 0 sees it, or None.

    **Every process must call it.** It looks at names only: `restore` may find the file damaged and
    fall back to the one before.
    """
    world = bootstrap.world()
    steps = _steps(Path(folder)) if world.rank == 0 else []
    return world.all_gather_object(steps[0] if steps else None)[0]


# ---- files ---------------------------------------------------------------------------------------


def _steps(folder: Path) -> list[int]:
    """The steps of a folder's checkpoints, the newest first."""
    names = [_NAME.fullmatch(path.name) for path in folder.glob("step-*.npz")]
    return sorted((int(match[1]) for match in names if match), reverse=True)


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.npz"


def _member(k: int) -> str:
    return f"leaf_{k:05d}"


def _write(target: Path, members: dict[str, np.ndarray]) -> None:
    """Write an .npz file that is whole as soon as it has its name."""
    for left in target.parent.glob(".step-*.tmp"):
        left.unlink(missing_ok=True)  # of a job that was killed while it wrote
    temporary = target.with_name(f".{target.stem}.tmp")
    with open(temporary, "wb") as file:
        np.savez(file, allow_pickle=False, **members)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, target)
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the new name, too, survives a crash of the host
    finally:
        os.close(directory)


def _find(
    folder: Path, wanted: int | None
) -> tuple[int, list[dict[str, Any]], list[np.ndarray]] | None:
    """The newest checkpoint that is whole: its step, its manifest, its arrays."""
    for step in _steps(folder):
        if wanted in (None, step):
            try:
                return step, *_read(_path(folder, step))
            except Exception as error:  # zipfile and json have many words for damage
                sys.stderr.write(f"spmd: {_path(folder, step)} is damaged, not used: {error}\n")
    return None


def _read(path: Path) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
    with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
        manifest = json.loads(str(file[_MANIFEST]))
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']}; this version reads {FORMAT}")
        leaves = manifest["leaves"]
        arrays = [file[_member(k)] for k in range(len(leaves))]
    for said, array in zip(leaves, arrays, strict=True):
        if _digest(array) != said["digest"]:
            raise ValueError(f"{said['path'] or 'the value'} is not what was written")
    return leaves, arrays


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


# ---- leaves --------------------------------------------------------------------------------------


def _as_plain(name: str, leaf: Any) -> tuple[np.ndarray, str]:
    """A leaf as an array that NumPy's format knows, and the dtype that it stands for."""
    if isinstance(leaf, Array) and dtypes.is_key(leaf.dtype):
        return np.asarray(random.key_data(leaf)), "key"
    try:
        array = np.asarray(leaf)
    except Exception as error:
        raise ArgumentError(f"checkpoints.save: tree{name} has no values here: {error}") from error
    if array.dtype.hasobject:
        raise ArgumentError(
            f"checkpoints.save: tree{name} is {type(leaf).__name__}; leaves are arrays and numbers"
        )
    if array.dtype.isbuiltin != 1:  # NumPy would forget what bfloat16 is
        return array.view(np.dtype(f"u{array.itemsize}")), array.dtype.name
    return array, array.dtype.name


def _plain_kind(said: dict[str, Any]) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of the array that stands in the file for a leaf."""
    shape, name = tuple(said["shape"]), said["dtype"]
    if name == "key":
        return (*shape, 2), np.dtype(np.uint32)
    dtype = np.dtype(name)
    return shape, dtype if dtype.isbuiltin == 1 else np.dtype(f"u{dtype.itemsize}")


def _like(array: np.ndarray, name: str, leaf: Any) -> Any:
    """The value of a leaf, of the kind that the template has there."""
    if name == "key":
        return random.wrap_key_data(snp.asarray(array))
    array = array.view(np.dtype(name))
    if isinstance(leaf, bool | int | float | complex):
        return type(leaf)(array.item())
    if isinstance(leaf, np.ndarray | np.generic):
        return array
    return snp.asarray(array)


def _check(step: int, manifest: list[dict[str, Any]], leaves: list[tuple[str, Any]]) -> None:
    """Raise unless the checkpoint fits the template; the same on every process."""
    there, here = [said["path"] for said in manifest], [name for name, _ in leaves]
    if there != here:
        missing = [f"tree{name}" for name in here if name not in there][:3]
        extra = [f"tree{name}" for name in there if name not in here][:3]
        raise ArgumentError(
            f"checkpoints.restore: the checkpoint of step {step} has another structure than like: "
            f"it lacks {', '.join(missing) or 'nothing'}, and has {', '.join(extra) or 'nothing'} "
            "besides"
        )
    for said, (name, leaf) in zip(manifest, leaves, strict=True):
        is_number = isinstance(leaf, bool | int | float | complex)
        is_key = not is_number and dtypes.is_key(leaf.dtype)
        wanted = (said["dtype"], tuple(said["shape"]))
        given = said["dtype"] if is_number else "key" if is_key else np.dtype(leaf.dtype).name
        if (given, np.shape(leaf)) != wanted:
            raise ArgumentError(
                f"checkpoints.restore: tree{name} is {wanted[0]}{list(wanted[1])} in the "
                f"checkpoint of step {step}, and {given}{list(np.shape(leaf))} in like"
            )
