"""`python -m spmd prepare`: put what a machine needs whatever it computes on the disk, once.

    python -m spmd prepare                      # into the folder of SPMD_CACHE_DIR
    python -m spmd prepare --cache-dir DIR

The command `spmd prepare` does the same. `spmd` has others, which need nothing of the library.
"""

from __future__ import annotations

import argparse
import sys
import time

from spmd.base.config import config
from spmd.base.errors import ArgumentError
from spmd.compile.native.llvm.compiler import host
from spmd.compile.native.llvm.object_cache import object_cache
from spmd.compile.precompile import prepare

_ABOUT = "Put what a machine needs whatever it computes on the disk, once."


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m spmd", description=_ABOUT)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser(
        "prepare",
        help="compile what belongs to this processor and not to a program",
        description="Compile the native runtime, matrix products, convolutions and reductions for "
        "this processor into the compile cache, so that no program waits for them. Entries "
        "that are there already stay as they are.",
    )
    command.add_argument("--cache-dir", metavar="DIR", help="default: SPMD_CACHE_DIR")
    options = parser.parse_args(argv)
    if options.cache_dir is not None:
        config.update("cache_dir", options.cache_dir)
    try:
        return run_prepare()
    except ArgumentError as error:
        sys.stderr.write(f"spmd {error}\n")
        return 1


def run_prepare() -> int:
    """`prepare`: a line for each part, and the total."""
    start = time.perf_counter()
    print(
        f"for {host().cpu} with LLVM {host().llvm_version}, into {object_cache.folder}", flush=True
    )
    made = there = 0
    for part in prepare():
        found = max(part.texts - part.compiled, 0)
        made, there = made + part.compiled, there + found
        print(
            f"{part.name:18} {part.compiled:4} compiled {found:4} there {part.seconds:7.2f} s",
            flush=True,
        )
    print(f"{'all':18} {made:4} compiled {there:4} there {time.perf_counter() - start:7.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
