"""How ranks reach each other: one interface, and one implementation for each way.

`communicator` holds the interface, `world.world()` gives the communicator of this job.
"""

from spmd.transport.communicator import Communicator, ReduceOp
from spmd.transport.single import SingleCommunicator
from spmd.transport.threads import LocalGroup

__all__ = ["Communicator", "LocalGroup", "ReduceOp", "SingleCommunicator"]
