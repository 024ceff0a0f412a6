"""Statements about shardings, transformations, control flow and trees give what they give in JAX.

Where JAX raises, our exception is an instance of a class with the same name; messages are ours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jax", reason="JAX is an oracle of these tests: pip install jax")

FILES = sorted(Path(__file__).parent.glob("*_statements/*.txt"))


def test_there_are_statements():
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_statements_give_what_they_give_in_jax(path: Path, run_python: Any):
    found = []
    for library in "jax", "spmd":
        done = run_python(["-m", "tests.jax.side_by_side", library, str(path)], timeout=400)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    theirs, ours = found
    assert theirs and theirs.keys() == ours.keys()
    wrong = {
        statement: (wanted, ours[statement])
        for statement, wanted in theirs.items()
        if wanted != ours[statement]
        and not (isinstance(wanted, list) and wanted[0] in ours[statement])
    }
    assert not wrong, "\n".join(f"{s}\n  JAX: {w}\n  here: {o}" for s, (w, o) in wrong.items())
