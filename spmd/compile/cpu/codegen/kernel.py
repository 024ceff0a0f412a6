"""Kernel IR to LLVM IR text for CPUs.

    rendered = render(kernel, target)
    # void symbol(ptr args, ptr sizes, i64 begin, i64 end): does work units begin <= u < end,
    # of which there is at least one

A unit may run apart from all others: a block of an elementwise kernel, a row, or a block of
lanes when these run along an outer dim. Sequential kernels (scatters) are one unit. The text is a
whole module; its symbol is a hash of the text, so equal kernels share compiled code.

This file decides the shape (lanes, units, cost); `loop_nest.py` writes the loops.
"""

from __future__ import annotations

import math

from spmd.base.digest import blake2b
from spmd.base.record import record
from spmd.compile.cpu.codegen.access import is_near
from spmd.compile.cpu.codegen.loop_nest import Nest, Plan
from spmd.compile.cpu.codegen.streaming_stores import STREAM_FROM, either_text, streamed
from spmd.compile.cpu.codegen.transpose_tiles import tile_dim
from spmd.compile.cpu.math.table import INSTRUCTIONS, VECTOR_FUNCTIONS
from spmd.compile.kernel.check import check_kernel
from spmd.compile.kernel.dtypes import DTYPES, REAL_OF, itemsize
from spmd.compile.kernel.ir import (
    ROW,
    Const,
    Iota,
    Kernel,
    Load,
    Op,
    Scan,
    Store,
    is_sequential,
    is_serial,
)
from spmd.compile.kernel.iteration_space import is_elementwise, normalise
from spmd.compile.native.llvm.vector_emitter import Module, Target, attributes_text

# Elements of one unit of an elementwise kernel: about 2 us of streaming work, small enough that two
# threads share 10 000 elements, large enough that starting a unit costs nothing.
UNIT_ELEMENTS = 4096

# Above this many calls of vector functions their code is shared instead of repeated (notes: the
# compile time of 40 calls falls by a factor of 3 to 4, the run time stays).
INLINE_FUNCTIONS = 3
# And so in kernels over few elements, in which reading the function's constants at each call takes
# some hundred nanoseconds: LLVM takes 2 to 10 ms for a function that is written in place.
SMALL_ELEMENTS = 4096

# Units of work (one instruction on 16 lanes) from which wider virtual vectors pay.
WIDE_FROM, WIDEST_FROM = 4.0, 32.0

MOST_LANES = 64
COLUMN_LANES = 64

# Measured on one core at 2.6 GHz: an instruction on a full register, a streamed byte, an element
# that is read or written by itself, a call of libm, a unit's start.
NS_PER_REGISTER = 0.16
NS_PER_BYTE = 0.011
NS_PER_SINGLE = 0.7
NS_PER_CALL = 8.0
NS_PER_UNIT = 4.0


@record
class Rendered:
    """A kernel as LLVM text: `units` independent units of about `cost_ns` nanoseconds each."""

    symbol: str
    text: str
    units: int
    cost_ns: float


def render(
    kernel: Kernel, target: Target, tiles: bool = True, stream_from: int = STREAM_FROM
) -> Rendered:
    """Render `kernel`; its address, once compiled, is a function of the ABI above.

    Without `tiles` arrays that lie across the lanes are read element by element, and every point of
    the outer dims stays a unit of its own. Results of `stream_from` bytes go past the caches.
    """
    check_kernel(kernel)
    kernel = normalise(kernel)
    plan = make_plan(kernel, target, tiles)
    functions = [
        instr.op
        for step in kernel.passes
        for instr in step.instrs
        if isinstance(instr, Op) and instr.op in VECTOR_FUNCTIONS
    ]
    module = Module(
        target,
        shares_math=len(functions) > INLINE_FUNCTIONS,
        joins_waves={"sin", "cos"} <= set(functions),
        is_small=math.prod(kernel.sizes) <= SMALL_ELEMENTS,
    )
    text = _module_text(module, *_bodies(plan, module, stream_from))
    symbol = content_symbol("kernel", text)
    cost = _unit_cost(plan)
    return Rendered(symbol, text.replace("@SYMBOL", f"@{symbol}"), plan.units, cost)


def render_function(kernel: Kernel, module: Module, name: str) -> str:
    """Render `kernel` as a function of the same ABI that is to be inlined where it is called.

    It does all units, whatever it is told; helpers and declarations go to `module`.
    """
    plan = make_plan(normalise(kernel), module.target)
    body = Nest(plan, module, whole=True).function() if plan.units else _EMPTY
    head = f"define internal void @{name}(ptr %args, ptr %sizes, i64 %begin, i64 %end)"
    return f"{head} alwaysinline #0 {{\n{body}\n}}"


def content_symbol(kind: str, text: str) -> str:
    """Return the name of a function by its text, in which it is called `SYMBOL`."""
    return f"{kind}_{blake2b(text.encode(), digest_size=16).hexdigest()}"


_EMPTY = "entry:\n  ret void"


def _bodies(plan: Plan, module: Module, stream_from: int) -> tuple[str, str]:
    """Return functions that the kernel calls, and its own body."""
    if not plan.units:
        return "", _EMPTY
    # Elements have 16 bytes at most: small kernels need no closer look.
    stores = sum(len(step.stores) for step in plan.kernel.passes)
    most = 16 * math.prod(plan.kernel.sizes) * stores
    streams = streamed(plan, stream_from) if most >= stream_from else {}
    if not streams:
        return "", Nest(plan, module).function()
    return either_text(
        module, plan.kernel, streams, lambda stores: Nest(plan, module, stores).function()
    )


