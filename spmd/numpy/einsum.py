"""`einsum`: sums of products over named dims, as a chain of `dot_general`s.

Every step contracts two operands. Dims that only one of them has and that no later step needs are
summed first, shared dims that are still needed are batch dims, and the other shared dims are
contracted. The order of steps is NumPy's `einsum_path`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd import lax
from spmd.base.errors import ArgumentError, ShapeError
from spmd.base.source import current_source
from spmd.core.aval import typeof
from spmd.core.explicit import lays_out_result
from spmd.numpy.promotion import (
    as_array,
    check_arraylike,
    constant_like,
    optional_dtype,
    plain,
    promote_dtypes,
    refuse_out,
    select,
)
from spmd.numpy.reductions import sum as _sum
from spmd.sharding.array import Array

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@lays_out_result
def einsum(
    subscripts: Any,
    /,
    *operands: Any,
    out: None = None,
    optimize: Any = "auto",
    precision: Any = None,
    preferred_element_type: Any = None,
    _dot_general: Any = lax.dot_general,
    out_sharding: Any = None,
) -> Array:
    """The sum of products of arrays over dims that are named by letters.

    `subscripts` like "ij,jk->ik" names the dims of the `operands` and of the result; dims that
    the result lacks are summed over, and "..." stands for dims that broadcast. Without "->" the
    result has the letters that occur once, in order. Lists of integers behind each operand may
    stand for letters. The operands are promoted to one dtype, which the result has;
    `preferred_element_type` is another dtype for the sums and the result. `precision` is that
    of `lax.dot_general`; `optimize` chooses the order of products, as in NumPy. `out_sharding`,
    a sharding or spec over `Explicit` mesh axes, is the layout of the result. `_dot_general` is a
    function in the place of `lax.dot_general`, as libraries of quantized products have one.

    >>> snp.einsum("ij,kj->ik", np.ones((2, 3)), np.ones((4, 3))).shape
    (2, 4)
    >>> snp.einsum("ii", np.array([[1, 2], [3, 4]]))
    Array(5, dtype=int32)
    """
    refuse_out("einsum", out)
    if not isinstance(subscripts, str):
        subscripts, operands = _from_lists((subscripts, *operands))
    check_arraylike("einsum", *operands)
    wanted = optional_dtype(preferred_element_type, "einsum")
    arrays = promote_dtypes(*map(plain, operands))
    shapes = [typeof(x).shape for x in arrays]
    inputs, output = parse(subscripts, shapes)
    sizes = _label_sizes(subscripts, inputs, shapes)
    terms = [_prepared(x, labels, sizes) for x, labels in zip(arrays, inputs, strict=True)]
    for pair in _path(inputs, output, sizes, optimize):
        chosen = [terms.pop(k) for k in sorted(pair, reverse=True)][::-1]
        needed = set(output).union(*(labels for _, labels in terms))
        if len(chosen) == 1:
            terms.append(_summed(*chosen[0], needed))
        else:
            product = functools.partial(_dot_general, precision=precision)
            terms.append(_contracted(chosen[0], chosen[1], needed, product, wanted))
    x, labels = _summed(*terms[0], set(output))
    x = lax.transpose(x, [labels.index(label) for label in output if label in labels])
    shape = [sizes[label] for label in output]
    kept = [k for k, label in enumerate(output) if label in labels]
    result = lax.broadcast_in_dim(x, shape, kept)
    return as_array(result if wanted is None else lax.convert_element_type(result, wanted))


# ---- reading subscripts ------------------------------------------------------------------------


def _letter(number: int) -> str:
    """The letter that stands for a number: any character may be one but `,.->`."""
    return _LETTERS[number] if number < len(_LETTERS) else chr(140 + number)


def _from_lists(args: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """`einsum(x, [0, 1], y, [1, 2], [0, 2])` as letters; labels are any objects that have an order.

    Raises the `TypeError` of JAX for labels without one.
    """
    pairs, result = (args[:-1], args[-1]) if len(args) % 2 else (args, None)
    try:
        labels = sorted({k for own in pairs[1::2] for k in own if k is not Ellipsis})
    except TypeError:
        raise TypeError(
            f"{current_source()}: einsum: labels in lists must be Ellipsis, or hashable and "
            f"comparable objects (e.g. int, str), got {list(pairs[1::2])}"
        ) from None
    letter = {label: _letter(k) for k, label in enumerate(labels)}
    # A label that only the result has, for the error that names it.
    letter |= {k: _letter(len(labels)) for k in result or () if k not in letter}

    def letters(labels: Sequence[Any]) -> str:
        return "".join("..." if k is Ellipsis else letter[k] for k in labels)

    inputs = ",".join(letters(labels) for labels in pairs[1::2])
    text = inputs if result is None else f"{inputs}->{letters(result)}"
    return text, pairs[0::2]


def parse(subscripts: str, shapes: Sequence[tuple[int, ...]]) -> tuple[list[str], str]:
    """The labels of the operands and of the result; dots become letters of their own."""
    text = subscripts.replace(" ", "")
    left, arrow, right = text.partition("->")
    inputs = left.split(",")
    if len(inputs) != len(shapes):
        raise ArgumentError(
            f"einsum: {subscripts!r} describes {len(inputs)} operands, got {len(shapes)}"
        )
    used = set(text)
    spare = [letter for letter in _LETTERS if letter not in used]
    hidden = [len(s) - len(t.replace("...", "")) for s, t in zip(shapes, inputs, strict=True)]
    dots = "".join(
        spare[: max((h for h, t in zip(hidden, inputs, strict=True) if "..." in t), default=0)]
    )
    whole = []
    for text_k, shape, count in zip(inputs, shapes, hidden, strict=True):
        own = dots[len(dots) - count :] if count > 0 else ""
        labels = text_k.replace("...", own)
        if len(labels) != len(shape) or set(labels) & set(".-<>"):
            raise ShapeError(
                f"einsum: {text_k!r} in {subscripts!r} names {len(labels)} dims, but the operand "
                f"has shape {shape}\nAt {current_source()}."
            )
        whole.append(labels)
    if arrow:
        output = right.replace("...", dots)
    else:
        every = "".join(whole)
        once = sorted(k for k in set(every) - set(dots) if every.count(k) == 1)
        output = dots + "".join(once)
    unknown = set(output) - set("".join(whole))
    if unknown or len(set(output)) != len(output):
        raise ArgumentError(
            f"einsum: the result {right!r} of {subscripts!r} must name dims of the operands, each "
            "once"
        )
    return whole, output


def _label_sizes(
    subscripts: str, inputs: Sequence[str], shapes: Sequence[tuple[int, ...]]
) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for labels, shape in zip(inputs, shapes, strict=True):
        for label, size in zip(labels, shape, strict=True):
            before = sizes.get(label, 1)
            if size != before and 1 not in (size, before):
                raise ShapeError(
                    f"einsum: label {label!r} in {subscripts!r} has sizes {before} and {size}; "
                    f"shapes are {', '.join(map(str, shapes))}\nAt {current_source()}."
                )
            sizes[label] = max(size, before) if 0 not in (size, before) else 0
    return sizes


def _path(inputs: Sequence[str], output: str, sizes: dict[str, int], optimize: Any) -> Any:
    """Which operands to contract in which order: tuples of positions."""
    if len(inputs) <= 2 or optimize is False:
        # The result of a step goes to the end, so this takes all operands in turn.
        return [(0, 1)] * (len(inputs) - 1)
    if isinstance(optimize, (list, tuple)):
        return list(optimize)
    how = ("optimal" if len(inputs) < 5 else "greedy") if optimize in ("auto", True) else optimize
    # Views without memory: the path depends on shapes only.
    shapes = [np.broadcast_to(np.int8(0), [sizes[k] for k in labels]) for labels in inputs]
    path = np.einsum_path(f"{','.join(inputs)}->{output}", *shapes, optimize=how)[0]
    return [step for long in path[1:] for step in _pairwise(long)]


def _pairwise(step: tuple[int, ...]) -> list[tuple[int, ...]]:
    """A step of several operands as steps of two, whose result goes to the end."""
    if len(step) <= 2:
        return [step]
    rest = sorted(step)
    steps: list[tuple[int, ...]] = []
    while len(rest) > 1:
        a, b = rest[0], rest[1]
        steps.append((a, b))
        last = -1
        rest = [k - (k > a) - (k > b) for k in rest[2:]]
        rest = [*rest, last] if rest else []
    return steps


# ---- the steps ---------------------------------------------------------------------------------


def _prepared(x: Any, labels: str, sizes: dict[str, int]) -> tuple[Any, str]:
    """The operand with diagonals taken and without dims of size 1 that broadcast."""
    single = [d for d, label in enumerate(labels) if typeof(x).shape[d] == 1 != sizes[label]]
    x = lax.squeeze(x, single)
    labels = "".join(label for d, label in enumerate(labels) if d not in single)
    for label in dict.fromkeys(labels):
        while labels.count(label) > 1:
            first = labels.index(label)
            second = labels.index(label, first + 1)
            # Of explicit types the last dim's layout stays, as in JAX; else the first, which a
            # matrix of split rows has without an exchange.
            gone = second if typeof(x).explicit is None else first
            x = _diagonal(x, first, second, gone)
            labels = labels[:gone] + labels[gone + 1 :]
    return x, labels


def _diagonal(x: Any, first: int, second: int, gone: int) -> Any:
    """The elements with equal indices in two dims of equal size; the dim `gone` disappears."""
    shape = typeof(x).shape
    index = np.dtype(np.int32)
    same = lax.eq(
        lax.broadcasted_iota(index, shape, first), lax.broadcasted_iota(index, shape, second)
    )
    return lax.reduce_sum(select(same, x, constant_like(x, 0)), (gone,))


def _summed(x: Any, labels: str, needed: set[str]) -> tuple[Any, str]:
    """The operand summed over the dims that no later step needs."""
    spent = tuple(d for d, label in enumerate(labels) if label not in needed)
    if not spent:
        return x, labels
    kept = "".join(label for label in labels if label in needed)
    return _sum(x, spent, dtype=typeof(x).dtype), kept


def _contracted(
    left: tuple[Any, str], right: tuple[Any, str], needed: set[str], product: Any, wanted: Any
) -> tuple[Any, str]:
    x, in_x = _summed(*left, needed | set(right[1]))
    y, in_y = _summed(*right, needed | set(left[1]))
    shared = [k for k in in_x if k in in_y]
    batch = [k for k in shared if k in needed]
    spent = [k for k in shared if k not in needed]
    numbers = (
        ([in_x.index(k) for k in spent], [in_y.index(k) for k in spent]),
        ([in_x.index(k) for k in batch], [in_y.index(k) for k in batch]),
    )
    result = product(x, y, numbers, preferred_element_type=wanted or typeof(x).dtype)
    free = [k for k in in_x if k not in shared] + [k for k in in_y if k not in shared]
    if wanted is not None:
        # Later steps multiply operands of one dtype.
        result = lax.convert_element_type(result, typeof(x).dtype)
    return result, "".join(batch + free)


_FEW = 4


def einsum_path(subscripts: Any, /, *operands: Any, optimize: Any = "auto") -> Any:
    """The order in which `einsum` would multiply, and NumPy's description of its cost.

    The order is a list of the operands, by position, that are multiplied in each step, as in JAX.
    Only the shapes of the `operands` matter, not their dtypes. `subscripts` and `optimize` are
    those of `einsum`.

    >>> snp.einsum_path("ij,jk->ik", np.ones((2, 3)), np.ones((3, 4)))[0]
    [(0, 1)]
    """
    if not isinstance(subscripts, str):
        subscripts, operands = _from_lists((subscripts, *operands))
    shapes = [np.broadcast_to(np.int8(0), typeof(plain(x)).shape) for x in operands]
    # The best order of few operands is found at once, as that of opt_einsum's "auto".
    how = optimize
    if optimize is True or optimize == "auto":
        how = "optimal" if optimize is True or len(shapes) <= _FEW else "greedy"
    path, text = np.einsum_path(subscripts, *shapes, optimize=how)
    if optimize is False:
        return [(0, 1)] * max(len(shapes) - 1, 0) or path[1:], text
    return path[1:], text
