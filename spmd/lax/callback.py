"""Callbacks: Python functions that run on the host, with values, while a program runs.

A pure callback is an ordinary operation; an io callback and a debug callback are effects: they are
never dropped, merged or moved past each other, so that all effects of a program happen in the order
in which it was written, on several devices in lockstep with the devices in mesh order.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from spmd.base.context import attributed_to, current_trace
from spmd.base.dtypes import bool_, canonical
from spmd.base.errors import (
    ArgumentError,
    DtypeError,
    PytreeError,
    RefusedError,
    ShapeError,
)
from spmd.base.record import record
from spmd.base.source import current_source
from spmd.base.tree import TreeDef, tree_flatten, tree_leaves, tree_unflatten
from spmd.base.util import api_boundary, function_name, wraps
from spmd.core.aval import ShapedArray, is_arraylike, typeof
from spmd.core.axis import manual_axes, replace_axes
from spmd.core.primitive import Primitive, Refused
from spmd.core.remat import optimization_barrier
from spmd.core.structural import broadcast_leading, to_front
from spmd.core.trace import EVAL, unchanged
from spmd.lax.array import full

# ---- where a callback runs ---------------------------------------------------------------------


@record
class Place:
    """The place of a callback: the device (None outside pmap and shard_map) and its axis indices.

    `axes` has the index along each named axis, those of `vmap(axis_name=...)` too.
    """

    device: Any = None
    axes: tuple[tuple[Any, int], ...] = ()

    def __str__(self) -> str:
        return ", ".join(f"{name}={index}" for name, index in self.axes)

    def index(self, axis_name: Any) -> int:
        """The position along a named axis."""
        for name, index in reversed(self.axes):
            if name == axis_name:
                return index
        bound = ", ".join(repr(name) for name, _ in self.axes) or "none"
        raise ArgumentError(f"no axis {axis_name!r} where this callback runs; there are: {bound}")


class _Here(threading.local):
    place = Place()


_here = _Here()


def here() -> Place:
    """Inside a callback: the device it runs for, and that device's index along each axis.

    >>> import spmd, spmd.numpy as snp
    >>> seen = []
    >>> f = lambda x: spmd.debug.callback(lambda: seen.append(spmd.debug.here().index("i")))
    >>> _ = spmd.pmap(f, axis_name="i")(snp.arange(2.0))
    >>> seen
    [0, 1]
    """
    return _here.place


@contextmanager
def at_place(place: Place) -> Iterator[None]:
    """Let `here()` be `place` for the length of a `with` block."""
    before = _here.place
    _here.place = place
    try:
        yield
    finally:
        _here.place = before


# ---- functions on the host ---------------------------------------------------------------------


@record
class _Fixed:
    """An argument that is no array, by identity: a callback gets it as it is."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Fixed) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@record
class HostFunction:
    """A user's function of pytrees as a function of flat NumPy arrays.

    Equal for the same function, structure and static arguments, so that programs can be compared.
    `fixed[k]` is leaf k of the arguments if it is no array, None if it is.
    """

    function: Callable[..., Any]
    in_tree: TreeDef
    fixed: tuple[_Fixed | None, ...]
    out_tree: TreeDef | None = None
    avals: tuple[ShapedArray, ...] = ()

    def __call__(self, *arrays: np.ndarray) -> list[np.ndarray]:
        given = map(unchanged, arrays)
        leaves = [next(given) if f is None else f.value for f in self.fixed]
        args, kwargs = tree_unflatten(self.in_tree, leaves)
        out = self.function(*args, **kwargs)
        if self.out_tree is None:
            return []
        found, tree = tree_flatten(out)
        if len(found) != len(self.avals):
            raise PytreeError(
                f"the callback {function_name(self.function)} returned {tree}, of "
                f"{len(found)} leaves, but result_shape_dtypes says {self.out_tree}, of "
                f"{len(self.avals)}: they must have as many"
            )
        return [
            self._checked(x, a, k) for k, (x, a) in enumerate(zip(found, self.avals, strict=True))
        ]

    def _checked(self, x: Any, aval: ShapedArray, k: int) -> np.ndarray:
        got = typeof(x)
        name = function_name(self.function)
        if got.shape != aval.shape:
            raise ShapeError(
                f"the callback {name} returned a result {k} of shape {got.shape}, but "
                f"result_shape_dtypes says {aval.shape}"
            )
        weak = got.weak_type and np.can_cast(got.dtype, aval.dtype, "same_kind")
        if got.dtype != aval.dtype and not weak:
            raise DtypeError(
                f"the callback {name} returned a result {k} of dtype {got.dtype}, but "
                f"result_shape_dtypes says {aval.dtype}; convert it with .astype in the callback"
            )
        return np.asarray(x, dtype=aval.dtype)

    def __repr__(self) -> str:
        return function_name(self.function)


