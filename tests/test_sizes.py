"""The shape of the source as a test: file length, line width, docstrings, forgotten notes.

A file that outgrows its limit holds more than one idea; a reader holds one at a time.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("spmd", "launch", "tests", "examples", "benchmarks", "docs")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
LIBRARY = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in ("spmd", "launch")]

MOST_LINES = 800
MOST_COLUMNS = 100
# The style asks for functions of about 40 lines; past this they are split, not discussed.
MOST_FUNCTION_LINES = 100
MOST_MODULES = 25
# One family of operations is one module, and there are as many families; these may not grow.
LARGE_FOLDERS = {"spmd/lax": 49, "spmd/numpy": 44}
MOST_PROSE_COLUMNS = 120
DOCUMENTS = sorted(
    path
    for path in (*ROOT.glob("*.md"), *(p for f in FOLDERS for p in (ROOT / f).rglob("*.md")))
    if not {"golden", "api"} & {*path.relative_to(ROOT).parts}
)


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_file_is_short_and_narrow(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    wide = [i for i, line in enumerate(lines, 1) if len(line) > MOST_COLUMNS]
    assert len(lines) <= MOST_LINES, f"{len(lines)} lines; split it at its ideas"
    assert not wide, f"lines {wide} are wider than {MOST_COLUMNS} columns"


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_module_says_what_it_is(path):
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring, "a module starts with a docstring: what it is, and the one idea to know"
    first = docstring.partition("\n\n")[0].replace("\n", " ")
    assert first.endswith((".", ":", "!", "?")), f"not a sentence: {first!r}"


@pytest.mark.parametrize("path", LIBRARY, ids=_name)
def test_functions_are_short(path):
    long = [
        f"line {node.lineno}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 > MOST_FUNCTION_LINES
    ]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("path", LIBRARY, ids=_name)
def test_no_note_without_an_issue(path):
    text = path.read_text(encoding="utf-8")
    notes = re.findall(r"^.*\b(?:TODO|FIXME|XXX|HACK)\b(?!\(#\d+\)).*$", text, flags=re.M)
    assert not notes, "\n".join(notes)


@pytest.mark.parametrize("path", LIBRARY, ids=_name)
def test_docstrings_begin_with_a_subject(path):
    """The first word is a noun or a verb, and no clause stands for the subject."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    first = [(ast.get_docstring(node) or "").partition("\n")[0] for node in nodes]
    clauses = [line for line in first if re.match(r"(What|Who|Whoever|Where|When|Why)\b", line)]
    assert not clauses


def test_folders_are_small():
    """A folder is a stage or a subsystem: what has more modules is several."""
    folders = Counter(_name(path.parent) for path in LIBRARY)
    large = {
        name: count
        for name, count in folders.items()
        if count > LARGE_FOLDERS.get(name, MOST_MODULES)
    }
    assert not large


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_prose_is_narrow(path):
    """Tables and code keep their lines."""
    wide, in_code = [], False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        in_code ^= line.lstrip().startswith("```")
        if not in_code and not line.lstrip().startswith("|") and len(line) > MOST_PROSE_COLUMNS:
            wide.append(number)
    assert not wide, f"lines {wide} are wider than {MOST_PROSE_COLUMNS} columns"


def test_top_level_is_the_house():
    documents = {"README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"}
    folders = {"spmd", "launch", "tests", "docs", "examples", "benchmarks", "tools"}
    scratch = {"shared", "build", "dist", "runs", "__pycache__"}
    seen = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert seen - scratch == documents | folders | {"pyproject.toml"}
