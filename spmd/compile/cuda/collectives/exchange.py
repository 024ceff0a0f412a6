"""Exchanges between the devices of a process: copies from device to device, and kernels.

The one idea: a device only writes to its own memory. It pulls the blocks of others, in contiguous
copies, to where they belong or to scratch memory, and kernels of its own combine or reorder what is
there. A long all_reduce is a reduce_scatter and an all_gather: no device holds all operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from spmd.base.record import record
from spmd.compile.kernel.builder import Builder
from spmd.compile.kernel.dtypes import kernel_dtype
from spmd.compile.kernel.ir import Kernel
from spmd.compile.native.program.steps import Exchange

# The memory that an exchange works on: its operands, and two scratch arrays.
INPUT, OUTPUT, FIRST, SECOND = range(4)

# Up to so many bytes each member of an all_reduce gets the operands of all: one meeting, not two.
_ALL_AT_ONCE_BYTES = 64 << 10
# An exchange of more copies than this for a device is the host's.
_MOST_COPIES = 64

_OPS = {"sum": "add", "prod": "mul", "max": "max", "min": "min", "and": "and", "or": "or"}
_OPS |= {"xor": "xor"}
_BOOLEAN = {"sum": "or", "prod": "and", "max": "or", "min": "and"}
# Elements of so many bytes as kernels move them.
_MOVED = {1: "u8", 2: "u16", 4: "u32", 8: "u64", 16: "c128"}


@record
class Run:
    """A kernel that every device runs over its own memory."""

    kernel: Kernel
    places: tuple[int, ...]


@record
class Pull:
    """Copies from `source` of some devices to `target` of others.

    Each copy is: the device, that from which it copies, the offsets there and here, and bytes.
    """

    source: int
    target: int
    copies: tuple[tuple[int, int, int, int, int], ...]


@record
class ExchangePlan:
    """The phases of an exchange, and the bytes of its scratch arrays."""

    phases: tuple[Run | Pull, ...]
    scratch: tuple[int, int] = (0, 0)

    @property
    def readers(self) -> list[tuple[int, int]]:
        """Each device with each other one that copies from it."""
        copies = (copy for phase in self.phases if isinstance(phase, Pull) for copy in phase.copies)
        return sorted({(source, device) for device, source, *_ in copies if device != source})


def exchange_plan(step: Exchange[Any], devices: int) -> ExchangePlan | None:
    """How devices do an exchange themselves; None if the host has to."""
    members = sorted(device for group in step.groups for device in group)
    if members != list(range(devices)) or step.is_one or step.dtype.itemsize not in _MOVED:
        return None
    return _WRITERS[step.kind](step)


# ---- kinds ---------------------------------------------------------------------------------------


def _all_gather(step: Exchange[Any]) -> ExchangePlan:
    size, block = len(step.groups[0]), _bytes(step)
    gather = _copies(step, lambda me: [(j, 0, j * block, block) for j in range(size)])
    if step.rows == 1:
        return ExchangePlan((Pull(INPUT, OUTPUT, gather),))
    order = _swapped(step, size, step.rows)
    phases = Pull(INPUT, FIRST, gather), Run(order, (FIRST, OUTPUT))
    return ExchangePlan(phases, (size * block, 0))


def _all_to_all(step: Exchange[Any]) -> ExchangePlan:
    size, block = len(step.groups[0]), _bytes(step)
    trade = _copies(step, lambda me: [(j, me * block, j * block, block) for j in range(size)])
    if step.rows == 1:
        return ExchangePlan((Pull(INPUT, OUTPUT, trade),))
    phases = (
        Run(_swapped(step, step.rows, size), (INPUT, FIRST)),
        Pull(FIRST, SECOND, trade),
        Run(_swapped(step, size, step.rows), (SECOND, OUTPUT)),
    )
    return ExchangePlan(phases, (size * block, size * block))


def _reduce_scatter(step: Exchange[Any]) -> ExchangePlan | None:
    size, block = len(step.groups[0]), _bytes(step)
    combine = _combined(step, size, step.rows * step.count)
    if combine is None:
        return None
    trade = _copies(step, lambda me: [(j, me * block, j * block, block) for j in range(size)])
    last = Run(combine, (SECOND, OUTPUT))
    if step.rows == 1:
        return ExchangePlan((Pull(INPUT, SECOND, trade), last), (0, size * block))
    first = Run(_swapped(step, step.rows, size), (INPUT, FIRST))
    return ExchangePlan((first, Pull(FIRST, SECOND, trade), last), (size * block, size * block))


def _all_reduce(step: Exchange[Any]) -> ExchangePlan | None:
    size, elements, nbytes = len(step.groups[0]), step.rows * step.count, _bytes(step)
    is_short = nbytes <= _ALL_AT_ONCE_BYTES
    part = elements if is_short else -(-elements // size)
    combine = _combined(step, size, part)
    if combine is None:
        return None
    if is_short:
        gather = _copies(step, lambda me: [(j, 0, j * nbytes, nbytes) for j in range(size)])
        phases = Pull(INPUT, FIRST, gather), Run(combine, (FIRST, OUTPUT))
        return ExchangePlan(phases, (size * nbytes, 0))
    width = part * step.dtype.itemsize

    def bytes_of(member: int) -> int:
        return max(0, min(width, nbytes - member * width))

    mine = _copies(step, lambda me: [(j, me * width, j * width, bytes_of(me)) for j in range(size)])
    all_ = _copies(step, lambda me: [(j, 0, j * width, bytes_of(j)) for j in range(size)])
    phases = Pull(INPUT, FIRST, mine), Run(combine, (FIRST, SECOND)), Pull(SECOND, OUTPUT, all_)
    return ExchangePlan(phases, (size * width, width))


def _broadcast(step: Exchange[Any]) -> ExchangePlan:
    copies = _copies(step, lambda me: [(step.root, 0, 0, _bytes(step))])
    return ExchangePlan((Pull(INPUT, OUTPUT, copies),))


def _permute(step: Exchange[Any]) -> ExchangePlan:
    size, nbytes = len(step.groups[0]), _bytes(step)
    sources = {goal: origin for origin, goal in step.pairs}
    copies = _copies(step, lambda me: [(sources[me], 0, 0, nbytes)] if me in sources else [])
    zeros = [] if len(sources) == size else [_zeros(step)]
    return ExchangePlan((*zeros, Pull(INPUT, OUTPUT, copies)))


def _boxes(step: Exchange[Any]) -> ExchangePlan | None:
    found: dict[int, list[tuple[int, int, int, int]]] = {}
    needs_zeros = False
    for box in step.boxes:
        needs_zeros |= box.source < 0
        if box.source >= 0:
            rows = found.setdefault(box.target, [])
            if len(rows) + math.prod(trips for trips, _, _ in box.copy.loops) > _MOST_COPIES:
                return None
            flat = box.copy.flattened(0)
            rows += [(box.source, each.start, each.place, each.width) for each in flat]
    pull = Pull(INPUT, OUTPUT, _copies(step, lambda me: found.get(me, ())))
    return ExchangePlan((_zeros(step), pull) if needs_zeros else (pull,))


_WRITERS: dict[str, Callable[[Exchange[Any]], ExchangePlan | None]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "exchange": _boxes,
    "permute": _permute,
    "reduce_scatter": _reduce_scatter,
}


# ---- parts ---------------------------------------------------------------------------------------


def _bytes(step: Exchange[Any]) -> int:
    """The bytes of (rows, count)."""
    return step.rows * step.count * step.dtype.itemsize


def _copies(
    step: Exchange[Any], of_member: Callable[[int], Iterable[tuple[int, int, int, int]]]
) -> tuple[tuple[int, int, int, int, int], ...]:
    """The copies of all devices: those of each member of a group, from other members."""
    found = [
        (device, group[source], *rest)
        for group in step.groups
        for me, device in enumerate(group)
        for source, *rest in of_member(me)
        if rest[-1]
    ]
    return tuple(sorted(found))  # type: ignore[arg-type]


def _swapped(step: Exchange[Any], outer: int, inner: int) -> Kernel:
    """A kernel that turns (outer, inner, count) into (inner, outer, count)."""
    count, dtype = step.count, _MOVED[step.dtype.itemsize]
    b = Builder((inner, outer, count), ())
    source, target = b.arg(dtype, inner * outer * count), b.arg(dtype, inner * outer * count, "out")
    with b.point():
        value = b.load(source, (count, inner * count, 1))
        b.store(target, (outer * count, count, 1), value)
    return b.build()


def _combined(step: Exchange[Any], size: int, elements: int) -> Kernel | None:
    """A kernel that combines `size` operands in the order of the group; None without such one."""
    dtype = kernel_dtype(step.dtype)
    op = (_BOOLEAN if dtype == "bool" else {}).get(step.op or "", _OPS.get(step.op or ""))
    if dtype is None or op is None:
        return None
    b = Builder((elements,), ())
    operands, target = b.arg(dtype, size * elements), b.arg(dtype, elements, "out")
    with b.point():
        total = b.load(operands, (1,))
        for k in range(1, size):
            joined = b.op_if_supported(op, total, b.load(operands, (1,), k * elements))
            if joined is None:
                return None
            total = joined
        b.store(target, (1,), total)
    return b.build()


def _zeros(step: Exchange[Any]) -> Run:
    """A kernel that fills the output with zeros."""
    dtype, elements = _MOVED[step.dtype.itemsize], step.rows * step.count
    b = Builder((elements,), ())
    target = b.arg(dtype, elements, "out")
    with b.point():
        b.store(target, (1,), b.const(0, dtype))
    return Run(b.build(), (OUTPUT,))


def first_of_each(copies: Sequence[tuple[int, int, int, int, int]]) -> list[int]:
    """All words of copies, with whether each is the first of its device from its source."""
    words: list[int] = []
    seen: set[tuple[int, int]] = set()
    for copy in copies:
        words += [*copy, int(copy[:2] not in seen)]
        seen.add(copy[:2])
    return words
