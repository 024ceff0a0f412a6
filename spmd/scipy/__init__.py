"""SciPy's functions over spmd arrays, with the names and the semantics of `jax.scipy`.

This file only lists the namespaces.
"""

# ruff: noqa: F401

from spmd.scipy import (
    cluster,
    fft,
    integrate,
    interpolate,
    linalg,
    ndimage,
    optimize,
    signal,
    sparse,
    spatial,
    special,
    stats,
)
