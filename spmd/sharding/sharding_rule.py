"""Sharding rules of a user's function: which dims of its operands and results are split alike.

A rule gives every dim a *factor*, as in "i j, j k -> i k": dims of one factor are split over the
same mesh axes. It is written as such a string, or as a `SdyShardingRule`, JAX's name for what the
string means.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from spmd.base.errors import ArgumentError
from spmd.core.primitive import Dims, dims

# Stands in an `ArrayMapping` for the leading dims that a string writes as "...".
BATCHING = "…"

_TOKEN = re.compile(r"\s*(\.\.\.\d*|[^\W\d_]\w*|[(),])")
_FACTOR = re.compile(r"[^\W\d_]\w*")
_BATCH = re.compile(BATCHING + r"\d*")

Shape = tuple[int, ...]


# ---- rules -------------------------------------------------------------------------------------


class CompoundFactor(tuple):
    """The factors of one dim, major first: "(a b)" is `CompoundFactor("a", "b")`.

    Raises `ArgumentError` for fewer than two factors and for what is no name.

    >>> CompoundFactor("a", "b")
    ('a', 'b')
    """

    __slots__ = ()

    def __new__(cls, *factors: str) -> CompoundFactor:
        if len(factors) < 2:
            raise ArgumentError(
                f"CompoundFactor{factors}: a dim of several factors has at least two; write one "
                "factor without brackets"
            )
        for factor in factors:
            _check_name(factor)
        return super().__new__(cls, factors)


class ArrayMapping(tuple):
    """The factors of one operand or result: for each dim a name or a `CompoundFactor`.

    The first entry may be `BATCHING`, or `BATCHING` and a number, for any number of leading dims.
    Raises `ArgumentError` for any other entry.

    >>> ArrayMapping(BATCHING, "i", CompoundFactor("a", "b"))
    ('…', 'i', ('a', 'b'))
    """

    __slots__ = ()

    def __new__(cls, *dim_mappings: str | CompoundFactor) -> ArrayMapping:
        for k, entry in enumerate(dim_mappings):
            if isinstance(entry, CompoundFactor):
                continue
            if isinstance(entry, str) and _BATCH.fullmatch(entry):
                if k:
                    raise ArgumentError(
                        f"sharding_rule: '...' is entry {k} of {dim_mappings}; it may only stand "
                        "for the leading dims, as the first entry"
                    )
                continue
            _check_name(entry)
        return super().__new__(cls, dim_mappings)


def _check_name(factor: Any) -> None:
    if not isinstance(factor, str) or not _FACTOR.fullmatch(factor):
        raise ArgumentError(
            f"sharding_rule: {factor!r} is no factor; a factor is a name that starts with a letter"
        )


class SdyShardingRule:
    """How the dims of a function's operands and results correspond.

    `operand_mappings` and `result_mappings` hold an `ArrayMapping` for each array. The factors in
    `need_replication_factors` are not split. Those in `reduction_factors` and
    `permutation_factors` may be: the function does what that takes, a sum or an exchange. Named
    arguments are the sizes of the factors that occur in `CompoundFactor`s only.

    Raises `ArgumentError` for a factor that does not occur, that has two kinds, or whose size is
    missing or given twice.

    >>> SdyShardingRule((ArrayMapping("i", "j"),), (ArrayMapping("i"),), reduction_factors=("j",))
    SdyShardingRule('i j -> i', reduction_factors=('j',))
    """

    def __init__(
        self,
        operand_mappings: Sequence[Sequence[Any]],
        result_mappings: Sequence[Sequence[Any]],
        *,
        reduction_factors: Sequence[str] = (),
        need_replication_factors: Sequence[str] = (),
        permutation_factors: Sequence[str] = (),
        **factor_sizes: int,
    ):
        self.operand_mappings = tuple(ArrayMapping(*m) for m in operand_mappings)
        self.result_mappings = tuple(ArrayMapping(*m) for m in result_mappings)
        self.reduction_factors = tuple(reduction_factors)
        self.need_replication_factors = tuple(need_replication_factors)
        self.permutation_factors = tuple(permutation_factors)
        self.factor_sizes = factor_sizes
        self._check_kinds()
        self._check_sizes()

    def entries(self) -> Iterator[Any]:
        """The entries of all mappings."""
        for mapping in (*self.operand_mappings, *self.result_mappings):
            yield from mapping

    def _check_kinds(self) -> None:
        known = {f for e in self.entries() for f in (e if isinstance(e, tuple) else (e,))}
        kinds: dict[str, str] = {}
        for kind in ("reduction_factors", "need_replication_factors", "permutation_factors"):
            for factor in getattr(self, kind):
                if factor not in known:
                    raise ArgumentError(
                        f"sharding_rule {self.text()!r}: {kind} has {factor!r}, which is no factor "
                        "of the rule; its factors are " + ", ".join(sorted(map(repr, known)))
                    )
                if factor in kinds:
                    raise ArgumentError(
                        f"sharding_rule {self.text()!r}: factor {factor!r} is in {kinds[factor]} "
                        f"and in {kind}; it may be in one of them, once"
                    )
                kinds[factor] = kind

    def _check_sizes(self) -> None:
        whole = {e for e in self.entries() if not isinstance(e, tuple)}
        parts = {f for e in self.entries() if isinstance(e, tuple) for f in e}
        for factor, size in self.factor_sizes.items():
            if factor not in parts or factor in whole or not isinstance(size, int):
                raise ArgumentError(
                    f"sharding_rule {self.text()!r}: {factor}={size!r} is the size of no factor; "
                    "sizes, as integers, are those of the factors that occur in brackets only"
                )
        missing = sorted(parts - whole - self.factor_sizes.keys())
        if missing:
            raise ArgumentError(
                f"sharding_rule {self.text()!r}: factor {missing[0]!r} occurs in brackets only, "
                f"so its size is not known; give it as {missing[0]}=..."
            )

    def text(self) -> str:
        """The rule as a string."""
        sides = self.operand_mappings, self.result_mappings
        return " -> ".join([", ".join(map(_mapping_text, side)) for side in sides])

    def __repr__(self) -> str:
        kinds = ("reduction_factors", "need_replication_factors", "permutation_factors")
        more = [f"{kind}={getattr(self, kind)}" for kind in kinds if getattr(self, kind)]
        more += [f"{factor}={size}" for factor, size in self.factor_sizes.items()]
        return f"SdyShardingRule({', '.join([repr(self.text()), *more])})"


def _mapping_text(mapping: ArrayMapping) -> str:
    texts = [f"({' '.join(e)})" if isinstance(e, tuple) else e for e in mapping]
    return " ".join(texts).replace(BATCHING, "...")


# ---- strings -----------------------------------------------------------------------------------


def parse_rule(rule: str, **options: Any) -> SdyShardingRule:
    """The rule that a string means; `options` are those of `SdyShardingRule`.

    >>> parse_rule("...i j, j k -> ...i k", need_replication_factors=("j",))
    SdyShardingRule('... i j, j k -> ... i k', need_replication_factors=('j',))
    """
    sides = rule.split("->")
    if len(sides) != 2:
        raise ArgumentError(
            f"sharding_rule {rule!r} has {len(sides) - 1} arrows; write the operands, '->' and the "
            "results, as in 'i j, j k -> i k'"
        )
    operands, results = (_parse_side(rule, side) for side in sides)
    return SdyShardingRule(operands, results, **options)


def _parse_side(rule: str, side: str) -> list[list[Any]]:
    """The entries of each value on one side of the arrow."""
    values: list[list[Any]] = [[]]
    inside: list[str] | None = None
    for token in _tokens(rule, side):
        if token == "(":
            if inside is not None:
                raise ArgumentError(f"sharding_rule {rule!r}: brackets may not stand in brackets")
            inside = []
        elif token == ")":
            if inside is None:
                raise ArgumentError(f"sharding_rule {rule!r}: ')' has no '(' before it")
            values[-1].append(CompoundFactor(*inside))
            inside = None
        elif inside is not None:
            if token == "," or token.startswith("..."):
                raise ArgumentError(
                    f"sharding_rule {rule!r}: {token!r} stands in brackets, which hold the factors "
                    "of one dim"
                )
            inside.append(token)
        elif token == ",":
            values.append([])
        else:
            values[-1].append(token.replace("...", BATCHING))
    if inside is not None:
        raise ArgumentError(f"sharding_rule {rule!r}: '(' has no ')' after it")
    return values


def _tokens(rule: str, side: str) -> Iterator[str]:
    at, side = 0, side.rstrip()
    while at < len(side):
        found = _TOKEN.match(side, at)
        if found is None:
            raise ArgumentError(
                f"sharding_rule {rule!r}: {side[at:].strip()!r} begins with no factor; factors are "
                "names that start with a letter, '...' stands for leading dims"
            )
        yield found[1]
        at = found.end()


# ---- what a rule says of shapes ----------------------------------------------------------------


def dims_of_rule(
    rule: SdyShardingRule, operands: Sequence[Shape], results: Sequence[Shape], what: str
) -> Dims:
    """The labels of the dims of operands and results of these shapes; errors name `what`.

    A dim of several factors is split like the first of them, and the others are whole.
    """
    expanded: list[list[Any]] = []
    leading: dict[str, int] = {}
    for kind, mappings, shapes in (
        ("operand", rule.operand_mappings, operands),
        ("result", rule.result_mappings, results),
    ):
        if len(mappings) != len(shapes):
            raise ArgumentError(
                f"{what}: sharding_rule {rule.text()!r} has {len(mappings)} {kind}s, but there are "
                f"{len(shapes)}, of shapes {list(shapes)}; write one for each array"
            )
        for k, (mapping, shape) in enumerate(zip(mappings, shapes, strict=True)):
            name = f"{what}: {kind} {k} of shape {shape}"
            expanded.append(_expand(rule, mapping, shape, leading, name))
    _check_compounds(rule, expanded, [*operands, *results], what)
    labels, whole = _labels(rule, expanded)
    count = len(operands)
    return dims(labels[:count], labels[count:], reduces="add", whole=whole)


def _expand(
    rule: SdyShardingRule, mapping: ArrayMapping, shape: Shape, leading: dict[str, int], what: str
) -> list[Any]:
    """An entry for each dim of an array; `leading` holds how many dims each "..." stands for."""
    entries: list[Any] = list(mapping)
    if entries and isinstance(entries[0], str) and entries[0].startswith(BATCHING):
        group = entries.pop(0).removeprefix(BATCHING) or "0"
        count = len(shape) - len(entries)
        if count >= 0 and leading.setdefault(group, count) != count:
            raise ArgumentError(
                f"{what}: '...' stands for {count} dims here and for {leading[group]} before, in "
                f"sharding_rule {rule.text()!r}; write '...1' for leading dims of another number"
            )
        entries = [(group, d) for d in range(count)] + entries
    if len(entries) != len(shape):
        raise ArgumentError(
            f"{what} has {len(shape)} dims, but {len(entries)} in sharding_rule "
            f"{rule.text()!r}; write one factor for each dim"
        )
    return entries


def _check_compounds(
    rule: SdyShardingRule, values: Sequence[Sequence[Any]], shapes: Sequence[Shape], what: str
) -> None:
    """Raise unless the sizes of the factors in brackets make those of the dims."""
    sizes: dict[Any, int] = dict(rule.factor_sizes)
    dims_of = [
        pair
        for entries, shape in zip(values, shapes, strict=True)
        for pair in zip(entries, shape, strict=True)
    ]
    for entry, size in dims_of:
        if not isinstance(entry, CompoundFactor):
            sizes[entry] = min(size, sizes.get(entry, size))
    for entry, size in dims_of:
        if isinstance(entry, CompoundFactor) and math.prod(sizes[f] for f in entry) != size:
            given = ", ".join(f"{f}={sizes[f]}" for f in entry)
            raise ArgumentError(
                f"{what}: the factors ({' '.join(entry)}) of sharding_rule {rule.text()!r} have "
                f"the sizes {given}, which do not make a dim of size {size}"
            )


def _labels(
    rule: SdyShardingRule, values: Sequence[Sequence[Any]]
) -> tuple[list[list[int]], list[int]]:
    """A label for each dim of each value, and the labels of dims that are not split."""
    numbers: dict[Any, int] = {}
    whole: set[Any] = set(rule.need_replication_factors)
    compounds: dict[str, set[CompoundFactor]] = {}
    alone = {e for entries in values for e in entries if not isinstance(e, CompoundFactor)}
    labels = []
    for entries in values:
        own = []
        for entry in entries:
            if isinstance(entry, CompoundFactor):
                whole.update(entry[1:])
                compounds.setdefault(entry[0], set()).add(entry)
                entry = entry[0]
            own.append(numbers.setdefault(entry, len(numbers)))
        labels.append(own)
    # The blocks of a factor that is never a dim of its own are known where all its dims are alike.
    whole.update(f for f, found in compounds.items() if f not in alone and len(found) > 1)
    return labels, [numbers[f] for f in whole if f in numbers]
