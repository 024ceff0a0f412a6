"""The only way to other ranks: one small interface that every transport implements.

A `Communicator` is a fixed group of ranks. All its calls are *collective*: every rank of the group
makes the same calls in the same order. The meaning of the calls for rank `r` of `n`:

| call | this rank gives | this rank gets |
|---|---|---|
| `all_reduce(buf, op)` | `buf`, S elements | `buf` = x_0 op x_1 op ... op x_(n-1), in place |
| `all_gather(buf, out)` | `buf`, S elements | `out`, n*S elements: x_0, x_1, ..., x_(n-1) |
| `reduce_scatter(buf, out, op)` | `buf`, n*S elements, a block a rank | `out`, S: block r reduced |
| `all_to_all(buf, out)` | `buf`, n*S elements, a block a rank | `out`, n*S: block r of each rank |
| `all_to_all(buf, out, counts=c)` | `buf`, c[r][q] elements for rank q | `out`, c[q][r] of rank q |
| `permute(buf, out, pairs)` | `buf`, S elements | `out`, S: `buf` of its source, or zeros if none |
| `broadcast(buf, root)` | `buf`, S elements | `buf` of rank `root`, in place |
| `all_gather_object(obj)` | anything picklable | the list of all ranks' objects |
| `compare(digest)` | 64 bits | whether all ranks gave the same |
| `barrier()` | | returns when every rank has called it |
| `split(color, key)` | its colour and its key | the ranks of its colour, ordered by (key, rank) |

**Same inputs, same bits, on every rank**: reductions associate from rank 0 upwards, whatever order
the ranks arrive in, on all transports alike. Sums and products of 16-bit and 8-bit floats are
accumulated in float32 and rounded once.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from spmd.transport.origin import NOWHERE, Origin

# How many elements each rank (by row) sends to each: the same on all ranks.
Counts = Sequence[Sequence[int]]


class ReduceOp(enum.Enum):
    """How a reduction combines two elements.

    On bool, SUM and MAX are *or*, PROD and MIN are *and*. MAX and MIN keep NaN, and order complex
    numbers by real part first. AND, OR and XOR are for bool and integers.
    """

    SUM = "sum"
    PROD = "prod"
    MAX = "max"
    MIN = "min"
    AND = "and"
    OR = "or"
    XOR = "xor"


@runtime_checkable
class Communicator(Protocol):
    """A fixed group of ranks. Buffers are C-contiguous NumPy arrays of any shape.

    Shapes count only by their number of elements; `buf` and `out` must not overlap. One thread at
    a time may use a communicator. Every rank must make the same calls: a difference raises
    `CollectiveError` on every rank, a rank that fails raises `PeerError` on the others. `origin`
    says for whom a call is made; it takes part in the comparison.
    """

    rank: int
    size: int

    def all_reduce(
        self, buf: np.ndarray, op: ReduceOp = ReduceOp.SUM, origin: Origin = NOWHERE
    ) -> None: ...

    def all_gather(self, buf: np.ndarray, out: np.ndarray, origin: Origin = NOWHERE) -> None: ...

    def reduce_scatter(
        self,
        buf: np.ndarray,
        out: np.ndarray,
        op: ReduceOp = ReduceOp.SUM,
        origin: Origin = NOWHERE,
    ) -> None: ...

    def all_to_all(
        self,
        buf: np.ndarray,
        out: np.ndarray,
        origin: Origin = NOWHERE,
        counts: Counts | None = None,
    ) -> None: ...

    def permute(
        self,
        buf: np.ndarray,
        out: np.ndarray,
        pairs: Sequence[tuple[int, int]],
        origin: Origin = NOWHERE,
    ) -> None: ...

    def broadcast(self, buf: np.ndarray, root: int = 0) -> None: ...

    def all_gather_object(self, obj: Any, origin: Origin = NOWHERE) -> list[Any]: ...

    def compare(self, digest: int, origin: Origin) -> bool: ...

    def barrier(self) -> None: ...

    def split(
        self, color: int | None, key: int = 0, origin: Origin = NOWHERE
    ) -> Communicator | None:
        """Divide the group by colour; `None` takes part in the call and gets no communicator."""
        ...

    def abort(self, reason: str) -> None:
        """End the whole job, not only this group, and give `reason` to the other ranks."""
        ...
