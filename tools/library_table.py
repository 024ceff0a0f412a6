"""docs/libraries.md's table: which of JAX's libraries ran on spmd, in which version, doing what.

    python tools/library_table.py            # runs examples/libraries/, and writes the table
    python tools/library_table.py --check    # runs them, and says what differs from the table

Needs the libraries: `pip install -e ".[libraries]"`. Each program runs in a process of its own with
spmd in JAX's place, and must end well; `parallel/` runs on two ranks as well. A library that is not
installed keeps its row.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ROOT / "examples" / "libraries"
PAGE = ROOT / "docs" / "libraries.md"
HEAD = "| library | version | program | what it does | result |\n|---|---|---|---|---|\n"
# By the beginning of a program's name, the distribution whose version counts.
DISTRIBUTIONS = {
    "e3nn": "e3nn-jax",
    "flax_linen": "flax",
    "flax_nnx": "flax",
    "haiku": "dm-haiku",
    "jax_cosmo": "jax-cosmo",
    "jax_md": "jax-md",
    "mjx": "mujoco-mjx",
    "orbax": "orbax-checkpoint",
    "ott": "ott-jax",
    "tfp": "tfp-nightly",
}


@dataclass(frozen=True)
class Program:
    """One program of examples/libraries/; those in `parallel/` run on two ranks."""

    path: Path

    @property
    def name(self) -> str:
        """Its path from the folder of all."""
        return self.path.relative_to(PROGRAMS).as_posix()

    @property
    def ranks(self) -> int:
        """On how many ranks it runs; 0 means one process without spmdrun."""
        return 2 if self.path.parent.name == "parallel" else 0

    def _docstring(self) -> str:
        text = ast.get_docstring(ast.parse(self.path.read_text(encoding="utf-8"))) or ""
        return text.partition("\n\n")[0].replace("\n", " ")

    @property
    def library(self) -> str:
        """The library, as the program's first line names it."""
        return self._docstring().partition(":")[0]

    @property
    def about(self) -> str:
        """The purpose of the program, from its first line."""
        return self._docstring().partition(":")[2].strip().removesuffix(".")

    @property
    def version(self) -> str | None:
        """The version of the library that is installed; None without one."""
        stem = self.path.stem
        found = next((d for start, d in DISTRIBUTIONS.items() if stem.startswith(start)), None)
        try:
            return importlib.metadata.version(found or stem.partition("_")[0])
        except importlib.metadata.PackageNotFoundError:
            return None

    def run(self) -> str | None:
        """Run it; None if it ended well, else the last line that it printed."""
        command = [sys.executable, "-m", "spmd.as_jax", str(self.path)]
        if self.ranks:
            launch = [sys.executable, "-m", "spmd_launch", "-n", str(self.ranks), "--as-jax"]
            command = [*launch, str(self.path)]
        unset = "XLA_FLAGS", "SPMD_NUM_CPU_DEVICES"
        env = {k: v for k, v in os.environ.items() if k not in unset}
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=900)
        if done.returncode == 0:
            return None
        return next(iter(done.stderr.strip().splitlines()[::-1]), f"exit code {done.returncode}")

    def row(self, version: str, result: str) -> str:
        """Its line of the table."""
        link = f"[{self.name}](../examples/libraries/{self.name})"
        return f"| {self.library} | {version} | {link} | {self.about} | {result} |"


def programs() -> list[Program]:
    """All programs, in order."""
    return [Program(path) for path in sorted(PROGRAMS.rglob("*.py"))]


def rows_of(page: str) -> dict[str, str]:
    """The rows of a page's table, by the name of the program."""
    found = re.findall(r"^\|.*\[([\w/]+\.py)\]\(.*$", page, flags=re.M)
    lines = [line for line in page.splitlines() if "](../examples/libraries/" in line]
    return dict(zip(found, lines, strict=True))


def main() -> int:
    """Run everything; returns an exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    before, rows, failed = rows_of(page), [], []
    for program in programs():
        version = program.version
        if version is None:
            print(f"{program.name}: {program.library} is not installed", flush=True)
            rows += [before[program.name]] if program.name in before else []
            continue
        error = program.run()
        print(f"{program.name}: {error or 'ran'}", flush=True)
        failed += [program.name] if error else []
        where = f"runs on {program.ranks} ranks" if program.ranks else "runs"
        rows.append(program.row(version, "fails" if error else where))
    new = page[: page.index(HEAD)] + HEAD + "\n".join(rows) + "\n"
    if not options.check:
        PAGE.write_text(new, encoding="utf-8")
    changed = new != page
    if changed:
        print("docs/libraries.md " + ("differs" if options.check else "was written"))
    return 1 if failed or (options.check and changed) else 0


if __name__ == "__main__":
    sys.exit(main())
