"""From LLVM IR text to callable addresses: the only module that imports llvmlite.

The one idea: code is content. A text is compiled once per process and, through the object cache,
once per machine; loaded code is never unloaded, so an address stays good for the life of the
process. No mid-level passes run unless asked for: kernel texts are written as they should be
compiled, and the passes would cost more than they gain.

Texts that are new together are compiled a few to a module: a unit (`modules.py`). Under the name of
a text the disk has its code, or says in which unit that is. A `Batch` takes texts as they are
written and compiles the first while the last are not there yet.

llvmlite is imported at the first compile, because its import takes longer than that of all spmd: a
process that finds all its code on the disk links it (`linker.py`) and knows its processor
(`target.py`) without.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any

from spmd.base.config import config
from spmd.base.fork import guard
from spmd.base.record import record
from spmd.compile.lazy import background_compile, lapack, sharing
from spmd.compile.native.llvm.cores import available_cores
from spmd.compile.native.llvm.linker import UnfamiliarError, link
from spmd.compile.native.llvm.object_cache import entry_key, object_cache, source_digest
from spmd.compile.native.llvm.shared_functions import (
    SHARED,
    SHARED_PREFIX,
    called_by_code,
    called_by_text,
    needs_passes,
    shared_text,
)
from spmd.compile.native.llvm.target import Host, find_host

if TYPE_CHECKING:
    from spmd.compile.native.llvm.background_compile import BackgroundCompiler
    from spmd.compile.native.llvm.modules import Source, Team

# The entry under the name of a text that is part of a unit: this, the unit's name, its symbols.
_MOVED = b"unit "
# The attribute of coroutines, which LLVM splits where they suspend.
COROUTINE = " presplitcoroutine "

# In the symbols of functions that call the library behind NumPy.
_OF_LAPACK = b"spmd_lapack_"

# Held while texts are taken apart, compiled and loaded.
_compiling = guard("loader")


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


@record
class Written:
    """A text that takes long to write, under a name; it depends on spmd's files and the name."""

    name: str
    write: Callable[[], str]


