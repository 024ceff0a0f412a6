"""Pytrees under their short names: `spmd.tree.map`, `spmd.tree.leaves`, ..."""

# ruff: noqa: F401

from spmd.base.tree import tree_all as all
from spmd.base.tree import tree_flatten as flatten
from spmd.base.tree import tree_flatten_with_path as flatten_with_path
from spmd.base.tree import tree_leaves as leaves
from spmd.base.tree import tree_leaves_with_path as leaves_with_path
from spmd.base.tree import tree_map as map
from spmd.base.tree import tree_map_with_path as map_with_path
from spmd.base.tree import tree_reduce as reduce
from spmd.base.tree import tree_structure as structure
from spmd.base.tree import tree_transpose as transpose
from spmd.base.tree import tree_unflatten as unflatten
from spmd.base.tree_nodes import static
from spmd.base.tree_nodes import tree_broadcast as broadcast
from spmd.base.tree_nodes import tree_reduce_associative as reduce_associative
