"""`SPMD_AS_JAX_REPORT=1`: which modules of JAX were imported, and what was missing, for whom.

The report goes to the standard error at the end of the process, one line for each name.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from types import ModuleType
from typing import Any

from spmd.base.config import config
from spmd.base.source import is_ours

enabled = config.as_jax_report

_IMPORTLIB = os.path.dirname(importlib.__file__) + os.sep

# By what happened and the name: the packages that asked, in the order in which they did.
_seen: dict[tuple[str, str], dict[str, None]] = {}
_KINDS = ("module", "no module", "missing", "refused")


def note(kind: str, name: str) -> None:
    """Remember that the code that runs asked for `name`."""
    if enabled:
        _seen.setdefault((kind, name), {})[_asker()] = None


def _asker() -> str:
    """The package of the nearest frame that is neither ours nor Python's import system."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_ours(file) and not file.startswith(("<frozen", _IMPORTLIB)):
            return str(frame.f_globals.get("__name__", file)).partition(".")[0]
        frame = frame.f_back
    return "__main__"


class _Watched(ModuleType):
    """A module of ours that reports the names that it has not."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            note("missing", f"{self.__name__.replace('spmd', 'jax', 1)}.{name}")
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def watch(module: ModuleType) -> None:
    """Have a module report missing names; facades do so themselves."""
    if enabled and type(module) is ModuleType:
        module.__class__ = _Watched


def lines() -> list[str]:
    """The report so far."""
    order = sorted(_seen, key=lambda key: (_KINDS.index(key[0]), key[1]))
    return [f"{kind:9} {name}  ({', '.join(_seen[kind, name])})" for kind, name in order]


def start() -> None:
    """Print the report when the process ends."""
    if enabled:
        atexit.register(lambda: print("as_jax:", *lines(), sep="\n  ", file=sys.stderr))
