"""Leaves of a checkpoint: which parts of them a process writes, and what they become when read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.device import process_index
from spmd.base.errors import ArgumentError
from spmd.base.key_dtypes import key_dtype_named
from spmd.base.source import current_source
from spmd.checkpoints.parts import Box, Part
from spmd.core.aval import ShapedArray, ShapeDtypeStruct
from spmd.sharding.array import Array, from_numpy, sharded
from spmd.sharding.named import Index, NamedSharding, Sharding, SingleDeviceSharding

KEY = "key"  # the dtype of keys of the default generator, in files; others: key<rbg>


# ---- writing -------------------------------------------------------------------------------------


def is_spread(leaf: Any) -> bool:
    """Whether a value has shards on other processes."""
    return isinstance(leaf, Array) and not leaf.is_fully_addressable


def check_leaf(name: str, leaf: Any) -> dict[str, Any]:
    """The description of a leaf in a checkpoint: its path, dtype and shape.

    Raises `ArgumentError` if it is nothing that can be saved.
    """
    if isinstance(leaf, Array) and leaf.is_unreduced:
        raise ArgumentError(
            f"{current_source()}: checkpoints.save: tree{name} is {leaf.aval.short()}: each device "
            "holds a term of a sum. Make the sum first, with reshard(x, P(...))"
        )
    try:
        kind = leaf if isinstance(leaf, Array) else np.asarray(leaf)
        has_values = not (isinstance(leaf, Array) and leaf.is_deleted())
    except Exception as error:
        raise ArgumentError(
            f"{current_source()}: checkpoints.save: tree{name} has no values here: {error}"
        ) from error
    if not has_values:
        raise ArgumentError(
            f"{current_source()}: checkpoints.save: tree{name} ({leaf.aval}) was deleted or donated"
        )
    if kind.dtype.hasobject:
        raise ArgumentError(
            f"{current_source()}: checkpoints.save: tree{name} is {type(leaf).__name__}; leaves "
            "are arrays and numbers"
        )
    return {"path": name, "dtype": dtype_text(kind.dtype), "shape": list(np.shape(kind))}


def text_of(said: dict[str, Any], spread: bool) -> str:
    """A leaf as all processes must have it: its path, and the kind if each writes a part of it."""
    kind = f" ({said['dtype']}{said['shape']})" if spread else ""
    return f"tree{said['path']}{kind}"


def dtype_text(dtype: np.dtype) -> str:
    """A dtype's name in files."""
    if not dtypes.is_key(dtype):
        return dtype.name
    return KEY if dtype == dtypes.key_dtype else dtypes.key_name(dtype)


def dtype_named(name: str) -> np.dtype:
    """The dtype that files call `name`."""
    return dtypes.key_dtype if name == KEY else key_dtype_named(name) or np.dtype(name)


def parts_of(name: str, leaf: Any, rank: int) -> list[Part]:
    """The parts of a leaf that a process writes: of all processes together, each element once.

    Of an array over several processes that is what it is the first to hold; other values are whole
    on each process, and process 0 writes them.
    """
    if rank and not is_spread(leaf):
        return []
    if not isinstance(leaf, Array) or leaf.shards is None:
        value = np.asarray(leaf)
        return [Part(_part_name(name, (), value.shape), box_of((), value.shape), value)]
    mine = process_index()
    return [
        Part(
            _part_name(name, shard.index, leaf.shape),
            box_of(shard.index, leaf.shape),
            np.asarray(shard.data).reshape(_sizes(shard.index, leaf.shape)),
        )
        for shard in leaf.global_shards
        if shard.replica_id == 0 and shard.device.process_index == mine
    ]


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Slices as starts and stops; dims without one are whole."""
    slices = [*index, *[slice(None)] * (len(shape) - len(index))]
    return tuple(s.indices(n)[:2] for s, n in zip(slices, shape, strict=True))


def _sizes(index: Sequence[slice], shape: Sequence[int]) -> list[int]:
    return [stop - start for start, stop in box_of(index, shape)]


def _part_name(name: str, index: Sequence[slice], shape: Sequence[int]) -> str:
    """A part's name in its file: the leaf's, and where it lies if it is not the whole."""
    box = box_of(index, shape)
    name = name or "value"
    if all(span == (0, n) for span, n in zip(box, shape, strict=True)):
        return name
    return f"{name} {','.join(f'{start}:{stop}' for start, stop in box)}"


# ---- reading -------------------------------------------------------------------------------------

# The elements of a rectangle of a leaf.
Read = Callable[[Box], np.ndarray]


def check_fit(step: int, found: list[dict[str, Any]], leaves: list[tuple[str, Any]]) -> None:
    """Raise unless a checkpoint fits the template; the same on every process."""
    there, here = [said["path"] for said in found], [name for name, _ in leaves]
    if there != here:
        missing = [f"tree{name}" for name in here if name not in there][:3]
        extra = [f"tree{name}" for name in there if name not in here][:3]
        raise ArgumentError(
            f"{current_source()}: checkpoints.restore: the checkpoint of step {step} has another "
            f"structure than like: it lacks {', '.join(missing) or 'nothing'}, and has "
            f"{', '.join(extra) or 'nothing'} besides"
        )
    for said, (name, leaf) in zip(found, leaves, strict=True):
        wanted = (said["dtype"], tuple(said["shape"]))
        given = said["dtype"] if is_number(leaf) else dtype_text(np.dtype(leaf.dtype))
        if (given, np.shape(leaf) if is_number(leaf) else tuple(leaf.shape)) != wanted:
            raise ArgumentError(
                f"{current_source()}: checkpoints.restore: tree{name} is {wanted[0]}"
                f"{list(wanted[1])} in the checkpoint of step {step}, and {given}"
                f"{list(np.shape(leaf) if is_number(leaf) else leaf.shape)} in like"
            )
        place = place_of(leaf)
        if isinstance(place, NamedSharding):
            place.check_placing(wanted[1], f"{current_source()}: checkpoints.restore: tree{name}")


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a Python number."""
    return isinstance(leaf, bool | int | float | complex)


def place_of(leaf: Any) -> Sharding | None:
    """The place where the template wants a leaf; None for the default device, or the host."""
    if isinstance(leaf, Array):
        return leaf.sharding if leaf.committed else None
    place = leaf.sharding if isinstance(leaf, ShapeDtypeStruct) else None
    return place if isinstance(place, Sharding) else None


def made_like(said: dict[str, Any], leaf: Any, read: Read) -> Any:
    """The value of a leaf, of the kind that the template has there, read as far as it is needed."""
    shape, dtype = tuple(said["shape"]), dtype_named(said["dtype"])
    place = place_of(leaf)
    if place is None or isinstance(place, SingleDeviceSharding):
        value = read(box_of((), shape))
        if is_number(leaf):
            return type(leaf)(value.item())
        if isinstance(leaf, np.ndarray | np.generic):
            return np.array(value)
        return from_numpy(value, device=None if place is None else place.device)

    def part(index: Index) -> np.ndarray:
        return read(box_of(index, shape))

    return sharded(part, ShapedArray(shape, dtypes.canonical(dtype)), place, process_index())
