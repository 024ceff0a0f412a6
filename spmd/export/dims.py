"""Symbolic sizes as expressions: sums of products of symbols, quotients, remainders and bounds.

An expression is kept in one form, so that equal ones are equal terms: products are multiplied out,
like terms are put together, and a quotient is divided as far as it goes. Symbols are at least 1.
A comparison is decided where the terms and the constraints of their scope decide it.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from spmd.base.errors import ArgumentError, InconclusiveDimensionOperation, RefusedError

Factor: TypeAlias = "str | Operation"
Monomial: TypeAlias = tuple[Factor, ...]  # in order; the empty one is the constant


class Operation:
    """A factor that is no symbol: `floordiv`, `mod`, `max` or `min` of two sizes."""

    __slots__ = ("kind", "operands", "order")

    def __init__(self, kind: str, left: Size, right: Size):
        self.kind = kind
        self.operands = _expr(left), _expr(right)
        size = 1 + sum(x.order[0] for x in self.operands)
        self.order = size, kind, tuple(x.order for x in self.operands)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Operation) and self.order == other.order

    def __hash__(self) -> int:
        return hash(self.order)

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(map(str, self.operands))})"

    def made(self, left: Size, right: Size) -> Size:
        """The same operation of other sizes."""
        return OPERATIONS[self.kind](left, right)


def _factor_order(factor: Factor) -> tuple[Any, ...]:
    return (1, factor) if isinstance(factor, str) else factor.order


def _order(monomial: Monomial) -> tuple[Any, ...]:
    """The place of a term, as JAX writes sums: larger ones first, the constant last."""
    orders = sorted(map(_factor_order, monomial), reverse=True)
    powers = tuple((o, len(list(same))) for o, same in itertools.groupby(orders))
    return sum(o[0] for o in orders), powers


class DimExpr:
    """A size that is known when the function is called.

    It can be computed with and compared. It is no number: while a function is exported its code
    sees numbers, and the file says how they depend on the symbols. A comparison whose result
    depends on the symbols raises an `InconclusiveDimensionOperation`; `==` is False then.
    """

    __slots__ = ("_terms", "order", "scope")

    def __init__(self, terms: Mapping[Monomial, int], scope: Any = None):
        self.scope = scope
        kept: dict[Monomial, int] = {}
        for monomial, c in terms.items():
            if c:
                kept[tuple(sorted(monomial, key=_factor_order))] = c
        if scope is not None:
            kept = scope.rewritten(kept)
        orders = {m: _order(m) for m in kept}
        self._terms = {m: kept[m] for m in sorted(kept, key=orders.__getitem__, reverse=True)}
        size = max((orders[m][0] for m in kept), default=0)
        self.order = size, tuple((orders[m], c) for m, c in self._terms.items())

    @property
    def terms(self) -> dict[Monomial, int]:
        return self._terms

    @property
    def constant(self) -> int | None:
        """The number that it is, if it has no symbols."""
        if not self._terms:
            return 0
        return self._terms[()] if list(self._terms) == [()] else None

    def factors(self) -> tuple[Factor, ...]:
        """The factors of its terms, each once."""
        return tuple(dict.fromkeys(f for monomial in self._terms for f in monomial))

    def symbols(self) -> tuple[str, ...]:
        """The names that occur, sorted."""
        found: set[str] = set()
        for f in self.factors():
            found.update([f] if isinstance(f, str) else f.operands[0].symbols())
            found.update([] if isinstance(f, str) else f.operands[1].symbols())
        return tuple(sorted(found))

    def evaluate(self, sizes: Mapping[str, int]) -> int:
        """The number that it is where the symbols have these sizes."""

        def value(f: Factor) -> int:
            if isinstance(f, str):
                return sizes[f]
            left, right = (x.evaluate(sizes) for x in f.operands)
            return int(_EXACT[f.kind](left, right))

        return sum(c * math.prod(map(value, m)) for m, c in self._terms.items())

    def substitute(self, sizes: Mapping[Any, Size]) -> DimExpr:
        """The same size with some symbols, or operations, replaced."""

        def new(f: Factor) -> Size:
            if f in sizes:
                return sizes[f]
            if isinstance(f, str):
                return DimExpr({(f,): 1}, self.scope)
            return f.made(*[_size(x.substitute(sizes)) for x in f.operands])

        total: Size = 0
        for monomial, c in self._terms.items():
            term: Size = c
            for f in monomial:
                term = term * new(f)
            total = total + term
        return _expr(total, self.scope)

    # -- arithmetic --

    def __add__(self, other: Any) -> Any:
        return _combined(self, other, _sum)

    def __mul__(self, other: Any) -> Any:
        return _combined(self, other, _product)

    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> Any:
        return self * -1

    def __sub__(self, other: Any) -> Any:
        return _combined(self, other, lambda x, y: _sum(x, _product(y, {(): -1})))

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __pow__(self, power: int, modulo: None = None) -> Any:
        if not isinstance(power, int) or power < 0:
            raise ArgumentError(f"the power {self}**{power} is no size; give an integer from 0 on")
        return math.prod([self] * power, start=1)

    def __floordiv__(self, other: Any) -> Any:
        return floordiv(self, _given(self, other))

    def __rfloordiv__(self, other: Any) -> Any:
        return floordiv(_given(self, other), self)

    def __mod__(self, other: Any) -> Any:
        return mod(self, _given(self, other))

    def __rmod__(self, other: Any) -> Any:
        return mod(_given(self, other), self)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __truediv__(self, other: Any) -> Any:
        raise _no_number(self)

    __rtruediv__ = __truediv__

    # -- comparison --

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DimExpr) and not hasattr(other, "__index__"):
            return False
        there = _expr(other)
        if self.scope and there.scope and self.scope is not there.scope:
            return False
        if self._terms == there._terms:
            return True
        low, high = bounds(_expr(self - other))
        return low == high == 0

    def __hash__(self) -> int:
        return hash(self.order)

    def __ge__(self, other: Any) -> bool:
        return _decided(self, other, ">=", lambda low, high: low >= 0, lambda low, high: high < 0)

    def __gt__(self, other: Any) -> bool:
        return _decided(self, other, ">", lambda low, high: low > 0, lambda low, high: high <= 0)

    def __le__(self, other: Any) -> bool:
        return _decided(self, other, "<=", lambda low, high: high <= 0, lambda low, high: low > 0)

    def __lt__(self, other: Any) -> bool:
        return _decided(self, other, "<", lambda low, high: high < 0, lambda low, high: low >= 0)

    def __bool__(self) -> bool:
        return self != 0

    def __int__(self) -> int:
        raise InconclusiveDimensionOperation(
            f"the symbolic size {self} is no number yet; shapes with symbols describe the "
            "arguments of export(jit(f))(...), in ShapeDtypeStructs"
        )

    def __str__(self) -> str:
        text = ""
        for monomial, c in self._terms.items() or [((), 0)]:
            powers = [(str(f), len(list(same))) for f, same in itertools.groupby(monomial)]
            factors = [name if n == 1 else f"{name}^{n}" for name, n in powers]
            if abs(c) != 1 or not factors:
                factors.insert(0, str(abs(c)))
            sign = (" - " if c < 0 else " + ") if text else ("- " if c < 0 else "")
            text += sign + "*".join(factors)
        return text

    __repr__ = __str__


Size: TypeAlias = Any  # an int or a DimExpr


def _expr(x: Any, scope: Any = None) -> DimExpr:
    return x if isinstance(x, DimExpr) else DimExpr({(): operator.index(x)}, scope)


def _size(x: DimExpr) -> Size:
    """The expression, or the number that it is."""
    return x if x.constant is None else x.constant


def _no_number(x: DimExpr) -> RefusedError:
    return RefusedError(
        f"the symbolic size {x} is no number yet: sizes are added, multiplied and divided by "
        "integers and sizes; in an exported function they are numbers"
    )


def _given(x: DimExpr, other: Any) -> Size:
    if not isinstance(other, DimExpr) and not hasattr(other, "__index__"):
        raise _no_number(x)
    return other if isinstance(other, DimExpr) else operator.index(other)


def _common_scope(x: DimExpr, y: DimExpr) -> Any:
    if x.scope and y.scope and x.scope is not y.scope:
        raise ArgumentError(
            f"the symbolic sizes {x} and {y} are of two scopes, {x.scope} and {y.scope}; make both "
            "with symbolic_shape(..., scope=)"
        )
    return x.scope or y.scope


def _combined(x: DimExpr, other: Any, combine: Callable[..., Any]) -> Size:
    if hasattr(other, "aval"):
        return NotImplemented
    y = _expr(_given(x, other))
    return _size(DimExpr(combine(x._terms, y._terms), _common_scope(x, y)))


def _sum(x: Mapping[Monomial, int], y: Mapping[Monomial, int]) -> dict[Monomial, int]:
    terms = dict(x)
    for monomial, c in y.items():
        terms[monomial] = terms.get(monomial, 0) + c
    return terms


def _product(x: Mapping[Monomial, int], y: Mapping[Monomial, int]) -> dict[Monomial, int]:
    terms: dict[Monomial, int] = {}
    for (left, a), (right, b) in itertools.product(x.items(), y.items()):
        both = tuple(sorted(left + right, key=_factor_order))
        terms[both] = terms.get(both, 0) + a * b
    return terms


# ---- quotients, remainders, bounds -------------------------------------------------------------


def floordiv(x: Size, y: Size) -> Size:
    """The quotient, rounded down."""
    if isinstance(x, int) and isinstance(y, int):
        return x // y
    found = _divided(_expr(x), _expr(y))
    return _operation("floordiv", x, y) if found is None else found[0]


def mod(x: Size, y: Size) -> Size:
    """The remainder of `floordiv`."""
    if isinstance(x, int) and isinstance(y, int):
        return x % y
    found = _divided(_expr(x), _expr(y))
    return _operation("mod", x, y) if found is None else found[1]


def _divided(x: DimExpr, y: DimExpr) -> tuple[Size, int] | None:
    """Quotient and remainder, where long division gives them."""
    if y.constant == 0:
        raise ZeroDivisionError(f"the symbolic size {x} is divided by zero")
    scope = _common_scope(x, y)
    leading, by = next(iter(y.terms.items()))
    quotient: dict[Monomial, int] = {}
    rest = dict(x.terms)
    for _ in range(100):  # a long division ends before
        over = DimExpr(rest, scope)
        if over.constant is not None:
            if y.constant is not None:
                whole, left = divmod(over.constant, y.constant)
                return _size(DimExpr(_sum(quotient, {(): whole}), scope)), left
            return (_size(DimExpr(quotient, scope)), 0) if over.constant == 0 else None
        monomial, c = next(iter(over.terms.items()))
        left = list(monomial)
        for f in leading:
            if f not in left:
                return None
            left.remove(f)
        if c % by:
            return None
        term = {tuple(left): c // by}
        quotient = _sum(quotient, term)
        rest = _sum(over.terms, _product(_product(term, y.terms), {(): -1}))
    return None


def _operation(kind: str, x: Size, y: Size) -> Size:
    scope = _common_scope(_expr(x), _expr(y))
    return _size(DimExpr({(Operation(kind, x, y),): 1}, scope))


def max_dim(d1: Size, d2: Size) -> Size:
    """Return the larger one of two sizes, a size.

    `d1` and `d2` are integers or symbolic.

    >>> max_dim(3, 4)
    4
    """
    return _larger(d1, d2, "max", d1, d2)


def min_dim(d1: Size, d2: Size) -> Size:
    """Return the smaller one of two sizes, a size.

    `d1` and `d2` are integers or symbolic.

    >>> min_dim(3, 4)
    3
    """
    return _larger(d1, d2, "min", d2, d1)


def _larger(x: Size, y: Size, kind: str, if_larger: Size, if_smaller: Size) -> Size:
    if isinstance(x, int) and isinstance(y, int):
        return if_larger if x >= y else if_smaller
    low, high = bounds(_expr(_expr(x) - y))
    if low >= 0:
        return if_larger
    return if_smaller if high <= 0 else _operation(kind, x, y)


OPERATIONS: dict[str, Callable[[Size, Size], Size]] = {
    "floordiv": floordiv,
    "mod": mod,
    "max": max_dim,
    "min": min_dim,
}
_EXACT: dict[str, Callable[[int, int], int]] = {
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "max": max,
    "min": min,
}


# ---- deciding comparisons ----------------------------------------------------------------------

# How often a bound is looked for by what is known of its terms.
_DEPTH = 3
Bounds: TypeAlias = tuple[float, float]


def _decided(
    x: DimExpr,
    other: Any,
    sign: str,
    holds: Callable[[float, float], bool],
    fails: Callable[[float, float], bool],
) -> bool:
    low, high = bounds(_expr(x - other))
    if holds(low, high):
        return True
    if fails(low, high):
        return False
    scope = x.scope or getattr(other, "scope", None)
    known = "" if scope is None or not scope.constraints else f", of which {scope} is known"
    raise InconclusiveDimensionOperation(
        f"whether {x} {sign} {other} depends on the symbolic sizes{known}; say it as a constraint, "
        f"as in symbolic_shape(..., constraints=['{x} >= {other}']), or avoid the comparison"
    )


def bounds(x: DimExpr, depth: int = _DEPTH) -> Bounds:
    """The least and the largest number that a size may be, as far as that is seen."""
    if x.constant is not None:
        return x.constant, x.constant
    return _lower(x, depth), -_lower(_expr(-x), depth)


def _lower(x: DimExpr, depth: int) -> float:
    if x.constant is not None:
        return x.constant
    best = sum(_scaled(_term_bounds(m, depth), c)[0] for m, c in x.terms.items())
    if not depth:
        return best
    choice = next((f for f in x.factors() if _is_choice(f)), None)
    if choice is not None:
        assert isinstance(choice, Operation)
        sides = [_lower(x.substitute({choice: side}), depth - 1) for side in choice.operands]
        best = max(best, min(sides))
    for fact in _facts(x):
        for monomial, c in fact.terms.items():
            mine = x.terms.get(monomial, 0)
            if monomial and mine * c > 0:
                # x * |c| = rest + fact * |mine|, and the fact is at least 0.
                low = _lower(_expr(x * abs(c) - fact * abs(mine)), depth - 1)
                best = max(best, math.ceil(low / abs(c)) if _is_finite(low) else low)
    return best


def _is_finite(x: float) -> bool:
    return abs(x) != math.inf


def _is_choice(f: Factor) -> bool:
    return isinstance(f, Operation) and f.kind in ("max", "min")


def _facts(x: DimExpr) -> list[DimExpr]:
    """Sizes that are known to be at least 0, from the constraints and from the operations."""
    facts = list(x.scope.facts) if x.scope is not None else []
    for f in x.factors():
        if isinstance(f, str):
            continue
        left, right = f.operands
        own = DimExpr({(f,): 1}, x.scope)
        if _is_choice(f):
            facts += [_expr(own - y if f.kind == "max" else y - own) for y in f.operands]
            continue
        if bounds(right, 1)[0] <= 0:
            continue
        if f.kind == "floordiv":
            facts += map(_expr, (left - own * right, own * right + right - 1 - left))
        else:
            facts.append(_expr(right - 1 - own))
            if bounds(left, 1)[0] >= 0:
                facts.append(_expr(left - own))
    return facts


def _term_bounds(monomial: Monomial, depth: int) -> Bounds:
    found: Bounds = 1, 1
    for f, same in itertools.groupby(monomial):
        power = len(list(same))
        own = (1, math.inf) if isinstance(f, str) else _operation_bounds(f, depth)
        raised = _powered(own, power)
        found = _times(found, raised)
    return found


def _powered(own: Bounds, power: int) -> Bounds:
    ends = [end**power for end in own]
    if power % 2 == 0:
        return (0 if own[0] <= 0 <= own[1] else min(ends)), max(ends)
    return ends[0], ends[1]


def _times(a: Bounds, b: Bounds) -> Bounds:
    products = [0 if 0 in (x, y) else x * y for x in a for y in b]
    return min(products), max(products)


def _scaled(own: Bounds, by: int) -> Bounds:
    return _times(own, (by, by))


def _operation_bounds(f: Operation, depth: int) -> Bounds:
    left, right = (bounds(x, max(0, depth - 1)) for x in f.operands)
    if f.kind == "max":
        return max(left[0], right[0]), max(left[1], right[1])
    if f.kind == "min":
        return min(left[0], right[0]), min(left[1], right[1])
    if f.kind == "mod":
        if right[0] > 0:
            return 0, min(right[1] - 1, left[1] if left[0] >= 0 else math.inf)
        return (right[0] + 1, 0) if right[1] < 0 else (-math.inf, math.inf)
    if right[0] <= 0:
        return -math.inf, math.inf
    quotients = [_quotient(x, y) for x in left for y in right]
    return min(quotients), max(quotients)


def _quotient(x: float, y: float) -> float:
    if not _is_finite(x):
        return x
    if not _is_finite(y):
        return 0 if x >= 0 else -1
    return x // y
