"""Single nodes of pytrees, static parts, prefixes spread, folds by pairs."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import pytest

import spmd
from spmd import errors, tree, tree_util

Point = namedtuple("Point", "x y")


def test_one_level_of_a_tree():
    assert tree_util.flatten_one_level({"b": [1, 2], "a": 3}) == ([3, [1, 2]], ("a", "b"))
    pairs, aux = tree_util.flatten_one_level_with_keys(Point(1, (2,)))
    assert [(str(k), child) for k, child in pairs] == [(".x", 1), (".y", (2,))] and aux is None
    with pytest.raises(errors.PytreeError, match="float is a leaf"):
        tree_util.flatten_one_level(1.0)


def test_structures_give_their_children():
    structure = tree.structure([(1, 2), 3, None])
    assert tree_util.treedef_children(structure) == [tree.structure(t) for t in [(1, 2), 3, None]]
    assert [tree_util.treedef_is_leaf(s) for s in structure.parts] == [False, True, True]
    assert tree_util.is_tree_node(Point) and not tree_util.is_tree_node(str)


def test_static_objects_are_structure():
    @tree_util.register_static
    class Mode(str):
        pass

    traces = []

    @spmd.jit
    def f(mode, x):
        traces.append(mode)
        return x + 1 if mode == "up" else x - 1

    assert [f(Mode("up"), 1.0), f(Mode("down"), 1.0), f(Mode("up"), 2.0)] == [2.0, 0.0, 3.0]
    assert traces == ["up", "down"]


def test_static_fields_of_dataclasses():
    @tree_util.register_dataclass
    @dataclass
    class Layer:
        weight: float
        name: str = tree.static(default="w", metadata={"unit": "m"})

    leaves, structure = tree.flatten(Layer(2.0))
    assert leaves == [2.0] and structure.unflatten([3.0]) == Layer(3.0, "w")


def test_prefixes_are_broadcast_over_subtrees():
    assert tree.broadcast((0, None), ({"a": 7, "b": 8}, [9])) == ({"a": 0, "b": 0}, [None])
    with pytest.raises(errors.PytreeError, match="prefix_tree"):
        tree.broadcast((0, 1, 2), (1, 2))


@pytest.mark.parametrize("count", range(1, 8))
def test_folding_by_pairs_keeps_the_order(count):
    calls = []

    def join(x, y):
        calls.append((x, y))
        return f"({x}{y})"

    letters = list("abcdefg"[:count])
    folded = tree.reduce_associative(join, letters)
    assert folded.replace("(", "").replace(")", "") == "".join(letters)
    assert len(calls) == count - 1
    depth = max(
        (folded[:k].count("(") - folded[:k].count(")") for k in range(len(folded))), default=0
    )
    assert depth <= 3


def test_an_empty_tree_needs_an_identity():
    assert tree.reduce_associative(max, [], identity=None) is None
    with pytest.raises(errors.PytreeError, match="identity"):
        tree.reduce_associative(max, {})


def test_leaves_are_chosen_by_their_path():
    pairs = tree.leaves_with_path(
        {"a": [1, 2], "b": [3]}, lambda path, x: tree_util.keystr(path) == "['a']", True
    )
    assert [x for _, x in pairs] == [[1, 2], 3]
