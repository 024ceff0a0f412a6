"""Starts two ranks as the mpirun of another MPI would: numbered, and unknown to mpi4py's MPI."""

from __future__ import annotations

import os
import subprocess
import sys


def main() -> int:
    """Start the program of the command line twice; returns the first exit code that is not 0."""
    ranks = [
        subprocess.Popen(
            [sys.executable, *sys.argv[1:]],
            env={
                **os.environ,
                "OMPI_COMM_WORLD_RANK": str(rank),
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
        )
        for rank in range(2)
    ]
    codes = [rank.wait() for rank in ranks]
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
