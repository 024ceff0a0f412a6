"""Copies between the memories of GPUs of one process: parts of arrays, which no host sees.

The one idea: a rectangle of a row-major array is rows of bytes at equal distances, or few groups of
such rows. Each group is one copy, in the target's stream for copies to its memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from spmd.base.device import Device
from spmd.base.record import record
from spmd.compile.cuda.driver import driver
from spmd.compile.executable.cuda_backend import CudaMemory, arrived, keep_while_read, number_of
from spmd.core.aval import ShapedArray
from spmd.sharding.array import Array, from_memory
from spmd.sharding.named import SingleDeviceSharding


@record
class Piece:
    """A rectangle of an array of one GPU: at `start` there, and at `place` in the new array."""

    source: Array
    start: tuple[int, ...]
    place: tuple[int, ...]
    sizes: tuple[int, ...]


def gathered(pieces: Sequence[Piece], aval: ShapedArray, device: Device) -> Array:
    """An array of a GPU, made of rectangles of arrays of other GPUs or the same; zeros elsewhere.

    The pieces do not overlap. Programs that use the array wait for the copies, the host doesn't.
    """
    owners = [piece.source.owner for piece in pieces]
    gpu, number = driver(), number_of(device)
    stream = gpu.upload_stream(number)
    memory = CudaMemory(gpu, number, aval.nbytes, stream=stream)
    if aval.nbytes > sum(math.prod(piece.sizes) for piece in pieces) * aval.dtype.itemsize:
        gpu.clear(number, memory.address, aval.nbytes, stream)
    for piece, owner in zip(pieces, owners, strict=True):
        owner.precede(number, stream)
        for to, step, at, source_step, nbytes, rows in _rows(piece, aval):
            to, at = memory.address + to, owner.address + at
            if rows == 1:
                gpu.copy(number, to, at, nbytes, stream)
            else:
                gpu.copy_rows(number, to, step, at, source_step, nbytes, rows, stream)
        keep_while_read(owner, number, stream)
    arrived(memory)
    return from_memory(0, memory, aval, SingleDeviceSharding(device))


def _rows(piece: Piece, aval: ShapedArray) -> Iterator[tuple[int, int, int, int, int, int]]:
    """The rows of a piece: the target's first byte and step, the source's, and size and count."""
    sizes, nbytes = piece.sizes, aval.dtype.itemsize
    to, source = _strides(aval.shape, nbytes), _strides(piece.source.shape, nbytes)
    whole = [n == a == b for n, a, b in zip(sizes, aval.shape, piece.source.shape, strict=True)]
    outer = len(sizes)
    while outer:  # dims that are one run of bytes in both
        outer -= 1
        nbytes *= sizes[outer]
        if not whole[outer]:
            break
    rows, steps = 1, (0, 0)
    if outer:
        outer -= 1
        rows, steps = sizes[outer], (to[outer], source[outer])
        while outer and whole[outer]:  # dims whose rows are at the same distance
            outer -= 1
            rows *= sizes[outer]
    for index in itertools.product(*map(range, sizes[:outer])):
        index = (*index, *[0] * (len(sizes) - outer))
        first = [
            sum((a + k) * step for a, k, step in zip(start, index, strides, strict=True))
            for start, strides in ((piece.place, to), (piece.start, source))
        ]
        yield first[0], steps[0], first[1], steps[1], nbytes, rows


def _strides(shape: Sequence[int], itemsize: int) -> list[int]:
    return [itemsize * math.prod(shape[d + 1 :]) for d in range(len(shape))]
