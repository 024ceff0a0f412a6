"""The positions of a program's devices in its mesh, and constants that differ between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from spmd.base.record import field, record
from spmd.core.ir import Eqn
from spmd.transport.origin import Origin


@record
class Topology:
    """The mesh a program runs on: its axes, where each position lives, and which are here.

    `origins` says of each collective which one of the program's it is; empty within a process.
    `overlaps` says whether exchanges between processes may run while the program computes, and
    `direct` how its platform makes them in the devices' own memory, see `Backend`.
    """

    sizes: dict[Any, int]
    processes: tuple[int, ...]
    mine: int
    devices: tuple[Any, ...] = ()
    origins: dict[Eqn, Origin] = field(default_factory=dict)
    overlaps: bool = False
    direct: Callable[..., Any] | None = None

    @property
    def local(self) -> list[int]:
        """The positions of this process's devices, in mesh order."""
        return [k for k, p in enumerate(self.processes) if p == self.mine]

    @property
    def is_spread(self) -> bool:
        """Whether other processes have devices of the mesh."""
        return any(p != self.mine for p in self.processes)

    def along(self, axis: Any) -> list[int]:
        """The position of each local device along one axis."""
        indices = self.indices_along(axis)
        return [indices[k] for k in self.local]

    def indices_along(self, axis: Any) -> list[int]:
        """The index of each position of the mesh along one axis."""
        names = list(self.sizes)
        below = math.prod(self.sizes[n] for n in names[names.index(axis) + 1 :])
        return [k // below % self.sizes[axis] for k in range(len(self.processes))]


class PerDevice:
    """A constant with another value on each local device."""

    def __init__(self, values: list[np.ndarray]):
        self.values = values
