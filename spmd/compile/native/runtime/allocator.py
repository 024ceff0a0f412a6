"""Memory that is handed out again, so that large results are cheap.

The one idea: touching fresh pages costs more than computing their contents (40 MB: 15 ms
fresh, 2 ms with huge pages, 1 ms reused), so a freed block waits in the list of its size class for
the next result of that size. A block is freed by its reference count, at once and on any thread;
`alloc` of a size seen before is a look-up, a pop and a small object: 0.2 us.

All blocks are aligned to 64 bytes and at least 64 bytes long, so a zero-sized array has an address
too. Contents are undefined.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import numpy as np

from spmd.base.amounts import size_text
from spmd.base.errors import OutOfMemoryError
from spmd.base.fork import guard
from spmd.sharding.array import BYTES_OFFSET

ALIGNMENT = 64
# From here on blocks start on a huge page and ask for huge pages.
HUGE_PAGE = 2 * 2**20
# Free lists hold this much per size class below LARGE, and `LIMIT` in all classes above it.
LARGE = 2**20
SMALL_CLASS_LIMIT = 4 * 2**20
LIMIT = 2 * 2**30

# Results that are small together live in a `bytes` object: made without a call and freed without a
# finaliser, which is a third of a block's price.
SMALL_ALIGNMENT = 16
_sample = b"where is it?"
_place = ctypes.cast(ctypes.c_char_p(_sample), ctypes.c_void_p).value
SMALL_BYTES = 4096 if _place == id(_sample) + BYTES_OFFSET else 0

_libc = ctypes.CDLL(None)
_posix_memalign = _libc.posix_memalign
_posix_memalign.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t]
_free = _libc.free
_free.argtypes = [ctypes.c_void_p]
_free.restype = None
_madvise = getattr(_libc, "madvise", None)
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)
if _madvise is not None:
    _madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def size_class(nbytes: int) -> int:
    """The capacity that serves a request: four classes to each power of two."""
    if nbytes <= ALIGNMENT:
        return ALIGNMENT
    step = max(ALIGNMENT, 1 << ((nbytes - 1).bit_length() - 3))
    return -(-nbytes // step) * step


class SizeClass:
    """The free blocks of one capacity. `list.append` and `list.pop` are atomic under the GIL."""

    __slots__ = ("capacity", "free", "most")

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.free: list[int] = []
        self.most = SMALL_CLASS_LIMIT // capacity


class Block:
    """Memory owned by this object's holders; it returns to its list with the last reference.

    Only `alloc` and entry points make blocks, and set both fields themselves: an `__init__` would
    cost a quarter more. The first entry point puts native code in the place of `__del__`.
    """

    __slots__ = ("__weakref__", "address", "home")

    address: int
    home: SizeClass

    @property
    def capacity(self) -> int:
        """The bytes that may be used."""
        return self.home.capacity

    def __del__(self) -> None:
        home = self.home
        if len(home.free) < home.most:
            home.free.append(self.address)
        else:
            give_back(home, self.address)

    def view(self, shape: tuple[int, ...], dtype: Any, offset: int = 0) -> np.ndarray:
        """A writable C-contiguous array over the block, which keeps the block alive."""
        dtype = np.dtype(dtype)
        needed = offset + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if offset < 0 or needed > self.capacity:
            raise ValueError(
                f"a view of {shape} {dtype} at byte {offset} needs {needed} bytes; "
                f"the block has {self.capacity}"
            )
        # NumPy keeps the buffer alive, and the buffer keeps us: ctypes arrays take attributes.
        memory: Any = (ctypes.c_char * self.capacity).from_address(self.address)
        memory.block = self
        return np.ndarray(shape, dtype, memory, offset)


# ---- the allocator -----------------------------------------------------------------------------

# Classes by capacity, and by requested size as a shortcut past the arithmetic.
_classes: dict[int, SizeClass] = {}
_by_request: dict[int, SizeClass] = {}
# A program may ask for ever new sizes; the shortcut is only for those that come back.
_MOST_REQUESTS = 4096

# Guards the lists of large blocks while they are counted and cut, and the system's account.
_lock = guard("memory")


class _System:
    """Counters of the system's memory: it is asked rarely, so counting costs nothing."""

    def __init__(self) -> None:
        self.reserved = self.most_reserved = self.largest = self.asked = 0

    def took(self, nbytes: int) -> None:
        """Note a block from the system."""
        with _lock:
            self.asked += 1
            self.reserved += nbytes
            self.most_reserved = max(self.most_reserved, self.reserved)
            self.largest = max(self.largest, nbytes)

    def free(self, home: SizeClass, address: int) -> None:
        """Give a block back to the system."""
        _free(address)
        with _lock:
            self.reserved -= home.capacity


