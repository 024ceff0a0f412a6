"""Names of `spmd` that few programs use: imported when the first of them is asked for."""

# ruff: noqa: F401

from spmd.ref import Ref, empty_ref, free_ref, freeze, new_ref
