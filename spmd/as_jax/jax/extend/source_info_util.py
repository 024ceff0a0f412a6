"""`jax.extend.source_info_util`: which files are not the user's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from spmd.base.source import SKIPPED_FILES


def register_exclusion(path: str) -> None:
    """Never name a line of this file as the user's."""
    SKIPPED_FILES.add(path)


def summarize(source_info: Any, num_frames: int = 1) -> str:
    """The line of the user's program that an equation comes from."""
    return str(source_info)


@contextlib.contextmanager
def user_context(traceback: Any, **_: Any) -> Iterator[None]:
    """In the block, equations come from the line of another one; spmd finds the line itself."""
    yield