@record
class Mapped:
    """A host function run for each example of a batch, in order; `flags` marks batched operands."""

    inner: Any
    axis_name: Any
    size: int
    flags: tuple[bool, ...]
    avals: tuple[ShapedArray, ...] = ()

    def __call__(self, *arrays: np.ndarray) -> list[np.ndarray]:
        outs = [np.empty((self.size, *a.shape), a.dtype) for a in self.avals]
        place = here()
        for k in range(self.size):
            axes = place.axes if self.axis_name is None else (*place.axes, (self.axis_name, k))
            rows = [np.asarray(x[k]) if b else x for x, b in zip(arrays, self.flags, strict=True)]
            with at_place(Place(place.device, axes)):
                found = self.inner(*rows)
            for out, value in zip(outs, found, strict=True):
                out[k] = value
        return outs

    def __repr__(self) -> str:
        return f"{self.size} times {self.inner}"


def _host_function(
    callback: Callable[..., Any], args: Any, kwargs: Any, results: Any = None
) -> tuple[HostFunction, list[Any]]:
    """A user's callback at the structure of its arguments, and those that are arrays."""
    leaves, in_tree = tree_flatten((args, kwargs))
    fixed = tuple([None if is_arraylike(x) else _Fixed(x) for x in leaves])
    operands = [x for x, f in zip(leaves, fixed, strict=True) if f is None]
    if results is None:
        return HostFunction(callback, in_tree, fixed), operands
    avals, out_tree = results
    return HostFunction(callback, in_tree, fixed, out_tree, avals), operands


def _result_avals(what: str, results: Any) -> tuple[tuple[ShapedArray, ...], TreeDef]:
    """The avals and structure that a user's `result_shape_dtypes` describes."""
    leaves, tree = tree_flatten(results)
    avals = []
    for k, x in enumerate(leaves):
        if not (hasattr(x, "shape") and hasattr(x, "dtype")):
            raise ArgumentError(
                f"{what}: result_shape_dtypes must be a pytree of objects with .shape and .dtype "
                f"(spmd.ShapeDtypeStruct, arrays), but its leaf {k} is {x!r}"
            )
        if canonical(x.dtype) != np.dtype(x.dtype):
            raise ArgumentError(
                f"{what}: result_shape_dtypes has dtype {np.dtype(x.dtype)}, but 64-bit types are "
                f"off (SPMD_ENABLE_X64=1 turns them on); say {canonical(x.dtype)}"
            )
        avals.append(ShapedArray(tuple(x.shape), canonical(x.dtype)))
    return tuple(avals), tree


# The exception by which a callback's error reaches the caller of the program; None: one of the
# callback's class that is a RuntimeError as well.
raised_as: Callable[[Exception], Exception] | None = None


def _run(what: str, xp: Any, function: Any, operands: Sequence[Any]) -> list[np.ndarray]:
    """Call the user's function as if nothing of ours surrounded it; errors name the user's line."""
    source = current_source()
    # The operands may be views of memory that is about to be used again, the callback's to keep.
    arrays = [np.array(x if xp is np else xp.asnumpy(x)) for x in operands]
    as_usual = np.errstate(divide="warn", over="warn", invalid="warn", under="ignore")
    with current_trace(EVAL), replace_axes(()), attributed_to(None), as_usual:
        try:
            return function(*arrays)
        except Exception as error:
            place = here()
            on = f" on {place.device}" if place.device is not None else ""
            at = f" ({place})" if place.axes else ""
            error.add_note(f"raised in the {what} made at {source}{on}{at}")
            if raised_as is not None:
                raise raised_as(error) from error
            if what == "debug.callback" or isinstance(error, (RuntimeError, KeyboardInterrupt)):
                raise
            raise _as_runtime_error(error) from error.__cause__


_runtime_errors: dict[type[Exception], type[Exception]] = {}


