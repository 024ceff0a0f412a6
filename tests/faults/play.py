"""Runs one program of the corpus as a rank of a job: `spmdrun -n 3 play.py mismatched.operator`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Find the program, note when it begins, and run it to its end."""
    sys.path.insert(0, str(ROOT))
    from tests.faults.corpus import find

    program = find(sys.argv[1])
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
    if folder := os.environ.get("SPMD_FAULTS_FOLDER"):
        Path(folder, f"began-{rank}").write_text(repr(time.time()))
    program.body(rank)


if __name__ == "__main__":
    main()
