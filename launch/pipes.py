"""The output of a command whose reader may leave before its end: `spmdrun --doctor | head -3`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

# As a shell shows a process that wrote to a pipe which has no reader.
NO_READER = 141


def with_output(command: Callable[[], int]) -> int:
    """Run a command to the end of its output; a reader that leaves before is no failure."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: `spmdrun ... >&-`
            setattr(sys, name, open(os.devnull, "w"))
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
