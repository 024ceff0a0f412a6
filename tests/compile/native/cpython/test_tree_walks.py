"""Native walks of pytrees give what the Python text of `base/tree.py` gives, and raise the same."""

from __future__ import annotations

import gc
import pickle
import sys
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spmd
import spmd.numpy as snp
from spmd.base import tree
from spmd.base.errors import PytreeError
from spmd.compile.native.cpython import tree_walks
from spmd.sharding.array import Array, from_memory
from spmd.sharding.future import Future
from tests.threads import in_threads

native = tree_walks.native_walks()
pytestmark = pytest.mark.skipif(not native, reason="this interpreter's objects have no layout")

Point = namedtuple("Point", ["x", "y"])
Other = namedtuple("Other", ["x", "y"])


class Pair(tuple):
    """A tuple that is no container: a leaf."""


class Odd(type):
    """A metaclass whose classes have a hash of their own."""

    def __hash__(cls):
        return 7


class Strange(metaclass=Odd):
    """A leaf of a class that hashes in Python."""


@tree.register_dataclass
@dataclass
class Layer:
    """A registered class."""

    weight: Any
    bias: Any


def python_flatten(x):
    """Leaves and structure by the slow twin alone."""
    leaves: list[Any] = []
    return leaves, tree.flatten_in_python(x, leaves, lambda _: False)


