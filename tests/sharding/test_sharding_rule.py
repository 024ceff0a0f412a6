"""Sharding rules: what strings mean, what is refused, and the labels that shapes get."""

from __future__ import annotations

from typing import Any

import pytest

from spmd.custom_partitioning import BATCHING, ArrayMapping, CompoundFactor, SdyShardingRule
from spmd.errors import ArgumentError
from spmd.sharding.sharding_rule import dims_of_rule, parse_rule

# Each rule with the words of its error, or None; tests/jax reads the table too.
RULES: dict[str, str | None] = {
    "i j, j k -> i k": None,
    "i  j->j i": None,
    "->": None,
    "i ->": None,
    ", i -> i,": None,
    "...i -> ...i": None,
    "... i, ...1 j -> ... i, ...1 j": None,
    "i_1 -> i_1": None,
    "i2j -> i2j": None,
    "é -> é": None,
    "(a b) c -> a b c": None,
    "(a b), a -> b": None,
    "(a b) -> (a b)": "'a' occurs in brackets only, so its size is not known; give it as a=",
    "i j": "has 0 arrows; write the operands, '->' and the results",
    "i -> j -> k": "has 2 arrows",
    "(a) -> a": "a dim of several factors has at least two",
    "(a (b c)) -> a": "brackets may not stand in brackets",
    "(a b -> a": "'(' has no ')' after it",
    "a) -> a": "')' has no '(' before it",
    "i ... -> i": "may only stand for the leading dims",
    "(... a) -> a": "'...' stands in brackets",
    "1i -> i": "'1i' begins with no factor",
    "_i -> i": "'_i' begins with no factor",
    "i-j -> i": "'-j' begins with no factor",
    "a.b -> a": "'.b' begins with no factor",
    "i..j -> i": "'..j' begins with no factor",
    BATCHING + "i -> i": "begins with no factor",
}


@pytest.mark.parametrize("rule", RULES)
def test_strings(rule):
    expected = RULES[rule]
    if expected is None:
        parse_rule(rule)
        return
    with pytest.raises(ArgumentError) as caught:
        parse_rule(rule)
    assert expected in str(caught.value)


def test_a_string_is_a_rule():
    rule = parse_rule("...i (a b) -> ...i a", need_replication_factors=("i",), b=2)
    assert rule.operand_mappings == (ArrayMapping(BATCHING, "i", CompoundFactor("a", "b")),)
    assert rule.result_mappings == ((BATCHING, "i", "a"),)
    assert repr(rule) == (
        "SdyShardingRule('... i (a b) -> ... i a', need_replication_factors=('i',), b=2)"
    )
    plain = SdyShardingRule(((BATCHING, "i"),), ((BATCHING, "i"),))
    assert plain.text() == "... i -> ... i"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"reduction_factors": ("k",)}, "reduction_factors has 'k', which is no factor"),
        (
            {"reduction_factors": ("i",), "permutation_factors": ("i",)},
            "factor 'i' is in reduction_factors and in permutation_factors",
        ),
        ({"need_replication_factors": ("i", "i")}, "it may be in one of them, once"),
        ({"i": 4}, "i=4 is the size of no factor"),
        ({"c": 4}, "c=4 is the size of no factor"),
    ],
)
def test_options(options: dict[str, Any], text: str):
    with pytest.raises(ArgumentError, match=text):
        parse_rule("i j -> j i", **options)


def test_mappings():
    with pytest.raises(ArgumentError, match="3 is no factor"):
        ArrayMapping("i", 3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="'1' is no factor"):
        CompoundFactor("a", "1")


def labels(rule: str, *shapes: Any, count: int = 1, **options: Any) -> Any:
    """The labels of dims, and of those that are not split; the last `count` shapes are results."""
    ins, outs = shapes[: len(shapes) - count], shapes[len(shapes) - count :]
    found = dims_of_rule(parse_rule(rule, **options), ins, outs, "f")
    return [*found.operands, *found.results], found.whole


def test_labels():
    assert labels("i j, j k -> i k", (2, 3), (3, 4), (2, 4)) == ([(0, 1), (1, 2), (0, 2)], set())
    assert labels("... i -> i", (5, 6, 2), (2,)) == ([(0, 1, 2), (2,)], set())
    assert labels("... i -> ... i", (2,), (2,)) == ([(0,), (0,)], set())
    found, whole = labels("i j -> j", (2, 3), (3,), need_replication_factors=("i",))
    assert whole == {found[0][0]}
    # Of a compound factor only the first is split.
    found, whole = labels("(a b) -> a b", (6,), (2, 3))
    assert found[0][0] == found[1][0] and whole == {found[1][1]}
    # A factor that is no dim alone is split where all dims that begin with it are alike.
    assert labels("(a b) -> (a b)", (6,), (6,), a=2, b=3)[1] == set()
    assert labels("(a b) c -> (a c) b", (6, 4), (8, 3), a=2)[1] == {0, 1, 2}


@pytest.mark.parametrize(
    ("rule", "shapes", "text"),
    [
        ("i j -> i j", [(2, 2), (2, 2), (2, 2)], "has 1 operands, but there are 2"),
        ("i j -> i j, i", [(2, 2), (2, 2)], "has 2 results, but there are 1"),
        ("i j -> i", [(2, 2), (2, 2)], r"result 0 of shape \(2, 2\) has 2 dims, but 1 in"),
        ("... i j -> i", [(2,), (2,)], "has 1 dims, but 2 in"),
        ("... i -> ... i", [(2, 2), (2,)], "'...' stands for 0 dims here and for 1 before"),
        ("(a b) -> a b", [(7,), (2, 3)], r"\(a b\) .* a=2, b=3, which do not make a dim of size 7"),
    ],
)
def test_shapes_that_do_not_fit(rule, shapes, text):
    with pytest.raises(ArgumentError, match=text):
        labels(rule, *shapes)
