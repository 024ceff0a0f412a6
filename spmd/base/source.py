"""The user's source lines: which file and line of the *user's* program made this equation or error.

Frames inside the spmd package (and a few standard-library go-betweens) are skipped, so that errors,
debug output and collective reports never name a line of ours. When a jaxpr is walked again (to be
differentiated, batched, ...), the line is that of the equation being worked on.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from typing import Any

from spmd.base.context import state
from spmd.base.record import record

PACKAGE_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# The file of the standard module `string`, which takes long to import.
_STRING = os.path.join(os.path.dirname(os.__file__), "string.py")
SKIPPED_FILES = {functools.__file__, contextlib.__file__, _STRING, "<frozen runpy>"}


@record
class Source:
    """A place in the user's program; `scope` is its name by `named_scope`.

    `name_stack` is the scope with the transformations that it was entered under, as JAX has it.
    `operand` names the leaf, where an operation is applied to each leaf of a pytree. `through` is
    the `file:line` of an installed package, where the line calls one that does the work.
    """

    file: str
    line: int
    function: str
    scope: str = ""
    operand: str = ""
    through: str = ""
    name_stack: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})" + self._suffix()

    @property
    def short(self) -> str:
        """`file:line`, without folders."""
        return f"{_place(self.file, self.line)}" + self._suffix()

    def _suffix(self) -> str:
        through = f" through {self.through}" if self.through else ""
        return f"{through} in {self.scope}" if self.scope else through


def _place(file: str, line: int) -> str:
    return f"{os.path.basename(file)}:{line}"


UNKNOWN = Source("<unknown>", 0, "<unknown>")


# The file name of generated code: no user's file has it.
GENERATED = "<spmd"


def is_ours(file: str) -> bool:
    """Whether a file of a stack frame is spmd's, generated code included."""
    return file.startswith((PACKAGE_DIR, GENERATED))


_INSTALLED = ("/lib/python3", "/lib64/python3", "/site-packages/", "/dist-packages/")


def is_library(file: str) -> bool:
    """Whether a file belongs to Python or to an installed package: not where a user looks first."""
    return file.startswith("<") or any(part in file for part in _INSTALLED)


# Kinds of files: the user's; spmd's own or a go-between of Python; an installed package's.
_USERS, _SKIPPED, _LIBRARY = 0, 1, 2
# By file, its kind. (The hash of a code object is that of all it contains.)
_kinds: dict[str, int] = {}


def _kind_of(file: str) -> int:
    kind = _kinds.get(file)
    if kind is None:
        skipped = is_ours(file) or file in SKIPPED_FILES
        # Generated code, such as a notebook's cells, counts as the user's.
        library = any(part in file for part in _INSTALLED) or file.startswith("<frozen ")
        kind = _kinds[file] = _SKIPPED if skipped else _LIBRARY if library else _USERS
    return kind


def is_skipped(file: str) -> bool:
    """Whether frames of a file are never the user's: ours, and go-betweens of Python."""
    return _kind_of(file) == _SKIPPED


@functools.lru_cache(maxsize=4096)
def _interned(
    file: str, line: int, function: str, scope: str, operand: str, through: str, names: str
) -> Source:
    return Source(file, line, function, scope, operand, through, names)


@functools.lru_cache(maxsize=4096)
def transposed(source: Source, depth: int) -> Source:
    """The source of a transposed equation: the `jvp` inside `depth` others is in a `transpose`."""
    names = source.name_stack
    start = -1
    for _ in range(depth + 1):
        start = names.find("jvp(", start + 1)
        if start < 0:
            return source
    end, inside = start + 3, 0
    while end < len(names):
        inside += {"(": 1, ")": -1}.get(names[end], 0)
        end += 1
        if not inside:
            break
    names = f"{names[:start]}transpose({names[start:end]}){names[end:]}"
    parts = source.file, source.line, source.function, source.scope, source.operand
    return _interned(*parts, source.through, names)


# By code object and instruction, the line, which takes long to work out: a function's table of
# lines is read from its beginning. The code object is kept, so that its address stays its own.
_places: dict[tuple[int, int], tuple[Any, Source]] = {}
_MOST_PLACES = 1 << 16


def _found(frame: Any, code: Any) -> Source:
    """The line that a frame is on, remembered if it is in no scope."""
    source = _source_of(frame)
    if not state.scope and not state.operand:
        if len(_places) >= _MOST_PLACES:
            _places.clear()
        _places[id(code), frame.f_lasti] = code, source
    return source


def _source_of(frame: Any, through: str = "") -> Source:
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    names = state.scope, state.operand, through, state.name_stack
    return _interned(file, frame.f_lineno, name, *names)


# Functions between a user's call of a loop or conditional and its code.
_BETWEEN = tuple(
    os.path.join(PACKAGE_DIR, *path)
    for path in (("lax", "control"), ("core", "mutable", ""), ("base", ""), ("as_jax", ""))
)


def is_called_by_user() -> bool:
    """Whether a loop, or a conditional, that is being traced is the user's own, not one of ours.

    The functions of parts of `custom_partitioning` don't count: their user knows no types.
    """
    if not state.checks_varying:
        return False
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_BETWEEN) and file not in SKIPPED_FILES:
            return not is_ours(file)
        frame = frame.f_back
    return False


def current_source(depth: int = 1) -> Source:
    """The innermost frame of the calling stack that is the user's, or its stand-in.

    Where it calls an installed package the source has the line in there too; a program that is all
    installed has that line alone. The search begins `depth` calls out: a caller that knows these
    frames to be spmd's saves time.
    """
    if state.source is not None:
        return state.source
    frame: Any = sys._getframe(depth)
    library: Any = None
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        kind = _kinds.get(file)
        if kind is None:
            kind = _kind_of(file)
        if not kind:
            if library is not None:
                return _source_of(frame, _place(library.f_code.co_filename, library.f_lineno))
            known = _places.get((id(code), frame.f_lasti))
            if known is None or state.scope or state.operand:
                return _found(frame, code)
            return known[1]
        if kind == _LIBRARY and library is None:
            library = frame
        frame = frame.f_back
    return UNKNOWN if library is None else _source_of(library)
