"""Reports for errors of GPUs: the holders of memory, and the programs that may have failed.

The one idea: a GPU reports a failure when somebody waits for it, later and without a name. So each
device has a short list of the programs that are in its stream since the host last waited.
"""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from spmd.base.amounts import size_text
from spmd.base.device import Device
from spmd.base.errors import CudaError
from spmd.compile.cuda.driver import Driver, driver
from spmd.compile.cuda.program import CudaProgram
from spmd.compile.executable.backend import needs_less
from spmd.core.aval import ShapedArray
from spmd.sharding.array import Array
from spmd.sharding.future import DeviceMemory
from spmd.transport.nccl import WATCH

# Programs that are remembered, and kinds of arrays that are listed.
_MOST_PROGRAMS = 4
_MOST_KINDS = 5

# ---- which work --------------------------------------------------------------------------------

# By driver and device, in order, what is in the stream since the host last found it done.
_begun: dict[tuple[Driver, int], deque[CudaProgram]] = {}


def begun(gpu: Driver, device: int, program: CudaProgram) -> None:
    """Remember that a program is in a device's stream."""
    noted(gpu, device).append(program)


def noted(gpu: Driver, device: int) -> deque[CudaProgram]:
    """The programs in a device's stream, to which the next one is added."""
    found = _begun.get((gpu, device))
    if found is None:
        found = _begun[gpu, device] = deque(maxlen=_MOST_PROGRAMS)
    return found


def wait(gpu: Driver, device: int, synchronize: Callable[[], None], is_all: bool) -> None:
    """Wait for work of a device; an error names the programs that may have caused it.

    `is_all` says whether that is all that programs have put into the device's stream.
    """
    found = _begun.get((gpu, device))
    try:
        synchronize()
        WATCH.settle()
    except CudaError as error:
        WATCH.settle()
        if not found:
            raise
        programs = "\n".join(f"  {program.described}" for program in found)
        if gpu.entries_run_python:  # the emulator, which can be used again
            found.clear()
        raise CudaError(
            f"{error.text}\nSince the host last waited for CUDA device {device} it was given, the "
            f"newest last:\n{programs}"
        ) from None
    if found and is_all:
        found.clear()
    checks = _checks.get((gpu, device))
    if checks is not None and not checks.is_busy:
        checks.make()


# ---- checks of results ---------------------------------------------------------------------------

# More checks than this don't wait for a read: each keeps the operands of a call.
_MOST_CHECKS = 16


class _Checks(deque[Callable[[], None]]):
    """Checks of the results of calls, the oldest first."""

    is_busy = False

    def make(self, left: int = 0) -> None:
        """Make all but so many; after one that raises the others would tell of its consequences."""
        self.is_busy = True
        try:
            while len(self) > left:
                self.popleft()()
        except BaseException:
            self.clear()
            raise
        finally:
            self.is_busy = False


_checks: dict[tuple[Driver, int], _Checks] = {}


def defer(gpu: Driver, device: int, check: Callable[[], None]) -> None:
    """Let a check be made when the host next waits for a device."""
    checks = _checks.setdefault((gpu, device), _Checks())
    checks.append(check)
    if len(checks) > _MOST_CHECKS and not checks.is_busy:
        checks.make(_MOST_CHECKS)


# ---- holders of memory --------------------------------------------------------------------------


def memory_report(
    devices: Sequence[Device | None], arguments: Sequence[ShapedArray], work: int
) -> str:
    """A report of who holds memory on the fullest of some devices, and what would need less."""
    gpu = driver()
    numbers = [0 if d is None else d.local_hardware_id for d in devices]
    number = max(numbers, key=lambda n: gpu.memory_in_use(n)[0])
    kinds, held = _arrays_on(gpu, number)
    given = sum(aval.nbytes for aval in arguments)
    shown = [f"{count} of {kind}" for (kind, _), count in kinds[:_MOST_KINDS]]
    rest = sum(n * count for (_, n), count in kinds[_MOST_KINDS:])
    if rest:
        shown.append(f"others of {size_text(rest)}")
    other = max(0, gpu.memory_in_use(number)[0] - held)
    lines = [
        f"; its arguments are {size_text(given)}.",
        f"Arrays on cuda:{number} hold {size_text(held)}: {', '.join(shown) or 'none'}.",
    ]
    if other:
        lines.append(f"This call and constants of programs hold {size_text(other)}.")
    if held > given:
        lines.append("x.delete() frees an array that is not needed any more.")
    lines.append(needs_less(arguments, work))
    return "\n".join(lines)


def _arrays_on(gpu: Driver, number: int) -> tuple[list[tuple[tuple[str, int], int]], int]:
    """Counts of arrays on a GPU by kind and bytes, the largest together first; their bytes."""
    owners: dict[int, tuple[str, int]] = {}
    for x in gc.get_objects():
        owner: Any = None
        if type(x) is Array and isinstance(x.owner, DeviceMemory):
            owner = x.owner
        if owner is not None and (owner.driver, owner.device) == (gpu, number):
            owners.setdefault(id(owner), (x.aval.short(), x.nbytes))
    kinds = Counter(owners.values()).items()
    ordered = sorted(kinds, key=lambda each: (-each[0][1] * each[1], each[0]))
    return ordered, sum(n for _, n in owners.values())
