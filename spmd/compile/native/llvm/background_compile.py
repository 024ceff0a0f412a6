"""Code that nearly every process needs, compiled on a thread of its own before it is asked for.

The one idea: Python keeps one core busy while a process imports the compiler and traces and lowers
its first program; LLVM can use another core. The thread compiles one source after the other, and
ends after the last. A caller waits if its source is being compiled, and compiles it itself if that
has not started. So results never depend on the thread, a program that ends waits for one source at
most, and a forked child, which has no such thread, finds no source half compiled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from spmd.base.background import Worker, is_ending
from spmd.base.fork import after_fork_in_child
from spmd.base.record import record
from spmd.compile.native.llvm.modules import EMISSIONS, Source


@record
class Item:
    """A source to be compiled under a name; `use` installs its code if no caller takes it."""

    name: str
    write: Callable[[], Source]
    use: Callable[[], object] | None = None


class BackgroundCompiler:
    """Emits sources, each by itself; `emit` is the function that would be called otherwise."""

    def __init__(self, emit: Callable[[Sequence[Source]], bytes]):
        self._emit = emit
        self._worker = Worker("spmd-early")
        self._forget()
        after_fork_in_child(self._forget)

    def _forget(self) -> None:
        self._coming: set[str] = set()
        self._changed = threading.Condition()
        self._codes: dict[Source, bytes] = {}
        self._left: set[Source] = set()  # sources that a caller has taken over
        self._now: Source | None = None

    def begin(self, items: Sequence[Item]) -> None:
        """Make these, in their order."""
        self._coming = {item.name for item in items}
        if not self._worker.submit(lambda: self._run(items)):
            self._coming = set()

    def is_pending(self, name: str) -> bool:
        """Whether an item is not compiled yet, or compiled and not installed."""
        return name in self._coming

    def take(self, source: Source) -> bytes | None:
        """The code of a source, waiting if it is being compiled; None: the caller compiles it."""
        with self._changed:
            while self._now == source:
                self._changed.wait()
            self._left.add(source)
            return self._codes.pop(source, None)

    def _run(self, items: Sequence[Item]) -> None:
        with EMISSIONS.helping():
            for item in items:
                if is_ending():
                    return
                source = item.write()  # it may import, which forks wait for by themselves
                with EMISSIONS.one():  # no fork until this one is made
                    is_made = self._make(source)
                if is_made and item.use is not None:
                    item.use()
                self._coming.discard(item.name)

    def _make(self, source: Source) -> bool:
        """Whether the code of a source is there now."""
        code = None
        with self._changed:
            if source in self._left:
                return False
            self._now = source
        try:
            code = self._emit([source])
        except RuntimeError:
            pass  # a caller that needs it compiles it, and gets the error
        finally:
            with self._changed:
                self._now = None
                if code is not None:
                    self._codes[source] = code
                self._changed.notify_all()
        return code is not None
