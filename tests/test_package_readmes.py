"""Each package of spmd has a README: what lives there, what must not, and a current table of files.

The head is written by hand; the table under `## Files` is the first sentence of each module's
docstring. `pytest tests/test_package_readmes.py --update-golden` writes the tables anew.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(
    folder
    for folder in {path.parent for path in (ROOT / "spmd").rglob("*.py")}
    if folder != ROOT / "spmd"
)
FILES = "## Files\n"


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def first_sentence(path: Path) -> str:
    """The first line of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = docstring.partition("\n\n")[0].replace("\n", " ")
    sentence, stop, _ = paragraph.partition(". ")
    return (sentence + stop.strip()).removesuffix(".")


def table(folder: Path) -> str:
    """The modules of a package with what each says about itself."""
    modules = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    rows = [f"| [{path.name}]({path.name}) | {first_sentence(path)} |" for path in modules]
    inner = [f for f in PACKAGES if f.parent == folder and (f / "__init__.py").exists()]
    rows += [
        f"| [{inside.name}/]({inside.name}/) | {first_sentence(inside / '__init__.py')} |"
        for inside in inner
    ]
    return "\n".join(["| file | what it is |", "|---|---|", *rows]) + "\n"


@pytest.mark.parametrize("folder", PACKAGES, ids=_name)
def test_readme_is_current(folder, golden):
    readme = folder / "README.md"
    assert readme.exists(), f"{_name(readme)}: say what lives in this package and what must not"
    head, found, _ = readme.read_text(encoding="utf-8").partition(FILES)
    assert found, f"{_name(readme)} ends with a section {FILES.strip()!r}"
    assert "not" in head.lower(), "a package also says what must not live in it"
    golden(readme, f"{head}{FILES}\n{table(folder)}")
