"""Mutable types of libraries (`jax.experimental.hijax`) under spmd's transformations."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import spmd
from spmd import errors, lax
from spmd import numpy as snp
from spmd.as_jax.jax.experimental import cur_qdd, hijax
from spmd.core.mutable import cells


@dataclass(frozen=True)
class State:
    """The contents of a bag: the types of its arrays, and the pytree that they are leaves of."""

    leaf_avals: tuple
    tree: Any

    def normalize(self):
        return State(tuple(a.normalize() for a in self.leaf_avals), self.tree)


class BagType(hijax.MutableHiType):
    """The type of all bags."""

    def __eq__(self, other):
        return isinstance(other, BagType)

    def __hash__(self):
        return hash(BagType)

    def __str__(self):
        return "Bag"

    def new_from_loval(self, state, /, *values):
        return Bag.holding(spmd.tree.unflatten(state.tree, self._whole(state, values)))

    def read_loval(self, state, value, /):
        leaves = spmd.tree.leaves(get(value))
        pairs = zip(state.leaf_avals, leaves, strict=True)
        return [x for aval, leaf in pairs for x in aval.lower_val(leaf)]

    def update_from_loval(self, state, value, /, *values):
        put(value, spmd.tree.unflatten(state.tree, self._whole(state, values)))

    def _whole(self, state, values):
        assert [len(aval.lo_ty()) for aval in state.leaf_avals] == [1] * len(values)
        return [a.raise_val(x) for a, x in zip(state.leaf_avals, values, strict=True)]


class Bag:
    """A mutable place for a pytree of arrays."""

    def __init__(self):
        raise TypeError("new_bag makes one")

    @classmethod
    def holding(cls, value):
        made = object.__new__(cls)
        made.value = value
        return made

    def cur_qdd(self):
        leaves, tree = spmd.tree.flatten(self.value)
        return State(tuple(map(spmd.typeof, leaves)), tree)


class New(hijax.HiPrimitive):
    def abstract_eval(self, *avals, tree):
        return hijax.AvalQDD(BagType(), State(avals, tree)), set()

    def to_lojax(self, *leaves, tree):
        return Bag.holding(spmd.tree.unflatten(tree, leaves))


class Put(hijax.HiPrimitive):
    multiple_results = True

    def to_lojax(self, bag, *leaves, tree):
        bag.value = spmd.tree.unflatten(tree, leaves)
        return []


class Get(hijax.HiPrimitive):
    multiple_results = True

    def to_lojax(self, bag):
        return spmd.tree.leaves(bag.value)


new_p, put_p, get_p = New("new"), Put("put"), Get("get")
hijax.register_hitype(Bag, lambda _: BagType())


def new_bag(value):
    leaves, tree = spmd.tree.flatten(value)
    return new_p.bind(*leaves, tree=tree)


def put(bag, value):
    leaves, tree = spmd.tree.flatten(value)
    put_p.bind(bag, *leaves, tree=tree)


def get(bag):
    return spmd.tree.unflatten(cur_qdd(bag).tree, get_p.bind(bag))


def test_types_and_states():
    bag = new_bag({"a": np.float32(1)})
    assert spmd.typeof(bag) == BagType()
    assert cur_qdd(bag).leaf_avals == (spmd.typeof(np.float32(1)),)
    put(bag, (1, 2))
    assert get(bag) == (1, 2)


def test_jit_writes_to_an_argument():
    traces = []

    @spmd.jit
    def f(bag, x):
        traces.append(1)
        put(bag, get(bag) * 2 + x)
        put(bag, get(bag) + 1)
        return get(bag) - x

    bag = new_bag(snp.float32(3))
    for wanted in (8.0, 18.0):
        np.testing.assert_array_equal(f(bag, 1.0), wanted - 1)
        np.testing.assert_array_equal(get(bag), wanted)
    assert len(traces) == 1


def test_jit_changes_the_structure():
    @spmd.jit
    def f(bag, x):
        put(bag, {**get(bag), "sum": x.sum()})

    bag = new_bag({"a": np.arange(2.0)})
    f(bag, np.ones(3))
    assert sorted(get(bag)) == ["a", "sum"] and get(bag)["sum"] == 3
    f(bag, np.ones(4))
    assert get(bag)["sum"] == 4


def test_jit_reads_and_writes_what_it_closes_over():
    bag = new_bag(snp.float32(1))

    @spmd.jit
    def f(x):
        put(bag, get(bag) + x)
        return get(bag)

    assert f(2.0) == 3 and get(bag) == 3
    put(bag, snp.float32(10))  # the next call sees it
    assert f(2.0) == 12 and get(bag) == 12


def test_one_that_is_made_inside_stays_inside():
    @spmd.jit
    def f(x):
        bag = new_bag(0.0)

        def body(k, c):
            put(bag, get(bag) + x[k])
            return c

        lax.fori_loop(0, 3, body, None)
        return get(bag)

    assert f(np.arange(3.0)) == 3


def test_loops_and_branches_write_to_one_from_outside():
    bag = new_bag(snp.float32(3))

    def body(c, x):
        put(bag, get(bag) + x)
        return c, get(bag)

    _, ys = lax.scan(body, None, np.arange(3, dtype=np.float32))
    np.testing.assert_array_equal(ys, [3, 4, 6])
    assert get(bag) == 6
    lax.cond(True, lambda bag: put(bag, get(bag) * 2), lambda bag: None, bag)
    assert get(bag) == 12
    lax.while_loop(lambda _: get(bag) < 20, lambda c: put(bag, get(bag) + 3), None)
    assert get(bag) == 21


def test_derivatives_go_through_it():
    def f(x):
        bag = new_bag({"x": x})
        put(bag, {"x": get(bag)["x"] ** 2, "y": x})
        return get(bag)["x"] * get(bag)["y"]

    assert spmd.grad(f)(2.0) == 12
    assert spmd.grad(spmd.jit(f))(2.0) == 12
    np.testing.assert_allclose(spmd.vmap(spmd.grad(f))(np.arange(3.0)), [0, 3, 12])


def test_grad_writes_to_one_from_outside():
    bag = new_bag(snp.float32(2))

    def f(x, bag):
        put(bag, lax.stop_gradient(x * 2))
        return x**2 + get(bag)

    assert spmd.grad(f)(3.0, bag) == 6
    assert get(bag) == 6
    with pytest.raises(errors.RefError, match=r"put: the value .* \(Bag, made at"):
        spmd.grad(lambda x: put(bag, x * 2) or x)(3.0)
    assert get(bag) == 6


def test_shapes_without_a_write():
    bag = new_bag(snp.zeros(3))

    def f(bag, x):
        put(bag, get(bag) + x)
        return get(bag)

    assert spmd.eval_shape(f, bag, spmd.ShapeDtypeStruct((2, 1), "float32")).shape == (2, 3)
    assert spmd.eval_shape(lambda x: f(bag, x), 1.0).shape == (3,)
    assert len(spmd.make_jaxpr(f)(bag, 1.0).out_avals) == 2
    assert spmd.jit(f).lower(bag, 1.0).out_info.shape == (3,)
    np.testing.assert_array_equal(get(bag), np.zeros(3))
    ref = spmd.new_ref(np.zeros(3))
    assert spmd.eval_shape(lambda r: spmd.ref.swap(r, 0, 1.0), ref).shape == ()


def test_results_and_carries_are_refused():
    bag = new_bag(1.0)
    with pytest.raises(errors.RefError, match=r"returned a mutable array \(Bag"):
        spmd.jit(lambda x: new_bag(x))(1.0)
    with pytest.raises(errors.RefError, match=r"scan: an iteration changes .* \(Bag, made at"):
        lax.scan(lambda _, x: (put(bag, [get(bag), x]), None), None, np.ones(2))
    with pytest.raises(errors.RefError, match=r"carry holds a mutable array \(Bag"):
        lax.scan(lambda c, _: (c, None), bag, None, length=2)


def test_only_mutable_types_are_there():
    class Twice(hijax.HiPrimitive):
        def abstract_eval(self, aval):
            return aval, set()

        def to_lojax(self, x):
            return x * 2

    with pytest.raises(errors.RefusedError, match="twice: of libraries' own types"):
        Twice("twice").bind(1.0)


def test_nothing_keeps_one_alive():
    bag = new_bag(1.0)
    spmd.jit(lambda b: put(b, get(b) + 1))(bag)
    at = id(bag)
    assert get(bag) == 2
    del bag
    gc.collect()
    assert at not in cells._boxes
