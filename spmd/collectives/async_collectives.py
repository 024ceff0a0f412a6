"""A collective between processes in two halves: a program starts it, computes, and waits for it.

`start` hands the exchange to the progress thread, which makes all exchanges of the process in the
order in which they were started; `wait` returns when the result is there. In between neither
operand nor result may be touched: the schedule keeps both in use until the wait.
"""

from __future__ import annotations

import threading
from typing import Any

from spmd.base.config import config
from spmd.collectives.host_execution import HostCollective
from spmd.transport import world as bootstrap
from spmd.transport.flight_recorder import COLLECTIVE, FLIGHT
from spmd.transport.progress_thread import PROGRESS, Request


def overlaps() -> bool:
    """Whether programs overlap exchanges with computation: the same on all ranks. It pays between
    hosts. Ranks of one host exchange data with the cores that compute.
    """
    world = bootstrap.world()
    if config.overlap == "never" or not world.allows_overlap:
        return False
    return config.overlap == "always" or world.prefers_overlap


class AsyncCollective:
    """One collective of one program, for all local devices; each start is followed by one wait."""

    def __init__(self, collective: HostCollective):
        self._collective = collective
        self._label = collective.label_of(overlapped=True)
        fields = {k: collective.fields[k] for k in ("source", "path")}
        name = f"wait for {collective.prim.name}"
        self._waiting = FLIGHT.label("wait", program=name, of=self._label, **fields)
        # By the thread that runs the program: several may run it at once.
        self._flying: dict[int, Request] = {}

    def start(self, devices: Any, inputs: list[Any], outputs: list[Any]) -> None:
        """Hand the exchange over."""
        collective, log = self._collective, self._collective.comm.log
        place = log.enqueue(self._label, collective.nbytes) if log is not None else 0

        def move() -> None:
            if log is not None:
                log.take_up(place)
            succeeded = False
            try:
                collective.move(devices, inputs, outputs)
                succeeded = True
            finally:
                if log is not None:
                    log.landed(place, succeeded)

        self._flying[threading.get_ident()] = PROGRESS.send(move)

    def wait(self, devices: Any, inputs: list[Any], outputs: list[Any]) -> None:
        """Return when the result is there, or raise the error of the exchange."""
        transfer = self._flying.pop(threading.get_ident())
        if not transfer.has_ended:
            with FLIGHT.recorded(self._waiting, COLLECTIVE):
                PROGRESS.await_(transfer)
        if transfer.error is not None:
            raise transfer.error
