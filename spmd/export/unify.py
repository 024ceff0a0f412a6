"""One program for all sizes, from the programs for a few: differing numbers must be polynomials.

A function is traced at several sizes of its symbols, and the written programs are walked side by
side. Parts that are equal in all stay. A number that differs is fitted by a polynomial over the
symbols, which must be exact on all samples, one more than it takes to determine it. Anything else
that differs (another number of equations, a constant array that depends on the size) is refused:
the program's structure then depends on the size. So the contents of a file are never guessed from
one trace, and the Python code that was exported saw plain numbers all the time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from spmd.base.errors import ArgumentError
from spmd.export.encode import dtype_named
from spmd.export.symbolic import Constraint, DimExpr, parse

Sizes: TypeAlias = dict[str, int]

# Sizes to trace at. The first window is away from the usual fixed sizes of programs; the others
# are for constraints that exclude it.
_WINDOWS = ((33, 127), (5, 33), (1, 6))
_DEGREE = 2


def monomials(symbols: Sequence[str]) -> list[tuple[str, ...]]:
    """The products of up to two symbols, or of all of them."""
    degree = max(_DEGREE, len(symbols))
    return [
        m for d in range(degree + 1) for m in itertools.combinations_with_replacement(symbols, d)
    ]


def _matrix(symbols: Sequence[str], samples: Sequence[Sizes]) -> np.ndarray:
    rows = [[math.prod(s[name] for name in m) for m in monomials(symbols)] for s in samples]
    return np.array(rows, np.float64)


def choose_samples(
    symbols: Sequence[str], constraints: Sequence[Constraint], avoid: frozenset[int]
) -> list[Sizes]:
    """Sizes that determine every polynomial, and one sample more, which checks it."""
    if not symbols:
        return [{}]
    wanted = len(monomials(symbols))
    for low, high in _WINDOWS:
        rng = np.random.default_rng(0)
        found: list[Sizes] = []
        for _ in range(400):
            drawn = rng.choice(np.arange(low, high), size=len(symbols), replace=high - low < 8)
            sample = {name: int(n) for name, n in zip(symbols, drawn, strict=True)}
            if avoid & set(sample.values()) or sample in found:
                continue
            if not all(c.holds(sample) for c in constraints):
                continue
            more = [*found, sample]
            if np.linalg.matrix_rank(_matrix(symbols, more)) < min(len(more), wanted):
                continue
            found = more
            if len(found) == wanted + 1:
                return found
    texts = ", ".join(c.text for c in constraints)
    raise ArgumentError(
        f"export: found no sizes of {', '.join(symbols)} to trace at that satisfy the constraints "
        f"({texts}); widen them"
    )


class Unifier:
    """Walks the programs for several sizes at once and writes the one for all."""

    def __init__(self, symbols: Sequence[str], samples: Sequence[Sizes], what: str):
        self.symbols, self.samples, self.what = symbols, samples, what

    def __call__(self, nodes: Sequence[Any], path: str = "") -> Any:
        first = nodes[0]
        if all(type(n) is type(first) and n == first for n in nodes):
            return first
        if all(isinstance(n, dict) and list(n) == list(first) for n in nodes):
            if set(first) >= {"value", "dtype"}:
                return first | {"value": self.literal([n["value"] for n in nodes], first, path)}
            here = f"{path}/{first['do']}" if "do" in first else path
            return {k: self([n[k] for n in nodes], f"{here}/{k}") for k in first}
        if all(isinstance(n, list) and len(n) == len(first) for n in nodes):
            return [self(list(each), path) for each in zip(*nodes, strict=True)]
        if all(type(n) is int for n in nodes):
            expr = self.fit(nodes)
            if expr is not None:
                return {"size": str(expr)}
        raise self.refusal(nodes, path)

    def fit(self, numbers: Sequence[int]) -> DimExpr | None:
        """The polynomial with integer coefficients that has these values, if there is one."""
        matrix = _matrix(self.symbols, self.samples)
        solved = np.linalg.lstsq(matrix, np.array(numbers, np.float64), rcond=None)[0]
        terms = zip(monomials(self.symbols), np.rint(solved), strict=True)
        expr = DimExpr({m: int(c) for m, c in terms})
        exact = all(expr.evaluate(s) == n for s, n in zip(self.samples, numbers, strict=True))
        return expr if exact else None

    def literal(self, values: Sequence[Any], node: dict[str, Any], path: str) -> Any:
        """A scalar constant that depends on sizes: a polynomial, or one over it."""
        for kind, numbers in (("size", values), ("one over", [1 / v if v else 0 for v in values])):
            if not all(isinstance(v, (int, float)) and np.isfinite(v) for v in numbers):
                break
            expr = self.fit([round(v) for v in numbers])
            if expr is None:
                continue
            made = [number(kind, expr.evaluate(s), node["dtype"]) for s in self.samples]
            if made == list(values):
                return {kind: str(expr)}
        raise self.refusal(values, path)

    def refusal(self, nodes: Sequence[Any], path: str) -> ArgumentError:
        def at(k: int) -> str:
            return ", ".join(f"{name} = {n}" for name, n in self.samples[k].items())

        other = next(k for k, n in enumerate(nodes) if n != nodes[0])
        kind = "constant array" if path.endswith("base64") else "program"
        return ArgumentError(
            f"export: the {kind} of {self.what} depends on the symbolic sizes in a way that is not "
            f"a polynomial with integer coefficients: it differs between {at(0)} and {at(other)} "
            f"at {path or 'its equations'}.\nCode that branches on a size, or builds NumPy arrays "
            "from it, makes a program for that size only. Export it for fixed sizes, or compute "
            "what depends on the size with spmd.numpy."
        )


def number(kind: str, size: int, dtype: str) -> Any:
    """The scalar that a size, or one over it, is in a dtype."""
    target = dtype_named(dtype)
    value = np.asarray(1 / size if kind == "one over" else size).astype(target)
    return value.item() if target.kind in "biu" else float(value)


def specialise(node: Any, sizes: Mapping[str, int]) -> Any:
    """The program for these sizes of the symbols."""
    if isinstance(node, list):
        return [specialise(n, sizes) for n in node]
    if not isinstance(node, dict):
        return node
    if set(node) == {"size"}:
        return _evaluate(node["size"], sizes)
    if isinstance(node.get("value"), dict) and "dtype" in node:
        for kind in ("size", "one over"):
            if kind in node["value"]:
                size = _evaluate(node["value"][kind], sizes)
                return node | {"value": number(kind, size, node["dtype"])}
    return {k: specialise(v, sizes) for k, v in node.items()}


def _evaluate(text: str, sizes: Mapping[str, int]) -> int:
    expr = parse(text, "deserialize")
    return expr.evaluate(sizes) if isinstance(expr, DimExpr) else expr
