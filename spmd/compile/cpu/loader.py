"""From LLVM IR text to callable addresses: the only door to llvmlite.

The one idea: code is content. A text is compiled once per process and, through the object cache,
once per machine; loaded code is never unloaded, so an address stays good for the life of the
process. No mid-level passes run unless asked for: kernel texts are written as they should be
compiled, and the passes would cost more than they gain.

LLVM takes about 2 ms for a module before it looks at any function, so texts that are new together
are compiled a few to a module: a unit. Under the name of a text the disk has its code, or says in
which unit that is.

llvmlite is imported at the first compile, because its import takes longer than that of all spmd.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import ModuleType
from typing import Any, TypeAlias

from spmd.compile.cpu.cache import entry_key, object_cache, source_digest
from spmd.compile.cpu.cores import available_cores
from spmd.core.config import config

# Functions and variables that others may look up: all definitions that are not private to the text.
# Both begin with letters that are searched for as they are, ten times as fast as by lines.
_FUNCTION = re.compile(r"\ndefine (?!internal |private )[^@\n]*@([\w.$]+)")
_VARIABLE = re.compile(r"\n@([\w.$]+) = (?:global|constant) ")


@lru_cache(1024)
def _symbols(text: str) -> tuple[str, ...]:
    """The symbols that a text defines for others."""
    lines = "\n" + text
    return (*_FUNCTION.findall(lines), *_VARIABLE.findall(lines))


# The work of a text for control, per character, beside that of others.
_CONTROL_WORK = 0.15
# Units per thread: enough that all threads end at about the same time, whatever a text takes.
_UNITS_PER_WORKER = 3
# What stands under the name of a text that is part of a unit: this, the unit's name, its symbols.
_MOVED = b"unit "

# The first line of a text that only decides what others do: walks over blocks, calls functions.
# Such a text runs rarely and has no vectors, so it is translated instruction by instruction, in a
# tenth of the time (product's walker: 1.9 ms instead of 16; products of 8 x 8 show no difference).
CONTROL = "; control"

# A text, and whether it needs the few passes.
Source: TypeAlias = tuple[str, bool]

# Under `log_compiles`, who waits hears of it this often.
SECONDS_BETWEEN_REPORTS = 1.0


@dataclass(frozen=True, slots=True)
class Host:
    """The processor that code is generated for."""

    cpu: str
    features: str
    llvm_version: str

    def has(self, feature: str) -> bool:
        """Whether the processor has an LLVM target feature, such as "avx512f" or "fma"."""
        return f"+{feature}" in _features(self.features)

    @property
    def vector_bytes(self) -> int:
        """The width of the widest vector registers that are worth using."""
        if self.has("avx512f") and self.has("avx512vl"):
            return 64
        return 32 if self.has("avx2") else 16


@lru_cache(16)
def _features(text: str) -> frozenset[str]:
    return frozenset(text.split(","))


class Address(int):
    """The address of a symbol, which knows the entry of the object cache that defines it."""

    entry: str
    symbol: str

    @classmethod
    def of(cls, value: int, entry: str, symbol: str) -> Address:
        """An address with its origin."""
        address = cls(value)
        address.entry, address.symbol = entry, symbol
        return address


class Loader:
    """Compiles and loads texts; one per process. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Addresses by entry and symbol; those of each text; texts that were asked for before.
        self._loaded: dict[str, dict[str, Address]] = {}
        self._texts: dict[str, dict[str, Address]] = {}
        self._entries: dict[Source, str] = {}
        # By whether they are for control.
        self._emitters: dict[bool, list[_Emitter]] = {False: [], True: []}
        # How many texts this process compiled: what it did not find.
        self.compiled = 0
        # Library names are used up even by a link that fails.
        self._numbers = itertools.count()

    @cached_property
    def _llvm(self) -> ModuleType:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        return llvm

    @cached_property
    def host(self) -> Host:
        """The processor of this machine."""
        version = ".".join(map(str, self._llvm.llvm_version_info))
        features = self._llvm.get_host_cpu_features().flatten()
        return Host(self._llvm.get_host_cpu_name(), features, version)

    @cached_property
    def _jit(self) -> Any:
        # JITLink puts each object into one contiguous mapping, which makes the small code model
        # safe. `_owned` tells llvmlite that
        # somebody else disposes of the JIT; nobody does: threads may be inside its code at exit.
        jit = self._llvm.create_lljit_compiler(self._target_machine(), use_jit_link=True)
        jit._owned = True
        return jit

    def compile_texts(
        self, texts: Sequence[str], *, optimize: bool = False, optimized: Sequence[str] = ()
    ) -> dict[str, Address]:
        """Compile and load LLVM IR texts; give the address of every symbol they define.

        Equal texts are compiled once. `optimize` runs the few passes that code written with stack
        variables needs; `optimized` are texts that need them beside others that do not. A text that
        does not parse or verify is a RuntimeError (ours, not the user's); different texts that
        define one symbol in the same call are a ValueError.
        """
        wanted = [*((t, optimize) for t in texts), *((t, True) for t in optimized)]
        with self._lock:
            keys = {t: self._key(*t) for t in dict.fromkeys(wanted)}
            new = {t: key for t, key in keys.items() if key not in self._texts}
            if new:
                self._load_or_compile(new)
            return _merge([self._texts[key] for key in keys.values()])

    def store_texts(self, texts: Sequence[str], *, optimize: bool = False) -> None:
        """Put the code of texts on the disk, for later: each by itself, and none is loaded.

        What is stored by itself is loaded by itself: who needs one does not read the others.
        """
        with self._lock:
            keys = {t: self._key(t, optimize) for t in dict.fromkeys(texts)}
            missing = [t for t, key in keys.items() if not self._is_on_disk(key)]
            groups = [[(t, optimize)] for t in missing]
            for text, code in zip(missing, self._emit_all(groups), strict=True):
                object_cache.store(keys[text], code)

    def _is_on_disk(self, key: str) -> bool:
        payload = object_cache.load(key)
        if payload is not None and payload.startswith(_MOVED):
            payload = object_cache.load(payload[len(_MOVED) :].decode().partition(" ")[0])
        return payload is not None

    def compile_written(self, name: str, write: Callable[[], str]) -> Mapping[str, int]:
        """Compile and load, as `optimize` does, a text that takes long to write.

        It must depend on nothing but spmd's own files: if these are as they were when the disk got
        its code, it is not even written.
        """
        files = source_digest() if object_cache.is_on else ""
        if not files:
            return self.compile_texts([write()], optimize=True)
        host = self.host
        mark = entry_key(name, files, host.cpu, host.features, host.llvm_version)
        with self._lock:
            stored = object_cache.load(mark) or b""
            if stored.startswith(_MOVED):
                entry, *symbols = stored[len(_MOVED) :].decode().split()
                if self._load_entries({entry: symbols}):
                    return self._loaded[entry]
        addresses = self.compile_texts([write()], optimize=True)
        (entry,) = {address.entry for address in addresses.values()}
        object_cache.store(mark, _MOVED + " ".join([entry, *addresses]).encode())
        return addresses

    def _load_or_compile(self, new: Mapping[Source, str]) -> None:
        """Load texts, by their names; those that are not on the disk are compiled."""
        units: dict[str, _Unit] = {}
        home = {t: self._stored(t, key, units) for t, key in new.items()}
        missing = [t for t, unit in home.items() if unit is None]
        for sources, unit in self._compile(missing, new):
            units[unit.key] = unit
            home |= dict.fromkeys(sources, unit.key)
        self._link([u for u in units.values() if u.key not in self._loaded])
        for source, key in new.items():
            unit_key = home[source]
            assert unit_key is not None
            addresses = self._loaded[unit_key]
            self._texts[key] = {s: addresses[s] for s in _symbols(source[0])}

    def _stored(self, source: Source, key: str, units: dict[str, _Unit]) -> str | None:
        """The unit on the disk that a text is part of, which is noted in `units`; None if none."""
        if key in self._loaded:
            return key
        payload = object_cache.load(key)
        symbols: Sequence[str] = ()
        if payload is not None and payload.startswith(_MOVED):
            key, *symbols = payload[len(_MOVED) :].decode().split()
            if key in units or key in self._loaded:
                return key
            payload = object_cache.load(key)
        if payload is None:
            return None
        units[key] = _Unit(key, symbols or _symbols(source[0]), payload)
        return key

    def _compile(
        self, missing: Sequence[Source], keys: Mapping[Source, str]
    ) -> Iterator[tuple[list[Source], _Unit]]:
        """Compile texts, in units, which are kept on the disk."""
        if not missing:
            return
        groups = _into_units(missing, _UNITS_PER_WORKER * available_cores())
        for sources, code in zip(groups, self._emit_all(groups), strict=True):
            symbols = [s for text, _ in sources for s in _symbols(text)]
            names = [keys[source] for source in sources]
            name = names[0] if len(names) == 1 else entry_key("unit", *names)
            object_cache.store(name, code)
            for other in names if len(names) > 1 else ():
                object_cache.store(other, _MOVED + " ".join([name, *symbols]).encode())
            yield sources, _Unit(name, symbols, code)

    def load_entries(self, entries: Mapping[str, Sequence[str]]) -> bool:
        """Load entries of the object cache that define the given symbols.

        False if one of them is not there any more; what is loaded then stays so.
        """
        with self._lock:
            return self._load_entries(entries)

    def _load_entries(self, entries: Mapping[str, Sequence[str]]) -> bool:
        units = []
        for key, symbols in entries.items():
            if key not in self._loaded:
                code = object_cache.load(key)
                if code is None:
                    return False
                units.append(_Unit(key, symbols, code))
        self._link(units)
        return True

    def loaded(self, entry: str) -> Mapping[str, Address]:
        """The symbols that a loaded entry defines, and their addresses."""
        return self._loaded[entry]

    def emit_assembly(self, text: str, *, optimize: bool = False) -> str:
        """The assembly that a text compiles to, to be read by people."""
        with self._lock:
            level = 0 if _is_control((text, optimize)) else 2
            emitter = _Emitter(self._llvm, self._target_machine(level))
            return emitter.emit([(text, optimize)], assembly=True).decode()

    def _key(self, text: str, optimize: bool) -> str:
        key = self._entries.get((text, optimize))
        if key is None:
            host = self.host
            key = entry_key(text, str(optimize), host.cpu, host.features, host.llvm_version)
            self._entries[text, optimize] = key
        return key

    def _target_machine(self, level: int = 2) -> Any:
        # Never level 0 but for control: with AVX-512 masks its instruction selector aborts the
        # process.
        target = self._llvm.Target.from_default_triple()
        return target.create_target_machine(
            cpu=self.host.cpu,
            features=self.host.features,
            opt=level,
            reloc="pic",
            codemodel="small",
        )

    def _emit_all(self, groups: Sequence[Sequence[Source]]) -> list[bytes]:
        """The object code of each group of texts."""
        if not groups:
            return []
        self.compiled += sum(map(len, groups))
        workers = min(len(groups), available_cores())
        for is_control, emitters in self._emitters.items():
            alike = sum(_is_control(group[0]) is is_control for group in groups)
            while len(emitters) < min(alike, workers):
                machine = self._target_machine(level=0 if is_control else 2)
                emitters.append(_Emitter(self._llvm, machine))
        # The first was used most: what LLVM makes at its first use is there.
        free = {is_control: made[::-1] for is_control, made in self._emitters.items()}
        progress = _Progress(sum(map(len, groups)))

        def emit(sources: Sequence[Source]) -> bytes:
            alike = free[_is_control(sources[0])]
            emitter = alike.pop()
            try:
                return emitter.emit(sources)
            finally:
                alike.append(emitter)
                progress.more(sources)

        waiting = deque(enumerate(groups))
        made: dict[int, bytes] = {}

        def work() -> None:
            while True:
                try:
                    number, sources = waiting.popleft()
                except IndexError:
                    return
                made[number] = emit(sources)

        if workers == 1:
            work()
        else:
            # This thread works too: it takes the longest, in memory that it has used before.
            with ThreadPoolExecutor(workers - 1) as executor:
                helpers = [executor.submit(work) for _ in range(workers - 1)]
                work()
            for helper in helpers:
                helper.result()
        return [made[number] for number in range(len(groups))]

    def _link(self, units: Sequence[_Unit]) -> None:
        """Load object code.

        All goes into one library, which takes a third of the time that one library each would take,
        but for units that define a symbol again.
        """
        defined: set[str] = set()
        together = [
            u for u in units if defined.isdisjoint(u.symbols) and not defined.update(u.symbols)
        ]
        if not together:
            return
        builder = self._llvm.JITLibraryBuilder().add_current_process()
        for unit in together:
            builder.add_object_img(unit.code)
            for symbol in unit.symbols:
                builder.export_symbol(symbol)
        tracker = builder.link(self._jit, f"text{next(self._numbers)}")
        tracker.detach()
        for unit in together:
            addresses = {s: Address.of(tracker[s], unit.key, s) for s in unit.symbols}
            self._loaded[unit.key] = addresses
        if len(together) < len(units):
            self._link([u for u in units if u.key not in self._loaded])


