"""The examples in docstrings run on four virtual devices and print what they show.

An example may use what its module and its package define, and these names without importing them:
spmd, snp (spmd.numpy), lax, np (numpy).
"""

from __future__ import annotations

import doctest
import importlib
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


WITH_EXAMPLES = sorted(
    _module_name(path)
    for path in (ROOT / "spmd").rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


# Namespaces with functions that a wrapper or a family constructor made.
NAMESPACES = ("spmd.numpy", "spmd.numpy.fft", "spmd.numpy.linalg", "spmd.lax", "spmd.nn")


def _names(*modules: str) -> dict[str, Any]:
    """What an example may use: the names above, and those of the modules."""
    found = {
        "np": np,
        "spmd": importlib.import_module("spmd"),
        "snp": importlib.import_module("spmd.numpy"),
        "lax": importlib.import_module("spmd.lax"),
    }
    for name in modules:
        module = vars(importlib.import_module(name))
        found.update({k: v for k, v in module.items() if not k.startswith("__")})
    return found


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_print_what_they_show(name, capsys):
    module = importlib.import_module(name)
    names = _names(name.rpartition(".")[0] or name, name)
    failed, attempted = doctest.testmod(module, globs=names, optionflags=OPTIONS)
    assert attempted, "no example was found: doctest reads docstrings, not comments"
    assert not failed, capsys.readouterr().out


def _is_left_to_doctest(value: Any) -> bool:
    """Whether it is no function of ours, or one that `testmod` finds in the module defining it."""
    if not callable(value) or inspect.isclass(value) or not value.__module__.startswith("spmd"):
        return True
    return inspect.isfunction(value) and value.__globals__["__name__"] == value.__module__


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_examples_of_made_functions_print_what_they_show(namespace, capsys):
    """Wrapped functions, families and ufuncs, where `testmod` does not look."""
    runner, parser = doctest.DocTestRunner(optionflags=OPTIONS), doctest.DocTestParser()
    module = importlib.import_module(namespace)
    for name in dir(module):
        value = getattr(module, name)
        if not _is_left_to_doctest(value):
            names = _names(namespace.rpartition(".")[0], namespace)
            test = parser.get_doctest(value.__doc__ or "", names, f"{namespace}.{name}", None, None)
            runner.run(test)
    assert not runner.failures, capsys.readouterr().out
