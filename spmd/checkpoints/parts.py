"""A file of parts of arrays, in the layout of safetensors, with a digest for each of its blocks.

The file is eight bytes with the header's length, the header, JSON that names each part, its dtype,
shape and place, and the parts' bytes one after the other. Other programs read it by that. This
module also notes where each part starts and the digests of its blocks. So a reader can map the file
into memory and check no more of it than it uses.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spmd.base.dtypes import is_key
from spmd.base.record import record

# The start and stop of a part along each dim of its array.
Box = tuple[tuple[int, int], ...]

BLOCK = 4 * 2**20
_ALIGNMENT = 64
_NAMES = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    **{f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("int", "uint") for bits in (8, 16)},
    **{f"{k}{b}": f"{k[0].upper()}{b}" for k in ("int", "uint", "float") for b in (32, 64)},
    "float16": "F16",
}


@record(eq=False)
class Part:
    """A rectangle of an array, and its values."""

    name: str
    box: Box
    value: np.ndarray


def write_parts(path: Path, parts: Sequence[Part], about: dict[str, str]) -> dict[str, Any]:
    """Write a file of parts that the disk has when this returns; what a reader needs to know of it.

    `about` goes into the header's metadata. The result has the file's name, the digest of its head
    and, for each part in the order given, its start and the digests of its blocks.
    """
    # Wide elements first, so that each part is aligned as its dtype wants.
    order = sorted(range(len(parts)), key=lambda k: -parts[k].value.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": about}
    at, starts = 0, [0] * len(parts)
    for k in order:
        value = parts[k].value
        starts[k] = at
        name, shape = _kind(value)
        offsets = [at, at + value.nbytes]
        header[parts[k].name] = {"dtype": name, "shape": shape, "data_offsets": offsets}
        at += value.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    rows: list[Any] = [None] * len(parts)
    with open(path, "wb") as file:
        file.write(head)
        for k in order:
            data = as_bytes(parts[k].value)
            file.write(data.data)
            digests = [digest_of_bytes(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
            rows[k] = {"start": len(head) + starts[k], "nbytes": len(data), "digests": digests}
        file.flush()
        os.fsync(file.fileno())
    return {"name": path.name, "size": len(head) + at, "head": digest_of_bytes(head), "parts": rows}


def _kind(value: np.ndarray) -> tuple[str, list[int]]:
    """The dtype's name in the header, and the shape: elements that it doesn't know are bytes."""
    if is_key(value.dtype):
        return "U32", [*value.shape, value.itemsize // 4]
    name = _NAMES.get(value.dtype.name)
    return ("U8", [*value.shape, value.dtype.itemsize]) if name is None else (name, [*value.shape])


def as_bytes(value: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def digest_of_bytes(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()


class PartsFile:
    """A file of parts that is mapped into memory; reading checks the blocks that it touches."""

    def __init__(self, folder: Path, about: dict[str, Any]):
        """Raises OSError if the file is not there, and ValueError if it is another."""
        self.path = folder / about["name"]
        self._memory = np.memmap(self.path, np.uint8, "r")
        if self._memory.size != about["size"]:
            raise ValueError(f"{about['name']} has {self._memory.size} bytes of {about['size']}")
        head = 8 + int.from_bytes(self._memory[:8].tobytes(), "little")
        if digest_of_bytes(self._memory[:head]) != about["head"]:
            raise ValueError(f"the head of {about['name']} is not what was written")
        self._checked: set[int] = set()  # where the blocks start that are as they were written

    def read(self, row: dict[str, Any], part: Box, dtype: np.dtype, wanted: Box) -> np.ndarray:
        """The elements `wanted` of the array of which `part` is here, as a view of the file.

        Raises ValueError if a block that holds some of them is not what was written.
        """
        shape = [stop - start for start, stop in part]
        inside = [(a - start, b - start) for (a, b), (start, _) in zip(wanted, part, strict=True)]
        first, last = 0, 0
        for size, (a, b) in zip(shape, inside, strict=True):
            first, last = first * size + a, last * size + b - 1
        self._check(row, first * dtype.itemsize, (last + 1) * dtype.itemsize)
        data = self._memory[row["start"] : row["start"] + row["nbytes"]]
        return data.view(dtype).reshape(shape)[tuple(slice(a, b) for a, b in inside)]

    def _check(self, row: dict[str, Any], first: int, stop: int) -> None:
        """Compare the blocks that hold some bytes of a part with what was written."""
        end = row["start"] + row["nbytes"]
        for k in range(first // BLOCK, -(-stop // BLOCK)):
            at = row["start"] + k * BLOCK
            if at in self._checked:
                continue
            if digest_of_bytes(self._memory[at : min(at + BLOCK, end)]) != row["digests"][k]:
                raise ValueError(f"{self.path.name} is not what was written, from byte {at} on")
            self._checked.add(at)


def overlap(one: Box, other: Box) -> Box | None:
    """The intersection of two rectangles; None if it is empty."""
    both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True)]
    return tuple(both) if all(start < stop for start, stop in both) else None


def volume(box: Iterable[tuple[int, int]]) -> int:
    """The number of elements of a rectangle."""
    return math.prod(stop - start for start, stop in box)
