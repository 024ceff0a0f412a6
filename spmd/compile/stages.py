"""The stages of a jitted call as objects: `Traced`, `Lowered`, `Compiled` (JAX's names).

traced = jit(f).trace(x)        # the jaxpr
lowered = traced.lower()        # after the compiler's passes
compiled = lowered.compile()    # callable, for these shapes only
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spmd.compile.executable import Executable
from spmd.compile.pipeline import Report, compile_jaxpr, run_passes
from spmd.compile.signature import Signature, Split
from spmd.core.aval import ShapedArray, register_array_type, typeof
from spmd.core.errors import ArgumentError
from spmd.core.ir import ClosedJaxpr
from spmd.core.tree import TreeDef, tree_flatten


@dataclass(frozen=True)
class ShapeDtypeStruct:
    """Shape and dtype in place of an array, for `eval_shape` and `.lower`."""

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool = False
    sharding: Any = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return ShapedArray(self.shape, self.dtype).size

    def __repr__(self) -> str:
        weak = ", weak_type=True" if self.weak_type else ""
        return f"ShapeDtypeStruct(shape={self.shape}, dtype={ShapedArray((), self.dtype)}{weak})"


register_array_type(ShapeDtypeStruct, lambda s: ShapedArray(tuple(s.shape), s.dtype, s.weak_type))


def describe(aval: ShapedArray) -> ShapeDtypeStruct:
    """The user's view of an aval."""
    return ShapeDtypeStruct(aval.shape, aval.dtype, aval.weak_type)


@dataclass(frozen=True)
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
        report = Report()
        return Lowered(self, run_passes(self.jaxpr, report), report)


@dataclass(frozen=True)
class Lowered:
    """A call after the compiler's passes, and what they did."""

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
        return Compiled(self.traced, compile_jaxpr(self.traced.jaxpr, self.traced.donated))


@dataclass(frozen=True)
class Compiled:
    """A compiled call: accepts arguments of exactly the structure, shapes and dtypes given."""

    traced: Traced
    executable: Executable

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
        """The program: its steps, and where each operand lies."""
        return self.executable.as_text()

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
        return self.out_tree.unflatten(self.executable(leaves))
