"""Row kernels: a team of threads for each outer point.

Threads of a team take the elements of the row in turn, combine their partial reductions in a fixed
tree (`team.cuh`), and all know the result. Row buffers need no exchange, since every pass gives an
element to the same thread: short rows stay in registers, longer ones in shared memory, the longest
in a scratch array.
"""

from __future__ import annotations

import math

from spmd.base.record import record
from spmd.compile.cuda.body import Body
from spmd.compile.cuda.launch import MOST_SHARED, Launch
from spmd.compile.cuda.scalar_ops import (
    FUNCTORS,
    carrier,
    combination,
    identity_literal,
)
from spmd.compile.cuda.text import Text, digits
from spmd.compile.kernel.dtypes import itemsize
from spmd.compile.kernel.ir import (
    POINT,
    ROW,
    Kernel,
    Load,
    LoadRow,
    Pass,
    Reduce,
    Scan,
    Store,
    StoreRow,
    is_sequential,
)
from spmd.compile.kernel.ops import ARG_REDUCERS

THREADS = 256
MOST_TEAM = 1024
# Elements that a thread of a team takes before the team is made larger.
ITEMS = 4
# Registers (of four bytes) that a thread gives to row buffers: half of those of the largest teams.
MOST_REGISTERS = 32
# Neighbouring rows along x where lanes run along an outer dim.
COLUMNS = 32

REGISTERS, SHARED, SCRATCH = "registers", "shared memory", "a scratch array"


