"""The stages of a jitted call as objects: `Traced`, `Lowered`, `Compiled` (JAX's names).

traced = jit(f).trace(x)        # the jaxpr
lowered = traced.lower()        # after the compiler's passes
compiled = lowered.compile()    # callable, for these shapes only
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.base.device import canonicalize_platform
from spmd.base.errors import (
    ArgumentError,
    DeviceError,
    OptionError,
    ShardingError,
)
from spmd.base.record import record
from spmd.base.source import current_source
from spmd.base.traceback_filter import simplify
from spmd.base.tree import TreeDef, tree_flatten
from spmd.base.util import api_boundary, handles
from spmd.compile.dispatch.signature import Signature, Split
from spmd.compile.lazy import cost_model, executable, lowering, memory_analysis, pipeline, select
from spmd.core.aval import ShapedArray, ShapeDtypeStruct, typeof
from spmd.core.ir import ClosedJaxpr
from spmd.core.rewrite import dce, eval_closed
from spmd.core.trace import Tracer
from spmd.sharding.array import Array, check_donated, note_place
from spmd.sharding.named import NamedSharding, Sharding, SingleDeviceSharding
from spmd.sharding.operand_layouts import (
    Layouts,
    call_named,
    device_of,
    layout_texts,
    layouts_of,
    output_shardings_in_scope,
)
from spmd.sharding.spec import Mesh, PartitionSpec
from spmd.sharding.xla.layout import Format, Layout

if TYPE_CHECKING:
    from spmd.compile.executable.executable import Executable
    from spmd.compile.executable.memory_analysis import MemoryAnalysis
    from spmd.compile.executable.mesh_program import MeshProgram
    from spmd.compile.passes.pipeline import Report


def describe(aval: ShapedArray, sharding: Any = None) -> ShapeDtypeStruct:
    """The user's view of an aval, with the sharding that it is known to have, or that of its type.

    `sharding` is that of the value, where it is known.
    """
    lies = aval.explicit if sharding is None else sharding
    struct = ShapeDtypeStruct(aval.shape, aval.dtype, sharding=lies, weak_type=aval.weak_type)
    if aval.vma:
        struct.manual_axis_type = aval.manual_axis_type
    return struct


def used_donations(
    closed: ClosedJaxpr, donated: tuple[bool, ...], keep_unused: bool = False
) -> tuple[bool, ...]:
    """Which arguments are donated and, unless unused ones are kept, needed."""
    if keep_unused or True not in donated:
        return donated
    _, needed = dce(closed.jaxpr, [True] * len(closed.out_avals))
    return tuple(a and b for a, b in zip(donated, needed, strict=True))


@record
class ArgInfo:
    """One argument of a stage: its `shape`, its `dtype`, and whether it is `donated`."""

    _aval: ShapedArray
    donated: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self._aval.shape

    @property
    def dtype(self) -> np.dtype:
        return self._aval.dtype


class Stage:
    """The arguments of a call, as all of its stages describe them."""

    __slots__ = ()
    traced: Any

    def _short(self) -> str:
        return f"<{type(self).__name__} {self.traced.fun_name}>"

    @property
    def in_tree(self) -> TreeDef:
        """The structure of the arguments: positional ones, and those by name."""
        return self.traced.given

    @property
    def in_avals(self) -> tuple[Any, dict[str, Any]]:
        """The types of positional arguments and of those by name, in their structure."""
        return self.in_tree.unflatten(self.traced.jaxpr.in_avals)

    @property
    def args_info(self) -> tuple[Any, dict[str, Any]]:
        """Shape, dtype and donation of each argument, in their structure."""
        avals = self.traced.jaxpr.in_avals
        pairs = zip(avals, self.traced.donated or (False,) * len(avals), strict=True)
        return self.in_tree.unflatten([ArgInfo(a, donated) for a, donated in pairs])

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """The numbers of the donated arrays among all arrays of the arguments."""
        return tuple(k for k, is_donated in enumerate(self.traced.donated) if is_donated)


@record
class Traced(Stage):
    """A traced call: its jaxpr and the structures of its arguments and results."""

    __repr__ = Stage._short

    jaxpr: ClosedJaxpr
    given: TreeDef
    out_tree: TreeDef
    donated: tuple[bool, ...]
    signature: Signature
    split: Split
    # By result, what `out_shardings` says of it.
    out_shardings: tuple[Sharding | None, ...]
    # The jaxpr in which shardings are constraints.
    program: ClosedJaxpr
    # The mesh that `set_mesh` had set.
    mesh: Mesh | None = None
    keep_unused: bool = False
    # The device that `jit` was told.
    home: SingleDeviceSharding | None = None

    @property
    def traced(self) -> Traced:
        """This stage, which later ones refer to."""
        return self

    @property
    def out_avals(self) -> Any:
        """The types of the results, in their structure."""
        return self.out_tree.unflatten(list(self.jaxpr.out_avals))

    @property
    def out_info(self) -> Any:
        """Shapes, dtypes and shardings of the results.

        A sharding is that of `out_shardings`, else that of the type, over an abstract mesh.
        """
        pairs = zip(self.jaxpr.out_avals, self.out_shardings, strict=True)
        return self.out_tree.unflatten([describe(a, s) for a, s in pairs])

    @property
    def fun_name(self) -> str:
        return self.signature.name

    @api_boundary
    def lower(self, *, lowering_platforms: Sequence[str] | None = None) -> Lowered:
        """Run the compiler's passes for the platform that the arguments are on.

        Raises `ArgumentError` if `lowering_platforms` names another.
        """
        report = pipeline.Report()
        backend = executable.backend_of(device_of(self.split.leaves))
        for platform in lowering_platforms or ():
            if canonicalize_platform(platform) != backend.platform:
                raise ArgumentError(
                    f"{current_source()}: lower: lowering_platforms has {platform!r}; programs are "
                    f"lowered for where their arguments are, here {backend.platform!r}"
                )
        _check_structures(self)
        final = pipeline.run_passes(self.program, report, backend.passes(pipeline.PASSES))
        return Lowered(self, final, report)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the results from arguments of the same structure, shapes and dtypes."""
        leaves = _check_call(f"traced {self.fun_name}", self, args, kwargs)
        return self.out_tree.unflatten(eval_closed(self.program, *leaves))


