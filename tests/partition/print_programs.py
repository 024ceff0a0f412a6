"""Prints partitioned programs of all kinds: processes with other hash seeds print the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, lax
from spmd.checkify import check
from spmd.compile.executable.select import partitioned
from spmd.core.ir import all_eqns
from spmd.errors import ShardingTypeError
from spmd.sharding import AxisType
from spmd.sharding.operand_layouts import layouts_of
from tests.partition.programs import WINDOWED, draw, draw_spec
from tests.partition.test_custom_partitioning import fft_of_rows, product

AXES = {"x": 2, "y": 2}


def put(*spec: Any, kind: AxisType = AxisType.Auto) -> Any:
    mesh = spmd.make_mesh((2, 2), ("x", "y"), kind)
    return spmd.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, P(*spec)))


def show(name: str, f: Callable[..., Any], *args: Any) -> None:
    """The per-device program with the types and lines of its equations."""
    traced = spmd.jit(f).trace(*args)
    made = partitioned(traced.jaxpr, layouts_of(spmd.tree.leaves(args)))
    assert made is not None, name
    params = made.eqns[0].params
    print(name, made, params["in_specs"], params["out_specs"], sep="\n")
    for eqn in all_eqns(made):
        types = [v.aval.short() for v in (*eqn.invars, *eqn.outvars)]
        print(eqn.prim, sorted(eqn.effects), types, eqn.source.short)


def chain(a: Any, b: Any, c: Any) -> Any:
    return snp.tanh(a @ b) @ c, (a + c).sum(0)


def layers(a: Any, b: Any, c: Any) -> Any:
    return lax.scan(lambda h, w: (snp.tanh(h * w + c), (h * w).sum(0)), a, b)


def loops(a: Any, b: Any, c: Any) -> Any:
    y = lax.while_loop(lambda y: y.sum() < 5, lambda y: abs(y @ b) + 1, a)
    return lax.cond(c.sum() > 0, lambda y: y.T @ c, lambda y: snp.sort(y, axis=0), y)


def mixed(a: Any, b: Any, c: Any) -> Any:
    check(snp.all(a > -9), "{a}", a=a)
    mapped = spmd.shard_map(
        lambda r: lax.psum(r * 2, "x") + r,
        mesh=MESH,
        in_specs=P("x"),
        out_specs=P("x"),
        axis_names={"x"},
    )
    rows = spmd.pmap(lambda r: r - lax.pmean(r, "i"), axis_name="i")(b[:4])
    return mapped(a) @ c, rows, spmd.random.normal(spmd.random.key(0), (8, 8)) + c


MESH = spmd.make_mesh((2, 2), ("x", "y"), AxisType.Auto)


def loss(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: sum(snp.sin(x).sum() for x in spmd.tree.leaves(f(*args)))


def main() -> None:
    arguments = put("x", "y"), put("y"), put(None, "x")
    for f in (chain, layers):
        show(f.__name__, f, *arguments)
        show(f"gradient of {f.__name__}", spmd.grad(loss(f), (0, 1, 2)), *arguments)
    for f in (loops, mixed):
        show(f.__name__, f, *arguments)
    show("a rule of one's own", product(), *arguments[:2])
    show("a callback of one's own", fft_of_rows(), arguments[0])
    for seed in range(12):
        program, values = draw(seed) if seed % 3 else draw(seed, 5, WINDOWED)
        for kind in (AxisType.Auto, AxisType.Explicit):
            rng = np.random.default_rng(seed)
            mesh = spmd.make_mesh((2, 2), ("x", "y"), kind)
            specs = [draw_spec(rng, x.shape, AXES) for x in values]
            pairs = zip(values, specs, strict=True)
            placed = [spmd.device_put(x, NamedSharding(mesh, spec)) for x, spec in pairs]
            for f in (program, spmd.grad(loss(program), (0, 1, 2))):
                try:
                    show(f"program {seed} {kind}", f, *placed)
                except ShardingTypeError as error:
                    print(error)


if __name__ == "__main__":
    main()
