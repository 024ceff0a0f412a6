"""Products over ragged groups, and of scaled operands: sums of ordinary products.

`group_sizes` cuts one dim of the left operand into groups of consecutive rows; rows of other groups
count as zeros, so a ragged product is one `dot_general` with a dim for the groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from spmd.base import dtypes
from spmd.base.errors import ArgumentError, DtypeError, ShapeError
from spmd.core.aval import typeof
from spmd.core.explicit import lays_out_result
from spmd.core.structural import broadcast_in_dim, permute_dims, reshape, zeros_like_aval
from spmd.lax.arithmetic import mul, sub
from spmd.lax.array import broadcasted_iota
from spmd.lax.convert import convert_element_type
from spmd.lax.cumulative import cumsum
from spmd.lax.dot import DimensionNumbers, dimension_numbers_of, dot_general
from spmd.lax.families import fail
from spmd.lax.logic import bitwise_and, ge, lt, select

if TYPE_CHECKING:
    from spmd.sharding.array import Array


class RaggedDotDimensionNumbers(NamedTuple):
    """The dims of a ragged product: those of `dot_general`, the ragged one, the one of groups."""

    dot_dimension_numbers: Any
    lhs_ragged_dimensions: Sequence[int]
    rhs_group_dimensions: Sequence[int]


@lays_out_result
def ragged_dot(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: None = None,
    out_sharding: Any = None,
) -> Array:
    """Multiply each group of rows of `lhs` (m, k) with its own matrix of `rhs` (g, k, n).

    The first `group_sizes[0]` rows belong to `rhs[0]`, and so on; rows beyond all groups give
    0. The result has shape (m, n); `precision`, `preferred_element_type` and the dtype rule are
    those of `dot_general`. `group_offset` is not supported. `out_sharding`, a sharding or spec
    over `Explicit` mesh axes, is the layout of the result. Raises `ShapeError` for other
    shapes, and `ArgumentError` for a `group_offset`.

    >>> x = np.ones((3, 1), np.float32)
    >>> lax.ragged_dot(x, np.array([[[5.0]], [[7.0]]], np.float32), np.array([1, 2]))
    Array([[5.],
           [7.],
           [7.]], dtype=float32)
    """
    left, right = typeof(lhs), typeof(rhs)
    if left.ndim != 2 or right.ndim != 3:
        fail(ShapeError, f"ragged_dot: takes lhs (m, k) and rhs (g, k, n), got {left} and {right}")
    numbers = RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
    return ragged_dot_general(
        lhs, rhs, group_sizes, numbers, precision, preferred_element_type, group_offset
    )


@lays_out_result
def ragged_dot_general(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    ragged_dot_dimension_numbers: RaggedDotDimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: None = None,
    out_sharding: Any = None,
) -> Array:
    """Compute a `dot_general` one dim of whose `lhs` is cut into groups, by `group_sizes` (..., g).

    `ragged_dot_dimension_numbers` names that dim. If it is free, each group meets its own part
    of `rhs` along the dim of groups; if it is contracted, the result gets a leading dim of the
    sums of each group; if it is a batch dim, the groups change nothing. Leading dims of
    `group_sizes` are the batch dims of `lhs` and those of its free (or contracted) dims that
    come before the ragged one. `precision`, `preferred_element_type` and the dtype rule are
    those of `dot_general`. `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the
    layout of the result. Raises `ArgumentError` for a `group_offset` or several ragged dims,
    and `ShapeError` if sizes do not fit.

    >>> rows = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
    >>> x, y = np.ones((3, 1), np.float32), np.array([[[5.0]], [[7.0]]], np.float32)
    >>> lax.ragged_dot_general(x, y, np.array([1, 2]), rows).shape
    (3, 1)
    """
    name = "ragged_dot_general"
    if group_offset is not None:
        fail(ArgumentError, f"{name}: group_offset is not supported; slice group_sizes and rhs")
    dims, ragged_dims, group_dims = ragged_dot_dimension_numbers
    numbers = dimension_numbers_of(dims)
    if len(ragged_dims) != 1:
        fail(ArgumentError, f"{name}: one dim of lhs is ragged, got {tuple(ragged_dims)}")
    ragged, left = int(ragged_dims[0]), typeof(lhs)
    if ragged in numbers.batch[0]:
        return dot_general(lhs, rhs, dims, precision, preferred_element_type)
    kind = numbers.contract[0] if ragged in numbers.contract[0] else numbers.free(0, left.ndim)
    prefix = (*numbers.batch[0], *kind[: kind.index(ragged)])
    groups = _by_group(name, lhs, group_sizes, ragged, prefix)
    (lc, rc), (lb, rb) = numbers.contract, numbers.batch
    lc, lb = [d + 1 for d in lc], [d + 1 for d in lb]
    if ragged in numbers.contract[0]:
        if group_dims:
            fail(ArgumentError, f"{name}: rhs has no dim of groups if the ragged dim is contracted")
        paired = DimensionNumbers((tuple(lc), rc), (tuple(lb), rb))
        # The groups are a free dim of the left operand: they come before its others, not first.
        out = dot_general(groups, rhs, paired, precision, preferred_element_type)
        return _to_front(out, len(lb))
    if len(group_dims) != 1:
        fail(ArgumentError, f"{name}: one dim of rhs counts the groups, got {tuple(group_dims)}")
    contract = ((*lc, 0), (*rc, int(group_dims[0])))
    return dot_general(groups, rhs, (contract, (lb, rb)), precision, preferred_element_type)


def _to_front(x: Any, dim: int) -> Any:
    from_front = [dim, *(d for d in range(typeof(x).ndim) if d != dim)]
    return permute_dims(x, from_front)


def _by_group(name: str, x: Any, sizes: Any, ragged: int, prefix: tuple[int, ...]) -> Any:
    """`x` once for each group, with zeros where a row belongs to another one: (g, *x.shape)."""
    aval, given = typeof(x), typeof(sizes)
    if not dtypes.is_integer(given.dtype):
        fail(DtypeError, f"{name}: group_sizes must be integers, got {given}")
    wanted = tuple(aval.shape[d] for d in prefix)
    if given.ndim == 1:
        sizes = broadcast_in_dim(sizes, (*wanted, given.shape[0]), (len(wanted),))
    elif given.shape[:-1] != wanted:
        fail(
            ShapeError,
            f"{name}: group_sizes is {given}; its dims before the last must be {wanted}, the batch "
            "and outer dims of lhs",
        )
    ends = cumsum(sizes, len(wanted))
    shape = (typeof(sizes).shape[-1], *aval.shape)
    order = sorted(range(len(prefix)), key=prefix.__getitem__)

    def over_rows(bound: Any) -> Any:
        at = (0, *(prefix[k] + 1 for k in order))
        return broadcast_in_dim(permute_dims(bound, (len(prefix), *order)), shape, at)

    place = broadcasted_iota(typeof(ends).dtype, shape, ragged + 1)
    inside = bitwise_and(ge(place, over_rows(sub(ends, sizes))), lt(place, over_rows(ends)))
    spread = broadcast_in_dim(x, shape, range(1, len(shape)))
    return select(inside, spread, zeros_like_aval(typeof(spread)))


# ---- scaled operands ---------------------------------------------------------------------------


def scaled_dot(
    lhs: Any,
    rhs: Any,
    *,
    lhs_scale: Any = None,
    rhs_scale: Any = None,
    dimension_numbers: Any = None,
    preferred_element_type: Any = None,
) -> Array:
    """Compute a `dot_general` of operands in a narrow dtype, times scales for blocks of them.

    `lhs_scale` has the shape of `lhs`, and `rhs_scale` that of `rhs`, except that contracted dims
    may be shorter by a whole factor: then that many neighbours share one scale. Without
    `dimension_numbers` the operands are matrices with the same leading batch dims. The products are
    those of `preferred_element_type`, float32 by default. Raises `ShapeError` if a scale does not
    fit.

    >>> x = np.ones((1, 4), np.float16)
    >>> lax.scaled_dot(x, x.T, lhs_scale=np.float32([[1.0, 10.0]]))
    Array([[22.]], dtype=float32)
    """
    if dimension_numbers is None:
        ndim = typeof(lhs).ndim
        batch = tuple(range(ndim - 2))
        dimension_numbers = (((ndim - 1,), (ndim - 2,)), (batch, batch))
    numbers = dimension_numbers_of(dimension_numbers)
    wanted = dtypes.canonical(
        "float32" if preferred_element_type is None else preferred_element_type
    )
    given = ((lhs, lhs_scale, "lhs"), (rhs, rhs_scale, "rhs"))
    left, right = (
        _scaled(x, scale, wanted, numbers.contract[side], name)
        for side, (x, scale, name) in enumerate(given)
    )
    return dot_general(left, right, numbers, preferred_element_type=wanted)


def _scaled(x: Any, scale: Any, dtype: Any, contracted: tuple[int, ...], name: str) -> Any:
    wide = convert_element_type(x, dtype)
    if scale is None:
        return wide
    shape, have = typeof(x).shape, typeof(scale).shape
    fits = len(shape) == len(have) and all(
        n == m or (d in contracted and m and n % m == 0)
        for d, (n, m) in enumerate(zip(shape, have, strict=True))
    )
    if not fits:
        fail(
            ShapeError,
            f"scaled_dot: {name}_scale of shape {have} must have the shape of {name}, {shape}, or "
            f"whole fractions of it along the contracted dims {contracted}",
        )
    blocks = [part for n, m in zip(shape, have, strict=True) for part in (m, n // m if m else 1)]
    kept = range(0, len(blocks), 2)
    factors = broadcast_in_dim(convert_element_type(scale, dtype), blocks, kept)
    return mul(wide, reshape(factors, shape))
