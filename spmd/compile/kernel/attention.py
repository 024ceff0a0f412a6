"""Attention by blocks: `softmax(scale * query @ key.T + bias) @ value`, and its gradients.

Scores are made tile by tile and are never in memory. It is a node of its own, as products are:
every backend has its own best loops for it. Its meaning is `attention` of `lax/attention.py`, with
queries (B, T, K, G, H), keys and values (B, S, K, H), and for each query the numbers `top` and
`rest` (B, K, G, T), whose sum is the logsumexp of its scores.

`check_attention` is the law.
"""

from __future__ import annotations

from spmd.base.record import record
from spmd.compile.kernel.check import KernelError
from spmd.compile.kernel.dtypes import kind

FORWARD, QUERY_GRAD, KEY_GRAD = "forward", "query_grad", "key_grad"
# The arrays that each part reads and writes, before and behind the extras. `delta` is the sum of
# result times cotangent of each query, `ct` the result's cotangent.
READS = {
    FORWARD: ("q", "k", "v"),
    QUERY_GRAD: ("q", "k", "v", "top", "rest", "delta", "ct"),
    KEY_GRAD: ("q", "k", "v", "top", "rest", "delta", "ct"),
}
WRITES = {FORWARD: ("out", "top", "rest"), QUERY_GRAD: ("dq",), KEY_GRAD: ("dk", "dv")}
DTYPES = ("f32", "bf16", "f16")
MOST_FEATURES = 256


@record
class Extra:
    """A bias, a mask, or a shift of the queries' positions: its dtype, and along which of
    (B, K, G, T, S) it is whole; along the others it is 1."""

    dtype: str
    whole: tuple[bool, ...]


@record
class BlockedAttention:
    """One part of attention. `numbers`: the forward part writes `top` and `rest`, too.

    Of `extras` the first is a bias if there is one, the last a shift if there is one, the others
    are masks. `aligned`: all arrays begin at multiples of 16 bytes. `tf32`: factors of float32 may
    be rounded to TF32.
    """

    part: str
    dtype: str
    batch: int
    heads: int
    groups: int
    queries: int
    keys: int
    features: int
    scale: float
    causal: bool
    window: tuple[int, int] | None
    bias: bool
    shifted: bool
    extras: tuple[Extra, ...]
    numbers: bool = True
    aligned: bool = True
    tf32: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the arrays that it reads."""
        return (*READS[self.part], *(f"extra{k}" for k in range(len(self.extras))))

    @property
    def writes(self) -> tuple[str, ...]:
        """The names of the arrays that it writes."""
        return WRITES[self.part] if self.numbers else WRITES[self.part][:1]

    @property
    def rows(self) -> int:
        """The queries of one key head."""
        return self.groups * self.queries

    @property
    def flops(self) -> int:
        """Multiplications and additions of its products."""
        products = {FORWARD: 2, QUERY_GRAD: 3, KEY_GRAD: 4}[self.part]
        return 2 * products * self.batch * self.heads * self.rows * self.keys * self.features


def check_attention(given: BlockedAttention) -> None:
    """Raise a `KernelError` if no renderer could be right about it."""
    sizes = (given.batch, given.heads, given.groups, given.queries, given.keys, given.features)
    others = list(given.extras[given.bias : len(given.extras) - given.shifted])
    rules = {
        f"part {given.part!r}": given.part in READS,
        f"dtype {given.dtype!r}": given.dtype in DTYPES,
        f"sizes {sizes}": min(sizes) > 0 and given.features <= MOST_FEATURES,
        "a bias that is no number": not given.bias or kind(given.extras[0].dtype) == "f",
        "a mask that is not bool": all(extra.dtype == "bool" for extra in others),
        "a shift that is not i32": not given.shifted or given.extras[-1].dtype == "i32",
        f"factors of {given.dtype} in TF32": not given.tf32 or given.dtype == "f32",
        "a gradient without numbers": given.numbers or given.part == FORWARD,
    }
    for what, holds in rules.items():
        if not holds:
            raise KernelError(f"attention has {what}")
