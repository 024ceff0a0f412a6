"""Objects that stand for arrays: with `__jax_array__`, every function of arrays takes them."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.errors import ArgumentError

A = snp.array([[2.0, 1.0, 0.5], [0.2, 3.0, 0.1], [0.3, 0.4, 4.0]])


class Holder:
    """An array by another name, as the variables of Flax are."""

    def __init__(self, x):
        self.x = x

    def __jax_array__(self):
        return self.x


UNARY = (
    "abs sin exp isnan sum mean std var max argmax sort cumsum nanmean nanvar nanstd ptp ediff1d "
    "reshape ravel transpose flip diag trace squeeze round all any median clip"
).split()
BINARY = "add fmod where maximum dot matmul inner kron outer equal arctan2".split()


@pytest.mark.parametrize("name", UNARY)
def test_functions_take_what_stands_for_an_array(name):
    f = getattr(snp, name)
    more = (-1,) if name == "reshape" else ()
    assert np.array_equal(f(Holder(A), *more), f(A, *more))


@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_arrays_take_what_stands_for_one(name):
    f = partial(snp.where, A > 1) if name == "where" else getattr(snp, name)
    want = f(A, A)
    assert np.array_equal(f(Holder(A), A), want) and np.array_equal(f(A, Holder(A)), want)


def test_a_registered_class_stands_for_an_array_inside_transformations():
    class Variable(Holder):
        pass

    spmd.tree_util.register_pytree_node(
        Variable, lambda v: ((v.x,), None), lambda _, c: Variable(*c)
    )
    v = Variable(A)
    want = snp.sin(A).sum()
    assert spmd.jit(lambda v: snp.sum(snp.sin(v)))(v) == want
    grads = spmd.grad(lambda v: snp.sum(snp.sin(v)))(v)
    assert np.allclose(grads.x, snp.cos(A))
    assert np.allclose(spmd.vmap(lambda v: snp.mean(v))(v), A.mean(1))


def test_an_update_takes_what_stands_for_an_array():
    assert snp.zeros(3).at[1].set(Holder(snp.array(2.0))).tolist() == [0.0, 2.0, 0.0]


def test_jit_and_grad_refuse_an_object_that_is_no_pytree():
    for f in spmd.jit(snp.sin), spmd.grad(lambda x: x.sum()):
        with pytest.raises(ArgumentError, match="Holder"):
            f(Holder(A))


@pytest.mark.parametrize("axis", [range(2), range(1, 2), {0: "a", 1: "b"}.keys()])
def test_an_axis_is_any_iterable_of_integers(axis):
    assert np.allclose(snp.sum(A, axis), np.sum(A, tuple(axis)))
