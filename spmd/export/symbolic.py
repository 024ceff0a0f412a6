"""Symbolic sizes in texts, scopes and calls: `symbolic_shape`, constraints, and solving.

A user writes them in `symbolic_shape("b, 4")`, an exported file holds them where a size depends on
a symbol, and a call of the file with arrays solves for them.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spmd.base.errors import ArgumentError, ShapeError
from spmd.base.source import current_source
from spmd.export.dims import OPERATIONS, DimExpr, Factor, Monomial, Size, bounds
from spmd.export.dims import _expr as expression


def is_symbolic_dim(p: Any) -> bool:
    """Whether a size is symbolic rather than a number."""
    return isinstance(p, DimExpr)


# ---- reading -----------------------------------------------------------------------------------


def parse(text: str, what: str = "symbolic_shape") -> Size:
    """A size from its text: integers, names, +, -, *, ^, floordiv, mod, max and min."""
    try:
        return _read(ast.parse(text.strip().replace("^", "**"), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        raise ArgumentError(
            f"{what}: {text.strip()!r} is not a size; sizes are made of integers, names, +, -, *, "
            "^, floordiv, mod, max and min, such as 'b', '2*b + 1' or 'floordiv(b, 2)'"
        ) from None


def _read(node: ast.AST) -> Size:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
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
                return math.prod([_read(left)] * power, start=1)
        case ast.Call(func=ast.Name(id=name), args=[left, right], keywords=[]):
            if name in OPERATIONS:
                return OPERATIONS[name](_read(left), _read(right))
    raise ValueError


_SIGNS = (">=", "<=", "==")


class Constraint:
    """A promise of the user about symbols, such as `b <= 128`; checked when called."""

    def __init__(self, text: str):
        self.text = text
        for sign in _SIGNS:
            left, found, right = text.partition(sign)
            if found:
                what = f"constraint {text!r}"
                self.sign = sign
                self.sides = tuple(expression(parse(side, what)) for side in (left, right))
                return
        raise ArgumentError(
            f"constraint {text!r} must compare two sizes with one of {', '.join(_SIGNS)}"
        )

    def symbols(self) -> tuple[str, ...]:
        return tuple(sorted({name for side in self.sides for name in side.symbols()}))

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether it is true for these sizes; symbols that have none satisfy it."""
        if any(name not in sizes for name in self.symbols()):
            return True
        left, right = (side.evaluate(sizes) for side in self.sides)
        return {">=": left >= right, "<=": left <= right, "==": left == right}[self.sign]


