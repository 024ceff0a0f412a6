"""`debug_nans` and `debug_infs` over a mesh: which operation did it, on which device of which rank.

A NaN on one rank must not raise on that rank alone: the others would wait for it. So the ranks say
after each call whether they hold one; if any does, all run the program again in lockstep, each
notes the first that it sees, and all raise the same error about the earliest. A program that was
partitioned is then run on whole values, which tells the index that its user knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from spmd.base.record import record
from spmd.base.source import current_source
from spmd.compile.executable.nan_check import Culprit, search_nan, what_is_wrong
from spmd.core.ir import ClosedJaxpr
from spmd.core.primitive import Primitive
from spmd.core.trace import to_numpy
from spmd.sharding.array import Array
from spmd.sharding.lockstep_interpreter import Lockstep, Values
from spmd.sharding.spec import Mesh
from spmd.transport import world
from spmd.transport.origin import Origin


class _Finding(NamedTuple):
    """The `order`-th operation made a NaN on the device at mesh position `position`."""

    order: int
    position: int
    text: str
    prim: str
    place: str
    source: Any


@record
class Whole:
    """A program before it was partitioned, and its arguments."""

    closed: ClosedJaxpr
    arguments: Sequence[Any]


class _Search(Lockstep):
    """Runs a program in lockstep and notes the first NaN that was not there before."""

    def __init__(self, mesh: Mesh):
        self._devices = mesh.flat_devices()
        processes = [d.process_index for d in self._devices]
        super().__init__(mesh.shape, processes, self._devices)
        self.found: list[_Finding] = []  # of the first operation that made one
        self._done = 0

    def apply(self, prim: Primitive, operands: Sequence[Values], params: dict[str, Any]) -> Any:
        outs = super().apply(prim, operands, params)
        self._done += 1
        if not self.found and prim.members is None:  # a collective brings results of others
            rows = list(zip(*outs, strict=True)) if prim.multiple else [(x,) for x in outs]
            for j, row in enumerate(rows):
                bad = next(filter(None, map(what_is_wrong, row)), None)
                if bad is not None and not any(what_is_wrong(x[j]) for x in operands):
                    said = f"{prim.name} made {bad}"
                    self.found.append(self._finding(j, said, current_source(), prim.name))
        return outs

    def argument(self, name: str, values: Values) -> None:
        """Note a NaN in an argument."""
        for j, value in enumerate(values):
            bad = what_is_wrong(value)
            if bad is not None:
                self.found.append(self._finding(j, f"argument {name} holds {bad}", ""))

    def _finding(self, j: int, what: str, source: Any, prim: str = "") -> _Finding:
        k = self.local[j]
        place = ", ".join(f"{name}={index}" for name, index in self.positions[k].items())
        rank = f"rank {self.processes[k]}, " if self.is_spread else ""
        at = f" at {source}" if source else ""
        on = f"on {rank}{self._devices[k]} ({place})"
        return _Finding(self._done, k, f"{what} {on}{at}", prim, on, source)


def check_mesh_nans(
    name: str,
    closed: ClosedJaxpr,
    mesh: Mesh,
    shards: Sequence[Sequence[Any]],
    outs: Sequence[Sequence[Any]],
    whole: Whole | None = None,
) -> None:
    """Raise on every rank if any device of any rank holds a NaN among its results.

    `shards` are each local device's operands, operand by operand, `outs` its results. `whole` is
    the program before it was partitioned.
    """
    search = _Search(mesh)
    mine = any(what_is_wrong(x) for row in outs for x in row)
    if not any(_everyone(search, f"the NaN check of {name}", mine)):
        return
    given = [[to_numpy(x) for x in row] for row in shards]
    names = closed.jaxpr.arg_names
    for k, values in enumerate(given):
        at = k - len(given) + len(names)
        search.argument(names[at] if at >= 0 else f"number {k}", values)
    with np.errstate(all="ignore"):
        search.run(closed, given)
    said = _everyone(search, f"the search for a NaN in {name}", search.found)
    found = [finding for part in said for finding in part]
    culprit = None if whole is None else _on_whole_values(search, whole)
    if culprit is not None and not (found and culprit.prim == "shard_map"):
        alike = [f for f in found if (f.prim, f.source) == (culprit.prim, culprit.source)]
        on = f" {min(alike, key=_order).place}" if alike else ""
        raise FloatingPointError(f"{name}: {culprit.text}{on} at {culprit.source}")
    if not found:
        raise FloatingPointError(
            f"{name}: a result holds a NaN or inf that no device made by itself: a sum over "
            "devices overflowed, or met infinities of both signs"
        )
    first = min(found, key=_order)
    places = [f for f in found if f.order == first.order]
    others = f" (and on {len(places) - 1} more devices)" if places[1:] else ""
    raise FloatingPointError(f"{name}: {first.text}{others}")


def _order(finding: _Finding) -> tuple[int, int]:
    return finding.order, finding.position


def _on_whole_values(search: _Search, whole: Whole) -> Culprit | None:
    """The meaning of the program on whole values; every rank gets those that lie on others."""
    closed = whole.closed
    consts, arguments = (
        [_whole_value(search, x) for x in values] for values in (closed.consts, whole.arguments)
    )
    return search_nan(closed, consts, arguments)


def _whole_value(search: _Search, x: Any) -> Any:
    if not isinstance(x, Array) or x.shards is None or x.is_fully_addressable:
        return to_numpy(x)
    own = [(shard.index, np.asarray(shard.data)) for shard in x.addressable_shards]
    out = np.empty(x.shape, x.dtype)
    for part in _everyone(search, "the values of an argument with a NaN", own):
        for index, data in part:
            out[index] = data
    return out


def _everyone(search: _Search, what: str, mine: Any) -> list[Any]:
    """The values of all ranks."""
    if not search.is_spread:
        return [mine]
    return world.world().all_gather_object(mine, Origin(what))
