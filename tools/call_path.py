"""The way of a call through spmd: files, functions, and calls from one file into another.

    python tools/call_path.py           # a row for each kind of call
    python tools/call_path.py first     # the files and functions of jit(grad(f))'s first call

Each kind of call has a process of its own with an empty disk cache; `from-disk` has that of another
process. The work of other threads is not counted, nor that of imports.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = f"{ROOT / 'spmd'}{os.sep}"

GRADIENT = """
import numpy as np, spmd, spmd.numpy as snp
f = spmd.jit(spmd.grad(lambda w: snp.sum(snp.tanh(w @ w) * w)))
x = snp.asarray(np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8))
call = lambda: f(x)
"""
REDUCTION = """
import numpy as np, spmd
from spmd import lax
f = spmd.pmap(lambda x: lax.psum(x, "i"), axis_name="i")
x = np.ones((2, 8), np.float32)[: spmd.local_device_count()]
call = lambda: f(x)
"""

# Of each row: the program, how many calls come before, the devices, whether a process has made the
# program before, and the ranks.
ROWS: dict[str, tuple[str, int, int, bool, int]] = {
    "first": (GRADIENT, 0, 1, False, 1),
    "second": (GRADIENT, 1, 1, False, 1),
    "third": (GRADIENT, 2, 1, False, 1),
    "from-disk": (GRADIENT, 0, 1, True, 1),
    "from-disk-second": (GRADIENT, 1, 1, True, 1),
    "pmap-first": (REDUCTION, 0, 2, False, 1),
    "pmap-second": (REDUCTION, 1, 2, False, 1),
    "pmap-third": (REDUCTION, 2, 2, False, 1),
    "ranks-first": (REDUCTION, 0, 1, False, 2),
    "ranks-third": (REDUCTION, 2, 1, False, 2),
}


class Passage:
    """Counts what a call passes through: a profile function. The wait for results is not part."""

    def __init__(self) -> None:
        self.functions: Counter[tuple[str, str]] = Counter()
        self.hops = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        if code.co_name == "<module>" or (frame.f_back and _imports(frame.f_back)):
            return
        self.functions[code.co_filename.removeprefix(PACKAGE), code.co_qualname] += 1
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != code.co_filename:
            self.hops += 1

    def follow(self, call: Callable[[], Any]) -> None:
        """Make the call and count what it passes through."""
        sys.setprofile(self)
        try:
            result = call()
        finally:
            sys.setprofile(None)
        result.block_until_ready()


def _imports(frame: FrameType | None) -> bool:
    """Whether a frame runs inside an import."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and "importlib" in str(
            frame.f_back and frame.f_back.f_code.co_filename
        ):
            return True
        frame = frame.f_back
    return False


def follow(row: str, details: bool) -> None:
    """Print the counts of a row, or its files with their functions."""
    program, before, *_ = ROWS[row]
    namespace: dict[str, Any] = {}
    exec(program, namespace)
    for _ in range(before):
        namespace["call"]().block_until_ready()
    path = Passage()
    path.follow(namespace["call"])
    files = {file for file, _ in path.functions}
    if int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", 0))):
        return
    if not details:
        print(f"{row:16} {len(files):6d} {len(path.functions):10d} {path.hops:6d}", flush=True)
        return
    for file in sorted(files):
        names = ", ".join(sorted(name for found, name in path.functions if found == file))
        print(f"{file}: {names}", flush=True)


def run(row: str, details: bool, cache: str) -> None:
    """Follow a row in a new process, or in new ranks."""
    _, _, devices, made, ranks = ROWS[row]
    environ = os.environ | {"SPMD_CACHE_DIR": cache, "SPMD_NUM_CPU_DEVICES": str(devices)}
    environ["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, __file__, "--here", row, *["--details"] * details]
    if ranks > 1:
        command = [sys.executable, "-m", "launch", "-n", str(ranks), *command[1:]]
    for silent in (True, False) if made else (False,):
        out = subprocess.DEVNULL if silent else None
        subprocess.run(command, env=environ, cwd=ROOT, stdout=out, check=True)


def main(arguments: list[str] | None = None) -> None:
    """Print a table of all rows, or the files of some."""
    parser = argparse.ArgumentParser(description="The way of a call through spmd.")
    parser.add_argument("rows", nargs="*", metavar="row", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--here", metavar="ROW", help=argparse.SUPPRESS)
    parser.add_argument("--details", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.here:
        follow(options.here, options.details)
        return
    if not options.rows:
        print(f"{'call':16} {'files':>6} {'functions':>10} {'hops':>6}", flush=True)
    for row in options.rows or ROWS:
        with tempfile.TemporaryDirectory() as cache:
            run(row, bool(options.rows), cache)


if __name__ == "__main__":
    main()
