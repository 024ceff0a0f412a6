"""`--inject`: reads faults before ranks start, so that a typing error costs no job.

The meaning of a fault is known in one place, `spmd/transport/fault_injection.py`, which runs in the
ranks; a child process asks it, since the launcher itself does without spmd.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from .options import UsageError

_ASK = """
import sys
from spmd.transport import fault_injection as inject
if sys.argv[2:] == ["help"]:
    sys.exit(print(inject.HELP))
try:
    inject.parse(";".join(sys.argv[2:]), int(sys.argv[1]))
except ValueError as error:
    sys.exit(f"--inject {error}")
"""


def check(faults: Sequence[str], ranks: int) -> None:
    """Raise `UsageError` for a fault that cannot be meant."""
    if faults and (asked := _ask(faults, ranks)).returncode:
        raise UsageError((asked.stderr.strip().splitlines() or ["--inject needs spmd"])[-1])


def show_help() -> int:
    """Print which faults there are."""
    asked = _ask(["help"], 1)
    sys.stdout.write(asked.stdout)
    sys.stderr.write(asked.stderr)
    return asked.returncode


def _ask(faults: Sequence[str], ranks: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _ASK, str(ranks), *faults], capture_output=True, text=True
    )
