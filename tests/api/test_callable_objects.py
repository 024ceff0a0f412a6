"""Transformations take any callable object, whatever it answers when asked for its name."""

import numpy as np
import pytest

import spmd
import spmd.numpy as snp


class Scaled:
    """A callable with a name that is no text, as objects of libraries have."""

    def __init__(self, factor):
        self.factor = factor
        self.__name__ = self.__qualname__ = object()

    def __call__(self, x):
        return self.factor * x**2


def _with_jvp(f):
    ruled = spmd.custom_jvp(f)
    ruled.defjvps(lambda t, out, x: t * x)
    return ruled


def _with_vjp(f):
    ruled = spmd.custom_vjp(f)
    ruled.defvjp(lambda x: (f(x), x), lambda x, ct: (ct * x,))
    return ruled


TRANSFORMATIONS = {
    "jit": lambda f: spmd.jit(f)(2.0),
    "vmap": lambda f: spmd.vmap(f)(np.full(2, 2.0, np.float32))[0],
    "value_and_grad": lambda f: spmd.value_and_grad(f)(2.0)[0],
    "grad": lambda f: spmd.grad(f)(2.0),
    "jacfwd": lambda f: spmd.jacfwd(f)(2.0),
    "jacrev": lambda f: spmd.jacrev(f)(2.0),
    "checkpoint": lambda f: spmd.checkpoint(f)(2.0),
    "custom_jvp": lambda f: _with_jvp(f)(2.0),
    "custom_vjp": lambda f: _with_vjp(f)(2.0),
    "named_call": lambda f: spmd.named_call(f)(2.0),
    "closure_convert": lambda f: spmd.closure_convert(f, 2.0)[0](2.0),
    "vectorize": lambda f: snp.vectorize(f)(2.0),
    "make_jaxpr": lambda f: spmd.make_jaxpr(f)(2.0).eqns and 12.0,
    "pmap": lambda f: spmd.pmap(f)(np.full(1, 2.0, np.float32))[0],
    "eval_shape": lambda f: 12.0 if spmd.eval_shape(f, 2.0).shape == () else 0.0,
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_a_callable_need_not_have_a_name(name):
    found = TRANSFORMATIONS[name](Scaled(3.0))
    assert float(found) == 12.0
