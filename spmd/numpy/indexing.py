"""NumPy indexing: `x[i]`, and `x.at[i].set(v)` with its family, as arrays are immutable.

An index that is static becomes a slice, one with traced scalars a dynamic slice, and only one with
arrays of integers a gather; so the jaxprs of common programs stay small. Likewise an update of a
static, contiguous part is a `dynamic_update_slice`, one by a boolean mask a `select`, and the
others are scatters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.base.config import config
from spmd.base.errors import (
    ArgumentError,
    IndexingError,
    MutationError,
    ShapeError,
    ShardingTypeError,
)
from spmd.base.source import current_source
from spmd.base.tree import tree_map
from spmd.core.aval import ShapedArray, is_arraylike, typeof
from spmd.core.explicit import hooks, to_auto, to_auto_if_array
from spmd.core.trace import Tracer
from spmd.numpy.creation import asarray
from spmd.numpy.index_expr import IndexExpr, Point, Span, is_mask, parse_index
from spmd.numpy.index_plan import GatherPlan, Region, plan_gather, static_region
from spmd.numpy.promotion import (
    as_array,
    broadcast_to,
    plain,
    promote_dtypes,
    promote_dtypes_inexact,
)
from spmd.numpy.ufuncs import power

Combine = Callable[[Any, Any], Any]

# ---- x[index] ----------------------------------------------------------------------------------


def getitem(
    x: Any,
    index: Any,
    *,
    mode: str | lax.GatherScatterMode | None = None,
    fill_value: Any = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    wrap_negative_indices: bool = True,
) -> Any:
    """`x[index]` by NumPy's rules, as a new array.

    **An integer out of bounds raises nothing**: as the shapes and not the values are known when a
    program is compiled, it reads the nearest element (`mode="clip"`), or with `mode="fill"` gives
    `fill_value`.
    """
    x = as_array(x)
    expr = parse_index(index, typeof(x).shape, wrap_negative_indices)
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS if mode is None else mode
    mode = lax.GatherScatterMode.from_any(mode)
    if mode is not lax.GatherScatterMode.FILL_OR_DROP and not expr.has_tables:
        if all(not isinstance(part, Point) or part.static for part in expr.parts):
            return _static(x, expr)
        if all(not isinstance(part, Span) or abs(part.step) == 1 for part in expr.parts):
            return _dynamic(x, expr)
    return _gather(x, plan_gather(expr), mode, fill_value, indices_are_sorted, unique_indices)


def _reshaped(x: Any, region: Region) -> Any:
    x = lax.rev(x, region.reversed)
    return lax.expand_dims(lax.squeeze(x, region.removed), region.added)


def _static(x: Any, expr: IndexExpr) -> Any:
    region = static_region(expr)
    if not isinstance(x, Tracer):  # while a program is traced, a slice is `lax.slice`, as in JAX
        _check_whole(typeof(x), region)
    return _reshaped(lax.slice(x, region.starts, region.limits, region.strides), region)


def _dynamic(x: Any, expr: IndexExpr) -> Any:
    region = static_region(expr)
    _check_whole(typeof(x), region)
    starts: list[Any] = list(region.starts)
    for part in expr.parts:
        if isinstance(part, Point):
            starts[part.dim] = part.at
    out = lax.dynamic_slice(x, starts, region.shape, allow_negative_indices=False)
    return _reshaped(out, region)


def _check_whole(aval: ShapedArray, region: Region) -> None:
    """Raise if a part is taken of a dim that the type says is split: elements would be moved."""
    if aval.explicit is None:
        return
    for d, (entry, size, part) in enumerate(
        zip(aval.explicit.spec, aval.shape, region.shape, strict=True)
    ):
        if entry is not None and part != size:
            raise ShardingTypeError(
                f"{current_source()}: x[...]: dim {d} of {aval.short()} is split over {entry!r}, "
                f"and {part} of its {size} elements are wanted, which may lie anywhere. Say how "
                "the result is to be laid out: x.at[...].get(out_sharding=P(...))"
            )


def _gather(
    x: Any,
    plan: GatherPlan,
    mode: lax.GatherScatterMode,
    fill_value: Any,
    indices_are_sorted: bool,
    unique_indices: bool,
) -> Any:
    if fill_value is not None and (typeof(fill_value).ndim or not _is_concrete(fill_value)):
        raise ArgumentError(
            f"{current_source()}: fill_value must be a static scalar, got {fill_value!r}"
        )
    x = lax.expand_dims(x, plan.inserted)
    if 0 in plan.shape:
        return lax.full(plan.shape, np.zeros((), typeof(x).dtype)[()])
    out = lax.gather(
        x,
        plan.indices,
        plan.numbers,
        plan.slice_sizes,
        unique_indices=unique_indices or plan.unique,
        indices_are_sorted=indices_are_sorted or plan.sorted,
        mode=mode,
        fill_value=fill_value,
    )
    return lax.expand_dims(out, plan.added)


def _is_concrete(x: Any) -> bool:
    return not hasattr(x, "concrete") or x.concrete() is not None


# ---- x.at[index] -------------------------------------------------------------------------------


class IndexUpdateHelper:
    """`x.at`: give it an index, then say what to do there."""

    __slots__ = ("array",)

    def __init__(self, array: Any):
        self.array = array

    def __getitem__(self, index: Any) -> IndexUpdateRef:
        return IndexUpdateRef(self.array, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise MutationError(
            f"{current_source()}: x.at[i] = v does nothing to an array, which is immutable; write "
            "x = x.at[i].set(v), or .add(v), .multiply(v), .min(v), .max(v) for v += and the like"
        )

    def __call__(self, *index: Any) -> None:
        raise IndexingError(
            f"{current_source()}: x.at takes its index in brackets: x.at[i].set(v), not x.at(i)"
        )

    def __repr__(self) -> str:
        return f"IndexUpdateHelper({self.array!r})"


class IndexUpdateRef:
    """`x.at[index]`: a part of an array, to be read or replaced in a copy.

    All methods take `mode` (what happens out of bounds: by default updates are dropped and reads
    clipped; "clip", "fill", "drop", "promise_in_bounds"), `indices_are_sorted`, `unique_indices`
    (promises that may make them faster), and `wrap_negative_indices`.
    """

    __slots__ = ("array", "index")

    def __init__(self, array: Any, index: Any):
        self.array = array
        self.index = index

    def __repr__(self) -> str:
        return f"IndexUpdateRef({self.array!r}, {self.index!r})"

    def _refuse(self, *args: Any) -> NoReturn:
        raise MutationError(
            f"{current_source()}: x.at[i] is a place in an array, not a value: x[i] reads it, and "
            "x = x.at[i].set(v), .add(v), .multiply(v), .min(v) or .max(v) makes a changed copy"
        )

    __call__ = __iadd__ = __isub__ = __imul__ = __itruediv__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse

    def get(
        self,
        *,
        indices_are_sorted: bool = False,
        unique_indices: bool = False,
        mode: Any = None,
        fill_value: Any = None,
        wrap_negative_indices: bool = True,
        out_sharding: Any = None,
    ) -> Any:
        """`x[index]`, with control over what is read out of bounds, and over the layout."""
        ref = self if out_sharding is None else self._untyped()
        out = getitem(
            ref.array,
            ref.index,
            mode=mode,
            fill_value=fill_value,
            indices_are_sorted=indices_are_sorted,
            unique_indices=unique_indices,
            wrap_negative_indices=wrap_negative_indices,
        )
        return out if out_sharding is None else hooks.reshard(out, out_sharding)

    def _untyped(self) -> IndexUpdateRef:
        """The same where the compiler decides how values are laid out."""
        return IndexUpdateRef(to_auto(self.array), tree_map(to_auto_if_array, self.index))

    def set(self, values: Any, **how: Any) -> Any:
        """`x[index] = values`; of several values for one element the last stays.

        >>> IndexUpdateRef(np.zeros(4, np.float32), slice(1, 3)).set(5.0)
        Array([0., 5., 5., 0.], dtype=float32)
        """
        return _update(self, "set", values, lax.scatter, lambda old, new: new, how)

    def add(self, values: Any, **how: Any) -> Any:
        """`x[index] += values`, where an element indexed twice is added to twice."""
        return _update(self, "add", values, lax.scatter_add, lax.add, how)

    def subtract(self, values: Any, **how: Any) -> Any:
        """`x[index] -= values`, where an element indexed twice is subtracted from twice."""
        return _update(self, "subtract", values, lax.scatter_sub, lax.sub, how)

    def multiply(self, values: Any, **how: Any) -> Any:
        """`x[index] *= values`, where an element indexed twice is multiplied twice."""
        return _update(self, "multiply", values, lax.scatter_mul, lax.mul, how)

    mul = multiply

    def divide(self, values: Any, **how: Any) -> Any:
        """`x[index] /= values`: the array divided by the product of what falls on each element."""
        (x,) = promote_dtypes_inexact(as_array(self.array))
        return lax.div(x, IndexUpdateRef(_ones_like(x), self.index).multiply(values, **how))

    def power(self, values: Any, **how: Any) -> Any:
        """`x[index] **= values`: the array to the power of the product of what falls on each."""
        x = as_array(self.array)
        return power(x, IndexUpdateRef(_ones_like(x), self.index).multiply(values, **how))

    def min(self, values: Any, **how: Any) -> Any:
        """`x[index] = minimum(x[index], values)`."""
        return _update(self, "min", values, lax.scatter_min, lax.min, how)

    def max(self, values: Any, **how: Any) -> Any:
        """`x[index] = maximum(x[index], values)`."""
        return _update(self, "max", values, lax.scatter_max, lax.max, how)

    def apply(self, func: Callable[[Any], Any], **how: Any) -> Any:
        """`func.at(x, index)`: where an element is indexed twice, `func` is applied twice.

        It can be differentiated in reverse only where that cannot happen: if the index holds no
        arrays, or with `unique_indices=True`.
        """
        x = as_array(self.array)
        aval = typeof(x)
        options = _options("apply", **how)
        unique = options["unique"] or not parse_index(self.index, aval.shape).has_tables
        if unique:
            new = lax.convert_element_type(func(self.get(**how)), aval.dtype)
            return self.set(new, **how)
        zeros = lax.full(aval.shape, np.int32(0))
        counts = IndexUpdateRef(zeros, self.index).add(1, **how)
        return _applied(x, func, counts)


def _applied(x: Any, func: Callable[[Any], Any], counts: Any) -> Any:
    """`func` applied to each element as often as `counts` says."""
    dtype = typeof(x).dtype

    def more(state: tuple[Any, Any]) -> Any:
        left = lax.gt(state[1], 0)
        return lax.reduce_or(left, tuple(range(typeof(left).ndim)))

    def step(state: tuple[Any, Any]) -> tuple[Any, Any]:
        value, left = state
        new = lax.convert_element_type(func(value), dtype)
        return lax.select(lax.gt(left, 0), new, value), lax.sub(left, 1)

    return lax.while_loop(more, step, (x, counts))[0]


def _ones_like(x: Any) -> Any:
    aval = typeof(x)
    return lax.full(aval.shape, np.ones((), aval.dtype)[()])


# ---- the update --------------------------------------------------------------------------------


def _update(
    ref: IndexUpdateRef,
    name: str,
    values: Any,
    scatter: Callable[..., Any],
    combine: Combine,
    how: dict[str, Any],
) -> Any:
    out_sharding = how.pop("out_sharding", None)
    if out_sharding is not None:
        ref, values = ref._untyped(), to_auto_if_array(values)
    x = as_array(ref.array)
    values = plain(values)
    if not is_arraylike(values):
        values = _array_of(name, values)
    aval, given = typeof(x), typeof(values)
    work, values = promote_dtypes(x, _fitting(values, aval.dtype))
    if typeof(work).dtype != aval.dtype:
        warnings.warn(
            f"scatter inputs have incompatible types: {given.short()} is written to dtype "
            f"{aval.dtype.name} with numpy_dtype_promotion={config.numpy_dtype_promotion!r}; "
            "convert it with .astype, as this will be an error",
            FutureWarning,
            stacklevel=3,
        )
    out = _updated(work, ref.index, name, values, scatter, combine, how)
    out = lax.convert_element_type(out, aval.dtype, aval.weak_type)
    return out if out_sharding is None else hooks.reshard(out, out_sharding)


def _array_of(name: str, values: Any) -> Any:
    """The array of nested lists of numbers and arrays, which updates take as `asarray` does."""
    try:
        return asarray(values)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"{current_source()}: x.at[...].{name}: values must be an array, a number or lists of "
            f"them, got {values!r} of type {type(values).__name__}: {error}"
        ) from None


def _fitting(values: Any, dtype: np.dtype) -> Any:
    """A Python integer that the array's integer dtype can hold takes that dtype."""
    if type(values) is int and dtypes.is_integer(dtype):
        info = dtypes.iinfo(dtype)
        if info.min <= values <= info.max:
            return np.asarray(values, dtype)
    return values


