"""The capability table of docs/debugging.md: every yes names a test, and that test exists."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.faults.corpus import programs

ROOT = Path(__file__).resolve().parents[2]
NAMES = {program.name for program in programs()}


def rows() -> list[list[str]]:
    """The cells of the table's rows."""
    text = (ROOT / "docs" / "debugging.md").read_text(encoding="utf-8")
    found = [line for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found]


@functools.cache
def functions_of(path: str) -> set[str]:
    """The names of the test functions in a file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_the_table_has_a_row_a_capability():
    assert [int(row[0]) for row in rows()] == list(range(1, 50))
    assert all(len(row) == 10 for row in rows())


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_a_yes_names_a_test_that_exists(row: list[str]):
    said, names = row[8], re.findall(r"`([^`]+)`", row[9])
    assert said[0] in "YP-", said
    assert bool(names) == (said[0] != "-"), "a yes needs a test, a no has none"
    for name in names:
        path, separator, test = name.partition("::")
        if separator:
            assert test in functions_of(path), name
        else:
            assert name in NAMES, f"no program of the corpus is called {name}"
