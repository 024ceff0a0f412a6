"""`jax.extend.core.primitives`: spmd's primitives under JAX's names."""

from __future__ import annotations

from typing import Any

from spmd.as_jax.refuse import missing
from spmd.core.primitive import all_primitives

# Where JAX's name is another than ours.
_NAMES = {
    "add_jaxvals": "add_any",
    "call": "jit",
    "closed_call": "jit",
    "pjit": "jit",
    "remat": "checkpoint",
    "transpose": "permute_dims",
}
_absent = missing("jax.extend.core.primitives")


def __getattr__(name: str) -> Any:
    if name.endswith("_p"):
        wanted = name.removesuffix("_p")
        wanted = _NAMES.get(wanted, wanted)
        for prim in all_primitives():
            if prim.name == wanted:
                return prim
    return _absent(name)


def __dir__() -> list[str]:
    return sorted(f"{prim.name}_p" for prim in all_primitives())