def _updated(
    x: Any,
    index: Any,
    name: str,
    values: Any,
    scatter: Callable[..., Any],
    combine: Combine,
    how: dict[str, Any],
) -> Any:
    """The array with a part replaced or combined, by a select, a slice update or a scatter."""
    if is_mask(index) and typeof(index).ndim and not typeof(values).ndim:
        shape = typeof(x).shape
        if typeof(index).shape == shape[: typeof(index).ndim]:
            return _where(x, index, values, combine)
    options = _options(name, **how)
    expr = parse_index(index, typeof(x).shape, options.pop("wrap"))
    if _is_block(expr):
        return _write_block(x, expr, name, values, combine)
    plan = plan_gather(expr)
    values = _stretched(values, plan.shape, name)
    if 0 in plan.shape:
        return x
    out = scatter(
        lax.expand_dims(x, plan.inserted),
        plan.indices,
        lax.squeeze(values, plan.added),
        lax.ScatterDimensionNumbers(*plan.numbers),
        indices_are_sorted=options["sorted"] or plan.sorted,
        unique_indices=options["unique"] or plan.unique,
        mode=options["mode"],
    )
    return lax.squeeze(out, plan.inserted)


def _options(
    name: str,
    *,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    mode: Any = None,
    wrap_negative_indices: bool = True,
    **unknown: Any,
) -> dict[str, Any]:
    if unknown:
        raise ArgumentError(
            f"{current_source()}: x.at[...].{name} has no argument {', '.join(sorted(unknown))}; "
            "it takes mode, indices_are_sorted, unique_indices, wrap_negative_indices and "
            "out_sharding"
        )
    return {
        "sorted": indices_are_sorted,
        "unique": unique_indices,
        "mode": lax.GatherScatterMode.from_any(mode),
        "wrap": wrap_negative_indices,
    }


