"""A rank's description of the collective it enters, so that the others can compare.

A `Call` packs into 256 bytes that travel with (or before) the data; ranks whose bytes differ are
in different calls, and every one of them raises the same report. Of a compiled program the bytes
hold the digest of its whole schedule and the place in it, so ranks that are in different programs
notice at their first collective, even if this call is the same in both.
"""

from __future__ import annotations

import enum
import functools
import struct
import zlib
from collections.abc import Sequence

import numpy as np

from spmd.base.digest import blake2b
from spmd.base.errors import CollectiveError
from spmd.base.record import field, record
from spmd.transport.communicator import ReduceOp
from spmd.transport.origin import NOWHERE, Origin

_LAYOUT = struct.Struct("<HHIqq24s48s160s")
CALL_BYTES = _LAYOUT.size
assert CALL_BYTES == 256
# Ranks must agree about these fields; the text after them names the program, for the report.
LAW_BYTES = 96
_ELLIPSIS = b" ... "
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
    PROGRAM = 10  # the comparison of a program that is about to run for the first time


@record
class Call:
    """One collective call: all that must be equal on every rank."""

    kind: Kind
    op: ReduceOp | None
    dtype: str
    count: int
    detail: str
    packed: bytes = field(compare=False, repr=False)
    digest: int = field(compare=False, repr=False)  # of `packed`: one word to compare
    origin: Origin = field(compare=False, default=NOWHERE)

    def __str__(self) -> str:
        if self.kind is Kind.PROGRAM:
            return f"a new program, {self.origin}"
        if self.kind is Kind.SPLIT:
            return f"{self.movement()} for {self.origin}" if str(self.origin) else self.movement()
        return str(self.origin) or self.movement()

    def movement(self) -> str:
        """The movement, without its origin: `all_reduce(sum) of float32[4]`."""
        op = f"({self.op.value})" if self.op else ""
        detail = f" with {self.detail}" if self.detail else ""
        what = f" of {self.dtype}[{self.count}]" if self.dtype else ""
        return f"{self.kind.name.lower()}{op}{what}{detail}"


@functools.lru_cache(maxsize=4096)
def make_call(
    kind: Kind,
    op: ReduceOp | None = None,
    dtype: str = "",
    count: int = 0,
    detail: str = "",
    origin: Origin = NOWHERE,
) -> Call:
    """A call and its packed form; equal calls from one origin are the same object."""
    texts = detail.encode(), str(origin).encode()
    # A long detail (the pairs of a big permutation) is cut for reading, but compared as a whole.
    # The ranks compare a new program by its digest, and only tell where it begins.
    compared = b"" if kind is Kind.PROGRAM else origin.text.encode()
    check = zlib.crc32(b"%d\0%b\0%b" % (origin.position, texts[0], compared))
    packed = _LAYOUT.pack(
        kind,
        _OPS.index(op),
        check,
        count,
        origin.schedule,
        dtype.encode()[:24],
        _cut(texts[0], 48),
        _cut(texts[1], 160),
    )
    return Call(kind, op, dtype, count, detail, packed, digest_of(packed[:LAW_BYTES]), origin)


def digest_of(data: bytes) -> int:
    """64 bits that tell texts apart, the same in every process."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True)


def _cut(text: bytes, size: int) -> bytes:
    """The text in at most `size` bytes: its beginning names the call, its end the user's line."""
    if len(text) <= size:
        return text
    end = 2 * size // 3
    return text[: size - end - len(_ELLIPSIS)] + _ELLIPSIS + text[-end:]


def read_call(packed: bytes) -> Call | None:
    """The call that another rank packed; None of a rank that has made none."""
    kind, op, _, count, schedule, dtype, detail, text = _LAYOUT.unpack(packed)
    if not kind:
        return None
    dtype, detail, text = (x.rstrip(b"\0").decode(errors="replace") for x in (dtype, detail, text))
    origin = Origin(text, schedule=schedule)
    return Call(Kind(kind), _OPS[op], dtype, count, detail, packed, 0, origin)


def call_text(packed: bytes) -> str:
    """Describe a call that another rank packed."""
    return str(read_call(packed) or "no collective yet")


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3` or `ranks 0, 2`, shortened when there are many."""
    shown = ", ".join(map(str, ranks[:8])) + (f", ... ({len(ranks)} in all)" if ranks[8:] else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def mismatch(sequence: int, calls: Sequence[bytes]) -> CollectiveError:
    """The error that every rank raises when the packed calls of the ranks differ."""
    groups: dict[bytes, list[int]] = {}
    found: dict[bytes, Call | None] = {}
    for rank, packed in enumerate(calls):
        law = bytes(packed[:LAW_BYTES])
        groups.setdefault(law, []).append(rank)
        found.setdefault(law, read_call(packed))
    texts = {law: str(call or "no collective yet") for law, call in found.items()}
    if len(set(texts.values())) < len(texts):  # the same line with other buffers
        moved = {law: call.movement() for law, call in found.items() if call is not None}
        texts = {law: f"{text}: {moved[law]}" for law, text in texts.items()}
    sides = "\n".join(f"  {ranks_text(ranks)}: {texts[law]}" for law, ranks in groups.items())
    new = [r for x, call in found.items() if call and call.kind is Kind.PROGRAM for r in groups[x]]
    return CollectiveError(
        f"collective #{sequence} differs between ranks:\n{sides}\n"
        + (_ONLY_SOME_COMPILED.format(ranks_text(sorted(new))) if new else _SAME_CALLS)
    )


_SAME_CALLS = (
    "Every rank must make the same calls in the same order: look for a collective under "
    "`if rank == ...`, in a loop whose length depends on the rank's data, or with other shapes."
)
_ONLY_SOME_COMPILED = (
    "Only {} compiled a new program here. Every rank must call the same programs in the same order "
    "with arguments of the same shapes, dtypes and static values: look for a call under "
    "`if rank == ...`, a last batch that is smaller on some ranks, or a static argument that "
    "depends on the rank. SPMD_LOG_COMPILES=1 says why each program is compiled."
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
