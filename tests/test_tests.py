"""The tests as a subject: they ask the public behaviour, and stand where their subject stands.

A test that reads a private attribute fails when the code is written better. `PRIVATE` holds the
uses that are left, each with its reason; it may only become shorter.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import worker_group

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
SOURCES = sorted(TESTS.rglob("*.py"))

# Underscores that are part of a public name: `os._exit`, and what every namedtuple has.
PUBLIC = {"_exit", "_asdict", "_fields", "_replace"}

# By reason: the file below tests/, and the private names that it uses.
PRIVATE: dict[str, dict[str, set[str]]] = {
    "a failure of the system or of a peer, planted where no public call can cause it": {
        "compile/native/llvm/test_linker.py": {"_mprotect"},
        "compile/native/runtime/ir/test_rank_collectives.py": {
            "_pages",
            "_read",
            "_sees_processes",
        },
    },
    "a fast path switched off, or its twin called, which has no switch of its own": {
        "compile/passes/fusion/test_memo.py": {"_merge_all"},
        "lax/linalg/test_lapack.py": {"_FEW", "_eliminate", "_module", "_permutation", "_routine"},
    },
    "a part that a test leaves out, so that a check has something to find": {
        "compile/cuda/test_overlap.py": {"_let_go"},
        "compile/schedule/test_memory_check.py": {"_read_before"},
    },
    "JAX's internal names that libraries use, and that spmd has for them": {
        "as_jax/test_extend.py": {"_registry", "_src"},
        "jax/test_xla_shardings.py": {"_to_xla_hlo_sharding"},
    },
    "a table that a test completes or leaves as it was": {
        "as_jax/test_mutable_types.py": {"_boxes"},
        "compile/native/program/test_stored.py": {"_registry"},
        "compile/native/runtime/test_load.py": {"_OF_STEPS"},
    },
    "JAX's internal function, the only one that makes weak types of any dtype": {
        "base/test_dtypes.py": {"_convert_element_type"},
    },
    "a lock, held as another thread holds it at the moment of a fork": {
        "base/test_background.py": {"_lock"},
        "transport/test_progress_thread.py": {"_lock"},
    },
    "examples of what the search finds": {"test_tests.py": {"_b", "_f"}},
}

# Folders whose tests have another subject than a package of spmd or launch.
OTHER_SUBJECTS = {
    "faults": "programs with faults, and what a job says of them",
    "jax": "programs under both libraries",
    "multiprocess": "jobs of several processes",
    "numpy/array_api": "the standard's own table of functions",
}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in PUBLIC


def _programs(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a module, and of the programs that stand in it as strings."""
    for inner in ast.walk(node):
        yield inner
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            if "import " in inner.value:
                try:
                    yield from _programs(ast.parse(inner.value))
                except SyntaxError:
                    pass  # prose, or a program that is put together


def private_names(text: str) -> set[str]:
    """The private names that a module uses of others: attributes, imports, `setattr` and such."""
    found: set[str] = set()
    for node in _programs(ast.parse(text)):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls" | "super")):
                pass
            case ast.Attribute(attr=name):
                found.add(name)
            case ast.ImportFrom(module=module, names=names):
                found.update(name.name for name in names)
                found.update((module or "").split("."))
            case ast.Import(names=names):
                found.update(part for name in names for part in name.name.split("."))
            case ast.Call(
                func=ast.Attribute(attr="setattr" | "delattr" | "object")
                | ast.Name(id="setattr" | "getattr" | "delattr" | "hasattr"),
                args=[_, ast.Constant(value=str(name)), *_],
            ):
                found.add(name)
            case ast.Call(
                func=ast.Attribute(attr="setattr"), args=[ast.Constant(value=str(path)), *_]
            ):
                found.update(path.split("."))
    return {name for name in found if _is_private(name)}


def test_tests_use_no_private_names():
    listed: dict[str, set[str]] = {}
    for files in PRIVATE.values():
        for file, names in files.items():
            listed.setdefault(file, set()).update(names)
    used = {}
    for path in SOURCES:
        names = private_names(path.read_text(encoding="utf-8"))
        if names:
            used[path.relative_to(TESTS).as_posix()] = names
    new = {f: n - listed.get(f, set()) for f, n in used.items() if n - listed.get(f, set())}
    assert not new, f"ask for the public behaviour instead: {new}"
    gone = {f: n - used.get(f, set()) for f, n in listed.items() if n - used.get(f, set())}
    assert not gone, f"the exceptions may only become fewer; remove: {gone}"


@pytest.mark.parametrize(
    "text, names",
    [
        ("x._a + self._b + y.__c__", {"_a"}),
        ("from m import _f, g", {"_f"}),
        ("import a._b.c", {"_b"}),
        ("monkeypatch.setattr(m, '_f', None); getattr(m, '_g')", {"_f", "_g"}),
        ("monkeypatch.setattr('m._n.f', None)", {"_n"}),
        ("run('import m\\nm._f()')", {"_f"}),
        ("os._exit(0); point._replace(x=1)", set()),
        ("print('_a'); _f()", set()),
    ],
)
def test_the_search_finds_private_names(text: str, names: set[str]):
    assert private_names(text) == names


# ---- where tests stand ---------------------------------------------------------------------------


def _subject(path: Path) -> Path:
    """The folder of code that a folder of tests stands for."""
    place = path.relative_to(TESTS)
    return ROOT / place if place.parts[:1] == ("launch",) else ROOT / "spmd" / place


@pytest.mark.parametrize(
    "folder",
    sorted({path.parent for path in TESTS.rglob("test_*.py")}),
    ids=lambda folder: folder.relative_to(TESTS).as_posix(),
)
def test_a_folder_of_tests_has_a_subject(folder: Path):
    name = folder.relative_to(TESTS).as_posix()
    assert name in OTHER_SUBJECTS or _subject(folder).is_dir()


@pytest.mark.parametrize(
    "path",
    sorted(TESTS.rglob("*/test_*.py")),
    ids=lambda path: path.relative_to(TESTS).as_posix(),
)
def test_a_test_stands_beside_the_tests_of_its_module(path: Path):
    """A test with the name of a module further down belongs into that module's folder."""
    name, subject = path.stem.removeprefix("test_"), _subject(path.parent)
    if path.parent.relative_to(TESTS).as_posix() in OTHER_SUBJECTS:
        return
    if (subject / f"{name}.py").exists() or (subject / name).is_dir():
        return
    deeper = [found.relative_to(ROOT).as_posix() for found in subject.rglob(f"{name}.py")]
    assert not deeper, f"this stands for {deeper}: move it there"


# ---- where tests run -----------------------------------------------------------------------------


def test_tests_that_start_mpirun_share_a_worker(request: pytest.FixtureRequest):
    marked = [item.nodeid for item in request.session.items if item.get_closest_marker("mpi")]
    assert {worker_group(test) for test in marked} <= {"mpi"}
    assert worker_group("tests/multiprocess/test_forks.py::test") == "mpi"
    assert worker_group("tests/test_types.py::test[a::b]") == "tests/test_types.py"
