"""`jax._src.tree_util`: the names of `jax.tree_util`, and which classes are registered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import spmd.tree_util as _ours
from spmd.base.errors import PytreeError
from spmd.base.tree import _containers
from spmd.base.tree import broadcast_prefix as _broadcast
from spmd.base.tree import container_of as _container_of
from spmd.base.tree import is_named_tuple as _is_named_tuple


class _RegistryEntry(NamedTuple):
    """How objects of a class are taken apart, and put together from the rest and the children."""

    to_iter: Callable[[Any], Any]
    from_iter: Callable[[Any, Any], Any]


class _Registered(Mapping[type, _RegistryEntry]):
    """The classes whose objects are containers, as the dict that libraries read.

    JAX keeps named tuples elsewhere.
    """

    def __getitem__(self, kind: type) -> _RegistryEntry:
        found = _container_of(kind)
        if found is None or _is_named_tuple(kind):
            raise KeyError(kind)
        return _RegistryEntry(found.flatten, found.unflatten)

    def __iter__(self) -> Iterator[type]:
        return iter([kind for kind in list(_containers) if not _is_named_tuple(kind)])

    def __len__(self) -> int:
        return len(list(iter(self)))


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
