"""The folder of a run's checkpoints: one folder a step, which gets its name when it is whole.

    step-00000012/manifest.json                   each leaf: path, dtype, shape, parts, digests
    step-00000012/process-00000.safetensors       the parts that process 0 wrote

A step is written under a hidden name and renamed. A folder that is in the way (the same step,
saved before) gets another hidden name meanwhile, under which it is still found. `step-00000012.npz`
is a checkpoint of the former format.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spmd.checkpoints.leaves import dtype_named
from spmd.checkpoints.parts import Box, PartsFile, overlap, volume
from spmd.checkpoints.single_file import SingleFile

FORMAT = 2
_MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d+)(\.npz)?|\.step-(\d+)\.before")


def steps(folder: Path) -> list[int]:
    """The steps of a folder's checkpoints, the newest first."""
    return sorted(_paths(folder), reverse=True)


def path_of(folder: Path, step: int) -> Path:
    """The checkpoint of a step."""
    return _paths(folder).get(step, folder / _name(step))


def _paths(folder: Path) -> dict[int, Path]:
    found: dict[int, Path] = {}
    # Hidden names come first, so that a step that has its name is not taken for them.
    for path in sorted(folder.glob("*step-*")) if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and (path.is_dir() or match[2]):
            found[int(match[1] or match[3])] = path
    return found


def _name(step: int) -> str:
    return f"step-{step:08d}"


# ---- writing -------------------------------------------------------------------------------------


def begin(folder: Path, step: int) -> Path:
    """Make the hidden folder in which a step is written; what was left of others goes."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".step-*.tmp"):
        _remove(left)  # of a job that was killed while it wrote
    hidden = hidden_path(folder, step)
    hidden.mkdir()
    return hidden


def hidden_path(folder: Path, step: int) -> Path:
    """The hidden folder in which a step is written."""
    return folder / f".{_name(step)}.tmp"


def publish(folder: Path, step: int, leaves: list[Any], files: list[Any], keep: int) -> None:
    """Give a written step its name; of older ones the newest stay, `keep` in all."""
    hidden, target = hidden_path(folder, step), folder / _name(step)
    _check_seen(hidden, files)
    content = {"format": FORMAT, "step": step, "leaves": leaves, "files": files}
    with open(hidden / _MANIFEST, "w", encoding="utf-8") as file:
        json.dump({"sha256": _digest_of(content), "checkpoint": content}, file)
        file.flush()
        os.fsync(file.fileno())
    _sync(hidden)
    before = folder / f".{_name(step)}.before"
    if target.exists():
        _remove(before)
        os.replace(target, before)
    os.replace(hidden, target)
    _sync(folder)
    _remove(before)
    (folder / f"{_name(step)}.npz").unlink(missing_ok=True)
    for old in steps(folder)[keep:]:
        path = path_of(folder, old)
        gone = hidden_path(folder, old)
        os.replace(path, gone)  # half of it must not be taken for a checkpoint
        _remove(gone)


def _check_seen(hidden: Path, files: list[Any]) -> None:
    """Raise OSError unless this process sees what all have written."""
    for rank, file in enumerate(files):
        path = hidden / file["name"]
        if not path.exists() or path.stat().st_size != file["size"]:
            raise OSError(
                f"{path}, which process {rank} wrote, is not seen by process 0: arrays that have "
                "shards on several hosts need a folder that these share"
            )


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Make the names in a folder survive a crash of the host."""
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _digest_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# ---- reading -------------------------------------------------------------------------------------


class Step:
    """A checkpoint that is read: `leaves` says what there is, `digest` stands for all of it."""

    def __init__(self, path: Path):
        """Raises OSError if there is none, and other errors if it is damaged."""
        text = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        content = text["checkpoint"]
        self.digest = _digest_of(content)
        if self.digest != text["sha256"]:
            raise ValueError(f"{_MANIFEST} is not what was written")
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}; this version reads {FORMAT} and older")
        self.leaves: list[dict[str, Any]] = content["leaves"]
        self._path = path
        self._files: list[dict[str, Any]] = content["files"]
        self._open: dict[int, PartsFile] = {}

    def read(self, k: int, wanted: Box) -> np.ndarray:
        """Some elements of a leaf: a view of the file where one part has them.

        Raises ValueError if they are not what was written, and OSError if a file is missing.
        """
        said = self.leaves[k]
        dtype = dtype_named(said["dtype"])
        parts = [(part, tuple((a, b) for a, b in part["box"])) for part in said["parts"]]
        found = [(part, box, overlap(box, wanted)) for part, box in parts]
        held = [(part, box, common) for part, box, common in found if common is not None]
        if sum(volume(common) for _, _, common in held) != volume(wanted):
            raise ValueError(f"{said['path'] or 'the value'} is not whole")
        pieces = [(common, self._read(part, box, dtype, common)) for part, box, common in held]
        if len(pieces) == 1 and pieces[0][0] == wanted:
            return pieces[0][1]
        return joined(pieces, wanted, dtype)

    def _read(self, part: dict[str, Any], box: Box, dtype: np.dtype, wanted: Box) -> np.ndarray:
        number = part["file"]
        if number not in self._open:
            self._open[number] = PartsFile(self._path, self._files[number])
        row = self._files[number]["parts"][part["number"]]
        return self._open[number].read(row, box, dtype, wanted)


def joined(pieces: Sequence[tuple[Box, np.ndarray]], box: Box, dtype: np.dtype) -> np.ndarray:
    """A rectangle of which these are the pieces."""
    out = np.empty([stop - start for start, stop in box], dtype)
    for place, values in pieces:
        spans = zip(place, box, strict=True)
        out[tuple(slice(a - start, b - start) for (a, b), (start, _) in spans)] = values
    return out


def open_step(folder: Path, step: int) -> Step | SingleFile:
    """The checkpoint of a step. Raises OSError if there is none."""
    path = path_of(folder, step)
    return SingleFile(path) if path.suffix == ".npz" else Step(path)
