"""Programs of any length, width and depth: nothing recurses over them, however small the stack."""

from __future__ import annotations

import functools
import sys
import threading

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax, tree
from tests.compile.long_programs import SHAPES, LongProgram

SMALL_STACK = 512 * 1024


def in_small_stack(run):
    """`run()` in a thread with a small stack, at the interpreter's own limit of recursion."""
    found = []

    def target():
        try:
            found.append((run(), None))
        except BaseException as error:  # handed to the test's own thread
            found.append((None, error))

    before, limit = threading.stack_size(SMALL_STACK), sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    try:
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
        sys.setrecursionlimit(limit)
    ((value, error),) = found
    if error is not None:
        raise error
    return value


def assert_near(found, wanted):
    for x, y in zip(tree.leaves(found), tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-3, atol=2e-4)


WAYS = {
    "jit": lambda f, xs: (spmd.jit(f)(*xs), f(*xs)),
    "grad": lambda f, xs: (
        spmd.jit(spmd.grad(lambda *xs: f(*xs).sum()))(*xs),
        spmd.grad(lambda *xs: f(*xs).sum())(*xs),
    ),
    "vmap": lambda f, xs: (
        spmd.jit(spmd.vmap(f))(*(snp.stack([x, 0.5 * x]) for x in xs)),
        snp.stack([f(*xs), f(*(0.5 * x for x in xs))]),
    ),
    "pmap": lambda f, xs: (
        spmd.pmap(f)(*(snp.stack([x, 0.5 * x]) for x in xs)),
        snp.stack([f(*xs), f(*(0.5 * x for x in xs))]),
    ),
    "scan": lambda f, xs: (
        spmd.jit(lambda x: lax.scan(lambda c, _: (f(c, xs[1]), None), x, None, length=2)[0])(xs[0]),
        f(f(*xs[:2]), xs[1]),
    ),
}


# All ways with the first shape, and what the others consist of with each.
more = pytest.mark.nightly(reason="each shape and each way runs in CI")
CASES = [
    pytest.param(shape, way, marks=() if shape == SHAPES[0] or way in ("jit", "grad") else more)
    for shape in SHAPES
    for way in WAYS
]


@pytest.mark.parametrize(("shape", "way"), CASES)
def test_two_thousand_equations(shape, way):
    program = LongProgram(shape, SHAPES.index(shape), 2000 if way != "grad" else 700)
    xs = [snp.array(x) for x in program.inputs]
    with spmd.config.override("check", False):  # the law is asked of shorter programs elsewhere
        assert_near(*in_small_stack(lambda: WAYS[way](program, xs)))


@pytest.mark.parametrize("way", ["jit", "grad"])
def test_two_thousand_arguments(way):
    program = LongProgram("comb", 5, 2000, operands=2000)
    xs = [snp.array(x) for x in program.inputs]
    assert_near(*in_small_stack(lambda: WAYS[way](program, xs)))


def test_ten_thousand_leaves():
    given = {f"w{k}": [np.float32(k), (np.float32(1), None)] for k in range(5000)}

    @spmd.jit
    def double(leaves):
        return tree.map(lambda x: 2 * x, leaves)

    def run():
        for _ in range(3):  # the first call, the one that writes the fast path, and that
            found = double(given)
        return found

    found = in_small_stack(run)
    assert tree.structure(found) == tree.structure(given)
    assert_near(found, tree.map(lambda x: 2 * x, given))


def nested(depth, wrap, leaf):
    return functools.reduce(lambda inner, _: wrap(inner), range(depth), leaf)


CONTAINERS = {
    "list": lambda t: [t],
    "tuple": lambda t: (t, 2.0),
    "dict": lambda t: {"a": t, "b": None},
    "partial": lambda t: spmd.tree_util.Partial(max, t),
}


@pytest.mark.parametrize(
    ("container", "depth"), [*((name, 400) for name in CONTAINERS), ("list", 60), ("list", 3000)]
)
def test_deep_trees(container, depth):
    """The fast path of a call has trees of some depth; the general one and the walks have any."""
    given = nested(depth, CONTAINERS[container], snp.arange(3.0))
    double = spmd.jit(lambda t: tree.map(lambda x: 2.0 * x, t))

    def run():
        for _ in range(4):
            found = double(given)
        assert tree.structure(found) == tree.structure(given)
        assert hash(tree.structure(found)) == hash(tree.structure(given))
        assert len(str(tree.structure(found))) > depth
        leaves, paths = tree.leaves(found), spmd.tree_util.tree_flatten_with_path(found)[0]
        np.testing.assert_array_equal(leaves[0], [0, 2, 4])
        assert max(len(path) for path, _ in paths) >= depth
        gradient = spmd.grad(lambda t: snp.sum(tree.leaves(t)[0] ** 2))(given)
        np.testing.assert_array_equal(tree.leaves(gradient)[0], [0, 2, 4])
        carried, _ = lax.scan(lambda c, _: (double(c), None), given, None, length=2)
        np.testing.assert_array_equal(tree.leaves(carried)[0], [0, 4, 8])
        rows = spmd.vmap(double, in_axes=(None,), axis_size=2)(given)
        assert tree.leaves(rows)[0].shape == (2, 3)

    in_small_stack(run)


@pytest.mark.parametrize("installed", [False, True])
def test_deep_trees_that_differ_say_where(installed, monkeypatch):
    walks = spmd.base.tree.walks
    if not installed:
        for name, walk in vars(type(walks)).items():
            if isinstance(walk, staticmethod):
                monkeypatch.setattr(walks, name, walk.__func__)
    a, b = nested(400, CONTAINERS["list"], 1.0), nested(399, CONTAINERS["list"], {"b": 1.0})
    with pytest.raises(spmd.errors.PytreeError, match=r"(\[0\]){399} must be a list"):
        in_small_stack(lambda: tree.map(lambda x, y: x, a, b))
    with pytest.raises(spmd.errors.PytreeError, match=r"(\[0\]){399} is a dict"):
        in_small_stack(lambda: spmd.vmap(lambda x: x, in_axes=(nested(399, list_of, {"b": 0}),))(a))


def list_of(t):
    return [t]


def test_a_concatenation_of_many_parts_is_no_kernel():
    """A kernel tells the parts of a concatenation apart by comparisons: it is one of few."""
    xs = [snp.full(8, float(k)) for k in range(600)]
    found = in_small_stack(lambda: spmd.jit(lambda *xs: snp.stack(xs).sum(0))(*xs))
    np.testing.assert_array_equal(found, np.full(8, 599 * 300.0))
