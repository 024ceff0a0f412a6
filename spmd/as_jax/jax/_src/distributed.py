"""`jax._src.distributed`: which process this is, and values that processes leave for each other."""

from __future__ import annotations

from typing import Any

from spmd.base.device import process_count, process_index
from spmd.transport.world import key_value_client


class State:
    """This process among all. There is no service to look at: rank 0 answers."""

    service: Any = None

    @property
    def client(self) -> Any:
        """The store that the processes share; None for a process that is alone."""
        return key_value_client()

    @property
    def process_id(self) -> int:
        """The number of this process."""
        return process_index()

    @property
    def num_processes(self) -> int:
        """The number of processes there are."""
        return process_count()


global_state = State()
