"""Pytrees: what is a container, in which order its leaves come, and how mismatches are named."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd.base.errors import ArgumentError, PytreeError
from spmd.base.tree import (
    Partial,
    all_leaves,
    broadcast_prefix,
    keystr,
    register_dataclass,
    register_pytree_node,
    register_pytree_node_class,
    register_pytree_with_keys,
    tree_all,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_with_path,
    tree_reduce,
    tree_structure,
    tree_transpose,
    tree_unflatten,
)

Point = namedtuple("Point", ["x", "y"])


@register_dataclass
@dataclass
class Layer:
    """A dataclass with arrays and a static field."""

    weight: Any
    bias: Any
    activation: str = field(default="tanh", metadata={"static": True})


@register_pytree_node_class
class Box:
    """A registered class that names no keys."""

    def __init__(self, *content: Any, label: str = ""):
        self.content = content
        self.label = label

    def __repr__(self):
        return f"Box{self.content}"

    def tree_flatten(self):
        return self.content, self.label

    @classmethod
    def tree_unflatten(cls, label, content):
        return cls(*content, label=label)


TREES = (
    3,
    None,
    (),
    (1, (2, [3, None])),
    {"b": 1, "a": {"d": 2, "c": (3,)}},
    Point(1, {"z": 2}),
    Layer(1, [2, 3], "relu"),
    Box(1, (2,), label="kept"),
    OrderedDict([("b", 1), ("a", 2)]),
    defaultdict(list, {"b": 1, "a": 2}),
)


@pytest.mark.parametrize("tree", TREES, ids=repr)
def test_unflatten_undoes_flatten(tree):
    leaves, structure = tree_flatten(tree)
    again = tree_unflatten(structure, leaves)
    assert type(again) is type(tree)
    assert tree_flatten(again) == (leaves, structure)
    assert structure.num_leaves == len(leaves)


nested = st.recursive(
    st.integers() | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(nested)
def test_any_nesting_comes_back(tree):
    leaves, structure = tree_flatten(tree)
    assert tree_unflatten(structure, leaves) == tree
    assert [x for _, x in tree_flatten_with_path(tree)[0]] == leaves
    assert hash(structure) == hash(tree_structure(tree))


def test_dict_order_is_that_of_its_keys():
    one, other = {"b": 1, "a": 2}, {"a": 2, "b": 1}
    assert tree_flatten(one) == tree_flatten(other)
    assert tree_leaves(one) == [2, 1]


def test_ordered_dict_keeps_insertion_order():
    assert tree_leaves(OrderedDict([("b", 1), ("a", 2)])) == [1, 2]


def test_none_is_a_container_without_leaves():
    assert tree_leaves((1, None, 2)) == [1, 2]
    assert tree_leaves((1, None), is_leaf=lambda x: x is None) == [1, None]


def test_static_fields_are_part_of_the_structure():
    assert tree_leaves(Layer(1, 2)) == [1, 2]
    assert tree_structure(Layer(1, 2, "relu")) != tree_structure(Layer(1, 2, "tanh"))


def test_register_dataclass_needs_fields_of_others():
    with pytest.raises(PytreeError, match="is no dataclass"):
        register_dataclass(type("Plain", (), {}))


def test_registering_twice_is_refused():
    with pytest.raises(PytreeError, match="Box is already registered"):
        register_pytree_node(Box, lambda b: (b.content, None), lambda _, c: Box(*c))


def test_keys_that_cannot_be_sorted_are_named():
    with pytest.raises(PytreeError, match=r"'a' \(str\), 1 \(int\)"):
        tree_flatten({"a": 1, 1: 2})


def test_paths_read_like_python():
    tree = {"w": [1, Point(2, 3)], "l": Layer(4, 5), "b": Box(6)}
    paths = [keystr(path) for path, _ in tree_flatten_with_path(tree)[0]]
    assert paths == [
        "['b'][<flat index 0>]",
        "['l'].weight",
        "['l'].bias",
        "['w'][0]",
        "['w'][1].x",
        "['w'][1].y",
    ]
    assert keystr(tree_flatten_with_path(tree)[0][5][0], simple=True, separator="/") == "w/1/y"


def test_registered_keys_are_used():
    class Pair:
        def __init__(self, a, b):
            self.a, self.b = a, b

    register_pytree_with_keys(
        Pair, lambda p: ([("first", p.a), ("second", p.b)], None), lambda _, c: Pair(*c)
    )
    assert [path for path, _ in tree_flatten_with_path(Pair(1, 2))[0]] == [("first",), ("second",)]


def test_map_of_several_trees():
    assert tree_map(lambda x, y: x + y, {"a": 1, "b": (2,)}, {"a": 10, "b": (20,)}) == {
        "a": 11,
        "b": (22,),
    }
    # Of a later tree, whole subtrees are handed over.
    assert tree_map(lambda x, y: y, {"a": 1}, {"a": (1, 2)}) == {"a": (1, 2)}
    assert tree_map_with_path(lambda p, x: keystr(p) + str(x), (1, {"k": 2})) == (
        "[0]1",
        {"k": "[1]['k']2"},
    )


def test_map_names_where_trees_differ():
    with pytest.raises(PytreeError, match=r"tree number 2\['a'\] must be a tuple with 2 children"):
        tree_map(lambda x, y: x, {"a": (1, 2)}, {"a": 3})
    with pytest.raises(PytreeError, match=r"keys 'a', 'b', got one of keys 'a', 'c'"):
        tree_map(lambda x, y: x, {"a": 1, "b": 2}, {"a": 1, "c": 2})
    with pytest.raises(PytreeError, match="2 leaves, but got 1"):
        tree_unflatten(tree_structure((1, 2)), [1])


def test_reductions_over_leaves():
    assert tree_reduce(lambda x, y: x * 10 + y, {"b": 3, "a": (1, 2)}) == 123
    assert tree_reduce(lambda x, y: x + y, (), 5) == 5
    assert tree_all({"a": True, "b": ()}) and not tree_all((True, 0))
    assert all_leaves([1, "a"]) and not all_leaves([1, (2,)])


def test_transpose_turns_inside_out():
    outer, inner = tree_structure([0, 0]), tree_structure({"a": 0, "b": 0})
    assert tree_transpose(outer, inner, [{"a": 1, "b": 2}, {"a": 3, "b": 4}]) == {
        "a": [1, 3],
        "b": [2, 4],
    }
    assert tree_transpose(outer, None, [{"a": 1}, {"a": 2}]) == {"a": [1, 2]}


def test_prefixes_spread_over_subtrees():
    tree = ({"a": 1, "b": (2, 3)}, 4)
    assert broadcast_prefix(7, tree, "in_axes") == [7] * 4
    assert broadcast_prefix(({"a": 0, "b": None}, 1), tree, "in_axes") == [0, None, None, 1]
    # Lists and tuples stand for each other in prefixes.
    assert broadcast_prefix([0, 1], tree, "in_axes") == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("prefix", "text"),
    [
        (({"a": 0},), "in_axes has 1 children, but the value there has 2 children"),
        (({"a": 0}, 1), r"in_axes\[0\] has keys 'a', but the value there has keys 'a', 'b'"),
        ((0, {"a": 0}), r"in_axes\[1\] is a dict .* but the value there is a int"),
    ],
)
def test_prefix_errors_name_the_place(prefix, text):
    with pytest.raises(PytreeError, match=text):
        broadcast_prefix(prefix, ({"a": 1, "b": 2}, 3), "in_axes")


def test_partial_carries_its_arguments_as_children():
    f = Partial(lambda x, y, z: (x, y, z), 1, z=3)
    assert f(2) == (1, 2, 3)
    doubled = tree_map(lambda x: 2 * x, f)
    assert doubled(0) == (2, 0, 6)
    with pytest.raises(ArgumentError, match="not callable"):
        Partial(3)


class Shifted(NamedTuple):
    """A named tuple that is a sequence of its own kind: a leaf's rows."""

    rows: Any

    def __len__(self) -> int:
        raise TypeError("no length")

    def __getitem__(self, k):
        return Shifted(self.rows[k])

    def __iter__(self):
        raise TypeError("no iteration")


def test_fields_of_a_named_tuple_are_its_children_whatever_its_methods_say():
    tree = {"a": Shifted(1.0)}
    leaves, treedef = tree_flatten(tree)
    assert leaves == [1.0]
    assert tree_unflatten(treedef, [2.0])["a"].rows == 2.0
    (path, leaf), *rest = tree_flatten_with_path(tree)[0]
    assert (keystr(path), leaf, rest) == ("['a'].rows", 1.0, [])
    assert tree_map(lambda x: -x, tree)["a"].rows == -1.0
