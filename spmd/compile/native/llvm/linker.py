"""Object code made ready to run: sections are placed in memory, and told where the others are.

The one idea: our code needs little of a linker, and that little is a page of arithmetic. A text
becomes code, constants and sometimes variables; its references are to the same module, to one
that is linked with it, or to exports of the process. Functions of the process may be further away
than a call reaches, so calls go by a stub behind the code that reads a table of addresses. Objects
with anything else (code of other processors, tables for unwinding, thread-local variables) are left
to LLVM's linker, which takes several times as long and first needs LLVM.

Formulas: System V Application Binary Interface, AMD64 Architecture Processor Supplement, table 4.9.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import TypeAlias

from spmd.base.record import field, record

# ELF, 64 bits, little-endian, System V; and in the header: relocatable, x86-64.
_IDENT = b"\x7fELF\x02\x01\x01\x00"
_RELOCATABLE_X86_64 = (1, 62)
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")
# Types and flags of sections.
_PROGRAM, _SYMBOLS, _RELOCATIONS, _ZEROS = 1, 2, 4, 8
_IGNORED_TYPES = (0, 3, 0x6FFF4C03)  # nothing, names, LLVM's notes for linkers of programs
_WRITTEN, _LOADED, _EXECUTED, _PER_THREAD = 1, 2, 4, 0x400
# Symbols: bindings, types, sections that are none.
_LOCAL, _GLOBAL = 0, 1
_KINDS = (0, 1, 2, 3, 4)  # no type, variable, function, section, file
_NOWHERE, _FIRST_RESERVED = 0, 0xFF00
# Relocations: an address; a distance; one to a function; one to the entry of a table of addresses.
_ADDRESS, _DISTANCE, _CALL, _WIDE_DISTANCE, _ENTRIES = 1, 2, 4, 24, (9, 41, 42)
_STUB = b"\xff\x25"  # jmp [rip + distance]
_STUB_BYTES = 8
_WORD = 8
_PAGE = mmap.PAGESIZE
_MOST_BYTES = 2**31 - 1  # distances have 32 bits
_NONE: Mapping[str, int] = MappingProxyType({})


# The errors of reading numbers and names where something else stands.
_DAMAGED = (struct.error, LookupError, ValueError, OverflowError)


class UnfamiliarError(Exception):
    """An object has something that is not linked here."""


@record(frozen=False)
class _Section:
    """A section that is loaded: its bytes, or how many zeros, and later its offset in memory."""

    data: bytes
    zeros: int
    alignment: int
    is_written: bool
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return len(self.data) + self.zeros


# The place of a symbol: its section, and its distance from the section's start.
_Place: TypeAlias = tuple[_Section, int]


@record
class _Reference:
    """A place in a section to be filled in: how, with which symbol, and the addend."""

    section: _Section
    place: int
    kind: int
    symbol: str | int
    addend: int


@record
class _Object:
    """The loaded part of an object; symbols without a name are known by their number."""

    sections: list[_Section] = field(default_factory=list)
    symbols: dict[str | int, _Place] = field(default_factory=dict)
    references: list[_Reference] = field(default_factory=list)


# ---- reading -----------------------------------------------------------------------------------


def _read(code: bytes) -> _Object:
    """The parts of an object."""
    if code[: len(_IDENT)] != _IDENT or struct.unpack_from("<HH", code, 16) != _RELOCATABLE_X86_64:
        raise UnfamiliarError("not an object for x86-64")
    (start,) = struct.unpack_from("<Q", code, 40)
    size, count = struct.unpack_from("<HH", code, 58)
    headers = [_SECTION.unpack_from(code, start + size * k) for k in range(count)]
    made = _Object()
    loaded: dict[int, _Section] = {}
    for number, (_, kind, flags, _, offset, nbytes, _, _, alignment, _) in enumerate(headers):
        if flags & _LOADED:
            if kind not in (_PROGRAM, _ZEROS) or flags & _PER_THREAD:
                raise UnfamiliarError(f"a section of type {kind:#x} with flags {flags:#x}")
            if alignment > _PAGE:
                raise UnfamiliarError(f"a section that is aligned to {alignment} bytes")
            data = code[offset : offset + nbytes] if kind == _PROGRAM else b""
            zeros = nbytes if kind == _ZEROS else 0
            section = _Section(data, zeros, max(alignment, 1), bool(flags & _WRITTEN))
            loaded[number] = section
            made.sections.append(section)
        elif kind not in (_PROGRAM, _SYMBOLS, _RELOCATIONS, *_IGNORED_TYPES):
            raise UnfamiliarError(f"a section of type {kind:#x}")
    names = {
        number: _read_symbols(code, headers, number, loaded, made)
        for number, header in enumerate(headers)
        if header[1] == _SYMBOLS
    }
    for _, kind, _, _, offset, nbytes, table, target, _, _ in headers:
        if kind == _RELOCATIONS and target in loaded:
            for place, info, addend in _RELOCATION.iter_unpack(code[offset : offset + nbytes]):
                symbol = names[table][info >> 32]
                made.references.append(
                    _Reference(loaded[target], place, info & 0xFFFFFFFF, symbol, addend)
                )
    return made


def _read_symbols(
    code: bytes,
    headers: Sequence[tuple[int, ...]],
    table: int,
    loaded: Mapping[int, _Section],
    made: _Object,
) -> list[str | int]:
    """Note the symbols of a table; give the name of each, or its number if it is local."""
    offset, nbytes, link = headers[table][4], headers[table][5], headers[table][6]
    texts = headers[link][4]
    names: list[str | int] = []
    for number, (name, info, visibility, where, value, _) in enumerate(
        _SYMBOL.iter_unpack(code[offset : offset + nbytes])
    ):
        binding, kind = info >> 4, info & 15
        if binding not in (_LOCAL, _GLOBAL) or kind not in _KINDS or visibility:
            raise UnfamiliarError(f"a symbol of type {info:#x}")
        text = code[texts + name : code.index(b"\0", texts + name)].decode()
        names.append(number if binding == _LOCAL else text)
        if where in loaded:
            made.symbols[names[-1]] = loaded[where], value
        elif where >= _FIRST_RESERVED and binding == _GLOBAL:
            raise UnfamiliarError(f"the symbol {text} in no section")
    return names


# ---- placing -----------------------------------------------------------------------------------


def link(codes: Sequence[bytes], known: Mapping[str, int] = _NONE) -> list[dict[str, int]]:
    """Load objects that may refer to each other; give the addresses of their symbols.

    They may refer to the symbols in `known`, too, and to the exports of the process.

    An `UnfamiliarError` says that nothing was loaded, and that another linker is needed. Loaded
    objects stay for the life of the process. Code is never writable when it can run.
    """
    try:
        return _link([_read(code) for code in codes], known)
    except _DAMAGED as error:
        raise UnfamiliarError(f"not an object, or a damaged one: {error}") from error


def _link(objects: Sequence[_Object], known: Mapping[str, int]) -> list[dict[str, int]]:
    """Lay out all sections, fill in their references, and map them as executable memory."""
    sections = [section for one in objects for section in one.sections]
    shared: dict[str, _Place] = {}
    for one in objects:
        for name, place in one.symbols.items():
            if isinstance(name, str) and shared.setdefault(name, place) is not place:
                raise UnfamiliarError(f"two definitions of {name}")
    entries = _entries(objects, shared)
    addresses = [None if name in shared else known.get(name) or _exported(name) for name in entries]
    # After read-only data: the table of addresses, and a stub for each.
    table = _aligned(_arrange(0, [s for s in sections if not s.is_written]), _WORD)
    stubs = table + _WORD * len(entries)
    filled = stubs + _STUB_BYTES * len(entries)
    writable = _aligned(filled, _PAGE)
    nbytes = max(_arrange(writable, [s for s in sections if s.is_written]), _PAGE)
    if nbytes > _MOST_BYTES:
        raise UnfamiliarError(f"{nbytes} bytes, which is further than distances reach")
    # Zeros are last, and left as they are.
    filled = max([filled, *[s.offset + len(s.data) for s in sections if s.data]])
    memory = bytearray(filled)
    for section in sections:
        memory[section.offset : section.offset + len(section.data)] = section.data
    slots: dict[str, tuple[int, int]] = {}
    for number, name in enumerate(entries):
        entry, stub = slots[name] = table + _WORD * number, stubs + _STUB_BYTES * number
        struct.pack_into("<2si", memory, stub, _STUB, entry - (stub + 6))
    base = _reserve(nbytes)
    try:
        for (entry, _), name, address in zip(slots.values(), entries, addresses, strict=True):
            if address is None:
                section, value = shared[name]
                address = base + section.offset + value
            struct.pack_into("<Q", memory, entry, address)
        for one in objects:
            _fill(memory, base, one, shared, slots)
        ctypes.memmove(base, (ctypes.c_char * filled).from_buffer(memory), filled)
        if _mprotect(base, writable, mmap.PROT_READ | mmap.PROT_EXEC):
            raise UnfamiliarError("memory that may not be made executable")
    except BaseException:
        _munmap(base, nbytes)
        raise
    return [
        {
            name: base + section.offset + value
            for name, (section, value) in one.symbols.items()
            if isinstance(name, str)
        }
        for one in objects
    ]


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _entries(objects: Sequence[_Object], shared: Mapping[str, _Place]) -> list[str]:
    """The names that need an entry of the table of addresses, in the order of their appearance."""
    names: dict[str, None] = {}
    for one in objects:
        for reference in one.references:
            name = reference.symbol
            if isinstance(name, str) and (name not in shared or reference.kind in _ENTRIES):
                names[name] = None
    return list(names)


def _arrange(start: int, sections: Sequence[_Section]) -> int:
    """Give sections their offsets, from `start`; zeros come last. The end of the last."""
    for section in sorted(sections, key=lambda s: s.zeros > 0):
        section.offset = _aligned(start, section.alignment)
        start = section.offset + section.nbytes
    return start


def _fill(
    memory: bytearray,
    base: int,
    one: _Object,
    shared: Mapping[str, _Place],
    slots: Mapping[str, tuple[int, int]],
) -> None:
    """Fill in an object's references, in memory that will be at `base`."""
    for reference in one.references:
        kind, place = reference.kind, reference.section.offset + reference.place
        target = _target(reference, one, shared, slots) + reference.addend
        if kind == _ADDRESS:
            struct.pack_into("<Q", memory, place, base + target)
        elif kind == _WIDE_DISTANCE:
            struct.pack_into("<q", memory, place, target - place)
        elif kind in (_DISTANCE, _CALL, *_ENTRIES):
            struct.pack_into("<i", memory, place, target - place)
        else:
            raise UnfamiliarError(f"a relocation of type {kind}")


