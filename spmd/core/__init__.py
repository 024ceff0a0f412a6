"""The tracer, the IR and the transformations. Knows no operation, no kernel and no MPI."""
