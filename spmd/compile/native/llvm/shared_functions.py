"""Functions that kernels of any program call: texts of their own, found by their symbols.

The one idea: a function belongs to the processor, not to the program that calls it. Its
text is compiled once per machine, or by `spmd prepare`, beside the kernels that call it; these
only declare it. A symbol has a digest of the text in it, so that code on the disk is never taken
for that of another text, and object code says by itself what it needs. Shared functions may call
others of their kind.
"""

from __future__ import annotations

import re

from spmd.base.digest import blake2b

# The first line of such a text, and the beginning of its function's symbol.
SHARED = "; shared"
SHARED_PREFIX = "spmd_shared_"
_IN_TEXT = f"@({SHARED_PREFIX}\\w+)"
_IN_CODE = f"\\0({SHARED_PREFIX}\\w+)(?=\\0)".encode()

_texts: dict[str, str] = {}
_needing_passes: set[str] = set()


def share(name: str, text: str, optimize: bool = False) -> str:
    """Note the text of a function, in which it is called `@SYMBOL`; the symbol it gets.

    `optimize` says that it has stack variables, as to `compile_texts`.
    """
    symbol = f"{SHARED_PREFIX}{name}_{blake2b(text.encode(), digest_size=8).hexdigest()}"
    _texts.setdefault(symbol, f"{SHARED}\n{text.replace('@SYMBOL', f'@{symbol}')}")
    if optimize:
        _needing_passes.add(symbol)
    return symbol


def shared_text(symbol: str) -> str:
    """The text of a function that this process has noted."""
    return _texts[symbol]


def needs_passes(symbol: str) -> bool:
    """Whether the text of a function has stack variables."""
    return symbol in _needing_passes


def called_by_text(text: str) -> list[str]:
    """The symbols of the shared functions that a text names."""
    return list(dict.fromkeys(re.findall(_IN_TEXT, text)))


def called_by_code(code: bytes) -> list[str]:
    """The symbols of the shared functions that object code names."""
    if SHARED_PREFIX.encode() not in code:
        return []
    return [symbol.decode() for symbol in dict.fromkeys(re.findall(_IN_CODE, code))]
