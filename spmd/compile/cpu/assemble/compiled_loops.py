"""Small loops as one native function: their iterations are compiled, not dispatched.

The executor spends some 10 ns on every step of an iteration. Where the steps themselves are as
short, the whole loop becomes one function: its loops and branches are native ones, small kernels
are written into it, larger ones and matrix products are called, and values of a few bytes are
variables, which LLVM keeps in registers from iteration to iteration. To the executor it is a kernel
of one unit. A loop with a step that several threads should share stays with the executor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from spmd.base.record import record
from spmd.compile.cpu.codegen.kernel import Rendered, content_symbol, render_function
from spmd.compile.cpu.matmul import plan as matmul_plan
from spmd.compile.kernel.ir import Kernel
from spmd.compile.kernel.matmul import Product
from spmd.compile.lower.steps import (
    TEMP,
    Branch,
    Buffer,
    Copy,
    Launch,
    Loop,
    Multiply,
    Ref,
    Step,
    While,
    accesses_inside,
    blocks,
    walk,
)
from spmd.compile.native.llvm.function_builder import Function, Operand, Value
from spmd.compile.native.llvm.vector_emitter import Module, Target, attributes_text
from spmd.compile.native.program.steps import ASSUMED_TRIPS, KernelStep, Slot, levels
from spmd.compile.native.runtime.ir.interrupt import between_rounds

# Steps of more work than this are worth several threads, or so long that dispatch is nothing.
LONGEST_NS = 3000.0
LONGEST_COPY = 64 * 1024
# Kernels over at most this many points are written into the loop, as long as there are few.
INLINE_POINTS = 64
MOST_INLINE = 48
# Values of at most this many bytes are variables of the function, up to a part of the stack.
LOCAL_BYTES = 64
MOST_LOCAL_BYTES = 8 * 1024

# After so many iterations a loop looks whether it is to end. A power of 2.
ROUNDS_TO_LOOK = 1024

Callee: TypeAlias = Kernel | Product

# The cost of steps inside of a loop; the executor would take 20 ns.
STEP_NS = 3.0
NS_PER_COPIED_BYTE = 0.05


@record(frozen=False)
class LoopCode:
    """A loop as text, and the operands of a step that runs it."""

    text: str
    symbol: str
    slots: tuple[Slot, ...]
    calls: tuple[Callee, ...]  # callees through its table of sizes
    scratch: int
    cost_ns: float
    is_open: bool

    def step(self, address: int, words_of: Callable[[Callee], Sequence[int]]) -> KernelStep:
        """The step that runs the loop; `words_of` gives the address and sizes of compiled code."""
        words = [word for callee in self.calls for word in words_of(callee)]
        return KernelStep(
            address,
            self.slots,
            1,
            self.cost_ns,
            sizes=tuple(words),
            scratch=self.scratch,
            name="loop",
            is_open=self.is_open,
        )


class LoopCompiler:
    """Finds the loops of a schedule that become functions, and writes them."""

    def __init__(
        self,
        target: Target,
        rendered: Callable[[Kernel], Rendered],
        planned: Callable[[Product], matmul_plan.Plan],
        slot: Callable[[Ref], Slot],
    ):
        self.target = target
        self.rendered = rendered
        self.planned = planned
        self.slot = slot
        self.uses: Counter[Buffer] = Counter()

    def find(self, steps: Sequence[Step]) -> dict[int, LoopCode]:
        """The loops that become functions, by the id of their step."""
        self.uses.update(ref.buffer for ref, _ in accesses_inside(steps))
        return {id(step): _Writer(self, step, level).code() for step, level in self._loops(steps)}

    def _loops(self, steps: Sequence[Step], level: int = 0) -> Iterator[tuple[Step, int]]:
        for step in steps:
            if isinstance(step, Loop | While) and self._is_small(blocks(step)):
                yield step, level
                continue
            for block in blocks(step):
                yield from self._loops(block, level + levels(step))

    def _is_small(self, nested: Sequence[Sequence[Step]]) -> bool:
        return all(self._is_short(step) for block in nested for step in block)

    def _is_short(self, step: Step) -> bool:
        match step:
            case Launch(kernel=kernel):
                known = self.rendered(kernel)
                return known.units * known.cost_ns <= LONGEST_NS
            case Copy(nbytes=nbytes):
                return nbytes <= LONGEST_COPY
            case Multiply(product=callee):
                plan = self.planned(callee)
                return plan.units * plan.cost_ns <= LONGEST_NS
            case Loop() | While() | Branch():
                return self._is_small(blocks(step))
        return False


class _Writer:
    """Writes one loop."""

    def __init__(self, compiler: LoopCompiler, loop: Step, level: int):
        self.compiler = compiler
        self.loop = loop
        self.level = level
        self.function = Function("SYMBOL", "void", ["ptr", "ptr", "i64", "i64"], attributes="#0")
        launches = {s.kernel: None for s in walk((loop,)) if isinstance(s, Launch)}
        small = [k for k in launches if math.prod(k.sizes) <= INLINE_POINTS]
        self.inline = {k: f"inner{n}" for n, k in enumerate(small[:MOST_INLINE])}
        self.module = Module(compiler.target, shares_math=True)
        self.uses: Counter[Buffer] = Counter()
        self.index: dict[int, Value] = {}
        # By the start of a buffer as seen from the loop: it moves with the loops around.
        self.pointers: dict[Ref, Value] = {}
        self.outside: dict[Buffer, Value] = {}
        self.locals: dict[Buffer, Value] = {}
        self.calls: list[Callee] = []
        self.most_scratch = 0
        self.words = 0

    def code(self) -> LoopCode:
        """The whole function."""
        f = self.function
        refs = list(accesses_inside((self.loop,)))
        self.uses.update(ref.buffer for ref, _ in refs)
        places = list(dict.fromkeys(self._place(ref) for ref, _ in refs))
        args = f.params[0]
        for k, place in enumerate(places):
            self.pointers[place] = f.load("ptr", args, 8 * k)
            self.outside.setdefault(place.buffer, self.pointers[place])
        self.scratch = f.load("ptr", args, 8 * len(places))
        self.context = f.load("ptr", args, 8 * len(places) + 8)
        written = {ref.buffer for ref, writes in refs if writes}
        self._make_locals([ref for ref, _ in refs])
        for buffer in self.locals:
            if not self._is_private(buffer):
                self._move(self.locals[buffer], self.outside[buffer], buffer.nbytes)
        cost = self._step(self.loop, self.level)
        for buffer in self.locals:
            if buffer in written and not self._is_private(buffer):
                self._move(self.outside[buffer], self.locals[buffer], buffer.nbytes)
        texts = [render_function(k, self.module, name) for k, name in self.inline.items()]
        text = "\n".join(
            (f.text(), *texts, self.module.text(), attributes_text(self.module.target), "")
        )
        symbol = content_symbol("loop", text)
        return LoopCode(
            text.replace("@SYMBOL", f"@{symbol}"),
            symbol,
            tuple(map(self.compiler.slot, places)),
            tuple(self.calls),
            self.most_scratch,
            cost,
            any(isinstance(step, While) for step in walk((self.loop,))),
        )

    # ---- places ----

    def _place(self, ref: Ref) -> Ref:
        return Ref(ref.buffer, 0, tuple(s for s in ref.strides if s[0] < self.level))

    def _is_private(self, buffer: Buffer) -> bool:
        """Whether nothing outside of the loop uses a buffer."""
        return buffer.kind == TEMP and self.compiler.uses[buffer] == self.uses[buffer]

    def _make_locals(self, refs: Sequence[Ref]) -> None:
        """Choose the values that become variables: small, and always at the same place."""
        moving = {ref.buffer for ref in refs if any(s[0] >= self.level for s in ref.strides)}
        # Of a stack that a loop around reads or writes, an iteration sees a part only.
        moving |= {place.buffer for place in self.pointers if place.strides}
        room = MOST_LOCAL_BYTES
        for buffer in dict.fromkeys(place.buffer for place in self.pointers):
            if 0 < buffer.nbytes <= min(LOCAL_BYTES, room) and buffer not in moving:
                room -= buffer.nbytes
                self.locals[buffer] = self.function.stack(f"[{buffer.nbytes} x i8]", align=64)

    def _address(self, ref: Ref) -> Value:
        f = self.function
        base = self.locals.get(ref.buffer)
        if base is None:
            base = self.pointers[self._place(ref)]
        address = f.at(base, ref.offset)
        for level, stride in ref.strides:
            if level >= self.level and stride:
                address = f.at(address, self.index[level] * stride)
        return address

    # ---- steps ----

    def _block(self, steps: Sequence[Step], level: int) -> float:
        return sum(self._step(step, level) for step in steps)

    def _step(self, step: Step, level: int) -> float:
        """Write one step; gives its estimated time."""
        match step:
            case Launch():
                return self._launch(step)
            case Copy(target=target, source=source, nbytes=nbytes):
                self._move(self._address(target), self._address(source), nbytes)
                return nbytes * NS_PER_COPIED_BYTE
            case Multiply():
                return self._multiply(step)
            case Loop():
                return self._counted(step, level)
            case While():
                return self._while(step, level)
            case Branch():
                return self._branch(step, level)
        raise AssertionError(step)

    def _launch(self, step: Launch) -> float:
        known = self.compiler.rendered(step.kernel)
        name = self.inline.get(step.kernel)
        if name is None:
            self._call(step.kernel, 1, self._arguments(step.refs), known.units)
        else:
            f = self.function
            args = self._arguments(step.refs)
            f.call(name, "void", args, f.null(), f.value("i64", 0), f.value("i64", known.units))
        return STEP_NS + known.units * known.cost_ns

    def _arguments(self, refs: Sequence[Ref], more: Sequence[Value] = ()) -> Value:
        f = self.function
        addresses = [*(self._address(ref) for ref in refs), *more]
        args = f.stack(f"[{max(len(addresses), 1)} x ptr]", align=8)
        for k, address in enumerate(addresses):
            f.store(address, args, 8 * k)
        return args

    def _multiply(self, step: Multiply) -> float:
        plan = self.compiler.planned(step.product)
        a, b, *rest = step.refs
        if plan.swapped:
            a, b = b, a
        moved = [ref.shifted(offset) for ref, offset in zip(rest, plan.offsets, strict=True)]
        args = self._arguments((a, b, *moved), [self.scratch] if plan.scratch else [])
        self.most_scratch = max(self.most_scratch, plan.scratch)
        words = 1 + len(plan.sizes) + len(plan.strides)
        self._call(step.product, words, args, plan.units)
        return STEP_NS + plan.units * plan.cost_ns

    def _call(self, callee: Callee, words: int, args: Value, units: int) -> None:
        """Call a function whose address stands in the table, before the sizes it takes."""
        f = self.function
        entry = f.at(f.params[1], 8 * self.words)
        count = f.value("i64", units)
        f.call(f.load("ptr", entry), "void", args, f.at(entry, 8), f.value("i64", 0), count)
        self.calls.append(callee)
        self.words += words

    def _move(self, target: Value, source: Value, nbytes: int) -> None:
        f, name = self.function, "llvm.memmove.p0.p0.i64"
        self.module.declare(f"@{name}", f"declare void @{name}(ptr, ptr, i64, i1)")
        f.call(name, "void", target, source, f.value("i64", nbytes), f.value("i1", 0))

    def _counted(self, step: Loop[int, Step], level: int) -> float:
        if step.trips <= ROUNDS_TO_LOOK:
            return self._rounds(step, level, 0, step.trips)
        f, cost = self.function, 0.0
        with f.range(0, -(-step.trips // ROUNDS_TO_LOOK)) as part:
            between_rounds(f, self.context, is_kernel=True)
            first = part * ROUNDS_TO_LOOK
            cost = self._rounds(step, level, first, f.smaller(first + ROUNDS_TO_LOOK, step.trips))
        return cost

    def _rounds(self, step: Loop[int, Step], level: int, first: Operand, last: Operand) -> float:
        f, cost = self.function, 0.0
        with f.range(first, last) as trip:
            self.index[level] = step.trips - 1 - trip if step.reverse else trip
            cost = self._block(step.body, level + 1)
        return step.trips * cost

    def _while(self, step: While[Ref, Step], level: int) -> float:
        f, cost = self.function, 0.0
        trip = f.var("i64", 0)
        with f.loop():
            with f.if_((trip.get() & (ROUNDS_TO_LOOK - 1)).equals(0)):
                between_rounds(f, self.context, is_kernel=True)
            self.index[level] = trip.get()
            cost += self._block(step.test, level + 1)
            going = f.load("i8", self._address(step.predicate))
            f.break_if(going.equals(0))
            cost += self._block(step.body, level + 1)
            trip.set(trip.get() + 1)
        return ASSUMED_TRIPS * cost

    def _branch(self, step: Branch[Ref, Step], level: int) -> float:
        f, width = self.function, step.dtype.itemsize
        chosen = f.load(f"i{8 * width}", self._address(step.index), align=1)
        if width < 8:
            chosen = f.convert("zext" if width == 1 else "sext", chosen, "i64")
        costs: list[float] = []

        def write(number: int) -> None:
            """This branch for all choices up to it, the others behind a test."""
            if number == len(step.branches) - 1:
                costs.append(self._block(step.branches[number], level))
                return
            with f.if_else(chosen <= number) as it:
                costs.append(self._block(step.branches[number], level))
                it.otherwise()
                write(number + 1)

        write(0)
        return max(costs)
