"""`jax._src.tree_util`: the names of `jax.tree_util`, and which classes are registered."""

from __future__ import annotations

from typing import Any

import spmd.tree_util as _ours
from spmd.base.errors import PytreeError
from spmd.base.tree import broadcast_prefix as _broadcast
from spmd.tree_util import is_tree_node


class _Registered:
    """The classes whose objects are containers."""

    def __contains__(self, kind: type) -> bool:
        return is_tree_node(kind)


_registry = _Registered()


def prefix_errors(prefix_tree: Any, full_tree: Any, is_leaf: Any = None) -> list[Any]:
    """The reasons that a tree is no prefix of another: functions of a name that make errors."""
    try:
        _broadcast(prefix_tree, full_tree, "{name}", is_leaf)
    except PytreeError as error:
        text = str(error)
        return [lambda name: ValueError(text.replace("{name}", name))]
    return []


def __getattr__(name: str) -> Any:
    return getattr(_ours, name)
