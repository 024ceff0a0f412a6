"""Reads of the memory of another rank's process, where the system allows them.

Large arrays then move in one copy, from where they are to where they go, instead of two through
the slots. Linux has a system call for it; whether a process may use it on another depends on users,
containers and the Yama module, so ranks try it once and agree: all of a group read, or none does.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys

import numpy as np

_SYSCALL_NUMBERS = {"x86_64": 310, "aarch64": 270, "riscv64": 270, "ppc64le": 351, "s390x": 340}
_PR_SET_PTRACER = 0x59616D61

# The most that one call moves: the system cuts longer ones off at 2 GiB.
MOST_BYTES = 1 << 30
# The rows of one call: the system takes up to 1024, native code keeps so many on its stack.
MOST_ROWS = 64


def readv_number() -> int | None:
    """The number of the system call `process_vm_readv`, where there is one."""
    if not sys.platform.startswith("linux"):
        return None
    return _SYSCALL_NUMBERS.get(platform.machine())


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def read(process: int, address: int, target: np.ndarray) -> None:
    """Fill contiguous bytes from an address of a process; `OSError` where that is not allowed."""
    number = readv_number()
    if number is None:
        raise OSError("this system has no process_vm_readv")
    if not target.nbytes:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    for low in range(0, target.nbytes, MOST_BYTES):
        width = min(MOST_BYTES, target.nbytes - low)
        ours = _Span(target.ctypes.data + low, width)
        theirs = _Span(address + low, width)
        done = libc.syscall(
            ctypes.c_long(number),
            ctypes.c_long(process),
            ctypes.byref(ours),
            ctypes.c_ulong(1),
            ctypes.byref(theirs),
            ctypes.c_ulong(1),
            ctypes.c_ulong(0),
        )
        if done != width:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code) if done < 0 else f"only {done} bytes of {width}")


def let_siblings_read() -> None:
    """Let the processes that this one's parent started read here, where Yama would forbid it."""
    if sys.platform.startswith("linux"):
        # An error says that there is no Yama, or that nothing is forbidden.
        ctypes.CDLL(None).prctl(
            ctypes.c_int(_PR_SET_PTRACER), ctypes.c_ulong(os.getppid()), *[ctypes.c_ulong(0)] * 3
        )


class Trial:
    """Bytes at a place of this process that the other ranks try to read."""

    def __init__(self) -> None:
        self._bytes = np.frombuffer(os.urandom(16), np.uint8)

    @property
    def offer(self) -> tuple[int, int, bytes]:
        """The facts for the other ranks: a process, an address, and the bytes to find there."""
        return os.getpid(), self._bytes.ctypes.data, self._bytes.tobytes()


def can_read(offer: tuple[int, int, bytes]) -> bool:
    """Whether this process finds the offered data of another one at its place."""
    process, address, wanted = offer
    found = np.zeros(len(wanted), np.uint8)
    try:
        read(process, address, found)
    except OSError:
        return False
    return found.tobytes() == wanted
