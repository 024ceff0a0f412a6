"""`jax.extend.source_info_util`: which files are not the user's."""

from __future__ import annotations

from spmd.base.source import SKIPPED_FILES


def register_exclusion(path: str) -> None:
    """Never name a line of this file as the user's."""
    SKIPPED_FILES.add(path)
