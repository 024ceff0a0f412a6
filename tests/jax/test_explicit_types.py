"""Explicit mode's types are JAX's: the table of `tests/sharding/explicit_programs.py` is true."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.sharding import explicit_programs, unreduced_programs
from tests.sharding.explicit_programs import REFUSED

IN_JAX = """
import json, jax, numpy as np, jax.numpy as jnp
from jax import lax, nn, random
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, auto_axes, reshard
from jax import grad, jit, vmap
from tests.sharding.{table} import KINDER, PROGRAMS, operands

mesh = jax.make_mesh((2, 2), ("x", "y"), (AxisType.Explicit,) * 2)
jax.set_mesh(mesh)
names = globals() | operands(jax, jnp, mesh, jax.sharding)
found = {{}}
for program in {{**PROGRAMS, **KINDER}}:
    try:
        leaves = jax.tree_util.tree_leaves(eval(program, names))
        found[program] = " ".join(str(jax.typeof(x)) for x in leaves)
    except Exception as error:
        found[program] = "raises " + type(error).__name__
print(json.dumps(found))
"""


@pytest.mark.parametrize("table", [explicit_programs, unreduced_programs])
def test_jax_gives_the_types_of_the_table_and_refuses_what_it_says(
    table: Any, run_python: Any, from_jax: Any
):
    name = table.__name__.rpartition(".")[2]

    def ask() -> dict[str, str]:
        done = run_python(["-c", IN_JAX.format(table=name)], timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    in_jax = from_jax(ask, of=repr([*table.PROGRAMS, *table.KINDER]))
    refused = {program for program, types in in_jax.items() if types.startswith("raises ")}
    programs = table.PROGRAMS
    assert refused == {p for p, types in programs.items() if types == REFUSED} | set(table.KINDER)
    wrong = {p: in_jax[p] for p, types in programs.items() if in_jax[p] != types != REFUSED}
    assert not wrong
