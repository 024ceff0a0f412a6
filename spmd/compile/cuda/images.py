"""Images: compiled modules as drivers load them, kept in the process and on the disk.

The one idea: a function is named by a hash of its text, so its machine code is found by that name,
the architecture, and the version of NVRTC. The disk has a module under a name of its own, and
under the name of each of its functions where that is. A process that finds all its functions there
neither renders nor compiles.
"""

from __future__ import annotations

import functools
import importlib.metadata
import marshal
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from spmd.compile.cuda.launch import NVRTC_WHEEL, Compiled, Usage
from spmd.compile.lazy import cuda_kernel, cuda_nvrtc
from spmd.compile.native.llvm.object_cache import entry_key, object_cache, source_digest

if TYPE_CHECKING:
    from spmd.compile.cuda.launch import Function

_MOVED = b"module "


# By architecture and symbol, the module in which a function is: programs share functions.
known: dict[tuple[str, str], Compiled] = {}


def images(
    symbols: Sequence[str], arch: str, functions: Callable[[], Sequence[Function]]
) -> Mapping[str, Compiled]:
    """By symbol, the module in which each function is.

    Those that neither this process nor the disk has become one module; `functions` gives them.
    """
    missing = [s for s in dict.fromkeys(symbols) if (arch, s) not in known]
    if missing:
        stored = from_disk(missing, arch)
        known.update({(arch, symbol): image for symbol, image in stored.items()})
    absent = [s for s in missing if (arch, s) not in known]
    if absent:
        texts = {f.symbol: f for f in functions()}
        source = cuda_kernel.module_text([texts[s] for s in absent])
        made: Compiled = cuda_nvrtc.compile_cubin(source, arch)
        known.update({(arch, symbol): made for symbol in absent})
        _to_disk(absent, made)
    return {symbol: known[arch, symbol] for symbol in symbols}


# ---- the disk ----------------------------------------------------------------------------------


@functools.cache
def toolkit() -> str:
    """The version of NVRTC, whose library is not loaded for that; "" if it is not there."""
    try:
        return importlib.metadata.version(NVRTC_WHEEL)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _key(symbol: str, arch: str) -> str | None:
    """The name of a function on the disk; None if nothing is kept there."""
    files = source_digest() if object_cache.is_on else ""
    return entry_key("cuda function", symbol, arch, toolkit(), files) if files else None


def from_disk(symbols: Sequence[str], arch: str) -> dict[str, Compiled]:
    """The modules of those functions that the disk has."""
    found: dict[str, Compiled] = {}
    modules: dict[bytes, Compiled | None] = {}
    for symbol in symbols:
        key = _key(symbol, arch)
        place = object_cache.load(key) if key else None
        if place is None or not place.startswith(_MOVED):
            continue
        if place not in modules:
            data = object_cache.load(place[len(_MOVED) :].decode())
            modules[place] = None if data is None else _read(data)
        image = modules[place]
        if image is not None:
            found[symbol] = image
    return found


def _to_disk(symbols: Sequence[str], image: Compiled) -> None:
    keys = [_key(symbol, image.arch) for symbol in symbols]
    names = [key for key in keys if key is not None]
    if names:
        module = entry_key("cuda module", *names)
        moved = _MOVED + module.encode()
        object_cache.store_all({module: _written(image)} | dict.fromkeys(names, moved))


def _written(image: Compiled) -> bytes:
    usage = {
        name: (u.registers, u.spill_stores, u.spill_loads, u.stack, u.barriers)
        for name, u in image.usage.items()
    }
    # All kernels begin with the same text, and PTX is long.
    texts = zlib.compress(marshal.dumps((image.ptx, image.source)), 1)
    return marshal.dumps((image.arch, image.cubin, usage, texts))


def _read(data: bytes) -> Compiled:
    arch, cubin, usage, texts = marshal.loads(data)
    uses = {name: Usage(*numbers) for name, numbers in usage.items()}
    return Compiled(arch, cubin, uses, *marshal.loads(zlib.decompress(texts)))