def other_arguments(what: str, split: Split, tree: TreeDef) -> ArgumentError:
    """The error for a stage that is called with arguments of another structure than `split`."""
    static = [f"number {k}" for k, _ in split.static_args] + [k for k, _ in split.static_kwargs]
    advice = f"; leave the static arguments ({', '.join(static)}) out" if static else ""
    return ArgumentError(f"{what}: compiled for arguments {split.tree}, got {tree}{advice}")


def _check_call(what: str, traced: Traced, args: Any, kwargs: Any) -> list[Any]:
    """The leaves of a call; an ArgumentError if they are others than it was traced for."""
    leaves, tree = tree_flatten((args, kwargs))
    if tree != traced.in_tree:
        raise other_arguments(what, traced.split, tree)
    for k, (leaf, expected) in enumerate(zip(leaves, traced.jaxpr.in_avals, strict=True)):
        seen = typeof(leaf)
        if seen.shape != expected.shape or seen.dtype != expected.dtype:
            names = traced.signature.leaf_names(args, kwargs)
            name = names[k] if len(names) == len(leaves) else f"number {k}"
            raise ArgumentError(f"{what}: argument {name} is {seen}, compiled for {expected}")
    return leaves


@record
class Lowered(Stage):
    """A call after the compiler's passes, and their effects."""

    __repr__ = Stage._short

    traced: Traced
    optimised: ClosedJaxpr
    report: Report

    @property
    def out_tree(self) -> TreeDef:
        return self.traced.out_tree

    @property
    def out_info(self) -> Any:
        """Shapes, dtypes and shardings of the results: those of types over the program's mesh."""
        traced = self.traced
        mesh = select.mesh_of(traced.program, _layouts_of(traced.split.leaves) or ())
        found = [
            _over(mesh, a.explicit) if s is None else s
            for a, s in zip(traced.jaxpr.out_avals, traced.out_shardings, strict=True)
        ]
        pairs = zip(traced.jaxpr.out_avals, found, strict=True)
        return self.out_tree.unflatten([describe(a, s) for a, s in pairs])

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """The program as text: "jaxpr", in which fused groups are single equations, or "schedule".

        `debug_info` is accepted for JAX's sake. Raises `ArgumentError` for another dialect.
        """
        return str(self.compiler_ir(dialect))

    def compiler_ir(self, dialect: str | None = None) -> Any:
        """The program: the optimised "jaxpr", or the "schedule", steps over buffers.

        Raises `ArgumentError` for a dialect that the compiler does not have.
        """
        if dialect in (None, "jaxpr"):
            return self.optimised
        if dialect == "schedule":
            return lowering.lower(self.optimised)
        raise ArgumentError(
            f"{current_source()}: unknown dialect {dialect!r}; this compiler has 'jaxpr' and "
            "'schedule'"
        )

    def cost_analysis(self) -> dict[str, float]:
        """The least that a call computes and moves: "flops" and "bytes accessed"."""
        return self.compile().cost_analysis()

    @api_boundary
    def compile(self, compiler_options: dict[str, Any] | None = None) -> Compiled:
        """Make machine code. `compiler_options` are those of `jit`."""
        check_compiler_options(f"lower({self.traced.fun_name}).compile", compiler_options)
        traced = self.traced
        _check_places(traced)
        layouts = _layouts_of(traced.split.leaves)
        donated = used_donations(traced.jaxpr, traced.donated)
        program = select.compile_program(
            traced.program,
            donated,
            self.optimised,
            layouts,
            traced.out_shardings,
            device_of(traced.split.leaves),
        )
        return Compiled(traced, program, None if program.is_map else _place_of(traced))


