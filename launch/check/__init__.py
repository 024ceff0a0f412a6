"""Checks of a machine by `spmdrun`: MPI, cores, links."""
