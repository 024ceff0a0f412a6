"""From LLVM IR text to callable addresses: the only door to llvmlite.

The one idea: code is content. A text is compiled once per process and, through the object cache,
once per machine; loaded code is never unloaded, so an address stays good for the life of the
process. No mid-level passes run unless asked for: kernel texts are written as they should be
compiled, and the passes would cost more than they gain.

llvmlite is imported at the first compile, because its import takes longer than that of all spmd.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

from spmd.compile.cpu.cache import entry_key, object_cache
from spmd.compile.cpu.cores import available_cores
from spmd.core.config import config

# Functions and variables that others may look up: all definitions that are not private to the text.
_DEFINITION = re.compile(
    r"^(?:define (?!internal |private )[^@\n]*@|@(?=[\w.$]+ = (?:global|constant) ))([\w.$]+)",
    re.MULTILINE,
)


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
        return f"+{feature}" in self.features.split(",")

    @property
    def vector_bytes(self) -> int:
        """The width of the widest vector registers that are worth using."""
        if self.has("avx512f") and self.has("avx512vl"):
            return 64
        return 32 if self.has("avx2") else 16


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
        # Addresses by entry and symbol; the entry of a text that was asked for before.
        self._loaded: dict[str, dict[str, Address]] = {}
        self._entries: dict[tuple[str, bool], str] = {}
        self._emitters: list[_Emitter] = []
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
    ) -> dict[str, int]:
        """Compile and load LLVM IR texts; give the address of every symbol they define.

        Equal texts are compiled once. `optimize` runs the few passes that code written with stack
        variables needs; `optimized` are texts that need them beside others that do not. A text that
        does not parse or verify is a RuntimeError (ours, not the user's); different texts that
        define one symbol in the same call are a ValueError.
        """
        wanted = [*((t, optimize) for t in texts), *((t, True) for t in optimized)]
        with self._lock:
            keys = {t: self._key(*t) for t in dict.fromkeys(wanted)}
            new = [t for t in keys if keys[t] not in self._loaded]
            stored = {t: object_cache.load(keys[t]) for t in new}
            objects = {t: code for t, code in stored.items() if code is not None}
            missing = [t for t in new if t not in objects]
            for text, code in zip(missing, self._emit_all(missing), strict=True):
                objects[text] = code
                object_cache.store(keys[text], code)
            self._link([(keys[t], _DEFINITION.findall(t[0]), objects[t]) for t in new])
            return _merge([self._loaded[key] for key in keys.values()])

    def load_entries(self, entries: Mapping[str, Sequence[str]]) -> bool:
        """Load entries of the object cache that define the given symbols.

        False if one of them is not there any more; what is loaded then stays so.
        """
        with self._lock:
            codes = {k: object_cache.load(k) for k in entries if k not in self._loaded}
            if None in codes.values():
                return False
            self._link([(key, entries[key], code or b"") for key, code in codes.items()])
            return True

    def loaded(self, entry: str) -> Mapping[str, Address]:
        """The symbols that a loaded entry defines, and their addresses."""
        return self._loaded[entry]

    def emit_assembly(self, text: str, *, optimize: bool = False) -> str:
        """The assembly that a text compiles to, to be read by people."""
        with self._lock:
            emitter = _Emitter(self._llvm, self._target_machine())
            return emitter.emit(text, optimize, assembly=True).decode()

    def _key(self, text: str, optimize: bool) -> str:
        key = self._entries.get((text, optimize))
        if key is None:
            host = self.host
            key = entry_key(text, str(optimize), host.cpu, host.features, host.llvm_version)
            self._entries[text, optimize] = key
        return key

    def _target_machine(self) -> Any:
        # Never opt=0: with AVX-512 masks its fast instruction selector aborts the process.
        target = self._llvm.Target.from_default_triple()
        return target.create_target_machine(
            cpu=self.host.cpu,
            features=self.host.features,
            opt=2,
            reloc="pic",
            codemodel="small",
        )

    def _emit_all(self, texts: list[tuple[str, bool]]) -> list[bytes]:
        if not texts:
            return []
        workers = min(len(texts), available_cores())
        while len(self._emitters) < workers:
            self._emitters.append(_Emitter(self._llvm, self._target_machine()))
        free = list(self._emitters)
        progress = _Progress(len(texts))

        def emit(text: tuple[str, bool]) -> bytes:
            emitter = free.pop()
            try:
                return emitter.emit(*text)
            finally:
                free.append(emitter)
                progress.one_more(text[0])

        if workers == 1:
            return [emit(text) for text in texts]

        # Long texts first, so that no thread is left with a long one at the end.
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i][0]))
        with ThreadPoolExecutor(workers) as executor:
            done = dict(zip(order, executor.map(emit, [texts[i] for i in order]), strict=True))
        return [done[i] for i in range(len(texts))]

    def _link(self, objects: Sequence[tuple[str, Sequence[str], bytes]]) -> None:
        """Load object code: entries, the symbols that they define, and their code.

        All go into one library, which takes a third of the time that one library each would take,
        but for those that define a symbol again.
        """
        defined: set[str] = set()
        together = [x for x in objects if defined.isdisjoint(x[1]) and not defined.update(x[1])]
        if not together:
            return
        builder = self._llvm.JITLibraryBuilder().add_current_process()
        for _, symbols, code in together:
            builder.add_object_img(code)
            for symbol in symbols:
                builder.export_symbol(symbol)
        tracker = builder.link(self._jit, f"text{next(self._numbers)}")
        tracker.detach()
        for entry, symbols, _ in together:
            self._loaded[entry] = {s: Address.of(tracker[s], entry, s) for s in symbols}
        if len(together) < len(objects):
            self._link([x for x in objects if x[0] not in self._loaded])


class _Progress:
    """Says on stderr, once a second under `log_compiles`, how many texts are compiled."""

    def __init__(self, count: int):
        self._count = count
        self._done = 0
        self._started = self._told = time.perf_counter()

    def one_more(self, text: str) -> None:
        """Note that a text is compiled."""
        self._done += 1
        now = time.perf_counter()
        if config.log_compiles and now - self._told >= SECONDS_BETWEEN_REPORTS:
            self._told = now
            symbol = next(iter(_DEFINITION.findall(text)), "a text")
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

    def emit(self, text: str, optimize: bool, assembly: bool = False) -> bytes:
        """Object code (or assembly) of a text."""
        lib, message = self._lib, ctypes.c_char_p()
        pointer = lib.LLVMPY_ParseAssembly(self._context, text.encode(), ctypes.byref(message))
        if message.value:
            raise RuntimeError(f"LLVM IR does not parse: {_decoded(message)}\n{text}")
        module = self._llvm.ModuleRef(pointer, self._context)
        with module:
            if lib.LLVMPY_VerifyModule(module, ctypes.byref(message)):
                raise RuntimeError(f"LLVM IR is not valid: {_decoded(message)}\n{text}")
            if optimize:
                self._optimize(module)
            buffer = lib.LLVMPY_TargetMachineEmitToMemory(
                self._machine, module, int(not assembly), ctypes.byref(message)
            )
            if not buffer:
                raise RuntimeError(f"LLVM cannot compile: {_decoded(message)}\n{text}")
        try:
            return ctypes.string_at(
                lib.LLVMPY_GetBufferStart(buffer), lib.LLVMPY_GetBufferSize(buffer)
            )
        finally:
            lib.LLVMPY_DisposeMemoryBuffer(buffer)

    def _optimize(self, module: Any) -> None:
        # The full O2 list takes ten times longer and makes the runtime's code no faster: what
        # should be unrolled or a vector is written so.
        options = self._llvm.create_pipeline_tuning_options(speed_level=2)
        builder = self._llvm.create_pass_builder(self._machine, options)
        passes = self._llvm.create_new_module_pass_manager()
        passes.add_always_inliner_pass()
        passes.add_sroa_pass()
        passes.add_instruction_combine_pass()
        passes.add_simplify_cfg_pass()
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
        "LLVMPY_TargetMachineEmitToMemory",
        "LLVMPY_GetBufferStart",
        "LLVMPY_GetBufferSize",
        "LLVMPY_DisposeMemoryBuffer",
    ):
        function = getattr(library, name)
        function.argtypes = getattr(locked, name).argtypes
        function.restype = getattr(locked, name).restype
    return library


def _merge(tables: Sequence[Mapping[str, int]]) -> dict[str, int]:
    merged: dict[str, int] = {}
    for table in tables:
        for symbol, address in table.items():
            if merged.setdefault(symbol, address) != address:
                raise ValueError(f"two different texts define the symbol {symbol!r}")
    return merged


__all__ = ["Address", "Host", "Loader", "available_cores", "compile_texts", "host", "loader"]

loader = Loader()
compile_texts = loader.compile_texts


def host() -> Host:
    """The processor that code is generated for."""
    return loader.host