class Loader:
    """Compiles and loads texts; one per process. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = _compiling
        # Addresses by entry and symbol; those of each text; texts that were asked for before.
        self._loaded: dict[str, dict[str, Address]] = {}
        self._texts: dict[str, dict[str, Address]] = {}
        self._entries: dict[Source, str] = {}
        # The addresses of functions that kernels share, by their symbols.
        self._shared: dict[str, Address] = {}
        # By whether they are for control.
        self._emitters: dict[bool, list[_Emitter]] = {False: [], True: []}
        self._early: BackgroundCompiler | None = None
        # The number of texts that this process compiled: those that it did not find.
        self.compiled = 0
        # Library names are used up even by a link that fails.
        self._numbers = itertools.count()

    @cached_property
    def _llvm(self) -> ModuleType:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        llvm.initialize_native_asmparser()
        return llvm

    @cached_property
    def host(self) -> Host:
        """The processor of this machine."""
        return find_host(object_cache, self._ask_llvm)

    def _ask_llvm(self) -> Host:
        version = ".".join(map(str, self._llvm.llvm_version_info))
        features = self._llvm.get_host_cpu_features().flatten()
        return Host(self._llvm.get_host_cpu_name(), features, version)

    @cached_property
    def _jit(self) -> Any:
        # JITLink puts each object into one contiguous mapping, which makes the small code model
        # safe. `_owned` tells llvmlite not to dispose of the JIT. It is never disposed of:
        # threads may be inside its code at exit.
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
        batch = Batch(self, streams=False)
        for text in texts:
            batch.add(text, optimize=optimize)
        for text in optimized:
            batch.add(text, optimize=True)
        return batch.finish()

    def store_texts(self, texts: Sequence[str], *, optimize: bool = False) -> None:
        """Put the code of texts on the disk, for later: each by itself, and none is loaded.

        An entry that is stored by itself is loaded by itself, without reading the others.
        """
        with self._lock:
            keys = {t: self._key(t, optimize) for t in dict.fromkeys(texts)}
            missing = [t for t, key in keys.items() if not self._is_on_disk(key)]
            codes = self._team().finish([[(t, optimize)] for t in missing])
            self.compiled += len(missing)
            for text, code in zip(missing, codes, strict=True):
                object_cache.store(keys[text], code)

    def _is_on_disk(self, key: str) -> bool:
        payload = object_cache.load(key)
        if payload is not None and payload.startswith(_MOVED):
            payload = object_cache.load(payload[len(_MOVED) :].decode().partition(" ")[0])
        return payload is not None

    def batch(self) -> Batch:
        """A batch to add texts to."""
        return Batch(self)

    def begin_early(self, written: Mapping[Written, Callable[[], object] | None]) -> None:
        """Begin with texts for `compile_written` that are not on the disk, beside Python.

        Each may have a function that installs its code when it is made, needed or not.
        """

        def is_new(each: Written) -> bool:
            mark = self._mark(each.name)
            return mark is None or object_cache.load(mark) is None

        missing = [
            background_compile.Item(each.name, lambda each=each: (each.write(), True), use)
            for each, use in written.items()
            if is_new(each)
        ]
        if missing:
            self._find_sharing()
            begun = self._early = background_compile.BackgroundCompiler(self._emit_now)
            begun.begin(missing)

    def is_pending(self, written: Written) -> bool:
        """Whether a text that was begun early is not in use yet."""
        return self._early is not None and self._early.is_pending(written.name)

    def _mark(self, name: str) -> str | None:
        """The cache entry that says where a written text's code is; None without a cache."""
        files = source_digest() if object_cache.is_on else ""
        if not files:
            return None
        host = self.host
        return entry_key(name, files, host.cpu, host.features, host.llvm_version)

    def compile_written(self, written: Written) -> Mapping[str, int]:
        """Compile and load, as `optimize` does, a text that takes long to write.

        It must depend on nothing but spmd's own files and its name: if these are as they were when
        the disk got its code, it is not even written.
        """
        (found,) = self.compile_all_written([written])
        return found

    def compile_all_written(self, writtens: Sequence[Written]) -> list[Mapping[str, int]]:
        """The same for several texts: those that the disk lacks are compiled together.

        Of each, the addresses of the symbols that it defines, maybe among others.
        """
        marks = [self._mark(written.name) for written in writtens]
        found = [None if mark is None else self._of_mark(mark) for mark in marks]
        missing = {k: w.write() for k, w in enumerate(writtens) if found[k] is None}
        addresses = self.compile_texts(list(missing.values()), optimize=True) if missing else {}
        for k, text in missing.items():
            (entry,) = {addresses[symbol].entry for symbol in sharing.symbols_of(text)}
            whole = found[k] = self._loaded[entry]
            if (mark := marks[k]) is not None:
                object_cache.store(mark, _MOVED + " ".join([entry, *whole]).encode())
        return [each for each in found if each is not None]

    def _of_mark(self, mark: str) -> Mapping[str, int] | None:
        """The addresses of a written text whose code is on the disk."""
        with self._lock:
            stored = object_cache.load(mark) or b""
            if stored.startswith(_MOVED):
                entry, *symbols = stored[len(_MOVED) :].decode().split()
                if self._load_entries({entry: symbols}):
                    return self._loaded[entry]
        return None

    def _load(
        self, texts: Mapping[Source, str], home: dict[Source, str | None], units: dict[str, _Unit]
    ) -> None:
        """Load texts, by their names, whose units are known."""
        self._link([u for u in units.values() if u.key not in self._loaded])
        for source, key in texts.items():
            unit_key = home[source]
            assert unit_key is not None
            addresses = self._loaded[unit_key]
            self._texts[key] = {s: addresses[s] for s in sharing.symbols_of(source[0])}

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
        found = self._with_shared([_Unit(key, symbols or sharing.symbols_of(source[0]), payload)])
        if found is None:
            return None
        units.update((unit.key, unit) for unit in found)
        return key

    def _with_shared(self, units: Sequence[_Unit]) -> list[_Unit] | None:
        """Units, and those on the disk that have the shared functions that they call.

        None if one of these is not there any more.
        """
        found = {unit.key: unit for unit in units}
        following = list(units)
        for unit in following:  # grows: shared functions call others
            for symbol in called_by_code(unit.code):
                key = self._shared_key(symbol)
                if key not in found and key not in self._loaded:
                    code = object_cache.load(key)
                    if code is None:
                        return None
                    found[key] = _Unit(key, (symbol,), code)
                    following.append(found[key])
        return list(found.values())

    def _kept(
        self,
        groups: Sequence[Sequence[Source]],
        codes: Sequence[bytes],
        keys: Mapping[Source, str],
    ) -> Iterator[tuple[Sequence[Source], _Unit]]:
        """Groups of texts as units, which are kept on the disk."""
        self.compiled += sum(map(len, groups))
        for sources, code in zip(groups, codes, strict=True):
            symbols = [s for text, _ in sources for s in sharing.symbols_of(text)]
            names = [keys[source] for source in sources]
            name = names[0] if len(names) == 1 else entry_key("unit", *names)
            moved = _MOVED + " ".join([name, *symbols]).encode()
            object_cache.store_all({name: code} | {n: moved for n in names if n != name})
            yield sources, _Unit(name, symbols, code)

    def load_entries(self, entries: Mapping[str, Sequence[str]]) -> bool:
        """Load entries of the object cache that define the given symbols.

        False if one of them is not there any more; the others stay loaded.
        """
        with self._lock:
            return self._load_entries(entries)

    def _load_entries(self, entries: Mapping[str, Sequence[str]]) -> bool:
        units = []
        for key, symbols in entries.items():
            if key not in self._loaded:
                code = object_cache.load(key)
                # Another process may have compiled the same text since, as a part of a unit.
                if code is None or code.startswith(_MOVED):
                    return False
                units.append(_Unit(key, symbols, code))
        found = self._with_shared(units)
        if found is None:
            return False
        self._link(found)
        return True

    def loaded(self, entry: str) -> Mapping[str, Address]:
        """The symbols that a loaded entry defines, and their addresses."""
        return self._loaded[entry]

    def emit_assembly(self, text: str, *, optimize: bool = False) -> str:
        """The assembly that a text compiles to, to be read by people."""
        with self._lock:
            level = 0 if sharing.is_control((text, optimize)) else 2
            emitter = _Emitter(self._llvm, self._target_machine(level))
            return emitter.emit([(text, optimize)], assembly=True).decode()

    def _key(self, text: str, optimize: bool) -> str:
        key = self._entries.get((text, optimize))
        if key is None:
            host = self.host
            if text.startswith(SHARED):
                key = self._shared_key(*sharing.symbols_of(text))
            else:
                key = entry_key(text, str(optimize), host.cpu, host.features, host.llvm_version)
            self._entries[text, optimize] = key
        return key

    def _shared_key(self, symbol: str) -> str:
        """The entry of a shared function, which object code knows by its symbol only."""
        host = self.host
        return entry_key("shared", symbol, host.cpu, host.features, host.llvm_version)

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

    def _team(self) -> Team:
        self._find_sharing()
        return sharing.Team(self._emit, available_cores())

    def _find_sharing(self) -> None:
        """Import modules for compiling threads: a fork waits for them, and would for that."""
        assert sharing.is_control and sharing.symbols_of

    def _emit(self, sources: Sequence[Source]) -> bytes:
        """The object code of some texts, on any thread."""
        made = None
        if self._early is not None and len(sources) == 1:
            made = self._early.take(sources[0])
        return self._emit_now(sources) if made is None else made

    def _emit_now(self, sources: Sequence[Source]) -> bytes:
        is_control = sharing.is_control(sources[0])
        free = self._emitters[is_control]
        try:
            # The last one used: LLVM's set-up at the first use is done.
            emitter = free.pop()
        except IndexError:
            emitter = _Emitter(self._llvm, self._target_machine(0 if is_control else 2))
        try:
            return emitter.emit(sources)
        finally:
            free.append(emitter)

    def _link(self, units: Sequence[_Unit]) -> None:
        """Load object code: all at once, but for units that define a symbol again."""
        defined: set[str] = set()
        together = [
            u for u in units if defined.isdisjoint(u.symbols) and not defined.update(u.symbols)
        ]
        if not together:
            return
        known: Mapping[str, int] = self._shared
        for unit in together:
            if _OF_LAPACK in unit.code:
                known = {**known, **lapack.addresses(unit.code)}
        try:
            tables = link([unit.code for unit in together], known)
        except UnfamiliarError:
            tables = self._link_by_llvm(together, known)
        for unit, table in zip(together, tables, strict=True):
            addresses = {s: Address.of(table[s], unit.key, s) for s in unit.symbols}
            self._loaded[unit.key] = addresses
            self._shared.update((s, a) for s, a in addresses.items() if s.startswith(SHARED_PREFIX))
        if len(together) < len(units):
            self._link([u for u in units if u.key not in self._loaded])

    def _link_by_llvm(
        self, units: Sequence[_Unit], known: Mapping[str, int]
    ) -> list[Mapping[str, int]]:
        """Load object code that `link` leaves to LLVM: the addresses of each unit's symbols."""
        builder = self._llvm.JITLibraryBuilder().add_current_process()
        defined = {symbol for unit in units for symbol in unit.symbols}
        called = {s for unit in units for s in called_by_code(unit.code)} - defined
        for symbol in called.union(known.keys() - self._shared.keys()):
            builder.import_symbol(symbol, known[symbol])
        for unit in units:
            builder.add_object_img(unit.code)
            for symbol in unit.symbols:
                builder.export_symbol(symbol)
        tracker = builder.link(self._jit, f"text{next(self._numbers)}")
        tracker.detach()
        return [{s: tracker[s] for s in unit.symbols} for unit in units]


