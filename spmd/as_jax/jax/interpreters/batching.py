"""`jax.interpreters.batching`: rules for `vmap` of primitives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from spmd.as_jax.primitive import (
    Primitive,
    axis_primitive_batchers,
    fancy_primitive_batchers,
    primitive_batchers,
)
from spmd.as_jax.refuse import missing
from spmd.core.aval import typeof
from spmd.core.structural import broadcast_leading, move_dim
from spmd.core.vmap import BatchTrace, BatchTracer

__all__ = [
    "BatchTrace",
    "BatchTracer",
    "axis_primitive_batchers",
    "bdim_at_front",
    "broadcast",
    "defbroadcasting",
    "defreducer",
    "defvectorized",
    "fancy_primitive_batchers",
    "moveaxis",
    "not_mapped",
    "primitive_batchers",
    "register_vmappable",
    "unregister_vmappable",
]
__getattr__ = missing("jax.interpreters.batching")

not_mapped = None


def register_vmappable(
    data_type: type,
    spec_type: type,
    axis_size_type: type,
    to_elt: Callable[..., Any],
    from_elt: Callable[..., Any],
    make_iota: Callable[..., Any] | None,
) -> None:
    """Nothing: `vmap` maps over arrays, and a value of such a class is none, as it will say."""


def unregister_vmappable(data_type: type) -> None:
    """Nothing."""


def broadcast(x: Any, sz: int, axis: int, mesh_axis: Any = None) -> Any:
    """Repeat a value along a new dim."""
    return broadcast_leading(x, sz, axis)


def moveaxis(x: Any, source: int, to: int) -> Any:
    """Move a dim of a value."""
    return move_dim(x, source, to % typeof(x).ndim)


def bdim_at_front(x: Any, bdim: int | None, size: int, mesh_axis: Any = None) -> Any:
    """A value with its batched dim first; one that is not batched is repeated."""
    return broadcast_leading(x, size, 0) if bdim is None else move_dim(x, bdim, 0)


def defvectorized(prim: Primitive) -> None:
    """Declare that a primitive works elementwise on one operand or on operands batched alike."""

    def batch(operands: Any, dims: Any, **params: Any) -> Any:
        out = prim.bind(*operands, **params)
        return (out, [dims[0]] * len(out)) if prim.multiple else (out, dims[0])

    primitive_batchers[prim] = batch


def defbroadcasting(prim: Primitive) -> None:
    """Declare that a primitive works elementwise, and broadcasts its operands."""
    primitive_batchers[prim] = partial(_broadcast_batch, prim)


def _broadcast_batch(prim: Primitive, operands: Any, dims: Any, **params: Any) -> Any:
    size = next(typeof(x).shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    rank = max(typeof(x).ndim - (d is not None) for x, d in zip(operands, dims, strict=True))
    ready = []
    for x, d in zip(operands, dims, strict=True):
        if d is None and not typeof(x).ndim:
            ready.append(x)  # a number goes with all shapes
        else:
            front = bdim_at_front(x, d, size)
            shape = typeof(front).shape
            ready.append(front.reshape((size,) + (1,) * (rank + 1 - len(shape)) + shape[1:]))
    return prim.bind(*ready, **params), 0


def defreducer(prim: Primitive, ident: Any = None) -> None:
    """Declare that a primitive reduces over the dims in its parameter `axes`."""

    def batch(operands: Any, dims: Any, *, axes: Any, **params: Any) -> Any:
        (x,), (d,) = operands, dims
        moved = tuple(a + (a >= d) for a in axes)
        return prim.bind(x, axes=moved, **params), d - sum(a < d for a in moved)

    primitive_batchers[prim] = batch
