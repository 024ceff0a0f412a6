"""The communicator of the ranks of one host, over shared memory."""