def _as_runtime_error(error: Exception) -> Exception:
    """A callback's error as a RuntimeError of the program as well: both classes catch it."""
    kind = type(error)
    if kind not in _runtime_errors:
        bases: tuple[Any, ...] = (kind, RuntimeError)
        _runtime_errors[kind] = type(kind.__name__, bases, {"__module__": kind.__module__})
    found = _runtime_errors[kind].__new__(_runtime_errors[kind], *error.args)
    found.args = error.args
    found.__dict__.update(error.__dict__)
    return found.with_traceback(error.__traceback__)


_NOT_PARTITIONED = Refused("a callback sees whole arrays; call it inside shard_map for the pieces")

# ---- pure_callback -----------------------------------------------------------------------------

VMAP_METHODS = (
    "sequential",
    "sequential_unrolled",
    "expand_dims",
    "broadcast_all",
    "legacy_vectorized",
)


@api_boundary
def pure_callback(
    callback: Callable[..., Any],
    result_shape_dtypes: Any,
    *args: Any,
    sharding: Any = None,
    vmap_method: str | None = None,
    **kwargs: Any,
) -> Any:
    """Call a Python function without side effects from inside a compiled program.

    `callback` gets arrays (in the pytrees of `args` and `kwargs`; what is no array it gets as it
    is) and returns what `result_shape_dtypes` describes, a pytree of shapes and dtypes. **It may
    be called any number of times**, also never, if its results are not needed.

    `vmap_method` says what `vmap` does: `"sequential"` calls it for each example;
    `"broadcast_all"` calls it once, with a new leading dim on all arguments and results;
    `"expand_dims"` likewise, that dim being 1 for arguments that are not mapped. Under pmap and
    shard_map every device calls it. It has no derivative; give it one with `custom_jvp`. It always
    runs on the host; `sharding` is accepted for JAX's sake. Raises `ArgumentError` for another
    `vmap_method`, `RefusedError` under `vmap` without one. Errors that `callback`
    raises are `RuntimeError`s too.

    >>> import numpy as np, spmd, spmd.numpy as snp
    >>> shape = spmd.ShapeDtypeStruct((3,), np.float32)
    >>> spmd.jit(lambda x: spmd.pure_callback(np.sort, shape, x))(snp.array([3.0, 1.0, 2.0]))
    Array([1., 2., 3.], dtype=float32)
    """
    if vmap_method is not None and vmap_method not in VMAP_METHODS:
        raise ArgumentError(
            f"pure_callback: vmap_method={vmap_method!r} must be None or one of "
            f"{', '.join(map(repr, VMAP_METHODS))}"
        )
    avals, tree = _result_avals("pure_callback", result_shape_dtypes)
    function, operands = _host_function(callback, args, kwargs, (avals, tree))
    outs = pure_callback_p.bind(*operands, function=function, avals=avals, vmap_method=vmap_method)
    return tree_unflatten(tree, outs)


def _pure_batch(
    axis: Any, operands: Any, at: Any, *, function: Any, avals: Any, vmap_method: str | None
) -> Any:
    if vmap_method is None:
        raise RefusedError(
            f"{current_source()}: pure_callback of {function} under vmap needs vmap_method: "
            "'sequential' (call it for each example), 'expand_dims' or 'broadcast_all' (it takes "
            "a leading dim)"
        )
    stacked = tuple(a.update(shape=(axis.size, *a.shape)) for a in avals)
    if vmap_method.startswith("sequential"):
        flags = tuple(d is not None for d in at)
        function = Mapped(function, axis.name, axis.size, flags, avals)
    else:
        function = _restacked(function, stacked)
    # An operand that is not batched keeps its shape, unless the callback expects a leading dim.
    size = {"expand_dims": 1, "broadcast_all": axis.size}.get(vmap_method)
    moved = []
    for x, d in zip(operands, at, strict=True):
        if d is not None:
            x = to_front(x, d, axis.size)
        elif size is not None:
            x = broadcast_leading(x, size)
        moved.append(x)
    outs = pure_callback_p.bind(*moved, function=function, avals=stacked, vmap_method=vmap_method)
    return outs, [0] * len(outs)


def _restacked(function: HostFunction, avals: tuple[ShapedArray, ...]) -> HostFunction:
    """The function with results of other shapes: it is called once for all examples."""
    return HostFunction(
        function.function, function.in_tree, function.fixed, function.out_tree, avals
    )


