"""SciPy's functions over spmd arrays, with the names and the semantics of `jax.scipy`.

This file only lists the namespaces.
"""

# ruff: noqa: F401

from spmd.scipy import integrate, interpolate, linalg, optimize, signal, special, stats
