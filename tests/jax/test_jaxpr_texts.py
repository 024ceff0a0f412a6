"""The texts of jaxprs over a mesh: `str(make_jaxpr(f)(x))` is that of JAX.

Two differences are meant. A constraint shows no `context_mesh`, as an equation does not depend on
the mesh that was in scope. Where both have the same equations, lines end where JAX's do.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.sharding

jax = pytest.importorskip("jax", reason="the oracle of these tests is JAX")


def equations(made: Any) -> str:
    """The text without line breaks and what is meant to differ."""
    text = re.sub(r"context_mesh=Mesh\(\)", "", str(made))
    text = re.sub(r"copy_semantics=\(.*?\)\s", "", text)
    text = text.replace("let", " ").replace(";", " ")
    return " ".join(text.split())


def maps(m: Any, mesh: Any, specs: Any, out: Any, body: Callable[[Any, Any], Any], **more: Any):
    return m.shard_map(lambda x: body(m, x), mesh=mesh, in_specs=specs, out_specs=out, **more)


def cases(m: Any, sharding: Any) -> dict[str, Any]:
    """The functions, of `m`, which is JAX or spmd, and their argument."""
    P, AxisType = m.sharding.PartitionSpec, m.sharding.AxisType
    auto = m.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    explicit = m.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    x = np.ones((8, 16), np.float32)
    whole = m.device_put(x)
    typed = m.device_put(x, m.NamedSharding(explicit, P("x", "y")))

    def over(spec: Any, mesh: Any = auto) -> Any:
        return m.NamedSharding(mesh, spec)

    both = P("x", "y")
    return {
        "a sum": (maps(m, auto, both, P(None, "y"), lambda m, x: m.lax.psum(x, "x")), whole),
        "two sums": (maps(m, auto, both, P(), lambda m, x: m.lax.psum(x, ("x", "y"))), whole),
        "no types": (maps(m, auto, both, both, lambda m, x: x * 2, check_vma=False), whole),
        "one axis": (
            maps(m, auto, P("x"), P(), lambda m, x: m.lax.psum(x, "x"), axis_names={"x"}),
            whole,
        ),
        "gather": (
            maps(m, auto, P("x"), P("x"), lambda m, x: m.lax.all_gather(x, "x", tiled=True)),
            whole,
        ),
        "stack": (maps(m, auto, P("x"), P("x"), lambda m, x: m.lax.all_gather(x, "x")), whole),
        "around a map": (
            lambda x: maps(m, auto, both, both, lambda m, x: m.numpy.sin(x))(x + x) + x,
            whole,
        ),
        "reshard": (lambda x: sharding.reshard(x, over(P(None, "y"), explicit)), typed),
        "reshard and add": (
            lambda x: sharding.reshard(x + x, over(P("x"), explicit)) + 1,
            typed,
        ),
        "constraint": (lambda x: m.lax.with_sharding_constraint(x, over(P("x"))), whole),
        "constraint of one dim": (
            lambda x: m.lax.with_sharding_constraint(x, over(P("x", P.UNCONSTRAINED))),
            whole,
        ),
        "placing": (lambda x: m.device_put(x, over(P("x"))), whole),
        "jit": (lambda x: m.jit(lambda y: y * 2)(m.jit(lambda y: y + y)(x)), whole),
        "jit of typed": (lambda x: m.jit(lambda y: m.numpy.sin(y))(x), typed),
    }


NAMES = list(cases(spmd, spmd.sharding))


@pytest.mark.parametrize("name", NAMES)
def test_the_text_is_that_of_jax(name: str):
    found, expected = (
        equations(m.make_jaxpr(f)(x))
        for m, (f, x) in (
            (spmd, cases(spmd, spmd.sharding)[name]),
            (jax, cases(jax, jax.sharding)[name]),
        )
    )
    assert found == expected


def many_sines(m, x):
    y = x
    for _ in range(3):
        y = m.lax.sin(y)
    return y


LINES = {
    "no equations": (lambda m, *xs: xs, 3),
    "no arguments": (lambda m: 1.0, 0),
    "names on two lines": (lambda m, *xs: xs, 25),
    "one line": (lambda m, x: m.lax.sin(m.lax.sin(x)), 1),
    "an equation a line": (many_sines, 1),
    "the last column": (lambda m, *xs: m.lax.add(xs[0], xs[1]), 4),
    "past the last column": (lambda m, *xs: m.lax.add(xs[0], xs[1]), 5),
    "arguments on two lines": (lambda m, *xs: m.jit(lambda *ys: m.lax.add(*ys[-2:]))(*xs), 40),
    "a loop": (lambda m, x: m.lax.while_loop(lambda c: c < 3, lambda c: many_sines(m, c), x), 1),
    "branches": (lambda m, x: m.lax.cond(x > 0, lambda x: many_sines(m, x), lambda x: x, x), 1),
    "a call": (lambda m, x: m.jit(lambda x: m.lax.sin(x))(x), 1),
}


@pytest.mark.parametrize("name", LINES)
def test_lines_end_where_those_of_jax_do(name):
    f, count = LINES[name]
    ours, theirs = (
        str(m.make_jaxpr(lambda *xs, m=m: f(m, *xs))(*[1.0] * count)) for m in (spmd, jax)
    )
    assert ours == theirs
