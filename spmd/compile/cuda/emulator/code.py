"""From PTX to native code that runs it: translation, LLVM, the disk.

The functions of a module are translated one by one and compiled together. The disk has the code of
each under the digest of the module's PTX: a process that finds all there neither translates nor
imports LLVM.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from spmd.base.digest import blake2b
from spmd.base.record import record
from spmd.compile.cuda.emulator.layout import PLACE_BITS, Mode, native_symbol
from spmd.compile.lazy import cuda_kernel, read_ptx, translate_ptx
from spmd.compile.native.llvm.compiler import Written, compile_texts, loader

if TYPE_CHECKING:
    from spmd.compile.cuda.emulator.ptx import Module
    from spmd.compile.cuda.emulator.translate import Translated


@record
class Kernel:
    """A function as native code; `source` is the text that its places are lines of.

    `parameters` says how many it has, of 8 bytes each. `accesses` are those that it counts: space,
    whether it writes, bytes, place.
    """

    symbol: str
    address: int
    source: str
    parameters: int
    accesses: tuple[tuple[str, bool, int, int], ...] = ()


def load(ptx: str, symbols: Sequence[str], mode: Mode, source: str = "") -> dict[str, Kernel]:
    """Native code of functions of a PTX text, by their symbols.

    `source` is the CUDA C++ that the PTX was made of.

    Raises:
        UnknownPtxError: the emulator does not know an instruction.
    """

    @functools.cache
    def module() -> Module:
        return read_ptx.parse(ptx)

    def translated(symbol: str) -> Translated:
        return translate_ptx.translate(module(), symbol, mode)

    if mode == "counted":  # which accesses are counted is not in the code
        made = {symbol: translated(symbol) for symbol in symbols}
        addresses = compile_texts([each.text for each in made.values()], optimize=True)
        return {
            symbol: Kernel(
                symbol, addresses[each.symbol], source, parameters_of(ptx, symbol), each.accesses
            )
            for symbol, each in made.items()
        }
    digest = blake2b(ptx.encode(), digest_size=16).hexdigest()
    written = [
        Written(f"cuda {mode} {digest} {symbol}", lambda symbol=symbol: translated(symbol).text)
        for symbol in symbols
    ]
    found = loader.compile_all_written(written)
    return {
        symbol: Kernel(
            symbol, addresses[native_symbol(symbol, mode)], source, parameters_of(ptx, symbol)
        )
        for symbol, addresses in zip(symbols, found, strict=True)
    }


def symbols_of(ptx: str) -> list[str]:
    """The functions of a PTX text that can be launched."""
    return re.findall(r"^\.visible \.entry (\w+)\(", ptx, re.M)


def parameters_of(ptx: str, symbol: str) -> int:
    """How many parameters a function has."""
    start = ptx.index(f".entry {symbol}(")
    return ptx.count(".param", start, ptx.index(")", start))


def described(kernel: Kernel, place: int) -> str:
    """A place as people read it: file and line, the text of the line, and where it is called."""
    line, called_at = place & (1 << PLACE_BITS) - 1, place >> PLACE_BITS
    if not line:
        return f"in {kernel.symbol}"
    calls = f", called at {_line(kernel, called_at)}" if called_at else ""
    return f"at {_line(kernel, line)}{calls}"


def _line(kernel: Kernel, line: int) -> str:
    texts = kernel.source.splitlines()
    text = texts[line - 1].strip() if line <= len(texts) else ""
    if kernel.source.startswith(cuda_kernel.PRELUDE):
        for name, first, count in cuda_kernel.prelude_files():
            if first <= line < first + count:
                return f"{name}:{line - first + 1}: {text}"
    return f"kernels.cu:{line}: {text}"