# Options of XLA that programs set; what they choose among is not there here.
_XLA_OPTIONS = ("exec_time_optimization_effort", "memory_fitting_effort", "optimization_level")


def check_compiler_options(what: str, options: dict[str, Any] | None) -> None:
    """Raise an OptionError if an option is none of XLA's, which are accepted without effect."""
    for name, value in (options or {}).items():
        if not (name.startswith("xla_") or name in _XLA_OPTIONS):
            raise OptionError(
                f"{current_source()}: {what}: No such compile option: {name!r}. Those of XLA "
                "(xla_...) are accepted and have no effect; SPMD_ variables are in docs/env_vars.md"
            )
        if not isinstance(value, (bool, int, float, str)):
            raise OptionError(
                f"{current_source()}: {what}: the compile option {name} must be a bool, a number "
                f"or text, got {value!r}"
            )


def _over(mesh: Mesh | None, lies: NamedSharding | None) -> NamedSharding | None:
    """The sharding of a type, over the mesh of the program where that has its axes."""
    if lies is None or mesh is None or mesh.abstract_mesh != lies.mesh:
        return lies
    return NamedSharding(mesh, lies.spec)


def _formats(avals: Sequence[ShapedArray], shardings: Sequence[Any]) -> list[Format]:
    pairs = zip(avals, shardings, strict=True)
    return [Format(Layout(tuple(range(a.ndim)), ()), s) for a, s in pairs]


def _place_of(traced: Traced) -> SingleDeviceSharding | None:
    """The device that `jit` was told, or that an argument is committed to, if there is one."""
    places: list[Any] = [traced.home]
    for x in traced.split.leaves:
        places.append(x._sharding if type(x) is Array else getattr(x, "sharding", None))
    return next((s for s in places if isinstance(s, SingleDeviceSharding)), None)


