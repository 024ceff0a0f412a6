"""Assembly for the CPU: a schedule becomes a native program.

All kernels of a program are rendered, equal ones once, and compiled in one call. Then every step
gets its addresses and slots, and the runner checks and encodes the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spmd.base.record import field, record
from spmd.compile.cpu.assemble import kernel_batches
from spmd.compile.cpu.assemble.compile_callees import (
    Callee,
    CalleeCompiler,
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
    Branch,
    Buffer,
    Contract,
    Copy,
    Exchange,
    Host,
    Launch,
    Loop,
    Multiply,
    Pack,
    Parallel,
    RankExchange,
    Ref,
    Schedule,
    Sort,
    SortRows,
    Step,
    While,
    blocks,
)
from spmd.compile.native.program.steps import (
    LANE,
    CallbackStep,
    CollectiveStep,
    CondStep,
    CopyStep,
    ForStep,
    KernelStep,
    ParallelStep,
    Program,
    RankStep,
    Slot,
    View,
    WhileStep,
)
from spmd.compile.native.program.steps import Step as NativeStep
from spmd.compile.native.runtime.run import NativeProgram, build_program
from spmd.compile.schedule.memory_plan import Plan


@record
class Assembled:
    """A native program, and how many bases of each kind its frames have, in this order."""

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
    """Make a schedule whose memory is planned ready to run.

    Frames hold the arena, then inputs, outputs and constants. `takes` says which outputs may be
    written over which inputs; where it is not known yet, every step keeps its place. `callees` may
    have compiled some of what the steps run.
    """
    program = Builder(schedule, plan, takes, callees).program(devices)
    counts = (len(schedule.inputs), len(schedule.outputs), len(schedule.consts))
    return Assembled(build_program(program), *counts)


def _called(steps: Sequence[Step], loops: dict[int, LoopCode]) -> Iterator[Callee]:
    """What steps run, apart from the kernels that are written into loops."""
    for step in steps:
        if isinstance(step, Launch):
            yield step.kernel
        elif isinstance(step, Multiply):
            yield step.product
        elif isinstance(step, Pack):
            yield step.packing
        elif isinstance(step, Contract):
            yield step.contraction
        elif isinstance(step, Sort | SortRows):
            yield step
        elif id(step) in loops:
            yield from loops[id(step)].calls
        else:
            for block in blocks(step):
                yield from _called(block, loops)


@record
class _Code:
    """What the steps of a program call: small loops, by the id of their step, and symbols."""

    loops: dict[int, LoopCode]
    addresses: Mapping[str, int]
    # What the kernels of products are given, by the product: layers share theirs.
    given: dict[Product, tuple[int, ...]] = field(default_factory=dict)

    def address(self, kernel: Kernel) -> int:
        return self.addresses[rendering(kernel).symbol]

    def words(self, callee: Kernel | Product) -> tuple[int, ...]:
        """The address of a function that a loop calls, and the sizes that it is given."""
        if isinstance(callee, Kernel):
            return (self.address(callee),)
        return (self.addresses[planning(callee).symbol], *self.sizes(callee))

    def sizes(self, product: Product) -> tuple[int, ...]:
        """What the kernel of a product is given."""
        found = self.given.get(product)
        if found is None:
            found = self.given[product] = matmul_plan.product_words(
                planning(product), self.addresses
            )
        return found


def _compile(steps: Sequence[Step], loops: dict[int, LoopCode], callees: CalleeCompiler) -> _Code:
    """Render and compile all kernels, products and small loops of a program."""
    for callee in dict.fromkeys(_called(steps, loops)):
        callees.callee(callee)
    for loop in loops.values():
        callees.batch.add(loop.text, optimize=True)
    return _Code(loops, callees.batch.finish())


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
        self.named = (*schedule.inputs, *schedule.outputs, *consts)
        self.bases = {buffer: k for k, buffer in enumerate(self.named, 1)}
        self.places: dict[Buffer, tuple[int, int, int]] = {}
        loops: dict[int, LoopCode] = {}
        if self.compiles_loops and any(blocks(step) for step in schedule.steps):
            compiler = LoopCompiler(cpu_target(), rendering, planning, self.slot)
            loops = compiler.find(schedule.steps)
        self.code = _compile(schedule.steps, loops, callees or CalleeCompiler())

    def program(self, devices: int) -> Program:
        """The whole, for a number of virtual devices."""
        steps = tuple(self.steps(self.schedule.steps))
        return Program((self.plan.arena, *(b.nbytes for b in self.named)), steps, devices)

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
        base = 0 if output is None else self.bases[output]
        return base, self.plan.offsets[buffer], self.plan.lane_stride(buffer)

    def steps(self, steps: Sequence[Step]) -> list[NativeStep]:
        made = [(step, self.step(step)) for step in steps]
        if self.aliases is None:
            return [one for _, native in made for one in native]
        return kernel_batches.join(made, self.aliases)

    def step(self, step: Step) -> Sequence[NativeStep]:
        loop = self.code.loops.get(id(step))
        if loop is not None:
            return (loop.step(self.code.addresses[loop.symbol], self.code.words),)
        match step:
            case Launch():
                return (self.launch(step),)
            case Copy(target=target, source=source, nbytes=nbytes):
                to, origin = self.slot(target), self.slot(source)
                return () if to == origin else (CopyStep(to, origin, nbytes),)
            case Host():
                return (self.host(step),)
            case Exchange():
                return (self.exchange(step),) if step.rows * step.count else ()
            case RankExchange():
                return (self.rank_exchange(step),)
            case Loop(trips=trips, body=body, reverse=reverse):
                return (ForStep(trips, tuple(self.steps(body)), reverse),)
            case Parallel():
                return (self.parallel(step),)
            case While(test=test, predicate=predicate, body=body):
                test_steps, body_steps = tuple(self.steps(test)), tuple(self.steps(body))
                return (WhileStep(test_steps, self.slot(predicate), body_steps),)
            case Branch(index=index, dtype=dtype, branches=branches):
                made = tuple(tuple(self.steps(b)) for b in branches)
                return (CondStep(self.slot(index), made, dtype),)
            case Contract():
                return (self.contraction(step),)
            case Multiply():
                return (self.product(step),)
            case Pack():
                return (self.pack(step),)
            case Sort():
                name = f"{step.name} {step.source}"
                words = self.slot(step.words)
                extents = step.rows, step.size, step.kept
                if step.work is not None and shares_rows(step.size):
                    slots = words, words, self.slot(step.work)
                    what = step.rows, step.size, "u64"
                    return values_steps(self.code.addresses, slots, *what, name)
                return (sort_step(self.code.addresses, words, *extents, name),)
            case SortRows():
                name = f"{step.name} {step.source}"
                refs = (step.operand, step.result, step.work)
                slots = tuple(self.slot(ref) for ref in refs if ref is not None)
                what = step.rows, step.size, step.dtype
                return values_steps(self.code.addresses, slots, *what, name)

    def launch(self, step: Launch) -> KernelStep:
        rendered, address = rendering(step.kernel), self.code.address(step.kernel)
        slots = tuple(self.slot(ref) for ref in step.refs)
        return KernelStep(
            address, slots, rendered.units, rendered.cost_ns, name=f"{step.name} {step.source}"
        )

    def parallel(self, step: Parallel) -> NativeStep:
        body = tuple(self.steps(step.body))
        if step.number in self.plan.lanes.chosen:
            return ParallelStep(step.trips, body, self.plan.lanes.count)
        for trips in reversed(step.trips):
            body = (ForStep(trips, body),)
        return body[0]

    def host(self, step: Host) -> CallbackStep:
        def views(pairs: Sequence[tuple[Ref, Any]]) -> tuple[View, ...]:
            return tuple(View(self.slot(ref), a.shape, a.dtype) for ref, a in pairs)

        name = f"{step.name} {step.source}"
        ins, outs = views(step.inputs), views(step.outputs)
        return CallbackStep(step.function, ins, outs, step.together, name)

    def exchange(self, step: Exchange) -> CollectiveStep:
        return CollectiveStep(
            kind=step.kind,
            input=self.slot(step.input),
            output=self.slot(step.output),
            dtype=step.dtype,
            count=step.count,
            groups=step.groups,
            rows=step.rows,
            op=step.op,
            pairs=step.pairs,
            name=step.name,
        )

    def rank_exchange(self, step: RankExchange) -> RankStep:
        return RankStep(
            rounds=step.rounds,
            state=step.state,
            take=step.take,
            input=self.slot(step.input),
            output=self.slot(step.output),
            scratch=None if step.scratch is None else self.slot(step.scratch),
            label=step.label,
            name=step.name,
        )

    def contraction(self, step: Contract) -> NativeStep:
        slots = [self.slot(ref) for ref in step.refs]
        plan = contracting(step.contraction)
        name = f"{step.name} {step.source}"
        return window_plan.contract_step(plan, self.code.addresses, slots, name)

    def product(self, step: Multiply) -> NativeStep:
        slots = [self.slot(ref) for ref in step.refs]
        name = f"{step.name} {step.source}"
        plan, words = planning(step.product), self.code.sizes(step.product)
        return matmul_plan.product_step(plan, self.code.addresses, slots, name, words)

    def pack(self, step: Pack) -> NativeStep:
        slots = [self.slot(ref) for ref in step.refs]
        name = f"{step.name} {step.source}"
        return matmul_plan.packing_step(packing(step.packing), self.code.addresses, slots, name)
