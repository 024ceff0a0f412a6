"""`debug.assert_replicated`: are values that should be equal on all devices and ranks equal?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import spmd.numpy as snp
from spmd import lax
from spmd.base.errors import ArgumentError, ReplicaError
from spmd.base.record import record
from spmd.base.source import current_source
from spmd.base.tree import keystr, tree_leaves_with_path
from spmd.collectives.all_gather import all_gather
from spmd.collectives.axis import axis_index
from spmd.collectives.psum import psum
from spmd.collectives.replicas import SHOWN, Leaf, compare, error_text
from spmd.core.trace import Tracer, to_numpy
from spmd.lax.callback import debug_callback
from spmd.sharding.array import Array
from spmd.transport import world as bootstrap


def assert_replicated(tree: Any, axis_name: Any = None, *, stacked: bool = False) -> None:
    """Raise a `ReplicaError` unless the arrays of a pytree are equal wherever they are replicated.

    Outside of compiled code, pieces that should be copies are compared between the devices of this
    process and between ranks: the copies of a sharded array, and of any other value the whole of
    it. With `stacked`, the leading dim holds one copy a device, as `pmap` returns them. **All ranks
    must make the call**; all raise the same error, which names the leaf, the holders of differing
    copies, by how much and where they differ. In per-device code give the `axis_name` along which
    values should be equal.

    NaNs in the same places are equal.

    >>> import spmd, spmd.numpy as snp
    >>> spmd.debug.assert_replicated({"w": snp.ones((4, 2))}, stacked=True)
    >>> spmd.debug.assert_replicated(snp.arange(4.0), stacked=True)
    Traceback (most recent call last):
        ...
    spmd.errors.ReplicaError: ...
    """
    source = current_source().short
    leaves = tree_leaves_with_path(tree)
    if any(isinstance(x, Tracer) for _, x in leaves):
        _check_traced(leaves, axis_name, source)
        return
    found = [Leaf(keystr(path) or "the value", _copies(x, stacked)) for path, x in leaves]
    compare(bootstrap.world(), found, f"assert_replicated at {source}")


# ---- outside of compiled code ------------------------------------------------------------------


def _copies(x: Any, stacked: bool) -> dict[str, list[tuple[str, np.ndarray]]]:
    if stacked:
        if not np.ndim(x):
            raise ArgumentError(
                f"{current_source()}: assert_replicated(stacked=True): a scalar has no leading dim "
                "that could hold a copy for each device"
            )
        return {"row": [(f"row {k}", row) for k, row in enumerate(_rows(x))]}
    if isinstance(x, Array) and x.shards is not None:
        parts: dict[str, list[tuple[str, np.ndarray]]] = {}
        for shard in x.addressable_shards:
            copy = str(shard.device), np.asarray(shard.data)
            parts.setdefault(str(shard.index), []).append(copy)
        return parts
    return {"": [("", to_numpy(x))]}


def _rows(x: Any) -> list[np.ndarray]:
    if not isinstance(x, Array) or x.shards is None:
        return list(to_numpy(x))
    return [row for shard in x.addressable_shards for row in np.asarray(shard.data)]


# ---- in per-device code ------------------------------------------------------------------------


def _check_traced(leaves: Sequence[tuple[Any, Any]], axis_name: Any, source: str) -> None:
    if axis_name is None:
        raise ArgumentError(
            f"{current_source()}: assert_replicated: a traced value can be compared along a named "
            "axis only; give axis_name, or call it on the results, outside of jit"
        )
    for path, x in leaves:
        x = lax.stop_gradient(x)
        first = psum(snp.where(axis_index(axis_name) == 0, x, snp.zeros_like(x)), axis_name)
        apart = abs(snp.asarray(x, np.float32) - snp.asarray(first, np.float32))
        same = (x == first) | ((x != x) & (first != first))
        worst = snp.max(snp.where(same, 0, snp.where(snp.isnan(apart), np.inf, apart)))
        gathered = all_gather(worst, axis_name)
        debug_callback(_Verdict(keystr(path) or "the value", axis_name, source), gathered)


@record
class _Verdict:
    """Raises on every device alike, as all are told the same."""

    name: str
    axis: Any
    source: str

    def __call__(self, apart: np.ndarray) -> None:
        apart = np.ravel(apart)
        where = np.flatnonzero(apart)
        if where.size:
            places = ", ".join(f"{self.axis}={k} by up to {apart[k]:.6g}" for k in where[:SHOWN])
            more = f" and {where.size - SHOWN} more" if where.size > SHOWN else ""
            text = f"{self.name} differs from that at {self.axis}=0 at {places}{more}"
            raise ReplicaError(error_text([text], f"assert_replicated at {self.source}"))

    @property
    def __name__(self) -> str:
        return f"debug.assert_replicated({self.name})"