def _target(
    reference: _Reference,
    one: _Object,
    shared: Mapping[str, _Place],
    slots: Mapping[str, tuple[int, int]],
) -> int:
    """The offset of a reference's target."""
    kind, name = reference.kind, reference.symbol
    if isinstance(name, str):
        if kind in _ENTRIES:
            return slots[name][0]
        if name in shared:
            section, value = shared[name]
            return section.offset + value
        if kind == _CALL:
            return slots[name][1]
    elif name in one.symbols and kind not in _ENTRIES:
        section, value = one.symbols[name]
        return section.offset + value
    raise UnfamiliarError(f"a relocation of type {kind} with symbol {name}")


# ---- the process -------------------------------------------------------------------------------

_process = ctypes.CDLL(None)
_mmap, _munmap, _mprotect = _process.mmap, _process.munmap, _process.mprotect
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


def _reserve(nbytes: int) -> int:
    """Zeroed memory at the start of a page, for good."""
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = _mmap(None, nbytes, access, flags, -1, 0)
    if address == _FAILED:
        raise MemoryError(f"no memory for {nbytes} bytes of code")
    return address


@lru_cache(1024)
def _exported(name: str) -> int:
    """The address of an export of the process."""
    try:
        address = ctypes.cast(_process[name], ctypes.c_void_p).value
    except AttributeError:
        address = None
    if not address:
        raise UnfamiliarError(f"{name} is not exported by the process")
    return address
