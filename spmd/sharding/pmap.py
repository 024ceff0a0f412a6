"""`pmap`: run a function once on each device, over the leading dim of its arguments.

It is `shard_map` over a mesh of one axis, with untyped axes and JAX's conventions: each device gets
one row, and in a multi-process run each process gives and gets the rows of its own devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np

from spmd.base.config import config
from spmd.base.context import state
from spmd.base.device import Device, devices, local_devices, too_few_devices
from spmd.base.errors import (
    ArgumentError,
    DeletedError,
    DeviceError,
    PytreeError,
    ShardingError,
)
from spmd.base.source import current_source
from spmd.base.traceback_filter import simplify
from spmd.base.tree import TreeDef, tree_flatten, tree_leaves, tree_unflatten
from spmd.base.tree_nodes import spread_over_structure
from spmd.base.util import (
    MISS,
    WeakCache,
    WrappedSignature,
    function_name,
    handles,
    present_as,
)
from spmd.core.argument_names import (
    check_arrays,
    check_axes,
    check_axis_name_free,
    function_source,
    leaf_names,
    mapped_size,
    parameter_names,
    spread_over_arguments,
)
from spmd.core.aval import typeof
from spmd.core.ir import ClosedJaxpr
from spmd.core.rewrite import hoist_tracers
from spmd.core.stage import Debug, trace_to_jaxpr
from spmd.core.structural import broadcast_leading, reshape
from spmd.core.trace import Tracer, to_numpy
from spmd.sharding.array import Array, check_alive, check_donated, from_numpy, usable, warn_unusable
from spmd.sharding.call_cache import FastCalls, MappedCall, is_evaluated
from spmd.sharding.named import NamedSharding
from spmd.sharding.nested_maps import flatten_maps, inner_mesh, is_inside_map
from spmd.sharding.process_rows import own_rows, rows_of_all
from spmd.sharding.shard_map_rules import (
    divergence_check,
    eager_map,
    mesh_axes,
    shard_map_p,
)
from spmd.sharding.spec import Mesh, PartitionSpec
from spmd.transport.flight_recorder import FLIGHT, TRACING


class AutoAxis:
    """The name of a mapped axis to which the user gave none."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<unnamed axis>"

    def __lt__(self, other: Any) -> bool:
        return id(self) < id(other)


# ---- the public function -----------------------------------------------------------------------


P = ParamSpec("P")
R = TypeVar("R")


def pmap(
    fun: Callable[P, R],
    axis_name: Any = None,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    static_broadcasted_argnums: int | Sequence[int] = (),
    devices: Sequence[Device] | None = None,
    backend: str | None = None,
    axis_size: int | None = None,
    donate_argnums: int | Sequence[int] = (),
) -> Callable[P, R]:
    """Run `fun` on several devices at once, one row of its arguments on each.

    `in_axes` says for each argument (a pytree prefix) which dim is cut into rows; None gives the
    whole argument to every device. Over 4 devices an argument of global shape (4, 3) is (3,) inside
    `fun`, and results get a dim of size 4 at `out_axes`; dtypes are those of `fun`. Inside,
    collectives work over `axis_name`. Arguments `static_broadcasted_argnums` are Python values;
    arguments `donate_argnums` may be overwritten. `devices` are the devices to use, by default the
    first of `backend`; `axis_size` is their number where no argument is mapped. In a multi-process
    run, pass and get the rows of this process's devices only.

    Raises `ShapeError` if mapped sizes disagree or a dim does not exist, `DeviceError` if there are
    too few devices, `PytreeError` if `in_axes` is no prefix, and `ArgumentError` if `fun` is no
    function. The message names the argument and its pytree path.

    >>> spmd.pmap(lambda x: x * 2)(np.arange(4.0))
    Array([0., 2., 4., 6.], dtype=float32)
    >>> center = spmd.pmap(lambda x, y: x - lax.pmean(x, "i") + y, axis_name="i", in_axes=(0, None))
    >>> center(np.arange(4.0), 10.0)
    Array([ 8.5,  9.5, 10.5, 11.5], dtype=float32)
    """
    if not callable(fun):
        raise ArgumentError(f"{current_source()}: pmap: {fun!r} is not a function")
    check_axes(f"pmap({function_name(fun)})", "in_axes", in_axes)
    check_axes(f"pmap({function_name(fun)})", "out_axes", out_axes)
    return PmapFunction(
        fun,
        axis_name,
        in_axes=tuple(in_axes) if isinstance(in_axes, list) else in_axes,
        out_axes=out_axes,
        static=_numbers(static_broadcasted_argnums),
        donated=_numbers(donate_argnums),
        devices=devices,
        backend=backend,
        axis_size=axis_size,
    )


