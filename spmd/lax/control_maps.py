"""`map` and `associative_scan`: two loops that are made of other operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spmd.base.errors import ArgumentError, DimensionError, ShapeError
from spmd.base.source import current_source
from spmd.base.tree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from spmd.base.util import api_boundary
from spmd.core.aval import typeof
from spmd.core.structural import reshape, to_front
from spmd.core.vmap import batch_flat, leading_axis
from spmd.lax.arithmetic import add
from spmd.lax.array import rev
from spmd.lax.concatenate import concatenate
from spmd.lax.control_scan import scan
from spmd.lax.logic import bitwise_or
from spmd.lax.slicing import pad, slice_in_dim


@api_boundary
def map(f: Callable[[Any], Any], xs: Any, *, batch_size: int | None = None) -> Any:
    """Apply `f` to each slice of `xs` along its leading dim, one after the other, and stack.

    `xs` is a pytree of arrays of shape (n, ...); `f` gets slices of shape (...) and its results get
    a new leading dim of size n. The dtype is that of the results of `f`. With `batch_size`, that
    many slices at a time are computed together, as `vmap` does. `vmap` is faster where memory
    allows. Raises the errors of `scan`, such as `ShapeError` if leading dims disagree, and
    `ArgumentError` if `batch_size` is negative; 0 is JAX's for None.

    >>> lax.map(lambda x: x * x, np.arange(4))
    Array([0, 1, 4, 9], dtype=int32)
    >>> lax.map(lambda row: row.sum(), np.ones((5, 2)), batch_size=2)
    Array([2., 2., 2., 2., 2.], dtype=float32)
    """
    if not batch_size:  # None, or JAX's 0: no batches
        return scan(lambda _, x: ((), f(x)), (), xs)[1]
    if batch_size < 1:
        raise ArgumentError(
            f"{current_source()}: lax.map: batch_size={batch_size}, a batch has at least 1 slice"
        )
    leaves = tree_leaves(xs)
    if not leaves or not all(typeof(x).ndim for x in leaves):
        return scan(lambda _, x: ((), f(x)), (), xs)[1]  # which says what is wrong
    n = typeof(leaves[0]).shape[0]
    if not n:
        return scan(lambda _, x: ((), f(x)), (), xs)[1]
    whole = n // batch_size * batch_size
    parts = []
    if whole:
        grouped = tree_map(
            lambda x: reshape(
                slice_in_dim(x, 0, whole),
                (whole // batch_size, batch_size, *typeof(x).shape[1:]),
            ),
            xs,
        )
        done = scan(lambda _, x: ((), _over_front(f, x)), (), grouped)[1]
        parts.append(tree_map(lambda y: reshape(y, (whole, *typeof(y).shape[2:])), done))
    if whole < n:
        parts.append(_over_front(f, tree_map(lambda x: slice_in_dim(x, whole, n), xs)))
    return parts[0] if len(parts) == 1 else tree_map(lambda *p: concatenate(p, 0), *parts)


def _over_front(f: Callable[[Any], Any], xs: Any) -> Any:
    """`vmap(f)` over the leading dim."""
    leaves, tree = tree_flatten(xs)
    size = typeof(leaves[0]).shape[0]
    trees = []

    def flat(*args: Any) -> list[Any]:
        outs, out_tree = tree_flatten(f(tree_unflatten(tree, args)))
        trees.append(out_tree)
        return outs

    outs, dims = batch_flat(flat, leading_axis(leaves, size), leaves, [0] * len(leaves))
    return tree_unflatten(trees[0], [to_front(x, d, size) for x, d in zip(outs, dims, strict=True)])


@api_boundary
def associative_scan(
    fn: Callable[[Any, Any], Any], elems: Any, reverse: bool = False, axis: int = 0
) -> Any:
    """Combine all prefixes with an associative function, in a logarithmic number of steps.

    `fn(a, b)` takes and returns pytrees like `elems`, elementwise along `axis`: it is called on
    arrays of many elements, so it must treat each on its own. The result has the structure and
    shapes of `elems`. With `reverse=True` suffixes are combined. Where `fn` is not exactly
    associative, as with float sums, the grouping shows in the last bits. The scheme is Blelloch's
    (Prefix sums and their applications, 1990): combine neighbours, scan the half as many results,
    and fill in the rest.

    Raises `ShapeError` if leaves differ in size along `axis`, `DimensionError` if one has no such
    dim, and `ArgumentError` if `fn` is no function.

    >>> lax.associative_scan(lax.mul, np.arange(1, 6))
    Array([  1,   2,   6,  24, 120], dtype=int32)
    """
    flat, tree = tree_flatten(elems)
    if not callable(fn):
        raise ArgumentError(f"{current_source()}: lax.associative_scan: fn must be a function")
    for x in flat:
        if not -typeof(x).ndim <= axis < typeof(x).ndim:
            raise DimensionError(
                f"{current_source()}: lax.associative_scan: axis {axis} is out of bounds for "
                f"{typeof(x)}"
            )
    axis = axis % typeof(flat[0]).ndim if flat else 0
    sizes = {typeof(x).shape[axis] for x in flat}
    if len(sizes) != 1:
        shapes = ", ".join(str(typeof(x).shape) for x in flat)
        raise ShapeError(
            f"{current_source()}: lax.associative_scan: all leaves must have the same size along "
            f"axis {axis}; got shapes {shapes}"
        )
    if reverse:
        flat = [rev(x, (axis,)) for x in flat]

    def combine(a: list[Any], b: list[Any]) -> list[Any]:
        return tree_flatten(fn(tree_unflatten(tree, a), tree_unflatten(tree, b)))[0]

    found = _scan_pairs(combine, flat, axis)
    if reverse:
        found = [rev(x, (axis,)) for x in found]
    return tree_unflatten(tree, found)


def _scan_pairs(
    combine: Callable[[list[Any], list[Any]], list[Any]], elems: list[Any], axis: int
) -> list[Any]:
    n = typeof(elems[0]).shape[axis]
    if n < 2:
        return elems

    def part(xs: list[Any], start: int, stop: int, step: int = 1) -> list[Any]:
        return [slice_in_dim(x, start, stop, step, axis) for x in xs]

    pairs = combine(part(elems, 0, n - 1, 2), part(elems, 1, n, 2))
    odd = _scan_pairs(combine, pairs, axis)
    if n % 2:
        even = combine(odd, part(elems, 2, n, 2))
    else:
        count = typeof(odd[0]).shape[axis]
        even = combine(part(odd, 0, count - 1), part(elems, 2, n, 2))
    first = part(elems, 0, 1)
    even = [concatenate([a, b], axis) for a, b in zip(first, even, strict=True)]
    return [_interleave(a, b, axis) for a, b in zip(even, odd, strict=True)]


def _interleave(a: Any, b: Any, axis: int) -> Any:
    """a0 b0 a1 b1 ...: both spread out by one and added."""
    aval, other = typeof(a), typeof(b)
    zero = np.zeros((), aval.dtype)
    extra = aval.shape[axis] - other.shape[axis]

    def spread(x: Any, low: int, high: int) -> Any:
        config = [(0, 0, 0)] * aval.ndim
        config[axis] = (low, high, 1)
        return pad(x, zero, config)

    joined = bitwise_or if aval.dtype == np.bool_ else add
    return joined(spread(a, 0, 0 if extra else 1), spread(b, 1, 1 if extra else 0))
