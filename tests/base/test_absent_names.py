"""Names of JAX that are not here: errors and docs say what to use, and it is there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import spmd
from spmd.base import absent_names

DOCS = Path(__file__).resolve().parents[2] / "docs" / "coming_from_jax.md"

for _name in ("as_jax", "example_libraries", "experimental", "export", "extend", "tree"):
    importlib.import_module(f"spmd.{_name}")


def found(path: str) -> object:
    value: object = spmd
    for part in path.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", absent_names.ADVICE)
def test_absent_name_is_not_here_and_says_what_is(name: str):
    with pytest.raises(AttributeError) as error:
        found(name)
    part = next(p for p in (name, *[name.rpartition(".")[0]]) if p in absent_names.ADVICE)
    assert absent_names.ADVICE[part].replace("`", "") in str(error.value)


@pytest.mark.parametrize("advice", dict.fromkeys(advice for _, advice in absent_names.GROUPS))
def test_advice_names_what_is_here(advice: str):
    for path in re.findall(r"`spmd\.([\w.]+)", advice):
        found(path)


def test_docs_have_the_table():
    assert absent_names.table() in DOCS.read_text()


def test_other_names_have_the_plain_error():
    with pytest.raises(AttributeError, match=r"^module 'spmd.lax' has no attribute 'nonsense'$"):
        found("lax.nonsense")


def test_submodules_are_to_be_imported(run_python):
    done = run_python(["-c", "import spmd; spmd.experimental"])
    assert "import it: import spmd.experimental" in done.stderr


@pytest.mark.parametrize(
    ("path", "meant"),
    [("numpy.arrange", "arange"), ("lax.fori_lop", "fori_loop"), ("gard", "grad")],
)
def test_misspelt_names_are_recognised(path: str, meant: str):
    with pytest.raises(AttributeError, match=f"Did you mean '{meant}'\\?$"):
        found(path)
    assert not hasattr(spmd.numpy, "__arange__")
