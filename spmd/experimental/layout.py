"""Layouts of arrays in memory: `Layout`, and `Format`, which `device_put` takes as a sharding."""

from __future__ import annotations

from typing import Any

from spmd.base.tree import tree_leaves
from spmd.sharding.xla.layout import Format, Layout, check_order

__all__ = ["Format", "Layout", "with_layout_constraint"]


def with_layout_constraint(x: Any, layouts: Any) -> Any:
    """Return arrays as they are, after a check that `layouts` are row-major, as all arrays are.

    `layouts` is a `Layout` for all of the pytree `x`, or a pytree of them. Raises `ArgumentError`
    for another order of the dims.

    >>> with_layout_constraint(snp.ones((2, 3)), Layout((0, 1))).shape
    (2, 3)
    """
    for layout in tree_leaves(layouts, is_leaf=lambda node: isinstance(node, Layout)):
        check_order(layout)
    return x
