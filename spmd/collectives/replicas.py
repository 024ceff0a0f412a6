"""Values that should be equal on all ranks, compared: by their digests first.

`debug.assert_replicated` does so when asked, and with `SPMD_DEBUG=collectives` every program over
the meshes of several processes does so with the arguments that each process has the whole of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from spmd.base.digest import blake2b
from spmd.base.errors import ReplicaError
from spmd.base.record import record
from spmd.core.trace import to_numpy
from spmd.transport.call_signature import ranks_text
from spmd.transport.checked import CheckedCommunicator
from spmd.transport.origin import Origin

SHOWN = 5
ADVICE = (
    "Look for what each device or rank does in its own way: a random key that is not shared, "
    "gradients that are not averaged, a checkpoint that only some have read."
)
_HOST_VALUES = (
    "Every rank must pass the whole of the same value. Of rows that each rank has read for itself, "
    "make_array_from_process_local_data makes one array."
)


@record
class Leaf:
    """This process's parts of a leaf: for each part the copies, with their holders.

    A part that other ranks hold too has the same key there.
    """

    name: str
    copies: dict[str, list[tuple[str, np.ndarray]]]


def compare_host_values(world: CheckedCommunicator, values: Mapping[str, Any], what: str) -> None:
    """Compare values, by name, that each rank must have the whole of; all raise the same."""
    leaves = [Leaf(name, {"": [("", to_numpy(x))]}) for name, x in values.items()]
    compare(world, leaves, what, _HOST_VALUES)


def compare(
    world: CheckedCommunicator, leaves: Sequence[Leaf], what: str, advice: str = ADVICE
) -> None:
    """Compare all copies within this process and over all ranks; all raise the same.

    `what` says for whom, and where; `advice` ends the error.
    """
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
    origin = Origin(what)
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
        raise ReplicaError(error_text(problems, what, advice))


def error_text(problems: Sequence[str], what: str, advice: str = ADVICE) -> str:
    """The text of an error about copies that differ."""
    shown = "\n".join(f"  {text}" for text in problems[:SHOWN])
    more = f"\n  ... and {len(problems) - SHOWN} more" if problems[SHOWN:] else ""
    return f"{what}: copies differ:\n{shown}{more}\n{advice}"


def _kind(value: np.ndarray) -> str:
    name = "key" if value.dtype.names is not None else value.dtype.name
    return f"{name}[{','.join(map(str, value.shape))}]"


def _digest(value: np.ndarray) -> bytes:
    """Equal for equal values: NaNs are all alike, and so are the zeros."""
    if value.dtype.kind in "fcV" and value.dtype.names is None:
        value = np.where(np.isnan(value), np.asarray(np.nan, value.dtype), value) + 0
    data = np.ascontiguousarray(value).view(np.uint8) if value.ndim else value.tobytes()
    return blake2b(bytes(data), digest_size=16).digest()


def _local_differences(leaf: Leaf) -> Iterator[str]:
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
    if a.dtype.names is not None:  # keys are told apart, not measured
        at = tuple(int(k) for k in np.argwhere(a != b)[0])
        return f"{two} differs from {one} at {list(at)}: {a[at]} on {one}, {b[at]} on {two}"
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
