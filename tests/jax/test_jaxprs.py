"""The jaxprs that programs become, beside JAX's: the same operations, and never more of them.

Two differences are meant. A dim of size 1 is broadcast by an equation of its own (JAX's `add` does
it inside), and `stack` is a reshape and a concatenation. Both are shape work that costs nothing
once compiled, so the comparison of operations leaves shape work out, and says so where it counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import spmd
from tests.jax.programs import PROGRAMS, Program

jax = pytest.importorskip("jax", reason="the oracle of these tests is JAX")

RENAMED = {
    "transpose": "permute_dims",
    "scatter-add": "scatter_add",
    "stack": "concatenate",
    "unstack": "split",
}
SHAPE_WORK = {"broadcast_in_dim", "reshape", "squeeze", "empty2"}
# Programs where broadcasting a dim of size 1, or a stack, takes equations that JAX has not.
LONGER_IN_SHAPE = {"log_sum_exp_by_hand", "layer_norm", "attention", "windows",
                   "pairwise_distances"}  # fmt: skip
CALLS = {"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"}


def inner_jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    """The jaxprs that an equation of either library holds."""
    for value in params.values():
        for one in value if isinstance(value, tuple) else (value,):
            if hasattr(one, "eqns") or hasattr(one, "jaxpr"):
                yield getattr(one, "jaxpr", one)


def operations(jaxpr: Any) -> list[str]:
    """The names of all operations in order, calls inlined; those of a loop as `scan/add`."""
    out = []
    for eqn in jaxpr.eqns:
        name = eqn.prim.name if hasattr(eqn, "prim") else eqn.primitive.name
        inner = [op for held in inner_jaxprs(eqn.params) for op in operations(held)]
        if name in CALLS:
            out += inner
        else:
            out += [RENAMED.get(name, name), *(f"{name}/{op}" for op in inner)]
    return out


def without_shape_work(names: list[str]) -> list[str]:
    return [name for name in names if name.rpartition("/")[2] not in SHAPE_WORK]


def gradient(p: Program, lib: Any) -> Any:
    """The gradient of the sum of a program's results, for all floating arguments."""
    f = p.of(lib)

    def loss(*args):
        return sum(lib.numpy.sum(x) for x in lib.tree_util.tree_leaves(f(*args)))

    floating = [k for k, x in enumerate(p.args) if x.dtype.kind == "f"]
    return lib.grad(loss, argnums=tuple(floating))


def both(make: Any, args: Any) -> tuple[list[str], list[str]]:
    """The operations of one function in spmd and in JAX."""
    ours = operations(spmd.make_jaxpr(make(spmd))(*args).jaxpr)
    theirs = operations(jax.make_jaxpr(make(jax))(*args).jaxpr)
    return ours, theirs


@pytest.mark.parametrize("p", PROGRAMS, ids=str)
def test_same_operations_in_the_same_order(p):
    ours, theirs = both(p.of, p.args)
    assert without_shape_work(ours) == without_shape_work(theirs)
    if str(p) not in LONGER_IN_SHAPE:
        assert ours == theirs


@pytest.mark.parametrize("p", PROGRAMS, ids=str)
def test_gradients_are_no_longer_than_jax_s(p):
    ours, theirs = both(lambda lib: gradient(p, lib), p.args)
    extra = list(ours)
    for name in theirs:
        if name in extra:
            extra.remove(name)
    assert len(without_shape_work(ours)) <= len(without_shape_work(theirs)), extra
    if str(p) not in LONGER_IN_SHAPE:
        assert len(ours) <= len(theirs), extra


@pytest.mark.parametrize("p", PROGRAMS, ids=str)
def test_second_derivatives_stay_as_short_as_jax_s(p):
    """Gradients of gradients, where programs grow fastest; rules may differ by a factor or two."""

    def second(lib):
        first = gradient(p, lib)

        def loss(*args):
            return sum(lib.numpy.sum(lib.numpy.sin(g)) for g in first(*args))

        floating = [k for k, x in enumerate(p.args) if x.dtype.kind == "f"]
        return lib.grad(loss, argnums=tuple(floating))

    ours, theirs = (without_shape_work(names) for names in both(second, p.args))
    assert len(ours) <= 1.1 * len(theirs)


def test_types_are_printed_as_jax_prints_them():
    """Equation by equation, the text is JAX's but for the names we give other things."""
    for f in (lambda xp, x: xp.sin(x) * 2, lambda xp, x: (x @ x.T).sum(0)):
        ours = str(spmd.make_jaxpr(lambda x, f=f: f(spmd.numpy, x))(np.ones((2, 2), np.float32)))
        theirs = str(jax.make_jaxpr(lambda x, f=f: f(jax.numpy, x))(np.ones((2, 2), np.float32)))
        outvars = [[line.split(" = ")[0].strip() for line in text.splitlines() if " = " in line]
                   for text in (ours, theirs)]  # fmt: skip
        assert outvars[0] == outvars[1]
