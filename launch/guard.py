"""Started by mpirun on every rank: finds the package that this file lies in, and runs its guard.

mpirun starts it by its path, isolated from the program's environment, so the package has to be put
on the module path by hand; it goes last, and only the launcher's own modules are taken from there.
"""

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    sys.path.append(str(HERE.parent))
    sys.exit(importlib.import_module(f"{HERE.name}.supervise.rank").main())
