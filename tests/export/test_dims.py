"""Symbolic sizes: one form for equal ones, values as Python computes, bounds that hold."""

from __future__ import annotations

import itertools
import operator
import random
from typing import Any

import numpy as np
import pytest

from spmd import export
from spmd.errors import ArgumentError, InconclusiveDimensionOperation, RefusedError
from spmd.export.dims import DimExpr, bounds

NAMES = ("a", "b", "c")
OPERATIONS: Any = (
    operator.add,
    operator.sub,
    operator.mul,
    operator.floordiv,
    operator.mod,
    export.max_dim,
    export.min_dim,
)


def _made(rng: random.Random, depth: int) -> Any:
    """A random size, as a function of the sizes of its symbols."""
    if depth == 0 or rng.random() < 0.2:
        name, number = rng.choice(NAMES), rng.randint(1, 6)
        return (lambda sizes: sizes[name]) if rng.random() < 0.7 else (lambda sizes: number)
    left, right, op = _made(rng, depth - 1), _made(rng, depth - 1), rng.choice(OPERATIONS)
    return lambda sizes: op(left(sizes), right(sizes))


def test_random_sizes_have_the_values_that_python_computes():
    rng, symbols = random.Random(0), dict(zip(NAMES, export.symbolic_shape("a, b, c"), strict=True))
    seen = 0
    for _ in range(80):
        f = _made(rng, 3)
        try:
            size = f(symbols)
        except ZeroDivisionError:
            continue
        low, high = bounds(size) if isinstance(size, DimExpr) else (size, size)
        for numbers in itertools.product((1, 2, 5), repeat=3):
            sizes = dict(zip(NAMES, numbers, strict=True))
            try:
                expected = f(sizes)
            except ZeroDivisionError:
                continue
            found = size.evaluate(sizes) if isinstance(size, DimExpr) else size
            assert found == expected and low <= expected <= high, (size, sizes)
            seen += 1
        if isinstance(size, DimExpr):
            (again,) = export.symbolic_shape(str(size), scope=size.scope)
            assert again == size and hash(again) == hash(size), size
    assert seen > 1000


# What JAX 0.10.2 prints.
FORMS = {
    "b + a": lambda a, b: a + b,
    "2*a*b + a^2 + 1": lambda a, b: a * a + 2 * a * b + 1,
    "- b^2 + a^2": lambda a, b: (a + b) * (a - b),
    "a + 2": lambda a, b: (2 * a + 4) // 2,
    "2*a": lambda a, b: (4 * a + 1) // 2,
    "1": lambda a, b: (4 * a + 1) % 2,
    "floordiv(b + 2*a, 2)": lambda a, b: (2 * a + b) // 2,
    "b": lambda a, b: (a * b + b) // (a + 1),
    "mod(a, 2) + 2*floordiv(a, 2)": lambda a, b: a // 2 * 2 + a % 2,
    "a": lambda a, b: export.max_dim(a, 1),
    "max(a, b)": lambda a, b: export.max_dim(a, b),
    "min(a, 5)": lambda a, b: export.min_dim(a, 5),
    "a*floordiv(5, a)": lambda a, b: 5 // a * a,
}


@pytest.mark.parametrize("form", FORMS)
def test_sizes_have_one_form(form: str):
    assert str(FORMS[form](*export.symbolic_shape("a, b"))) == form


TRUE = (
    lambda a, b: a >= 1,
    lambda a, b: a * b > 0,
    lambda a, b: a % 2 < 2,
    lambda a, b: a // 2 * 2 <= a,
    lambda a, b: a // b * b <= a,
    lambda a, b: a % b < b,
    lambda a, b: export.max_dim(a, b) >= a,
    lambda a, b: export.max_dim(a, b) <= a + b,
    lambda a, b: (a + 1) // 2 >= 1,
    lambda a, b: a != b and a == a + 0,
    lambda a, b: bool(a),
)


@pytest.mark.parametrize("f", TRUE)
def test_comparisons_that_hold_for_all_sizes(f):
    assert f(*export.symbolic_shape("a, b"))


def test_comparisons_that_depend_on_the_sizes_say_so():
    a, b = export.symbolic_shape("a, b")
    for f in (operator.ge, operator.gt, operator.le, operator.lt):
        with pytest.raises(InconclusiveDimensionOperation, match="depends on the symbolic sizes"):
            f(a, b)
    assert not a < 1 and not a == b
    for g in (lambda: a / 2, lambda: a + 0.5, lambda: [0] * a):
        with pytest.raises(RefusedError, match="is no number yet"):
            g()
    assert a + np.int64(2) == 2 + a


def test_constraints_decide_comparisons():
    scope = export.SymbolicScope(["a >= 4", "b >= a", "mod(c, 4) == 0", "d == 2*a", "e <= 7"])
    a, b, c, d, e = export.symbolic_shape("a, b, c, d, e", scope=scope)
    assert b >= 4 and a != 3 and e < 8 and d >= 8 and str(d * b) == "2*a*b"
    assert c % 4 == 0 and c // 4 * 4 == c
    assert export.max_dim(a, b) is b and export.min_dim(a, b) is a
    with pytest.raises(InconclusiveDimensionOperation, match=r"a >= b .* of which"):
        operator.ge(a, b)
    assert export.symbolic_shape("n", constraints=["n == 4"]) == (4,)
    (other,) = export.symbolic_shape("a", constraints=["a >= 2"])
    assert a != other
    with pytest.raises(ArgumentError, match="are of two scopes"):
        a + other
    with pytest.raises(ArgumentError, match="can't be satisfied"):
        export.SymbolicScope(["a >= 4", "a <= 3"])
    with pytest.raises(ArgumentError, match="a sequence of texts"):
        export.SymbolicScope("a >= 4")
