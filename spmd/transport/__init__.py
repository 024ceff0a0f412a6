"""How ranks reach each other: one interface, and one implementation for each way.

`communicator` holds the interface, `world.world()` gives the communicator of this job.
"""