@record
class RowPlan:
    """How a row kernel is spread: `team` threads for each of `points` outer points of a block.

    `across` says that lanes run along an outer dim: threads along x are different points. `place`
    is where row buffers live. `slots` is the shared bytes that the team's exchanges need. With
    `serial` one thread takes the points in order: a scatter among them may hit an element twice.
    """

    team: int
    points: int
    across: bool
    place: str
    slots: int
    shared: int
    serial: bool = False

    def items(self, row: int) -> int:
        """Return the elements that a thread takes of a row."""
        return -(-row // self.team)


def plan_rows(kernel: Kernel) -> RowPlan:
    """Choose teams and the place of row buffers for a normalised kernel."""
    row, outer = math.prod(kernel.inner), math.prod(kernel.outer)
    scans = has_scans(kernel)
    if is_sequential(kernel):
        short = _registers(kernel, row) <= MOST_REGISTERS and not scans
        return RowPlan(1, 1, False, REGISTERS if short else SCRATCH, 0, 0, serial=True)
    across = _lanes_outer(kernel) and not (scans and _row_is_contiguous(kernel))
    wanted = _power_of_two(-(-row // ITEMS))
    if across:
        # Few columns want all the threads they can have.
        most = THREADS if outer >= 2 * THREADS * COLUMNS else MOST_TEAM
        team = 1 if scans else min(wanted, most // COLUMNS)
        points = THREADS if team == 1 else COLUMNS
    else:
        team = min(_power_of_two(row), 32) if row <= 32 * ITEMS else wanted
        # Many rows fill the machine with small teams; few rows want all threads they can have.
        team = min(team, THREADS if outer >= 2 * THREADS else MOST_TEAM)
        points = max(THREADS // team, 1)
        points = max(min(points, _power_of_two(outer)), -(-32 // team))
    slots = _slot_bytes(kernel, team, points, across)
    buffers = sum(itemsize(carrier(dtype)) for dtype in kernel.buffers)
    place, shared = REGISTERS, slots
    if buffers and (scans or _registers(kernel, -(-row // team)) > MOST_REGISTERS):
        # Shared memory holds whole rows of all the block's points.
        place = SHARED if slots + buffers * row * points <= MOST_SHARED else SCRATCH
        shared += buffers * row * points if place == SHARED else 0
    return RowPlan(team, points, across, place, slots, shared)


def _registers(kernel: Kernel, items: int) -> int:
    """Return the registers that `items` elements of all row buffers take."""
    return items * sum(max(itemsize(carrier(dtype)) // 4, 1) for dtype in kernel.buffers)


def has_scans(kernel: Kernel) -> bool:
    """Say whether a kernel has running combinations along its row."""
    return any(isinstance(instr, Scan) for step in kernel.passes for instr in step.instrs)


def _lanes_outer(kernel: Kernel) -> bool:
    return kernel.vector_dim is not None and kernel.vector_dim < len(kernel.outer)


def _row_is_contiguous(kernel: Kernel) -> bool:
    """Say whether the accesses of a scan's kernel mostly run along the row."""
    strides = [
        abs(item.map.strides[-1])
        for step in kernel.passes
        if step.level == ROW
        for item in (*step.instrs, *step.stores)
        if isinstance(item, Load | Store)
    ]
    return 2 * sum(stride in (0, 1) for stride in strides) > len(strides)


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _slot_bytes(kernel: Kernel, team: int, points: int, across: bool) -> int:
    """Return the shared bytes of the widest exchange of a team, over the whole block."""
    widest = 0
    for step in kernel.passes:
        for item in (*step.instrs, *step.reductions):
            if isinstance(item, Scan):
                widest = max(widest, itemsize(carrier(item.dtype)))
            elif isinstance(item, Reduce):
                found = item.op in ARG_REDUCERS
                widest = max(widest, 16 if found else itemsize(carrier(item.dtype)))
    count = points * team if across else points * max(team // 32, 1)
    if team == 1 and not has_scans(kernel):
        return 0
    return -(-widest * count // 16) * 16


# ---- the text ------------------------------------------------------------------------------------


class RowText:
    """Writes the body of a row kernel."""

    def __init__(self, kernel: Kernel, plan: RowPlan, text: Text, first_temporary: int):
        self.kernel = kernel
        self.plan = plan
        self.text = text
        self.body = Body(kernel, text)
        self.first_temporary = first_temporary
        self.row = math.prod(kernel.inner)
        self.outer = math.prod(kernel.outer)
        self.whole = self.outer % plan.points == 0
        self.loaded: set[int] = set()
        self.stored: set[int] = set()
        self.loads_at_point = False
        self.backwards = False

    def write(self) -> Launch:
        """Write everything; returns how to launch it."""
        plan, body, text = self.plan, self.body, self.text
        slot = "x" if plan.across else "y"
        self.member = "0" if plan.team == 1 else "member"
        if plan.serial:
            text.add("// Points that may write the same element act in order, in one thread.")
            self._row_buffers(slot)
            head = f"for ({body.index} point = 0; point < {self.outer}; point++)"
            with text.block(head), body.scope():
                self._passes()
            return Launch(1, (1, 1))
        text.add(f"// Threads for a row: {plan.team}; rows for a block: {plan.points}.")
        if plan.team > 1:
            text.add(f"const int member = threadIdx.{'y' if plan.across else 'x'};")
        block = "blockIdx.x" if body.index == "int" else "(i64)blockIdx.x"
        base = f"{block} * {plan.points} + threadIdx.{slot}"
        if self.whole:
            text.add(f"const {body.index} point = {base};")
        else:
            # Threads without a row of their own keep the others company, and store nothing.
            text.add(f"const {body.index} wanted = {base};")
            text.add(f"const bool live = wanted < {self.outer};")
            text.add(f"const {body.index} point = live ? wanted : {self.outer - 1};")
        self._row_buffers(slot)
        self._passes()
        block = (plan.points, plan.team) if plan.across else (plan.team, plan.points)
        return Launch(-(-self.outer // plan.points), block, plan.shared)

    def _passes(self) -> None:
        outer = self.kernel.outer
        self.body.index_of(range(len(outer)), digits("point", outer))
        for step in self.kernel.passes:
            self._settle(step)
            if step.level == POINT:
                self._point_pass(step)
            else:
                self._row_pass(step)

    def _row_buffers(self, slot: str) -> None:
        plan, text, used = self.plan, self.text, self.plan.slots
        if self.kernel.buffers:
            text.add(f"// Row buffers live in {plan.place}.")
        for number, dtype in enumerate(self.kernel.buffers):
            kept, name = carrier(dtype), f"row{number}"
            if plan.place == REGISTERS:
                text.add(f"{kept} {name}[{max(plan.items(self.row), 1)}];")
            elif plan.place == SHARED:
                text.add(f"{kept} *{name} = ({kept} *)(shared + {used});")
                used += itemsize(kept) * self.row * plan.points
            else:
                text.add(f"{kept} *{name} = a{self.first_temporary + number};")
        place = {
            (REGISTERS, False): "[item]",
            (REGISTERS, True): "[item]",
            (SHARED, False): f"[threadIdx.{slot} * {self.row} + element]",
            (SHARED, True): f"[element * {plan.points} + threadIdx.{slot}]",
            (SCRATCH, False): f"[point * {self.row} + element]",
            (SCRATCH, True): f"[element * {self.outer} + point]",
        }[plan.place, plan.across]
        self.body.row_element = lambda buffer: f"row{buffer}{place}"

    def _settle(self, step: Pass) -> None:
        """Write a barrier where a pass meets earlier reads or writes of the team's other threads.

        An argument may be read and written by different threads: once for the row by the first one,
        or at other elements. (Arguments that share memory are read where they are written.)
        """
        loads = {item.arg for item in step.instrs if isinstance(item, Load)}
        stores = {item.arg for item in step.stores if isinstance(item, Store)}
        # A scan that runs backwards hands elements to other threads than one that runs forwards.
        crosses = has_scans(self.kernel) and any(isinstance(i, LoadRow) for i in step.instrs)
        if self.plan.team > 1 and (loads & self.stored or stores & self.loaded or crosses):
            self.text.add("__syncthreads();")
        self.loaded |= loads
        self.stored |= stores

    # ---- passes ----

    def _point_pass(self, step: Pass) -> None:
        """Every thread computes the point's values; the team's first one stores."""
        self.text.add("// once for the row")
        self.body.instrs(step)
        self.loads_at_point |= any(isinstance(instr, Load) for instr in step.instrs)
        if not step.stores:
            return
        if self.plan.team > 1 and self.loads_at_point:
            # An argument may be updated in place: all threads have read before one writes.
            self.text.add("__syncthreads();")
        conditions = [] if self.whole else ["live"]
        conditions += ["member == 0"] if self.plan.team > 1 else []
        self.body.stores(step, " && ".join(conditions))

    def _row_pass(self, step: Pass) -> None:
        text, plan = self.text, self.plan
        text.add("// for each element of the row")
        totals = [self._start(reduction) for reduction in step.reductions]
        scans = [instr for instr in step.instrs if isinstance(instr, Scan)]
        self.backwards = any(scan.reverse for scan in scans)
        if self.row and scans and plan.team > 1:
            self._together(step, scans, totals)
        elif self.row:
            self._in_turn(step, scans, totals)
        for reduction, total in zip(step.reductions, totals, strict=True):
            self._finish(reduction, total)

    def _in_turn(self, step: Pass, scans: list[Scan], totals: list[str]) -> None:
        """Threads take elements on their own; a scan runs along them in one thread."""
        text, plan, row = self.text, self.plan, self.row
        running = {scan.out: self._running(scan) for scan in scans}
        if scans:
            self.body.scan = lambda scan, value: self._step_alone(scan, value, running)
        if plan.place == REGISTERS and self.kernel.buffers:
            text.add("#pragma unroll")
            head = f"for (int item = 0; item < {plan.items(row)}; item++)"
            with text.block(head), self.body.scope():
                text.add(f"const int element = item * {plan.team} + {self.member};")
                if row % plan.team:
                    text.add(f"if (element >= {row}) break;")
                self._element(step, totals, "")
            return
        if self.backwards:
            head = f"for ({self.body.index} element = {row - 1}; element >= 0; element--)"
        else:
            step_by = "element++" if plan.team == 1 else f"element += {plan.team}"
            start = f"{self.body.index} element = {self.member}"
            head = f"for ({start}; element < {row}; {step_by})"
        with text.block(head), self.body.scope():
            self._element(step, totals, "")

    def _together(self, step: Pass, scans: list[Scan], totals: list[str]) -> None:
        """The team walks the row in step, so that scans can pass values between its threads."""
        text, plan, row = self.text, self.plan, self.row
        running = {scan.out: self._running(scan) for scan in scans}
        whole = row % plan.team == 0
        inside = "" if whole else "inside"
        self.body.scan = lambda scan, value: self._step_in_team(scan, value, running, whole)
        head = f"for ({self.body.index} first = 0; first < {row}; first += {plan.team})"
        with text.block(head), self.body.scope():
            position = f"first + {self.member}"
            if not whole:
                # Threads behind the end look at the last element, and change nothing.
                text.add(f"const bool inside = {position} < {row};")
                position = f"(inside ? {position} : {row - 1})"
            if self.backwards:
                position = f"{row - 1} - {position}" if not whole else f"{row - 1} - ({position})"
            text.add(f"const {self.body.index} element = {position};")
            self._element(step, totals, inside)

    def _element(self, step: Pass, totals: list[str], inside: str) -> None:
        body, count = self.body, len(self.kernel.outer)
        inner = range(count, len(self.kernel.sizes))
        body.index_of(inner, digits("element", self.kernel.inner))
        body.instrs(step)
        conditions = [*([] if self.whole else ["live"]), *([inside] if inside else [])]
        live = " && ".join(conditions)
        local = [s for s in step.stores if isinstance(s, StoreRow)]
        shared = [s for s in step.stores if not isinstance(s, StoreRow)]
        # Registers and shared memory are the thread's own, live or not.
        own = live if self.plan.place == SCRATCH else inside
        body.stores(Pass(ROW, (), tuple(local)), own)
        body.stores(Pass(ROW, (), tuple(shared)), live)
        for reduction, total in zip(step.reductions, totals, strict=True):
            line = self._accumulate(reduction, total)
            self.text.add(f"if ({inside}) {line}" if inside else line)

    # ---- reductions ----

    def _start(self, reduction: Reduce) -> str:
        name = self.body.fresh("total")
        if reduction.op in ARG_REDUCERS:
            operand = carrier(operand_dtype(self.kernel, reduction.operand))
            self.text.add(f"Found<{operand}> {name} = {{{operand}(), -1}};")
        else:
            start = identity_literal(reduction.op, reduction.dtype)
            self.text.add(f"{carrier(reduction.dtype)} {name} = {start};")
        return name

    def _accumulate(self, reduction: Reduce, total: str) -> str:
        value = self.body.names[reduction.operand]
        if reduction.op in ARG_REDUCERS:
            operand = carrier(self.body.dtypes[reduction.operand])
            value = f"Found<{operand}>{{{value}, element}}"
        return f"{total} = {combination(reduction.op, reduction.dtype, total, value)};"

    def _finish(self, reduction: Reduce, total: str) -> None:
        plan, op = self.plan, FUNCTORS[reduction.op]
        found = reduction.op in ARG_REDUCERS
        if plan.team > 1 and self.row:
            kind = carrier(reduction.dtype)
            if found:
                kind = f"Found<{carrier(operand_dtype(self.kernel, reduction.operand))}>"
            how = "reduce_columns" if plan.across else "reduce_rows"
            self.text.add(f"{total} = {how}<{op}, {plan.team}>({total}, ({kind} *)shared);")
        result = total
        if found:
            result = f"({reduction.dtype})({total}.position < 0 ? 0 : {total}.position)"
        if found:
            self.body.define(reduction.out, reduction.dtype, result)
        else:
            self.body.names[reduction.out] = total
            self.body.dtypes[reduction.out] = reduction.dtype

    # ---- scans ----

    def _running(self, scan: Scan) -> str:
        name = self.body.fresh("running")
        self.text.add(f"{carrier(scan.dtype)} {name} = {identity_literal(scan.op, scan.dtype)};")
        return name

    def _step_alone(self, scan: Scan, value: str, running: dict[int, str]) -> str:
        name = running[scan.out]
        self.text.add(f"{name} = {combination(scan.op, scan.dtype, name, value)};")
        return name

    def _step_in_team(self, scan: Scan, value: str, running: dict[int, str], whole: bool) -> str:
        kind, op = carrier(scan.dtype), FUNCTORS[scan.op]
        if not whole:
            value = f"inside ? {value} : {identity_literal(scan.op, scan.dtype)}"
        return f"scan_rows<{op}, {self.plan.team}>({value}, {running[scan.out]}, ({kind} *)shared)"


def operand_dtype(kernel: Kernel, value: int) -> str:
    """Return the dtype of a value."""
    for step in kernel.passes:
        for item in (*step.instrs, *step.reductions):
            if item.out == value:
                return item.dtype
    raise KeyError(value)
