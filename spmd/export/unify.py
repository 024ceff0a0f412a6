"""One program for all sizes, from the programs for a few: differing numbers must be formulas.

A function is traced at several sizes of its symbols, and the written programs are walked side by
side. Parts that are equal in all stay. A number that differs is fitted by a polynomial over the
symbols, which must be exact on all samples, one more than it takes to determine it. If one is none,
the function is traced at more sizes, of all remainders, and numbers may be rounded quotients
`floordiv(b + 1, 2)`, remainders, and polynomials of these too. Anything else that differs (another
number of equations, a constant array that depends on the size) is refused: the program's structure
then depends on the size. So the contents of a file are never guessed from one trace, and the Python
code that was exported saw plain numbers all the time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from spmd.base.errors import ArgumentError
from spmd.export.dims import Factor, Monomial, Operation, floordiv, mod
from spmd.export.encode import dtype_named
from spmd.export.symbolic import Constraint, DimExpr, parse

Sizes: TypeAlias = dict[str, int]

# Sizes to trace at. The first window is away from the usual fixed sizes of programs; the others
# are for constraints that exclude it.
_WINDOWS = ((33, 127), (5, 33), (1, 6))
_DEGREE = 2


# The largest divisor of a quotient that is looked for, and how many quotients may be factors.
_LARGEST_DIVISOR = 8
_MOST_QUOTIENTS = 4


def monomials(symbols: Sequence[str], quotients: Sequence[Operation] = ()) -> list[Monomial]:
    """The products of up to two factors, or of all symbols, those of quotients first."""
    degree = max(_DEGREE, len(symbols))
    found: list[Monomial] = []
    for d in range(degree + 1):
        factors: Sequence[Factor] = [*quotients, *symbols] if d <= _DEGREE else symbols
        found += itertools.combinations_with_replacement(factors, d)
    return found


def _matrix(terms: Sequence[Monomial], samples: Sequence[Sizes]) -> np.ndarray:
    made = [DimExpr({m: 1}) for m in terms]
    return np.array([[x.evaluate(s) for x in made] for s in samples], np.float64)


def _independent(terms: Sequence[Monomial], samples: Sequence[Sizes]) -> list[Monomial]:
    """The terms that are no sums of multiples of those before, as far as the samples tell."""
    columns = _matrix(terms, samples)
    columns /= np.maximum(np.abs(columns).max(axis=0), 1)
    kept: list[int] = []
    for k in range(len(terms)):
        if np.linalg.matrix_rank(columns[:, [*kept, k]], tol=1e-7) > len(kept):
            kept.append(k)
    return [terms[k] for k in kept]


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
            if np.linalg.matrix_rank(_matrix(monomials(symbols), more)) < min(len(more), wanted):
                continue
            found = more
            if len(found) == wanted + 1:
                return found
    texts = ", ".join(c.text for c in constraints)
    raise ArgumentError(
        f"export: found no sizes of {', '.join(symbols)} to trace at that satisfy the constraints "
        f"({texts}); widen them"
    )


def samples_of_remainders(
    samples: Sequence[Sizes], constraints: Sequence[Constraint], avoid: frozenset[int]
) -> list[Sizes]:
    """More sizes: each symbol in turn has all remainders, and then all are large ones."""
    found = list(samples)
    first = samples[0]
    steps = range(1, 2 * _LARGEST_DIVISOR)
    near = [first | {name: first[name] + k} for name in first for k in steps]
    rng = np.random.default_rng(1)
    far = [{name: int(rng.integers(128, 400)) for name in first} for _ in steps]
    for sample in (*near, *far):
        if not avoid & set(sample.values()) and all(c.holds(sample) for c in constraints):
            found.append(sample)
    return found[len(samples) :]


def _over(terms: Iterable[tuple[Monomial, float]], k: int) -> Any:
    return floordiv(DimExpr({m: int(c) for m, c in terms}), k)


class NotPolynomial(ArgumentError):
    """A number of the program is no polynomial of the sizes."""


class Unifier:
    """Walks the programs for several sizes at once and writes the one for all.

    Numbers are polynomials, and, if it `divides`, those that are found to be quotients, and
    polynomials of these.
    """

    def __init__(
        self, symbols: Sequence[str], samples: Sequence[Sizes], what: str, divides: bool = False
    ):
        self.symbols, self.samples, self.what, self.divides = symbols, samples, what, divides
        self._known: dict[tuple[int, ...], DimExpr | None] = {}
        self._quotients: list[Operation] = []
        self._set_terms()

    def _set_terms(self) -> None:
        self.terms = monomials(self.symbols, self._quotients)
        if self._quotients:
            self.terms = _independent(self.terms, self.samples)
        self._columns = _matrix(self.terms, self.samples)

    def find_quotients(self, nodes: Sequence[Any]) -> None:
        """Look for numbers that are quotients, which may be factors of others."""
        first = nodes[0]
        if all(isinstance(n, dict) and list(n) == list(first) for n in nodes):
            for k in first:
                self.find_quotients([n[k] for n in nodes])
        elif all(isinstance(n, list) and len(n) == len(first) for n in nodes):
            for each in zip(*nodes, strict=True):
                self.find_quotients(each)
        elif all(type(n) is int for n in nodes) and any(n != first for n in nodes):
            expr = self.fit(nodes)
            if expr is not None:
                self._note_quotients(expr)

    def _note_quotients(self, expr: DimExpr) -> None:
        """Keep the quotients among the factors of a number that are no sums of known terms."""
        for factor in expr.factors():
            if isinstance(factor, Operation) and len(self._quotients) < _MOST_QUOTIENTS:
                lines: list[Monomial] = [(), *((s,) for s in self.symbols)]
                lines += [(q,) for q in self._quotients]
                if len(_independent([*lines, (factor,)], self.samples)) > len(lines):
                    self._quotients.append(factor)

    def with_quotients(self) -> Unifier:
        """The same, with numbers that are polynomials of the quotients that were found."""
        self._known.clear()
        self._set_terms()
        return self

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
            raise self.refusal(nodes, path, NotPolynomial)
        raise self.refusal(nodes, path)

    def fit(self, numbers: Sequence[int]) -> DimExpr | None:
        """The formula with integer coefficients that has these values, if there is one."""
        key = tuple(numbers)
        if key not in self._known:
            found = self._polynomial(numbers)
            if found is None and self.divides:
                found = self._quotient(numbers)
            self._known[key] = found
        return self._known[key]

    def _polynomial(self, numbers: Sequence[int]) -> DimExpr | None:
        solved = np.linalg.lstsq(self._columns, np.array(numbers, np.float64), rcond=None)[0]
        terms = zip(self.terms, np.rint(solved), strict=True)
        return self._exact(DimExpr({m: int(c) for m, c in terms}), numbers)

    def _exact(self, found: Any, numbers: Sequence[int]) -> DimExpr | None:
        expr = found if isinstance(found, DimExpr) else DimExpr({(): found})
        exact = all(expr.evaluate(s) == n for s, n in zip(self.samples, numbers, strict=True))
        return expr if exact else None

    def _quotient(self, numbers: Sequence[int]) -> DimExpr | None:
        """A linear size over a number, rounded down, or the remainder of a symbol and a number."""
        lines = _matrix([(), *((s,) for s in self.symbols)], self.samples)
        slopes = np.linalg.lstsq(lines, np.array(numbers, np.float64), rcond=None)[0][1:]
        solved = np.linalg.lstsq(self._columns, np.array(numbers, np.float64), rcond=None)[0]
        for k in range(2, _LARGEST_DIVISOR + 1):
            whole = zip(self.terms, np.rint(solved * k), strict=True)
            if (found := self._exact(_over(whole, k), numbers)) is not None:
                return found
            factors = [int(c) for c in np.rint(slopes * k)]
            over = DimExpr({(s,): c for s, c in zip(self.symbols, factors, strict=True)})
            rests = [k * n - over.evaluate(s) for s, n in zip(self.samples, numbers, strict=True)]
            low, high = max(rests), min(rests) + k - 1  # what may be added to the dividend
            if low <= high:
                found = self._exact(floordiv(over + min(max(low, 0), high), k), numbers)
                if found is not None:
                    return found
            first = self.samples[0]
            for s in self.symbols if 0 <= min(numbers) and max(numbers) < k else ():
                found = mod(DimExpr({(s,): 1}) + (numbers[0] - first[s]) % k, k)
                if (found := self._exact(found, numbers)) is not None:
                    return found
        return None

    def literal(self, values: Sequence[Any], node: dict[str, Any], path: str) -> Any:
        """A scalar constant that depends on sizes: a polynomial, over a number, or one over it."""
        kinds = [("size", values), ("one over", [1 / v if v else 0 for v in values])]
        if all(isinstance(v, float) for v in values):
            kinds += [(f"over {k}", [v * k for v in values]) for k in _DIVISORS]
        for kind, numbers in kinds:
            if not all(isinstance(v, (int, float)) and np.isfinite(v) for v in numbers):
                break
            expr = self.fit([round(v) for v in numbers])
            if expr is None:
                continue
            sizes = [expr.evaluate(s) for s in self.samples]
            if kind == "one over" and 0 in sizes:
                continue
            if [number(kind, n, node["dtype"]) for n in sizes] == list(values):
                return {kind: str(expr)}
        raise self.refusal(values, path, NotPolynomial)

    def refusal(
        self, nodes: Sequence[Any], path: str, error: type[ArgumentError] = ArgumentError
    ) -> ArgumentError:
        def at(k: int) -> str:
            return ", ".join(f"{name} = {n}" for name, n in self.samples[k].items())

        other = next(k for k, n in enumerate(nodes) if n != nodes[0])
        kind = "constant array" if path.endswith("base64") else "program"
        return error(
            f"export: the {kind} of {self.what} depends on the symbolic sizes in a way that is not "
            "a polynomial with integer coefficients, of sizes and of quotients of sizes by numbers "
            f"up to {_LARGEST_DIVISOR}: it differs between {at(0)} and {at(other)} "
            f"at {path or 'its equations'}.\nCode that branches on a size, or builds NumPy arrays "
            "from it, makes a program for that size only. Export it for fixed sizes, or compute "
            "what depends on the size with spmd.numpy."
        )


# Coefficients of a float may be halves, thirds, tenths or hundredths: multiples of one over these.
_DIVISORS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 16, 100, 1000)


def number(kind: str, size: int, dtype: str) -> Any:
    """The scalar that a size, one over it, or a size over a number, is in a dtype."""
    target = dtype_named(dtype)
    wanted = 1 / size if kind == "one over" else size
    if kind.startswith("over "):
        wanted = size / int(kind.removeprefix("over "))
    value = np.asarray(wanted).astype(target)
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
        for kind, text in node["value"].items():
            size = _evaluate(text, sizes)
            return node | {"value": number(kind, size, node["dtype"])}
    return {k: specialise(v, sizes) for k, v in node.items()}


def _evaluate(text: str, sizes: Mapping[str, int]) -> int:
    expr = parse(text, "deserialize")
    return expr.evaluate(sizes) if isinstance(expr, DimExpr) else expr
