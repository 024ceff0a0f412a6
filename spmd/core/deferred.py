"""A module that is imported when it is first used, so that `import spmd` costs what it must."""

from __future__ import annotations

import importlib
from typing import Any

from spmd.core.forks import guard
from spmd.core.util import importing

# A child would wait for ever for a module that another thread of its parent was importing.
_lock = guard("imports")


class Deferred:
    """A module that is imported when one of its attributes is asked for."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)  # what inspects objects must not import the module
        with _lock, importing():
            module = importlib.import_module(self._name)
        value = getattr(module, attribute)
        setattr(self, attribute, value)  # found without this method from now on
        return value
