"""The loops of a rendered kernel: units, inner dims, blocks of lanes, reductions, row buffers.

Each instruction is written at the outermost loop in which its operands are known, as a scalar if it
is the same for all lanes. (No optimiser runs afterwards, so this is where invariants are hoisted.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

from spmd.base.record import record
from spmd.compile.cpu.codegen import access
from spmd.compile.cpu.codegen.access import Tail
from spmd.compile.cpu.codegen.body import Body
from spmd.compile.cpu.codegen.reductions import Accumulator
from spmd.compile.cpu.codegen.transpose_tiles import is_transposed, stage, step_pointer
from spmd.compile.kernel.dtypes import DTYPES, REAL_OF, itemsize
from spmd.compile.kernel.ir import (
    ROW,
    Const,
    Kernel,
    Load,
    Pass,
    Reduce,
    Scan,
    Store,
    is_sequential,
    is_serial,
)
from spmd.compile.native.llvm.vector_emitter import Emitter, Module

# Row buffers beyond this live on the heap: worker threads have small stacks.
STACK_BYTES = 32 * 1024

# Blocks of lanes after which a float sum starts a fresh accumulator: the error of a long row grows
# with the length of its runs, not with its own length.
SUM_RUN = 32

# Passes of not more instructions are written twice, for whole blocks and for the short one: that
# takes LLVM less time than masks in the loop, which longer passes have.
SHORT_CODE = 10

# Updates of single elements, in order, in one turn of their loop: 0.6 of the time of one a turn.
SERIAL_TURN = 4

# Widths of vectors whose masks are the bits of an integer.
_MASK_REGISTERS = (8, 16, 32, 64)

LoopBody: TypeAlias = Callable[[str, list[str]], list[str]]


@record
class Plan:
    """The shape of the code.

    `width` lanes; `block` elements of the last inner dim per unit (0: all of them); `units`;
    `tile_dim` is the outer dim that is walked in blocks of `width` to read transposed arrays.
    """

    kernel: Kernel
    width: int
    block: int
    units: int
    tile_dim: int | None = None


@record
class Sweep:
    """One ROW pass being written: its accumulators and scans, and the types its loops carry."""

    step: Pass
    accumulators: tuple[Accumulator, ...]
    scans: tuple[tuple[Scan, Accumulator], ...]

    @property
    def carriers(self) -> tuple[Accumulator, ...]:
        """Everything that loops carry, in order."""
        return (*self.accumulators, *(state for _, state in self.scans))

    @property
    def types(self) -> list[str]:
        """The types of the carried operands."""
        return [kind for carrier in self.carriers for kind in carrier.types]

    @property
    def reverse(self) -> bool:
        """Whether the row runs from its last element back."""
        return any(scan.reverse for scan, _ in self.scans)

    def paired(self, state: Sequence[str]) -> list[tuple[str, str]]:
        """Join types and operands, as `Emitter.loop` wants them."""
        return list(zip(self.types, state, strict=True))


class Nest:
    """Writes the body of one kernel's function."""

    def __init__(
        self,
        plan: Plan,
        module: Module,
        streams: Mapping[Store, int] = MappingProxyType({}),
        whole: bool = False,
    ):
        """`streams` are stores past the caches, with their alignments. With `whole` the function
        does all units, and those it is given do not matter."""
        self.plan = plan
        self.whole = whole
        self.kernel = plan.kernel
        self.width = plan.width
        self.e = Emitter(module, 1)
        self.body = Body(self.e, plan.kernel, plan.width, plan.tile_dim, streams)
        self.block_number: str | None = None
        self.heap: list[str] = []

    # ---- the function ----

    def function(self) -> str:
        """Return the text between the braces."""
        e = self.e
        for number in range(len(self.kernel.args)):
            slot = e.at("ptr", "%args", str(number))
            self.body.pointers.append(e.set(f"load ptr, ptr {slot}, align 8"))
        self._make_buffers()
        first, end = "%begin", "%end"
        if is_serial(self.kernel):
            first, end = "0", str(math.prod(self.kernel.outer))
        elif self.whole or self.plan.units == 1:
            first, end = "0", str(self.plan.units)
        e.loop(first, end, [], self._unit)
        for pointer in self.heap:
            e.module.declare("@free", "declare void @free(ptr)")
            e.put(f"call void @free(ptr {pointer})")
        e.put("ret void")
        return e.body_text()

    def _make_buffers(self) -> None:
        e, levels = self.e, range(len(self.kernel.inner))
        elements = math.prod(self.body.pitch(level) for level in levels)
        elements *= self.width if self.body.lanes_outer else 1
        for dtype in self.kernel.buffers:
            size = elements * itemsize(DTYPES[dtype].carrier)
            if size <= STACK_BYTES:
                self.body.buffers.append(e.alloca(size))
                continue
            e.module.declare("@malloc", "declare ptr @malloc(i64)")
            self.heap.append(e.set(f"call ptr @malloc(i64 {size})"))
            self.body.buffers.append(self.heap[-1])

    def _unit(self, unit: str, carried: list[str]) -> list[str]:
        outer = list(self.kernel.outer)
        if self.body.lanes_outer:
            outer[-1] = -(-outer[-1] // self.width)
        if self.plan.tile_dim is not None:
            outer[self.plan.tile_dim] = -(-outer[self.plan.tile_dim] // self.width)
        blocks = [-(-self.kernel.inner[-1] // self.plan.block)] if self.plan.block else []
        index = self._decode(unit, outer + blocks)
        self.block_number = index.pop() if blocks else None
        self.body.index[: len(outer)] = index
        self.body.tail = None
        if self.body.lanes_outer:
            self._start_outer_lanes(len(outer) - 1)
        for step in self.kernel.passes:
            self.body.place_values(step)
            self.body.enter_level(step, 0)
            if self.plan.tile_dim is not None:
                self._tiles(step, self.plan.tile_dim)
            elif step.level == ROW:
                self._row(step)
            else:
                self._point(step)
        return carried

    def _decode(self, unit: str, sizes: Sequence[int]) -> list[str]:
        """Split a row-major number into indices."""
        e, index = self.e, []
        for position, size in enumerate(reversed(sizes)):
            if position == len(sizes) - 1:
                index.append(unit)
            elif size == 1:
                index.append("0")
            else:
                index.append(e.set(f"urem i64 {unit}, {size}"))
                unit = e.set(f"udiv i64 {unit}, {size}")
        return index[::-1]

    def _start_outer_lanes(self, dim: int) -> None:
        e, size = self.e, self.kernel.outer[dim]
        first = e.mul_index(self.body.index[dim], self.width)
        self.body.index[dim] = first
        live = size % self.width
        if live:
            end = e.add_index(first, str(self.width))
            short = e.set(f"icmp sgt i64 {end}, {size}")
            self.body.tail = Tail(live, short, True, self._mask(short, live))

    def _mask(self, short: str, live: int) -> str:
        """Return the lanes that exist: all, or the first `live` ones of a short block."""
        e = self.e
        with e.at_width(self.width):
            if short == "true":
                lanes = ("true" if lane < live else "false" for lane in range(self.width))
                return "<" + ", ".join(f"i1 {lane}" for lane in lanes) + ">"
            if self._has_masks() and self.width in _MASK_REGISTERS:
                bits = f"i{self.width}"
                chosen = e.set(f"select i1 {short}, {bits} {(1 << live) - 1}, {bits} -1")
                return e.set(f"bitcast {bits} {chosen} to {e.type('i1')}")
            limit = e.set(f"select i1 {short}, i32 {live}, i32 {self.width}")
            numbers = e.lanes(range(self.width), "i32")
            return e.compare("ult", "i32", numbers, e.splat("i32", limit))

    def _has_masks(self) -> bool:
        """Say whether the machine has registers for masks: they cost next to nothing then."""
        return self.e.module.target.vector_bits == 512

    # ---- a pass over the row ----

    def _point(self, step: Pass) -> None:
        for instr in step.instrs:
            self.body.instr(instr)
        self.body.stores(step)

    def _row(self, step: Pass) -> None:
        e, body = self.e, self.body
        operands = [body.defined[reduction.operand].dtype for reduction in step.reductions]
        accumulators = tuple(
            Accumulator(e, self.width, reduction, dtype)
            for reduction, dtype in zip(step.reductions, operands, strict=True)
        )
        scans = tuple(
            (instr, Accumulator(e, self.width, _as_reduction(instr), instr.dtype))
            for instr in step.instrs
            if isinstance(instr, Scan)
        )
        sweep = Sweep(step, accumulators, scans)
        state = [operand for carrier in sweep.carriers for operand in carrier.initial()]
        body.row_position = "0"
        if 0 not in self.kernel.inner:
            state = self._nest(sweep, 0, state)
        for accumulator in accumulators:
            mine, state = _split(state, len(accumulator.types))
            parts, width = accumulator.finish(mine, body.lanes_inner)
            body.define(accumulator.reduction.out, accumulator.reduction.dtype, parts, width)

    def _nest(self, sweep: Sweep, level: int, state: list[str]) -> list[str]:
        """Write everything from inner dim `level` on; returns the carried operands after it."""
        body, deepest = self.body, len(self.kernel.inner)
        if level == deepest:
            return self._element(sweep, state)
        for instr in sweep.step.instrs:
            if body.depth[instr.out] == level:
                body.instr(instr)
        dim, size = len(self.kernel.outer) + level, self.kernel.inner[level]
        before = dict(body.bases), body.row_position

        def at(index: str, carried: list[str]) -> list[str]:
            body.bases, body.row_position = dict(before[0]), before[1]
            body.index[dim] = index
            body.enter_level(sweep.step, level + 1)
            return self._nest(sweep, level + 1, carried)

        def backwards(index: str, carried: list[str]) -> list[str]:
            return at(self.e.set(f"sub i64 {size - 1}, {index}"), carried)

        last = level == deepest - 1
        if body.lanes_inner and last:
            return self._lanes(sweep, size, state, at)
        if size == 1:
            return at("0", state)
        if last and is_sequential(self.kernel) and not sweep.carriers and size > SERIAL_TURN:
            return self._serially(sweep.step, size, at)
        if last:
            return self._in_runs(sweep, size, 1, state, backwards if sweep.reverse else at)
        return self.e.loop("0", str(size), sweep.paired(state), at)

    def _serially(self, step: Pass, size: int, at: LoopBody) -> list[str]:
        """Write a loop over updates that may meet: several a turn, one after the other."""
        turn = SERIAL_TURN if len(step.instrs) <= SHORT_CODE else 1
        whole = size - size % turn

        def several(first: str, carried: list[str]) -> list[str]:
            for k in range(turn):
                at(self.e.add_index(first, str(k)), carried)
            return carried

        self.e.loop("0", str(whole), [], several, turn)
        for k in range(whole, size):
            at(str(k), [])
        return []

    def _element(self, sweep: Sweep, state: list[str]) -> list[str]:
        """Write the code of one element, or block of lanes, behind the hoisted parts."""
        body, deepest = self.body, len(self.kernel.inner)
        count = sum(len(each.types) for each in sweep.accumulators)
        results, running = _split(state, count)
        for scan, carrier in sweep.scans:
            mine, running = _split(running, len(carrier.types))
            body.running[scan.out] = tuple(mine)
        instrs = sweep.step.instrs
        body.instrs(
            [i for i in instrs if body.depth[i.out] == deepest and not isinstance(i, Const)]
        )
        body.stores(sweep.step)
        # Outer lanes that do not exist may accumulate anything.
        mask = body.tail.mask if body.tail is not None and body.lanes_inner else None
        following = []
        for accumulator in sweep.accumulators:
            mine, results = _split(results, len(accumulator.types))
            operand = body.get(accumulator.reduction.operand, self.width)
            following += accumulator.step(mine, operand.parts, self._position, mask, sweep.reverse)
        return following + [part for scan, _ in sweep.scans for part in body.running[scan.out]]

    def _position(self, element: str) -> str:
        """Write the row-major position of the current element(s) in an integer type."""
        e, position = self.e, "0"
        for dim in range(len(self.kernel.outer), len(self.kernel.sizes)):
            grown = e.mul_index(position, self.kernel.sizes[dim])
            position = e.add_index(grown, self.body.index[dim])
        with e.at_width(1):
            if element != "i64" and not position.isdigit():
                position = e.cast("trunc", "i64", element, position)
        base = e.splat(element, position)
        if not self.body.lanes_inner:
            return base
        return e.binary("add", element, base, e.lanes(range(self.width), element))

    # ---- lanes along the last inner dim ----

    def _lanes(self, sweep: Sweep, size: int, state: list[str], at: LoopBody) -> list[str]:
        """Write a pass over blocks of lanes; the last, short block apart or by masks."""
        e, body, width = self.e, self.body, self.width
        live = size % width
        whole = size - live

        def short_block(state: list[str]) -> list[str]:
            if not sweep.carriers:
                # Nothing that came before has lanes: this block needs no more than it uses.
                self.width = body.width = 1 << (live - 1).bit_length()
            if live < self.width:
                body.tail = Tail(live, "true", self._has_masks(), self._mask("true", live))
            state = at(str(whole), state)
            access.write_back(e, body.tail)
            body.tail, self.width, body.width = None, width, width
            return state

        def any_block(start: str, carried: list[str]) -> list[str]:
            if live:
                body.tail = self._tail_from(start, size, live, masked or wants_mask)
                body.tail.masked = masked
            carried = at(start, carried)
            access.write_back(e, body.tail)
            body.tail = None
            return carried

        if whole == 0:
            return short_block(state)
        masked = self._has_masks() and not body.streams and self._are_neighbours(sweep.step)
        short_code = masked and not self.plan.block and len(sweep.step.instrs) <= SHORT_CODE
        if sweep.accumulators or short_code:
            # The short block is written apart: masks would slow every block down.
            state = self._in_runs(sweep, whole, width, state, at)
            return short_block(state) if live else state
        wants_mask = self._wants_mask(sweep.step)
        first, end = "0", str(size)
        if self.block_number is not None:
            first = e.mul_index(self.block_number, self.plan.block)
            end = self._least(e.add_index(first, str(self.plan.block)), size)
        return e.loop(first, end, sweep.paired(state), any_block, width)

    # ---- tiles ----

    def _tiles(self, step: Pass, dim: int) -> None:
        """Write an elementwise pass that walks blocks of lanes times as many steps along `dim`.

        A load across the lanes is transposed into a tile first: each cache line is
        touched once, where reading lane by lane would come back to it for every step.
        """
        e, body, width = self.e, self.body, self.width
        size, steps = self.kernel.inner[0], self.kernel.outer[dim]
        first = e.mul_index(body.index[dim], width)
        end = self._least(e.add_index(first, str(width)), steps)
        live, bases = size % width, dict(body.bases)
        for instr in step.instrs:
            if body.depth[instr.out] == 0:
                body.instr(instr)
        staged = [
            item
            for item in step.instrs
            if isinstance(item, Load) and is_transposed(self.kernel, item, dim)
        ]

        def block(start: str, carried: list[str]) -> list[str]:
            body.index[-1], body.index[dim] = start, first
            body.bases = dict(bases)
            body.enter_level(step, 1)
            tail = self._tail_from(start, size, live, True) if live else None
            buffers = [
                stage(e, body.place(load, width), tail, width, first, steps) for load in staged
            ]
            e.loop(first, end, [], lambda index, _: one(start, index, tail, buffers))
            return carried

        def one(start: str, index: str, tail: Tail | None, buffers: list[str]) -> list[str]:
            body.index[dim], body.bases = index, dict(bases)
            body.enter_level(step, 1)
            if tail is not None:
                body.tail = Tail(tail.live, tail.is_short, False, tail.mask)
            at = e.set(f"sub i64 {index}, {first}")
            for load, buffer in zip(staged, buffers, strict=True):
                body.tiles[load] = step_pointer(e, buffer, at, load.dtype, width)
            for instr in step.instrs:
                if body.depth[instr.out] == 1:
                    body.instr(instr)
            body.stores(step)
            access.write_back(e, body.tail)
            body.tail = None
            return []

        e.loop("0", str(size), [], block, width)

    def _tail_from(self, start: str, size: int, live: int, mask: bool) -> Tail:
        after = self.e.set(f"add i64 {start}, {self.width}")
        short = self.e.set(f"icmp sgt i64 {after}, {size}")
        return Tail(live, short, False, self._mask(short, live) if mask else "")

    def _least(self, index: str, size: int) -> str:
        inside = self.e.set(f"icmp slt i64 {index}, {size}")
        return self.e.set(f"select i1 {inside}, i64 {index}, i64 {size}")

    def _wants_mask(self, step: Pass) -> bool:
        """Say whether some access of the pass goes lane by lane or is guarded."""
        lanes = len(self.kernel.sizes) - 1
        for item in (*step.instrs, *step.stores):
            if isinstance(item, Load | Store):
                strided = item.map.strides[lanes] not in (0, 1)
                if item.guard is not None or item.map.gathered or strided:
                    return True
        return False

    def _are_neighbours(self, step: Pass) -> bool:
        """Say whether all accesses of the pass are of neighbours or one element, and of reals."""
        lanes = len(self.kernel.sizes) - 1
        for item in (*step.instrs, *step.stores):
            if isinstance(item, Load | Store):
                apart = item.map.gathered or item.map.strides[lanes] not in (0, 1)
                if apart or self.kernel.args[item.arg].dtype in REAL_OF:
                    return False
        return True

    def _in_runs(
        self, sweep: Sweep, size: int, step: int, state: list[str], at: LoopBody
    ) -> list[str]:
        """Loop to `size`; long float sums start a fresh accumulator for every run of blocks."""
        e, run = self.e, SUM_RUN * step
        sums = [each.is_float_sum for each in sweep.accumulators for _ in each.types]
        if size <= 2 * run or not any(sums):
            return e.loop("0", str(size), sweep.paired(state), at, step)
        sums += [False] * (len(state) - len(sums))
        fresh = [operand for carrier in sweep.carriers for operand in carrier.initial()]

        # The rounding errors of the sum of runs are carried beside it and added at the end.
        kinds = [kind for is_sum, kind in zip(sums, sweep.types, strict=True) if is_sum]
        lost = [fresh[place] for place, is_sum in enumerate(sums) if is_sum]

        def one_run(start: str, both: list[str]) -> list[str]:
            carried, missing = both[: len(sums)], iter(both[len(sums) :])
            end = self._least(e.set(f"add i64 {start}, {run}"), size)
            begun = [
                zero if is_sum else value
                for is_sum, zero, value in zip(sums, fresh, carried, strict=True)
            ]
            done = e.loop(start, end, sweep.paired(begun), at, step)
            results, rest = [], []
            for is_sum, kind, total, value in zip(sums, sweep.types, carried, done, strict=True):
                if not is_sum:
                    results.append(value)
                    continue
                grown, error = self._two_sum(kind, total, value)
                results.append(grown)
                rest.append(e.set(f"fadd {kind} {next(missing)}, {error}"))
            return results + rest

        before = [*sweep.paired(state), *zip(kinds, lost, strict=True)]
        both = e.loop("0", str(size), before, one_run, run)
        missing = iter(both[len(sums) :])
        return [
            e.set(f"fadd {kind} {total}, {next(missing)}") if is_sum else total
            for is_sum, kind, total in zip(sums, sweep.types, both[: len(sums)], strict=True)
        ]

    def _two_sum(self, kind: str, x: str, y: str) -> tuple[str, str]:
        """Return x + y rounded, and the rounding error (Knuth)."""
        e = self.e
        total = e.set(f"fadd {kind} {x}, {y}")
        second = e.set(f"fsub {kind} {total}, {x}")
        first = e.set(f"fsub {kind} {total}, {second}")
        lost = [e.set(f"fsub {kind} {given}, {kept}") for given, kept in ((x, first), (y, second))]
        lost = e.set(f"fadd {kind} {lost[0]}, {lost[1]}")
        # Infinite sums have lost nothing.
        width = kind.partition(" x ")[0].removeprefix("<") if "x" in kind else "1"
        with e.at_width(int(width)):
            element = kind.rpartition(" ")[2].removesuffix(">")
            zero = e.float(0.0, element)
            return total, e.select(e.compare("ord", element, lost, lost), element, lost, zero)


def _as_reduction(scan: Scan) -> Reduce:
    """A scan starts and combines like a reduction of the same operation."""
    return Reduce(scan.out, scan.dtype, scan.op, scan.operand)


def _split(items: list[str], count: int) -> tuple[list[str], list[str]]:
    return items[:count], items[count:]
