"""Functions made to work on more dims: `vectorize`, `apply_along_axis`, `apply_over_axes`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from spmd.api.vectorize import vmap
from spmd.base.errors import ArgumentError, ShapeError
from spmd.base.util import wraps
from spmd.core.aval import typeof
from spmd.numpy.creation import asarray
from spmd.numpy.manipulation import expand_dims
from spmd.numpy.promotion import broadcast_shapes_of, check_arraylike, operand, plain
from spmd.numpy.reductions import canonical_axis
from spmd.sharding.array import ArrayLike

_DIMS = r"\((?:\w+(?:,\w+)*)?\)"
_SIGNATURE = rf"^{_DIMS}(?:,{_DIMS})*->{_DIMS}(?:,{_DIMS})*$"


def vectorize(
    pyfunc: Callable[..., Any],
    *,
    excluded: Collection[Any] = frozenset(),
    signature: str | None = None,
) -> Callable[..., Any]:
    """Make a function of scalars or small arrays a function of arrays, by nested `vmap`.

    `signature` like "(n,m),(m)->(n)" names the core dims of the arguments of `pyfunc`; without one
    they are scalars. The dims in front of them broadcast. Arguments in `excluded`, a set of
    positions or names, are passed on as they are. The dtype is that of the function's results.

    >>> dot = snp.vectorize(lambda x, y: (x * y).sum(), signature="(n),(n)->()")
    >>> dot(np.array([[1, 2], [3, 4]]), np.array([1, 10]))
    Array([21, 43], dtype=int32)
    """

    @wraps(pyfunc)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        fixed = {k: v for k, v in enumerate(args) if k in excluded}
        mapped = [plain(v) for k, v in enumerate(args) if k not in excluded]
        check_arraylike("vectorize", *mapped)

        def call(*rest: Any) -> Any:
            values = iter(rest)
            whole = [fixed[k] if k in fixed else next(values) for k in range(len(args))]
            return pyfunc(*whole, **kwargs)

        ranks, outputs = _core_dims(signature, len(mapped))
        sizes = _core_sizes(mapped, ranks, signature)

        def checked(*rest: Any) -> Any:
            out = call(*rest)
            _check_outputs(out, outputs, dict(sizes), signature)
            return out

        return _over_leading_dims(checked, mapped, ranks)

    return wrapped


def _core_dims(signature: str | None, count: int) -> tuple[list[list[str]], list[list[str]] | None]:
    """The names of the core dims of arguments, and those of results if a signature says them."""
    if signature is None:
        return [[] for _ in range(count)], None
    text = signature.replace(" ", "")
    if not re.match(_SIGNATURE, text):
        raise ArgumentError(f"vectorize: {signature!r} is not a signature like '(n,m),(m)->(n)'")
    left, right = text.split("->")
    inputs, outputs = (
        [[d for d in part.split(",") if d] for part in re.findall(r"\(([^)]*)\)", side)]
        for side in (left, right)
    )
    if len(inputs) != count:
        raise ArgumentError(
            f"vectorize: signature {signature!r} has {len(inputs)} inputs, got {count} arguments"
        )
    return inputs, outputs


def _core_sizes(
    args: Sequence[Any], cores: Sequence[Sequence[str]], signature: Any
) -> dict[str, int]:
    """The sizes of the core dims, by name."""
    sizes: dict[str, int] = {}
    for k, (x, core) in enumerate(zip(args, cores, strict=True)):
        shape = typeof(x).shape
        if len(shape) < len(core):
            raise ShapeError(
                f"vectorize: argument {k} of shape {shape} has fewer dims than ({','.join(core)}) "
                f"in {signature!r}"
            )
        for name, size in zip(core, shape[len(shape) - len(core) :], strict=True):
            if sizes.setdefault(name, size) != size:
                raise ShapeError(
                    f"vectorize: dim {name!r} of {signature!r} has sizes {sizes[name]} and {size}"
                )
    return sizes


def _over_leading_dims(
    f: Callable[..., Any], args: Sequence[Any], cores: Sequence[Sequence[str]]
) -> Any:
    """Map `f`, which is for core dims, over leading dims that broadcast."""
    pairs = zip(args, cores, strict=True)
    leads = [typeof(x).shape[: typeof(x).ndim - len(core)] for x, core in pairs]
    whole = broadcast_shapes_of("vectorize", leads)
    # Only the dims that an argument has are mapped for it: nothing is copied to broadcast.
    # The last dim's map is the innermost: each takes the first dim that is then left.
    for d in reversed(range(len(whole))):
        axes = []
        for lead in leads:
            own = len(lead) - (len(whole) - d)
            axes.append(0 if own >= 0 and lead[own] != 1 else None)
        if whole[d] != 1 and any(a == 0 for a in axes):
            f = _mapped(f, axes)
    args = [_without_ones(x, lead, whole) for x, lead in zip(args, leads, strict=True)]
    out = f(*args)
    ones = [d for d, size in enumerate(whole) if size == 1]
    if not ones:
        return out
    if isinstance(out, tuple):
        return tuple(expand_dims(o, tuple(ones)) for o in out)
    return expand_dims(out, tuple(ones))


def _mapped(f: Callable[..., Any], axes: Sequence[int | None]) -> Callable[..., Any]:
    return vmap(f, in_axes=tuple(axes))


def _without_ones(x: Any, lead: tuple[int, ...], whole: tuple[int, ...]) -> Any:
    ones = [d for d, size in enumerate(lead) if size == 1]
    shape = typeof(x).shape
    kept = [n for d, n in enumerate(shape) if d not in ones]
    return x if not ones else asarray(x).reshape(kept)


def _check_outputs(
    out: Any, cores: list[list[str]] | None, sizes: dict[str, int], signature: Any
) -> None:
    """Raise if results of the function have other core dims than the signature says."""
    if cores is None:
        return
    count = len(cores)
    if count > 1 and (not isinstance(out, tuple) or len(out) != count):
        raise ArgumentError(
            f"vectorize: the signature has {count} outputs, the function gave {out}"
        )
    for core, x in zip(cores, out if count > 1 else [out], strict=True):
        shape = tuple(np.shape(x))  # that of None is ()
        wanted = [sizes.setdefault(d, n) for d, n in zip(core, shape, strict=False)]
        if len(core) != len(shape) or wanted != list(shape):
            raise ShapeError(
                f"vectorize: a result of shape {shape} has not the core dims ({','.join(core)}) of "
                f"{signature!r}, where {sizes}"
            )


def apply_along_axis(
    func1d: Callable[..., Any], axis: int, arr: ArrayLike, *args: Any, **kwargs: Any
) -> Any:
    """Apply a function of vectors to all vectors along a dim, by `vmap`.

    `func1d` gets a vector along dim `axis` of `arr`, then `args` and `kwargs`. The dims of its
    result stand in place of that dim, and its dtype is the result's.

    >>> snp.apply_along_axis(lambda x: x[0] + x[-1], 1, np.array([[1, 2, 3], [4, 5, 6]]))
    Array([ 4, 10], dtype=int32)
    """
    arr = operand("apply_along_axis", arr)
    rank = typeof(arr).ndim
    d = canonical_axis(axis, rank, "apply_along_axis")

    def f(x: Any) -> Any:
        return func1d(x, *args, **kwargs)

    for k in range(1, rank - d):
        f = vmap(f, in_axes=k, out_axes=-1)
    for _ in range(d):
        f = vmap(f, in_axes=0, out_axes=0)
    return f(arr)


def apply_over_axes(func: Callable[[Any, int], Any], a: ArrayLike, axes: Sequence[int]) -> Any:
    """Apply a reduction along several dims, one after the other, which keep the size 1.

    `func` is called with an array and a dim, for each of `axes`. The dtype is that of its results.

    >>> snp.apply_over_axes(snp.sum, np.ones((2, 3)), [0, 1])
    Array([[6.]], dtype=float32)
    """
    result = operand("apply_over_axes", a)
    for axis in axes:
        rank = typeof(result).ndim
        reduced = func(result, axis)
        kept = typeof(reduced).ndim == rank
        result = reduced if kept else expand_dims(reduced, axis)
    return result
