"""The communicator over MPI, and recovery from lost ranks."""
