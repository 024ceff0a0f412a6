"""The arrays that are alive as a profile of memory, in the format of `pprof`.

A profile is a protocol buffer: fields of a number and a value each. There are few kinds here, and
they are written by hand.
"""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Sequence

from spmd.api.inspect import live_arrays
from spmd.base import dtypes

# The numbers of the fields of `profile.proto`.
_SAMPLE_TYPE, _SAMPLE, _LOCATION, _FUNCTION, _STRING = 1, 2, 4, 5, 6
_ID, _NAME, _LINE_OF_LOCATION, _FUNCTION_OF_LINE = 1, 2, 4, 1
_TYPE, _UNIT = 1, 2
_LOCATIONS_OF_SAMPLE, _VALUES_OF_SAMPLE = 1, 2


def profile() -> bytes:
    """Count the arrays that are alive, and their bytes, by device, dtype and shape."""
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for array in live_arrays():
        for shard in array.addressable_shards:
            piece = shard.data
            text = f"{dtypes.short_name(piece.dtype)}[{','.join(map(str, piece.shape))}]"
            where = str(shard.device), text
            counts[where] += 1
            sizes[where] += piece.nbytes
    names = sorted({name for where in counts for name in where})
    texts = ["", "allocations", "count", "space", "bytes", *names]
    out = [
        _message(_SAMPLE_TYPE, _number(_TYPE, 1), _number(_UNIT, 2)),
        _message(_SAMPLE_TYPE, _number(_TYPE, 3), _number(_UNIT, 4)),
    ]
    for where in sorted(counts):
        # The innermost place comes first: an array, of a device.
        stack = [names.index(name) + 1 for name in reversed(where)]
        values = _numbers(_VALUES_OF_SAMPLE, [counts[where], sizes[where]])
        out.append(_message(_SAMPLE, _numbers(_LOCATIONS_OF_SAMPLE, stack), values))
    for k, name in enumerate(names, 1):
        line = _message(_LINE_OF_LOCATION, _number(_FUNCTION_OF_LINE, k))
        out.append(_message(_LOCATION, _number(_ID, k), line))
        out.append(_message(_FUNCTION, _number(_ID, k), _number(_NAME, texts.index(name, 5))))
    out += [_field(_STRING, text.encode()) for text in texts]
    return gzip.compress(b"".join(out), mtime=0)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _field(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _message(field: int, *parts: bytes) -> bytes:
    return _field(field, b"".join(parts))


def _numbers(field: int, values: Sequence[int]) -> bytes:
    return _field(field, b"".join(map(_varint, values)))
