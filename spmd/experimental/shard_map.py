"""`shard_map` with the parameters that it had under JAX's experimental path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spmd.sharding.shard_map import shard_map as _shard_map
from spmd.sharding.spec import Mesh

__all__ = ["shard_map"]


def shard_map(
    f: Callable[..., Any],
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    check_rep: bool = True,
    auto: frozenset[Any] = frozenset(),
) -> Callable[..., Any]:
    """Run `f` on every device of a mesh, as `spmd.shard_map` does.

    `check_rep` is that function's `check_vma`, and `auto` are the axes that are not among its
    `axis_names`. Raises what it raises.

    >>> mesh = spmd.make_mesh((4,), ("x",))
    >>> shard_map(lambda x: x + 1, mesh, spmd.P("x"), spmd.P("x"))(np.arange(4.0))
    Array([1., 2., 3., 4.], dtype=float32)
    """
    names = set(mesh.axis_names) - set(auto) if auto else None
    return _shard_map(
        f,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=names,
        check_vma=check_rep,
    )
