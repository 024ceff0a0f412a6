"""Single nodes of pytrees, and trees that are filled from prefixes or folded by pairs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

from spmd.base.errors import PytreeError
from spmd.base.tree import (
    NOTHING,
    DictKey,
    FlattenedIndexKey,
    GetAttrKey,
    SequenceKey,
    TreeDef,
    broadcast_prefix,
    container_of,
    keys_of,
    register_pytree_node,
    tree_leaves,
    tree_structure,
)

KeyEntry: TypeAlias = DictKey | FlattenedIndexKey | GetAttrKey | SequenceKey | Hashable
KeyPath: TypeAlias = tuple[KeyEntry, ...]

# ---- one level ---------------------------------------------------------------------------------


def is_tree_node(typ: type) -> bool:
    """Whether objects of a class are containers: built-in, a named tuple, or registered.

    >>> is_tree_node(dict), is_tree_node(float)
    (True, False)
    """
    return container_of(typ) is not None


def _one_level(name: str, tree: Any) -> tuple[Any, Any, Any]:
    container = container_of(type(tree))
    if container is None:
        raise PytreeError(f"{name}: {type(tree).__name__} is a leaf, no registered container")
    children, aux = container.flatten(tree)
    return container, list(children), aux


def flatten_one_level(tree: Any) -> tuple[list[Any], Any]:
    """The children of a container and the other data that rebuild it.

    Raises `PytreeError` for a leaf.

    >>> flatten_one_level({"b": [1, 2], "a": 3})
    ([3, [1, 2]], ('a', 'b'))
    """
    return _one_level("flatten_one_level", tree)[1:]


def flatten_one_level_with_keys(tree: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """`flatten_one_level` with (path step, child) pairs."""
    container, children, aux = _one_level("flatten_one_level_with_keys", tree)
    keys = keys_of(tree, container, aux, len(children))
    return list(zip(keys, children, strict=True)), aux


def treedef_children(treedef: TreeDef) -> list[TreeDef]:
    """The structures of the children of a structure.

    >>> treedef_children(tree_structure([(1, 2), 3]))
    [PyTreeDef((*, *)), PyTreeDef(*)]
    """
    return list(treedef.parts)


def treedef_is_leaf(treedef: TreeDef) -> bool:
    """Whether a structure has one node: a single leaf, or an empty container as None is."""
    return treedef.num_nodes == 1


# ---- static parts ------------------------------------------------------------------------------


def register_static(cls: type) -> type:
    """Class decorator: the objects, which must be hashable, are containers without leaves.

    To `jit` such an argument is part of the structure: another value compiles another program.
    """
    register_pytree_node(cls, lambda x: ((), x), lambda x, _: x)
    return cls


def static(**kwargs: Any) -> Any:
    """`dataclasses.field` for an attribute that `register_dataclass` takes as structure."""
    import dataclasses  # takes long, and spmd itself can start without it

    metadata = {**(kwargs.pop("metadata", None) or {}), "static": True}
    return dataclasses.field(metadata=metadata, **kwargs)


# ---- whole trees -------------------------------------------------------------------------------


def tree_broadcast(prefix_tree: Any, full_tree: Any, is_leaf: Any = None) -> Any:
    """The tree of the structure of `full_tree` whose leaves are those of a prefix of it.

    >>> tree_broadcast((0, 1), ({"a": 7, "b": 8}, 9))
    ({'a': 0, 'b': 0}, 1)
    """
    leaves = broadcast_prefix(prefix_tree, full_tree, "tree_broadcast: prefix_tree", is_leaf)
    return tree_structure(full_tree).unflatten(leaves)


def spread_over_structure(prefix: Any, treedef: TreeDef, what: str, value: str) -> list[Any]:
    """`broadcast_prefix` over a structure, whose containers never see values.

    Where the prefix goes into them they hold `object()`s, as in JAX: the values that are at hand
    need not be those that the containers check for (batch dims may stand elsewhere).

    >>> spread_over_structure((0, None), tree_structure(({"a": 1, "b": 2}, 3)), "out_axes", "it")
    [0, 0, None]
    """
    if prefix is None or container_of(type(prefix)) is None:
        return [prefix] * treedef.num_leaves
    stand_ins = treedef.unflatten([object()] * treedef.num_leaves)
    return broadcast_prefix(prefix, stand_ins, what, value=value)


def tree_reduce_associative(
    operation: Callable[[Any, Any], Any],
    tree: Any,
    *,
    identity: Any = NOTHING,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """Fold an associative operation over the leaves, neighbours first: of logarithmic depth.

    An empty tree gives `identity`; without one it raises `PytreeError`.

    >>> tree_reduce_associative(lambda x, y: x + y, ["a", ("b", "c")])
    'abc'
    """
    values = tree_leaves(tree, is_leaf)
    if not values:
        if identity is NOTHING:
            raise PytreeError("tree_reduce_associative: the tree has no leaves; give identity=")
        return identity
    while len(values) > 1:
        pairs = [operation(*values[k : k + 2]) for k in range(0, len(values) - 1, 2)]
        values = pairs + values[2 * len(pairs) :]
    return values[0]
