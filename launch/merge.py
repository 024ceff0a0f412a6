"""Started by rank 0 when a job with a timeline ends: merges the traces of all ranks.

It is started by its path, isolated from the program's environment, like a guard.
"""

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    sys.path.append(str(HERE.parent))
    command = importlib.import_module(f"{HERE.name}.spmd_command")
    sys.exit(command.main(["trace", "--quiet", *sys.argv[1:]]))
