"""What `spmdrun` finds out about a machine: MPI, cores, links."""
