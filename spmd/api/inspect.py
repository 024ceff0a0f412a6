"""Looking at programs without running them (`make_jaxpr`, `eval_shape`), and at arrays."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import numpy as np

from spmd.api.flat import (
    FlatFunction,
    Residual,
    as_derivative,
    check_cotangents,
    check_function,
    partial_of,
    refuse_reduce_axes,
)
from spmd.base import dtypes
from spmd.base.config import config
from spmd.base.dtypes import canonical
from spmd.base.errors import DtypeError, PytreeError
from spmd.base.source import current_source
from spmd.base.tree import (
    TreeDef,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from spmd.base.util import api_boundary, function_name, wraps
from spmd.compile.dispatch.jit import Entry, JitFunction
from spmd.compile.dispatch.stages import describe
from spmd.core.argument_names import (
    debug_info,
)
from spmd.core.aval import ShapedArray, ShapeDtypeStruct, is_arraylike, typeof
from spmd.core.axis import AxisFrame, extend_axes
from spmd.core.ir import ClosedJaxpr
from spmd.core.mutable.cells import Cell, TouchedCells, cell_of, pure_of_cells
from spmd.core.primitive import Linear
from spmd.core.stage import trace_to_jaxpr
from spmd.core.trace import Tracer
from spmd.core.transpose import backward_pass
from spmd.sharding.array import Array
from spmd.sharding.future import Future, settled_check
from spmd.sharding.named import NamedSharding

T = TypeVar("T")


def _aval_like(x: Any) -> ShapedArray:
    """The aval of an array, or of anything with a shape and a dtype."""
    if not is_arraylike(x) and hasattr(x, "shape") and hasattr(x, "dtype"):
        aval = ShapedArray(x.shape, canonical(x.dtype), getattr(x, "weak_type", False))
        sharding = getattr(x, "sharding", None)
        return sharding.typed(aval) if isinstance(sharding, NamedSharding) else aval
    return typeof(x)


def _axis_frames(axis_env: Sequence[tuple[Any, int]] | None) -> list[AxisFrame]:
    return [AxisFrame(name, size, "pmap") for name, size in axis_env or ()]


def make_jaxpr(
    fun: Callable[..., Any],
    static_argnums: int | Sequence[int] = (),
    axis_env: Sequence[tuple[Any, int]] | None = None,
    return_shape: bool = False,
) -> Callable[..., Any]:
    """Make the function that returns the jaxpr of `fun` at the given arguments.

    Its arguments are arrays, or anything with a shape and a dtype. Arguments `static_argnums` are
    Python values. `axis_env` brings axis names into scope for collectives: pairs of a name and a
    size. With `return_shape`, the result is the pair of the jaxpr and what `eval_shape` gives.
    Nothing is computed. In the jaxpr mutable arrays are values: where `fun` writes to some, what is
    left in them are more results, behind its own. Raises `ArgumentError` if an argument is no
    array.

    >>> spmd.make_jaxpr(lambda x: x * 2.0)(1.0)
    { lambda ; a:f32[]. let b:f32[] = mul a 2.0:f32[] in (b,) }
    >>> spmd.make_jaxpr(lambda x: lax.psum(x, "i"), axis_env=[("i", 4)])(1.0)
    { lambda ; a:f32[]. let b:f32[] = psum[axes=('i',) axis_index_groups=None] a in (b,) }
    """
    return jaxpr_maker(fun, static_argnums, axis_env, return_shape)


def jaxpr_maker(
    fun: Callable[..., Any],
    static_argnums: int | Sequence[int],
    axis_env: Sequence[tuple[Any, int]] | None,
    return_shape: bool,
    keeps_arrays: bool = False,
) -> Callable[..., Any]:
    """`make_jaxpr`; with `keeps_arrays` arrays without dims are constants too, not literals."""
    check_function("make_jaxpr", fun)
    static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)

    @api_boundary
    @wraps(fun)
    def jaxpr_of(*args: Any, **kwargs: Any) -> Any:
        with extend_axes(_axis_frames(axis_env)):
            entry = _staged_call(fun, args, kwargs, static, keeps_arrays)
            if entry is not None:
                closed, tree = entry.closed, entry.out_tree
            else:
                closed, tree = _with_cells_as_values(fun, args, kwargs, static, keeps_arrays)
        if not return_shape:
            return closed
        # The last values of mutable arrays are behind the results.
        return closed, tree.unflatten([describe(a) for a in closed.out_avals[: tree.num_leaves]])

    jaxpr_of.__name__ = f"make_jaxpr({function_name(fun)})"
    return jaxpr_of


def _staged_call(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    static: Sequence[int] = (),
    keeps_arrays: bool = False,
) -> Entry | None:
    """The trace of a call of `jit(fun)`, made once for one kind of call; None for mutable arrays.

    Arguments are arrays, or anything with a shape and a dtype.
    """
    try:
        hash(fun)
    except TypeError:  # an object that equals others by its values; kept for this call only
        fun = partial(fun)
    jitted = JitFunction(fun, static_argnums=static, keeps_arrays=keeps_arrays)
    try:
        return jitted.staged(args, kwargs, _as_struct)
    except TouchedCells:
        return None


def _as_struct(x: Any) -> Any:
    """An argument of which only the type counts."""
    if is_arraylike(x) or not (hasattr(x, "shape") and hasattr(x, "dtype")):
        return x
    if cell_of(x) is not None:
        return x
    sharding = getattr(x, "sharding", None)
    return ShapeDtypeStruct(
        x.shape,
        canonical(x.dtype),
        weak_type=getattr(x, "weak_type", False),
        sharding=sharding if isinstance(sharding, NamedSharding) else None,
    )


def _with_cells_as_values(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    static: Sequence[int] = (),
    keeps_arrays: bool = False,
) -> tuple[ClosedJaxpr, TreeDef]:
    """The jaxpr of a function that uses mutable arrays, and the structure of what it returns.

    Their values are inputs, and outputs behind its own.
    """
    fixed = {k % len(args) for k in static}
    dynamic = tuple(k for k in range(len(args)) if k not in fixed)
    given = tuple(args[k] for k in dynamic)

    def f(*some: Any, **named: Any) -> Any:
        return partial_of(fun, dynamic, args, named)(*some)

    flat, in_tree = tree_flatten((given, kwargs))
    flat_f = FlatFunction(f if fixed else fun, in_tree)
    debug = debug_info(fun, given, kwargs)
    closed = pure_of_cells(
        flat_f,
        flat,
        lambda f, xs: trace_to_jaxpr(f, [_aval_like(x) for x in xs], debug, keeps_arrays),
    )
    assert flat_f.out_tree is not None
    return closed, flat_f.out_tree


@api_boundary
def eval_shape(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Find the shapes and dtypes of `fun(*args, **kwargs)` without computing it.

    `args` and `kwargs` are pytrees of arrays, or of anything with a shape and a dtype; the result
    is the pytree that `fun` returns, of `ShapeDtypeStruct`s, with the shardings that types or
    `jit(out_shardings=)` say. Raises `ArgumentError` if an argument
    is no array, and what `fun` itself raises while it is traced.

    >>> spmd.eval_shape(lambda x: x @ x.T, spmd.ShapeDtypeStruct((3, 5), "float32"))
    ShapeDtypeStruct(shape=(3, 3), dtype=float32)
    """
    if isinstance(fun, JitFunction) and all(map(is_arraylike, tree_leaves((args, kwargs)))):
        return fun.eval_shape(*args, **kwargs)  # which knows what out_shardings say
    entry = _staged_call(fun, args, kwargs)
    if entry is not None:
        return entry.out_tree.unflatten([describe(a) for a in entry.closed.out_avals])
    closed, tree = _with_cells_as_values(fun, args, kwargs)
    return tree.unflatten([describe(a) for a in closed.out_avals[: tree.num_leaves]])


