"""This process's place in the job: `spmd.distributed.initialize()` and its findings.

Calling `initialize` is optional: the first question about devices joins the job by itself.
"""

# ruff: noqa: F401

from spmd.transport.mpi.recovery import recover
from spmd.transport.world import (
    initialize,
    is_initialized,
    local_rank,
    local_size,
    process_count,
    process_index,
)
