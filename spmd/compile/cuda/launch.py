"""A kernel as data: functions in launch order and their scratch arrays, and machine code."""

from __future__ import annotations

from spmd.base.record import record

# The distribution that NVRTC comes in.
NVRTC_WHEEL = "nvidia-cuda-nvrtc"
# Bytes that every GPU from sm_80 on gives a block without asking; more needs the launcher's opt-in.
SHARED_WITHOUT_ASKING = 48 * 1024
# The least limit of what blocks may ask for among the GPUs from sm_80 on.
MOST_SHARED = 99 * 1024


@record
class Launch:
    """How a function is started: blocks of the grid, threads (x, y) of a block, shared bytes.

    All shared memory is dynamic, so `shared` is all there is. Above `SHARED_WITHOUT_ASKING` the
    launcher sets the function's maximum first.
    """

    grid: int
    block: tuple[int, int]
    shared: int = 0

    @property
    def threads(self) -> int:
        """The threads of a block."""
        return self.block[0] * self.block[1]


@record
class Function:
    """One `__global__` function: its symbol (a hash of its text), text, and launch.

    `arguments` numbers its parameters: the kernel's arguments, then the temporaries. `barriers`
    says whether its threads meet (in `__syncthreads` or a shuffle).
    """

    symbol: str
    text: str
    launch: Launch
    arguments: tuple[int, ...]
    barriers: bool


@record
class Rendered:
    """A kernel for CUDA: functions to launch one after the other on one stream.

    `temporaries` are scratch arrays, (dtype, elements) each, that only these functions touch.
    """

    functions: tuple[Function, ...]
    temporaries: tuple[tuple[str, int], ...] = ()


@record
class Usage:
    """A function's use of a multiprocessor: registers of a thread, bytes, barriers."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    barriers: int

    def __str__(self) -> str:
        spills = self.spill_stores + self.spill_loads
        return f"{self.registers} registers, {spills} bytes spilled, {self.barriers} barriers"


@record
class Compiled:
    """Machine code for one architecture, each function's resources, and what it was made of."""

    arch: str
    cubin: bytes
    usage: dict[str, Usage]
    ptx: str = ""
    source: str = ""
