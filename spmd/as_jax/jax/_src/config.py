"""`jax._src.config`: the settings, each an object with a value and a block in which it is set."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from spmd.as_jax.refuse import missing
from spmd.base.config import config
from spmd.base.errors import SettingError

_absent = missing("jax._src.config")


class _State:
    """A setting of JAX's: its value now, and `with setting(value):`."""

    def __init__(self, name: str):
        self._name = name

    @property
    def value(self) -> Any:
        return config.read(self._name)

    def __call__(self, value: Any) -> AbstractContextManager[None]:
        return config.override(self._name, value)


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        try:
            config.read(name)
        except SettingError:
            pass
        else:
            return _State(name)
    return _absent(name)
