"""Steps: a program's actions, one record a kind, and the program format of the CPU runtime.

The one idea: a compiled function is *data*. Lowering writes these steps over the `Ref`s of a
schedule (`lower/steps.py`), which adds the kinds that name what is to be compiled: kernels,
products, packings, contractions and sorts. Assembly gives every place its base and offset, a
`Slot`, and replaces the added kinds by calls of machine code: `KernelStep` and `BatchStep`, which
hold addresses and so exist here only. All other kinds stay the records that they are: they are
generic in their places and in the steps of their blocks.

Each virtual device owns a **frame**, an array of base pointers (arena, inputs, outputs, constants)
in the order of `Program.bases`. A step names its operands by `Slot` (base, byte offset), so the
same program runs for every device and every call by exchanging frames only.
`spmd.compile.native.runtime.run` turns a Program into native words and runs it.

Loops nest. Level 0 is the outermost loop (`Loop` or `While`), level 1 the loop in it, and so on; a
place may advance by a fixed number of bytes per iteration of any enclosing loop, so a scan body
reads `xs[i]` and writes `ys[i]` in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

import numpy as np

from spmd.base.record import record, replace
from spmd.base.source import UNKNOWN, Source

if TYPE_CHECKING:
    from spmd.transport.shm.plan import ExchangePlan
    from spmd.transport.strided import Strided

CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast", "exchange"
]

# The "loop level" at which a slot moves with the lane of a `Parallel` loop.
LANE = -1

# The assumed trips of a loop with an unknown trip count when the runner estimates its cost.
ASSUMED_TRIPS = 8

# The places that steps read and write, the steps in their blocks, and a loop's number of trips.
P = TypeVar("P")
S = TypeVar("S")
T = TypeVar("T")

# ---- places ------------------------------------------------------------------------------------


@record
class Slot:
    """An address relative to a frame: `frame[base] + offset + sum(index[level] * stride)`.

    `strides` lists (loop level, bytes per iteration). The index of a reversed `Loop` counts
    down from trips - 1; the index of a `While` counts its iterations from 0. The level `LANE`
    is not a loop: its index is the lane of the parallel loop around.
    """

    base: int
    offset: int = 0
    strides: tuple[tuple[int, int], ...] = ()


@record
class View(Generic[P]):
    """A place seen as a C-contiguous array, the way a Python function receives it."""

    place: P
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """The bytes that the array occupies."""
        return math.prod(self.shape) * self.dtype.itemsize  # asked in every callback


# ---- steps that call machine code --------------------------------------------------------------


@record
class KernelStep:
    """Call native code `void fn(ptr args, ptr sizes, i64 begin, i64 end)` over `units` of work.

    Units are independent: the runner may split [0, units) over threads in any way. `cost_ns` is
    the estimated time of one unit. `sizes` are run-time numbers handed to the function as an array
    of i64. With `scratch` > 0 the function finds one more pointer behind its args: that many bytes
    (64-byte aligned), private to the calling thread and undefined at entry. `extents`, if given,
    says how many bytes from each slot's address the kernel may touch; they are checked against the
    bases when the program is built. An `is_open` function may take any time: its work is not known.
    One that `meets` begins on no device before all of them have done the steps before it.
    """

    address: int
    slots: tuple[Slot, ...]
    units: int
    cost_ns: float
    sizes: tuple[int, ...] = ()
    scratch: int = 0
    extents: tuple[int, ...] | None = None
    name: str = "kernel"
    is_open: bool = False
    meets: bool = False


@record
class BatchStep:
    """Run kernels that do not depend on each other, their units in any order, as one shared job.

    Sixty small updates of an optimizer, each too short to share out, are long enough together.
    """

    steps: tuple[KernelStep, ...]


# ---- steps over places of any kind -------------------------------------------------------------


@record
class Copy(Generic[P]):
    """Copy `nbytes` bytes from `source` to `target`; the two may overlap."""

    target: P
    source: P
    nbytes: int


@record
class Meeting:
    """The groups of an exchange between processes, as positions of the mesh.

    The members of a group get the `same`, or each a part of its own.
    """

    groups: tuple[tuple[int, ...], ...]
    same: bool


@record
class Host(Generic[P]):
    """Call Python, for operations without a native step: `function(device, inputs, outputs)`.

    The inputs are lists of read-only NumPy views, the outputs are to be filled in place; neither
    may be kept after the call returns. With `together` one call serves all local devices,
    `function(devices, inputs, outputs)`, where `devices` is the tuple of device numbers and
    `inputs[j]`, `outputs[j]` are the lists of views of `devices[j]`; it is a collective, that is
    all devices must reach it, those of other processes in its `meeting` too. One that can be in
    flight while other steps run has `halves`: functions that start it and wait for it. With
    `on_device` the views are of a device's own memory: they have an address, which nothing but its
    driver may follow. With
    `effects` it does more than to compute its outputs. An exception stops the program and is raised
    from `run`.
    """

    function: Callable[[Any, list, list], None]
    inputs: tuple[View[P], ...]
    outputs: tuple[View[P], ...]
    name: str = "host"
    source: Source = UNKNOWN
    together: bool = False
    halves: tuple[Any, Any] | None = None
    effects: bool = False
    meeting: Meeting | None = None
    on_device: bool = False


@record
class Box:
    """Bytes that member `source` of a group has, or zeros (-1), and their way to `target`."""

    source: int
    target: int
    copy: Strided


@record
class Exchange(Generic[P]):
    """Combine or exchange a value between the local devices of each group.

    `groups` are disjoint tuples of device numbers of equal length G; the results depend on
    their order only, never on time. All operands are seen as `rows` rows of a contiguous block of
    `count` elements of `dtype` (rows = 1 for a collective along the leading dim):

    ================  ====================  ====================  =================================
    kind              input of a device     output of a device    meaning for member d of a group
    ================  ====================  ====================  =================================
    all_reduce        (rows, count)         (rows, count)         op over the members' inputs
    broadcast         (rows, count)         (rows, count)         the input of member `root`
    permute           (rows, count)         (rows, count)         the input of s for (s, d) in
                                                                  `pairs`, else zeros
    all_gather        (rows, count)         (rows, G, count)      out[:, j] = in of member j
    reduce_scatter    (rows, G, count)      (rows, count)         op over the members' in[:, d]
    all_to_all        (rows, G, count)      (rows, G, count)      out[:, j] = in of member j [:, d]
    exchange          any                   (rows, count)         the `boxes` whose target is d
    ================  ====================  ====================  =================================

    `op` is one of sum, prod, max, min, and, or, xor. `pairs` hold positions within each group.
    The boxes of an exchange do not overlap, and fill every output.
    If the outputs of a group `is_one` place, it is written once.
    Only all_reduce may have equal input and output slots; apart from that they must not overlap.
    A group of which only some devices arrive (their loops or branches differ) is a
    `CollectiveError`; `name` is its name for the step, best with the user's source line.
    """

    kind: CollectiveKind
    input: P
    output: P
    dtype: np.dtype
    count: int
    groups: tuple[tuple[int, ...], ...]
    rows: int = 1
    op: str | None = None
    pairs: tuple[tuple[int, int], ...] = ()
    root: int = 0
    boxes: tuple[Box, ...] = ()
    name: str = "collective"
    is_one: bool = False


@record
class RankExchange(Generic[P]):
    """A collective with other processes of this host, through memory that they share.

    All local devices must reach it. `rounds` are this process's actions, `state` is the address
    of the group's words; both come from the group, whose `take` gives the error that stopped a run.
    `label` is its number in the flight record.
    Only an all_reduce may have equal input and output places.
    """

    rounds: ExchangePlan
    state: int
    take: Callable[[], BaseException]
    input: P
    output: P
    scratch: P | None = None
    label: int = 0
    name: str = "collective"
    meeting: Meeting | None = None


@record
class Loop(Generic[T, S]):
    """Run `body` a known number of times: `trips` is a number, or a slot holding one.

    A slot is read once when the loop starts, as a signed integer of `trips_dtype`; devices may
    disagree. `reverse` runs the indices from trips - 1 down to 0. `max_trips` bounds a count read
    from a slot for the checks of strided slots; larger counts are an error at run time.
    """

    trips: T
    body: tuple[S, ...]
    reverse: bool = False
    trips_dtype: np.dtype = np.dtype(np.int32)
    max_trips: int | None = None


@record
class Parallel(Generic[S]):
    """Run `body` for each index of the dims `trips`, in any order, on up to `lanes` threads.

    Each dim is a loop level of its own, the outermost first. Iterations must not depend on each
    other; no callback, no collective and no other parallel loop on several lanes inside.
    Temporaries of an iteration lie in buffers that the loop of this `number` owns. One thread at a
    time takes a lane: in a program the slots of these buffers move with the level `LANE`.
    """

    trips: tuple[int, ...]
    body: tuple[S, ...]
    number: int = 0
    lanes: int = 1


@record
class While(Generic[P, S]):
    """Run `test`, read the bool at `predicate`, and as long as it is true run `body` and repeat.

    Devices may leave the loop at different times; those that left wait for the others.
    """

    test: tuple[S, ...]
    predicate: P
    body: tuple[S, ...]


@record
class Branch(Generic[P, S]):
    """Run one of `branches`, chosen by the integer at `index` (clamped into their range).

    Devices may choose different branches; each branch then runs for its devices only. A bool
    index chooses branch 0 for False and branch 1 for True.
    """

    index: P
    branches: tuple[tuple[S, ...], ...]
    dtype: np.dtype = np.dtype(np.int32)


@record
class Once(Generic[S]):
    """Run `body` on those of the present devices that are in `devices`, for all others too.

    Its results are in memory that is shared with the others: they wait for it, as for a
    collective.
    """

    devices: tuple[int, ...]
    body: tuple[S, ...]


# ---- programs ----------------------------------------------------------------------------------

# A text, as Python takes long to write such a type as a value.
Step: TypeAlias = "KernelStep | BatchStep | Movement | Block"
Movement: TypeAlias = "Copy[Slot] | Host[Slot] | Exchange[Slot] | RankExchange[Slot]"
Block: TypeAlias = (
    "Loop[int | Slot, Step] | Parallel[Step] | While[Slot, Step] | Branch[Slot, Step] | Once[Step]"
)


@record
class Program:
    """A list of steps and the sizes in bytes of the bases they address (None: not known).

    `devices` is the number of virtual devices that run the program in lockstep; each has its own
    frame with one pointer per base. Bases may be shared between devices that only read them, or
    write them in steps that run on one of them (`Once`).
    """

    bases: tuple[int | None, ...]
    steps: tuple[Step, ...]
    devices: int = 1


# ---- walks -------------------------------------------------------------------------------------


def blocks(step: S) -> tuple[tuple[S, ...], ...]:
    """The step lists nested in a step, in execution order."""
    found: tuple[Any, ...] = ()
    match step:
        case Loop() | Parallel() | Once():
            found = (step.body,)
        case BatchStep():
            found = (step.steps,)
        case While():
            found = step.test, step.body
        case Branch():
            found = step.branches
    return found


def walk(steps: Sequence[S]) -> list[S]:
    """All steps in order, those in loops and branches behind theirs."""
    found: list[S] = []
    for step in steps:
        found.append(step)
        for block in blocks(step):
            found += walk(block)
    return found


def with_blocks(step: Any, write: Callable[[Any], Iterable[Any]]) -> Any:
    """A step over other blocks: the result of `write` for each, in execution order."""
    match step:
        case Loop() | Parallel() | Once():
            return replace(step, body=tuple(write(step.body)))
        case While():
            return replace(step, test=tuple(write(step.test)), body=tuple(write(step.body)))
        case Branch():
            return replace(step, branches=tuple([tuple(write(b)) for b in step.branches]))
    return step


# The fields of each kind that are places: those that a step reads, and those that it writes.
PLACES: dict[type, tuple[tuple[str, ...], tuple[str, ...]]] = {
    Copy: (("source",), ("target",)),
    Exchange: (("input",), ("output",)),
    RankExchange: (("input",), ("output", "scratch")),
    While: (("predicate",), ()),
    Branch: (("index",), ()),
}


def with_places(step: Any, place: Callable[[Any], Any]) -> Any:
    """A step of a kind that keeps its record, over other places: the result of `place` for each."""
    if isinstance(step, Host):
        inputs, outputs = (
            tuple([View(place(view.place), view.shape, view.dtype) for view in views])
            for views in (step.inputs, step.outputs)
        )
        return replace(step, inputs=inputs, outputs=outputs)
    reads, writes = PLACES.get(type(step), ((), ()))
    found = {name: getattr(step, name) for name in (*reads, *writes)}
    placed = {name: place(ref) for name, ref in found.items() if ref is not None}
    return replace(step, **placed) if placed else step


def rounds_of(step: Any, unknown: int = 1) -> int:
    """How often a loop of a schedule runs its body; `unknown` for every other step."""
    if isinstance(step, Parallel):
        return math.prod(step.trips)
    return step.trips if isinstance(step, Loop) else unknown


def levels(step: Any) -> int:
    """The number of loop levels by which the blocks of a step are further in."""
    return len(step.trips) if isinstance(step, Parallel) else isinstance(step, Loop | While)
