"""Executables: a compiled closed jaxpr that takes and gives arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.core.call import impl_jaxpr
from spmd.core.ir import ClosedJaxpr
from spmd.core.trace import to_numpy
from spmd.sharding.array import Array, from_numpy


class Executable:
    """Runs one program; call it with the flat list of arguments."""

    def __init__(self, closed: ClosedJaxpr, donated: Sequence[bool] = ()):
        self.closed = closed
        self.donated = tuple(donated)

    def __call__(self, leaves: Sequence[Any]) -> list[Array]:
        outs = impl_jaxpr(np, self.closed, *[to_numpy(x) for x in leaves])
        avals = self.closed.out_avals
        return [from_numpy(x, a) for x, a in zip(outs, avals, strict=True)]

    def as_text(self) -> str:
        return str(self.closed)