_NO_DERIVATIVE = Refused(
    "a callback has no derivative; give the function that calls it one with spmd.custom_jvp or "
    "spmd.custom_vjp, or cut it off with lax.stop_gradient"
)

pure_callback_p = Primitive(
    "pure_callback",
    abstract=lambda *_, avals, **__: list(avals),
    impl=lambda xp, *operands, function, **_: _run("pure_callback", xp, function, operands),
    jvp=_NO_DERIVATIVE,
    transpose=_NO_DERIVATIVE,
    batch=_pure_batch,
    dims=_NOT_PARTITIONED,
    multiple=True,
)

# ---- io_callback -------------------------------------------------------------------------------


@api_boundary
def io_callback(
    callback: Callable[..., Any],
    result_shape_dtypes: Any,
    *args: Any,
    sharding: Any = None,
    ordered: bool = False,
    **kwargs: Any,
) -> Any:
    """Call a Python function that may have side effects from inside a compiled program.

    As for `pure_callback`, `callback` gets arrays in the pytrees of `args` and `kwargs`, and
    returns what `result_shape_dtypes`, a pytree of shapes and dtypes, describes; None is for a
    callback that returns None. The call is made exactly as often as the program reaches it, even if
    its results are not used. All effects of a program keep their order here, `ordered` or not; with
    `ordered=True` the call refuses `vmap`, where there would be none. Without it `vmap` calls
    `callback` for each example. `sharding` is accepted for JAX's sake.

    >>> log = []
    >>> f = spmd.jit(lambda x: spmd.io_callback(lambda v: log.append(float(v)), None, x))
    >>> f(1.5)
    >>> log
    [1.5]
    """
    avals, tree = _result_avals("io_callback", result_shape_dtypes)
    function, operands = _host_function(callback, args, kwargs, (avals, tree))
    outs = io_callback_p.bind(*operands, function=function, avals=avals, ordered=bool(ordered))
    return tree_unflatten(tree, outs)


def _io_batch(
    axis: Any, operands: Any, at: Any, *, function: Any, avals: Any, ordered: bool
) -> Any:
    if ordered:
        raise ArgumentError(
            f"{current_source()}: io_callback(ordered=True) of {function} cannot be vmapped: its "
            "examples have no order; use ordered=False, or lax.map instead of vmap"
        )
    moved = [
        x if d is None else to_front(x, d, axis.size) for x, d in zip(operands, at, strict=True)
    ]
    flags = tuple(d is not None for d in at)
    stacked = tuple(a.update(shape=(axis.size, *a.shape)) for a in avals)
    mapped = Mapped(function, axis.name, axis.size, flags, avals)
    outs = io_callback_p.bind(*moved, function=mapped, avals=stacked, ordered=False)
    return outs, [0] * len(outs)


io_callback_p = Primitive(
    "io_callback",
    abstract=lambda *_, avals, **__: list(avals),
    impl=lambda xp, *operands, function, **_: _run("io_callback", xp, function, operands),
    jvp=_NO_DERIVATIVE,
    transpose=_NO_DERIVATIVE,
    batch=_io_batch,
    dims=_NOT_PARTITIONED,
    multiple=True,
    # Each device makes its own call, whose results need not be equal even if the operands are.
    vma=lambda avals, params: frozenset(manual_axes()),
    effects=lambda params: frozenset(("OrderedIO" if params["ordered"] else "IO",)),
)

# ---- debug_callback ----------------------------------------------------------------------------


def debug_callback(
    callback: Callable[..., Any] | None = None,
    *args: Any,
    ordered: bool = False,
    partitioned: bool = False,
    **kwargs: Any,
) -> Any:
    """Call a Python function with values of a compiled program, for its effects, not its result.

    It works under every transformation: `vmap` calls it for each example, `pmap` and `shard_map`
    for each device (`debug.here()` says which), differentiation calls it in the forward pass, on
    primal values. Calls keep their order, `ordered` or not, and are made even if nothing else is
    computed; each device shows its own values, `partitioned` or not. Without `callback` this is a
    decorator: the function is called back wherever it is called.

    >>> import spmd, spmd.numpy as snp
    >>> seen = []
    >>> def f(x):
    ...     spmd.debug.callback(lambda v: seen.append(float(v)), x)
    ...     return x * x
    >>> spmd.grad(f)(3.0)
    Array(6., dtype=float32, weak_type=True)
    >>> seen
    [3.0]
    """
    if callback is None and not args and not kwargs:
        return _called_back(ordered, partitioned)
    if not callable(callback):
        raise ArgumentError(
            f"debug.callback: the first argument must be callable, got {callback!r}"
        )
    function, operands = _host_function(callback, args, kwargs)
    debug_callback_p.bind(*operands, function=function, ordered=bool(ordered))


