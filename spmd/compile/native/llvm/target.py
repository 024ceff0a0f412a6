"""The processor that code is generated for, as LLVM describes it, asked once per machine.

The one idea: LLVM's answer depends on the processor, as the system describes it, and on the file
of LLVM's library. Both are read in a moment, so the answer is kept on disk like compiled code. A
process that finds its programs there never loads LLVM.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from functools import lru_cache

from spmd.base.record import record
from spmd.compile.native.llvm.object_cache import ObjectCache, entry_key

# The lines of Linux's description that say which instructions there are; the rest changes from core
# to core or by the minute. A description without all of these is none.
_TELLING = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags")
_CPUINFO = "/proc/cpuinfo"
# Enough for the first core.
_CPUINFO_BYTES = 8192


@record
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


def find_host(cache: ObjectCache, ask: Callable[[], Host]) -> Host:
    """The host as an earlier process described it, or as `ask` does."""
    key = _key() if cache.is_on else None
    if key is None:
        return ask()
    stored = cache.load(key)
    if stored is not None:
        return Host(*stored.decode().split("\n"))
    host = ask()
    cache.store(key, "\n".join((host.cpu, host.features, host.llvm_version)).encode())
    return host


def _key() -> str | None:
    """The name of this machine's description; None where that is not known without LLVM."""
    processor, library = _processor(), _library()
    return None if processor is None or library is None else entry_key("host", processor, library)


def _processor() -> str | None:
    """The system's description of the first core."""
    try:
        with open(_CPUINFO, "rb", buffering=0) as file:
            text = file.read(_CPUINFO_BYTES).decode(errors="replace")
    except OSError:
        return None
    core, end, _ = text.partition("\n\n")
    lines = dict(line.split("\t", 1) for line in core.splitlines() if "\t" in line)
    if not end or not set(_TELLING).issubset(lines):
        return None
    return "\n".join(lines[name] for name in _TELLING)


def _library() -> str | None:
    """The file of LLVM's library, told by size and time as Python's own byte code is."""
    try:
        found = importlib.util.find_spec("llvmlite")
    except (ImportError, ValueError):
        return None
    if found is None or found.origin is None or sys.platform != "linux":
        return None
    path = os.path.join(os.path.dirname(found.origin), "binding", "libllvmlite.so")
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return f"{path} {stat.st_size} {stat.st_mtime_ns}"