class Batch:
    """Texts that are compiled and loaded together, the first while others are still written.

    Where it `streams`, texts of some length are compiled beside Python as soon as they are there;
    else they are shared out evenly at the end.
    """

    def __init__(self, loader: Loader, streams: bool = True):
        self._loader = loader
        self._wanted: dict[Source, str] = {}
        self._new: dict[Source, str] = {}
        self._units: dict[str, _Unit] = {}
        self._home: dict[Source, str | None] = {}
        self._stream = sharing.Stream()
        self._team = loader._team()
        self._streams = streams and self._team.has_helpers
        self._begun: list[Sequence[Source]] = []

    def add(self, *texts: str, optimize: bool = False) -> None:
        """Take texts, as `Loader.compile_texts` does."""
        for text in texts:
            self._add(text, optimize)

    def _add(self, text: str, optimize: bool) -> None:
        source = text, optimize
        if source in self._wanted:
            return
        loader = self._loader
        key = self._wanted[source] = loader._key(text, optimize)
        if key in loader._texts:
            return
        for symbol in called_by_text(text) if SHARED_PREFIX in text else ():
            if symbol not in sharing.symbols_of(text):
                self._add(shared_text(symbol), needs_passes(symbol))
        self._new[source] = key
        self._home[source] = loader._stored(source, key, self._units)
        if self._home[source] is not None:
            return
        if not self._streams:
            self._stream.open.append(source)
            return
        unit = self._stream.add(source)
        if unit is not None:
            self._begun.append(unit)
            self._team.put(unit)

    def finish(self) -> dict[str, Address]:
        """The addresses of all symbols that the texts define."""
        loader = self._loader
        missing = [t for t in self._stream.open if self._new[t] not in loader._texts]
        groups = sharing.into_units(missing, available_cores())
        # LLVM works without the lock: a call never waits for what another thread compiles.
        codes = self._team.finish(groups)
        with loader._lock:
            for sources, unit in loader._kept([*self._begun, *groups], codes, self._new):
                self._units[unit.key] = unit
                self._home |= dict.fromkeys(sources, unit.key)
            # Another thread may have loaded some of them by now.
            fresh = {t: key for t, key in self._new.items() if key not in loader._texts}
            if fresh:
                loader._load(fresh, self._home, self._units)
            return _merge([loader._texts[key] for key in self._wanted.values()])

    def drop(self) -> None:
        """Compile nothing more: the texts are not needed after all."""
        self._team.drop()


