"""`spmd.scipy.spatial`: rotations in three dimensions."""

# ruff: noqa: F401

from spmd.scipy.spatial import transform