def _numbers(given: int | Sequence[int]) -> tuple[int, ...]:
    return (given,) if isinstance(given, int) else tuple(given)


# Set by `compile/dispatch/jit.py`, which has the stages of a call: its `JitFunction`.
_stages: list[Callable[..., Any]] = []


def set_stages(make: Callable[..., Any]) -> None:
    """Say what takes a function through its stages, with the options of `jit`."""
    _stages[:] = [make]


def stages_of(fun: Callable[..., Any], **options: Any) -> Any:
    """The object whose `trace` and `lower` take a call of `fun` through its stages."""
    return _stages[0](fun, **options)


class _Shared:
    """The traces that all maps of one function with the same options share."""

    def __init__(self, axis_name: Any):
        self.axis_name = AutoAxis() if axis_name is None else axis_name
        self.traced: dict[Any, _Mapped] = {}
        self.fast = FastCalls()


# So that `pmap(f)(x)` in a loop compiles once, as `jit(f)(x)` does.
_maps = WeakCache()


def forget_maps() -> None:
    """Forget everything that pmapped functions have traced and compiled."""
    for shared in _maps.entries():
        shared.traced.clear()
        shared.fast.clear()


class PmapFunction:
    """The result of `pmap`: call it with stacked arguments."""

    __signature__ = WrappedSignature()

    def __init__(self, fun: Callable[..., Any], axis_name: Any, **options: Any):
        present_as(self, fun)
        self.fun, self.options = fun, options
        known = _maps.of(fun)
        try:
            shared = known.setdefault((axis_name, *options.values()), _Shared(axis_name))
        except TypeError:  # a pytree of axes may be no key
            shared = _Shared(axis_name)
        self.axis_name, self._traced, self._fast = shared.axis_name, shared.traced, shared.fast

    @handles
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            if is_evaluated():
                match = self._fast.match
                out = match(args, kwargs)
                if out is not MISS:
                    return out
            return self._call(args, kwargs)
        except Exception as error:
            simplify(error)
            raise

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The general path: any arguments, any transformation."""
        call = _PmapCall(self, args, kwargs)
        if config.disable_jit and eager_map.runs_eagerly():
            return call.run_eagerly()
        key = call.key()
        # Without jit the user's Python runs for each call, also where it is only traced.
        mapped = None if config.disable_jit else self._traced.get(key)
        if mapped is None:
            mapped = call.trace()
            if not mapped.consts:
                self._traced[key] = mapped
        return call.run(mapped, self._fast)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Trace a call with arguments like these, without running it."""
        return self._jitted().trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Trace a call and run the compiler's passes; `.compile()` makes it callable."""
        return self._jitted().lower(*args, **kwargs)

    def _jitted(self) -> Any:
        static, donated = self.options["static"], self.options["donated"]
        return stages_of(self, static_argnums=static, donate_argnums=donated)

    def clear_cache(self) -> None:
        """Forget everything that was traced and compiled."""
        self._traced.clear()
        self._fast.clear()


class _Mapped:
    """A traced pmapped function: its per-device jaxpr and how results come back."""

    def __init__(
        self,
        jaxpr: ClosedJaxpr,
        mesh: Mesh,
        consts: list[Any],
        out_tree: TreeDef,
        out_specs: Sequence[PartitionSpec],
    ):
        self.jaxpr = jaxpr
        self.mesh = mesh
        self.consts = consts
        self.out_tree = out_tree
        self.out_specs = tuple(out_specs)
        self.is_told = False  # which donated arguments no result takes


