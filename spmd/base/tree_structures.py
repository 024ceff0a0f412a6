"""The methods of JAX's `PyTreeDef` on structures: compose, walk, write to bytes.

The functions become methods of `TreeDef` when this module is imported, which `spmd.tree_util` does.

No function here recurses: structures may be as deep as they like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from spmd.base.errors import PytreeError
from spmd.base.tree import (
    LEAF,
    NONE,
    TreeDef,
    container_of,
    register_pytree_node,
    tree_flatten,
)


def _children_first(tree: TreeDef) -> Iterator[TreeDef]:
    waiting = [(tree, False)]
    while waiting:
        node, done = waiting.pop()
        if done or not node.parts:
            yield node
            continue
        waiting.append((node, True))
        waiting += [(child, False) for child in reversed(node.parts)]


def node_data(tree: TreeDef) -> tuple[type, Any] | None:
    """The class of a container and what it holds beside its children; None for a leaf."""
    if tree.kind is None:
        return None
    return tree.kind, list(tree.aux) if tree.kind is dict else tree.aux


def from_node_data(data: tuple[type, Any] | None, children: Iterable[TreeDef]) -> TreeDef:
    """The structure of a container, from `node_data` and the structures of its children."""
    parts = tuple(children)
    if data is None:
        if parts:
            raise PytreeError(f"a leaf has no children, and {len(parts)} are given")
        return LEAF
    kind, aux = data
    if container_of(kind) is None:
        raise PytreeError(f"{kind.__name__} is no container of pytrees; register it first")
    return TreeDef(kind, tuple(aux) if kind is dict else aux, parts)


def compose(outer: TreeDef, inner: TreeDef) -> TreeDef:
    """`outer` with `inner` in place of each leaf."""
    made: list[TreeDef] = []
    for node in _children_first(outer):
        if node.kind is None:
            made.append(inner)
            continue
        first = len(made) - len(node.parts)
        made[first:] = [TreeDef(node.kind, node.aux, tuple(made[first:]))]
    return made[0]


def walk(
    tree: TreeDef, f_node: Callable[[Any, Any], Any], f_leaf: Any, leaves: Iterable[Any]
) -> Any:
    """The result of `f_node(children, node_data)` for the whole, children first."""
    values, made = iter(leaves), []
    for node in _children_first(tree):
        if node.kind is None:
            try:
                leaf = next(values)
            except StopIteration:
                raise PytreeError(f"walk: {tree} has {tree.num_leaves} leaves; too few") from None
            made.append(leaf if f_leaf is None else f_leaf(leaf))
            continue
        first = len(made) - len(node.parts)
        data = node_data(node)
        made[first:] = [f_node(tuple(made[first:]), data and data[1])]
    if next(values, made) is not made:
        raise PytreeError(f"walk: {tree} has {tree.num_leaves} leaves; too many were given")
    return made[0]


def from_iterable_tree(tree: TreeDef, nested: Any) -> Any:
    """A tree of a structure, from nested iterables of the same nesting."""
    leaves: list[Any] = []
    waiting = [(tree, nested)]
    while waiting:
        node, x = waiting.pop()
        if node.kind is None:
            leaves.append(x)
            continue
        parts = [] if x is None else list(x)
        if len(parts) != len(node.parts):
            raise PytreeError(f"{node} has {len(node.parts)} children, got {len(parts)}")
        waiting += reversed(list(zip(node.parts, parts, strict=True)))
    return tree.unflatten(leaves)


class Registry:
    """The registry of containers, as an object: there is one, `default_registry`."""

    def flatten(self, tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
        """The leaves of a tree, and its structure."""
        return tree_flatten(tree, is_leaf)

    def flatten_one_level(self, tree: Any) -> Any:
        """The children of a container, and what else it holds; None for a leaf."""
        container = container_of(type(tree))
        return None if container is None else container.flatten(tree)

    def register_node(self, kind: type, to_iterable: Any, from_iterable: Any) -> None:
        """Make a class a container."""
        register_pytree_node(kind, to_iterable, from_iterable)


default_registry = Registry()

# ---- bytes -------------------------------------------------------------------------------------

_KINDS: dict[str, type] = {"tuple": tuple, "list": list, "dict": dict}


def serialize(tree: TreeDef) -> bytes:
    """A structure of built-in containers as bytes: its nodes, children first."""
    import json  # trees are seldom written, and every program imports this module

    words: list[Any] = []
    for node in _children_first(tree):
        if node.kind is None or node.kind is type(None):
            words.append("*" if node.kind is None else "None")
        elif node.kind in (tuple, list):
            words.append([node.kind.__name__, len(node.parts)])
        elif node.kind is dict and all(type(key) in (str, int) for key in node.aux):
            words.append(["dict", list(node.aux)])
        else:
            raise PytreeError(
                f"serialize_using_proto: {tree} holds a {node.kind.__name__}; only tuples, lists, "
                "None and dicts with text or integers as keys can be written. spmd.export writes "
                "registered classes"
            )
    return json.dumps(words).encode()


def deserialize(data: bytes) -> TreeDef:
    """The structure that `serialize` wrote."""
    import json

    made: list[TreeDef] = []
    for word in json.loads(data):
        if isinstance(word, str):
            made.append(LEAF if word == "*" else NONE)
            continue
        kind, more = _KINDS[word[0]], word[1]
        count = len(more) if kind is dict else more
        first = len(made) - count
        aux = tuple(more) if kind is dict else None
        made[first:] = [TreeDef(kind, aux, tuple(made[first:]))]
    return made[0]


def num_nodes(tree: TreeDef) -> int:
    """The number of containers and leaves."""
    return sum(1 for _ in _children_first(tree))


_METHODS: dict[str, Any] = {
    "children": lambda tree: list(tree.parts),
    "compose": compose,
    "deserialize_using_proto": staticmethod(lambda registry, data: deserialize(data)),
    "from_iterable_tree": from_iterable_tree,
    "from_node_data_and_children": staticmethod(
        lambda registry, data, children: from_node_data(data, children)
    ),
    "node_data": node_data,
    "num_nodes": property(num_nodes),
    "serialize_using_proto": serialize,
    "walk": walk,
}
for _name, _method in _METHODS.items():
    setattr(TreeDef, _name, _method)
