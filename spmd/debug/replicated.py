"""`debug.assert_replicated`: are values that should be equal on all devices and ranks equal?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import spmd.numpy as snp
from spmd import lax
from spmd.base.digest import blake2b
from spmd.base.errors import ArgumentError, ReplicaError
from spmd.base.record import record
from spmd.base.source import current_source
from spmd.base.tree import keystr, tree_leaves_with_path
from spmd.collectives.all_gather import all_gather
from spmd.collectives.axis import axis_index
from spmd.collectives.psum import psum
from spmd.core.trace import Tracer, to_numpy
from spmd.lax.callback import debug_callback
from spmd.sharding.array import Array
from spmd.transport import world as bootstrap
from spmd.transport.call_signature import ranks_text
from spmd.transport.checked import CheckedCommunicator
from spmd.transport.origin import Origin

SHOWN = 5


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
    found = [_Leaf(keystr(path) or "the value", _copies(x, stacked)) for path, x in leaves]
    compare(bootstrap.world(), found, source)


# ---- outside of compiled code ------------------------------------------------------------------


@record
class _Leaf:
    """This process's parts of a leaf: for each part the copies, with their holders.

    A part that other ranks hold too has the same key there.
    """

    name: str
    copies: dict[str, list[tuple[str, np.ndarray]]]


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


def compare(world: CheckedCommunicator, leaves: Sequence[_Leaf], source: str) -> None:
    """Compare all copies within this process and over all ranks; all raise the same."""
    mine = [
        (leaf.name, part, _kind(value), _digest(value))
        for leaf in leaves
        for part, copies in leaf.copies.items()
        for _, value in copies[:1]
    ]
    local = [text for leaf in leaves for text in _local_differences(leaf)]
    values = {
        (leaf.name, part): copies[0][1] for leaf in leaves for part, copies in leaf.copies.items()
    }
    origin = Origin(f"assert_replicated at {source}")
    said = world.all_gather_object((mine, local), origin)
    problems = [
        f"{text} (on rank {rank})" if world.size > 1 else text
        for rank, (_, texts) in enumerate(said)
        for text in texts
    ]
    held = [{(name, part): (kind, digest) for name, part, kind, digest in one} for one, _ in said]
    everywhere = list(dict.fromkeys(key for one in held for key in one))
    for key in everywhere:
        holders = [rank for rank, one in enumerate(held) if key in one]
        told = {rank: held[rank][key] for rank in holders}
        if len(set(told.values())) > 1:
            if len(problems) >= SHOWN:
                problems.append(key[0])  # only counted
                continue
            value = values.get(key)
            problems.append(_between_ranks(world, key, told, value, origin))
        elif not key[1] and len(holders) < world.size:
            lacking = [r for r in range(world.size) if r not in holders]
            problems.append(f"{key[0]} is on {ranks_text(holders)}, not on {ranks_text(lacking)}")
    if problems:
        raise ReplicaError(_text(problems, source))


def _text(problems: Sequence[str], source: str) -> str:
    shown = "\n".join(f"  {text}" for text in problems[:SHOWN])
    more = f"\n  ... and {len(problems) - SHOWN} more" if problems[SHOWN:] else ""
    return (
        f"assert_replicated at {source}: copies differ:\n{shown}{more}\n"
        "Look for what each device or rank does in its own way: a random key that is not shared, "
        "gradients that are not averaged, a checkpoint that only some have read."
    )


def _kind(value: np.ndarray) -> str:
    return f"{value.dtype.name}[{','.join(map(str, value.shape))}]"


def _digest(value: np.ndarray) -> bytes:
    """Equal for equal values: NaNs are all alike, and so are the zeros."""
    if value.dtype.kind in "fcV" and value.dtype.names is None:
        value = np.where(np.isnan(value), np.asarray(np.nan, value.dtype), value) + 0
    data = np.ascontiguousarray(value).view(np.uint8) if value.ndim else value.tobytes()
    return blake2b(bytes(data), digest_size=16).digest()


def _local_differences(leaf: _Leaf) -> Iterator[str]:
    for part, copies in leaf.copies.items():
        (first, value), where = copies[0], "" if part in ("", "row") else f"{part} "
        mine = _digest(value)
        others = [copy for copy in copies[1:] if _digest(copy[1]) != mine]
        if others:
            texts = [_apart(first, value, who, other) for who, other in others[:SHOWN]]
            more = f"; and {len(others) - SHOWN} more" if others[SHOWN:] else ""
            yield f"{leaf.name} {where}{_kind(value)}: {'; '.join(texts)}{more}"


def _apart(one: str, a: np.ndarray, two: str, b: np.ndarray) -> str:
    """By how much two arrays differ, and where most."""
    at, largest = _largest(a, b)
    place = f" at {list(at)}" if at else ""
    return (
        f"{two} differs from {one} by up to {largest:.6g}{place}: {a[at].item()!r} on {one}, "
        f"{b[at].item()!r} on {two}"
    )


def _largest(a: np.ndarray, b: np.ndarray) -> tuple[tuple[int, ...], float]:
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        apart = np.abs(a.astype(wide) - b.astype(wide))
    apart = np.where(np.isnan(apart), np.where(np.isnan(a) == np.isnan(b), 0, np.inf), apart)
    at = tuple(int(k) for k in np.unravel_index(int(np.argmax(apart)), a.shape))
    return at, float(apart[at])


def _between_ranks(
    world: CheckedCommunicator,
    key: tuple[str, str],
    told: dict[int, tuple[str, bytes]],
    value: np.ndarray | None,
    origin: Origin,
) -> str:
    """How a leaf differs between the ranks that hold it, compared with the first that does."""
    name = key[0] if key[1] in ("", "row") else f"{key[0]} {key[1]}"
    kinds = {rank: kind for rank, (kind, _) in told.items()}
    if len(set(kinds.values())) > 1:
        return f"{name}: " + ", ".join(f"{kind} on rank {rank}" for rank, kind in kinds.items())
    base = min(told)
    values = world.all_gather_object(value if world.rank == base else None, origin)
    apart = ""
    if value is not None and told[world.rank][1] != told[base][1]:
        apart = _apart(f"rank {base}", values[base], f"rank {world.rank}", value)
    texts = [text for text in world.all_gather_object(apart, origin) if text]
    return f"{name} {kinds[base]}: " + "; ".join(texts)


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
            raise ReplicaError(_text([text], self.source))

    @property
    def __name__(self) -> str:
        return f"debug.assert_replicated({self.name})"