def _check_structures(traced: Traced) -> None:
    """Raise unless arrays like the structures among the arguments can be laid out as they say."""
    for k, x in enumerate(traced.split.leaves):
        if type(x) is ShapeDtypeStruct and isinstance(x.sharding, NamedSharding):
            x.sharding.check_placing(x.shape, _called(traced, k))


def _called(traced: Traced, k: int) -> str:
    """The name of an argument in errors, behind the user's line and the function."""
    names = traced.jaxpr.jaxpr.arg_names
    name = names[k] if k < len(names) and names[k] else f"argument {k}"
    return f"{current_source()}: lower({traced.fun_name}): {name}"


def _check_places(traced: Traced) -> None:
    """Raise unless structures say how arrays can be laid out, over the same devices."""
    first, closed = None, traced.jaxpr
    needed = dce(closed.jaxpr, [True] * len(closed.out_avals))[1]
    for k, x in enumerate(traced.split.leaves):
        if not (needed[k] or traced.keep_unused):
            continue
        lies = x._sharding if type(x) is Array else getattr(x, "sharding", None)
        if not isinstance(lies, Sharding):
            continue
        name = _called(traced, k)
        if not lies._is_concrete:
            raise ShardingError(
                f"{name} is laid out by {lies}, and its mesh has no devices to compile for; give a "
                "NamedSharding over a Mesh"
            )
        if first is not None and lies.device_set != first.device_set:
            raise DeviceError(
                f"{name} is laid out by {lies}, and another argument by {first}: these are not the "
                "same devices; lower for one set of them"
            )
        first = lies


def _layouts_of(leaves: list[Any]) -> Layouts | None:
    """The shardings of arrays over a mesh, and of structures that stand for such arrays."""
    given = [x.sharding if type(x) is ShapeDtypeStruct else None for x in leaves]
    arrays = layouts_of(leaves) or [None] * len(leaves)
    found = tuple(
        s if isinstance(s, NamedSharding) else own for s, own in zip(given, arrays, strict=True)
    )
    return found if any(found) else None


