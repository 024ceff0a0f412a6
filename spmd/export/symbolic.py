"""Symbolic sizes: polynomials with integer coefficients over named symbols, such as `2*b + 1`.

A user writes them in `symbolic_shape("b, 4")`, an exported file holds them where a size depends on
a symbol, and a call of the file with arrays solves for them.
"""

from __future__ import annotations

import ast
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from spmd.base.errors import ArgumentError, ShapeError

Monomial: TypeAlias = tuple[str, ...]  # of symbols in order; the empty one is the constant


class DimExpr:
    """A size that is known when the function is called: a polynomial over symbols.

    It can be added, subtracted, multiplied and compared for equality. It is no number: while a
    function is exported its code sees numbers, and the file says how they depend on the symbols.
    """

    __slots__ = ("_terms", "scope")

    def __init__(self, terms: Mapping[Monomial, int], scope: SymbolicScope | None = None):
        self.scope = scope
        kept = {tuple(sorted(m)): c for m, c in terms.items() if c}
        self._terms = dict(sorted(kept.items(), key=lambda item: (-len(item[0]), item[0])))

    @property
    def terms(self) -> dict[Monomial, int]:
        return self._terms

    def symbols(self) -> tuple[str, ...]:
        """The names that occur, sorted."""
        return tuple(sorted({name for monomial in self._terms for name in monomial}))

    def evaluate(self, sizes: Mapping[str, int]) -> int:
        """The value of the polynomial where the symbols have these sizes."""
        return sum(c * math.prod(sizes[name] for name in m) for m, c in self._terms.items())

    def substitute(self, sizes: Mapping[str, int]) -> DimExpr:
        """The same polynomial with some symbols replaced by numbers."""
        terms: dict[Monomial, int] = {}
        for monomial, c in self._terms.items():
            left = tuple(name for name in monomial if name not in sizes)
            factor = math.prod(sizes[name] for name in monomial if name in sizes)
            terms[left] = terms.get(left, 0) + c * factor
        return DimExpr(terms, self.scope)

    def __add__(self, other: DimExpr | int) -> DimExpr:
        terms = dict(self._terms)
        for monomial, c in _expr(other)._terms.items():
            terms[monomial] = terms.get(monomial, 0) + c
        return DimExpr(terms, self.scope or _expr(other).scope)

    def __mul__(self, other: DimExpr | int) -> DimExpr:
        terms: dict[Monomial, int] = {}
        pairs = itertools.product(self._terms.items(), _expr(other)._terms.items())
        for (left, a), (right, b) in pairs:
            both = tuple(sorted(left + right))
            terms[both] = terms.get(both, 0) + a * b
        return DimExpr(terms, self.scope or _expr(other).scope)

    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> DimExpr:
        return self * -1

    def __sub__(self, other: DimExpr | int) -> DimExpr:
        return self + _expr(other) * -1

    def __rsub__(self, other: int) -> DimExpr:
        return -self + other

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (DimExpr, int)) and self._terms == _expr(other)._terms

    def __hash__(self) -> int:
        return hash(tuple(self._terms.items()))

    def __bool__(self) -> bool:
        raise ArgumentError(f"the symbolic size {self} has no truth value until it is known")

    def __int__(self) -> int:
        raise ArgumentError(
            f"the symbolic size {self} is no number yet; shapes with symbols describe the "
            "arguments of export(jit(f))(...), in ShapeDtypeStructs"
        )

    __index__ = __int__

    def __str__(self) -> str:
        text = ""
        for monomial, c in self._terms.items() or [((), 0)]:
            powers = [(name, len(list(same))) for name, same in itertools.groupby(monomial)]
            factors = [name if n == 1 else f"{name}^{n}" for name, n in powers]
            if abs(c) != 1 or not factors:
                factors.insert(0, str(abs(c)))
            sign = (" - " if c < 0 else " + ") if text else ("-" if c < 0 else "")
            text += sign + "*".join(factors)
        return text

    __repr__ = __str__


Size: TypeAlias = int | DimExpr


def _expr(x: DimExpr | int) -> DimExpr:
    return x if isinstance(x, DimExpr) else DimExpr({(): int(x)})


def is_symbolic_dim(p: Any) -> bool:
    """Whether a size is symbolic rather than a number."""
    return isinstance(p, DimExpr)


# ---- reading -----------------------------------------------------------------------------------


def parse(text: str, what: str = "symbolic_shape") -> Size:
    """A size from its text: integers, names, +, -, * and ^ with an integer exponent."""
    try:
        expr = _read(ast.parse(text.strip().replace("^", "**"), mode="eval").body)
    except (SyntaxError, ValueError):
        raise ArgumentError(
            f"{what}: {text.strip()!r} is not a size; sizes are made of integers, names, +, -, * "
            "and ^, such as 'b' or '2*b + 1'. Quotients and remainders are not supported: name "
            "the quotient, and write the size as a multiple of it."
        ) from None
    return expr if expr.symbols() else expr.evaluate({})


def _read(node: ast.AST) -> DimExpr:
    match node:
        case ast.Constant(value=int() as number):
            return _expr(number)
        case ast.Name(id=name):
            return DimExpr({(name,): 1})
        case ast.UnaryOp(op=ast.USub(), operand=x):
            return -_read(x)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _read(left) + _read(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _read(left) - _read(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _read(left) * _read(right)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int() as power)):
            if power >= 0:
                return functools.reduce(operator.mul, [_read(left)] * power, _expr(1))
    raise ValueError


