"""`JitFunction`, the result of `jit(f)`.

The one idea: a call is looked up, not done. Its key is the structure of the arguments, the avals of
their leaves, the static values and the context of the call (axis names in scope, x64). A key met
for the first time is traced; evaluated for the first time, it is compiled. Under a transformation
the traced jaxpr becomes one `jit` equation instead.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import compress
from types import MethodType
from typing import TYPE_CHECKING, Any

from spmd.base.background import is_ending
from spmd.base.config import config
from spmd.base.context import busy, state
from spmd.base.device import Device, devices
from spmd.base.errors import ArgumentError, ShardingError
from spmd.base.record import field, record
from spmd.base.source import current_source
from spmd.base.traceback_filter import simplify
from spmd.base.tree import TreeDef, tree_flatten, tree_leaves
from spmd.base.util import (
    MISS,
    WeakCache,
    WrappedSignature,
    api_boundary,
    collector_paused,
    handles,
    present_as,
)
from spmd.compile.dispatch.signature import Signature, Split
from spmd.compile.dispatch.stages import Lowered, Traced, check_compiler_options, used_donations
from spmd.compile.executable.nan_check import check_nans, kept_operands
from spmd.compile.lazy import (
    argument_checks,
    compiler,
    fast_call,
    key_uses,
    mesh_fast_call,
    select,
    stateful,
)
from spmd.core.argument_names import spread_over_arguments
from spmd.core.aval import ShapedArray, typeof
from spmd.core.call import UNSPECIFIED, jit_p, jit_params, placing
from spmd.core.ir import ClosedJaxpr
from spmd.core.mutable.cells import Cell, TouchedCells, cell_of
from spmd.core.rewrite import dce, drop_inputs, eval_closed, hoist_tracers, prune_consts
from spmd.core.stage import Debug, trace_to_jaxpr
from spmd.core.trace import EVAL, Tracer
from spmd.core.trace_once import forget_traces
from spmd.sharding.array import check_donated, note_place, warn_unusable
from spmd.sharding.call_cache import FastCalls, compared, hook, no_match, noting_device
from spmd.sharding.constraint import (
    as_sharding,
    check_placements,
    constrain,
    constrain_tree,
    device_of_all,
    is_placement,
    note_mesh_read,
    prefix_key,
    shardings_of_leaves,
)
from spmd.sharding.mesh_scope import mesh_in_scope
from spmd.sharding.named import Sharding, SingleDeviceSharding
from spmd.sharding.operand_layouts import (
    call_named,
    device_of,
    guards_moves,
    layouts_of,
    stays_in_scope,
    strays,
)
from spmd.sharding.pmap import forget_maps, set_stages
from spmd.sharding.spec import current_mesh
from spmd.transport import world
from spmd.transport.flight_recorder import COMPILING, FLIGHT, TRACING

if TYPE_CHECKING:
    from spmd.compile.executable.executable import Executable
    from spmd.compile.executable.mesh_program import MeshProgram


@record(frozen=False)
class Entry:
    """The state of one key: the traced function and, once evaluated, its executable."""

    closed: ClosedJaxpr
    out_tree: TreeDef
    donated: tuple[bool, ...]
    # By result, what `out_shardings` says of it; and by argument `in_shardings`.
    out_shardings: tuple[Sharding | None, ...]
    in_shardings: tuple[Sharding | None, ...]
    # For each layout of the arguments, None for arguments that are over no mesh, and each device
    # that is no CPU.
    executables: dict[Any, Executable | MeshProgram] = field(default_factory=dict)
    reads_mesh: bool = False  # a constraint in it is a spec over the mesh in scope
    # The arguments that it needs, and the program without the others; made on the first request.
    needed: list[bool] | None = None
    pruned: Entry | None = None
    # The jaxpr that is compiled, in which these shardings are constraints.
    laid_out: ClosedJaxpr | None = None

    @property
    def program(self) -> ClosedJaxpr:
        """The jaxpr that is compiled."""
        if self.laid_out is None:
            ins, outs = self.in_shardings, self.out_shardings
            is_free = all(s is None for s in (*ins, *outs))
            self.laid_out = self.closed if is_free else placing.at_edges(self.closed, ins, outs)
        return self.laid_out

    def without_unused(self) -> Entry:
        """The same function of the arguments that it needs."""
        if self.pruned is None:
            assert self.needed is not None
            smaller, _ = dce(self.closed.jaxpr, [True] * len(self.closed.out_avals))
            closed = prune_consts(ClosedJaxpr(smaller, self.closed.consts))
            self.pruned = Entry(
                drop_inputs(closed, self.needed),
                self.out_tree,
                tuple(compress(self.donated, self.needed)),
                self.out_shardings,
                tuple(compress(self.in_shardings, self.needed)),
                reads_mesh=self.reads_mesh,
            )
        return self.pruned


# All jits of one function with the same options share their entries, so that `jit(f)(x)` in a loop
# compiles once. An entry never refers to the function, or neither would ever be freed.
_entries = WeakCache()
_instances: weakref.WeakSet[JitFunction] = weakref.WeakSet()


def _home(what: str, device: Any, backend: str | None) -> SingleDeviceSharding | None:
    """The device for results that `jit(device=)` or `jit(backend=)` names; None if neither does."""
    if backend is not None:
        first = devices(backend)[0]  # raises
        if device is not None:
            raise ArgumentError(f"{what}: can't specify both a device and a backend; use device=")
        device = first
    return None if device is None else SingleDeviceSharding(device)


class JitFunction:
    """A function that is traced once per signature and runs compiled; see `spmd.jit`."""

    __signature__ = WrappedSignature()

    def __init__(
        self,
        fun: Callable[..., Any],
        *,
        static_argnums: int | Sequence[int] | None = None,
        static_argnames: str | Iterable[str] | None = None,
        donate_argnums: int | Sequence[int] | None = None,
        donate_argnames: str | Iterable[str] | None = None,
        keep_unused: bool = False,
        device: Any = None,
        inline: bool = False,
        in_shardings: Any = None,
        out_shardings: Any = None,
        backend: str | None = None,
        compiler_options: dict[str, Any] | None = None,
        keeps_arrays: bool = False,
    ):
        if isinstance(fun, staticmethod):
            raise ArgumentError(
                f"jit: staticmethod arguments are not supported, got {fun!r}; write @staticmethod "
                "above @jit"
            )
        if not callable(fun):
            raise ArgumentError(f"jit: {fun!r} of type {type(fun).__name__} is not callable")
        # First of all: it copies the attributes of `fun`, which may itself be a JitFunction.
        present_as(self, fun)
        self._fun = fun
        self._signature = Signature(
            fun, "jit", static_argnums, static_argnames, donate_argnums, donate_argnames
        )
        self._inline = inline
        self._keep_unused, self._keeps_arrays = keep_unused, keeps_arrays
        what = self._signature.what
        for name, given in ("in_shardings", in_shardings), ("out_shardings", out_shardings):
            check_placements(f"{what}: {name}", given)
            if given is not None and (device is not None or backend is not None):
                raise ArgumentError(f"{what}: give a device or a backend, or {name}, not both")
        self._home = _home(what, device, backend)
        # The shardings that set_mesh must not contradict.
        self._pinned = "device=" if device is not None else "backend=" if backend else None
        # Shardings of one device say where results go; arguments committed elsewhere are errors.
        self._only = device_of_all(in_shardings, out_shardings)
        if self._only is not None:
            self._home, in_shardings, out_shardings = self._only, None, None
        check_compiler_options(self._signature.what, compiler_options)
        s = self._signature
        self._in_shardings, self._out_shardings = in_shardings, out_shardings
        shardings = prefix_key(in_shardings), prefix_key(out_shardings), self._only
        arguments = s.static_nums, s.static_names, s.donate_nums, s.donate_names
        options = (*arguments, keep_unused, shardings, keeps_arrays)
        known = _entries.of(fun)
        self._entries: dict[Any, Entry] = known.setdefault(("jit", options), {})
        # Closures do not commit results to a device, so a function that does shares none.
        self._fast: FastCalls = (
            known.setdefault(("closures", options), FastCalls())
            if self._home is None
            else FastCalls()
        )
        # Makes calls that use mutable arrays; None before the first.
        self._stateful: Any = None
        # Whether its caller takes the mutable arrays that it uses as values.
        self.is_pure = False
        _instances.add(self)

    # ---- calling ----

    @handles
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            if not busy:
                match = self._fast.match  # calling the attribute as a method would be slower
            elif state.trace is EVAL and not state.axes:
                match = self._fast.over(state.mesh).match
            else:
                match = no_match
            out = match(args, kwargs)
            if out is not MISS:
                return out
            return self._call(args, kwargs)
        except Exception as error:
            simplify(error)
            raise

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The general path: any arguments, any transformation, mutable arrays too."""
        if config.disable_jit:
            return self._fun(*args, **kwargs)
        if self._stateful is None:
            try:
                return self._call_pure(args, kwargs)
            except TouchedCells:
                if self.is_pure:
                    raise
                self._stateful = self._stateful_calls()
        return self._stateful(args, kwargs)

    def _stateful_calls(self) -> Any:
        def jit(fun: Callable[..., Any]) -> JitFunction:
            made = JitFunction(fun, inline=self._inline)
            made.is_pure = True
            return made

        return stateful.StatefulCalls(self._fun, self._signature, jit)

    def _call_pure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a function that uses no mutable array but its own."""
        split, avals = self._read(args, kwargs)
        if state.trace is not EVAL or any(isinstance(x, Tracer) for x in split.leaves):
            entry, closed, hoisted = self._traced(split, avals, args, kwargs)
            return self._bind(entry, closed, hoisted, split.leaves)
        if self._pinned is not None and state.mesh is not None:
            raise ShardingError(
                f"{current_source()}: {self._signature.what}: it has {self._pinned}, and set_mesh "
                f"has set {state.mesh}; leave {self._pinned} out, or call it outside"
            )
        what, names = self._signature.what, partial(self._signature.leaf_names, args, kwargs)
        if self._in_shardings is not None:
            argument_checks.check_placed(what, names, split.leaves, self._placed(split))
        if self._only is not None:
            argument_checks.check_only(what, names, split.leaves, self._only)
        if self._out_shardings is not None:
            argument_checks.check_meets_results(what, names, split.leaves, self._out_shardings)
        if guards_moves():
            is_placed = self._in_shardings is not None or self._out_shardings is not None
            argument_checks.guard_transfers(what, names, split.leaves, is_placed)
        key = self._key(split, avals)
        entry = self._entries.get(key)
        if config.debug_key_reuse and key_uses.is_looking():
            entry = entry or self._new_entry(key, split, avals, args, kwargs)
            call = partial(self._call_pure, args, kwargs)
            return key_uses.checked_call(entry.closed, split.leaves, what, call, tree_leaves)
        if not self._keep_unused and strays(split.leaves):
            entry = entry or self._new_entry(key, split, avals, args, kwargs)
            out = self._call_without_unused(entry, split, args, kwargs)
            if out is not MISS:
                return out
        layouts, device = place = layouts_of(split.leaves), device_of(split.leaves)
        executable = None if entry is None else entry.executables.get(place)
        if entry is None or executable is None:
            with collector_paused():  # tracing and compiling allocate much
                entry = entry or self._new_entry(key, split, avals, args, kwargs)
                executable = self._compile(entry, layouts, device)
        if True in executable.donated:
            check_donated(what, split.leaves, executable.donated, names, entry.closed.jaxpr)
        looks = config.debug_nans or config.debug_infs
        given = kept_operands(split.leaves, executable.donated) if looks else split.leaves
        outs = call_named(what, state.mesh, executable, split.leaves, names, entry.out_shardings)
        if looks:
            if not executable.is_map:  # a map looks for them itself, with all ranks
                check_nans(entry.closed, self._signature.name, given, outs)
        elif self._home is None and not state.axes and not config.debug_key_reuse:
            if not guards_moves():  # closures report no transfers
                self._note(entry, layouts, executable, split)
        note_place(outs, self._home)
        return entry.out_tree.unflatten(outs)

    def _call_without_unused(
        self, entry: Entry, split: Split, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call that runs where the arguments are that the program reads; MISS if it reads all.

        The others stay as they are, even if donated.
        """
        if entry.needed is None:
            entry.needed = dce(entry.closed.jaxpr, [True] * len(entry.closed.out_avals))[1]
        # Where types say how results lie, arguments tell over which devices.
        if all(entry.needed) or any(a.explicit is not None for a in entry.closed.out_avals):
            return MISS
        entry, needed = entry.without_unused(), entry.needed
        leaves = list(compress(split.leaves, needed))
        place = layouts_of(leaves), device_of(leaves)
        executable = entry.executables.get(place) or self._compile(entry, *place)

        def names() -> list[str]:
            return list(compress(self._signature.leaf_names(args, kwargs), needed))

        check_donated(self._signature.what, leaves, executable.donated, names)
        looks = config.debug_nans or config.debug_infs
        given = kept_operands(leaves, executable.donated) if looks else leaves
        what = self._signature.what
        outs = call_named(what, state.mesh, executable, leaves, names, entry.out_shardings)
        if looks and not executable.is_map:
            check_nans(entry.closed, self._signature.name, given, outs)
        note_place(outs, self._home)
        return entry.out_tree.unflatten(outs)

    def _note(
        self, entry: Entry, layouts: Any, executable: Executable | MeshProgram, split: Split
    ) -> None:
        """Count this call; calls of its kind get a closure when it is made for the second time."""
        mesh = state.mesh
        # A closure does not do the work of `call_in_scope`.
        if mesh is None or stays_in_scope(mesh, executable, layouts):
            kind = (executable, layouts, *[type(x) for x in split.leaves])
            make = partial(_specialised, executable, split, entry.out_tree)
            if entry.reads_mesh and (mesh is None or current_mesh() is not mesh):
                # Where `set_mesh` has set none, `with mesh:` and `use_abstract_mesh` may be around.
                make = partial(compared, current_mesh(), make)
            if config.default_device is not None:
                make = partial(noting_device, make)
            self._fast.over(mesh).note(kind, make)

    def closure(self, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        """The closure for calls like this one, `closure(*args)`; None if there is none."""
        split, avals = self._read(args, {})
        key = self._key(split, avals)
        entry = self._entries.get(key) or self._new_entry(key, split, avals, args, {})
        place = layouts_of(split.leaves), device_of(split.leaves)
        executable = entry.executables.get(place) or self._compile(entry, *place)
        return _specialised(executable, split, entry.out_tree, direct=True)

    def _compile(
        self, entry: Entry, layouts: Any, device: Device | None
    ) -> Executable | MeshProgram:
        started = time.perf_counter()
        with FLIGHT.phase(COMPILING, "compile", self._signature.name):
            donated = entry.donated
            if True in donated:
                donated = used_donations(entry.closed, donated, self._keep_unused)
            made = select.compile_program(
                entry.program,
                donated,
                layouts=layouts,
                wanted=entry.out_shardings,
                device=device,
            )
        if True in donated and (not made.is_map or None not in entry.out_shardings):
            rows = zip(entry.closed.in_avals, donated, made.donated, strict=True)
            warn_unusable(self._signature.what, [a for a, given, taken in rows if given > taken])
        if made.is_map and layouts is not None:
            made.core.agree_in_any_case()
        entry.executables[layouts, device] = made
        if config.log_compiles:
            print(
                f"spmd: compiled {self._signature.name}, {len(entry.closed.eqns)} equations, in "
                f"{time.perf_counter() - started:.2f} s",
                file=sys.stderr,
            )
        return made

    def _bind(
        self, entry: Entry, closed: ClosedJaxpr, hoisted: list[Any], leaves: list[Any]
    ) -> Any:
        """The results of a call of `closed` that is one equation, or written out."""
        free, count = (UNSPECIFIED,) * len(hoisted), len(hoisted)
        params = jit_params(
            closed,
            self._signature.name,
            in_shardings=free + tuple(UNSPECIFIED if s is None else s for s in entry.in_shardings),
            out_shardings=tuple(UNSPECIFIED if s is None else s for s in entry.out_shardings),
            donated_invars=(False,) * count + entry.donated,
            ctx_mesh=mesh_in_scope(),
            keep_unused=self._keep_unused,
            inline=self._inline,
        )
        given = *hoisted, *leaves
        if self._inline:
            return entry.out_tree.unflatten(eval_closed(jit_p.stands_for((), params), *given))
        return entry.out_tree.unflatten(jit_p.bind(*given, **params))

    def _read(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        shown: Callable[[Any], Any] | None = None,
    ) -> tuple[Split, list[ShapedArray]]:
        """Split a call and read the avals of its leaves; raises the user's errors."""
        split = self._signature.split(args, kwargs)
        try:
            return split, [typeof(x if shown is None else shown(x)) for x in split.leaves]
        except ArgumentError:
            cells = [cell for x in split.leaves if (cell := cell_of(x)) is not None]
            if cells:
                raise TouchedCells(self._signature.what, cells) from None
            self._signature.check_arity(args, kwargs)
            names = self._signature.leaf_names(args, kwargs)
            raise argument_checks.not_an_array(self._signature, split.leaves, names) from None

    # ---- entries ----

    def _key(self, split: Split, avals: Sequence[ShapedArray]) -> Any:
        context = state.axes, config.tracing, current_mesh()
        return split.tree, tuple(avals), split.static_key, context

    def _traced(
        self,
        split: Split,
        avals: Sequence[ShapedArray],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Entry, ClosedJaxpr, list[Any]]:
        """A call's entry, its jaxpr, and the tracers it closes over as extra leading operands."""
        key = self._key(split, avals)
        entry = self._entries.get(key)
        if entry is not None:
            if entry.reads_mesh:  # so does the function that calls it
                note_mesh_read()
            return entry, entry.closed, []
        made = self._trace(split, avals, args, kwargs)
        without, hoisted = hoist_tracers(made.closed)
        if not hoisted:
            self._entries[key] = made
        return made, without, hoisted

    def _new_entry(
        self,
        key: Any,
        split: Split,
        avals: Sequence[ShapedArray],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Entry:
        if config.log_compiles or "1" in config.debug:
            name, names = self._signature.name, self._signature.leaf_names(args, kwargs)
            argument_checks.explain_compile(name, names, self._entries, key, avals)
        entry = self._trace(split, avals, args, kwargs)
        if not any(isinstance(c, Tracer) for c in entry.closed.consts):
            self._entries[key] = entry
        return entry

    def staged(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], shown: Callable[[Any], Any]
    ) -> Entry:
        """The entry of a call, for its jaxpr; raises `TouchedCells` if it uses mutable arrays.

        `shown(leaf)` is what stands for a leaf of the arguments.
        """
        split, avals = self._read(args, kwargs, shown)
        return self._traced(split, avals, args, kwargs)[0]

    def _trace(
        self,
        split: Split,
        avals: Sequence[ShapedArray],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Entry:
        """Trace the function at these types, with its constraints on arguments and results."""
        signature, fun = self._signature, self._fun
        signature.check_arity(args, kwargs)
        before = state.mesh_reads
        trees: list[TreeDef] = []
        places: list[Sharding | None] = []
        ins = self._placed(split) if self._in_shardings is not None else []

        def flat(*tracers: Any) -> list[Any]:
            given, named = signature.join(split, self._constrained(ins, tracers, args, kwargs))
            out = fun(*given, **named)
            if self._out_shardings is not None:
                what = f"{signature.what}: out_shardings"
                out = constrain_tree(out, self._out_shardings, what, name="result", checks=True)
                places.extend(shardings_of_leaves(out, self._out_shardings, what))
            leaves, tree = tree_flatten(out)
            trees.append(tree)
            return leaves

        names = tuple(signature.leaf_names(args, kwargs))
        reads: list[Cell] = []
        debug = Debug(signature.name, names, signature.source, reads)
        with FLIGHT.phase(TRACING, "trace", signature.name), collector_paused():
            closed = trace_to_jaxpr(flat, avals, debug, self._keeps_arrays)
        if reads:  # their values are no constants: they change between calls
            raise TouchedCells(signature.what, reads)
        return Entry(
            closed,
            trees[0],
            signature.donated(args, kwargs),
            tuple(places) or (None,) * len(closed.out_avals),
            tuple(ins) or (None,) * len(avals),
            reads_mesh=state.mesh_reads != before,
        )

    def _placed(self, split: Split) -> list[Any]:
        """The sharding, or spec, or None, that `in_shardings` has for each leaf."""
        what = self._signature.what
        dynamic, named = split.tree.unflatten(split.leaves)
        if named:
            raise ArgumentError(
                f"{current_source()}: {what}: in_shardings is for positional arguments, and "
                f"{next(iter(named))!r} is given by keyword; pass it by position"
            )
        given = self._in_shardings
        given = tuple(given) if isinstance(given, list) else given
        taken = [k for k, _ in split.static_args]
        count = len(dynamic) + len(taken)
        names = [self._signature.parameter(k) for k in range(count) if k not in taken]
        pairs = list(zip(names, dynamic, strict=False))
        return spread_over_arguments(what, "in_shardings", given, pairs, is_placement)

    def _constrained(
        self,
        places: list[Any],
        tracers: Sequence[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Sequence[Any]:
        """The traced arguments, laid out as `in_shardings` says; `places` become shardings."""
        if self._in_shardings is None:
            return tracers
        what = f"{self._signature.what}: in_shardings"
        names = self._signature.leaf_names(args, kwargs)
        given = []
        for k, (x, place, name) in enumerate(zip(tracers, places, names, strict=True)):
            if place is not None:
                place = places[k] = as_sharding(f"{what}: {name}", place)
                x = constrain(f"{what}: {name}", x, place, checks=True)
            given.append(x)
        return given

    # ---- jax's names ----

    @api_boundary
    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Trace a call with these arguments, or `ShapeDtypeStruct`s, without running it."""
        try:
            split, avals = self._read(args, kwargs)
            key = self._key(split, avals)
            entry = self._entries.get(key) or self._new_entry(key, split, avals, args, kwargs)
        except TouchedCells:
            if self.is_pure:
                raise
            self._stateful = self._stateful or self._stateful_calls()
            return self._stateful.trace(args, kwargs)
        return Traced(
            entry.closed,
            split.tree,
            entry.out_tree,
            entry.donated,
            self._signature,
            split,
            entry.out_shardings,
            entry.program,
            state.mesh,
            self._keep_unused,
            self._home,
        )

    @api_boundary
    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Trace a call and run the compiler's passes; `.compile()` makes it callable."""
        traced = self.trace(*args, **kwargs)
        if self._in_shardings is not None:
            what, names = self._signature.what, partial(self._signature.leaf_names, args, kwargs)
            places = self._placed(traced.split)
            argument_checks.check_placed(what, names, traced.split.leaves, places)
        return traced.lower()

    @api_boundary
    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes, dtypes and shardings of the results, without computing them."""
        return self.trace(*args, **kwargs).out_info

    def clear_cache(self) -> None:
        """Forget everything that was traced and compiled."""
        self._entries.clear()
        self._fast.clear()

    def _cache_size(self) -> int:
        return sum(max(1, len(entry.executables)) for entry in self._entries.values())

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<jitted function {self._signature.name} at {self._signature.source}>"


def _specialised(
    executable: Executable | MeshProgram, split: Split, out_tree: TreeDef, direct: bool = False
) -> Callable[..., Any] | None:
    """A closure for calls like this one; None if they cannot be matched.

    It takes a tuple and a dict of arguments, or, if it is to be direct, the arguments one by one.
    """
    specialise = mesh_fast_call.specialise_jitted if executable.is_map else fast_call.specialise
    return specialise(split, executable, out_tree, direct)


@world.after_recovery
def clear_caches() -> None:
    """Forget everything that has been traced and compiled.

    >>> spmd.clear_caches()
    """
    for function in list(_instances):
        function.clear_cache()
    for traced in _entries.entries():  # also of functions that no `jit` is left of
        traced.clear()
    forget_maps()
    forget_traces()


def _preparation() -> Callable[[], object] | None:
    """The work that prepares a process's first closure, if it compiled its first program itself.

    One that found its program on the disk finds the code of closures there too, and on one core
    the thread would delay the program.
    """
    hook.preparation = lambda: None
    return _prepare if compiler.loader.compiled and compiler.available_cores() > 1 else None


def _prepare() -> None:
    if not is_ending():
        with suppress(RuntimeError):  # the call that needs the code gets the error
            fast_call.prepare()


hook.preparation = _preparation
set_stages(JitFunction)
