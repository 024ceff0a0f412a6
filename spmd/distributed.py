"""This process's place in the job: `spmd.distributed.initialize()` and its findings.

Calling `initialize` is optional: the first question about devices joins the job by itself.
"""

# ruff: noqa: F401

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd.base.errors import LaunchError as _LaunchError
from spmd.transport import world as _world
from spmd.transport.mpi.recovery import recover
from spmd.transport.world import is_initialized, local_rank, local_size


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: int | Sequence[int] | None = None,
    cluster_detection_method: str | None = None,
    initialization_timeout: int = 300,
    heartbeat_timeout_seconds: int = 100,
    shutdown_timeout_seconds: int = 300,
    coordinator_bind_address: str | None = None,
    slice_index: int | None = None,
    partition_index: int | None = None,
    *,
    process_index: int | None = None,
    process_count: int | None = None,
) -> Any:
    """Join the job, which MPI has started. Calling again is fine, and changes nothing.

    `num_processes` and `process_id`, or `process_count` and `process_index`, are what the caller
    expects. MPI connects the ranks, watches them and ends the job, so that JAX's other parameters
    change nothing: a coordinator's address, the method that finds one, timeouts, devices of this
    process (`spmdrun` gives them) and slices. The result is the job, with its size and rank.

    Raises `LaunchError` if MPI started another number of processes, or numbers them otherwise.

    >>> initialize(num_processes=1, process_id=0).world.size
    1
    """
    for one, other in ((num_processes, process_count), (process_id, process_index)):
        if one is not None and other is not None and one != other:
            raise _LaunchError(
                f"initialize: num_processes={num_processes}, process_id={process_id} contradict "
                f"process_count={process_count}, process_index={process_index}"
            )
    rank = process_id if process_index is None else process_index
    count = num_processes if process_count is None else process_count
    return _world.initialize(rank, count)


def shutdown() -> None:
    """Wait until every process of the job has made this call; nothing if none has been joined.

    **Every process must make the call.** MPI ends with the process, so that this one stays in its
    job: it may go on to compute.

    >>> spmd.distributed.shutdown()
    """
    if is_initialized():
        _world.world().barrier()


process_count, process_index = _world.process_count, _world.process_index