@record
class Compiled(Stage):
    """A compiled call: accepts arguments of exactly the structure, shapes and dtypes given."""

    __repr__ = Stage._short

    traced: Traced
    executable: Executable | MeshProgram
    # The device of a program of one, where an argument or the user of `jit` has said it.
    _place: SingleDeviceSharding | None = None

    @property
    def out_tree(self) -> TreeDef:
        return self.traced.out_tree

    @property
    def out_info(self) -> Any:
        """Shapes, dtypes and shardings of the results."""
        pairs = zip(self.traced.jaxpr.out_avals, self._output_shardings, strict=True)
        return self.out_tree.unflatten([describe(a, s) for a, s in pairs])

    @property
    def input_shardings(self) -> tuple[Any, dict[str, Any]]:
        """The shardings of positional arguments and of those by name, in their structure."""
        return self.in_tree.unflatten(self._input_shardings)

    @property
    def _input_shardings(self) -> list[Any]:
        """By argument; None for one that nothing reads, as programs of JAX do without those."""
        mesh, found = self.traced.mesh, self._program_shardings
        if mesh is not None and not self.executable.is_map:
            found = [NamedSharding(mesh, PartitionSpec())] * len(found)
        if self.traced.keep_unused:
            return found
        _, needed = dce(self.traced.jaxpr.jaxpr, [True] * len(self.traced.jaxpr.out_avals))
        return [s if is_read else None for s, is_read in zip(found, needed, strict=True)]

    @property
    def _output_shardings(self) -> list[Any]:
        return output_shardings_in_scope(self.traced.mesh, self.executable)

    @property
    def output_shardings(self) -> Any:
        """The sharding of each result."""
        return self.out_tree.unflatten(self._output_shardings)

    @property
    def input_formats(self) -> tuple[Any, dict[str, Any]]:
        """How positional arguments and those by name lie in memory, and their shardings."""
        found = _formats(self.traced.jaxpr.in_avals, self._input_shardings)
        return self.in_tree.unflatten(found)

    @property
    def output_formats(self) -> Any:
        """How the results lie in memory, and their shardings."""
        found = _formats(self.traced.jaxpr.out_avals, self._output_shardings)
        return self.out_tree.unflatten(found)

    def as_text(self) -> str:
        """The program: its steps, and where each operand lies."""
        return self.executable.as_text()

    def runtime_executable(self) -> Any:
        """The object that runs the program."""
        return self.executable

    def memory_analysis(self) -> MemoryAnalysis:
        """The bytes that a call needs: arguments, results, temporaries; see its fields."""
        return memory_analysis.memory_of(self.executable)

    def cost_analysis(self) -> dict[str, float]:
        """The least that a call computes and moves: "flops" and "bytes accessed"."""
        core: Any = getattr(self.executable, "executable", self.executable)
        found = cost_model.cost_of(getattr(core, "core", core).schedule.steps)
        return {"flops": float(found.flops), "bytes accessed": float(found.moved)}

    @handles
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        what = f"compiled {self.traced.fun_name}"
        try:
            leaves = _check_call(what, self.traced, args, kwargs)
            for x in leaves:
                if isinstance(x, Tracer):
                    raise ArgumentError(
                        f"{what}: cannot be transformed: it is machine code for one signature, and "
                        f"was called with {x}. Transform the function that was jitted instead"
                    )
            self._check_layouts(what, leaves, args, kwargs)
            names = partial(self.traced.signature.leaf_names, args, kwargs)
            if True in self.executable.donated:
                check_donated(what, leaves, self.executable.donated, names, self.traced.jaxpr.jaxpr)
            mesh, wanted = self.traced.mesh, self.traced.out_shardings
            outs = call_named(what, mesh, self.executable, leaves, names, wanted)
            if mesh is None:
                note_place(outs, self._place)
            return self.out_tree.unflatten(outs)
        except Exception as error:
            simplify(error)
            raise

    def _check_layouts(self, what: str, leaves: list[Any], args: Any, kwargs: Any) -> None:
        """Raise if a committed array is laid out otherwise than it was compiled for."""
        place = self._place
        for x in leaves:
            if type(x) is Array:
                own = x._sharding
                if own is not None and (place is None or own is not place):
                    break
        else:
            return
        if place is None and self.traced.mesh is not None and not self.executable.is_map:
            if layouts_of(leaves) is None:
                return  # `call_in_scope` compares devices
        for k, (x, wanted) in enumerate(zip(leaves, self._program_shardings, strict=True)):
            if type(x) is not Array or x._sharding is None or wanted is None:
                continue
            if not x.sharding.is_equivalent_to(wanted, x.ndim):
                name = self.traced.signature.leaf_names(args, kwargs)[k]
                own, other = layout_texts(x.sharding, wanted)
                raise ShardingError(
                    f"{what}: argument {name} ({x.aval.short()}) is laid out by {own}, "
                    f"compiled for {other}; nothing is moved silently. Pass "
                    f"device_put({name}, compiled.input_shardings...), or lower for this layout"
                )

    @property
    def _program_shardings(self) -> list[Any]:
        """The sharding of each argument: a program of one device runs where it was lowered for."""
        found = self.executable.input_shardings
        if self._place is not None:
            return [self._place] * len(found)
        if not self.executable.is_map:
            return found
        # Each call moves arguments that lie over another mesh than the program's.
        given = _layouts_of(self.traced.split.leaves) or found
        return [
            s if s is not None and own is not None and not own.mesh.has_grid_of(s.mesh) else own
            for s, own in zip(given, found, strict=True)
        ]