class SymbolicScope:
    """Symbols that mean the same size wherever they occur, and the promises about them.

    `constraints_str` are texts that compare two sizes with `>=`, `<=` or `==`. A size on the left
    of an `==` is written as the one on the right from then on. Raises an `ArgumentError` for a
    promise that can't be kept.

    >>> scope = SymbolicScope(["b >= 4", "mod(b, 4) == 0"])
    >>> (b,) = symbolic_shape("b", scope=scope)
    >>> b >= 2, b % 4
    (True, 0)
    """

    def __init__(self, constraints_str: Sequence[str] = ()):
        if isinstance(constraints_str, str):
            raise ArgumentError(
                f"SymbolicScope: constraints are a sequence of texts, got {constraints_str!r}"
            )
        self.constraints: tuple[Constraint, ...] = ()
        # Sizes that are at least 0; and terms, with their number, that are written otherwise.
        self.facts: list[DimExpr] = []
        self._rules: list[tuple[Monomial, int, DimExpr]] = []
        self.place = current_source()
        for text in constraints_str:
            self._add(Constraint(text))

    def _add(self, constraint: Constraint) -> None:
        left, right = (DimExpr(side.terms, self) for side in constraint.sides)
        difference = expression(right - left if constraint.sign == "<=" else left - right, self)
        low, high = bounds(difference)
        if (high < 0) or (constraint.sign == "==" and low > 0):
            raise ArgumentError(f"constraint {constraint.text!r} can't be satisfied")
        self.constraints += (constraint,)
        if constraint.sign != "==":
            if difference.constant is None:
                self.facts.append(difference)
            return
        if difference.constant == 0:
            return
        self.facts += [difference, expression(-difference, self)]
        if len(left.terms) == 1:
            ((monomial, c),) = left.terms.items()
            self._write(monomial, c, right)
            one = monomial[0] if len(monomial) == c == 1 else None
            if getattr(one, "kind", None) == "mod" and right.constant == 0:
                self._write_multiple(one)

    def _write_multiple(self, remainder: Any) -> None:
        """Without a remainder, the quotient times the divisor is the dividend."""
        over, by = remainder.operands
        quotient = expression(over // by)
        times = expression(by * quotient)
        if times.terms != over.terms and len(times.terms) == 1:
            ((monomial, c),) = times.terms.items()
            self._write(monomial, c, DimExpr(over.terms, self))

    def _write(self, monomial: Monomial, c: int, right: DimExpr) -> None:
        if monomial and all(monomial != m for m in right.terms):
            self._rules.append((monomial, c, right))

    def rewritten(self, terms: dict[Monomial, int]) -> dict[Monomial, int]:
        """Terms of a sum as the equalities say that they are to be written."""
        for monomial, c, right in self._rules:
            times, left = divmod(terms.get(monomial, 0), c)
            if times and not left:
                terms = {m: n for m, n in terms.items() if m != monomial}
                for m, n in right.terms.items():
                    terms[m] = terms.get(m, 0) + n * times
            terms = _with_symbol_replaced(terms, monomial, c, right)
        return {m: c for m, c in terms.items() if c}

    def __repr__(self) -> str:
        return f"SymbolicScope({[c.text for c in self.constraints]})"


def _with_symbol_replaced(
    terms: dict[Monomial, int], monomial: Monomial, c: int, right: DimExpr
) -> dict[Monomial, int]:
    """Terms in which a symbol that equals a size is that size, in products too."""
    name: Factor | None = monomial[0] if len(monomial) == c == 1 else None
    if not isinstance(name, str) or not any(name in m for m in terms):
        return terms
    free = DimExpr(terms).substitute({name: DimExpr(right.terms)})
    return dict(free.terms)


def symbolic_shape(
    shape_spec: str | None,
    *,
    constraints: Sequence[str] = (),
    scope: SymbolicScope | None = None,
    like: Sequence[Size] | None = None,
) -> tuple[Size, ...]:
    """A shape with named sizes, for the arguments of an exported function.

    `shape_spec` lists sizes: integers, names, and polynomials of names, of their quotients
    `floordiv(b, 2)`, remainders `mod(b, 2)`, and of `max` and `min`. `_` takes the size from
    `like`, and `...` takes all those that are left. Raises an `ArgumentError` that quotes what
    can't be read. **Names mean the same sizes in one scope only**: each call without `scope` makes
    a scope of its own, and the sizes of one export must be of one scope.

    >>> symbolic_shape("b, 4, 2*b + 1")
    (b, 4, 2*b + 1)
    """
    if scope is not None and constraints:
        raise ArgumentError("symbolic_shape: give constraints when the scope is made, or no scope")
    if isinstance(constraints, str):
        raise ArgumentError(
            f"symbolic_shape: constraints are a sequence of texts, got {constraints!r}"
        )
    scope = scope or SymbolicScope(constraints)
    if not isinstance(shape_spec, str | None):
        raise ArgumentError(
            f"symbolic_shape: give a text such as 'b, 4' or None, got {shape_spec!r}"
        )
    text = "..." if shape_spec is None else shape_spec.strip()
    if text[:1] == "(" and text[-1:] == ")":
        text = text[1:-1]
    parts = [part.strip() for part in _parted(text) if part.strip()]
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
    for k, (size, there) in enumerate(zip(out, like or (), strict=False)):
        if there is None or (isinstance(size, int) and isinstance(there, int) and size != there):
            raise ArgumentError(
                f"symbolic_shape: dim {k} of {shape_spec!r} is {size}, that of `like` is {there}"
            )
    if like is not None and len(out) != len(like):
        raise ArgumentError(
            f"symbolic_shape: {shape_spec!r} has {len(out)} dims, `like` has {len(like)}: "
            f"{tuple(like)}"
        )
    return tuple(_in_scope(s, scope) for s in out)


def _parted(text: str) -> list[str]:
    """A text in the pieces between its commas that are in no parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _in_scope(size: Size, scope: SymbolicScope | None) -> Size:
    if not isinstance(size, DimExpr) or scope is None or size.scope is scope:
        return size
    made = DimExpr(size.terms, scope)
    return made if made.constant is None else made.constant


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
    open_ones = [(expression(size), number, where) for size, number, where in wanted]
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
