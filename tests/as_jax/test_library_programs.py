"""The programs of examples/libraries: each library runs unmodified with spmd in JAX's place."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "library_table.py"


def _tool() -> Any:
    spec = importlib.util.spec_from_file_location("library_table", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["library_table"] = module
    spec.loader.exec_module(module)
    return module


table = _tool()
PROGRAMS = {program.name: program for program in table.programs()}


def checked(name: str) -> Any:
    """A program whose library is installed."""
    program = PROGRAMS[name]
    if program.version is None:
        pytest.skip(f'{program.library} is not installed: pip install -e ".[libraries]"')
    return program


@pytest.mark.parametrize("name", [n for n, p in PROGRAMS.items() if not p.ranks])
def test_library_runs(name: str):
    assert checked(name).run() is None


@pytest.mark.mpi
@pytest.mark.parametrize("name", [n for n, p in PROGRAMS.items() if p.ranks])
def test_library_runs_on_two_ranks(name: str, mpirun: object):
    assert checked(name).run() is None


def test_every_row_of_the_table_is_of_a_program():
    rows = table.rows_of(table.PAGE.read_text(encoding="utf-8"))
    assert rows.keys() <= PROGRAMS.keys()
    assert all(line.endswith(("| runs |", "| runs on 2 ranks |")) for line in rows.values())


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_says_what_it_does(name: str):
    program = PROGRAMS[name]
    assert program.library and program.about, "its docstring begins with `library: what it does.`"