def block_until_ready(x: T) -> T:
    """Wait until every array of the pytree `x` is computed, and return `x`.

    Long calls of jitted functions return before they are done; a time that is measured needs this
    wait. Leaves of other types, a bool or a string, are ignored; shapes and dtypes stay.

    >>> y = spmd.jit(lambda x: x + 1)(np.arange(3))
    >>> spmd.block_until_ready(y)
    Array([1, 2, 3], dtype=int32)
    """
    if type(x) is Array:
        x.block_until_ready()
        return x
    if settled_check.is_settled(x):
        return x
    for leaf in tree_leaves(x):
        if type(leaf) is Array and (leaf.shards is not None or type(leaf.owner) is Future):
            leaf.block_until_ready()
    return x


def device_get(x: Any) -> Any:
    """Return the pytree `x` with a NumPy array in place of each array.

    Shapes and dtypes stay. An array on one device is not copied: the result is a read-only view of
    it. An array over several devices is assembled, which raises `ShardingError` if other processes
    hold parts of it. Leaves that are no arrays, as numbers, stay as they are, and so do keys,
    mutable arrays and what is traced.

    >>> spmd.device_get({"w": snp.ones(2)})
    {'w': array([1., 1.], dtype=float32)}
    """

    def fetched(leaf: Any) -> Any:
        if isinstance(leaf, (Tracer, Cell)) or dtypes.is_key(getattr(leaf, "dtype", None)):
            return leaf
        return np.asarray(leaf) if hasattr(leaf, "__array__") else leaf

    return tree_map(fetched, x)


