"""What type checkers see of `spmd.numpy`: pyright runs on a program that a user might write."""

from __future__ import annotations

import importlib.util
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from spmd.numpy import operators
from spmd.sharding import array

ROOT = Path(__file__).resolve().parent.parent

PROGRAM = """
from typing import assert_type

import numpy as np

import spmd.numpy as snp
from spmd import Array
from spmd.typing import ArrayLike


def loss(w: Array, x: ArrayLike) -> Array:
    return snp.mean(snp.square(snp.tanh(snp.matmul(x, w))))


a = snp.arange(6.0).reshape(2, 3)
v = snp.ones(3)
assert_type(a, Array)
assert_type(snp.eye(3), Array)
assert_type(snp.full(3, 1.0), Array)
assert_type(snp.asarray([1, 2]), Array)
assert_type(loss(v, a), Array)
assert_type(snp.array([[1, 2], [3, 4]]), Array)
assert_type(snp.zeros_like(a), Array)
assert_type(snp.sin(a), Array)
assert_type(snp.exp(1.0), Array)
assert_type(snp.sqrt(np.float32(2)), Array)
assert_type(snp.abs(-3), Array)
assert_type(snp.add(a, 1), Array)
assert_type(snp.maximum(a, v), Array)
assert_type(snp.divide(a, 2), Array)
assert_type(snp.power(a, 2), Array)
assert_type(snp.less(a, v), Array)
assert_type(snp.logical_and(a, v), Array)
assert_type(snp.isnan(a), Array)
assert_type(snp.isclose(a, v), Array)
assert_type(snp.where(a > 0, a, 0.0), Array)
assert_type(snp.where(a > 0), tuple[Array, ...])
assert_type(snp.nonzero(a), tuple[Array, ...])
assert_type(snp.clip(a, 0, 1), Array)
assert_type(snp.sum(a, axis=0), Array)
assert_type(snp.max(a), Array)
assert_type(snp.all(a), Array)
assert_type(snp.argmax(a, 1), Array)
assert_type(snp.cumsum(a), Array)
assert_type(snp.mean(a, keepdims=True), Array)
assert_type(snp.std(a), Array)
assert_type(snp.median(a), Array)
assert_type(snp.percentile(a, 50), Array)
assert_type(snp.dot(a, v), Array)
assert_type(snp.matmul(a, v), Array)
assert_type(snp.einsum("ij,j->i", a, v), Array)
assert_type(snp.outer(v, v), Array)
assert_type(snp.reshape(a, (3, 2)), Array)
assert_type(snp.transpose(a), Array)
assert_type(snp.expand_dims(v, 0), Array)
assert_type(snp.broadcast_to(v, (2, 3)), Array)
assert_type(snp.concatenate([v, v]), Array)
assert_type(snp.stack([v, v]), Array)
assert_type(snp.split(v, 3), list[Array])
assert_type(snp.meshgrid(v, v), list[Array])
assert_type(snp.pad(v, 1), Array)
assert_type(snp.tile(v, 2), Array)
assert_type(snp.diff(v), Array)
assert_type(snp.sort(v), Array)
assert_type(snp.argsort(v), Array)
assert_type(snp.searchsorted(v, 0.5), Array)
assert_type(snp.histogram(v), tuple[Array, Array])
assert_type(snp.take(a, v, axis=0), Array)
assert_type(snp.interp(0.5, v, v), Array)
assert_type(snp.shape(a), tuple[int, ...])
assert_type(snp.linalg.norm(v), Array)
assert_type(snp.linalg.solve(a, v), Array)
assert_type(snp.linalg.eigh(a).eigenvalues, Array)
assert_type(snp.fft.rfft(v), Array)

# Operators, methods and properties.
assert_type(a + 1, Array)
assert_type(1.5 * a, Array)
assert_type(2 - a, Array)
assert_type(a @ v, Array)
assert_type(-a, Array)
assert_type(a == v, Array)
assert_type((a > 0) & (a < 1), Array)
assert_type(a[0, 1:], Array)
assert_type([row for row in a], list[Array])
assert_type(a.at[0].set(1), Array)
assert_type(a.at[1, :].add(v), Array)
assert_type(a.T, Array)
assert_type(a.sum(), Array)
assert_type(a.mean(axis=1, keepdims=True), Array)
assert_type(a.astype("int32").max(), Array)
assert_type(a.shape, tuple[int, ...])
assert_type(a.ndim, int)
assert_type(a.dtype, np.dtype)
assert_type(float(a.sum()), float)
"""

MISTAKES = """
import spmd.numpy as snp

snp.sin("a")
snp.ones(3).summ()
snp.sum([1, 2])
snp.ones(3) + "a"
"""


def _diagnostics(path: Path, source: str) -> list[str]:
    """What pyright says about a program, one text for each error."""
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("pyright is not installed")
    path.write_text(source, encoding="utf-8")
    # Its own configuration: the checkout's names the folders that it checks.
    config = path.parent / "pyrightconfig.json"
    config.write_text(json.dumps({"extraPaths": [str(ROOT)], "typeCheckingMode": "basic"}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(
        [*command, "-p", str(config)], capture_output=True, text=True, cwd=path.parent
    )
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)["generalDiagnostics"]
    lines = [(d["range"]["start"]["line"], d["message"]) for d in found if d["severity"] == "error"]
    return [f"{source.splitlines()[k]}: {message}" for k, message in lines]


def test_a_user_program_has_precise_types(tmp_path):
    assert _diagnostics(tmp_path / "program.py", PROGRAM) == []


def test_mistakes_are_errors(tmp_path):
    found = _diagnostics(tmp_path / "mistakes.py", MISTAKES)
    assert len(found) == 4, found


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "spmd" / "py.typed").exists()


def test_declared_methods_are_those_installed():
    """The declarations for type checkers name each operator, method and property, as it is."""
    declared = (ROOT / "spmd/sharding/array_methods.pyi").read_text(encoding="utf-8")
    source = declared.partition("class ArrayMethods(HasAval):")[2] + inspect.getsource(array.Array)
    installed = [*operators.OPERATORS, *operators.METHODS, *operators.PROPERTIES]
    missing = [n for n in installed if f"def {n}(" not in source]
    assert not missing
    for name in operators.METHODS:
        text = source.partition(f"def {name}(")[2].partition("->")[0]
        method = inspect.signature(getattr(array.Array, name))
        parameters = [p for p in list(method.parameters.values())[1:]]
        absent = [p.name for p in parameters if f"{p.name}:" not in text]
        assert not absent, f"{name}: {absent}"
