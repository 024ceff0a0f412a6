"""A forked child of a rank is no rank: its copy of the job must not work.

It shares the parent's pages and its connections; a collective there would answer in the parent's
name, and all ranks would go on with wrong numbers.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

from spmd.base.errors import LaunchError
from spmd.base.fork import after_fork_in_child
from spmd.transport.checked import OPEN_GROUPS, CheckedCommunicator
from spmd.transport.shm.native_state import NativeState


class ForkedCommunicator(CheckedCommunicator):
    """The communicator of a forked child: every call raises."""

    def _refuse(self, *args: Any, **keywords: Any) -> NoReturn:
        raise LaunchError(
            f"process {os.getpid()} was forked from rank {self.rank} (process {os.getppid()}), and "
            "is no rank: a collective here would answer in its parent's name.\n"
            "Make collectives in the parent, and give the child NumPy arrays; or start it anew: "
            'multiprocessing.get_context("spawn").'
        )

    _all_reduce = _all_gather = _reduce_scatter = _all_to_all = _refuse
    _all_to_all_of = _permute = _broadcast = _barrier = _subgroup = _end_job = _refuse


def disarm_children() -> None:
    """From now on, in a child made by `os.fork` the communicators of this process refuse."""
    after_fork_in_child(_disarm)


def _disarm() -> None:
    for group in OPEN_GROUPS:
        state = getattr(group, "state", None)
        group.__class__ = ForkedCommunicator
        if isinstance(state, NativeState) and isinstance(group, ForkedCommunicator):
            state.detach(group._refuse)