@api_boundary
def linear_transpose(
    fun: Callable[..., Any], *primals: Any, reduce_axes: Sequence[Any] = ()
) -> Callable[..., Any]:
    """Make the transpose of `fun`, a function that is linear in its arguments.

    `primals` give shapes and dtypes only (arrays, or anything with `.shape` and `.dtype`). The
    transpose takes a cotangent of the structure and shapes of the output, and returns the tuple of
    cotangents of the arguments. It is a pytree of the arrays that `fun` closes over, which jitted
    functions may return and take. It raises `PytreeError` if the structure is another one.
    `reduce_axes` must be empty, else a `RefusedError` is raised.

    >>> spmd.linear_transpose(lambda x: 2 * x, 1.0)(3.0)
    (Array(6., dtype=float32, weak_type=True),)
    """
    refuse_reduce_axes("linear_transpose", reduce_axes)
    flat, in_tree = tree_flatten((primals, {}))
    avals = [_aval_like(x) for x in flat]
    flat_f = FlatFunction(fun, in_tree)
    closed = trace_to_jaxpr(flat_f, avals, debug_info(fun, primals))
    kinds = [{dtypes.is_inexact(a.dtype) for a in sides} for sides in (avals, closed.out_avals)]
    if kinds[0] | kinds[1] == {True, False}:
        raise DtypeError(
            f"{current_source()}: linear_transpose({function_name(fun)}): arguments and results "
            "must all be floating or complex, or all be integers; got arguments "
            f"{[a.dtype.name for a in avals]} and results "
            f"{[a.dtype.name for a in closed.out_avals]}"
        )

    def transposed(closed: ClosedJaxpr, ct: Any) -> Any:
        cts, got = tree_flatten(ct)
        if got != flat_f.out_tree:
            raise PytreeError(
                f"{current_source()}: linear_transpose({function_name(fun)}): the cotangent must "
                f"have the structure of the output, {flat_f.out_tree}, got {got}"
            )
        what = f"linear_transpose({function_name(fun)})"
        check_cotangents(what, closed.out_avals, cts)
        found = backward_pass(closed.jaxpr, closed.consts, [Linear(a) for a in avals], cts)
        args, _ = tree_unflatten(in_tree, [as_derivative(x) for x in found])
        return args

    return Residual(transposed, closed)


def disable_jit(disable: bool = True) -> AbstractContextManager[None]:
    """Run functions under `jit` and `pmap` op by op, with concrete values, in a `with` block.

    `disable` is a bool; False turns compilation on again inside such a block. Breakpoints and
    `print` inside jitted functions then see values, shapes and dtypes as in plain Python.

    >>> f = spmd.jit(lambda x: float(x) + 1)
    >>> with spmd.disable_jit():
    ...     f(2.0)
    3.0
    """
    return config.override("disable_jit", disable)


def live_arrays(platform: str | None = None) -> list[Array]:
    """All arrays that are alive: that something still refers to, and that were not deleted.

    An array over several devices is listed once, without its shards. `platform` is accepted as
    JAX's; all arrays of a process are on one.

    >>> x = snp.ones(3)
    >>> any(x is y for y in live_arrays())
    True
    """
    del platform
    found = [x for x in gc.get_objects() if type(x) is Array and not x.is_deleted()]
    shards = {id(shard) for x in found for shard in x.shards or ()}
    return [x for x in found if id(x) not in shards]