@record
class _Unit:
    """Object code as it is loaded: its name in the object cache and the symbols it defines."""

    key: str
    symbols: Sequence[str]
    code: bytes


class _Emitter:
    """One LLVM context and target machine: a thread needs one to compile on its own."""

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
        if optimize and not sharing.is_control((text, optimize)):
            self._optimize(module, COROUTINE in text)
        return module

    def _optimize(self, module: Any, has_coroutines: bool) -> None:
        # Stack slots become registers. LLVM's other passes would take up to ten times as long and
        # make the code no faster: unrolled loops and vectors are written as such.
        options = self._llvm.create_pipeline_tuning_options(speed_level=2)
        builder = self._llvm.create_pass_builder(self._machine, options)
        passes = self._llvm.create_new_module_pass_manager()
        passes.add_always_inliner_pass()
        passes.add_sroa_pass()
        passes.run(module, builder)
        if has_coroutines:
            # Without optimisation LLVM's own list of passes is little more than what they need.
            options = self._llvm.create_pipeline_tuning_options(speed_level=0)
            builder = self._llvm.create_pass_builder(self._machine, options)
            builder.getModulePassManager().run(module, builder)


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


loader = Loader()
compile_texts = loader.compile_texts
compile_written = loader.compile_written


def host() -> Host:
    """The processor that code is generated for."""
    return loader.host
