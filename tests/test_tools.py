"""The tools for those who work on spmd: pages made of docstrings, a comparison with JAX's API.

`pytest tests/test_tools.py --update-golden` writes docs/api anew.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest

from spmd.compile.native.llvm.cores import available_cores

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "api"


def _tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


pages = _tool("api_pages")
size = _tool("size")


@pytest.mark.parametrize("namespace", pages.NAMESPACES)
def test_pages_say_what_docstrings_say(namespace, golden):
    golden(PAGES / f"{namespace}.md", pages.page(namespace))


@pytest.mark.parametrize("namespace", pages.NAMESPACES)
def test_no_public_name_is_without_a_word(namespace):
    module = importlib.import_module(namespace)
    silent = [n for n, value in pages.public(module) if callable(value) and not value.__doc__]
    assert not silent


def test_there_is_no_page_of_something_gone():
    assert {path.stem for path in PAGES.glob("*.md")} == set(pages.NAMESPACES)


# ---- the comparison with JAX -------------------------------------------------------------------

LEAST_PARAMETERS = 97
# Of all names, and of those below all classes, the percentage that is here with JAX's parameters.
LEAST_MODULES, LEAST_CLASSES = 97.5, 87


@pytest.fixture(scope="module")
def coverage():
    """The tool, and what it finds, by namespace."""
    pytest.importorskip("jax", reason="compares with jax, which is not installed")
    tool = _tool("api_coverage")
    exclusions = tool.Exclusions.read(ROOT / "tools" / "api_exclusions.toml")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of modules that JAX is about to remove
        rows = [tool.measure(n, exclusions) for n in tool.namespaces()]
        rows += [tool.measure(n, exclusions) for n in tool.classes(rows)]
    return tool, {row.namespace: row for row in rows}


def _public_namespaces() -> list[str]:
    """The namespaces whose every name is here or left out for a reason."""
    scipy = "cluster.vq fft integrate interpolate linalg ndimage optimize signal sparse.linalg "
    scipy += "spatial.transform special stats stats.norm stats.poisson"
    own = "ad_checkpoint custom_batching custom_derivatives debug distributed dlpack dtypes export "
    own += "flatten_util image lax lax.linalg nn nn.initializers numpy numpy.fft numpy.linalg ops "
    own += "profiler random ref sharding stages tree tree_util typing"
    return ["", *own.split(), *(f"scipy.{name}" for name in scipy.split())]


@pytest.mark.parametrize("namespace", _public_namespaces())
def test_names_of_jax_are_here(coverage, namespace):
    row = coverage[1][namespace]
    assert not row.missing
    assert row.parameters >= LEAST_PARAMETERS, row.differ


def test_the_share_of_all_names_does_not_shrink(coverage):
    tool, rows = coverage
    for of_class, least in ((False, LEAST_MODULES), (True, LEAST_CLASSES)):
        whole = tool.Coverage("all")
        for row in rows.values():
            if row.of_class == of_class:
                whole.add(row)
        counted = len(whole.present) + len(whole.missing)
        assert 100 * (len(whole.present) - len(whole.differ)) / counted >= least


def test_namespaces_are_all_modules_of_jax(coverage):
    _, rows = coverage
    assert {"", "numpy", "experimental.sparse.bcoo", "extend.random", "interpreters.ad"} <= {*rows}
    assert {"Array", "sharding.Mesh", "tree_util.Partial"} & {*rows} >= {"Array"}
    assert not any(part.startswith("_") for name in rows for part in name.split("."))


def test_a_missing_name_is_counted(coverage):
    tool, _ = coverage
    nothing = tool.Exclusions({}, {}, {})
    row = tool.measure("lax", nothing)
    assert row.names < 100 and "psend" in row.missing and "sin" in row.present
    with_reasons = tool.report([row], nothing, show_missing=True)
    assert "missing: lax.after_all" in with_reasons


def test_what_can_only_be_imported_is_no_name_that_is_here(coverage):
    _, rows = coverage
    assert not rows["experimental.pallas"].present and rows["experimental.pallas"].excluded
    assert "emit_python_callback" in rows["interpreters.mlir"].excluded


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        (lambda a, b=1: 0, lambda a, b=1: 0, []),
        (lambda a, b=1: 0, lambda a, b=1, c=2: 0, []),
        (lambda a, /: 0, lambda x: 0, []),
        (lambda a, *, b: 0, lambda a, b=3: 0, []),
        (lambda a: 0, lambda *args, **kwargs: 0, ["lacks a"]),
        (lambda a, b=1: 0, lambda a, b=2: 0, ["b has default 2, not 1"]),
        (lambda a, b=1: 0, lambda a, b: 0, ["b has no default, not 1"]),
        (lambda a, b: 0, lambda b, a: 0, ["a is at place 1, not 0", "b is at place 0, not 1"]),
        (lambda a, b: 0, lambda a, *, b: 0, ["b is by name only"]),
        (lambda a: 0, lambda a, /: 0, ["a has no name"]),
        (lambda a: 0, lambda a, b: 0, ["asks for b"]),
        (lambda a, *args, **kwargs: 0, lambda a: 0, ["lacks *args", "lacks **kwargs"]),
    ],
)
def test_signatures_are_compared_whole(theirs, ours, said):
    tool = sys.modules.get("api_coverage") or _tool("api_coverage")
    sides = [list(inspect.signature(f).parameters.values()) for f in (theirs, ours)]
    assert tool.compare_signatures(*sides) == said


def test_the_comparison_runs_as_a_command():
    pytest.importorskip("jax", reason="compares with jax, which is not installed")
    tool = [sys.executable, str(ROOT / "tools" / "api_coverage.py")]
    done = subprocess.run(tool, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0 and "numpy" in done.stdout and "excluded (" in done.stdout
    assert re.search(r"all modules: \d\d\.\d % of \d+ names are here", done.stdout)


# ---- size.py -----------------------------------------------------------------------------------


def test_code_lines_are_neither_comments_nor_docstrings():
    source = '''"""A module."""

import os  # why

# A comment.
class C:
    """Two
    lines."""

    x = """two
    lines"""


def f(a,
      b):
    "More."
    return a
'''
    assert size.code_lines(source) == 1 + 3 + 3


def test_sizes_are_those_of_the_folders(capsys):
    size.main(["spmd/lax"])
    lines = capsys.readouterr().out.splitlines()
    row = next(line.split() for line in lines if line.startswith("spmd/lax/linalg "))
    assert int(row[1]) > 500
    together = next(line.split() for line in lines if line.startswith("together"))
    assert int(together[1]) > int(row[1])


# ---- call_path.py ------------------------------------------------------------------------------


def test_third_call_stays_in_one_file():
    command = [sys.executable, str(ROOT / "tools" / "call_path.py")]
    done = subprocess.run([*command, "third"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    files = [line.split(":")[0] for line in done.stdout.splitlines()]
    assert files == ["compile/dispatch/jit.py"], done.stdout


@pytest.mark.parametrize(
    ("row", "most_files", "most_hops"),
    [
        # Which thread loads the runtime depends on the time: that is 30 hops, 60 on a busy machine.
        ("first", 120, 2_000),
        # On one core the second call compiles what another thread prepares on two.
        ("second", 20, 100) if available_cores() > 1 else ("second", 45, 1_000),
    ],
)
def test_calls_pass_through_few_files(row: str, most_files: int, most_hops: int, tmp_path):
    command = [sys.executable, str(ROOT / "tools" / "call_path.py"), "--here", row]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SPMD_")}
    environ |= {"SPMD_CACHE_DIR": str(tmp_path), "SPMD_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ)
    assert done.returncode == 0, done.stderr
    _, files, _, hops = done.stdout.split()
    assert int(files) <= most_files and int(hops) <= most_hops, done.stdout


def test_the_architecture_names_what_the_first_call_passes_through():
    """Each row of ARCHITECTURE's table of a first call is on the way of one."""
    command = [sys.executable, str(ROOT / "tools" / "call_path.py"), "first"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    reached = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = page[page.index("The first call, in the order") : page.index("Later calls:")]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert 10 <= len(rows) <= 15
    for _, _, function, file in rows:
        path = file.strip("` |")
        assert function.strip("`") in reached.get(path, "").split(", "), (function, path)