class _PmapCall:
    """One call: arguments checked and flattened, devices chosen."""

    def __init__(self, mapped: PmapFunction, args: Sequence[Any], kwargs: dict[str, Any]):
        options = mapped.options
        self.fun, self.axis, self.options = mapped.fun, mapped.axis_name, options
        self.what = f"pmap({function_name(self.fun)})"
        static = {k % len(args) for k in options["static"]} if args else set()
        self.static = {k: args[k] for k in sorted(static)}
        self.given = tuple(x for k, x in enumerate(args) if k not in static)
        self.kwargs = kwargs
        self.flat, self.in_tree = tree_flatten((self.given, kwargs))
        names = _names(self.fun, args, static, kwargs)
        check_arrays(self.what, names, self.flat)
        self.names = tuple(names)
        self.avals = [typeof(x) for x in self.flat]
        self.in_axes = self._flat_in_axes(args, static)
        size = mapped_size(self.what, names, self.avals, self.in_axes, options["axis_size"])
        self.in_axes = [
            None if a is None else a % v.ndim for a, v in zip(self.in_axes, self.avals, strict=True)
        ]
        check_axis_name_free(self.what, self.axis, [f.name for f in state.axes])
        self.size = size
        self.mesh, self.local_mesh = self._meshes(size)
        if state.mesh is not None and not state.mesh.has_grid_of(self.mesh):
            raise ShardingError(
                f"{current_source()}: {self.what}: its mesh is {self.mesh}, and set_mesh has set "
                f"{state.mesh}; use shard_map there, or call it outside"
            )
        self.donated = {k - sum(s < k for s in static) for k in options["donated"]}

    # -- setting up --

    def _flat_in_axes(self, args: Sequence[Any], static: set[int]) -> list[Any]:
        axes = self.options["in_axes"]
        if isinstance(axes, tuple):
            axes = tuple(None if k in static else a for k, a in enumerate(axes))
        names = parameter_names(self.fun, len(args))
        named = [
            (n, () if k in static else x) for k, (n, x) in enumerate(zip(names, args, strict=True))
        ]
        found = spread_over_arguments(self.what, "in_axes", axes, named)
        return found + [0] * len(tree_leaves(self.kwargs))

    def _meshes(self, size: int) -> tuple[Mesh, Mesh]:
        """The mesh of all devices mapped over, and that of this process's."""
        if is_inside_map():
            mesh = inner_mesh(self.axis, size)
            return mesh, mesh
        chosen = self.options["devices"]
        every_device = list(chosen) if chosen is not None else devices(self.options["backend"])
        here = local_devices()[0].process_index
        mine = [d for d in every_device if d.process_index == here]
        spread = len(mine) < len(every_device)
        if size > len(mine) or (spread and size != len(mine)):
            where = " on this process" if spread else ""
            raise too_few_devices(
                f"{current_source()}: {self.what} over {size} rows{where}", size, len(mine)
            )
        mine = mine[:size]
        names = (self.axis,)
        local = Mesh(np.asarray(mine, dtype=object), names)
        return (Mesh(np.asarray(every_device, dtype=object), names) if spread else local), local

    def key(self) -> Any:
        """The key of the traced jaxpr."""
        try:
            static = tuple(self.static.items())
            hash(static)
        except TypeError:
            raise ArgumentError(
                f"{current_source()}: {self.what}: static_broadcasted_argnums must be hashable, "
                f"got {self.static!r}"
            ) from None
        axes = tuple(self.in_axes)
        return (self.in_tree, tuple(self.avals), axes, self.mesh, static, state.axes, _settings())

    # -- tracing --

    def trace(self) -> _Mapped:
        """The per-device jaxpr."""
        trees: list[Any] = []

        def flat(*rows: Any) -> list[Any]:
            xs = [
                x if a is None else reshape(x, _without(typeof(x).shape, a))
                for x, a in zip(rows, self.in_axes, strict=True)
            ]
            outs, tree = tree_flatten(self._call(tree_unflatten(self.in_tree, xs)))
            trees[:] = [tree]
            out_axes[:] = self._flat_out_axes(tree, outs)
            return [
                x if a is None else broadcast_leading(x, 1, a)
                for x, a in zip(outs, out_axes, strict=True)
            ]

        out_axes: list[Any] = []
        rows = [
            v if a is None else v.update(shape=_with_row(v.shape, a, 1))
            for v, a in zip(self.avals, self.in_axes, strict=True)
        ]
        debug = Debug(function_name(self.fun), self.names, function_source(self.fun))
        with mesh_axes(self.mesh, "pmap"), FLIGHT.phase(TRACING, "trace", debug.name):
            closed = trace_to_jaxpr(flat, rows, debug)
        closed, consts = hoist_tracers(closed)
        mesh = self.mesh
        if not is_inside_map():
            closed, mesh = flatten_maps(closed, mesh, "pmap")
            self._check_divergence(closed, mesh, len(consts))
        return _Mapped(closed, mesh, consts, trees[0], [self._spec(a) for a in out_axes])

    def _check_divergence(self, closed: ClosedJaxpr, mesh: Mesh, hoisted: int) -> None:
        """Look for collectives that not all devices reach."""

        if not divergence_check.is_suspect(closed):
            return
        given = divergence_check.Given

        def rows() -> Iterator[Any]:
            yield from [given(frozenset(), "a value from outside")] * hoisted
            for x, a, name in zip(self.flat, self.in_axes, self.names, strict=True):
                if a is None:
                    yield given(frozenset(), name)
                    continue
                known = is_evaluated() and not isinstance(x, Tracer)
                held = list(np.moveaxis(to_numpy(x), a, 0)) if known else None
                yield given(frozenset([self.axis]), name, held)

        divergence_check.check_divergence(self.what, closed, mesh.shape, list(rows()))

    def _call(self, tree: Any) -> Any:
        given, kwargs = tree
        rest = iter(given)
        count = len(given) + len(self.static)
        args = [self.static[k] if k in self.static else next(rest) for k in range(count)]
        return self.fun(*args, **kwargs)

    def _flat_out_axes(self, tree: TreeDef, outs: Sequence[Any]) -> list[Any]:
        try:
            found = spread_over_structure(self.options["out_axes"], tree, "out_axes", "the output")
        except PytreeError as error:
            raise PytreeError(f"{self.what}: {error.text}") from None
        out = []
        for k, (a, x) in enumerate(zip(found, outs, strict=True)):
            ndim = typeof(x).ndim + 1
            if a is not None and not (isinstance(a, int) and -ndim <= a < ndim):
                raise ArgumentError(
                    f"{current_source()}: {self.what}: out_axes={a!r} for output {k}, whose result "
                    f"has {ndim} dims; it must be None or an integer in [{-ndim}, {ndim})"
                )
            out.append(None if a is None else a % ndim)
        return out

    def _spec(self, axis: int | None) -> PartitionSpec:
        return PartitionSpec() if axis is None else PartitionSpec(*([None] * axis), self.axis)

    # -- running --

    def run(self, mapped: _Mapped, fast: FastCalls) -> Any:
        """Bind the primitive; over several processes, on global arrays made of local rows."""
        operands = self.flat
        if is_evaluated() and self.mesh is self.local_mesh:
            self._check_committed()
        if self.mesh is not self.local_mesh:
            operands = [
                rows_of_all(x, self.mesh, self.size, a)
                for x, a in zip(self.flat, self.in_axes, strict=True)
            ]
        params = {
            "jaxpr": mapped.jaxpr,
            "mesh": mapped.mesh,
            "in_specs": (PartitionSpec(),) * len(mapped.consts)
            + tuple(self._spec(a) for a in self.in_axes),
            "out_specs": mapped.out_specs,
            "kind": "pmap",
            "name": function_name(self.fun),
        }
        gone = self._usable(mapped) if self.donated else [False] * len(self.flat)

        def names() -> list[str]:
            return [f"argument {k}" for k in self._argument_of_leaf()]

        if True in gone:
            check_donated(self.what, self.flat, gone, names)
        try:
            outs = shard_map_p.bind(*mapped.consts, *operands, **params)
        except DeletedError:
            check_alive(self.what, self.flat, names)
            raise
        if self.mesh is not self.local_mesh:
            # A spec has its one axis last.
            axes = [len(s) - 1 if s else None for s in mapped.out_specs]
            outs = [own_rows(x, self.mesh, self.size, a) for x, a in zip(outs, axes, strict=True)]
        if is_evaluated() and mapped.mesh == self.mesh:
            fast.note_map(self._described(mapped, outs, params, gone))
        for x, given in zip(self.flat, gone, strict=True):
            if given and isinstance(x, Array) and (x.shards is not None or self.mesh.size == 1):
                x.delete()
        return tree_unflatten(mapped.out_tree, outs)

    def _check_committed(self) -> None:
        """Raise if an argument is committed to other places than those of its rows."""
        for x, axis, name in zip(self.flat, self.in_axes, self.names, strict=True):
            if type(x) is not Array or not x.committed:
                continue
            wanted = NamedSharding(self.local_mesh, self._spec(axis))
            if x.sharding.is_equivalent_to(wanted, x.ndim):
                continue
            raise DeviceError(
                f"{current_source()}: {self.what}: {name} ({x.aval.short()}) is committed to "
                f"{x.sharding}, and its rows are mapped over {self.local_mesh}; nothing is moved "
                f"silently. Pass device_put({name}, NamedSharding(mesh, P(axis))) with a mesh of "
                "these devices, or an array that is not committed"
            )

    def _described(
        self, mapped: _Mapped, outs: Sequence[Any], params: dict[str, Any], gone: Sequence[bool]
    ) -> MappedCall:
        """This call, for the closure that will make the next ones."""
        return MappedCall(
            leaves=self.flat,
            tree=self.in_tree,
            static=tuple(self.static.items()),
            in_shardings=[NamedSharding(self.local_mesh, self._spec(a)) for a in self.in_axes],
            donated=gone,
            outs=[(x.aval, x.sharding) for x in outs],
            out_tree=mapped.out_tree,
            params=params,
        )

    def _argument_of_leaf(self) -> list[int]:
        """For each leaf, the number of its positional argument; -1 for keyword arguments."""
        positional, named = self.in_tree.parts
        out = [k for k, tree in enumerate(positional.parts) for _ in range(tree.num_leaves)]
        return out + [-1] * named.num_leaves

    def _usable(self, mapped: _Mapped) -> tuple[bool, ...]:
        """For each leaf, whether it is donated and a result may take its rows; else warns once."""
        jaxpr = mapped.jaxpr
        avals = jaxpr.in_avals[len(mapped.consts) :]
        flags = [k in self.donated for k in self._argument_of_leaf()]
        found = usable(flags, [a.nbytes for a in avals], [a.nbytes for a in jaxpr.out_avals])
        if not mapped.is_told:
            mapped.is_told = True
            rows = zip(avals, flags, found, strict=True)
            warn_unusable(self.what, [a for a, given, taken in rows if given > taken])
        return found

    # -- op by op --

    def run_eagerly(self) -> Any:
        """`disable_jit`: the function runs once, on every local device's concrete values."""
        trees: list[Any] = []
        out_axes: list[Any] = []

        def flat(*xs: Any) -> list[Any]:
            outs, tree = tree_flatten(self._call(tree_unflatten(self.in_tree, xs)))
            trees[:] = [tree]
            out_axes[:] = self._flat_out_axes(tree, outs)
            return outs

        avals = [
            v if a is None else v.update(shape=_without(v.shape, a))
            for v, a in zip(self.avals, self.in_axes, strict=True)
        ]
        rows = [self._rows(x, a) for x, a in zip(self.flat, self.in_axes, strict=True)]
        outer = eager_map.current_lockstep()
        found, given = eager_map.run_lockstep(
            flat, rows, avals, self.mesh.shape, self.mesh.flat_devices()
        )
        if outer is not None:
            outs = [
                _stack_inner(outer, v, a, self.size) for v, a in zip(found, out_axes, strict=True)
            ]
        else:
            outs = []
            for values, aval, axis in zip(found, given, out_axes, strict=True):
                value = values[0] if axis is None else np.stack(values, axis)
                outs.append(from_numpy(value, aval.update(shape=value.shape)))
        return tree_unflatten(trees[0], outs)

    def _rows(self, x: Any, axis: int | None) -> list[np.ndarray]:
        """Rows of each local device; inside another map, of each inner device of each outer one."""
        outer = eager_map.current_lockstep()
        wholes = [to_numpy(x)] if outer is None else outer.values_of(x)
        n = self.size
        return [
            whole if axis is None else np.take(whole, k, axis) for whole in wholes for k in range(n)
        ]


def _stack_inner(outer: Any, values: list[np.ndarray], axis: int | None, n: int) -> Any:
    rows = [values[k : k + n] for k in range(0, len(values), n)]
    joined = [row[0] if axis is None else np.stack(row, axis) for row in rows]
    return outer.join(joined, typeof(joined[0]))


def _names(fun: Any, args: Sequence[Any], static: set[int], kwargs: dict[str, Any]) -> list[str]:
    shown = [None if k in static else x for k, x in enumerate(args)]
    return leaf_names(fun, shown, kwargs)


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def _with_row(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    return (*shape[:axis], size, *shape[axis + 1 :])


def _settings() -> Any:
    return (config.tracing, config.num_cpu_devices)
