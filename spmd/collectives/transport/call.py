"""What a rank says about the collective it enters, so that the others can compare.

A `Call` packs into 128 bytes that travel with (or before) the data; ranks whose bytes differ are
in different calls, and every one of them raises the same report.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from spmd.collectives.transport.base import ReduceOp
from spmd.core.errors import CollectiveError

_LAYOUT = struct.Struct("<HHIq24s88s")
CALL_BYTES = _LAYOUT.size
assert CALL_BYTES == 128
_OPS = (None, *ReduceOp)


class Kind(enum.IntEnum):
    """The collectives, in the numbering that travels between ranks."""

    ALL_REDUCE = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    ALL_TO_ALL = 4
    PERMUTE = 5
    BROADCAST = 6
    ALL_GATHER_OBJECT = 7
    BARRIER = 8
    SPLIT = 9


@dataclass(frozen=True, slots=True)
class Call:
    """One collective call: all that must be equal on every rank."""

    kind: Kind
    op: ReduceOp | None
    dtype: str
    count: int
    detail: str
    packed: bytes = field(compare=False, repr=False)
    digest: int = field(compare=False, repr=False)  # of `packed`: one word to compare

    def __str__(self) -> str:
        op = f"({self.op.value})" if self.op else ""
        detail = f" with {self.detail}" if self.detail else ""
        what = f" of {self.dtype}[{self.count}]" if self.dtype else ""
        return f"{self.kind.name.lower()}{op}{what}{detail}"


@functools.lru_cache(maxsize=4096)
def make_call(
    kind: Kind, op: ReduceOp | None = None, dtype: str = "", count: int = 0, detail: str = ""
) -> Call:
    """A call and its packed form; equal calls are the same object."""
    text = detail.encode()
    # A long detail (the pairs of a big permutation) is cut for reading, but compared as a whole.
    digest = zlib.crc32(text)
    packed = _LAYOUT.pack(kind, _OPS.index(op), digest, count, dtype.encode()[:24], text[:88])
    return Call(kind, op, dtype, count, detail, packed, _digest(packed))


def _digest(packed: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little", signed=True)


def read_call(packed: bytes) -> str:
    """Describe a call that another rank packed."""
    kind, op, _, count, dtype, detail = _LAYOUT.unpack(packed)
    if not kind:
        return "no collective yet"
    call = Call(
        Kind(kind),
        _OPS[op],
        dtype.rstrip(b"\0").decode(errors="replace"),
        count,
        detail.rstrip(b"\0").decode(errors="replace"),
        packed,
        0,
    )
    return str(call)


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3` or `ranks 0, 2`, shortened when there are many."""
    shown = ", ".join(map(str, ranks[:8])) + (f", ... ({len(ranks)} in all)" if ranks[8:] else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def mismatch(sequence: int, calls: Sequence[bytes]) -> CollectiveError:
    """The error that every rank raises when the packed calls of the ranks differ."""
    groups: dict[bytes, list[int]] = {}
    for rank, packed in enumerate(calls):
        groups.setdefault(bytes(packed), []).append(rank)
    sides = "\n".join(
        f"  {ranks_text(ranks)}: {read_call(packed)}" for packed, ranks in groups.items()
    )
    return CollectiveError(
        f"collective #{sequence} differs between ranks:\n{sides}\n"
        "Every rank must make the same calls in the same order: look for a collective under "
        "`if rank == ...`, in a loop whose length depends on the rank's data, or with other shapes."
    )


def pairs_detail(pairs: Sequence[tuple[int, int]], size: int) -> str:
    """Check the pairs of a permutation and name them."""
    sources = [int(source) for source, _ in pairs]
    targets = [int(target) for _, target in pairs]
    outside = [r for r in (*sources, *targets) if not 0 <= r < size]
    if outside:
        raise CollectiveError(
            f"permute: pairs={tuple(pairs)} names rank {outside[0]}; this group has ranks "
            f"0 to {size - 1}"
        )
    for what, ranks in (("source", sources), ("target", targets)):
        if len(set(ranks)) != len(ranks):
            twice = next(r for r in ranks if ranks.count(r) > 1)
            raise CollectiveError(
                f"permute: pairs={tuple(pairs)} has rank {twice} as {what} more than once"
            )
    return "pairs=" + ",".join(f"{s}>{t}" for s, t in zip(sources, targets, strict=True))


def check_buffer(kind: Kind, name: str, array: np.ndarray, writable: bool) -> None:
    """Raise unless a transport can read (and write) `array` as plain memory."""
    if isinstance(array, np.ndarray):
        flags = array.flags
        if flags.c_contiguous and (flags.writeable or not writable):
            return
    where = f"{kind.name.lower()}: {name}"
    if not isinstance(array, np.ndarray):
        raise CollectiveError(f"{where} must be a NumPy array; got {type(array).__name__}")
    if not array.flags.c_contiguous:
        raise CollectiveError(
            f"{where} of shape {array.shape} is not contiguous; pass np.ascontiguousarray({name})"
        )
    raise CollectiveError(f"{where} is read-only, and the result is written to it")


@functools.lru_cache(maxsize=256)
def dtype_name(dtype: np.dtype) -> str:
    """The name of a dtype that can be sent as plain memory; NumPy takes 2 µs to find it."""
    if dtype.hasobject or not dtype.isnative:
        raise CollectiveError(f"arrays of dtype {dtype} cannot be sent as plain memory")
    return dtype.name
