"""Schedules: a program as a tree of steps over named buffers, before memory is planned.

A `Ref` is a contiguous value: a place in a `Buffer`. Inside loops a ref may move by a fixed number
of bytes per iteration. The steps know nothing of addresses or of a backend; `memory_plan` gives
buffers their place in the arena, `assemble` turns the steps into those of the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from spmd.base.record import field, record
from spmd.base.source import UNKNOWN, Source
from spmd.compile.kernel.ir import Kernel
from spmd.compile.kernel.matmul import Product
from spmd.compile.kernel.packing import Packing
from spmd.compile.kernel.window_contraction import Contraction
from spmd.core.aval import ShapedArray
from spmd.transport.shm.plan import ExchangePlan

# ---- buffers -----------------------------------------------------------------------------------

TEMP, INPUT, OUTPUT, CONST = "temp", "input", "output", "const"


class Buffer:
    """Memory for one value (or a stack of them). Told apart by identity.

    `owner` is the number of the parallel loop that keeps a temporary for itself: a round's values
    are apart from those of the rounds beside it.
    """

    __slots__ = ("kind", "nbytes", "number", "owner")

    def __init__(self, kind: str, nbytes: int, number: int):
        self.kind = kind
        self.nbytes = nbytes
        self.number = number
        self.owner: int | None = None

    def __repr__(self) -> str:
        return f"{self.kind}{self.number}"


@record
class Ref:
    """A place: `offset` bytes into a buffer, plus (loop level, bytes per iteration) strides."""

    buffer: Buffer
    offset: int = 0
    strides: tuple[tuple[int, int], ...] = ()

    def shifted(self, nbytes: int) -> Ref:
        """The place `nbytes` further on."""
        return Ref(self.buffer, self.offset + nbytes, self.strides)

    def moving(self, level: int, nbytes: int) -> Ref:
        """The place that moves with the loop of a level."""
        return Ref(self.buffer, self.offset, (*self.strides, (level, nbytes)))

    def __str__(self) -> str:
        moves = "".join(f"+{n}*i{level}" for level, n in self.strides)
        return f"{self.buffer}[{self.offset}{moves}]"


# ---- steps -------------------------------------------------------------------------------------


@record
class Launch:
    """Run a kernel over the values at `refs`, one for each of its arguments."""

    kernel: Kernel
    refs: tuple[Ref, ...]
    name: str = "kernel"
    source: Source = UNKNOWN


@record
class Multiply:
    """Run a product over A at `refs[0]`, B at `refs[1]` and its epilogue's arguments."""

    product: Product
    refs: tuple[Ref, ...]
    name: str = "dot"
    source: Source = UNKNOWN


@record
class Pack:
    """Write the columns of B at `refs[0]` to `refs[1]` in panels, as products read them."""

    packing: Packing
    refs: tuple[Ref, Ref]
    name: str = "pack"
    source: Source = UNKNOWN


# Up to so many least words are kept in order while their row is read once.
MOST_KEPT = 64


@record
class Sort:
    """Sort rows of unsigned 64-bit words in place, stably by their upper halves.

    With `kept` (at most MOST_KEPT) only so many least words, by all their bits, come first; the
    rest is undefined. With `work`, SORT_WORK bytes a row, no lower half comes before that of an
    earlier word with an equal upper half: words may then be sorted by all their bits.
    """

    rows: int
    size: int
    kept: int | None
    words: Ref
    name: str = "sort"
    source: Source = UNKNOWN
    work: Ref | None = None


# Memory for a row that threads may share in sorting it, where there are only a few rows.
SORT_WORK, SHARED_ROWS = 256, 4


@record
class SortRows:
    """Write rows of numbers in order: NaNs last, numbers that are equal in the order they came.

    Of whole numbers the result may be the operand. `work` are SORT_WORK bytes a row, if there are
    not more than SHARED_ROWS.
    """

    rows: int
    size: int
    dtype: str
    operand: Ref
    result: Ref
    work: Ref | None
    name: str = "sort"
    source: Source = UNKNOWN


@record
class Contract:
    """Run a contraction over windows: A at `refs[0]`, B at `refs[1]`, the result at `refs[2]`.

    The epilogue's other arguments come behind; it may write its result over the contraction's.
    """

    contraction: Contraction
    refs: tuple[Ref, ...]
    name: str = "conv"
    source: Source = UNKNOWN

    @property
    def flops(self) -> int:
        """Its multiplications and additions."""
        return 2 * self.contraction.multiply_adds * self.contraction.batch[0]


@record
class Copy:
    """Copy bytes."""

    target: Ref
    source: Ref
    nbytes: int


@record
class Host:
    """Run a Python function on NumPy views: what has no native step.

    With `together` one call serves all devices of the process: a collective with other processes.
    One that can be in flight while other steps run has `halves`: functions that start it and wait
    for it. With `effects` it does more than to compute its outputs.
    """

    function: Any
    inputs: tuple[tuple[Ref, ShapedArray], ...]
    outputs: tuple[tuple[Ref, ShapedArray], ...]
    name: str = "host"
    source: Source = UNKNOWN
    together: bool = False
    halves: tuple[Any, Any] | None = None
    effects: bool = False


@record
class Exchange:
    """A collective between the devices of this process; the fields are those of the runtime's."""

    kind: Any
    input: Ref
    output: Ref
    dtype: np.dtype
    rows: int
    count: int
    groups: tuple[tuple[int, ...], ...]
    op: str | None = None
    pairs: tuple[tuple[int, int], ...] = ()
    name: str = "collective"


