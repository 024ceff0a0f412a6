"""The keys that were used outside of any traced function, under `debug_key_reuse`.

A key is told by the array that holds it, not by its bits: `random.clone` makes one that may be used
again. Arrays have no place for such a note, so that this module keeps a table of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from spmd.base.config import config
from spmd.base.errors import KeyReuseError
from spmd.base.record import record
from spmd.base.source import Source as Line
from spmd.base.source import current_source
from spmd.core.aval import typeof
from spmd.core.trace import Tracer
from spmd.lax.keys.uses import Mask, fit, simple


@record(frozen=False)
class _Note:
    """An array, which of its keys were used, and where; or None: by a sampler, for itself."""

    alive: weakref.ref
    used: Mask | None
    by: str
    line: Line | None


_notes: dict[int, _Note] = {}


class _Within:
    """Notes whether the operations of a call run, which is looked at as a whole."""

    call = False


_within = _Within()


def note_of(key: Any) -> _Note | None:
    """The note on an array of keys, if there is one."""
    found = _notes.get(id(key))
    return found if found is not None and found.alive() is key else None


def mark(key: Any, used: Mask | None, by: str, line: Line | None) -> None:
    """Note which keys of an array were used."""
    if used is False or isinstance(key, (np.ndarray, Tracer)):
        return
    at = id(key)
    alive = weakref.ref(key, lambda _: _notes.pop(at, None))
    _notes[at] = _Note(alive, used, by, line)


def leave_alone(key: Any) -> None:
    """Note that a key is a sampler's own."""
    mark(key, None, "", None)


def is_own(key: Any) -> bool:
    """Whether a key is a sampler's own."""
    found = note_of(key)
    return found is not None and found.used is None


def consumed(key: Any) -> Mask:
    """Which keys of an array were used."""
    found = note_of(key)
    return False if found is None or found.used is None else found.used


def use(key: Any, mask: Mask, by: str) -> None:
    """Note that keys of an array are used now; a `KeyReuseError` if one of them was before."""
    if not config.debug_key_reuse or is_own(key):
        return
    check(key, mask, by)
    note_use(key, mask, by)


def check(key: Any, mask: Mask, by: str) -> None:
    """Raise a `KeyReuseError` if one of the keys that `by` uses was used before."""
    found = note_of(key)
    if found is None or found.used is None:
        return
    if np.any(np.logical_and(found.used, fit(mask, typeof(key).shape))):
        raise KeyReuseError(reused(current_source(), by, found.by, found.line))


def note_use(key: Any, mask: Mask, by: str) -> None:
    """Add to the keys of an array that were used."""
    before, now = consumed(key), fit(mask, typeof(key).shape)
    mark(key, simple(np.logical_or(before, now)), by, current_source())


def reused(line: Any, what: str, by: str, before: Any) -> str:
    """The text of a `KeyReuseError`."""
    return (
        f"{line}: {what}: this key was used already, by {by} at {before}. Two draws with one key "
        "are not independent: make keys with random.split, and use each once (random.clone(key) "
        "says that the same numbers are wanted)."
    )


# ---- calls and operations on arrays ------------------------------------------------------------


def unmarked(f: Callable[..., Any], *args: Any) -> Any:
    """The result of `f`; nothing that it does is looked at."""
    before, _within.call = _within.call, True
    try:
        return f(*args)
    finally:
        _within.call = before


def is_looking() -> bool:
    """Whether calls are to be looked at: not within another one."""
    return not _within.call
