"""Taylor mode for users: `jet`, all derivatives along a curve up to an order, in one pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import spmd.lax.taylor
import spmd.lax.taylor_control  # noqa: F401  (both add rules)
from spmd.api.flat import FlatFunction, as_array
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, DtypeError, ShapeError
from spmd.base.source import current_source
from spmd.base.tree import tree_flatten, tree_unflatten
from spmd.base.util import api_boundary, function_name
from spmd.core.argument_names import check_arrays, leaf_names
from spmd.core.aval import typeof
from spmd.core.jet import jet_flat
from spmd.core.structural import zeros_like_aval
from spmd.lax.arithmetic import mul
from spmd.lax.convert import convert_element_type
from spmd.lax.families import const


@api_boundary
def jet(
    fun: Callable[..., Any],
    primals: Sequence[Any],
    series: Sequence[Sequence[Any]],
    factorial_scaled: bool = True,
) -> tuple[Any, Any]:
    """The derivatives of `fun` along a curve, to the order of the series that are given.

    The curve goes through `primals`, one array for each argument; `series[k]` lists the
    derivatives of argument k along it: the first, the second, and so on, each of the argument's
    shape. The result is `fun(*primals)`, and in the structure of that a list of its derivatives,
    equally many. With `factorial_scaled=False` they are the coefficients of Taylor polynomials
    instead, on both sides: the k-th derivative divided by k!.

    Arguments are arrays, as in JAX; every operation that has a jvp rule has a series, also loops,
    branches and `custom_jvp` functions (by their rule). A `custom_vjp` function is taken by its
    body, as its rule is one for reverse mode.

    **A step in direction v is the series (v, 0, 0, ...)**: then the terms are the derivatives of
    `fun(x + t v)` at t = 0. The recurrences are those of Griewank and Walther, Evaluating
    Derivatives, chapter 13.

    >>> import spmd.numpy as snp
    >>> value, (first, second, third) = jet(snp.sin, (0.0,), ((1.0, 0.0, 0.0),))
    >>> float(first), float(third)
    (1.0, -1.0)
    """
    what = f"{current_source()}: jet({function_name(fun)})"
    order = _order(what, primals, series)
    names = leaf_names(fun, primals)
    check_arrays(f"jet({function_name(fun)})", names, primals)
    terms = [
        _terms(what, name, x, given, factorial_scaled)
        for name, x, given in zip(names, primals, series, strict=True)
    ]
    _, in_tree = tree_flatten((tuple(primals), {}))
    flat_f = FlatFunction(fun, in_tree)
    outs, found = jet_flat(flat_f, list(primals), terms, order)
    outs = [as_array(x) for x in outs]
    moved = [_out_terms(x, t, factorial_scaled) for x, t in zip(outs, found, strict=True)]
    assert flat_f.out_tree is not None
    return flat_f.value(outs), tree_unflatten(flat_f.out_tree, moved)


def _order(what: str, primals: Any, series: Any) -> int:
    """The number of terms of every argument."""
    for name, given in (("primals", primals), ("series", series)):
        if not isinstance(given, (tuple, list)):
            kind = type(given).__name__
            raise ArgumentError(f"{what}: {name} must be a tuple or list, got {kind}")
    if len(primals) != len(series):
        raise ArgumentError(
            f"{what}: primals has {len(primals)} arguments and series has {len(series)}; give one "
            "list of terms for each argument"
        )
    orders = {len(terms) for terms in series}
    if len(orders) != 1:
        raise ArgumentError(
            f"{what}: all arguments need equally many terms, got {[len(t) for t in series]}; "
            "fill up with zeros"
        )
    for k, x in enumerate(primals):
        leaves, tree = tree_flatten(x)
        if len(leaves) != 1 or leaves[0] is not x:
            raise ArgumentError(
                f"{what}: argument {k} must be an array, got a pytree {tree}; pass its leaves as "
                "arguments of their own"
            )
    return orders.pop()


def _terms(what: str, name: str, x: Any, given: Sequence[Any], scaled: bool) -> list[Any]:
    aval = typeof(x)
    if given and not dtypes.is_inexact(aval.dtype):
        raise DtypeError(
            f"{what}: argument {name} is {aval}, and only floats and complex numbers lie on "
            "curves; convert it with .astype(float), or close over it"
        )
    out = []
    for k, term in enumerate(given, 1):
        shape = typeof(term).shape
        if shape != aval.shape:
            raise ShapeError(
                f"{what}: term {k} of argument {name} must have its shape {aval.shape}, got {shape}"
            )
        term = convert_element_type(term, aval.dtype)
        out.append(term if scaled or k == 1 else mul(term, const(term, math.factorial(k))))
    return out


def _out_terms(x: Any, terms: list[Any], scaled: bool) -> list[Any]:
    aval = typeof(x)
    if not dtypes.is_inexact(aval.dtype):
        aval = aval.update(dtype=dtypes.canonical(float))
    out = []
    for k, term in enumerate(terms, 1):
        if term is None:
            term = zeros_like_aval(aval)
        elif not scaled and k > 1:
            term = mul(term, const(term, 1 / math.factorial(k)))
        out.append(as_array(np.asarray(term) if isinstance(term, (int, float)) else term))
    return out
