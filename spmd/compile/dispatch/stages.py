"""The stages of a jitted call as objects: `Traced`, `Lowered`, `Compiled` (JAX's names).

traced = jit(f).trace(x)        # the jaxpr
lowered = traced.lower()        # after the compiler's passes
compiled = lowered.compile()    # callable, for these shapes only
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from spmd.base.errors import ArgumentError, ShardingError
from spmd.base.record import record
from spmd.base.tree import TreeDef, tree_flatten
from spmd.compile.dispatch.signature import Signature, Split
from spmd.compile.lazy import cost_model, memory_analysis, pipeline, select
from spmd.core.aval import ShapedArray, ShapeDtypeStruct, typeof
from spmd.core.ir import ClosedJaxpr
from spmd.sharding.array import Array, check_donated
from spmd.sharding.named import NamedSharding
from spmd.sharding.operand_layouts import Layouts, layouts_of

if TYPE_CHECKING:
    from spmd.compile.executable.executable import Executable
    from spmd.compile.executable.memory_analysis import MemoryAnalysis
    from spmd.compile.executable.select import MeshProgram
    from spmd.compile.passes.pipeline import Report


def describe(aval: ShapedArray) -> ShapeDtypeStruct:
    """The user's view of an aval."""
    return ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=aval.sharding, weak_type=aval.weak_type
    )


@record
class Traced:
    """A traced call: its jaxpr and the structures of its arguments and results."""

    jaxpr: ClosedJaxpr
    in_tree: TreeDef
    out_tree: TreeDef
    donated: tuple[bool, ...]
    signature: Signature
    split: Split

    @property
    def out_info(self) -> Any:
        """Shapes and dtypes of the results."""
        return self.out_tree.unflatten([describe(a) for a in self.jaxpr.out_avals])

    @property
    def fun_name(self) -> str:
        return self.signature.name

    def lower(self) -> Lowered:
        """Run the compiler's passes."""
        report = pipeline.Report()
        return Lowered(self, pipeline.run_passes(self.jaxpr, report), report)


@record
class Lowered:
    """A call after the compiler's passes, and their effects."""

    traced: Traced
    optimised: ClosedJaxpr
    report: Report

    @property
    def in_tree(self) -> TreeDef:
        return self.traced.in_tree

    @property
    def out_tree(self) -> TreeDef:
        return self.traced.out_tree

    @property
    def out_info(self) -> Any:
        return self.traced.out_info

    def as_text(self) -> str:
        """The optimised jaxpr, in which fused groups are single equations."""
        return str(self.optimised)

    def compile(self) -> Compiled:
        """Make machine code."""
        traced = self.traced
        layouts = _layouts_of(traced.split.leaves)
        program = select.compile_program(traced.jaxpr, traced.donated, self.optimised, layouts)
        return Compiled(self.traced, program)


def _layouts_of(leaves: list[Any]) -> Layouts | None:
    """The shardings of arrays over a mesh, and of structures that stand for such arrays."""
    given = [x.sharding if type(x) is ShapeDtypeStruct else None for x in leaves]
    arrays = layouts_of(leaves) or [None] * len(leaves)
    found = tuple(
        s if isinstance(s, NamedSharding) else own for s, own in zip(given, arrays, strict=True)
    )
    return found if any(found) else None


@record
class Compiled:
    """A compiled call: accepts arguments of exactly the structure, shapes and dtypes given."""

    traced: Traced
    executable: Executable | MeshProgram

    @property
    def in_tree(self) -> TreeDef:
        return self.traced.in_tree

    @property
    def out_tree(self) -> TreeDef:
        return self.traced.out_tree

    @property
    def out_info(self) -> Any:
        return self.traced.out_info

    @property
    def input_shardings(self) -> tuple[Any, dict[str, Any]]:
        """The shardings of positional arguments and of those by name, in their structure."""
        args, kwargs = self.traced.in_tree.unflatten(self.executable.input_shardings)
        return args, kwargs

    @property
    def output_shardings(self) -> Any:
        """The sharding of each result."""
        return self.out_tree.unflatten(self.executable.output_shardings)

    def as_text(self) -> str:
        """The program: its steps, and where each operand lies."""
        return self.executable.as_text()

    def memory_analysis(self) -> MemoryAnalysis:
        """The bytes that a call needs: arguments, results, temporaries; see its fields."""
        return memory_analysis.memory_of(self.executable)

    def cost_analysis(self) -> dict[str, float]:
        """The least that a call computes and moves: "flops" and "bytes accessed"."""
        core: Any = getattr(self.executable, "executable", self.executable)
        found = cost_model.cost_of(core.schedule.steps)
        return {"flops": float(found.flops), "bytes accessed": float(found.moved)}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        what = f"compiled {self.traced.fun_name}"
        if tree != self.traced.in_tree:
            raise ArgumentError(f"{what}: compiled for arguments {self.traced.in_tree}, got {tree}")
        for k, (leaf, expected) in enumerate(zip(leaves, self.traced.jaxpr.in_avals, strict=True)):
            seen = typeof(leaf)
            if seen.shape != expected.shape or seen.dtype != expected.dtype:
                names = self.traced.signature.leaf_names(args, kwargs)
                name = names[k] if len(names) == len(leaves) else f"number {k}"
                raise ArgumentError(f"{what}: argument {name} is {seen}, compiled for {expected}")
        self._check_layouts(what, leaves, args, kwargs)
        if True in self.traced.donated:
            names = partial(self.traced.signature.leaf_names, args, kwargs)
            check_donated(what, leaves, self.traced.donated, names, self.traced.jaxpr.jaxpr)
        return self.out_tree.unflatten(self.executable(leaves))

    def _check_layouts(self, what: str, leaves: list[Any], args: Any, kwargs: Any) -> None:
        """Raise if an array over a mesh is laid out otherwise than it was compiled for."""
        if layouts_of(leaves) is None:
            return
        for k, (x, wanted) in enumerate(zip(leaves, self.executable.input_shardings, strict=True)):
            if type(x) is not Array or x.shards is None or wanted is None:
                continue
            if not x.sharding.is_equivalent_to(wanted, x.ndim):
                name = self.traced.signature.leaf_names(args, kwargs)[k]
                raise ShardingError(
                    f"{what}: argument {name} ({x.aval.short()}) is laid out by {x.sharding}, "
                    f"compiled for {wanted}; nothing is moved silently. Pass "
                    f"device_put({name}, compiled.input_shardings...), or lower for this layout"
                )