def _module_text(module: Module, helpers: str, body: str) -> str:
    function = f"define void @SYMBOL(ptr %args, ptr %sizes, i64 %begin, i64 %end) #0 {{\n{body}\n}}"
    return "\n".join((helpers, function, module.text(), attributes_text(module.target), ""))


# ---- the plan -------------------------------------------------------------------------------


def make_plan(kernel: Kernel, target: Target, tiles: bool = True) -> Plan:
    """Choose lanes and units of a normalised kernel."""
    dim = kernel.vector_dim
    if 0 in kernel.outer or not kernel.passes:
        return Plan(kernel, 1, 0, 0)
    if is_elementwise(kernel) and 0 in kernel.sizes:
        return Plan(kernel, 1, 0, 0)
    width = 1 if dim is None else _width(kernel, target, kernel.sizes[dim])
    points = math.prod(kernel.outer)
    if is_sequential(kernel):
        return Plan(kernel, width, 0, 1 if is_serial(kernel) else points)
    if dim is not None and dim < len(kernel.outer):
        size = kernel.outer[dim]
        return Plan(kernel, width, 0, points // size * -(-size // width))
    tiled = tile_dim(kernel, width) if tiles else None
    if tiled is not None:
        steps = kernel.outer[tiled]
        return Plan(kernel, width, 0, points // steps * -(-steps // width), tiled)
    if is_elementwise(kernel) and kernel.inner and kernel.inner[-1] > UNIT_ELEMENTS:
        blocks = -(-kernel.inner[-1] // UNIT_ELEMENTS)
        return Plan(kernel, width, UNIT_ELEMENTS, points * blocks)
    return Plan(kernel, width, 0, points)


def _work(kernel: Kernel) -> float:
    """Count instructions per element of the row, constants and indices left out."""
    total = 0.0
    for step in kernel.passes:
        weight = 1.0 if step.level == ROW else 0.05
        for instr in step.instrs:
            if isinstance(instr, Op):
                total += weight * INSTRUCTIONS.get(instr.op, 1.0)
            elif not isinstance(instr, Const | Iota):
                total += weight
    return total


def _element_bits(kernel: Kernel) -> int:
    """Return the width of the widest values that are computed with (bools do not count)."""
    bits = [8]
    for step in kernel.passes:
        for item in (*step.instrs, *step.reductions):
            dtype = REAL_OF.get(item.dtype, item.dtype)
            bits.append(DTYPES[DTYPES[dtype].carrier].bits)
    return max(bits)


def _calls_libm(op: Op) -> bool:
    """Say whether an operation is one scalar instruction or call per lane."""
    return op.op in ("div", "rem") and op.dtype[0] in "iu"


def _single_lanes(kernel: Kernel) -> tuple[int, int]:
    """Count the work done lane by lane: (accesses, calls). It makes wide vectors only long code."""
    dim, accesses, calls = kernel.vector_dim or 0, 0, 0
    for step in kernel.passes:
        for item in (*step.instrs, *step.stores):
            if isinstance(item, Load | Store):
                strides = item.map.strides
                strided = dim < len(strides) and strides[dim] not in (0, 1)
                if isinstance(item, Load) and strided and item.guard is None:
                    strided = item.dtype[0] == "c" or not is_near(strides[dim])
                accesses += bool(item.map.gathered) or strided
            elif isinstance(item, Op):
                calls += _calls_libm(item)
    return accesses, calls


def _width(kernel: Kernel, target: Target, size: int) -> int:
    """Choose the lanes: one register for short kernels, more for long chains and reductions."""
    lanes = max(target.vector_bits // _element_bits(kernel), 2)
    if any(_single_lanes(kernel)):
        return min(lanes, 16, _power_of_two_from(size))
    work = _work(kernel)
    factor = 1 if work < WIDE_FROM else 2 if work < WIDEST_FROM else 4
    if any(step.reductions or _scans(step.instrs) for step in kernel.passes):
        factor = 4
    dim = kernel.vector_dim
    most = MOST_LANES
    if dim is not None and dim < len(kernel.outer) and work < WIDE_FROM:
        # A sum over rows: walking down narrow columns would touch a new page at every step.
        factor, most = 16, COLUMN_LANES
    while factor > 1 and lanes * factor > size:
        factor //= 2
    return min(lanes * factor, most, _power_of_two_from(size))


def _scans(instrs: tuple[object, ...]) -> bool:
    return any(isinstance(instr, Scan) for instr in instrs)


def _power_of_two_from(size: int) -> int:
    """Return the least power of two that is not less than `size`."""
    return 1 << max(size - 1, 0).bit_length()


def _unit_cost(plan: Plan) -> float:
    """Estimate the nanoseconds of one unit."""
    kernel = plan.kernel
    if plan.units == 0:
        return 0.0
    streamed = sum(
        itemsize(kernel.args[item.arg].dtype)
        for step in kernel.passes
        if step.level == ROW
        for item in (*step.instrs, *step.stores)
        if isinstance(item, Load | Store)
    )
    accesses, calls = _single_lanes(kernel)
    # Wide elements fill a register sooner; scalar code is as slow as a register of one lane.
    per_element = _work(kernel) * NS_PER_REGISTER / min(plan.width, 512 // _element_bits(kernel))
    per_element += streamed * NS_PER_BYTE + accesses * NS_PER_SINGLE + calls * NS_PER_CALL
    elements = math.prod(kernel.sizes) / plan.units
    return round(NS_PER_UNIT + elements * per_element, 2)
