"""Assembly for the CPU: a schedule becomes a native program.

All kernels of a program are rendered, equal ones once, and compiled in one call. Then every step
gets its addresses and slots, and the runner checks and encodes the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from spmd.base.record import record
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
)
from spmd.compile.cpu.assemble.compiled_loops import LoopCode, LoopCompiler
from spmd.compile.cpu.matmul import plan as matmul_plan
from spmd.compile.cpu.matmul import window_plan
from spmd.compile.cpu.sort.steps import sort_step
from spmd.compile.cpu.sort.value_steps import shares_rows, values_steps
from spmd.compile.kernel.ir import Kernel
from spmd.compile.kernel.matmul import Product
from spmd.compile.lower.steps import (
    Buffer,
    Compiled,
    Contract,
    Copy,
    Exchange,
    Host,
    Launch,
    Loop,
    Multiply,
    Pack,
    Parallel,
    Ref,
    Schedule,
    Sort,
    SortRows,
    Step,
    blocks,
)
from spmd.compile.native.program.steps import (
    LANE,
    KernelStep,
    Program,
    Slot,
    with_blocks,
    with_places,
)
from spmd.compile.native.program.steps import Step as NativeStep
from spmd.compile.native.runtime.run import NativeProgram, build_program
from spmd.compile.schedule.memory_plan import Plan


@record
class Assembled:
    """A native program, and how many bases of each kind its frames have, in this order.

    Behind the outputs come the arenas of other devices, before the constants.
    """

    native: NativeProgram
    inputs: int
    outputs: int
    consts: int


def assemble(
    schedule: Schedule,
    plan: Plan,
    devices: int = 1,
    takes: Mapping[int, int] | None = None,
    callees: CalleeCompiler | None = None,
) -> Assembled:
    """Turn a schedule with planned memory into a program that is ready to run.

    Frames hold the arena, then inputs, outputs, the arenas in which values lie that devices share,
    and constants. `takes` says which outputs may be
    written over which inputs; where it is not known yet, every step keeps its place. `callees` may
    have compiled some of the code of the steps.
    """
    program = Builder(schedule, plan, takes, callees).program(devices)
    counts = (len(schedule.inputs), len(schedule.outputs), len(schedule.consts))
    return Assembled(build_program(program), *counts)


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


class Builder:
    """Turns steps over buffers into steps over slots."""

    compiles_loops = True

    def __init__(
        self,
        schedule: Schedule,
        plan: Plan,
        takes: Mapping[int, int] | None = None,
        callees: CalleeCompiler | None = None,
    ):
        self.schedule = schedule
        self.plan = plan
        first_output = 1 + len(schedule.inputs)
        self.aliases = None
        if takes is not None:
            self.aliases = {first_output + k: 1 + taken for k, taken in takes.items()}
        consts = [buffer for buffer, _ in schedule.consts]
        shared, behind = plan.shared_homes(), first_output + len(schedule.outputs)
        self.shared = {homes: k for k, homes in enumerate(shared, behind)}
        self.named = (*schedule.inputs, *schedule.outputs, *shared, *consts)
        self.bases = {x: k for k, x in enumerate(self.named, 1) if isinstance(x, Buffer)}
        if self.aliases is not None:
            # Values of its own and shared ones lie in a home's arena.
            self.aliases |= dict.fromkeys(self.shared.values(), 0)
        self.places: dict[Buffer, tuple[int, int, int]] = {}
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

    def program(self, devices: int) -> Program:
        """The whole, for a number of virtual devices."""
        steps = tuple(self.steps(self.schedule.steps))
        arena = self.plan.arena
        sizes = [x.nbytes if isinstance(x, Buffer) else arena for x in self.named]
        return Program((arena, *sizes), steps, devices)

    def slot(self, ref: Ref) -> Slot:
        found = self.places.get(ref.buffer)
        if found is None:
            found = self.places[ref.buffer] = self.place(ref.buffer)
        base, offset, lane = found
        strides = (*ref.strides, (LANE, lane)) if lane else ref.strides
        return Slot(base, offset + ref.offset, strides)

    def place(self, buffer: Buffer) -> tuple[int, int, int]:
        """Of a buffer, the base in which it lies, where, and the distance between its lanes."""
        base = self.bases.get(buffer)
        if base is not None:
            return base, 0, 0
        output = self.plan.aliased_into.get(buffer)
        if output is not None:
            base = self.bases[output]
        else:
            base = 0 if buffer.homes is None else self.shared[buffer.homes]
        return base, self.plan.offsets[buffer], self.plan.lane_stride(buffer)

    def steps(self, steps: Sequence[Step]) -> list[NativeStep]:
        made = [(step, self.step(step)) for step in steps]
        if self.aliases is None:
            return [one for _, native in made for one in native]
        return kernel_batches.join(made, self.aliases)

    def step(self, step: Step) -> Sequence[NativeStep]:
        loop = self.loops.get(id(step))
        if loop is not None:
            return (loop.step(self.addresses[loop.symbol], self.words),)
        if isinstance(step, Compiled):
            return self.calls(step)
        match step:
            case Parallel():
                return (self.parallel(step),)
            case Exchange() if not step.rows * step.count:
                return ()
            case Host():
                step = replace(step, name=f"{step.name} {step.source}")
        placed = with_places(with_blocks(step, self.steps), self.slot)
        is_moved = isinstance(placed, Copy) and placed.target == placed.source
        return () if is_moved else (placed,)

    def calls(self, step: Compiled) -> tuple[KernelStep, ...]:
        """The calls of the machine code that was compiled for a step."""
        addresses, name = self.addresses, f"{step.name} {step.source}"
        slots = tuple([self.slot(ref) for ref in step.refs])
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

    def parallel(self, step: Parallel[Step]) -> NativeStep:
        body: tuple[NativeStep, ...] = tuple(self.steps(step.body))
        if step.number in self.plan.lanes.chosen:
            return Parallel(step.trips, body, step.number, self.plan.lanes.count)
        for trips in reversed(step.trips):
            body = (Loop(trips, body),)
        return body[0]
