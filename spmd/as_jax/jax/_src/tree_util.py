"""`jax._src.tree_util`: the names of `jax.tree_util`, and which classes are registered."""

from __future__ import annotations

from typing import Any

import spmd.tree_util as _ours
from spmd.tree_util import is_tree_node


class _Registered:
    """The classes whose objects are containers."""

    def __contains__(self, kind: type) -> bool:
        return is_tree_node(kind)


_registry = _Registered()


def __getattr__(name: str) -> Any:
    return getattr(_ours, name)
