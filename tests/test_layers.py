"""The architecture as a test: which module may import which.

`FLOORS` is the house from the ground up. A module may import from its own floor and from those
below it. Everything is read with `ast`, nothing is imported, so a broken module still has a place.
"""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "spmd").rglob("*.py"))
LAUNCH_SOURCES = sorted((ROOT / "launch").rglob("*.py"))

# From the ground up. A name stands for the module and everything inside it; the longest name wins.
FLOORS = (
    "base",
    "transport",
    "core.aval core.ir core.primitive core.check",
    "core.axis core.trace core.mutable core.explicit core.stage",
    "core.structural core.rewrite core.rewriting core.trace_once",
    "core.jvp core.linearize core.transpose core.vmap core.custom_common core.custom "
    "core.custom_vjp core.jet core.linear_call core.remat core.call core.argument_names",
    "core",
    "lax",
    "collectives",
    "sharding",
    "partition",
    "compile.kernel compile.fingerprint compile.native.program.steps compile.definitions",
    "compile.expressions",
    "compile.lower",
    "compile.passes",
    "compile.schedule",
    "compile.native.llvm",
    "compile.native.program",
    "compile.native.runtime",
    "compile.native.cpython",
    "compile.native",
    "compile.cpu.math",
    "compile.cpu.codegen",
    "compile.cpu.fourier compile.cpu.linalg compile.cpu.matmul compile.cpu.sort",
    "compile.cpu.assemble",
    "compile.cpu compile.cuda",
    "compile.executable",
    "compile.dispatch",
    "compile",
    "api",
    "numpy random nn scipy",
    "ad_checkpoint checkify checkpoints custom_batching custom_derivatives custom_partitioning "
    "shard_alike tree tree_util flatten_util dtypes errors distributed multihost ops jet extend "
    "export debug profiler testing typing dlpack image ref stages example_libraries experimental "
    "_lazy_names __main__",
)

# Each optional or late package is imported by one module.
ONE_IMPORTER = ("mpi4py", "cupy", "llvmlite", "onnx")
# Never a dependency of the library: oracles and rivals.
FOREIGN = ("jax", "jaxlib", "torch", "tensorflow")


@dataclass(frozen=True)
class Import:
    """One import: who, whom, where, and whether inside a function."""

    importer: str
    module: str
    path: Path
    line: int
    nested: bool

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.module}"


