"""Random bits in kernels: threefry2x32 and the mixing of its words.

A key travels as one 64-bit word whose low half is the first word. The rounds are 32-bit additions,
rotations and exclusive ors, so a kernel draws as many numbers at once as its vectors have lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd.compile.kernel.builder import Builder


def _words(b: Builder, key: int) -> tuple[int, int]:
    """The two words of a key."""
    high = b.op("shr_logical", key, b.const(32, "u64"))
    return b.convert(key, "u32"), b.convert(high, "u32")


def threefry2x32(b: Builder, xs: Sequence[int], params: dict[str, Any], out: str) -> int:
    """One operation of kernels: renderers write its rounds as a loop."""
    return b.op("threefry2x32", *_words(b, xs[0]), *xs[1:])


def key_bits(b: Builder, xs: Sequence[int], params: dict[str, Any], out: str) -> int:
    """Both words, the first one high, for 64 bits; else their exclusive or."""
    first, second = _words(b, xs[0])
    if out == "u64":
        high = b.op("shl", b.convert(first, "u64"), b.const(32, "u64"))
        return b.op("or", high, b.convert(second, "u64"))
    return b.convert(b.op("xor", first, second), out)


RANDOM_ENTRIES = {"threefry2x32": threefry2x32, "key_bits": key_bits}
