"""Tracebacks of a program that `python -m spmd.as_jax` runs, as if `python` had started it."""

from __future__ import annotations

import os
import sys
from types import TracebackType

_STARTER = os.path.join(os.path.dirname(__file__), "__main__.py")


def begin_at_program() -> None:
    """Let tracebacks that end the process leave out the frames that started the program."""
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        first = trace
        while first is not None and _starts(first.tb_frame.f_code.co_filename):
            first = first.tb_next
        found = first or trace
        show(kind, error.with_traceback(found), found)

    sys.excepthook = hook


def _starts(file: str) -> bool:
    return file in (_STARTER, "<frozen runpy>") or os.path.basename(file) == "runpy.py"
