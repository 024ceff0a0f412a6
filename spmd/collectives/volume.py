"""The bytes that a device receives in a collective: a formula for each kind of primitive."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from spmd.core.ir import Eqn

# The names in XLA and NCCL of the primitives that move data.
KINDS = {
    "psum": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ppermute": "permute",
    "exchange": "exchange",
}


def axes_of(eqn: Eqn) -> tuple[Any, ...]:
    """The axes that a collective is over."""
    axes = eqn.params["axes"]
    return axes if isinstance(axes, tuple) else (axes,)


def received(eqn: Eqn, sizes: Mapping[Any, int]) -> int:
    """The bytes that a device receives, over axes of these sizes."""
    n = math.prod(sizes.get(a, 1) for a in axes_of(eqn))
    kind, size = KINDS[eqn.prim.name], eqn.invars[0].aval.nbytes
    if kind == "exchange":
        most = max(eqn.params["copies"].received().values(), default=0)
        return most * eqn.invars[0].aval.dtype.itemsize
    return {
        "all_reduce": 2 * size * (n - 1) // n,
        "all_gather": size * (n - 1),
        "reduce_scatter": size * (n - 1) // n,
        "all_to_all": size * (n - 1) // n,
        "permute": size,
    }[kind]
