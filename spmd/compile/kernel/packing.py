"""Packing: an operand of a product, rewritten once in the order in which products read it.

A product packs its part of B for each block of rows, again in every iteration of a loop. Where
several blocks or iterations use the same B, a step of its own packs it before them: converted to
the dtype of the arithmetic, in panels of columns (`Operand.panel`). A backend decides which
products profit, and how wide panels are.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from spmd.base.record import record
from spmd.compile.kernel.dtypes import itemsize
from spmd.compile.kernel.matmul import Operand

Array = np.ndarray[Any, Any]


@record
class Packing:
    """B of k x n for each index of the batch dims, to panels of `panel` columns.

    Each panel is a contiguous matrix of k x panel; they follow each other, in the last one the
    columns behind n are undefined.
    """

    k: int
    n: int
    source: Operand
    carried: str
    panel: int
    batch: tuple[int, ...] = ()

    @property
    def panels(self) -> int:
        """The number of panels a matrix has."""
        return -(-self.n // self.panel)

    @property
    def size(self) -> int:
        """Elements of the result."""
        return math.prod(self.batch) * self.panels * self.panel * self.k

    @property
    def nbytes(self) -> int:
        """Bytes of the result."""
        return self.size * itemsize(self.carried)

    @property
    def target(self) -> Operand:
        """The layout of the result."""
        size = self.panels * self.panel * self.k
        strides = [size * math.prod(self.batch[d + 1 :]) for d in range(len(self.batch))]
        return Operand(self.carried, self.panel, self.k, tuple(strides), self.panel)
