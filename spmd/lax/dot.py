"""Matrix products: `dot_general`, of which `dot` and `batch_matmul` are special cases.

The one idea: dims of the two operands are *contracted* (paired and summed), *batched* (paired and
kept) or free; the result has the batch dims, then the free dims of the left, then of the right.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from spmd.base import dtypes
from spmd.base.config import config
from spmd.base.errors import ArgumentError, DtypeError, ShapeError
from spmd.base.util import inverse_permutation
from spmd.core.aval import ShapedArray, typeof
from spmd.core.explicit import laid_out, lays_out_result
from spmd.core.primitive import Dims, Primitive, dims, remembered
from spmd.core.structural import is_linear, permute_dims
from spmd.lax.convert import convert_element_type
from spmd.lax.families import (
    ANY,
    NARROW_FLOATS,
    check_dtype,
    check_same_dtype,
    fail,
    multilinear,
    precisions,
    shifted,
)

if TYPE_CHECKING:
    from spmd.sharding.array import Array


# The type of `DimensionNumbers` as users write them, for annotations.
DotDimensionNumbers: TypeAlias = tuple[
    tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]
]


class DimensionNumbers(NamedTuple):
    """The paired dims `((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))`, named."""

    contract: tuple[tuple[int, ...], tuple[int, ...]]
    batch: tuple[tuple[int, ...], tuple[int, ...]]

    def free(self, side: int, ndim: int) -> tuple[int, ...]:
        """The dims of operand 0 or 1 that are neither contracted nor batched."""
        paired = (*self.contract[side], *self.batch[side])
        return tuple(d for d in range(ndim) if d not in paired)


# ---- the public functions ----------------------------------------------------------------------


def dot_general(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
) -> Array:
    """Multiply `lhs` and `rhs` and sum over contracted dims, for each index of the batch dims.

    `dimension_numbers` is `((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))`, four
    sequences of dims. The shape of the result is that of the batch dims, then the free dims of
    `lhs`, then those of `rhs`. Operands of different dtypes are promoted. Products are summed in
    `preferred_element_type`, which is also the result's dtype; the default is the operands' dtype.
    Of two float dtypes it is the one with the larger exponent. Sums of floating products are kept
    in the operands' dtype, and converted, if that has more bits.
    `precision` changes nothing on the CPU, which always computes with full precision. On GPUs
    factors of float32 are rounded to TF32 where it is "default", "high" or "tensorfloat32".

    `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout of the result.
    Raises `ShapeError` if paired dims differ in size, `DtypeError` if sums of that dtype are
    impossible, and `ArgumentError` for malformed dimension numbers or an unknown precision.

    >>> x, y = np.ones((2, 3, 4)), np.ones((2, 4, 5))
    >>> lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,)))).shape
    (2, 3, 5)
    >>> lax.dot_general(np.int8([1, 2]), np.int8([3, 4]), (((0,), (0,)), ((), ())), None, np.int32)
    Array(11, dtype=int32)
    """
    if precision is not None or config.default_matmul_precision is not None:
        precision = precisions.precision_of("dot_general", precision)
    numbers = dimension_numbers_of(dimension_numbers)
    lhs, rhs, preferred = product_dtypes(lhs, rhs, preferred_element_type)
    common = typeof(lhs).dtype
    if (
        dtypes.is_float(common)
        and not dtypes.is_complex(preferred)
        and (preferred.itemsize < common.itemsize or not dtypes.is_float(preferred))
    ):  # sums have at least the precision of the products
        wide = dot_general(lhs, rhs, numbers, precision, common, out_sharding=out_sharding)
        return convert_element_type(wide, preferred)
    how = {
        "dimension_numbers": numbers,
        "precision": precision,
        "preferred_element_type": preferred,
    }
    if out_sharding is not None:
        return laid_out(out_sharding, functools.partial(dot_general_p.bind, **how), lhs, rhs)
    return dot_general_p.bind(lhs, rhs, **how)


def product_dtypes(lhs: Any, rhs: Any, preferred: Any) -> tuple[Any, Any, np.dtype]:
    """The operands of a product in their common dtype, and the dtype of its result."""
    left, right = typeof(lhs), typeof(rhs)
    if left.dtype != right.dtype:
        common, inside = _common(left, right)
        lhs, rhs = convert_element_type(lhs, inside), convert_element_type(rhs, inside)
    else:
        common = inside = left.dtype
    result = common if preferred is None else dtypes.canonical(preferred)
    if inside in dtypes.SMALL_FLOATING and dtypes.is_float(result) and result != inside:
        lhs, rhs = (convert_element_type(x, dtypes.wide_of(inside)) for x in (lhs, rhs))
    return lhs, rhs, result


def _common(left: ShapedArray, right: ShapedArray) -> tuple[np.dtype, np.dtype]:
    """The dtype of a product of two dtypes, and that in which it is computed.

    Of floats it is the one with the larger exponent, as in JAX: others than float32 and float64
    have no common type by promotion, or (bfloat16, float16) a wider one. Each product is exact.
    """
    kinds = left.dtype, right.dtype
    if all(map(dtypes.is_float, kinds)):
        rank = lambda t: (dtypes.finfo(t).maxexp, dtypes.finfo(t).nmant)  # noqa: E731
        wide = np.dtype(np.float64 if np.dtype(np.float64) in kinds else np.float32)
        return max(kinds, key=rank), wide
    pairs = ((left.dtype, left.weak_type), (right.dtype, right.weak_type))
    found = dtypes.promote(pairs)[0]
    return found, found


@lays_out_result
def dot(
    lhs: Any,
    rhs: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    dimension_numbers: Any = None,
    out_sharding: Any = None,
) -> Array:
    """Multiply vectors and matrices: the last dim of `lhs` with the first of `rhs`.

    The shape of the result is that of the other dims: (m, k) and (k, n) give (m, n), two
    vectors a scalar. `precision` and `preferred_element_type` are those of `dot_general`, and
    so is the dtype rule; with `dimension_numbers` this is `dot_general`. `out_sharding`, a
    sharding or spec over `Explicit` mesh axes, is the layout of the result. Raises `ShapeError`
    if an operand is neither a vector nor a matrix, or if the sizes differ.

    >>> lax.dot(np.array([[1, 2], [3, 4]]), np.array([1, 10]))
    Array([21, 43], dtype=int32)
    """
    if dimension_numbers is not None:
        return dot_general(lhs, rhs, dimension_numbers, precision, preferred_element_type)
    left, right = typeof(lhs), typeof(rhs)
    if not (1 <= left.ndim <= 2 and 1 <= right.ndim <= 2):
        fail(
            ShapeError,
            f"dot: takes vectors and matrices, got lhs {left} and rhs {right}; "
            "lax.dot_general takes any number of dims",
        )
    numbers = (((left.ndim - 1,), (0,)), ((), ()))
    return dot_general(lhs, rhs, numbers, precision, preferred_element_type)


def batch_matmul(lhs: Any, rhs: Any, precision: Any = None) -> Array:
    """Multiply the matrices in the last two dims, for each index of the equal dims before them.

    `lhs` of shape (..., m, k) and `rhs` of shape (..., k, n) give (..., m, n); leading dims do not
    broadcast. `precision` and the dtype rule are those of `dot_general`. Raises `ShapeError` if the
    numbers of dims differ, are less than 2, or if sizes do not fit.

    >>> lax.batch_matmul(np.ones((3, 2, 4)), np.ones((3, 4, 5))).shape
    (3, 2, 5)
    """
    left, right = typeof(lhs), typeof(rhs)
    if left.ndim < 2 or left.ndim != right.ndim:
        fail(
            ShapeError,
            f"batch_matmul: operands need the same number of dims, at least 2; got lhs {left} and "
            f"rhs {right}",
        )
    ndim = left.ndim
    batch = tuple(range(ndim - 2))
    return dot_general(lhs, rhs, (((ndim - 1,), (ndim - 2,)), (batch, batch)), precision)


def dimension_numbers_of(numbers: Any) -> DimensionNumbers:
    """`((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))` as tuples, checked."""
    try:
        (lc, rc), (lb, rb) = numbers
        return DimensionNumbers((_ints(lc), _ints(rc)), (_ints(lb), _ints(rb)))
    except (TypeError, ValueError):
        raise ArgumentError(
            f"dot_general: dimension_numbers={numbers!r} must be "
            "((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)), each a sequence of ints"
        ) from None


def _ints(xs: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(int, xs))


# ---- abstract ----------------------------------------------------------------------------------


def _check_side(name: str, aval: ShapedArray, contract: Any, batch: Any) -> None:
    used = (*contract, *batch)
    if len(set(used)) != len(used) or any(not 0 <= d < aval.ndim for d in used):
        fail(
            ShapeError,
            f"dot_general: {name}_contracting={contract} and {name}_batch={batch} must be "
            f"different numbers in range({aval.ndim}), as {name} is {aval}",
        )


def _check_pairs(kind: str, lhs: ShapedArray, rhs: ShapedArray, pairs: Any) -> None:
    left, right = pairs
    if len(left) != len(right):
        fail(
            ShapeError,
            f"dot_general: {kind} dims come in pairs, got {left} of lhs and {right} of rhs",
        )
    for d, e in zip(left, right, strict=True):
        if lhs.shape[d] != rhs.shape[e]:
            fail(
                ShapeError,
                f"dot_general: {kind} dims must have equal sizes, but dim {d} of lhs {lhs} has "
                f"size {lhs.shape[d]} and dim {e} of rhs {rhs} has size {rhs.shape[e]}",
            )


_SUM_KINDS = {"b": "biufc", "i": "ifc", "u": "iufc", "f": "fc", "c": "c"}


def _sum_kind(dtype: np.dtype) -> str:
    if dtypes.is_float(dtype):
        return "f"
    if not dtypes.is_small(dtype):
        return dtype.kind
    return "u" if dtypes.is_unsigned(dtype) else "i"


def check_preferred(name: str, dtype: np.dtype, wanted: np.dtype) -> None:
    """Raise the user's error if products of `dtype` cannot be summed in `wanted`."""
    if dtype == wanted:
        return
    kinds = [_sum_kind(d) for d in (dtype, wanted)]
    if kinds[1] not in _SUM_KINDS[kinds[0]] or wanted.itemsize < dtype.itemsize:
        fail(
            DtypeError,
            f"{name}: preferred_element_type={dtypes.long_name(wanted)} cannot hold sums of "
            f"{dtypes.long_name(dtype)} products; it must be of the same kind (or float for "
            "integers) and not narrower",
        )


@remembered
def _dot_abstract(
    lhs: ShapedArray,
    rhs: ShapedArray,
    *,
    dimension_numbers: DimensionNumbers,
    precision: Any,
    preferred_element_type: np.dtype,
) -> ShapedArray:
    numbers = dimension_numbers
    for name, aval in (("lhs", lhs), ("rhs", rhs)):
        check_dtype("dot_general", name, aval, ANY)
    if lhs.dtype != rhs.dtype and not (dtypes.is_float(lhs.dtype) and dtypes.is_float(rhs.dtype)):
        check_same_dtype("dot_general", ("lhs", "rhs"), (lhs, rhs))
    _check_side("lhs", lhs, numbers.contract[0], numbers.batch[0])
    _check_side("rhs", rhs, numbers.contract[1], numbers.batch[1])
    _check_pairs("contracted", lhs, rhs, numbers.contract)
    _check_pairs("batch", lhs, rhs, numbers.batch)
    for aval in (lhs, rhs):  # floats may differ: each is converted as it is read
        check_preferred("dot_general", aval.dtype, preferred_element_type)
    shape = (
        *(lhs.shape[d] for d in numbers.batch[0]),
        *(lhs.shape[d] for d in numbers.free(0, lhs.ndim)),
        *(rhs.shape[d] for d in numbers.free(1, rhs.ndim)),
    )
    weak = lhs.weak_type and rhs.weak_type and preferred_element_type == lhs.dtype
    return ShapedArray(shape, preferred_element_type, weak)


# ---- impl --------------------------------------------------------------------------------------


def _dot_impl(
    xp: Any,
    lhs: Any,
    rhs: Any,
    *,
    dimension_numbers: DimensionNumbers,
    precision: Any,
    preferred_element_type: np.dtype,
) -> Any:
    """Bring both operands to (batch, rows, columns) and multiply matrices."""
    numbers, out = dimension_numbers, preferred_element_type
    wide = np.dtype(np.float32) if out in NARROW_FLOATS else out
    batch = [lhs.shape[d] for d in numbers.batch[0]]
    free = [[x.shape[d] for d in numbers.free(s, x.ndim)] for s, x in enumerate((lhs, rhs))]
    count, contracted = int(np.prod(batch)), [lhs.shape[d] for d in numbers.contract[0]]
    depth = int(np.prod(contracted))
    left = (*numbers.batch[0], *numbers.free(0, lhs.ndim), *numbers.contract[0])
    right = (*numbers.batch[1], *numbers.contract[1], *numbers.free(1, rhs.ndim))
    lhs = xp.transpose(lhs, left).astype(wide).reshape(count, int(np.prod(free[0])), depth)
    rhs = xp.transpose(rhs, right).astype(wide).reshape(count, depth, int(np.prod(free[1])))
    with np.errstate(all="ignore"):
        product = xp.matmul(lhs, rhs)
    return product.reshape((*batch, *free[0], *free[1])).astype(out)


# ---- derivatives -------------------------------------------------------------------------------


def _dot_transpose(ct: Any, lhs: Any, rhs: Any, *, dimension_numbers: Any, **params: Any) -> Any:
    if is_linear(lhs):
        return [_transpose_side(0, ct, lhs.aval, rhs, dimension_numbers, params["precision"]), None]
    return [None, _transpose_side(1, ct, rhs.aval, lhs, dimension_numbers, params["precision"])]


def _transpose_side(
    side: int, ct: Any, aval: ShapedArray, other: Any, numbers: DimensionNumbers, precision: Any
) -> Any:
    """The cotangent of operand `side`: ct with the other operand, over the other's free dims."""
    other_aval = typeof(other)
    batch_count = len(numbers.batch[0])
    free = numbers.free(side, aval.ndim)
    other_free = numbers.free(1 - side, other_aval.ndim)
    start = batch_count + (len(free) if side == 0 else 0)
    ct_contract = tuple(range(start, start + len(other_free)))
    dtype = typeof(ct).dtype
    if other_aval.dtype != dtype:
        other = convert_element_type(other, dtype, other_aval.weak_type)
    found = dot_general(
        ct,
        other,
        ((ct_contract, other_free), (tuple(range(batch_count)), numbers.batch[1 - side])),
        precision,
    )
    # `found` has the batch dims, our free dims, then the other's contracted dims in its order.
    contract = _in_order_of(numbers.contract[1 - side], numbers.contract[side])
    order = (*numbers.batch[side], *free, *contract)
    found = permute_dims(found, inverse_permutation(order))
    if typeof(found).weak_type == aval.weak_type and dtype == aval.dtype:
        return found
    return convert_element_type(found, aval.dtype, aval.weak_type)


def _in_order_of(keys: Sequence[int], values: Sequence[int]) -> list[int]:
    """The values paired with keys, in increasing order of the keys."""
    return [v for _, v in sorted(zip(keys, values, strict=True))]


# ---- batch, dims -------------------------------------------------------------------------------


def _dot_batch(
    axis: Any, operands: Any, at: Any, *, dimension_numbers: DimensionNumbers, **params: Any
) -> Any:
    """A dim batched in both is one more batch dim; in one, it is one more free dim of it."""
    contract, batch = (list(pair) for pair in dimension_numbers)
    for side in (0, 1):
        if at[side] is not None:
            contract[side] = shifted(contract[side], at[side])
            batch[side] = shifted(batch[side], at[side])
    if at[0] is not None and at[1] is not None:
        batch = [(at[0], *batch[0]), (at[1], *batch[1])]
    numbers = DimensionNumbers((contract[0], contract[1]), (batch[0], batch[1]))
    out = dot_general_p.bind(*operands, dimension_numbers=numbers, **params)
    if at[0] is not None and at[1] is not None:
        return out, 0
    side = 0 if at[0] is not None else 1
    avals = [typeof(x) for x in operands]
    before = len(batch[0]) + (len(numbers.free(0, avals[0].ndim)) if side else 0)
    return out, before + numbers.free(side, avals[side].ndim).index(at[side])


def _dot_dims(
    lhs: ShapedArray, rhs: ShapedArray, *, dimension_numbers: DimensionNumbers, **_: Any
) -> Dims:
    numbers = dimension_numbers
    left = list(range(lhs.ndim))
    right = [lhs.ndim + d for d in range(rhs.ndim)]
    for pairs in numbers:
        for d, e in zip(*pairs, strict=True):
            right[e] = left[d]
    result = (
        *(left[d] for d in numbers.batch[0]),
        *(left[d] for d in numbers.free(0, lhs.ndim)),
        *(right[d] for d in numbers.free(1, rhs.ndim)),
    )
    return dims([left, right], [result], reduces="add")


def _dot_text(eqn: Any, names: Any) -> tuple[str, dict[str, Any]]:
    contract, batch = eqn.params["dimension_numbers"]
    pairs = tuple(tuple(map(list, dims)) for dims in (contract, batch))
    said = {k: v for k, v in eqn.params.items() if v is not None}
    return "dot_general", dict(sorted((said | {"dimension_numbers": pairs}).items()))


dot_general_p = Primitive(
    "dot_general",
    abstract=_dot_abstract,
    impl=_dot_impl,
    jvp=multilinear(lambda: dot_general_p),
    transpose=_dot_transpose,
    batch=_dot_batch,
    dims=_dot_dims,
    text=_dot_text,
)
