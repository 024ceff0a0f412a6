"""`spmd.scipy.cluster`: `vq`, which code is nearest."""

# ruff: noqa: F401

from spmd.scipy.cluster import vq
