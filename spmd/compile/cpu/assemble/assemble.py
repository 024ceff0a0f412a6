"""Assembly for the CPU: a schedule becomes a native program.

All kernels of a program are rendered, equal ones once, and compiled in one call. Then every step
gets its addresses and slots, and the runner checks and encodes the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from spmd.compile.cpu.assemble import kernel_batches
from spmd.compile.cpu.assemble.compile_callees import (
    Callee,
    CalleeCompiler,
    callee_of,
    contracting,
    cpu_target,
    packing,
    planning,
    rendering,
    transforming,
)
from spmd.compile.cpu.assemble.compiled_loops import LoopCode, LoopCompiler
from spmd.compile.cpu.matmul import plan as matmul_plan
from spmd.compile.cpu.matmul import window_plan
from spmd.compile.cpu.matmul.plan import prefers_packed
from spmd.compile.cpu.sort.steps import sort_step
from spmd.compile.cpu.sort.value_steps import shares_rows, values_steps
from spmd.compile.kernel.ir import Kernel
from spmd.compile.kernel.matmul import Product
from spmd.compile.lazy import factor_plan, fourier_plan
from spmd.compile.lower.steps import (
    Compiled,
    Contract,
    Factor,
    Fourier,
    Launch,
    Multiply,
    Pack,
    Schedule,
    Sort,
    SortRows,
    Step,
    blocks,
)
from spmd.compile.native.program.builder import ProgramBuilder
from spmd.compile.native.program.steps import KernelStep
from spmd.compile.native.program.steps import Step as NativeStep
from spmd.compile.native.runtime.run import NativeProgram, build_program
from spmd.compile.schedule.memory_plan import Plan
from spmd.compile.schedule.prepack_operands import prepack


def legalise(schedule: Schedule) -> Schedule:
    """The schedule with steps that pack operands of products; the one given is changed in place."""
    return prepack(schedule, prefers_packed)


def assemble(
    schedule: Schedule,
    plan: Plan,
    devices: int = 1,
    takes: Mapping[int, int] | None = None,
    callees: CalleeCompiler | None = None,
) -> NativeProgram:
    """Turn a schedule with planned memory into a program that is ready to run.

    `takes` says which outputs may be written over which inputs; where it is not known yet, every
    step keeps its place. `callees` may have compiled some of the code of the steps.
    """
    return build_program(Builder(schedule, plan, takes, callees).program(devices))


def _called(steps: Sequence[Step], loops: dict[int, LoopCode]) -> Iterator[Callee]:
    """The callees of steps, apart from the kernels that are written into loops."""
    for step in steps:
        callee = callee_of(step)
        if callee is not None:
            yield callee
        elif id(step) in loops:
            yield from loops[id(step)].calls
        else:
            for block in blocks(step):
                yield from _called(block, loops)


class Builder(ProgramBuilder):
    """Builds a program for the CPU: kernels are calls of machine code, small loops too."""

    compiles_loops = True

    def __init__(
        self,
        schedule: Schedule,
        plan: Plan,
        takes: Mapping[int, int] | None = None,
        callees: CalleeCompiler | None = None,
    ):
        super().__init__(schedule, plan)
        # By base, the bases that may be the same memory; None while that is unknown.
        self.aliases = None
        if takes is not None:
            first_output = 1 + len(schedule.inputs)
            self.aliases = {first_output + k: 1 + taken for k, taken in takes.items()}
            # Values of its own and shared ones lie in a home's arena.
            self.aliases |= dict.fromkeys(self.shared.values(), 0)
        # Small loops as functions, by the id of their step.
        self.loops: dict[int, LoopCode] = {}
        if self.compiles_loops and any(blocks(step) for step in schedule.steps):
            compiler = LoopCompiler(cpu_target(), rendering, planning, self.slot)
            self.loops = compiler.find(schedule.steps)
        self.addresses = self._compiled(callees or CalleeCompiler())
        # The words that the kernels of products get, by the product: layers share theirs.
        self.given: dict[Product, tuple[int, ...]] = {}

    def _compiled(self, callees: CalleeCompiler) -> Mapping[str, int]:
        """Render and compile all kernels, products and small loops: addresses by symbol."""
        for callee in dict.fromkeys(_called(self.schedule.steps, self.loops)):
            callees.callee(callee)
        for loop in self.loops.values():
            callees.batch.add(loop.text, optimize=True)
        return callees.batch.finish()

    def steps(self, steps: Sequence[Step]) -> list[NativeStep]:
        if self.aliases is None:
            return super().steps(steps)
        return kernel_batches.join([(step, self.step(step)) for step in steps], self.aliases)

    def step(self, step: Step) -> Sequence[NativeStep]:
        loop = self.loops.get(id(step))
        if loop is not None:
            return (loop.step(self.addresses[loop.symbol], self.words),)
        return super().step(step)

    def calls(self, step: Compiled) -> tuple[KernelStep, ...]:
        """The calls of the machine code that was compiled for a step."""
        addresses, name = self.addresses, f"{step.name} {step.source}"
        slots = self.slots(step.refs)
        match step:
            case Launch(kernel=kernel):
                known = rendering(kernel)
                address = addresses[known.symbol]
                made = KernelStep(address, slots, known.units, known.cost_ns, name=name)
            case Multiply(product=product):
                plan, words = planning(product), self.sizes(product)
                made = matmul_plan.product_step(plan, addresses, slots, name, words)
            case Pack():
                made = matmul_plan.packing_step(packing(step.packing), addresses, slots, name)
            case Contract():
                plan = contracting(step.contraction)
                made = window_plan.contract_step(plan, addresses, slots, name)
            case Fourier(transform=transform):
                plan = transforming(transform)
                made = fourier_plan.transform_step(plan, addresses, slots, name)
            case Factor(factorization=factorization):
                made = factor_plan.factor_step(factorization, addresses, slots, name)
            case Sort(rows=rows, size=size) if len(step.refs) > 1 and shares_rows(size):
                return values_steps(addresses, (slots[0], *slots), rows, size, "u64", name)
            case Sort(rows=rows, size=size, kept=kept):
                made = sort_step(addresses, slots[0], rows, size, kept, name)
            case SortRows(rows=rows, size=size, dtype=dtype):
                return values_steps(addresses, slots, rows, size, dtype, name)
        return (made,)

    def words(self, callee: Kernel | Product) -> tuple[int, ...]:
        """The address of a function that a loop calls, and the sizes that it is given."""
        if isinstance(callee, Kernel):
            return (self.addresses[rendering(callee).symbol],)
        return (self.addresses[planning(callee).symbol], *self.sizes(callee))

    def sizes(self, product: Product) -> tuple[int, ...]:
        """The words that the kernel of a product gets."""
        found = self.given.get(product)
        if found is None:
            words = matmul_plan.product_words(planning(product), self.addresses)
            found = self.given[product] = words
        return found
