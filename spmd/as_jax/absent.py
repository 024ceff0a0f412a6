"""Primitives of JAX that no program of spmd holds, by name: libraries register rules for them."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NoReturn

from spmd.as_jax.primitive import Primitive
from spmd.base.errors import RefusedError
from spmd.core.primitive import all_primitives

# Primitives that `jax.lax` has and spmd's `lax` has not; those that spmd has elsewhere are its own.
_NAMES = (
    "after_all approx_top_k create_token dce_sink device_put eq_to le_to lt_to mulhi "
    "ragged_all_to_all reduce reduce_window rng_uniform scatter_sub select_and_scatter "
    "sharding_constraint stack stage tile unstack"
).split()


def add_to(lax: ModuleType) -> None:
    """Give spmd's `lax` the names of all of JAX's primitives."""
    ours = {prim.name: prim for prim in all_primitives()}
    for name in _NAMES:
        if f"{name}_p" not in vars(lax):
            setattr(lax, f"{name}_p", ours.get(name) or _absent(name))


def _absent(name: str) -> Primitive:
    prim = Primitive(name)

    @prim.def_impl
    @prim.def_abstract_eval
    def refuse(*avals: Any, **params: Any) -> NoReturn:
        raise RefusedError(
            f"jax.lax.{name}_p: spmd expresses it by other primitives, which a jaxpr then holds; "
            "call the public function of jax.lax in place of `bind`"
        )

    return prim