_system = _System()


def alloc(nbytes: int) -> Block:
    """A block of at least `nbytes` bytes."""
    try:
        home = _by_request[nbytes]
    except KeyError:
        home = _find_class(nbytes)
    try:
        return alloc_of(home)
    except MemoryError:
        raise OutOfMemoryError(f"no memory for {size_text(nbytes)} ({nbytes:,} bytes)") from None


def alloc_of(home: SizeClass) -> Block:
    """A block of a size class."""
    try:
        address = home.free.pop()
    except IndexError:
        address = _fresh(home.capacity)
    block = Block()
    block.home = home
    block.address = address
    return block


def home_of(nbytes: int) -> SizeClass:
    """The size class that serves a request."""
    return _by_request.get(nbytes) or _find_class(nbytes)


def _find_class(nbytes: int) -> SizeClass:
    if nbytes < 0:
        raise ValueError(f"alloc of {nbytes} bytes")
    capacity = size_class(nbytes)
    home = _classes.setdefault(capacity, SizeClass(capacity))
    if len(_by_request) < _MOST_REQUESTS:
        _by_request[nbytes] = home
    return home


def _fresh(capacity: int) -> int:
    huge = capacity >= HUGE_PAGE
    place = ctypes.c_void_p()
    alignment = HUGE_PAGE if huge else ALIGNMENT
    if _posix_memalign(ctypes.byref(place), alignment, capacity):
        # Blocks in the free lists may be the missing memory.
        trim()
        if _posix_memalign(ctypes.byref(place), alignment, capacity):
            raise MemoryError(f"no memory for an array of {capacity / 2**20:.1f} MiB")
    address = place.value or 0
    _system.took(capacity)
    if huge and _madvise is not None and _MADV_HUGEPAGE is not None:
        # Advice only: a kernel without huge pages refuses, and small pages work too.
        _madvise(address, capacity, _MADV_HUGEPAGE)
    return address


def give_back(home: SizeClass, address: int) -> None:
    """Free a block, or keep it if it is large and there is room for it."""
    if sys is None or sys.is_finalizing():  # modules lose their names before the last blocks
        return
    if home.capacity < LARGE or home.capacity > LIMIT:
        _system.free(home, address)
        return
    with _lock:
        home.free.append(address)
        _cut_large(LIMIT)


def _cut_large(limit: int) -> None:
    """Free the largest waiting blocks until those from LARGE on hold at most `limit` bytes."""
    large = [c for c in list(_classes.values()) if c.capacity >= LARGE]
    waiting = sum(c.capacity * len(c.free) for c in large)
    for home in sorted(large, key=lambda c: -c.capacity):
        while waiting > limit and home.free:
            try:
                _system.free(home, home.free.pop())
            except IndexError:  # another thread took the last one
                break
            waiting -= home.capacity


def trim() -> None:
    """Give all waiting memory back to the system."""
    with _lock:
        _cut_large(0)
        for home in list(_classes.values()):
            while home.free:
                try:
                    _system.free(home, home.free.pop())
                except IndexError:
                    break


def waiting_bytes() -> int:
    """The bytes that wait in the free lists."""
    return sum(c.capacity * len(c.free) for c in list(_classes.values()))


def statistics() -> dict[str, int]:
    """Data of `spmd.debug.memory_stats`; small results, which are bytes objects, don't count."""
    with _lock:
        waiting = waiting_bytes()
        return {
            "bytes_in_use": _system.reserved - waiting,
            "bytes_waiting": waiting,
            "bytes_reserved": _system.reserved,
            "peak_bytes_reserved": _system.most_reserved,
            "largest_alloc_size": _system.largest,
            "num_allocs": _system.asked,
        }
