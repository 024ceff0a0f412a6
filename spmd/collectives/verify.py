"""`SPMD_DEBUG` for collectives over ranks: "2" prints them, "collectives" checks results.

The operands are sent once more, with checksums, and every rank works the definition out for itself.
A result that is another one ends the program on every rank with the same error; NaN in an operand
is told, and the program goes on. This takes n times the traffic and memory: it is for looking for a
fault, not for every day.
"""

from __future__ import annotations

import sys
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from spmd.base import dtypes
from spmd.base.config import config
from spmd.base.errors import CollectiveError, CollectiveWarning
from spmd.collectives.groups import Groups
from spmd.core.primitive import Primitive
from spmd.transport.checked import CheckedCommunicator
from spmd.transport.origin import Origin

Move = Callable[[Any, list[Any], list[Any]], None]


class HostCollective(Protocol):
    """The fields that are read of a collective over ranks, as `host_execution.py` has it."""

    prim: Primitive
    params: dict[str, Any]
    comm: CheckedCommunicator
    origin: Origin
    groups: Groups
    local: list[int]  # the positions of this process's devices
    where: dict[int, int]  # position: which of the local devices it is
    order: list[int]  # all positions, process by process


# Reductions of floats may associate in another order than the definition: relative to the sum of
# the magnitudes, for each dtype as stored.
_ROUNDING = {2: 2e-2, 4: 1e-5, 8: 1e-13, 16: 1e-13}


def is_on() -> bool:
    """Whether collectives over ranks are checked (`SPMD_DEBUG` contains "collectives")."""
    return "collectives" in config.debug


def prints() -> bool:
    """Whether collectives over ranks are printed as they happen (`SPMD_DEBUG` contains 2)."""
    return "2" in config.debug


def watched(collective: HostCollective, move: Move) -> Move:
    """The same collective, printed and verified as far as `SPMD_DEBUG` asks for it."""
    if is_on():
        move = verified(collective, move)
    return printed(collective, move) if prints() else move


def printed(collective: HostCollective, move: Move) -> Move:
    """The same collective, which says on stderr when it begins and how long it took."""

    def run(devices: Any, inputs: list[Any], outputs: list[Any]) -> None:
        began = time.perf_counter()
        print(f"rank {collective.comm.rank} | {collective.origin}", file=sys.stderr, flush=True)
        move(devices, inputs, outputs)
        took = 1e3 * (time.perf_counter() - began)
        print(
            f"rank {collective.comm.rank} | {_name(collective)} took {took:.3f} ms",
            file=sys.stderr,
            flush=True,
        )

    return run


def verified(collective: HostCollective, move: Move) -> Move:
    """The same collective, whose results are compared with its definition."""

    def run(devices: Any, inputs: list[Any], outputs: list[Any]) -> None:
        mine = [np.array(x[0]) for x in inputs]
        move(devices, inputs, outputs)
        told = collective.comm.all_gather_object([(zlib.crc32(_bytes(x)), x) for x in mine])
        operands = [pair for pairs in told for pair in pairs]
        value = dict(zip(collective.order, (x for _, x in operands), strict=True))
        _tell_of_nan(collective, mine)
        problems = [
            f"what device {k} sent arrived with another checksum"
            for k, (checksum, x) in zip(collective.order, operands, strict=True)
            if zlib.crc32(_bytes(x)) != checksum
        ]
        problems += _differences(collective, value, outputs)
        found = collective.comm.all_gather_object(problems)
        if any(found):
            raise CollectiveError(_report(collective, found))

    return run


def _bytes(x: np.ndarray) -> bytes:
    return np.ascontiguousarray(x).tobytes()


def _tell_of_nan(collective: HostCollective, mine: Sequence[np.ndarray]) -> None:
    for position, x in zip(collective.local, mine, strict=True):
        if dtypes.is_inexact(x.dtype) and (count := int(np.count_nonzero(x != x))):
            message = f"{_name(collective)}: the operand of device {position} has {count} NaN"
            warnings.warn(message, CollectiveWarning, stacklevel=2)


def _differences(
    collective: HostCollective, value: dict[int, np.ndarray], outputs: list[Any]
) -> list[str]:
    """The differences between this process's results and the definition."""
    members = collective.prim.members
    assert members is not None
    problems = []
    for group in collective.groups:
        if not any(k in collective.where for k in group):
            continue
        wanted = members([value[k] for k in group], **collective.params)
        size = (
            sum(np.abs(value[k]).astype(np.float64) for k in group) if _adds(collective) else None
        )
        for k, expected in zip(group, wanted, strict=True):
            if k in collective.where:
                got = outputs[collective.where[k]][0]
                right = np.asarray(expected).reshape(got.shape)
                at = _first_difference(got, right, size)
                if at is not None:
                    what = f"{got[at]} and must be {right[at]}"
                    problems.append(f"on device {k} element {_index(at)} of the result is {what}")
    return problems


def _adds(collective: HostCollective) -> bool:
    return collective.prim.name in ("psum", "reduce_scatter")


def _first_difference(got: np.ndarray, wanted: np.ndarray, size: Any) -> tuple[int, ...] | None:
    """The index of the first element that differs by more than rounding."""
    if size is not None and dtypes.is_inexact(got.dtype):
        real = got.dtype.itemsize // (2 if got.dtype.kind == "c" else 1)
        with np.errstate(invalid="ignore"):
            close = np.abs(got - wanted) <= _ROUNDING[real] * np.max(size, initial=0.0)
        same = close | (got == wanted) | ((got != got) & (wanted != wanted))
    else:
        # By bits: moving data must not even change the payload of a NaN.
        raw = (np.ascontiguousarray(x).view(np.uint8).reshape(*x.shape, -1) for x in (got, wanted))
        same = np.all(np.equal(*raw), axis=-1)
    if np.all(same):
        return None
    return tuple(int(i) for i in np.argwhere(~np.asarray(same))[0])


def _index(at: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, at))}]"


def _name(collective: HostCollective) -> str:
    origin = collective.origin
    operand = f" of {origin.operand}" if origin.operand else ""
    return f"{collective.prim.name}{operand} at {origin.source}"


def _report(collective: HostCollective, found: list[list[str]]) -> str:
    first, *rest = (
        f"rank {r}: {problem}" for r, problems in enumerate(found) for problem in problems
    )
    text = (
        f"{_name(collective)}: data was changed on the way between ranks of "
        f"{collective.comm.name}; {first}"
    )
    return "\n  ".join([text, *rest])
