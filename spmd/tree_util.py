"""Pytrees: registration, key paths, and the functions of `spmd.tree` under their long names."""

# ruff: noqa: F401

import typing as _typing

from spmd.base.lazy_import import without as _without
from spmd.base.tree import (
    DictKey,
    FlattenedIndexKey,
    GetAttrKey,
    Partial,
    SequenceKey,
    all_leaves,
    keystr,
    register_dataclass,
    register_pytree_node,
    register_pytree_node_class,
    register_pytree_with_keys,
    register_pytree_with_keys_class,
    tree_all,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_leaves_with_path,
    tree_map,
    tree_map_with_path,
    tree_reduce,
    tree_structure,
    tree_transpose,
    tree_unflatten,
    treedef_tuple,
)
from spmd.base.tree import TreeDef as PyTreeDef
from spmd.base.tree_nodes import (
    KeyEntry,
    KeyPath,
    flatten_one_level,
    flatten_one_level_with_keys,
    is_tree_node,
    register_static,
    tree_broadcast,
    tree_reduce_associative,
    treedef_children,
    treedef_is_leaf,
)
from spmd.base.tree_structures import default_registry

if not _typing.TYPE_CHECKING:  # which knows what is missing by itself
    __getattr__ = _without(__name__)
