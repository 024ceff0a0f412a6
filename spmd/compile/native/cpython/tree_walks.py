"""Walks of pytrees as built-in functions, which take the place of Python's own in `base/tree.py`.

A process that compiles nothing, or walks few trees, does not pay for them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from spmd.base import tree
from spmd.compile.lazy import tree_walks_ir
from spmd.compile.native.cpython.builtin_function import make_builtin
from spmd.compile.native.cpython.object_layout import object_layout, tree_layout
from spmd.compile.native.llvm.compiler import Written, compile_written
from spmd.sharding import future
from spmd.sharding.array import Array


@cache
def native_walks() -> dict[str, Any]:
    """The walks that `base/tree.py` has in Python, and `settled(tree)`, by their names; or none."""
    layout, of_tree = object_layout(), tree_layout()
    if layout is None or of_tree is None:
        return {}
    written = Written(f"trees {layout} {of_tree}", lambda: tree_walks_ir.tree_text(layout, of_tree))
    found = compile_written(written)
    # In the order of `ir/tree_flatten.py`'s words.
    kept = (
        tuple,
        list,
        dict,
        None,
        *tree.walks.registries(),
        tree.LEAF,
        tree.NONE,
        tree.TreeDef,
        type,
        tree.flatten_container,
        tree.build_container,
        tree.flatten_container_up_to,
        Array,
        future.Future,
    )
    words = np.array([id(x) for x in kept], np.int64).tobytes()
    return {
        name: make_builtin(f"spmd_{name}", found[f"spmd_{name}"], (words, kept))
        for name in ("flatten", "flatten_up_to", "unflatten", "settled")
    }


# Trees and leaves walked in Python before native code is loaded, which takes some milliseconds, and
# the first time on a machine a hundred: as long as some thousand walks.
WALKS_IN_PYTHON = 200


class _Countdown:
    """Walks in Python, and counts trees and leaves."""

    def __init__(self) -> None:
        self.left = WALKS_IN_PYTHON

    def flatten(self, x: Any, leaves: list[Any]) -> tree.TreeDef:
        """The `walks.flatten` until native walks are installed."""
        if self.left <= 0:
            install_walks()
            return tree.walks.flatten(x, leaves)
        found = tree.flatten_in_python(x, leaves)
        self.left -= 1 + found.num_leaves
        return found


def expect_walks() -> None:
    """Install native walks when it is certain that there will be many."""
    if tree.walks.flatten is tree.flatten_in_python:
        tree.walks.flatten = _Countdown().flatten


def install_walks() -> None:
    """Let all of spmd walk trees natively, where that is possible."""
    tree.walks.flatten = tree.flatten_in_python
    found = native_walks()
    if found:
        tree.walks.flatten = found["flatten"]
        tree.walks.flatten_up_to = found["flatten_up_to"]
        tree.walks.unflatten = found["unflatten"]
        future.settled_check.is_settled = found["settled"]
