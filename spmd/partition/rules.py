"""Sharding rules: the labels that equations give to the dims of their operands and results.

A rule is a `Dims` whose labels are *factors*: dims with one label are split alike, into as many
blocks in the same order. Most rules are those that primitives have. A reshape keeps the factor of
the first dim of each group that it merges or cuts, attention those of its batch and its heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spmd.collectives.member_dims import member_dims
from spmd.core.aval import ShapedArray
from spmd.core.ir import ClosedJaxpr, Eqn
from spmd.core.primitive import Dims, Primitive, dims, is_refused
from spmd.core.structural import broadcast_in_dim_p, permute_dims_p, reduce_sum_p, reshape_p
from spmd.lax.array import iota_p, rev_p, squeeze_p
from spmd.lax.concatenate import concatenate_p
from spmd.lax.conv import conv_general_dilated_p
from spmd.lax.convert import convert_element_type_p
from spmd.lax.dot import dot_general_p
from spmd.lax.dynamic import dynamic_slice_p
from spmd.lax.gather import gather_p
from spmd.lax.reduce import (
    reduce_and_p,
    reduce_max_p,
    reduce_min_p,
    reduce_or_p,
    reduce_prod_p,
    reduce_xor_p,
)
from spmd.lax.reduce_window import (
    reduce_window_max_p,
    reduce_window_min_p,
    reduce_window_sum_p,
)
from spmd.lax.slicing import pad_p, slice_p
from spmd.lax.sort import sort_p
from spmd.partition.halos import HALO, Windows, halo_rule
from spmd.partition.indexing import INDEXING, ROWS, indexed_rule
from spmd.partition.strategies.attention import ATTENTION, attention_rule
from spmd.partition.strategies.cumulative import CUMULATIVE
from spmd.partition.strategies.ordering import PICKS, pick_rule
from spmd.partition.strategies.reshaping import groups
from spmd.partition.strategies.sorting import SORTED, sort_rule
from spmd.sharding.custom_partitioning import custom_partitioning_p

Shape = tuple[int, ...]

# How a reduction over a split dim is finished, by the operator that its rule names.
COMBINED = ("add", "max", "min", "mul", "and", "or", "xor", "pick")

# Propagation takes equations by these levels: what only renames, what drops or adds dims, products.
RENAMES, CHANGES_RANK, CONTRACTS = range(3)
LEVELS = 3
_RENAMES = (reshape_p, permute_dims_p, squeeze_p, convert_element_type_p)
_CONTRACTS = (dot_general_p, conv_general_dilated_p)
# Of these, rows are independent, or summed and masked; and of these they are not.
_ROW_BY_ROW = frozenset(
    {
        broadcast_in_dim_p,
        concatenate_p,
        conv_general_dilated_p,
        dot_general_p,
        iota_p,
        pad_p,
        permute_dims_p,
        reduce_and_p,
        reduce_max_p,
        reduce_min_p,
        reduce_or_p,
        reduce_prod_p,
        reduce_sum_p,
        reduce_xor_p,
        reduce_window_max_p,
        reduce_window_min_p,
        reduce_window_sum_p,
        reshape_p,
        slice_p,
        squeeze_p,
        *CUMULATIVE,
        *PICKS,
    }
)
_WITH_PLACES = frozenset({custom_partitioning_p, *ATTENTION})
# These are partitioned as they are, not as what they stand for: batch and heads of operands are
# split alike, or have size 1.
KEPT = ATTENTION


def rule_of(eqn: Eqn, windows: Windows) -> Dims | None:
    """The rule of an equation with such windows; None if its operands have to be whole."""
    avals = [atom.aval for atom in eqn.invars]
    if eqn.prim is reshape_p:
        return _reshape_rule(avals[0].shape, eqn.params["new_sizes"])
    if eqn.prim in KEPT:
        return attention_rule(eqn)
    if eqn.prim is iota_p:
        ndim = len(eqn.params["shape"])
        return dims([], [range(ndim)])
    if eqn.prim in CUMULATIVE:
        return dims([range(avals[0].ndim)], [range(avals[0].ndim)])
    if eqn.prim in PICKS:
        return pick_rule(eqn)
    if eqn.prim is sort_p:
        return sort_rule(eqn)
    if eqn.prim is rev_p:
        return dims([range(avals[0].ndim)], [range(avals[0].ndim)])
    if is_refused(eqn.prim.dims):
        return member_dims(eqn.prim, avals, [v.aval for v in eqn.outvars], eqn.params)
    found = eqn.prim.rule("dims")(*avals, **eqn.params)
    if eqn.prim in INDEXING:
        found = indexed_rule(eqn, found)
    return halo_rule(found, windows)


def called_jaxpr(eqn: Eqn) -> ClosedJaxpr | None:
    """The jaxpr that a call stands for; attention is partitioned as it is.

    So is a function with a partition of its own.
    """
    if eqn.prim is custom_partitioning_p:
        return None
    return None if eqn.prim in KEPT and eqn.prim.inline is None else eqn.stands_for()


def level_of(prim: Primitive, is_elementwise: bool) -> int:
    """The level above at which propagation takes an equation."""
    if prim in _CONTRACTS:
        return CONTRACTS
    return RENAMES if is_elementwise or prim in _RENAMES else CHANGES_RANK


def may_split(rule: Dims, label: int) -> bool:
    """Whether the dims with a label may be split at all."""
    if label < 0 or label in rule.whole:
        return False
    if rule.reduces in COMBINED:
        return True
    for labels in rule.results:
        if label in labels:
            return True
    return False


def may_be_uneven(prim: Primitive, rule: Dims, label: int) -> bool:
    """Whether parts of dims with a label may have different sizes.

    All parts are as large as the first, and what the last ones have too much means nothing: rows
    must not depend on each other, or the equation has to mask what it adds up.
    """
    if label == SORTED:
        return True
    if label >= ROWS:
        return prim in INDEXING
    if HALO <= label < ROWS:
        # Of a sum of products a row that is too many would meet rows that are not 0, but NaN.
        return any(label in labels for labels in rule.results)
    if prim in _ROW_BY_ROW:
        return True
    if prim in _WITH_PLACES or prim.members is not None:
        return False
    # A row of a result is made of the same rows of operands. Indices are read, but not written to.
    return all(label in labels for labels in rule.results)


def is_row_by_row(rule: Dims) -> bool:
    """Whether all operands and results have the same dims, as where elements are independent."""
    first = None
    for labels in (*rule.operands, *rule.results):
        if not labels or labels == first:
            continue
        if first is not None:
            return False
        first = labels
    return first is not None


def _reshape_rule(old: Shape, new: Shape) -> Dims:
    """Equal labels for the first dims of each group of dims that has one number of elements.

    (6, 4) -> (2, 3, 4) has the groups (6) -> (2, 3) and (4) -> (4): of the 6 rows, halves are
    halves of the 2.
    """
    ins, outs = [-1 - d for d in range(len(old))], [-101 - d for d in range(len(new))]
    if 0 not in old:
        for label, group in enumerate(groups(old, new)):
            ins[group.old[0]] = outs[group.new[0]] = label
    return dims([ins], [outs])


# ---- parameters of a part ----------------------------------------------------------------------

Local = Callable[[dict[str, Any], Sequence[ShapedArray], Dims, Shape], dict[str, Any]]


def local_params(
    eqn: Eqn, operands: Sequence[ShapedArray], rule: Dims, result: Shape
) -> dict[str, Any]:
    """The parameters of an equation for parts of its operands; `result` is that part's shape.

    The parameters of a few primitives are sizes.
    """
    change = local_sizes(eqn, operands, rule, result)
    return eqn.params if change is None else eqn.params | change


def has_sizes(prim: Primitive) -> bool:
    """Whether parameters of a primitive are sizes of operands or results."""
    return prim in _LOCAL


def local_sizes(
    eqn: Eqn, operands: Sequence[ShapedArray], rule: Dims, result: Shape
) -> dict[str, Any] | None:
    """The parameters of an equation that are other ones for parts of its operands."""
    change = _LOCAL.get(eqn.prim)
    return None if change is None else change(eqn.params, operands, rule, result)


def _local_slice(params: dict[str, Any], operands: Any, rule: Dims, result: Shape) -> Any:
    limits = zip(params["limit_indices"], operands[0].shape, rule.operands[0], strict=True)
    return {"limit_indices": tuple(size if _spans(n) else stop for stop, size, n in limits)}


def _spans(label: int) -> bool:
    """Whether every window spans the dims with a label."""
    return 0 <= label < HALO


def _local_gather(params: dict[str, Any], operands: Any, rule: Dims, result: Shape) -> Any:
    along = params["dimension_numbers"].operand_batching_dims
    sizes = list(params["slice_sizes"])
    for d, label in enumerate(rule.operands[0]):
        if _spans(label) and d not in along:
            sizes[d] = operands[0].shape[d]
    return {"slice_sizes": tuple(sizes)}


_LOCAL: dict[Primitive, Local] = {
    broadcast_in_dim_p: lambda params, operands, rule, result: {"shape": result},
    reshape_p: lambda params, operands, rule, result: {"new_sizes": result},
    iota_p: lambda params, operands, rule, result: {"shape": result},
    dynamic_slice_p: lambda params, operands, rule, result: {"slice_sizes": result},
    slice_p: _local_slice,
    gather_p: _local_gather,
}
