"""Runs statements in one library and writes what each of them gave, as JSON.

`python -m tests.jax.side_by_side jax|spmd FILE...`: a file holds blocks that begin with `#%% name`,
each with names of its own; what is in `NAMES` is there already. An expression gives the text of its
value, a statement that raises the names of the exception's classes.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

DEVICES = 8

NAMES = """
import copy, functools, math, operator, pickle
from functools import partial
import numpy as np
jnp, lax, js = jax.numpy, jax.lax, jax.sharding
jit, vmap, grad, P = jax.jit, jax.vmap, jax.grad, jax.P
Mesh, NamedSharding, AxisType = js.Mesh, js.NamedSharding, js.AxisType
AbstractMesh = js.AbstractMesh
SingleDeviceSharding = js.SingleDeviceSharding
def mk(shape, names, t=AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=(t,) * len(names))
E = AxisType.Explicit
m42, m24, m22 = mk((4, 2), ("x", "y")), mk((2, 4), ("x", "y")), mk((2, 2), ("x", "y"))
m8, m4, m2 = mk((8,), ("x",)), mk((4,), ("x",)), mk((2,), ("x",))
e42, e22 = mk((4, 2), ("x", "y"), E), mk((2, 2), ("x", "y"), E)
e8, e4, e2 = mk((8,), ("x",), E), mk((4,), ("x",), E), mk((2,), ("x",), E)
def NS(m, *s, **k): return NamedSharding(m, P(*s, **k))
def arr(shape, dtype=np.float32): return np.arange(math.prod(shape), dtype=dtype).reshape(shape)
def put(shape, m, *s, **k): return jax.device_put(arr(shape), NS(m, *s, **k))
def tp(x): return str(jax.typeof(x))
"""


def text_of(jax: Any, value: Any, depth: int = 0) -> str:
    """A text that is equal for equal values of both libraries."""
    if isinstance(value, jax.Array) and hasattr(value, "addressable_shards"):
        numbers = np.array2string(np.asarray(value), threshold=100, precision=4)
        kind = f"{value.dtype}, {value.shape}, weak={value.weak_type}, {value.committed}"
        return f"Array({kind}, {value.sharding}, {numbers})"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}, {value.shape}, {np.array2string(value, precision=4)}"
    if isinstance(value, np.generic):
        return f"{value.dtype}: {value}"
    if type(value) in (list, tuple) and depth < 4:
        parts = ", ".join(text_of(jax, x, depth + 1) for x in value)
        return f"{type(value).__name__}[{parts}]"
    if type(value) is dict and depth < 4:
        pairs = (f"{key!r}: {text_of(jax, x, depth + 1)}" for key, x in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(text_of(jax, x, 9) for x in value))}}}"
    shown = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return re.sub(r"(spmd|jax)\.[a-z_.]*", "", shown)


def results(jax: Any, path: Path) -> dict[str, Any]:
    """What each statement of a file gives, by its place and text."""
    found: dict[str, Any] = {}
    for part in re.split(r"(?m)^#%%", path.read_text())[1:]:
        name, _, body = part.partition("\n")
        names: dict[str, Any] = {"jax": jax, "__name__": "statements"}
        exec(NAMES, names)
        for statement in ast.parse(body).body:
            text = ast.get_source_segment(body, statement)
            key = f"{path.stem}, {name.strip()}, line {statement.lineno}: {text}"
            try:
                if isinstance(statement, ast.Expr):
                    code = compile(ast.Expression(statement.value), name, "eval")
                    found[key] = text_of(jax, eval(code, names))
                else:
                    exec(compile(ast.Module([statement], []), name, "exec"), names)
            except Exception as error:
                found[key] = [c.__name__ for c in type(error).__mro__]
    return found


def main() -> None:
    """Run the files named on the command line."""
    library, *paths = sys.argv[1:]
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["SPMD_NUM_CPU_DEVICES"] = str(DEVICES)
    warnings.simplefilter("ignore")
    jax = importlib.import_module(library)
    found: dict[str, Any] = {}
    for path in paths:
        found |= results(jax, Path(path))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
