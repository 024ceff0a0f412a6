"""An exchange of rectangles over ranks: what goes from which rank to which, and the way there.

By messages each rank packs one parcel for every other rank, with what the devices there lack; the
native rounds in shared memory (`shm_plans.py`) are the same moves as bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spmd.collectives.groups import Groups
from spmd.collectives.rectangles import Copies, Copy, gaps
from spmd.transport.checked import CheckedCommunicator
from spmd.transport.origin import Origin

Window = tuple[slice, ...]


def copies_of_groups(copies: Copies, groups: Groups) -> list[Copy]:
    """The copies between devices of a mesh: those of each group, by positions."""
    return [
        copy._replace(source=group[copy.source], target=group[copy.target])
        for group in groups
        for copy in copies.items
        if copy.count
    ]


def with_gaps(copies: Copies, groups: Groups, shape: Sequence[int]) -> set[int]:
    """The positions of devices whose results are not sent completely."""
    members = [k for k in range(len(groups[0])) if gaps(copies, k, shape)]
    return {group[k] for group in groups for k in members}


def _window(start: Sequence[int], sizes: Sequence[int]) -> Window:
    return tuple([slice(a, a + n) for a, n in zip(start, sizes, strict=True)])


class Parcels:
    """One exchange as messages: `run` serves all local devices at once.

    `ranks` are those of the devices, by position, and `local` numbers the devices of this one.
    """

    def __init__(
        self,
        copies: Copies,
        shape: Sequence[int],
        groups: Groups,
        ranks: Mapping[int, int],
        local: Mapping[int, int],
        comm: CheckedCommunicator,
        origin: Origin,
    ):
        self.comm, self.origin = comm, origin
        self.counts = [[0] * comm.size for _ in range(comm.size)]
        self.unfilled = [local[k] for k in with_gaps(copies, groups, shape) if k in local]
        self.near: list[tuple[int, Window, int, Window]] = []
        # Of the parcels, in their order: what is packed, and where what arrives goes.
        packed: list[list[tuple[int, Window]]] = [[] for _ in range(comm.size)]
        goals: list[dict[Any, list[tuple[int, Window]]]] = [{} for _ in range(comm.size)]
        known: set[Any] = set()
        for copy in copies_of_groups(copies, groups):
            source, target = ranks[copy.source], ranks[copy.target]
            place, start = _window(copy.place, copy.sizes), _window(copy.start, copy.sizes)
            if source == target:
                if source == comm.rank:
                    self.near.append((local[copy.source], start, local[copy.target], place))
                continue
            # Elements for several devices of a rank go there once.
            piece = copy.source, copy.start, copy.sizes
            if (target, piece) not in known:
                known.add((target, piece))
                self.counts[source][target] += copy.count
                if source == comm.rank:
                    packed[target].append((local[copy.source], start))
            if target == comm.rank:
                goals[source].setdefault(piece, []).append((local[copy.target], place))
        self.packed = [one for parcel in packed for one in parcel]
        self.goals = [places for parcel in goals for places in parcel.values()]

    def run(self, devices: Any, inputs: list[Any], outputs: list[Any]) -> None:
        """Give each local device its result."""
        given, made = [x[0] for x in inputs], [x[0] for x in outputs]
        for device in self.unfilled:
            made[device].view(np.uint8)[...] = 0
        for source, start, target, place in self.near:
            made[target][place] = given[source][start]
        dtype, rank = given[0].dtype, self.comm.rank
        buf = np.empty(sum(self.counts[rank]), dtype)
        out = np.empty(sum(row[rank] for row in self.counts), dtype)
        at = 0
        for device, start in self.packed:
            part = given[device][start]
            buf[at : at + part.size] = part.reshape(-1)
            at += part.size
        self.comm.all_to_all(buf, out, self.origin, self.counts)
        at = 0
        for places in self.goals:
            sizes = [rows.stop - rows.start for rows in places[0][1]]
            count = math.prod(sizes)
            for device, place in places:
                made[device][place] = out[at : at + count].reshape(sizes)
            at += count
