"""A pytree of arrays as one flat array, and back: for optimisers and solvers that want a vector."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as _np

from spmd.base.errors import DtypeError as _DtypeError
from spmd.base.errors import ShapeError as _ShapeError
from spmd.base.record import record
from spmd.base.source import current_source as _current_source
from spmd.base.tree import TreeDef as _TreeDef
from spmd.base.tree import tree_flatten as _tree_flatten
from spmd.base.tree import tree_unflatten as _tree_unflatten
from spmd.core.aval import typeof as _typeof
from spmd.core.structural import reshape as _reshape
from spmd.lax.concatenate import concatenate as _concatenate
from spmd.lax.convert import convert_element_type as _convert
from spmd.lax.slicing import slice_in_dim as _slice_in_dim
from spmd.numpy.creation import zeros as _zeros
from spmd.numpy.promotion import result_type as _result_type

__all__ = ["ravel_pytree"]


def ravel_pytree(pytree: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The elements of all arrays of a pytree as one 1-D array, and the function that restores it.

    Leaves come in the pytree's order, each in row-major order, promoted to one dtype; `unravel`
    gives each its shape and dtype again. Where all leaves have one dtype, `unravel` accepts arrays
    of any dtype and keeps it. It can be traced, and equal structures have equal `unravel`s.

    >>> import spmd.numpy as snp
    >>> flat, unravel = ravel_pytree({"w": snp.ones((2, 2)), "b": snp.zeros(1)})
    >>> flat
    Array([0., 1., 1., 1., 1.], dtype=float32)
    >>> unravel(flat * 3)["w"]
    Array([[3., 3.],
           [3., 3.]], dtype=float32)
    """
    leaves, tree = _tree_flatten(pytree)
    avals = [_typeof(x) for x in leaves]
    shapes = tuple(a.shape for a in avals)
    if not leaves:
        return _zeros(0), _Unravel(tree, (), (), None)
    dtypes = tuple(a.dtype for a in avals)
    dtype = _result_type(*dtypes)
    pieces = [_reshape(_convert(x, dtype), (a.size,)) for x, a in zip(leaves, avals, strict=True)]
    mixed = any(d != dtype for d in dtypes)
    return _concatenate(pieces, 0), _Unravel(tree, shapes, dtypes if mixed else (), dtype)


@record
class _Unravel:
    """Cuts a flat array into the leaves of a pytree."""

    tree: _TreeDef
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[_np.dtype, ...]  # empty where all leaves had one dtype
    dtype: _np.dtype | None

    def __call__(self, flat: Any) -> Any:
        aval = _typeof(flat)
        sizes = [math.prod(shape) for shape in self.shapes]
        if aval.shape != (sum(sizes),):
            raise _ShapeError(
                f"{_current_source()}: unravel needs an array of shape ({sum(sizes)},), as "
                f"ravel_pytree gave it, got {aval.shape}"
            )
        if self.dtypes and aval.dtype != self.dtype:
            raise _DtypeError(
                f"{_current_source()}: unravel needs an array of dtype {self.dtype}, to which "
                f"ravel_pytree promoted leaves of different dtypes, got {aval.dtype}"
            )
        leaves, end = [], 0
        for k, (size, shape) in enumerate(zip(sizes, self.shapes, strict=True)):
            piece = _reshape(_slice_in_dim(flat, end, end + size), shape)
            leaves.append(_convert(piece, self.dtypes[k]) if self.dtypes else piece)
            end += size
        return _tree_unflatten(self.tree, leaves)
