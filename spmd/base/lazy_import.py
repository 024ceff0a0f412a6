"""Modules that are imported when they are first used, so that `import spmd` costs what it must."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from spmd.base.context import undisturbed
from spmd.base.fork import guard
from spmd.base.util import importing

# A child would wait for ever for a module that another thread of its parent was importing.
_lock = guard("imports")


class Deferred:
    """A module that is imported when one of its attributes is asked for."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)  # tools that inspect objects must not import the module
        with _lock:
            module = _load(self._name)
        value = getattr(module, attribute)
        setattr(self, attribute, value)  # found without this method from now on
        return value


def without(package: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module that has all of its names: it says what to use for others."""

    def find(name: str) -> Any:
        raise _load("spmd.base.absent_names").missing(package, name)

    return find


def attach(
    package: str, modules: Sequence[str] = (), more: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package that imports some of its names when asked (PEP 562).

    The lazy names are its submodules `modules` and the public names of its module `more`, which few
    programs use. `__all__` lists all names of the package.
    """
    here = vars(sys.modules[package])

    def listed() -> dict[str, Any]:
        return vars(_load(f"{package}.{more}")) if more else {}

    def find(name: str) -> Any:
        if name in modules:
            return _load(f"{package}.{name}")
        if name == "__all__":
            return all_names()
        if name.startswith("_") or name not in listed():
            raise _load("spmd.base.absent_names").missing(package, name)
        value = here[name] = listed()[name]  # found without this function from now on
        return value

    def all_names() -> list[str]:
        names = {*here, *modules, *listed()} - {"annotations"}
        return sorted(name for name in names if not name.startswith("_"))

    return find, all_names


def _load(name: str) -> ModuleType:
    """Import a module; its results do not depend on the code that asks for it."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        return module
    with importing(), undisturbed():
        return importlib.import_module(name)
