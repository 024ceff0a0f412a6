"""The communicator over MPI, and what is done when ranks are lost."""
