"""The program format of the CPU runtime: a frozen list of steps over a frame of base pointers.

The one idea: a compiled function is *data*. Each virtual device owns a **frame**, an array of base
pointers (arena, inputs, outputs, constants) in the order of `Program.bases`. A step names its
operands by `Slot` (base, byte offset), so the same program runs for every device and every call by
exchanging frames only. `spmd.compile.native.runtime.run` turns a Program into native words and runs
it.

Loops nest. Level 0 is the outermost loop (`ForStep` or `WhileStep`), level 1 the loop in it, and
so on; a slot may advance by a fixed number of bytes per iteration of any enclosing loop, so a scan
body reads `xs[i]` and writes `ys[i]` in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from spmd.base.record import field, record

if TYPE_CHECKING:
    from spmd.transport.shm.plan import ExchangePlan

CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast"
]

# The "loop level" at which a slot moves with the lane of a `ParallelStep`.
LANE = -1

# What a loop with an unknown trip count is assumed to run when the runner estimates its cost.
ASSUMED_TRIPS = 8


@record
class Slot:
    """An address relative to a frame: `frame[base] + offset + sum(index[level] * stride)`.

    `strides` lists (loop level, bytes per iteration). The index of a reversed `ForStep` counts
    down from trips - 1; the index of a `WhileStep` counts its iterations from 0. The level `LANE`
    is not a loop: its index is the lane of the parallel loop around.
    """

    base: int
    offset: int = 0
    strides: tuple[tuple[int, int], ...] = ()


@record
class View:
    """A slot seen as a C-contiguous array, the way a callback receives it."""

    slot: Slot
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """The bytes that the array occupies."""
        return math.prod(self.shape) * self.dtype.itemsize  # asked in every callback


@record
class KernelStep:
    """Call native code `void fn(ptr args, ptr sizes, i64 begin, i64 end)` over `units` of work.

    Units are independent: the runner may split [0, units) over threads in any way. `cost_ns` is
    the estimated time of one unit. `sizes` are run-time numbers handed to the function as an array
    of i64. With `scratch` > 0 the function finds one more pointer behind its args: that many bytes
    (64-byte aligned), private to the calling thread and undefined at entry. `extents`, if given,
    says how many bytes from each slot's address the kernel may touch; they are checked against the
    bases when the program is built. An `is_open` function may take any time: its work is not known.
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


@record
class CopyStep:
    """Copy `nbytes` bytes from `source` to `target`; the two may overlap."""

    target: Slot
    source: Slot
    nbytes: int


@record
class CallbackStep:
    """Call Python: `function(device, inputs, outputs)` with lists of NumPy views of the slots.

    The inputs are read-only views, the outputs are to be filled in place; neither may be kept
    after the call returns. With `together=True` one call serves all local devices,
    `function(devices, inputs, outputs)`, where `devices` is the tuple of device numbers and
    `inputs[j]`, `outputs[j]` are the lists of views of `devices[j]`; it is a collective, that is
    all devices must reach it. An exception stops the program and is raised from `run`.
    """

    function: Callable[[Any, list, list], None]
    inputs: tuple[View, ...]
    outputs: tuple[View, ...]
    together: bool = False
    name: str = "callback"


@record
class ForStep:
    """Run `body` a known number of times: `trips` is a number, or a slot holding one.

    A slot is read once when the loop starts, as a signed integer of `trips_dtype`; devices may
    disagree. `reverse` runs the indices from trips - 1 down to 0. `max_trips` bounds a count read
    from a slot for the checks of strided slots; larger counts are an error at run time.
    """

    trips: int | Slot
    body: tuple[Step, ...]
    reverse: bool = False
    trips_dtype: np.dtype = field(default_factory=lambda: np.dtype(np.int32))
    max_trips: int | None = None


@record
class ParallelStep:
    """Run `body` for each index of the dims `trips`, in any order, on up to `lanes` threads.

    Each dim is a loop level of its own, the outermost first. A lane is taken by one thread at a
    time, so what a round keeps for itself lies in slots that move with the level `LANE`. Rounds
    must not depend on each other; no callback, no collective and no other parallel loop inside.
    """

    trips: tuple[int, ...]
    body: tuple[Step, ...]
    lanes: int


@record
class BatchStep:
    """Run kernels that do not depend on each other, their units in any order, as one shared job.

    Sixty small updates of an optimizer, each too short to share out, are long enough together.
    """

    steps: tuple[KernelStep, ...]


@record
class WhileStep:
    """Run `test`, read the bool at `predicate`, and as long as it is true run `body` and repeat.

    Devices may leave the loop at different times; those that left wait for the others.
    """

    test: tuple[Step, ...]
    predicate: Slot
    body: tuple[Step, ...]


@record
class CondStep:
    """Run one of `branches`, chosen by the integer at `index` (clamped into their range).

    Devices may choose different branches; each branch then runs for its devices only. A bool
    index chooses branch 0 for False and branch 1 for True.
    """

    index: Slot
    branches: tuple[tuple[Step, ...], ...]
    index_dtype: np.dtype = field(default_factory=lambda: np.dtype(np.int32))


@record
class CollectiveStep:
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
    ================  ====================  ====================  =================================

    `op` is one of sum, prod, max, min, and, or, xor. `pairs` hold positions within each group.
    Only all_reduce may have equal input and output slots; apart from that they must not overlap.
    A group of which only some devices arrive (their loops or branches differ) is a
    `CollectiveError`; `name` is what it calls the step, best with the user's source line.
    """

    kind: CollectiveKind
    input: Slot
    output: Slot
    dtype: np.dtype
    count: int
    groups: tuple[tuple[int, ...], ...]
    rows: int = 1
    op: str | None = None
    pairs: tuple[tuple[int, int], ...] = ()
    root: int = 0
    name: str = "collective"


@record
class RankStep:
    """A collective with other processes of this host, through memory that they share.

    All local devices must reach it. `rounds` say what this process does, `state` is the address of
    the group's words; both come from the group, whose `take` gives the error that stopped a run.
    `label` is what the flight record calls it.
    Only an all_reduce may have equal input and output slots.
    """

    rounds: ExchangePlan
    state: int
    take: Callable[[], BaseException]
    input: Slot
    output: Slot
    scratch: Slot | None = None
    label: int = 0
    name: str = "collective"


Step = (
    KernelStep
    | CopyStep
    | CallbackStep
    | ForStep
    | ParallelStep
    | BatchStep
    | WhileStep
    | CondStep
    | CollectiveStep
    | RankStep
)


@record
class Program:
    """A list of steps and the sizes in bytes of the bases they address (None: not known).

    `devices` is the number of virtual devices that run the program in lockstep; each has its own
    frame with one pointer per base. Bases may be shared between devices where all only read.
    """

    bases: tuple[int | None, ...]
    steps: tuple[Step, ...]
    devices: int = 1


def blocks_of(step: Step) -> tuple[tuple[Step, ...], ...]:
    """The step lists nested in `step`, in execution order."""
    match step:
        case ForStep() | ParallelStep():
            return (step.body,)
        case BatchStep():
            return (step.steps,)
        case WhileStep():
            return (step.test, step.body)
        case CondStep():
            return step.branches
        case _:
            return ()


def walk(steps: Sequence[Step]) -> Iterator[Step]:
    """All steps, those nested in loops and branches included."""
    for step in steps:
        yield step
        for block in blocks_of(step):
            yield from walk(block)
