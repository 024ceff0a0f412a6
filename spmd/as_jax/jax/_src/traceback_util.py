"""`jax._src.traceback_util`: which files' frames are not the user's.

The setting `traceback_filtering` says what becomes of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from spmd.as_jax.refuse import missing
from spmd.base import traceback_filter, util
from spmd.base.errors import UnfilteredStackTrace
from spmd.base.source import SKIPPED_FILES, is_ours

__all__ = [
    "UnfilteredStackTrace",
    "api_boundary",
    "filter_traceback",
    "include_frame",
    "register_exclusion",
]

__getattr__ = missing("jax._src.traceback_util")

_F = TypeVar("_F", bound=Callable[..., Any])
_exclude_paths: list[str] = []
filter_traceback = traceback_filter.filter_traceback


def register_exclusion(path: str) -> None:
    """Never name a line of this file as the user's."""
    _exclude_paths.append(path)
    SKIPPED_FILES.add(path)


def include_frame(frame: Any) -> bool:
    """Whether a frame is the user's."""
    file = frame.f_code.co_filename
    return not is_ours(file) and file not in _exclude_paths


def api_boundary(fun: _F, **_: Any) -> _F:
    """The function, whose exceptions lose the frames that are not the user's."""
    return util.api_boundary(fun)
