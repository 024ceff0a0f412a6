"""Functions of one or two arrays over explicit axes: their value on one device, or refused."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, lax, nn
from spmd.errors import ShardingTypeError
from spmd.sharding import AxisType

X = (np.arange(32).reshape(8, 4) % 7 / 7 + 0.1).astype(np.float32)
MODULES = {"numpy": snp, "nn": nn, "lax": lax, "linalg": snp.linalg, "fft": snp.fft}
# They read memory, hold anything, take arrays of one device, or are NumPy's own.
SKIPPED = {"frombuffer", "empty", "empty_like", "array_repr", "array_str", "array2string"}
SKIPPED |= {"get_printoptions", "set_printoptions", "printoptions", "from_dlpack"}
# They ask an array for its dtype alone.
SKIPPED |= {"finfo", "iinfo"}


def functions(module: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in sorted(set(getattr(module, "__all__", None) or dir(module))):
        f = getattr(module, name)
        if not name.startswith("_") and callable(f) and not inspect.isclass(f):
            if name not in SKIPPED:
                yield name, f


def wrong_functions(module: Any, spec: P, transform: Callable[..., Any]) -> tuple[list[str], int]:
    """The functions whose values differ, or that fail otherwise; and how many are right."""
    mesh = spmd.make_mesh((2, 2), ("x", "y"), AxisType.Explicit)
    x = spmd.device_put(X, NamedSharding(mesh, spec))
    wrong, right = [], 0
    for name, f in functions(module):
        for count in (1, 2):
            try:
                want = transform(f)(*[X] * count)
            except Exception:
                continue  # it takes something else
            try:
                same = are_same(transform(f)(*[x] * count), want)
            except ShardingTypeError:
                continue
            right += same
            wrong += [f"{name} of {count}"] * (not same)
    return wrong, right


def are_same(found: Any, want: Any) -> bool:
    pairs = zip(spmd.tree.leaves(found), spmd.tree.leaves(want), strict=True)
    return all(
        np.shape(a) == np.shape(b) and np.allclose(a, b, 1e-3, 1e-4, equal_nan=True)
        for a, b in pairs
        if hasattr(a, "dtype") and a.dtype.kind in "fiubc"
    )


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("spec", [P("x"), P("x", "y")], ids=str)
def test_functions_give_what_they_give_on_one_device_or_are_refused(module: str, spec: P):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrong, right = wrong_functions(MODULES[module], spec, lambda f: f)
    assert not wrong
    if spec == P("x"):
        assert right >= {"numpy": 180, "nn": 15, "lax": 60}.get(module, 5)


@pytest.mark.nightly
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("spec", [P("x"), P(None, "y"), P(("x", "y"))], ids=str)
@pytest.mark.parametrize("transform", [lambda f: f, spmd.jit], ids=["eager", "jit"])
def test_more_layouts_and_jit(module: str, spec: P, transform: Any):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrong, _ = wrong_functions(MODULES[module], spec, transform)
    assert not wrong
