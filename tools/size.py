"""How large spmd is: lines of code by package, and its longest files, folders and functions.

    python tools/size.py                # the packages of spmd/ and launch/
    python tools/size.py spmd/compile   # the packages inside one
    python tools/size.py --against main~20

A line of code has something on it that is neither comment nor docstring. `--against` also prints
what each package had in another commit.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("spmd", "launch")
LONGEST = 12
_NO_CODE = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
)


def docstrings(tree: ast.AST) -> set[int]:
    """The lines of all docstrings, and of other strings that stand alone."""
    alone = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
    return {k for node in alone for k in range(node.lineno, (node.end_lineno or 0) + 1)}


def code_lines(source: str) -> int:
    """The lines of a module that are code.

    >>> code_lines('"What it does."\\n\\nx = 1  # why\\n# more\\n')
    1
    """
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            used.update(range(token.start[0], token.end[0] + 1))
    return len(used - docstrings(ast.parse(source)))


def functions(path: str, source: str) -> Iterator[tuple[int, str]]:
    """The length of each function, and where it is."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            yield length, f"{path}:{node.lineno} {node.name}"


def sources(within: str, commit: str | None) -> dict[str, str]:
    """The modules inside a folder, now or in a commit: path to source."""
    if commit is None:
        found = sorted((ROOT / within).rglob("*.py"))
        return {p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8") for p in found}
    names = _git("ls-tree", "-r", "--name-only", commit, "--", within).split()
    return {name: _git("show", f"{commit}:{name}") for name in names if name.endswith(".py")}


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def package(path: str, within: str) -> str:
    """The folder or file just inside `within` that a path lies in."""
    inside = PurePosixPath(path).relative_to(within).parts
    return f"{within}/{inside[0]}" if len(inside) > 1 else f"{within}/*.py"


def by_package(modules: dict[str, str], within: str) -> Counter[str]:
    """The lines of code of each package."""
    lines: Counter[str] = Counter()
    for path, source in modules.items():
        lines[package(path, within)] += code_lines(source)
    return lines


def _print_longest(title: str, found: list[tuple[int, str]]) -> None:
    print(f"\n{title}")
    for count, name in sorted(found, reverse=True)[:LONGEST]:
        print(f"  {count:6d}  {name}")


def main(arguments: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="How large spmd is.")
    parser.add_argument("folders", nargs="*", default=PACKAGES, help="spmd and launch if none")
    parser.add_argument("--against", metavar="COMMIT", help="also print what this commit had")
    options = parser.parse_args(arguments)
    every: dict[str, str] = {}
    total, before_total = 0, 0
    with_before = bool(options.against)
    print(f"{'lines of code':40} {'now':>8}" + f" {options.against!s:>12}" * with_before)
    for folder in options.folders:
        modules = sources(folder, None)
        now = by_package(modules, folder)
        before = by_package(sources(folder, options.against), folder) if with_before else now
        for name in sorted({*now, *before}):
            print(f"{name:40} {now[name]:8d}" + f" {before[name]:12d}" * with_before)
        total, before_total = total + now.total(), before_total + before.total()
        every |= modules
    print(f"{'together':40} {total:8d}" + f" {before_total:12d}" * with_before)
    folders = Counter(str(PurePosixPath(path).parent) for path in every)
    _print_longest("longest files, lines", [(s.count("\n"), p) for p, s in every.items()])
    _print_longest("largest folders, modules", [(n, name) for name, n in folders.items()])
    long = [found for path, source in every.items() for found in functions(path, source)]
    _print_longest("longest functions, lines", long)


if __name__ == "__main__":
    main()
