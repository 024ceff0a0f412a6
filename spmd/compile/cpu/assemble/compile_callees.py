"""The callees of steps as text: rendered once per process, and compiled while Python goes on.

The one idea: LLVM needs nothing of Python, so the kernels of a program are compiled on other
threads while its later steps are lowered and its memory is planned. `CalleeCompiler` sees the steps
as they are written; texts that it cannot know yet (loops that become functions, and the products
in them) come at the end.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import cache
from types import TracebackType
from typing import Any, TypeAlias

from spmd.base.config import config
from spmd.compile.cpu.assemble.compiled_loops import INLINE_POINTS
from spmd.compile.cpu.codegen.kernel import Rendered, render
from spmd.compile.cpu.matmul import plan as matmul_plan
from spmd.compile.cpu.matmul import window_plan
from spmd.compile.cpu.sort.steps import sort_text
from spmd.compile.cpu.sort.value_steps import shares_rows, text_for
from spmd.compile.kernel.format import format_kernel
from spmd.compile.kernel.fourier import Transform
from spmd.compile.kernel.ir import Kernel
from spmd.compile.kernel.matmul import Product
from spmd.compile.kernel.packing import Packing
from spmd.compile.kernel.window_contraction import Contraction
from spmd.compile.lazy import factor_plan, fourier_plan
from spmd.compile.lower.steps import (
    Contract,
    Factor,
    Fourier,
    Launch,
    Multiply,
    Pack,
    Sort,
    SortRows,
    Step,
    blocks,
    walk,
)
from spmd.compile.native.llvm.compiler import host, loader
from spmd.compile.native.llvm.vector_emitter import Target
from spmd.compile.schedule.prepack_operands import packed_product

Callee: TypeAlias = Kernel | Product | Packing | Contraction | Transform | Sort | SortRows | Factor


@cache
def cpu_target() -> Target:
    """The renderer's view of this machine."""
    return Target.from_features(host().features)


# Renderings are kept: a kernel that programs share is written once per process.


@cache
def rendering(kernel: Kernel) -> Rendered:
    """A kernel as text."""
    made = render(kernel, cpu_target())
    if "4" in config.debug:
        print(f"spmd: {made.symbol}\n{format_kernel(kernel)}", file=sys.stderr)
    return made


# How a product is computed, an operand packed, a contraction over windows computed.
planning = cache(matmul_plan.plan_product)
packing = cache(matmul_plan.plan_packing)
contracting = cache(window_plan.plan_contraction)


@cache
def transforming(transform: Transform) -> Any:
    """How a transform is computed: a `TransformPlan`."""
    return fourier_plan.plan_transform(transform, host().vector_bytes)


def callee_of(step: Step) -> Callee | None:
    """The callee of a step, if it names one to be compiled."""
    match step:
        case Launch():
            return step.kernel
        case Multiply():
            return step.product
        case Pack():
            return step.packing
        case Contract():
            return step.contraction
        case Fourier():
            return step.transform
        case Sort() | SortRows() | Factor():
            return step
    return None


class CalleeCompiler:
    """Compiles the callees of one program's steps; left by an error, it stops."""

    def __init__(self) -> None:
        self.batch = loader.batch()
        self._seen: set[Callee] = set()

    def watch(self, steps: Sequence[Step]) -> None:
        """Begin with callees of steps outside of all loops, and with the large kernels inside."""
        for step in steps:
            for inner in walk([s for block in blocks(step) for s in block]):
                # Smaller ones may be written into the function that the loop becomes; products
                # may read operands that are packed outside.
                if isinstance(inner, Launch) and math.prod(inner.kernel.sizes) > INLINE_POINTS:
                    self.callee(inner.kernel)
            callee = callee_of(step)
            if callee is None:
                continue
            found = None
            if isinstance(callee, Product):
                found = packed_product(callee, matmul_plan.prefers_packed)
            for one in (callee,) if found is None else found[:2]:
                self.callee(one)

    def callee(self, callee: Callee) -> None:
        """Add the texts of a step's callees."""
        before = len(self._seen)
        self._seen.add(callee)
        if len(self._seen) == before:
            return
        match callee:
            case Kernel():
                self.batch.add(rendering(callee).text)
            case Product():
                self._plan(planning(callee))
            case Packing():
                self._plan(packing(callee))
            case Contraction():
                self._plan(contracting(callee))
            case Transform():
                self.batch.add(*transforming(callee).texts, optimize=True)
            case Factor(factorization=factorization):
                self.batch.add(factor_plan.text_of(factorization), optimize=True)
            case Sort(size=size, refs=(_, _)) if shares_rows(size):
                self.batch.add(text_for("u64", size, True), optimize=True)
            case Sort(kept=kept):
                self.batch.add(sort_text(kept is not None), optimize=True)
            case SortRows(dtype=dtype, size=size, refs=refs):
                self.batch.add(text_for(dtype, size, len(refs) > 2), optimize=True)

    def _plan(self, plan: matmul_plan.Plan | window_plan.Plan) -> None:
        self.batch.add(*plan.texts, optimize=True)
        self.batch.add(*[rendered.text for rendered in plan.epilogues])

    def __enter__(self) -> CalleeCompiler:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.batch.drop()
