"""Statements about shardings, transformations, control flow and trees give what they give in JAX.

Where JAX raises, our exception is an instance of a class with the same name; messages are ours.
What JAX gives is kept in tests/golden/jax, because JAX needs minutes for it. Nightly tests ask JAX
itself, and so does a statement that is new. `pytest --update-golden` asks JAX and keeps it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import GOLDEN

FILES = sorted(Path(__file__).parent.glob("*_statements/*.txt"))


def kept_of(path: Path) -> Path:
    """Where the results of JAX are kept for the statements of a file."""
    return GOLDEN / "jax" / path.parent.name / f"{path.stem}.json"


def results_of(library: str, path: Path, run_python: Any) -> dict[str, Any]:
    """What each statement gives in a library, in a process of its own."""
    done = run_python(["-m", "tests.jax.side_by_side", library, str(path)], timeout=400)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def differing(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """The statements that give something else here."""
    return {
        statement: (wanted, ours[statement])
        for statement, wanted in theirs.items()
        if wanted != ours[statement]
        and not (isinstance(wanted, list) and wanted[0] in ours[statement])
    }


def test_there_are_statements():
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_statements_give_what_they_give_in_jax(path: Path, run_python: Any, request: Any):
    ours = results_of("spmd", path, run_python)
    kept = kept_of(path)
    theirs = json.loads(kept.read_text()) if kept.exists() else {}
    if theirs.keys() != ours.keys() or request.config.getoption("--update-golden"):
        pytest.importorskip("jax", reason="new statements need JAX, their oracle: pip install jax")
        theirs = results_of("jax", path, run_python)
        if request.config.getoption("--update-golden"):
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(theirs, indent=0, ensure_ascii=False) + "\n")
    assert theirs and theirs.keys() == ours.keys()
    wrong = differing(theirs, ours)
    assert not wrong, "\n".join(f"{s}\n  JAX: {w}\n  here: {o}" for s, (w, o) in wrong.items())


@pytest.mark.nightly
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_kept_is_what_jax_gives(path: Path, run_python: Any):
    pytest.importorskip("jax", reason="JAX is the oracle of this test: pip install jax")
    theirs = json.loads(kept_of(path).read_text())
    assert theirs == results_of("jax", path, run_python)
