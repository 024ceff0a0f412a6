"""Random bits in kernels: threefry2x32 and the mixing of its words.

A key travels as one 64-bit word whose low half is the first word. The rounds are 32-bit additions,
rotations and exclusive ors, so a kernel draws as many numbers at once as its vectors have lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd.compile.kernel.build import Builder
from spmd.lax.threefry import KEY_SCHEDULE, PARITY, ROTATIONS


def _words(b: Builder, key: int) -> tuple[int, int]:
    """The two words of a key."""
    high = b.op("shr_logical", key, b.const(32, "u64"))
    return b.convert(key, "u32"), b.convert(high, "u32")


def _rotated(b: Builder, x: int, by: int) -> int:
    left = b.op("shl", x, b.const(by, "u32"))
    return b.op("or", left, b.op("shr_logical", x, b.const(32 - by, "u32")))


def threefry2x32(b: Builder, xs: Sequence[int], params: dict[str, Any], out: str) -> int:
    """Twenty rounds, as `lax.threefry.encrypt` has them."""
    k0, k1 = _words(b, xs[0])
    mixed = b.op("xor", b.op("xor", k0, k1), b.const(PARITY, "u32"))
    keys = (k0, k1, mixed)
    x0, x1 = b.op("add", xs[1], k0), b.op("add", xs[2], k1)
    for group, (i, j) in enumerate(KEY_SCHEDULE):
        for by in ROTATIONS[group % 2]:
            x0 = b.op("add", x0, x1)
            x1 = b.op("xor", x0, _rotated(b, x1, by))
        x0 = b.op("add", x0, keys[i])
        x1 = b.op("add", x1, b.op("add", keys[j], b.const(group + 1, "u32")))
    high = b.op("shl", b.convert(x1, "u64"), b.const(32, "u64"))
    return b.op("or", high, b.convert(x0, "u64"))


def key_bits(b: Builder, xs: Sequence[int], params: dict[str, Any], out: str) -> int:
    """Both words, the first one high, for 64 bits; else their exclusive or."""
    first, second = _words(b, xs[0])
    if out == "u64":
        high = b.op("shl", b.convert(first, "u64"), b.const(32, "u64"))
        return b.op("or", high, b.convert(second, "u64"))
    return b.convert(b.op("xor", first, second), out)


RANDOM_ENTRIES = {"threefry2x32": threefry2x32, "key_bits": key_bits}
