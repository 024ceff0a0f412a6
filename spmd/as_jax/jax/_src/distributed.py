"""`jax._src.distributed`: which process this is."""

from __future__ import annotations

from typing import Any

from spmd.base.device import process_count, process_index


class State:
    """This process among all; spmd has no client of a coordination service."""

    client: Any = None
    service: Any = None

    @property
    def process_id(self) -> int:
        """The number of this process."""
        return process_index()

    @property
    def num_processes(self) -> int:
        """The number of processes there are."""
        return process_count()


global_state = State()