@record
class RankExchange:
    """A collective with other processes, by native code: `rounds` over a group's memory.

    `state` is the address of the group's words, `take` gives the error that stopped it, `label` is
    what the flight record calls it.
    """

    rounds: ExchangePlan
    state: int
    take: Callable[[], BaseException]
    input: Ref
    output: Ref
    scratch: Ref | None
    label: int = 0
    name: str = "collective"


@record
class Loop:
    """Run `body` a fixed number of times."""

    trips: int
    body: tuple[Step, ...]
    reverse: bool = False


@record
class Parallel:
    """Run `body` for each index of some dims, in any order or at the same time.

    The dims are as many loop levels, the outermost first. What the body keeps for itself lies in
    the buffers that the loop owns. A backend may run it in order and share the work inside.
    """

    trips: tuple[int, ...]
    body: tuple[Step, ...]
    number: int


@record
class While:
    """Run `test`; while the bool at `predicate` is true run `body` and repeat."""

    test: tuple[Step, ...]
    predicate: Ref
    body: tuple[Step, ...]


@record
class Branch:
    """Run one of `branches`, chosen by the integer (or bool) at `index`."""

    index: Ref
    dtype: np.dtype
    branches: tuple[tuple[Step, ...], ...]


Step: TypeAlias = (
    Launch
    | Multiply
    | Pack
    | Contract
    | Sort
    | SortRows
    | Copy
    | Host
    | Exchange
    | RankExchange
    | Loop
    | Parallel
    | While
    | Branch
)


def accesses(step: Step) -> Iterator[tuple[Ref, bool]]:
    """The refs that a step itself reads (False) or writes (True)."""
    match step:
        case Launch():
            for ref, arg in zip(step.refs, step.kernel.args, strict=True):
                if arg.role != "out":
                    yield ref, False
                if arg.role != "in":
                    yield ref, True
        case Multiply():
            yield step.refs[0], False
            yield step.refs[1], False
            for ref, arg in zip(step.refs[2:], step.product.epilogue.args[1:], strict=True):
                yield ref, arg.role == "out"
        case Pack():
            yield step.refs[0], False
            yield step.refs[1], True
        case Contract():
            yield step.refs[0], False
            yield step.refs[1], False
            yield step.refs[2], True
            if step.contraction.epilogue is not None:
                others = step.contraction.epilogue.args[1:]
                yield from (
                    (r, a.role == "out") for r, a in zip(step.refs[3:], others, strict=True)
                )
        case Sort():
            yield step.words, False
            yield step.words, True
            if step.work is not None:
                yield step.work, True
        case SortRows():
            yield step.operand, False
            yield step.result, True
            if step.work is not None:
                yield step.work, True
        case Copy():
            yield step.source, False
            yield step.target, True
        case Host():
            yield from ((ref, False) for ref, _ in step.inputs)
            yield from ((ref, True) for ref, _ in step.outputs)
        case Exchange():
            yield step.input, False
            yield step.output, True
        case RankExchange():
            yield step.input, False
            yield step.output, True
            if step.scratch is not None:
                yield step.scratch, True
        case While():
            yield step.predicate, False
        case Branch():
            yield step.index, False


def blocks(step: Step) -> tuple[tuple[Step, ...], ...]:
    """The step lists nested in a step."""
    match step:
        case Loop() | Parallel():
            return (step.body,)
        case While():
            return step.test, step.body
        case Branch():
            return step.branches
    return ()


def walk(steps: Sequence[Step]) -> Iterator[Step]:
    """All steps in order, those in loops and branches behind theirs."""
    for step in steps:
        yield step
        for block in blocks(step):
            yield from walk(block)


# ---- the whole ---------------------------------------------------------------------------------


@record(frozen=False)
class Schedule:
    """The steps of a program, its buffers, and what its results are.

    `results[k]` is the output buffer of result k, or the number of the input that it equals.
    """

    inputs: list[Buffer] = field(default_factory=list)
    outputs: list[Buffer] = field(default_factory=list)
    consts: list[tuple[Buffer, Any]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    results: list[Buffer | int] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(_text(self.steps, 0))


def _text(steps: Sequence[Step], depth: int) -> Iterator[str]:
    pad = "  " * depth
    for step in steps:
        reads = " ".join(str(r) for r, writes in accesses(step) if not writes)
        writes = " ".join(str(r) for r, written in accesses(step) if written)
        yield f"{pad}{writes}{' = ' if writes else ''}{_name(step)} {reads}".rstrip()
        for block in blocks(step):
            yield f"{pad}  -"
            yield from _text(block, depth + 1)


def _name(step: Step) -> str:
    match step:
        case Exchange():
            return f"{step.kind} {step.name}"
        case RankExchange():
            return f"ranks {step.name}"
        case Launch() | Host() | Sort():
            return f"{type(step).__name__.lower()} {step.name}"
        case SortRows():
            return f"{step.name} rows"
        case Multiply(product=p):
            return f"product {'x'.join(map(str, (*p.batch, p.m, p.n, p.k)))} {step.name}"
        case Pack(packing=p):
            return f"pack {'x'.join(map(str, (*p.batch, p.k, p.n)))}"
        case Contract(contraction=c):
            sizes = (c.batch[0], c.rows.count, c.columns, c.depth.count)
            return f"contract {'x'.join(map(str, sizes))} {step.name}"
        case Loop():
            return f"loop {step.trips}"
        case Parallel():
            return f"parallel {'x'.join(map(str, step.trips))}"
    return type(step).__name__.lower()