def native_flatten(x):
    """Leaves and structure by native code."""
    leaves: list[Any] = []
    return leaves, native["flatten"](x, leaves)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Children of registered classes are walked natively too; afterwards all is as it was."""
    for name in ("flatten", "flatten_up_to", "unflatten"):
        monkeypatch.setattr(tree.walks, name, native[name])


LEAVES = st.one_of(
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=2),
    st.builds(Pair, st.lists(st.integers(), max_size=2)),
    st.builds(Strange),
    st.just(snp.ones(2)),
    st.just(np.zeros(1)),
)


def containers(children):
    """One more level of containers."""
    return st.one_of(
        st.none(),
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=2), children, max_size=4),
        st.dictionaries(st.integers(-3, 3), children, max_size=3),
        st.builds(Point, children, children),
        st.builds(Layer, children, children),
        st.dictionaries(st.text(max_size=2), children, max_size=3).map(OrderedDict),
        st.dictionaries(st.text(max_size=2), children, max_size=3).map(
            lambda d: defaultdict(list, d)
        ),
    )


TREES = st.recursive(LEAVES, containers, max_leaves=12)


@settings(max_examples=150, deadline=None)
@given(TREES)
def test_random_trees_are_flattened_as_in_python(x):
    leaves, structure = native_flatten(x)
    expected, twin = python_flatten(x)
    assert len(leaves) == len(expected)
    assert all(a is b for a, b in zip(leaves, expected, strict=True))
    assert structure == twin and hash(structure) == hash(twin) and str(structure) == str(twin)
    assert structure.num_leaves == len(leaves)
    numbers = list(range(len(leaves)))
    built = tree.unflatten_in_python(twin, numbers)
    assert native["unflatten"](structure, numbers) == built
    assert native["unflatten"](pickle.loads(pickle.dumps(twin)), numbers) == built


@settings(max_examples=150, deadline=None)
@given(TREES, TREES)
def test_random_prefixes_are_flattened_as_in_python(x, y):
    structure = python_flatten(x)[1]
    for other in (x, y, structure.unflatten([y] * structure.num_leaves)):
        try:
            with patch.object(tree.walks, "flatten_up_to", lambda *_: False):
                expected = structure.flatten_up_to(other)  # by the slow twin alone
        except PytreeError as error:
            with pytest.raises(PytreeError) as found:
                structure.flatten_up_to(other)
            # Behind the line that they were raised for.
            assert str(found.value).partition("): ")[2] == str(error).partition("): ")[2]
            continue
        found: list[Any] = []
        assert native["flatten_up_to"](structure, other, found) is True
        assert len(found) == len(expected)
        assert all(a is b for a, b in zip(found, expected, strict=True))


def test_kinds_of_one_shape_differ():
    structure = tree.tree_structure(Point(1, 2))
    for other in ((1, 2), [1, 2], Other(1, 2), {"x": 1, "y": 2}, Point(1, 2)._asdict(), None, 3):
        assert native["flatten_up_to"](structure, other, []) is False
    assert native["flatten_up_to"](tree.tree_structure({"a": 1}), {"b": 1}, []) is False
    assert native["flatten_up_to"](tree.tree_structure([1]), [1, 2], []) is False
    assert native["flatten_up_to"](tree.tree_structure(None), None, []) is True


def test_keys_that_cannot_be_sorted_are_named():
    x = {"a": 1, 2: 3}
    with pytest.raises(PytreeError, match=r"'a' \(str\), 2 \(int\)"):
        native_flatten([x])
    # At a structure's leaf nobody asks for an order.
    assert tree.tree_structure([0]).flatten_up_to([x]) == [x]


class Bad:
    """A key whose comparison fails in its own way."""

    def __hash__(self):
        return 3

    def __eq__(self, other):
        raise ZeroDivisionError

    def __lt__(self, other):
        raise ZeroDivisionError

    __gt__ = __lt__


def test_errors_of_keys_and_classes_are_raised():
    with pytest.raises(ZeroDivisionError):
        native_flatten({Bad(): 1, 4: 2})
    structure = tree.TreeDef(dict, (3,), (tree.LEAF,))
    with pytest.raises(ZeroDivisionError):
        native["flatten_up_to"](structure, {Bad(): 1}, [])

    class Broken:
        pass

    def refuse(*_):
        raise ZeroDivisionError

    tree.register_pytree_node(Broken, refuse, refuse)
    with pytest.raises(ZeroDivisionError):
        native_flatten((1, [Broken()]))
    with pytest.raises(ZeroDivisionError):
        native["unflatten"](tree.TreeDef(Broken, None, (tree.LEAF,)), [1])


def test_an_object_that_is_no_structure_is_refused():
    for node in (3, tree.TreeDef.__new__(tree.TreeDef), "x"):
        with pytest.raises(TypeError, match="not made of TreeDefs"):
            native["unflatten"](node, [1])
        assert native["flatten_up_to"](node, (), []) is False
    inner = tree.TreeDef(list, None, (tree.LEAF,))
    inner.parts = (tree.LEAF, 5)  # type: ignore[assignment]
    with pytest.raises(TypeError, match="not made of TreeDefs"):
        native["unflatten"](inner, [1, 2])
    inner.parts = 5  # type: ignore[assignment]
    with pytest.raises(SystemError):
        native["unflatten"](inner, [1, 2])
    with pytest.raises(IndexError):
        native["unflatten"](tree.TreeDef(tuple, None, (tree.LEAF,) * 2), [1])
    for name in native:
        with pytest.raises(TypeError, match="number of operands"):
            native[name]()


def test_a_tree_that_contains_itself_is_an_error():
    x: list[Any] = []
    x.append(x)
    with pytest.raises(RecursionError):
        native_flatten(x)
    with pytest.raises(RecursionError):
        native_flatten({"a": x})
    assert native["settled"](x) is False
    # From Python 3.12 on, C has a limit of its own, of about 10,000 calls.
    depth = 2 * sys.getrecursionlimit() if sys.version_info < (3, 12) else 40_000
    deep = tree.LEAF
    for _ in range(depth):
        deep = tree.TreeDef(tuple, None, (deep,))
    with pytest.raises(RecursionError):
        native["unflatten"](deep, [1])
    assert native_flatten([1])[0] == [1]  # the depth is counted down again


def test_no_reference_is_lost_or_kept():
    leaf, keys = object(), ("key one", "key two")
    x = [(leaf, None), {keys[1]: leaf, keys[0]: [leaf]}, Point(leaf, Layer(leaf, leaf))]
    watched = [leaf, None, *keys, tree.LEAF, tree.NONE, tree.TreeDef, list, dict, Point, x, x[0]]
    structure = tree.tree_structure(x)

    def walk():
        leaves, _ = native_flatten(x)
        native["unflatten"](structure, leaves)
        native["flatten_up_to"](structure, x, [])
        native["flatten_up_to"](structure, [x, x], [])
        native["settled"](x)
        with pytest.raises(PytreeError):
            native_flatten([leaf, {"a": leaf, 1: leaf}])
        with pytest.raises(IndexError):
            native["unflatten"](structure, leaves[:3])

    walk()
    gc.collect()
    before = [sys.getrefcount(o) for o in watched]
    for _ in range(50):
        walk()
    gc.collect()
    after = [sys.getrefcount(o) for o in watched]
    # Of None and of types others take references too; we would take fifty.
    assert all(abs(a - b) < 20 for a, b in zip(after, before, strict=True)), (before, after)


def test_a_container_that_changes_during_a_walk_is_an_error():
    x: list[Any] = []

    class Clears:
        pass

    def clear(_):
        x.clear()
        return (), None

    tree.register_pytree_node(Clears, clear, lambda *_: None)
    x += [Clears(), [object()], object()]
    with pytest.raises(IndexError):
        native_flatten(x)
    x += [Clears(), [object()]]
    structure = tree.TreeDef(list, None, (tree.TreeDef(Clears, None, ()), tree.LEAF))
    with pytest.raises(IndexError):
        native["flatten_up_to"](structure, x, [])


class Waits:
    """Work that is never done."""

    def is_done(self):
        return False

    def wait(self):
        raise AssertionError("nobody waits here")


def test_settled_is_true_of_trees_without_a_pending_array():
    whole = snp.arange(3).block_until_ready()
    pending = from_memory(0, Future(Waits(), None, 0), whole.aval)
    deleted = (snp.arange(3) + 1).block_until_ready()
    deleted.delete()
    for x in (whole, [whole, None, (1.5, {"a": whole})], {}, deleted, Point(whole, 1)):
        assert native["settled"](x) is True
    for x in (
        pending,
        [whole, pending],
        (whole, [{"b": whole, "a": [pending]}]),
        Array.__new__(Array),  # nothing is known of it
        Point(whole, [pending]),
        Layer(whole, whole),  # Python looks at what is not plain
        Pair([whole]),
        Strange(),
        spmd.pmap(lambda x: x)(snp.ones((1, 2))),
    ):
        assert native["settled"](x) is False


def test_threads_walk_one_tree():
    x = {"a": [(k, {"b": k}) for k in range(50)], "c": Point(1, None)}
    expected = native_flatten(x)
    wrong = []

    def work(_):
        for _ in range(200):
            leaves, structure = native_flatten(x)
            if (leaves, structure) != expected or native["unflatten"](structure, leaves) != x:
                wrong.append(leaves)

    in_threads(work, range(3))
    assert not wrong


def test_small_trees_are_walked_in_python_until_there_are_many(monkeypatch):
    for name in ("flatten", "flatten_up_to", "unflatten"):
        monkeypatch.setattr(tree.walks, name, getattr(type(tree.walks), name))
    tree_walks.expect_walks()
    counting = tree.walks.flatten
    assert counting is not native["flatten"]
    for _ in range(tree_walks.WALKS_IN_PYTHON):
        assert tree.tree_leaves([1, None]) == [1]
        tree_walks.expect_walks()  # the count goes on
    assert tree.walks.flatten is native["flatten"]
    assert tree.tree_leaves([1, None]) == [1]
    assert tree.walks.unflatten is native["unflatten"]
    tree_walks.expect_walks()
    assert tree.walks.flatten is native["flatten"]


def test_python_walks_all_trees_without_an_object_layout(monkeypatch):
    monkeypatch.setattr(tree_walks, "native_walks", dict)
    monkeypatch.setattr(tree.walks, "flatten", tree.flatten_in_python)
    tree_walks.install_walks()
    assert tree.walks.flatten is tree.flatten_in_python
    assert tree.tree_leaves({"b": 1, "a": [2]}) == [2, 1]
