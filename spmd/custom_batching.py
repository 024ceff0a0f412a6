"""Batching rules of one's own: `custom_vmap`, and functions that `vmap` runs one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spmd.base.tree import tree_flatten as _flatten
from spmd.base.tree import tree_map as _tree_map
from spmd.base.tree import tree_unflatten as _unflatten
from spmd.core.custom_vmap import custom_vmap
from spmd.lax.control_maps import map as _map

__all__ = ["custom_vmap", "sequential_vmap"]


def sequential_vmap(f: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which `vmap` calls for one example after the other (with `lax.map`).

    For functions that need little memory at a time, or that cannot be vectorised.

    >>> import spmd, spmd.numpy as snp
    >>> @sequential_vmap
    ... def f(x):
    ...     spmd.debug.print("{}", x)
    ...     return x + 1
    >>> spmd.vmap(f)(snp.arange(2.0))
    0.0
    1.0
    Array([1., 2.], dtype=float32)
    """
    wrapped = custom_vmap(f)

    @wrapped.def_vmap
    def rule(axis_size: int, in_batched: list[Any], *args: Any) -> tuple[Any, Any]:
        flags, _ = _flatten(tuple(in_batched))
        leaves, tree = _flatten(args)
        mapped = [x for x, b in zip(leaves, flags, strict=True) if b]

        def one(xs: list[Any]) -> Any:
            given = iter(xs)
            both = zip(leaves, flags, strict=True)
            return wrapped(*_unflatten(tree, [next(given) if b else x for x, b in both]))

        out = _map(one, mapped)
        return out, _tree_map(lambda _: True, out)

    return wrapped
