"""How ranks reach each other: one interface, and one implementation for each way.

`base` holds the interface, `bootstrap.world()` gives the communicator of this job.
"""

from spmd.collectives.transport.base import Communicator, ReduceOp
from spmd.collectives.transport.local import LocalGroup
from spmd.collectives.transport.single import SingleCommunicator

__all__ = ["Communicator", "LocalGroup", "ReduceOp", "SingleCommunicator"]
