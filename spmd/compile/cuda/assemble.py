"""Assembly for CUDA: a schedule becomes a native program that launches kernels.

The one idea: the executor runs launches as it runs kernels of the CPU, see `stream_steps_ir.py`.
Exchanges between devices run in a stream of their own, beside steps that use other memory
(`exchange.py`, `stream_order.py`). The host's own operands (predicates, those of callbacks and of
exchanges with other processes) are copied to staging memory and back, and the host waits for the
stream for computing first.

After the bases that programs of all platforms have, a frame has two more: the device's record of
the program, and its staging memory.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from spmd.base.config import config
from spmd.base.errors import InternalError
from spmd.base.record import replace
from spmd.compile.cuda import stream_steps_ir
from spmd.compile.cuda.attention import render_attention
from spmd.compile.cuda.collectives.exchange import (
    FIRST,
    INPUT,
    OUTPUT,
    SECOND,
    ExchangePlan,
    Pull,
    exchange_plan,
    first_of_each,
)
from spmd.compile.cuda.driver import driver
from spmd.compile.cuda.kernel import ALIGNED, render, render_contraction, render_product
from spmd.compile.cuda.launch import Function, Rendered
from spmd.compile.cuda.program import CudaProgram
from spmd.compile.cuda.sort import render_sort
from spmd.compile.cuda.stream_order import Access, Block
from spmd.compile.cuda.stream_steps_ir import COMPUTING, EXCHANGING
from spmd.compile.kernel.attention import BlockedAttention
from spmd.compile.kernel.dtypes import DTYPES
from spmd.compile.kernel.ir import Kernel
from spmd.compile.kernel.matmul import Product
from spmd.compile.kernel.window_contraction import Contraction
from spmd.compile.lower.steps import (
    Attend,
    Branch,
    Buffer,
    Compiled,
    Contract,
    Copy,
    Exchange,
    Host,
    Launch,
    Multiply,
    RankExchange,
    Ref,
    Schedule,
    Sort,
    SortRows,
    Step,
    While,
    accesses,
    accesses_inside,
    blocks,
    walk,
)
from spmd.compile.native.program.builder import ProgramBuilder
from spmd.compile.native.program.encode import encoded
from spmd.compile.native.program.encode_collectives import bytes_read, extents
from spmd.compile.native.program.steps import KernelStep, Program, Slot, with_blocks, with_places
from spmd.compile.native.program.steps import Step as NativeStep
from spmd.compile.schedule.memory_plan import Plan

__all__ = ["CalleeCompiler", "CudaProgram", "assemble", "legalise"]

_AROUND_BODIES = (
    stream_steps_ir.BEGIN_BODY_SYMBOL,
    stream_steps_ir.END_BODY_SYMBOL,
    stream_steps_ir.REPLAY_SYMBOL,
)

# Device memory is given in units of this many bytes.
ALIGNMENT = 256


# Nothing is compiled while steps are written: the functions of a program are one module at the end.
CalleeCompiler = nullcontext


def legalise(schedule: Schedule) -> Schedule:
    """The schedule with steps that the backend has: all but those that only `cpu` makes."""
    return schedule


def assemble(
    schedule: Schedule,
    plan: Plan,
    devices: int = 1,
    takes: Mapping[int, int] | None = None,
    callees: None = None,
) -> CudaProgram:
    """Turn a schedule with planned memory into a program that is ready to run.

    The plan's arena grows by the scratch arrays of kernels.
    """
    builder = Builder(schedule, plan)
    program = builder.program(devices)
    functions = tuple(builder.functions.values())
    blocks = tuple([(f.symbol, f.launch.shared) for f in functions])
    numbers = builder.events, builder.mails, builder.bodies
    kept = blocks, builder.staging_bytes, tuple(builder.names), *numbers
    return CudaProgram(encoded(program), kept, program, functions)


@functools.cache
def rendering(
    callee: Kernel | Product | Contraction | BlockedAttention, alignment: int = ALIGNED
) -> Rendered:
    """A callee as CUDA functions; equal ones are rendered once.

    `alignment` divides the addresses of the operands of a product or contraction.
    """
    match callee:
        case Kernel():
            return render(callee)
        case Product():
            return render_product(callee, alignment)
        case BlockedAttention():
            return render_attention(callee)
    return render_contraction(callee, alignment)


def _alignment(slots: Sequence[Slot]) -> int:
    """Return the largest power of two up to 16 that divides the addresses of some places."""
    found = [n for slot in slots for n in (slot.offset, *(step for _, step in slot.strides))]
    return math.gcd(ALIGNED, *found)


# ---- building ----------------------------------------------------------------------------------


class Builder(ProgramBuilder):
    """Builds a program for CUDA: kernels are launches, and the host works on staging memory."""

    def __init__(self, schedule: Schedule, plan: Plan):
        super().__init__(schedule, plan)
        self.entries, self.devices = _entries(), 1
        self.record, self.staging = 1 + len(self.named), 2 + len(self.named)
        self.staging_bytes = 0
        # Scratch arrays lie behind the arena; steps follow each other, and share them.
        self.scratch_at, self.scratch_bytes = _aligned(plan.arena), 0
        self.plans: dict[int, ExchangePlan] = {}
        self.exchange_at = self.scratch_at
        self.events = self.mails = self.bodies = 0
        self.functions: dict[str, Function] = {}
        self.numbers: dict[str, int] = {}
        self.names: list[str] = []
        symbols = stream_steps_ir.WAIT_SYMBOL, stream_steps_ir.PREDICATE_SYMBOL
        self.waits = [self.entries[symbol] for symbol in symbols]

    def program(self, devices: int) -> Program:
        self.devices = devices
        # Exchanges run beside kernels, so their scratch arrays are apart from those of kernels.
        exchanges = [s for s in walk(self.schedule.steps) if isinstance(s, Exchange) and _moves(s)]
        found = [(s, exchange_plan(s, devices)) for s in exchanges]
        self.plans = {id(step): plan for step, plan in found if plan is not None}
        used = [sum(map(_aligned, plan.scratch)) for plan in self.plans.values()]
        self.scratch_at += max(used, default=0)
        steps = tuple(self.steps(self.schedule.steps))
        if config.check:
            self.check_host(steps)
        if self.scratch_at + self.scratch_bytes > self.exchange_at:
            self.plan.arena = self.scratch_at + self.scratch_bytes
        record = 8 * (stream_steps_ir.FUNCTIONS + len(self.functions))
        return Program((*self.base_sizes(), record, self.staging_bytes), steps, devices)

    # -- streams --

    def steps(self, steps: Sequence[Step]) -> list[NativeStep]:
        """The native steps of a block: exchanges in their stream, all others in that to compute."""
        name = "order of the streams"
        block = Block(
            self.new_event,
            lambda event: self.record_event(COMPUTING, event, name),
            lambda event: self.wait_event(COMPUTING, event, name),
        )
        for step in steps:
            plan = self.plans.get(id(step))
            if isinstance(step, Exchange) and plan is not None:
                accesses, done = self.accesses(step), self.new_event()
                ready = block.ready(accesses)
                block.exchange(accesses, self.exchange(step, plan, ready, done), done)
            elif isinstance(step, Host) and step.on_device:
                accesses, done = self.accesses(step), self.new_event()
                begin = self.wait_event(EXCHANGING, block.ready(accesses), step.name)
                end = self.record_event(EXCHANGING, done, step.name)
                block.exchange(accesses, [begin, *super().step(step), end], done)
            else:
                native = self.step(step)
                if native:
                    block.compute(self.accesses(step), native)
        return block.steps()

    def accesses(self, step: Step) -> list[Access]:
        """The bytes that a step and those inside of it use: all of their buffers."""
        found: dict[Access, None] = {}
        for ref, writes in accesses_inside([step]):
            base, offset, _ = self.places.get(ref.buffer) or self.place(ref.buffer)
            place = self.named[base - 1] if base else None
            role = place.kind if isinstance(place, Buffer) else "temp"
            found[Access(base, role, offset, offset + ref.buffer.nbytes, writes)] = None
        return list(found)

    def new_event(self) -> int:
        """The number of another event of the program."""
        self.events += 1
        return self.events - 1

    def record_event(self, stream: int, event: int, name: str) -> KernelStep:
        """An event that happens when the work of a stream until now has ended."""
        return self.driven(stream_steps_ir.RECORD_SYMBOL, (), (stream, event), name)

    def wait_event(self, stream: int, event: int, name: str) -> KernelStep:
        """A wait of a stream for an event."""
        return self.driven(stream_steps_ir.WAIT_EVENT_SYMBOL, (), (stream, event), name)

    def exchange(
        self, step: Exchange[Ref], plan: ExchangePlan, ready: int, done: int
    ) -> list[NativeStep]:
        """An exchange that begins with one event and ends with another."""
        name = step.name
        second = self.exchange_at + _aligned(plan.scratch[0])
        places = {
            INPUT: self.slot(step.input),
            OUTPUT: self.slot(step.output),
            FIRST: Slot(0, self.exchange_at),
            SECOND: Slot(0, second),
        }
        made: list[NativeStep] = [self.wait_event(EXCHANGING, ready, name)]
        pulls = [phase for phase in plan.phases if isinstance(phase, Pull)]
        for phase in plan.phases:
            if not isinstance(phase, Pull):
                made += self.kernel(phase.kernel, [places[k] for k in phase.places], name)
                continue
            told, mail = self.new_event(), self.mails
            self.mails += 1
            source, target = places[phase.source], places[phase.target]
            made.append(self.record_event(EXCHANGING, told, name))
            made.append(self.driven(stream_steps_ir.TELL_SYMBOL, (source,), (mail,), name))
            words = mail, told, len(phase.copies), *first_of_each(phase.copies)
            made.append(self.meeting(stream_steps_ir.PULL_SYMBOL, (target,), words, name))
            if phase is pulls[-1]:
                read, readers = self.new_event(), plan.readers
                made.append(self.record_event(EXCHANGING, read, name))
                words = read, len(readers), *(word for pair in readers for word in pair)
                made.append(self.meeting(stream_steps_ir.SETTLE_SYMBOL, (), words, name))
        return [*made, self.record_event(EXCHANGING, done, name)]

    def kernel(self, kernel: Kernel, slots: Sequence[Slot], name: str) -> list[KernelStep]:
        """A kernel of an exchange, in its stream."""
        rendered = rendering(kernel)
        assert not rendered.temporaries, "scratch arrays are those of the stream for computing"
        functions = rendered.functions
        return [
            self.launch(f, [slots[k] for k in f.arguments], name, EXCHANGING) for f in functions
        ]

    def meeting(
        self, symbol: str, slots: Sequence[Slot], sizes: Sequence[int], name: str
    ) -> KernelStep:
        """A step that all devices begin after the steps before it."""
        return replace(self.driven(symbol, slots, sizes, name), meets=True)

    # -- steps --

    def step(self, step: Step) -> Sequence[NativeStep]:
        match step:
            case Copy():
                target, source = self.slot(step.target), self.slot(step.source)
                same = target == source or not step.nbytes
                return () if same else (self.copy(target, source, step.nbytes, "copy"),)
            case Exchange() if not _moves(step):
                return ()
            case Host() | Exchange() | RankExchange() | While() | Branch():
                return self.on_host(step)
        return super().step(step)

    def calls(self, step: Compiled) -> Sequence[NativeStep]:
        match step:
            case Launch():
                rendered = rendering(step.kernel)
            case Multiply():
                operands = self.slots(step.refs[:2])
                rendered = rendering(step.product, _alignment(operands))
            case Contract():
                operands = self.slots(step.refs[:2])
                rendered = rendering(step.contraction, _alignment(operands))
            case Sort() | SortRows():
                rendered = render_sort(step)
            case Attend():
                rendered = rendering(step.kernel)
            case _:
                raise AssertionError(f"{step} is not legal for CUDA")
        slots = [self.slot(ref) for ref in step.refs]
        slots += self.scratch(rendered)
        name = f"{step.name} {step.source}"
        return [self.launch(f, [slots[k] for k in f.arguments], name) for f in rendered.functions]

    def scratch(self, rendered: Rendered) -> list[Slot]:
        """The places of a kernel's scratch arrays."""
        slots, used = [], 0
        for dtype, elements in rendered.temporaries:
            slots.append(Slot(0, self.scratch_at + used))
            nbytes = max(elements, 1) * DTYPES[dtype].numpy.itemsize
            used += _aligned(nbytes)
        self.scratch_bytes = max(self.scratch_bytes, used)
        return slots

    # -- what the driver does --

    def launch(
        self, function: Function, slots: Sequence[Slot], name: str, stream: int = COMPUTING
    ) -> KernelStep:
        """The launch of a function."""
        number = self.numbers.setdefault(function.symbol, len(self.functions))
        self.functions[function.symbol] = function
        launch = function.launch
        sizes = (stream, number, launch.grid, *launch.block, launch.shared, len(slots))
        return self.driven(stream_steps_ir.LAUNCH_SYMBOL, slots, sizes, name)

    def copy(self, target: Slot, source: Slot, nbytes: int, name: str) -> KernelStep:
        """A copy between any two memories."""
        return self.driven(stream_steps_ir.COPY_SYMBOL, (target, source), (COMPUTING, nbytes), name)

    def wait(self, name: str, *predicates: Slot) -> KernelStep:
        """A wait of the host for the stream; a predicate that is copied is false if that failed."""
        symbol = stream_steps_ir.PREDICATE_SYMBOL if predicates else stream_steps_ir.WAIT_SYMBOL
        return self.driven(symbol, predicates, (), name, waits=True)

    def driven(
        self,
        symbol: str,
        slots: Sequence[Slot],
        sizes: Sequence[int],
        name: str,
        waits: bool = False,
    ) -> KernelStep:
        self.names.append(name)
        return KernelStep(
            self.entries[symbol],
            (Slot(self.record), *slots),
            1,
            stream_steps_ir.LAUNCH_NS,
            (len(self.names) - 1, *sizes),
            name=name,
            is_open=waits or driver().entries_run_python,
        )

    # -- what the host does --

    def on_host(self, step: Any) -> Sequence[NativeStep]:
        """A step over staging memory, between the copies of what it reads and of what it writes."""
        if isinstance(step, While):
            return self.loop_on_predicate(step)
        name = f"{getattr(step, 'name', 'branch')} {getattr(step, 'source', '')}".rstrip()
        if config.log_compiles and isinstance(step, Host) and not step.together:
            text = "its operands are copied to the host, and its results back"
            print(f"spmd: the host computes {name}: {text}", file=sys.stderr)
        reads, writes = _accesses(step, self.devices)
        places: dict[Ref, Slot] = {}
        used = 0
        for ref, nbytes in {**writes, **reads}.items():
            nbytes = max(nbytes, writes.get(ref, 0))
            places[ref] = Slot(self.staging, used)
            used += _aligned(nbytes)
        self.staging_bytes = max(self.staging_bytes, used)
        before = [self.copy(places[r], self.slot(r), n, name) for r, n in reads.items() if n]
        after = [self.copy(self.slot(r), places[r], n, name) for r, n in writes.items() if n]
        inside = with_places(with_blocks(step, self.steps), places.__getitem__)
        return [*before, self.wait(name), inside, *after]

    def loop_on_predicate(self, step: While[Ref, Step]) -> Sequence[NativeStep]:
        """A loop whose predicate the host reads after each test.

        A body of launches alone, with the test behind it, becomes a graph when it has run for a
        while: then an iteration is one launch.
        """
        place, name = Slot(self.staging), "predicate of a loop"
        self.staging_bytes = max(self.staging_bytes, ALIGNMENT)
        wait = self.wait(name, place)
        test, body = self.test(step, place, name), self.steps(step.body)
        is_free = self.devices == 1 and self.bodies < stream_steps_ir.MOST_BODIES
        if not (is_free and all(map(self.is_captured, (*test, *body)))):
            return [While((*test, wait), place, tuple(body))]
        body += self.test(step, place, name)
        number, self.bodies = self.bodies, self.bodies + 1
        begin, end, replay = (
            self.driven(symbol, (), (number,), f"graph of a loop's body, with {name}")
            for symbol in _AROUND_BODIES
        )
        graph = Slot(self.record, 8 * (stream_steps_ir.BODIES + number))
        chosen = Branch(graph, ((begin, *body, end), (replay,)), np.dtype(np.int64))
        return [*test, While((wait,), place, (chosen,))]

    def test(self, step: While[Ref, Step], place: Slot, name: str) -> Sequence[NativeStep]:
        """The test of a loop, and the copy of its predicate to staging memory."""
        return *self.steps(step.test), self.copy(place, self.slot(step.predicate), 1, name)

    def is_captured(self, step: NativeStep) -> bool:
        """Whether a step of a loop's body is the same work in each iteration, without the host."""
        if not isinstance(step, KernelStep) or step.address in self.waits:
            return False
        return not any(slot.strides for slot in step.slots)

    def check_host(self, steps: Sequence[NativeStep], late: str = "") -> str:
        """Raise an InternalError that names a step in which the host would use wrong memory.

        The law: the host uses staging memory only, and first waits for the copies from and to it.
        `late` is the name of a copy for which no wait came before the steps, as the result is for
        one behind them.
        """
        for step in steps:
            if isinstance(step, KernelStep):
                copies = step.address == self.entries[stream_steps_ir.COPY_SYMBOL]
                if copies and self.staging in (slot.base for slot in step.slots):
                    late = self.names[step.sizes[0]]
                elif step.address in self.waits:
                    late = ""
                continue
            tests = (step.test, step.body, step.test) if isinstance(step, While) else ()
            for block in tests:
                late = self.check_host(block, late)
            if not (isinstance(step, Host) and step.on_device):
                self._check_places(step, late)
            for block in () if tests else blocks(step):
                late = self.check_host(block, late)
        return late

    def _check_places(self, step: Any, late: str) -> None:
        name = getattr(step, "name", "") or type(step).__name__.lower()
        places: list[Any] = [place for place, _ in accesses(step)]
        for place in places:
            if place.base not in (self.staging, self.record):
                raise InternalError(f"{name}: the host would use memory of the device, at {place}")
            if late and place.base == self.staging:
                raise InternalError(f"{name}: the host does not wait for the copy of {late}")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _moves(step: Exchange[Ref]) -> bool:
    """Whether an exchange moves something."""
    return step.rows * step.count > 0


@functools.cache
def _entries() -> Mapping[str, int]:
    return stream_steps_ir.stream_steps()


def _accesses(step: Any, devices: int) -> tuple[dict[Ref, int], dict[Ref, int]]:
    """The refs that the host reads in a step and those that it writes, with their bytes."""
    match step:
        case Host():
            return (
                {view.place: view.nbytes for view in step.inputs},
                {view.place: view.nbytes for view in step.outputs},
            )
        case Branch():
            return {step.index: step.dtype.itemsize}, {}
        case Exchange():
            size = len(step.groups[0])
            block = step.rows * step.count * step.dtype.itemsize
            given = block * (size if step.kind in ("reduce_scatter", "all_to_all") else 1)
            made = block * (size if step.kind in ("all_gather", "all_to_all") else 1)
            if step.kind == "exchange":
                given = bytes_read(step.boxes)
            return {step.input: given}, {step.output: made}
        case RankExchange():
            given, made = extents(step.rounds, devices)
            writes = {step.output: made}
            if step.scratch is not None:
                writes[step.scratch] = step.rounds.scratch
            return {step.input: given}, writes
    raise AssertionError(step)