_COMPARISONS = {">=": operator.ge, "<=": operator.le, "==": operator.eq}


class Constraint:
    """A promise of the user about symbols, such as `b <= 128`; checked when called."""

    def __init__(self, text: str):
        self.text = text
        for sign, compare in _COMPARISONS.items():
            left, found, right = text.partition(sign)
            if found:
                what = f"constraint {text!r}"
                self._compare = compare
                self._sides = _expr(parse(left, what)), _expr(parse(right, what))
                return
        raise ArgumentError(
            f"constraint {text!r} must compare two sizes with one of {', '.join(_COMPARISONS)}"
        )

    def symbols(self) -> tuple[str, ...]:
        return tuple(sorted({name for side in self._sides for name in side.symbols()}))

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether it is true for these sizes; symbols that have none satisfy it."""
        if any(name not in sizes for name in self.symbols()):
            return True
        left, right = (side.evaluate(sizes) for side in self._sides)
        return bool(self._compare(left, right))


class SymbolicScope:
    """Symbols that mean the same size wherever they occur, and the promises about them."""

    def __init__(self, constraints_str: Sequence[str] = ()):
        self.constraints = tuple(Constraint(text) for text in constraints_str)

    def __repr__(self) -> str:
        return f"SymbolicScope({[c.text for c in self.constraints]})"


def symbolic_shape(
    shape_spec: str | None,
    *,
    constraints: Sequence[str] = (),
    scope: SymbolicScope | None = None,
    like: Sequence[Size] | None = None,
) -> tuple[Size, ...]:
    """A shape with named sizes, for the arguments of an exported function.

    `shape_spec` lists sizes: integers, names, and polynomials of names. `_` takes the size from
    `like`, and `...` takes all those that are left. Raises an `ArgumentError` that quotes what
    can't be read. **A name means the same size in all arguments of one export.**

    >>> symbolic_shape("b, 4, 2*b + 1")
    (b, 4, 2*b + 1)
    """
    if scope is not None and constraints:
        raise ArgumentError("symbolic_shape: give constraints when the scope is made, or no scope")
    scope = scope or (SymbolicScope(constraints) if constraints else None)
    if not isinstance(shape_spec, str | None):
        raise ArgumentError(
            f"symbolic_shape: give a text such as 'b, 4' or None, got {shape_spec!r}"
        )
    text = "..." if shape_spec is None else shape_spec.strip()
    if text[:1] == "(" and text[-1:] == ")":
        text = text[1:-1]
    parts = [part.strip() for part in text.split(",") if part.strip()]
    out: list[Size] = []
    for k, part in enumerate(parts):
        if part in ("_", "...") and like is None:
            raise ArgumentError(f"symbolic_shape: {part!r} in {shape_spec!r} needs `like`")
        if part == "...":
            if k != len(parts) - 1:
                raise ArgumentError(f"symbolic_shape: '...' must come last in {shape_spec!r}")
            out.extend(tuple(like or ())[k:])
        elif part == "_":
            out.append(_at(like or (), k, shape_spec))
        else:
            out.append(parse(part))
    if like is not None and len(out) != len(like):
        raise ArgumentError(
            f"symbolic_shape: {shape_spec!r} has {len(out)} dims, `like` has {len(like)}: "
            f"{tuple(like)}"
        )
    return tuple(DimExpr(s.terms, scope) if isinstance(s, DimExpr) and scope else s for s in out)


def _at(like: Sequence[Size], k: int, spec: str | None) -> Size:
    if k >= len(like):
        raise ArgumentError(f"symbolic_shape: {spec!r} has more dims than `like`, {tuple(like)}")
    return like[k]


# ---- solving -----------------------------------------------------------------------------------


def solve(wanted: Iterable[tuple[Size, int, str]], constraints: Sequence[Constraint]) -> dict:
    """The sizes of the symbols, from pairs of a size, the number it has, and where that was seen.

    Raises a `ShapeError` where they contradict each other, or a symbol can't be found out.
    """
    known: dict[str, int] = {}
    from_where: dict[str, str] = {}
    open_ones = [(_expr(size), number, where) for size, number, where in wanted]
    progress = True
    while progress:
        progress = False
        for size, number, where in open_ones:
            rest = size.substitute(known)
            names = rest.symbols()
            if len(names) != 1 or set(rest.terms) - {(), names}:
                continue
            found, left = divmod(number - rest.terms.get((), 0), rest.terms[names])
            if left or found < 0:
                raise ShapeError(f"{where} has size {number}, which no {names[0]} makes {size}")
            known[names[0]], from_where[names[0]] = found, where
            progress = True
    for size, number, where in open_ones:
        missing = [name for name in size.symbols() if name not in known]
        if missing:
            raise ShapeError(
                f"the size {missing[0]!r} can't be found out from {size} = {number} of {where}; "
                f"have it alone, as {missing[0]!r} or a multiple, in the shape of some argument"
            )
        if size.evaluate(known) != number:
            seen = ", ".join(f"{n} = {known[n]} from {from_where[n]}" for n in size.symbols())
            raise ShapeError(
                f"{where} has size {number}, but must be {size}"
                + (f" = {size.evaluate(known)} ({seen})" if seen else "")
            )
    for constraint in constraints:
        if not constraint.holds(known):
            sizes = ", ".join(f"{n} = {known[n]}" for n in constraint.symbols())
            raise ShapeError(f"exported for {constraint.text} only, called with {sizes}")
    return known
