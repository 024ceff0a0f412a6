"""How a process waits for a word of shared memory to change: spin briefly, yield, then park.

Ranks often outnumber cores, so a waiter must give its core away. Parking is a futex on Linux and a
short sleep elsewhere. Every park has a time limit: a lost wake-up costs a millisecond, never a
hang, and between parks the waiter looks for ranks that failed.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
import time
from collections.abc import Callable

from spmd.base.record import record

# Reads of the word before the first yield, while every rank has a core: about 10 µs, which covers
# the skew of ranks that run the same program. With more ranks than cores a spin only keeps the
# awaited rank from running.
SPINS = 200
# Half a millisecond: the spread of a few large copies. Waking up costs a tenth of that.
YIELDS = 1000
# The same for native code, which reads the word between two pauses of the processor, 20 to 60 ns
# each: so short that ranks which share a core, though there are enough, soon give it to each other.
PAUSES = 40
FIRST_PARK_SECONDS = 0.001
LONGEST_PARK_SECONDS = 0.05

FUTEX_WAIT, FUTEX_WAKE = 0, 1
_SYSCALL_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
MOST_WAITERS = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def futex_number() -> int | None:
    """The number of the system call, where there is one that compares a counter's low half."""
    if not sys.platform.startswith("linux") or sys.byteorder != "little":
        return None
    return _SYSCALL_NUMBERS.get(platform.machine())


def _find_futex() -> Callable[[int, int, int, _Timespec | None], int] | None:
    number = futex_number()
    if number is None:
        return None
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long

    def futex(address: int, operation: int, value: int, timeout: _Timespec | None) -> int:
        limit = ctypes.byref(timeout) if timeout is not None else None
        # Not FUTEX_PRIVATE: the waiters are other processes.
        return syscall(
            ctypes.c_long(number),
            ctypes.c_void_p(address),
            ctypes.c_int(operation),
            ctypes.c_uint32(value & 0xFFFFFFFF),
            limit,
            None,
            ctypes.c_int(0),
        )

    return futex


_futex = _find_futex()
_fence_a, _fence_b = threading.Lock(), threading.Lock()


def fence() -> None:
    """A full memory fence, from Python's own operations.

    Releasing one lock and acquiring another keeps loads and stores on their side, also on ARM,
    where plain stores to shared memory may otherwise become visible out of order. On x86 a single
    locked instruction does it.
    """
    _fence_a.acquire()
    _fence_a.release()
    if not _ORDERED_STORES:
        _fence_b.acquire()
        _fence_b.release()


_ORDERED_STORES = platform.machine() in ("x86_64", "AMD64", "i686")


@record
class Patience:
    """How long to spin and to yield before parking."""

    spins: int
    yields: int
    pauses: int = 0

    @staticmethod
    def for_load(ranks: int, cores: int) -> Patience:
        """Spin only while every rank can have a core of its own."""
        if ranks <= cores:
            return Patience(SPINS, YIELDS, PAUSES)
        return Patience(0, 20)


def park(address: int, seen: int, seconds: float) -> None:
    """Sleep until the 64-bit word at `address` no longer is `seen`, or for `seconds`."""
    if _futex is None:
        time.sleep(min(seconds, FIRST_PARK_SECONDS))
        return
    whole = int(seconds)
    limit = _Timespec(whole, int((seconds - whole) * 1e9))
    # The futex compares the low half, which a counter changes at every step.
    _futex(address, FUTEX_WAIT, seen, limit)


def wake(address: int) -> None:
    """Wake every process that parks on the word at `address`."""
    if _futex is not None:
        _futex(address, FUTEX_WAKE, MOST_WAITERS, None)


def cores_of(affinities: list[list[int]]) -> int:
    """The number of cores that a set of processes may use together, from each one's list."""
    return len({core for cores in affinities for core in cores}) or os.cpu_count() or 1


def own_cores() -> list[int]:
    """The cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
