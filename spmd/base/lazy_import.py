"""Modules that are imported when they are first used, so that `import spmd` costs what it must."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from spmd.base.context import undisturbed
from spmd.base.fork_locks import guard
from spmd.base.util import importing

# A child would wait for ever for a module that another thread of its parent was importing.
_lock = guard("imports")


class Deferred:
    """A module that is imported when one of its attributes is asked for."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)  # what inspects objects must not import the module
        with _lock:
            module = _load(self._name)
        value = getattr(module, attribute)
        setattr(self, attribute, value)  # found without this method from now on
        return value


def later(package: str, modules: tuple[str, ...] = (), more: str = "") -> Callable[[str], Any]:
    """`__getattr__` of a package: it imports what is asked for when it is asked for.

    These are `modules` of it, and the public names of its module `more`, which lists what few
    programs use. `__all__` is all of it.
    """

    def find(name: str) -> Any:
        if name in modules:
            return _load(f"{package}.{name}")
        here = vars(sys.modules[package])
        listed = vars(_load(f"{package}.{more}")) if more and not name.startswith("_") else {}
        if name in listed:
            here[name] = listed[name]  # found without this function from now on
            return listed[name]
        if name == "__all__":
            return all_names(package, modules, more)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find


def all_names(package: str, modules: tuple[str, ...] = (), more: str = "") -> list[str]:
    """The public names of a package that has some `later`."""
    listed = vars(_load(f"{package}.{more}")) if more else ()
    names = {*vars(sys.modules[package]), *modules, *listed} - {more, "annotations"}
    return sorted(name for name in names if not name.startswith("_"))


def _load(name: str) -> ModuleType:
    """Import a module; what it computes has nothing to do with what asks for it."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        return module
    with importing(), undisturbed():
        return importlib.import_module(name)
