"""`import spmd` costs at most 150 ms more than `import numpy`.

The figure is the difference of two minima over alternating fresh processes. A minimum is not
disturbed by a busy machine if there are enough attempts, so the loop ends at the first success.
"""

from __future__ import annotations

import subprocess
import sys
import time

LIMIT = 0.150
ATTEMPTS = 25


def _seconds(statement: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True, stdin=subprocess.DEVNULL)
    return time.perf_counter() - start


def test_import_is_quick():
    _seconds("import spmd")  # writes the byte code
    alone = with_spmd = float("inf")
    for _ in range(ATTEMPTS):
        alone = min(alone, _seconds("import numpy"))
        with_spmd = min(with_spmd, _seconds("import numpy, spmd"))
        if with_spmd - alone < LIMIT:
            return
    added = 1000 * (with_spmd - alone)
    raise AssertionError(f"import spmd adds {added:.0f} ms to numpy's {1000 * alone:.0f} ms")
