"""How often a function is run by Python in three equal calls, as JAX's trace caches have it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp

X = np.ones(3, np.float32)
ONE = np.float32(1)

# Of each: what is done three times with a function `f` of one array, or its parts that are new.
CALLS: dict[str, Callable[[Any, Any], Callable[[], Any]]] = {
    "checkpoint": lambda j, f: lambda: j.checkpoint(f)(X),
    "gradient of checkpoint": lambda j, f: lambda: j.grad(lambda x: j.checkpoint(f)(x).sum())(X),
    "checkpoint in jit": lambda j, f: (
        lambda: j.jit(lambda x: j.checkpoint(f)(x) + j.checkpoint(f)(x))(X)
    ),
    "checkpoint with a static argument": lambda j, f: (
        lambda g: lambda: (g(X, 1), g(X, 2), g(X, 1))
    )(j.checkpoint(lambda x, n: f(x) * n, static_argnums=1)),
    "make_jaxpr": lambda j, f: lambda: j.make_jaxpr(f)(X),
    "make_jaxpr of other arrays": lambda j, f: (
        lambda: (
            j.make_jaxpr(f)(X),
            j.make_jaxpr(f)(j.np.zeros(3)),
            j.make_jaxpr(f)(j.ShapeDtypeStruct((3,), np.float32)),
            j.make_jaxpr(f)(1.0),
        )
    ),
    "eval_shape": lambda j, f: lambda: j.eval_shape(f, X),
    "one trace for all": lambda j, f: (
        lambda: (
            j.eval_shape(f, X),
            j.make_jaxpr(f)(X),
            j.jit(f).lower(X),
            j.jit(f)(X),
        )
    ),
    "pmap": lambda j, f: lambda: j.pmap(f)(X[None]),
    "closure_convert": lambda j, f: lambda: j.closure_convert(f, ONE),
    "scan in grad": lambda j, f: (
        lambda body: lambda: j.grad(lambda c: j.lax.scan(body, c, X)[0])(ONE)
    )(lambda c, _: (f(c), None)),
    "scan in jit": lambda j, f: (
        lambda body: (
            lambda: j.jit(lambda c: j.lax.scan(body, c, X)[0] + j.lax.scan(body, c * 2, X)[0])(ONE)
        )
    )(lambda c, _: (f(c), None)),
    "cond in vmap": lambda j, f: lambda: j.vmap(lambda x: j.lax.cond(x > 0, f, f, x))(X),
    "caches cleared": lambda j, f: (
        lambda: (
            j.checkpoint(f)(X),
            j.clear_caches(),
            j.make_jaxpr(f)(X),
            j.clear_caches(),
            j.pmap(f)(X[None]),
            j.clear_caches(),
        )
    ),
}


def counts(j: Any, case: str) -> list[int]:
    """The calls of the function by Python after each of three calls."""
    calls = []

    def f(x: Any) -> Any:
        calls.append(x)
        return j.np.sin(x) * 2

    run, found = CALLS[case](j, f), []
    for _ in range(3):
        run()
        found.append(len(calls))
    return found


def of_jax(case: str) -> list[int]:
    import jax
    import jax.numpy as jnp

    return counts(SimpleNamespace(**vars(jax), np=jnp), case)


@pytest.mark.parametrize("case", CALLS)
def test_functions_are_traced_as_often_as_by_jax(case, from_jax):
    ours = SimpleNamespace(**{**vars(spmd), "np": snp, "pmap": spmd.pmap})
    assert counts(ours, case) == from_jax(lambda: of_jax(case))
