"""The examples in docstrings run on four virtual devices and print what they show.

An example may use what its module and its package define, and these names without importing them:
spmd, snp (spmd.numpy), lax, np (numpy).
"""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

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


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_print_what_they_show(name, capsys):
    module = importlib.import_module(name)
    package = importlib.import_module(name.rpartition(".")[0] or name)
    names = {
        "np": np,
        "spmd": importlib.import_module("spmd"),
        "snp": importlib.import_module("spmd.numpy"),
        "lax": importlib.import_module("spmd.lax"),
        **{k: v for k, v in {**vars(package), **vars(module)}.items() if not k.startswith("__")},
    }
    failed, attempted = doctest.testmod(module, globs=names, optionflags=OPTIONS)
    assert attempted, "no example was found: doctest reads docstrings, not comments"
    assert not failed, capsys.readouterr().out