@dataclass(frozen=True, slots=True)
class _Unit:
    """Object code as it is loaded: its name in the object cache and the symbols it defines."""

    key: str
    symbols: Sequence[str]
    code: bytes


def _is_control(source: Source) -> bool:
    return source[0].startswith(CONTROL)


def _into_units(texts: Sequence[Source], most: int) -> list[list[Source]]:
    """Texts in groups of about the same length, the longest group first.

    No group has two texts that define one symbol, or some for control and others.
    """
    control = [t for t in texts if _is_control(t)]
    others = [t for t in texts if not _is_control(t)]
    groups = [*_balanced(others, most), *_balanced(control, 1)]
    return sorted(groups, key=lambda group: -sum(map(_work, group)))


def _work(source: Source) -> float:
    """How long a text takes to compile, in characters of a kernel's text."""
    return len(source[0]) * (_CONTROL_WORK if _is_control(source) else 1)


def _balanced(texts: Sequence[Source], most: int) -> list[list[Source]]:
    """Texts in at most so many groups, or more where they define one symbol."""
    groups: list[list[Source]] = [[] for _ in range(min(most, len(texts)))]
    defined: list[set[str]] = [set() for _ in groups]
    sizes = [0.0] * len(groups)
    for source in sorted(texts, key=_work, reverse=True):
        symbols = _symbols(source[0])
        fitting = [k for k in range(len(groups)) if defined[k].isdisjoint(symbols)]
        if not fitting:
            groups.append([])
            defined.append(set())
            sizes.append(0)
            fitting = [len(groups) - 1]
        k = min(fitting, key=sizes.__getitem__)
        groups[k].append(source)
        defined[k].update(symbols)
        sizes[k] += _work(source)
    return groups


