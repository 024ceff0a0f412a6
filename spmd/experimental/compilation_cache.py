"""The folder of compiled programs, by JAX's path: `SPMD_CACHE_DIR` and `config.cache_dir` set it.

JAX has a module of this name in a package of this name; here both are this module.
"""

from __future__ import annotations

import os
import sys

from spmd.base.config import config
from spmd.compile.dispatch.jit import clear_caches

__all__ = ["compilation_cache", "reset_cache", "set_cache_dir"]

compilation_cache = sys.modules[__name__]
__path__: list[str] = []  # the module of the same name is below it


def set_cache_dir(path: str | os.PathLike[str]) -> None:
    """Keep compiled programs in the folder `path` from now on, and look for them there.

    >>> from spmd.experimental.compilation_cache import compilation_cache
    >>> before = spmd.config.cache_dir
    >>> compilation_cache.set_cache_dir("/tmp/spmd_cache")
    >>> spmd.config.cache_dir
    '/tmp/spmd_cache'
    >>> compilation_cache.set_cache_dir(before)
    """
    config.update("cache_dir", os.fspath(path))


def reset_cache() -> None:
    """Forget the programs of this process; the next calls read the folder again.

    >>> reset_cache()
    """
    clear_caches()
