"""`smap`: a `shard_map` along one axis of the mesh, with array dims in the place of specs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from spmd.base.errors import ArgumentError
from spmd.base.source import current_source
from spmd.base.tree import tree_flatten, tree_map, tree_unflatten
from spmd.base.util import function_name, wraps
from spmd.core.argument_names import parameter_names, spread_over_arguments
from spmd.core.aval import typeof
from spmd.sharding.shard_map import Infer, shard_map
from spmd.sharding.spec import PartitionSpec


def smap(
    f: Callable[..., Any] | None = None,
    /,
    *,
    in_axes: Any = Infer,
    out_axes: Any,
    axis_name: Any,
) -> Callable[..., Any]:
    """Run `f` on shards along one axis of the mesh in scope.

    `in_axes` is an integer, None, or a pytree prefix of the arguments: the dim of each that the
    axis splits (None: none); without it the types of the arguments say so. `out_axes` says the same
    of the results. Global shape (8, 4) with `in_axes=0` over 4 devices is (2, 4) inside `f`; dtypes
    are those of `f`. Along other axes of the mesh values are whole, as in
    `shard_map(axis_names={axis_name})`. Without `f` this is a decorator.

    Raises `ArgumentError` if an axis is no dim of its argument, and what `shard_map` raises.

    >>> with spmd.set_mesh(spmd.make_mesh((4,), ("x",))):
    ...     spmd.smap(lambda x: x - x.sum(), in_axes=0, out_axes=0, axis_name="x")(np.arange(8.0))
    Array([-1.,  0., -3., -2., -5., -4., -7., -6.], dtype=float32)
    """
    if f is None:
        return functools.partial(smap, in_axes=in_axes, out_axes=out_axes, axis_name=axis_name)
    what = f"smap({function_name(f)})"

    @wraps(f)
    def mapped(*args: Any) -> Any:
        in_specs = in_axes
        if in_axes is not Infer:
            leaves, tree = tree_flatten(args)
            named = list(zip(parameter_names(f, len(args)), args, strict=True))
            axes = spread_over_arguments(what, "in_axes", in_axes, named)
            pairs = zip(leaves, axes, strict=True)
            in_specs = tree_unflatten(tree, [_spec(what, a, typeof(x).ndim) for x, a in pairs])
        out_specs = tree_map(lambda a: _spec(what, a, None), out_axes, is_leaf=lambda a: a is None)
        run = shard_map(f, in_specs=in_specs, out_specs=out_specs, axis_names={axis_name})
        return run(*args)

    def _spec(what: str, axis: Any, ndim: int | None) -> PartitionSpec:
        """The spec of a value whose dim `axis` is split; `ndim` is None for results."""
        if axis is None:
            return PartitionSpec()
        least, most = (0, None) if ndim is None else (-ndim, ndim)
        if not isinstance(axis, int) or axis < least or (most is not None and axis >= most):
            name = "out_axes" if ndim is None else "in_axes"
            known = "an integer from 0 on" if ndim is None else f"an integer in [{least}, {most})"
            raise ArgumentError(f"{current_source()}: {what}: {name}={axis!r} must be {known}")
        before = axis if ndim is None else axis % ndim
        return PartitionSpec(*[None] * before, axis_name)

    return mapped
