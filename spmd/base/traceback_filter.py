"""Tracebacks without spmd's own frames: where they are cut, and what they say about it.

A function that users call, and that calls their functions, is an `api_boundary` (base/util.py). An
exception that leaves the outermost of these loses the frames of spmd. So does one that ends the
program, wherever in spmd it was raised. The setting `traceback_filtering` says how frames are taken
out, or that they stay.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

from spmd.base.config import config
from spmd.base.errors import UnfilteredStackTrace
from spmd.base.source import is_skipped
from spmd.base.util import handlers, simplifiers

NOTE = (
    "--------------------\nFor simplicity, spmd has removed its internal frames from the traceback "
    "of this exception. Set SPMD_TRACEBACK_FILTERING=off to include them."
)
_UNFILTERED = (
    "{}\n\nThe stack trace below excludes spmd's internal frames.\n"
    "The preceding is the original exception that occurred, unmodified.\n\n--------------------"
)


def simplify(error: Exception) -> None:
    """Take spmd's frames out of the traceback of an exception that the calling function handles.

    If another boundary is below it on the stack, that one does it.
    """
    mode = config.traceback_filtering
    trace = error.__traceback__
    if mode == "off" or trace is None or _is_inside_boundary(sys._getframe(1).f_back):
        return
    if mode == "auto":
        mode = "tracebackhide" if _hides_frames() else "quiet_remove_frames"
    if mode == "tracebackhide":
        for frame, _ in _frames(trace):
            if is_skipped(frame.f_code.co_filename):
                frame.f_locals["__tracebackhide__"] = True
        return
    error.__traceback__ = filter_traceback(trace)
    if mode == "remove_frames":
        import traceback  # needed for this mode alone, and slow to import

        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        whole = UnfilteredStackTrace(_UNFILTERED.format(text))
        whole.__traceback__ = _with_callers(trace)
        whole.__cause__, whole.__context__ = error.__cause__, error.__context__
        whole.__suppress_context__ = error.__suppress_context__
        error.__cause__, error.__context__ = whole, None
    elif NOTE not in getattr(error, "__notes__", ()):
        error.add_note(NOTE)


simplifiers.append(simplify)


def install() -> None:
    """Let exceptions that end the program be shown without spmd's frames."""
    previous = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        simplify_at_exit(error)
        previous(kind, error, error.__traceback__ or trace)

    excepthook.follows = previous  # type: ignore[attr-defined]
    sys.excepthook = excepthook


def simplify_at_exit(error: BaseException) -> None:
    """Take spmd's frames out of an exception that no boundary has seen, if it has any."""
    kinds = {is_skipped(frame.f_code.co_filename) for frame, _ in _frames(error.__traceback__)}
    if isinstance(error, Exception) and len(kinds) == 2:
        simplify(error)


install()


def _is_inside_boundary(frame: Any) -> bool:
    while frame is not None:
        if id(frame.f_code) in handlers:
            return True
        frame = frame.f_back
    return False


def filter_traceback(trace: TracebackType | None) -> TracebackType | None:
    """The traceback's frames that are not spmd's."""
    out = None
    for frame, line in reversed(list(_frames(trace))):
        if not is_skipped(frame.f_code.co_filename):
            out = TracebackType(out, frame, frame.f_lasti, line)
    return out


def _frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """Each frame of the traceback, with its line."""
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _with_callers(trace: TracebackType) -> TracebackType:
    """The traceback with the frames that called its first one, up to the program's module.

    A prompt that runs the module is not shown.
    """
    out, at_module = trace, False
    import traceback

    for frame, line in traceback.walk_stack(trace.tb_frame.f_back):
        is_module = frame.f_code.co_name == "<module>"
        if at_module and not is_module:
            break
        at_module = is_module
        if "importlib._bootstrap" not in frame.f_code.co_filename:
            out = TracebackType(out, frame, frame.f_lasti, line)
    return out


def _hides_frames() -> bool:
    """Whether this is IPython, of a version that hides frames which ask for it."""
    ipython = sys.modules.get("IPython")
    if ipython is None or getattr(ipython, "get_ipython", lambda: None)() is None:
        return False
    return tuple(ipython.version_info[:2]) >= (7, 17)