class _Progress:
    """Says on stderr, once a second under `log_compiles`, how many texts are compiled."""

    def __init__(self, count: int):
        self._count = count
        self._done = 0
        self._started = self._told = time.perf_counter()

    def more(self, sources: Sequence[Source]) -> None:
        """Note that texts are compiled."""
        self._done += len(sources)
        now = time.perf_counter()
        if config.log_compiles and now - self._told >= SECONDS_BETWEEN_REPORTS:
            self._told = now
            symbol = next(iter(_symbols(sources[-1][0])), "a text")
            print(
                f"spmd: compiled {self._done} of {self._count} kernels in "
                f"{now - self._started:.1f} s, the last was {symbol}",
                file=sys.stderr,
            )


class _Emitter:
    """One LLVM context and target machine: what a thread needs to compile on its own."""

    def __init__(self, llvm: ModuleType, machine: Any):
        self._llvm = llvm
        self._machine = machine
        self._context = llvm.create_context()
        self._lib = _unlocked_library(llvm)

    def emit(self, sources: Sequence[Source], assembly: bool = False) -> bytes:
        """Object code (or assembly) of texts, as one module."""
        lib, message = self._lib, ctypes.c_char_p()
        with self._module(*sources[0]) as module:
            for source in sources[1:]:
                other = self._module(*source)
                failed = lib.LLVMPY_LinkModules(module, other, ctypes.byref(message))
                other.detach()  # it is part of the other now, or gone
                if failed:
                    raise RuntimeError(f"LLVM cannot join: {_decoded(message)}\n{source[0]}")
            buffer = lib.LLVMPY_TargetMachineEmitToMemory(
                self._machine, module, int(not assembly), ctypes.byref(message)
            )
            if not buffer:
                texts = "\n".join(text for text, _ in sources)
                raise RuntimeError(f"LLVM cannot compile: {_decoded(message)}\n{texts}")
        try:
            return ctypes.string_at(
                lib.LLVMPY_GetBufferStart(buffer), lib.LLVMPY_GetBufferSize(buffer)
            )
        finally:
            lib.LLVMPY_DisposeMemoryBuffer(buffer)

    def _module(self, text: str, optimize: bool) -> Any:
        """The module of one text."""
        lib, message = self._lib, ctypes.c_char_p()
        pointer = lib.LLVMPY_ParseAssembly(self._context, text.encode(), ctypes.byref(message))
        if message.value:
            raise RuntimeError(f"LLVM IR does not parse: {_decoded(message)}\n{text}")
        module = self._llvm.ModuleRef(pointer, self._context)
        if config.check and lib.LLVMPY_VerifyModule(module, ctypes.byref(message)):
            module.close()
            raise RuntimeError(f"LLVM IR is not valid: {_decoded(message)}\n{text}")
        if optimize and not _is_control((text, optimize)):
            self._optimize(module)
        return module

    def _optimize(self, module: Any) -> None:
        # Stack slots become registers. What else LLVM has would take up to ten times as long and
        # makes the code no faster: what should be unrolled or a vector is written so.
        options = self._llvm.create_pipeline_tuning_options(speed_level=2)
        builder = self._llvm.create_pass_builder(self._machine, options)
        passes = self._llvm.create_new_module_pass_manager()
        passes.add_always_inliner_pass()
        passes.add_sroa_pass()
        passes.run(module, builder)


