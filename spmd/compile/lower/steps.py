"""Schedules: a program as a tree of steps over named buffers, before memory is planned.

A `Ref` is a contiguous value: a place in a `Buffer`. Inside loops a ref may move by a fixed number
of bytes per iteration. The kinds of steps here name what is to be compiled, for any platform. The
others (copies, host steps, exchanges, loops, branches) are those of `native/program/steps.py`, over
refs. `memory_plan` gives buffers their place in the arena; `assemble` replaces refs by slots, and
the kinds of this module by calls of machine code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from spmd.base.record import field, record
from spmd.base.source import UNKNOWN, Source
from spmd.compile.kernel.attention import BlockedAttention
from spmd.compile.kernel.fourier import Transform
from spmd.compile.kernel.ir import Kernel
from spmd.compile.kernel.matmul import Product
from spmd.compile.kernel.packing import Packing
from spmd.compile.kernel.window_contraction import Contraction
from spmd.compile.native.program.steps import (
    PLACES,
    Branch,
    Copy,
    Exchange,
    Host,
    Loop,
    Once,
    Parallel,
    RankExchange,
    View,
    While,
    blocks,
    walk,
)
from spmd.core.aval import ShapedArray

if TYPE_CHECKING:
    from spmd.compile.kernel.factorization import Factorization

# ---- buffers -----------------------------------------------------------------------------------

TEMP, INPUT, OUTPUT, CONST = "temp", "input", "output", "const"

# For each local device, the device in whose memory its value lies: the first of those that have the
# same value.
Homes: TypeAlias = tuple[int, ...]


class Buffer:
    """Memory for one value (or a stack of them). Told apart by identity.

    `owner` is the number of the parallel loop that keeps a temporary for itself: an iteration's
    values are apart from those of the iterations beside it. Without `homes` each device has a
    buffer of its own.
    """

    __slots__ = ("homes", "kind", "nbytes", "number", "owner")

    def __init__(self, kind: str, nbytes: int, number: int):
        self.kind = kind
        self.nbytes = nbytes
        self.number = number
        self.owner: int | None = None
        self.homes: Homes | None = None

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


def view(ref: Ref, aval: ShapedArray) -> View[Ref]:
    """A place seen as an array of a type."""
    return View(ref, aval.shape, aval.dtype)


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
    """Sort rows of unsigned 64-bit words at `refs[0]` in place, stably by their upper halves.

    With `kept` (at most MOST_KEPT) only so many least words, by all their bits, come first; the
    rest is undefined. With room for work at `refs[1]`, SORT_WORK bytes a row, no lower half comes
    before that of an earlier word with an equal upper half: words may then be sorted by all their
    bits.
    """

    rows: int
    size: int
    kept: int | None
    refs: tuple[Ref, ...]
    name: str = "sort"
    source: Source = UNKNOWN


# Memory for a row that threads may share in sorting it, where there are only a few rows.
SORT_WORK, SHARED_ROWS = 256, 4


@record
class SortRows:
    """Write rows of numbers in order: NaNs last, numbers that are equal in the order they came.

    The operand is at `refs[0]`, the result at `refs[1]`; of whole numbers the two may be the same.
    At `refs[2]` are SORT_WORK bytes a row, if there are not more than SHARED_ROWS.
    """

    rows: int
    size: int
    dtype: str
    refs: tuple[Ref, ...]
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
class Fourier:
    """Run transforms over the operand at `refs[0]` with the roots at `refs[1]` to `refs[2]`."""

    transform: Transform
    refs: tuple[Ref, ...]
    name: str = "fft"
    source: Source = UNKNOWN


@record
class Attend:
    """Run a part of attention over what it reads at the first refs, and what it writes behind."""

    kernel: BlockedAttention
    refs: tuple[Ref, ...]
    name: str = "attention"
    source: Source = UNKNOWN

    @property
    def flops(self) -> int:
        """Its multiplications and additions."""
        return self.kernel.flops


@record
class Factor:
    """Run a factorization over what it `reads`, so many refs, and what it writes, those behind."""

    factorization: Factorization
    reads: int
    refs: tuple[Ref, ...]
    name: str = "factor"
    source: Source = UNKNOWN


# The steps that name what is to be compiled; each has its `refs`, a name and a source.
Compiled: TypeAlias = (
    Launch | Multiply | Pack | Contract | Sort | SortRows | Fourier | Attend | Factor
)

Step: TypeAlias = (
    Compiled
    | Copy[Ref]
    | Host[Ref]
    | Exchange[Ref]
    | RankExchange[Ref]
    | "Loop[int, Step]"
    | "Parallel[Step]"
    | "While[Ref, Step]"
    | "Branch[Ref, Step]"
    | "Once[Step]"
)


def accesses(step: Step) -> list[tuple[Ref, bool]]:
    """The refs that a step itself reads (False) or writes (True)."""
    found: list[tuple[Ref, bool]] = []
    match step:
        case (
            Launch()
            | Multiply()
            | Pack()
            | Contract()
            | Sort()
            | SortRows()
            | Fourier()
            | Attend()
            | Factor()
        ):
            for ref, role in zip(step.refs, _roles(step), strict=True):
                if role != "out":
                    found.append((ref, False))
                if role != "in":
                    found.append((ref, True))
        case Host():
            found += [(view.place, False) for view in step.inputs]
            found += [(view.place, True) for view in step.outputs]
        case _:
            reads, writes = PLACES.get(type(step), ((), ()))
            found += [(getattr(step, name), False) for name in reads]
            refs = [getattr(step, name) for name in writes]
            found += [(ref, True) for ref in refs if ref is not None]
    return found


def _roles(step: Compiled) -> list[str]:
    """Whether compiled code reads the memory at each ref, or writes it, or both."""
    match step:
        case Launch(kernel=kernel):
            return [arg.role for arg in kernel.args]
        case Multiply(product=product):
            return ["in", "in", *(arg.role for arg in product.epilogue.args[1:])]
        case Contract(contraction=contraction):
            after = contraction.epilogue
            others = () if after is None else after.args[1:]
            return ["in", "in", "out", *(arg.role for arg in others)]
        case Pack():
            return ["in", "out"]
        case Sort():
            return ["inout", "out"][: len(step.refs)]
        case SortRows():
            return ["in", "out", "out"][: len(step.refs)]
        case Fourier():
            return ["in", "in", "out"]
        case Attend(kernel=kernel):
            return ["in"] * len(kernel.reads) + ["out"] * len(kernel.writes)
        case Factor(reads=reads, refs=refs):
            return ["in"] * reads + ["out"] * (len(refs) - reads)


def accesses_inside(steps: Sequence[Step]) -> list[tuple[Ref, bool]]:
    """The refs that some steps and those in their blocks read or write, in order."""
    return [access for step in walk(steps) for access in accesses(step)]


# ---- the whole ---------------------------------------------------------------------------------


@record(frozen=False)
class Schedule:
    """The steps of a program, its buffers, and its results.

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
        case Fourier(transform=t):
            return f"{step.name} {t.kind} {t.count}x{t.size}"
        case Attend(kernel=k):
            sizes = (k.batch, k.heads, k.groups, k.queries, k.keys, k.features)
            return f"{step.name} {k.part} {'x'.join(map(str, sizes))}"
        case Factor(factorization=f):
            return f"{step.name} {f.count}x{f.m}x{f.n}"
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
        case Once():
            return f"once on {' '.join(map(str, step.devices))}"
    return type(step).__name__.lower()
