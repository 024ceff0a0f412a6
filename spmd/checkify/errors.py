"""Failed checks: the place and text of each check, and the `Error` value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.base.errors import SpmdError
from spmd.base.record import record
from spmd.base.source import Source
from spmd.base.tree import TreeDef, register_pytree_node_class, tree_unflatten
from spmd.core.aval import ShapedArray
from spmd.core.trace import EvalTrace


class CheckError(SpmdError, ValueError):
    """A check failed in a program that `checkify` rewrote, or in eager code."""

    located = False  # it names the line of the check, at its end


@record
class Site:
    """One check of a program: its kind, line and text, and the arrays that the text names.

    `kind` is "user", "nan", "div" or "index". The text of a user's check is a format.
    """

    kind: str
    text: str
    source: Source
    tree: TreeDef
    avals: tuple[ShapedArray, ...]

    def message(self, payload: Sequence[Any]) -> str:
        """The text with values in it."""
        args, kwargs = tree_unflatten(self.tree, [EvalTrace.array_of(x) for x in payload])
        text = self.text.format(*args, **kwargs)
        return f"{text} (`check` failed)" if self.kind == "user" else text


@register_pytree_node_class
@record
class Error:
    """The check that failed first, if one did. A pytree of arrays: it may be returned from `jit`.

    `code` is 0, or the number of a check, counted from 1; under vmap there is one for each example.
    """

    code: Any
    payloads: tuple[tuple[Any, ...], ...]
    sites: tuple[Site, ...]

    def get(self) -> str | None:
        """The message of the check that failed, or None."""
        found = self._found()
        if not found:
            return None
        if () in found:
            return found[()][1]
        rows = (f"at mapped index {', '.join(map(str, k))}: {m}" for k, (_, m) in found.items())
        return "\n".join(rows)

    def get_exception(self) -> CheckError | None:
        """The exception that `throw` would raise, or None."""
        found = self._found()
        if not found:
            return None
        site, _ = next(iter(found.values()))
        # The message first, as in JAX: libraries match its beginning.
        return CheckError(f"{self.get()}\n  checked at {site.source}")

    def throw(self) -> None:
        """Raise a `CheckError` if a check failed."""
        error = self.get_exception()
        if error is not None:
            raise error

    def _found(self) -> dict[tuple[int, ...], tuple[Site, str]]:
        """The check that failed and its message, by index of the example."""
        codes = np.asarray(self.code)
        found = {}
        for index in map(tuple, np.argwhere(codes) if codes.ndim else [()] if codes else []):
            number = int(codes[index]) - 1
            site = self.sites[number]
            values = [np.asarray(x)[index] for x in self.payloads[number]]
            found[tuple(map(int, index))] = site, site.message(values)
        return found

    def __str__(self) -> str:
        return f"Error({self.get()})"

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        return (self.code, self.payloads), self.sites

    @classmethod
    def tree_unflatten(cls, metadata: Any, data: Any) -> Error:
        code, payloads = data
        return cls(code, payloads, metadata)


# No check has failed, since there is none.
init_error = Error(np.int32(0), (), ())