def _where(x: Any, mask: Any, value: Any, combine: Combine) -> Any:
    """A scalar where a mask of the leading dims holds; the mask may be traced."""
    shape = typeof(x).shape
    mask = lax.broadcast_in_dim(mask, shape, range(typeof(mask).ndim))
    new = combine(x, lax.broadcast_in_dim(value, shape, ()))
    return lax.select(mask, new, x)


def _is_block(expr: IndexExpr) -> bool:
    """Whether an index selects a contiguous block, all of it known and inside the array."""
    for part in expr.parts:
        if isinstance(part, Point):
            if not part.static or not 0 <= part.at < expr.shape[part.dim]:
                return False
        elif isinstance(part, Span) and abs(part.step) != 1 and part.size > 1:
            return False
    return not expr.has_tables


def _write_block(x: Any, expr: IndexExpr, name: str, values: Any, combine: Combine) -> Any:
    region = static_region(expr)
    block = region.shape
    if 0 in block:
        return x
    is_number = not typeof(values).ndim
    if not is_number:
        values = _stretched(values, _result_shape(region), name)
        values = lax.rev(lax.reshape(values, block), region.reversed)
    else:
        values = to_auto(broadcast_to(values, block))  # a number fits any layout
    if block == typeof(x).shape:
        out, lies = combine(x, values), typeof(x).explicit
        return out if lies is None or not is_number else hooks.reshard(out, lies)
    if name != "set":
        values = combine(lax.slice(x, region.starts, region.limits), values)
    return lax.dynamic_update_slice(x, values, region.starts)


def _result_shape(region: Region) -> tuple[int, ...]:
    shape = [size for d, size in enumerate(region.shape) if d not in region.removed]
    for d in region.added:
        shape.insert(d, 1)
    return tuple(shape)


def _stretched(values: Any, shape: tuple[int, ...], name: str) -> Any:
    """`values` broadcast to the shape of the part that is updated."""
    given = typeof(values).shape
    fits = len(given) <= len(shape) and all(
        a in (1, b) for a, b in zip(given[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ShapeError(
            f"{current_source()}: x.at[...].{name}: values of shape {given} cannot be broadcast to "
            f"the shape of the indexed part, {shape}"
        )
    return broadcast_to(values, shape)