def _called_back(ordered: bool, partitioned: bool) -> Callable[..., Any]:
    """A decorator: each call of the function in a program becomes a debug callback."""

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> None:
            bound = functools.partial(
                debug_callback, function, ordered=ordered, partitioned=partitioned
            )
            bound(*args, **kwargs)

        return call

    return decorate


def _debug_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    return debug_callback_p.bind(*primals, **params), []


def _debug_batch(axis: Any, operands: Any, at: Any, *, function: Any, ordered: bool) -> Any:
    moved = [
        x if d is None else to_front(x, d, axis.size) for x, d in zip(operands, at, strict=True)
    ]
    flags = tuple(d is not None for d in at)
    mapped = Mapped(function, axis.name, axis.size, flags)
    debug_callback_p.bind(*moved, function=mapped, ordered=ordered)
    return [], []


debug_callback_p = Primitive(
    "debug_callback",
    abstract=lambda *_, **__: [],
    impl=lambda xp, *operands, function, **_: _run("debug.callback", xp, function, operands),
    jvp=_debug_jvp,
    transpose=Refused(
        "a tangent that is only written down has no value to show: debug.callback on a tangent "
        "works in forward mode (jvp) only"
    ),
    batch=_debug_batch,
    dims=_NOT_PARTITIONED,
    multiple=True,
    effects=lambda params: frozenset(("OrderedDebug" if params["ordered"] else "Debug",)),
)

# ---- effects_barrier ---------------------------------------------------------------------------


def effects_barrier() -> None:
    """Wait until the effects of all programs called so far have happened, and are written out.

    A call returns after its effects, so there is only buffered output to write.

    >>> spmd.effects_barrier()
    """
    sys.stdout.flush()


# ---- tokens ------------------------------------------------------------------------------------

# A token says by data alone what runs before what. It is an array without elements, as in XLA's
# runtime, and operations on it are barriers: no pass removes one or moves work across it.


def create_token(_: Any = None) -> Any:
    """Make a token that waits for nothing: a bool array of shape (0,). An argument is ignored.

    >>> lax.create_token().shape
    (0,)
    """
    return optimization_barrier(full((0,), False, bool_))


def after_all(*operands: Any) -> Any:
    """Make one token of several, a bool array of shape (0,): it is there when all `operands` are.

    Raises `ArgumentError` for an operand that is no token.

    >>> lax.after_all(lax.create_token(), lax.create_token()).shape
    (0,)
    """
    for k, token in enumerate(operands):
        aval = typeof(token)
        if aval.shape != (0,) or aval.dtype != bool_:
            raise ArgumentError(
                f"after_all: operand {k} is {aval}, and no token; create_token() makes one, and "
                "optimization_barrier orders a value and a token"
            )
    return optimization_barrier(list(operands))[0] if operands else create_token()


def dce_sink(val: Any, *, prevent_mlir_dce: bool = False) -> None:
    """Keep what computes the arrays of the pytree `val`, though nothing reads them.

    They have any shapes and dtypes. Compiled code computes them, with or without
    `prevent_mlir_dce`.

    >>> spmd.make_jaxpr(lambda x: lax.dce_sink(x + 1.0))(2.0).eqns[0].primitive
    add
    """
    for leaf in tree_leaves(val):
        debug_callback(_read, leaf)


def _read(_: Any) -> None:
    """Nothing: the call is what keeps its operand."""


def shape_as_value(shape: Any) -> Any:
    """Return the sizes of `shape` as an array of integers.

    >>> lax.shape_as_value((2, 3))
    Array([2, 3], dtype=int32)
    """
    wide = any(size > np.iinfo(np.int32).max for size in shape)
    return optimization_barrier(np.asarray(shape, np.int64 if wide else np.int32))


def stage(x: Any, /) -> Any:
    """Return `x`, a number or an array of NumPy's too, as a value of what is being traced.

    Its shape and dtype stay.

    >>> lax.stage(np.arange(2))
    Array([0, 1], dtype=int32)
    """
    return optimization_barrier(x)
