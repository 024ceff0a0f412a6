"""A rank's reports about itself: one line about its failure for waiting ranks, and notices."""

from __future__ import annotations

import os
import sys

from spmd.base.errors import CollectiveError
from spmd.base.source import is_library, is_ours

# Set by spmdrun: it prefixes all lines itself, and reads the report of a failure from this file.
REPORT_FILE = "SPMD_FAILURE_REPORT"


def failure_text(rank: int, error: BaseException) -> str:
    """`rank 2: ZeroDivisionError at train.py:41: division by zero`."""
    message = str(error).strip().splitlines()
    said = f": {message[0]}" if message else ""
    where = user_line(error)
    return f"rank {rank}: {type(error).__name__}{' at ' + where if where else ''}{said}"


def first_error(error: BaseException) -> BaseException:
    """The error that made a rank leave its path, if ranks disagreed while it was handled.

    A `finally` or an `except` that calls a collective meets another one of the other ranks.
    """
    while isinstance(error, CollectiveError):
        before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if before is None:
            break
        error = before
    return error


def user_line(error: BaseException) -> str:
    """`file:line` of the innermost frame of the user's code, else of any that is not ours."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{os.path.basename(error.filename)}:{error.lineno}"
    import traceback  # needed for errors alone, and slow to import

    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not is_ours(frame.filename)]
    if not frames:
        return ""
    users = [frame for frame in theirs if not is_library(frame.filename)]
    frame = (users or theirs or frames)[-1]
    return f"{os.path.basename(frame.filename)}:{frame.lineno}"


def say(rank: int, text: str) -> None:
    """A line on standard error that names the rank, as spmdrun does by itself."""
    sys.stderr.write(f"spmd: {text}\n" if is_supervised() else f"spmd rank {rank} | {text}\n")
    sys.stderr.flush()


def is_supervised() -> bool:
    """Whether spmdrun watches over this process."""
    return REPORT_FILE in os.environ