def _decoded(message: ctypes.c_char_p) -> str:
    return (message.value or b"").decode()


def _unlocked_library(llvm: ModuleType) -> Any:
    """A handle of LLVM's library whose calls do not take llvmlite's global lock.

    llvmlite holds one lock around every call, which lets two threads compile no faster than one.
    LLVM itself only asks that a context stays with one thread at a time, which `_Emitter` ensures.
    """
    locked = llvm.ffi.lib
    library = ctypes.CDLL(locked._name)
    for name in (
        "LLVMPY_ParseAssembly",
        "LLVMPY_VerifyModule",
        "LLVMPY_LinkModules",
        "LLVMPY_TargetMachineEmitToMemory",
        "LLVMPY_GetBufferStart",
        "LLVMPY_GetBufferSize",
        "LLVMPY_DisposeMemoryBuffer",
    ):
        function = getattr(library, name)
        function.argtypes = getattr(locked, name).argtypes
        function.restype = getattr(locked, name).restype
    return library


def _merge(tables: Sequence[Mapping[str, Address]]) -> dict[str, Address]:
    merged: dict[str, Address] = {}
    for table in tables:
        for symbol, address in table.items():
            if merged.setdefault(symbol, address) != address:
                raise ValueError(f"two different texts define the symbol {symbol!r}")
    return merged


__all__ = [
    "Address",
    "Host",
    "Loader",
    "available_cores",
    "compile_texts",
    "compile_written",
    "host",
    "loader",
]

loader = Loader()
compile_texts = loader.compile_texts
compile_written = loader.compile_written


def host() -> Host:
    """The processor that code is generated for."""
    return loader.host
