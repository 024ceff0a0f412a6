"""Checkpoints of the former format, which are read but no longer written: one .npz file each."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.checkpoints.leaves import dtype_named
from spmd.checkpoints.parts import Box

_FORMAT = 1
_MANIFEST = "manifest"


class SingleFile:
    """A checkpoint in one file, read whole: `leaves` says what there is, `digest` stands for it."""

    def __init__(self, path: Path):
        """Raises OSError if there is none, and other errors if it is damaged."""
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            text = str(file[_MANIFEST])
            manifest = json.loads(text)
            if manifest["format"] != _FORMAT:
                raise ValueError(f"format {manifest['format']}; a file of this kind has {_FORMAT}")
            self.leaves: list[dict[str, Any]] = manifest["leaves"]
            arrays = [file[f"leaf_{k:05d}"] for k in range(len(self.leaves))]
        for said, array in zip(self.leaves, arrays, strict=True):
            if hashlib.sha256(array.tobytes()).hexdigest() != said["digest"]:
                raise ValueError(f"{said['path'] or 'the value'} is not what was written")
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        self._arrays = [_as_said(a, s["dtype"]) for a, s in zip(arrays, self.leaves, strict=True)]

    def read(self, k: int, wanted: Box) -> np.ndarray:
        """Some elements of a leaf."""
        return self._arrays[k][tuple(slice(start, stop) for start, stop in wanted)]


def _as_said(array: np.ndarray, name: str) -> np.ndarray:
    """An array as its leaf was: the file has words for keys, and bits for bfloat16."""
    dtype = dtype_named(name)
    return array.view(dtype)[..., 0] if dtypes.is_key(dtype) else array.view(dtype)