def module_name(path: Path) -> str:
    """The dotted name of a source file; launch/ counts under its own folder name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def with_packages(names: set[str]) -> set[str]:
    """The names and those of all packages they lie in."""
    return {".".join(n.split(".")[:k]) for n in names for k in range(1, n.count(".") + 2)}


MODULES = with_packages({module_name(path) for path in (*SOURCES, *LAUNCH_SOURCES)})


def floor(module: str) -> int:
    """The floor of an spmd module; spmd itself is the roof, and `as_jax` stands on it."""
    inside = module.removeprefix("spmd").removeprefix(".")
    if not inside or inside.split(".")[0] == "as_jax":
        return len(FLOORS) + bool(inside)
    best, found = "", None
    for level, names in enumerate(FLOORS):
        for name in names.split():
            if (inside == name or inside.startswith(name + ".")) and len(name) > len(best):
                best, found = name, level
    assert found is not None, f"{module} has no floor: give it one in FLOORS (and ARCHITECTURE.md)"
    return found


@cache
def imports(path: Path) -> tuple[Import, ...]:
    """All imports of a file, also those that happen later or have a constant name."""
    importer = module_name(path)
    package = importer if path.name == "__init__.py" else importer.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    annotations = set(_annotations(tree))
    return tuple(
        Import(importer, module, path, line, nested)
        for node, nested in _walk(tree, nested=False)
        for module, line in _imported(node, package)
        if importer != LAZY and node not in annotations
    )


# The modules that its importers import when they use them: `from LAZY import name` imports another
# module, later, and that counts as the importer's import.
LAZY = "spmd.compile.lazy"


@cache
def _deferred() -> dict[str, str]:
    """The modules behind the names of `LAZY`."""
    tree = ast.parse((ROOT / f"{LAZY.replace('.', '/')}.py").read_text(encoding="utf-8"))
    assigned = (node for node in tree.body if isinstance(node, ast.Assign))
    return {
        node.targets[0].id: node.value.args[0].value
        for node in assigned
        if isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.args[0], ast.Constant)
    }


def _walk(node: ast.AST, nested: bool) -> Iterator[tuple[ast.AST, bool]]:
    yield node, nested
    inside = nested or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, inside)


def _annotations(tree: ast.AST) -> Iterator[ast.AST]:
    """The imports of `ANNOTATION` that no program runs: it is what functions on any floor return.

    Others under TYPE_CHECKING count: what is imported later is listed like that.
    """
    for block in ast.walk(tree):
        if isinstance(block, ast.If) and ast.unparse(block.test).endswith("TYPE_CHECKING"):
            for node in block.body:
                if isinstance(node, ast.ImportFrom) and node.module == ANNOTATION:
                    yield node


# The module of the class `Array`, for type checkers.
ANNOTATION = "spmd.sharding.array"

# Calls that import what their first argument names.
BY_NAME = ("import_module", "__import__", "Deferred")


def _imported(node: ast.AST, package: str) -> Iterator[tuple[str, int]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name, node.lineno
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, *filter(None, [base])])
        for alias in node.names:
            whole = f"{base}.{alias.name}"
            found = whole if whole in MODULES else base
            yield _deferred()[alias.name] if found == LAZY else found, node.lineno
    elif isinstance(node, ast.Call):
        name = ast.unparse(node.func).rpartition(".")[2]
        first = node.args[0] if node.args else None
        if name in BY_NAME and isinstance(first, ast.Constant):
            yield str(first.value), node.lineno


def _all_imports(sources: list[Path]) -> list[Import]:
    return [found for path in sources for found in imports(path)]


def _is_ours(module: str) -> bool:
    return module == "spmd" or module.startswith("spmd.")


def _graph(sources: list[Path]) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {module_name(path): set() for path in sources}
    for found in _all_imports(sources):
        # A package's __init__ runs before its parts anyway; only real requests count as edges.
        if _is_ours(found.module) and found.module != found.importer:
            graph[found.importer].add(found.module)
    return graph


# ---- the rules ---------------------------------------------------------------------------------


def test_imports_point_down():
    wrong = [
        f"{found} which is on a higher floor ({floor(found.module)} > {floor(found.importer)})"
        for found in _all_imports(SOURCES)
        if _is_ours(found.module) and floor(found.module) > floor(found.importer)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_backend_leaks_into_what_backends_share():
    """What CPU and CUDA have in common imports neither, and they don't import each other."""
    backends = ("spmd.compile.cpu", "spmd.compile.cuda")
    names = "kernel", "expressions", "lower", "passes", "schedule", "native"
    common = tuple(f"spmd.compile.{name}" for name in names)

    def lies_in(module: str, packages: tuple[str, ...]) -> bool:
        return any(module == p or module.startswith(p + ".") for p in packages)

    wrong = [
        str(found)
        for found in _all_imports(SOURCES)
        for backend in backends
        if lies_in(found.module, (backend,))
        and lies_in(found.importer, (*common, *(b for b in backends if b != backend)))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_of_spmd_inside_a_function():
    wrong = [
        f"{found} inside a function; move it to the top, or turn the dependency around"
        for found in _all_imports([*SOURCES, *LAUNCH_SOURCES])
        if found.nested and _is_ours(found.module)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_cycles():
    tuple(graphlib.TopologicalSorter(_graph(SOURCES)).static_order())  # CycleError prints the loop


def test_launch_stands_on_base_and_transport():
    allowed = ("spmd.base", "spmd.transport")
    wrong = [
        f"{found}; launch/ may import only {' and '.join(allowed)}"
        for found in _all_imports(LAUNCH_SOURCES)
        if _is_ours(found.module)
        and not any(found.module == a or found.module.startswith(a + ".") for a in allowed)
    ]
    assert not wrong, "\n".join(wrong)


# A part of CuPy with a door of its own: ranks need it, and no driver of GPUs.
_NCCL = "cupy.cuda.nccl"


def test_nccl_has_one_door():
    doors = {found.path.name for found in _all_imports(SOURCES) if found.module == _NCCL}
    assert doors == {"nccl.py"}


@pytest.mark.parametrize("package", ONE_IMPORTER)
def test_optional_package_has_one_door(package):
    doors = {
        str(found.path.relative_to(ROOT))
        for found in _all_imports(SOURCES)
        if found.module.split(".")[0] == package and found.module != _NCCL
    }
    assert len(doors) <= 1, f"{package} is imported in {sorted(doors)}; keep one"


def test_no_foreign_framework():
    wrong = [str(found) for found in _all_imports(SOURCES) if found.module.split(".")[0] in FOREIGN]
    assert not wrong, "\n".join(wrong)


def test_every_module_has_a_floor():
    for path in SOURCES:
        floor(module_name(path))


def test_import_spmd_loads_no_optional_package():
    packages = (*ONE_IMPORTER, *FOREIGN, "scipy", "multiprocessing")
    probe = f"import sys, spmd; print([m for m in {packages!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


# ---- the reader of imports is itself tested: a guard that can't fail guards nothing -------------


def test_reader_sees_every_way_to_import(tmp_path, monkeypatch):
    source = tmp_path / "spmd" / "core" / "probe.py"
    source.parent.mkdir(parents=True)
    source.write_text(
        "import spmd.api\n"
        "from spmd import lax\n"
        "from . import jvp\n"
        "from ..compile import kernel\n"
        "import importlib\n"
        "def f():\n"
        "    from spmd.core import ir\n"
        "    importlib.import_module('spmd.nn')\n"
        "later = Deferred('spmd.debug')\n"
        "from spmd.compile.lazy import pipeline\n"
        "if TYPE_CHECKING:\n"
        "    from spmd.sharding.array import Array\n"
        "    from spmd.sharding.spec import Mesh\n"
        "from spmd.sharding.array import alias\n"
    )
    lazy = tmp_path / "spmd" / "compile" / "lazy.py"
    lazy.parent.mkdir()
    lazy.write_text("pipeline = Deferred('spmd.compile.passes.pipeline')\n")
    _deferred.cache_clear()
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    names = ("spmd.lax", "spmd.core.jvp", "spmd.core.ir", "spmd.compile.kernel")
    monkeypatch.setitem(globals(), "MODULES", MODULES | set(names))
    seen = [(found.module, found.line, found.nested) for found in imports(source)]
    assert seen == [
        ("spmd.api", 1, False),
        ("spmd.lax", 2, False),
        ("spmd.core.jvp", 3, False),
        ("spmd.compile.kernel", 4, False),
        ("importlib", 5, False),
        ("spmd.core.ir", 7, True),
        ("spmd.nn", 8, True),
        ("spmd.debug", 9, False),
        ("spmd.compile.passes.pipeline", 10, False),
        ("spmd.sharding.spec", 13, False),
        ("spmd.sharding.array", 14, False),
    ]
    _deferred.cache_clear()


def test_floors_are_ordered():
    assert floor("spmd.base.config") < floor("spmd.transport.mpi.communicator")
    assert floor("spmd.transport.mpi.communicator") < floor("spmd.core.ir")
    assert floor("spmd.core.jvp") < floor("spmd.lax.elementwise") < floor("spmd.collectives.psum")
    assert floor("spmd.compile.passes.inline_calls") < floor("spmd.compile.native.llvm.compiler")
    assert floor("spmd.compile.executable.build") < floor("spmd.compile.dispatch.jit")
    assert floor("spmd.compile.native.llvm.compiler") < floor("spmd.api") < floor("spmd")


@pytest.mark.parametrize("package", ["spmd.numpy", "spmd.lax"])
def test_what_is_imported_later_is_not_hidden_by_its_module(package):
    """Importing `package.name` sets that attribute to the module, for good."""
    listing = ROOT / package.replace(".", "/") / "_lazy_names.py"
    found = [
        node for node in ast.parse(listing.read_text()).body if isinstance(node, ast.ImportFrom)
    ]
    names = {alias.asname or alias.name for node in found for alias in node.names}
    modules = {node.module.rpartition(".")[2] for node in found if node.module != package}
    assert modules and not names & modules


@pytest.mark.parametrize("package", ["spmd", "spmd.numpy", "spmd.lax"])
def test_what_a_package_imports_later_is_what_type_checkers_see(package):
    """`attach` has names of modules; the imports under `TYPE_CHECKING` are what this file reads."""
    tree = ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text())
    (table,) = (
        ast.literal_eval(node.args[1])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_attach"
    )
    (guarded,) = (
        node.body
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "_typing.TYPE_CHECKING"
    )
    seen = [
        alias.name
        for node in guarded
        if isinstance(node, ast.ImportFrom) and node.module == package
        for alias in node.names
    ]
    assert seen == sorted(table)


def test_deferred_modules_stand_in_the_table_of_the_compiler():
    """Modules of other floors are deferred where they are used."""
    found = [
        str(path.relative_to(ROOT / "spmd"))
        for path in SOURCES
        if " = Deferred(" in path.read_text(encoding="utf-8")
    ]
    assert found == [
        "compile/lazy.py",
        "debug/__init__.py",
        "lax/families.py",
        "profiler.py",
        "random/keys.py",
        "sharding/array.py",
        "sharding/explicit_layouts.py",
        "sharding/named.py",
        "sharding/shard_map_rules.py",
        "transport/world.py",
    ]
