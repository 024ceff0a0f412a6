"""Products of matrices and tensors: `dot`, `matmul`, `tensordot`, `outer`, `kron`, `trace`.

All of them become one `dot_general`; `einsum` is in its own file.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd import lax
from spmd.base.errors import ArgumentError, ShapeError
from spmd.base.source import current_source
from spmd.compile.dispatch.eager_cache import cached_arrays
from spmd.core.aval import typeof
from spmd.core.explicit import lays_out_result
from spmd.numpy.grids import eye
from spmd.numpy.manipulation import moveaxis, ravel, reshape
from spmd.numpy.promotion import (
    check_arraylike,
    constant_like,
    operand,
    optional_dtype,
    plain,
    promote_dtypes,
    refuse_out,
    select,
)
from spmd.numpy.reductions import canonical_axes, canonical_axis
from spmd.numpy.reductions import sum as _sum
from spmd.numpy.ufuncs import conjugate, multiply, subtract
from spmd.sharding.array import Array, ArrayLike


def _operands(name: str, a: Any, b: Any) -> list[Any]:
    check_arraylike(name, a, b)
    return promote_dtypes(plain(a), plain(b))


def _contract(
    a: Any, b: Any, contract: Any, batch: Any, precision: Any, result: np.dtype | None
) -> Any:
    """`dot_general` of promoted operands with the dtype (and weakness) that NumPy's rules give."""
    return lax.dot_general(a, b, (contract, batch), precision, result or typeof(a).dtype)


def _check_contracted(name: str, a: Any, b: Any, da: Sequence[int], db: Sequence[int]) -> None:
    left, right = typeof(a).shape, typeof(b).shape
    for m, n in zip(da, db, strict=True):
        if left[m] != right[n]:
            raise ShapeError(
                f"{name}: dim {m} of the first operand {left} (size {left[m]}) and dim {n} of the "
                f"second {right} (size {right[n]}) are summed over, so their sizes must be equal.\n"
                f"At {current_source()}."
            )


@lays_out_result
@cached_arrays
def dot(
    a: ArrayLike,
    b: ArrayLike,
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> Array:
    """The product over the last dim of `a` and the last but one of `b`, or its only one.

    Two vectors give a scalar, two matrices their product, and a scalar operand multiplies
    elementwise. The operands are promoted to one dtype, which the result has;
    `preferred_element_type` is another dtype for the sums and the result. `precision` is that
    of `lax.dot_general`. `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the
    layout of the result. Raises a `ShapeError` if the sizes that are summed over differ.

    >>> snp.dot(np.array([1, 2, 3]), np.array([4, 5, 6]))
    Array(32, dtype=int32)
    """
    a, b = _operands("dot", a, b)
    wanted = optional_dtype(preferred_element_type, "dot")
    ndim_a, ndim_b = typeof(a).ndim, typeof(b).ndim
    if ndim_a == 0 or ndim_b == 0:
        result = multiply(a, b)
        return result if wanted is None else lax.convert_element_type(result, wanted)
    da, db = (ndim_a - 1,), (max(ndim_b - 2, 0),)
    _check_contracted("dot", a, b, da, db)
    return _contract(a, b, (da, db), ((), ()), precision, wanted)


@lays_out_result
@cached_arrays
def matmul(
    a: ArrayLike,
    b: ArrayLike,
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> Array:
    """The matrix product, `a @ b`.

    The last two dims are the matrices, those before them batch dims, which broadcast; a vector
    is a row on the left and a column on the right. The operands are promoted to one dtype,
    which the result has; `preferred_element_type` is another dtype for the sums and the result.
    `precision` is that of `lax.dot_general`. `out_sharding`, a sharding or spec over `Explicit`
    mesh axes, is the layout of the result. Raises a `ShapeError` for a scalar or for sizes that
    do not fit.

    >>> snp.matmul(np.array([[1, 2], [3, 4]]), np.array([1, 10]))
    Array([21, 43], dtype=int32)
    """
    a, b = _operands("matmul", a, b)
    wanted = optional_dtype(preferred_element_type, "matmul")
    left, right = typeof(a).shape, typeof(b).shape
    for k, shape in enumerate((left, right)):
        if not shape:
            raise ShapeError(f"matmul: operand {k} has no dims; multiply by scalars with *")
    da, db = len(left) - 1, max(len(right) - 2, 0)
    _check_contracted("matmul", a, b, (da,), (db,))
    plan = _MatmulPlan(left, right)
    a, b = lax.reshape(a, plan.left), lax.reshape(b, plan.right)
    contract = ((len(plan.left) - 1,), (max(len(plan.right) - 2, 0),))
    if len(right) == 1:
        contract = (contract[0], (len(plan.right) - 1,))
    out = _contract(a, b, contract, plan.batch, precision, wanted)
    return lax.reshape(lax.permute_dims(out, plan.order), plan.result)


class _MatmulPlan:
    """How broadcasting batch dims of a matrix product become dims of one `dot_general`.

    A batch dim that one operand lacks (or has with size 1) is a free dim of the other: nothing is
    copied for broadcasting.
    """

    def __init__(self, left: tuple[int, ...], right: tuple[int, ...]):
        batch_l, batch_r = left[:-2], right[:-2]
        count = max(len(batch_l), len(batch_r))
        sizes_l = (1,) * (count - len(batch_l)) + batch_l
        sizes_r = (1,) * (count - len(batch_r)) + batch_r
        keep_l: list[int] = []
        keep_r: list[int] = []
        labels: dict[str, list[int]] = {"both": [], "left": [], "right": []}
        pairs: tuple[list[int], list[int]] = ([], [])
        for d, (m, n) in enumerate(zip(sizes_l, sizes_r, strict=True)):
            if m != n and 1 not in (m, n):
                raise ShapeError(
                    f"matmul: batch dims of {left} and {right} do not broadcast: sizes {m} and {n}"
                    f"\nAt {current_source()}."
                )
            if m == n != 1:
                labels["both"].append(d)
                pairs[0].append(len(keep_l))
                pairs[1].append(len(keep_r))
            elif m != 1:
                labels["left"].append(d)
            elif n != 1:
                labels["right"].append(d)
            keep_l += [m] if m != 1 else []
            keep_r += [n] if n != 1 else []
        self.left = (*keep_l, *left[-2:])
        self.right = (*keep_r, *right[-2:])
        self.batch = pairs
        rows = [count] if len(left) > 1 else []
        columns = [count + 1] if len(right) > 1 else []
        # dot_general puts batch dims first, then what is left of each operand.
        produced = [*labels["both"], *labels["left"], *rows, *labels["right"], *columns]
        self.order = [int(k) for k in np.argsort(produced)]
        whole = tuple(
            max(m, n) if 0 not in (m, n) else 0 for m, n in zip(sizes_l, sizes_r, strict=True)
        )
        self.result = (*whole, *left[-2:-1], *(right[-1:] if len(right) > 1 else ()))


def matvec(x1: ArrayLike, x2: ArrayLike, /) -> Array:
    """The products of matrices `x1` of shape (..., m, n) and vectors `x2` of shape (..., n).

    The dims in front broadcast. The operands are promoted to one dtype, which the result has.

    >>> snp.matvec(np.array([[1, 2], [3, 4]]), np.array([1, 10]))
    Array([21, 43], dtype=int32)
    """
    check_arraylike("matvec", x1, x2)
    column = reshape(x2, (*typeof(plain(x2)).shape, 1))
    product = matmul(x1, column)
    return lax.squeeze(product, (typeof(product).ndim - 1,))


def vecmat(x1: ArrayLike, x2: ArrayLike, /) -> Array:
    """The products of conjugated vectors and matrices.

    `x1` has shape (..., m) and `x2` (..., m, n); the dims in front broadcast. The operands are
    promoted to one dtype, which the result has.

    >>> snp.vecmat(np.array([1, 10]), np.array([[1, 2], [3, 4]]))
    Array([31, 42], dtype=int32)
    """
    check_arraylike("vecmat", x1, x2)
    shape = typeof(plain(x1)).shape
    product = matmul(reshape(conjugate(x1), (*shape[:-1], 1, *shape[-1:])), x2)
    return lax.squeeze(product, (typeof(product).ndim - 2,))


def vecdot(
    x1: ArrayLike,
    x2: ArrayLike,
    /,
    *,
    axis: int = -1,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Array:
    """The scalar products of vectors along a dim, with those of `x1` conjugated.

    `axis` is the dim of the vectors; the other dims broadcast. The operands are promoted to one
    dtype, which the result has. `precision` and `preferred_element_type` are those of `matmul`.

    >>> snp.vecdot(np.array([[1, 2], [3, 4]]), np.array([1, 10]))
    Array([21, 43], dtype=int32)
    """
    check_arraylike("vecdot", x1, x2)
    a, b = moveaxis(x1, axis, -1), moveaxis(x2, axis, -1)
    left, right = typeof(a).shape, typeof(b).shape
    row = reshape(conjugate(a), (*left[:-1], 1, left[-1]))
    column = reshape(b, (*right, 1))
    product = matmul(
        row, column, precision=precision, preferred_element_type=preferred_element_type
    )
    return reshape(product, typeof(product).shape[:-2])


def vdot(
    a: ArrayLike, b: ArrayLike, *, precision: Any = None, preferred_element_type: Any = None
) -> Array:
    """The scalar product of two flattened arrays, with the elements of `a` conjugated.

    `a` and `b` have equal sizes and are promoted to one dtype, which the result has. `precision`
    and `preferred_element_type` are those of `dot`.

    >>> snp.vdot(np.array([1j, 2.0]), np.array([1j, 1.0]))
    Array(3.+0.j, dtype=complex64)
    """
    check_arraylike("vdot", a, b)
    return dot(
        ravel(conjugate(a)),
        ravel(b),
        precision=precision,
        preferred_element_type=preferred_element_type,
    )


@lays_out_result
def tensordot(
    a: ArrayLike,
    b: ArrayLike,
    axes: Any = 2,
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> Array:
    """The sum of products over several dims of two arrays.

    `axes` is a number, for the last dims of `a` and the first of `b`, or a pair of lists of
    dims. The result has the other dims of `a`, then those of `b`. The operands are promoted to
    one dtype, which it has; `precision` and `preferred_element_type` are those of `dot`.
    `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout of the result.
    Raises a `ShapeError` if the sizes that are summed over differ.

    >>> snp.tensordot(np.ones((2, 3, 4)), np.ones((3, 4, 5))).shape
    (2, 5)
    """
    a, b = _operands("tensordot", a, b)
    da, db = _tensordot_axes(axes, typeof(a).shape, typeof(b).shape)
    _check_contracted("tensordot", a, b, da, db)
    wanted = optional_dtype(preferred_element_type, "tensordot")
    return _contract(a, b, (da, db), ((), ()), precision, wanted)


def _tensordot_axes(
    axes: Any, left: tuple[int, ...], right: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if isinstance(axes, (tuple, list)) and len(axes) == 2:
        da = canonical_axes(axes[0], len(left), "tensordot")
        db = canonical_axes(axes[1], len(right), "tensordot")
        if len(da) != len(db):
            raise ShapeError(f"tensordot: axes={axes} must name equally many dims of both operands")
        return da, db
    try:
        count = operator.index(axes)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentError(
            f"tensordot: axes must be an integer or a pair of integers or lists, got {axes!r}"
        ) from None
    if count > min(len(left), len(right)):
        raise ShapeError(f"tensordot: axes={count} exceeds the ranks of {left} and {right}")
    return tuple(range(len(left) - count, len(left))), tuple(range(count))


def inner(
    a: ArrayLike, b: ArrayLike, *, precision: Any = None, preferred_element_type: Any = None
) -> Array:
    """The product over the last dims of two arrays; of scalars and an array, elementwise.

    The result has the other dims of `a`, then those of `b`. The operands are promoted to one dtype,
    which it has. `precision` and `preferred_element_type` are those of `dot`.

    >>> snp.inner(np.array([[1, 2], [3, 4]]), np.array([1, 10]))
    Array([21, 43], dtype=int32)
    """
    check_arraylike("inner", a, b)
    if typeof(plain(a)).ndim == 0 or typeof(plain(b)).ndim == 0:
        return dot(a, b, preferred_element_type=preferred_element_type)
    return tensordot(
        a, b, (-1, -1), precision=precision, preferred_element_type=preferred_element_type
    )


def outer(a: ArrayLike, b: ArrayLike, out: None = None) -> Array:
    """The products of all pairs of elements of two flattened arrays.

    The shape is (`a.size`, `b.size`). The operands are promoted to one dtype, which the result has.

    >>> snp.outer(np.array([1, 2]), np.array([3, 4, 5]))
    Array([[ 3,  4,  5],
           [ 6,  8, 10]], dtype=int32)
    """
    refuse_out("outer", out)
    check_arraylike("outer", a, b)
    return multiply(reshape(a, (-1, 1)), reshape(b, (1, -1)))


def kron(a: ArrayLike, b: ArrayLike) -> Array:
    """The Kronecker product: each element of `a` replaced by its product with all of `b`.

    The size of each dim is the product of the operands' sizes. The operands are promoted to one
    dtype, which the result has.

    >>> snp.kron(np.array([1, 10]), np.array([1, 2]))
    Array([ 1,  2, 10, 20], dtype=int32)
    """
    check_arraylike("kron", a, b)
    left, right = typeof(plain(a)).shape, typeof(plain(b)).shape
    rank = max(len(left), len(right))
    left, right = ((1,) * (rank - len(s)) + s for s in (left, right))
    spread_a = [n for size in left for n in (size, 1)]
    spread_b = [n for size in right for n in (1, size)]
    product = multiply(reshape(a, spread_a), reshape(b, spread_b))
    return reshape(product, tuple(m * n for m, n in zip(left, right, strict=True)))


def cross(
    a: ArrayLike,
    b: ArrayLike,
    axisa: int = -1,
    axisb: int = -1,
    axisc: int = -1,
    axis: int | None = None,
) -> Array:
    """The cross product of vectors of 3 components; of vectors of 2, its third component.

    The vectors lie along dims `axisa` of `a`, `axisb` of `b` and `axisc` of the result, or `axis`
    of all three; the other dims broadcast. The operands are promoted to one dtype. Raises a
    `ShapeError` if the vectors have another size.

    >>> snp.cross(np.array([1, 0, 0]), np.array([0, 1, 0]))
    Array([0, 0, 1], dtype=int32)
    """
    if axis is not None:
        axisa = axisb = axisc = axis
    check_arraylike("cross", a, b)
    a, b = moveaxis(a, axisa, -1), moveaxis(b, axisb, -1)
    sizes = {typeof(v).shape[-1] for v in (a, b)}
    if not sizes <= {2, 3}:
        raise ShapeError(f"cross: vectors must have 2 or 3 components, got {sorted(sizes)}")

    def component(v: Any, k: int) -> Any:
        n = typeof(v).ndim - 1
        return lax.squeeze(lax.slice_in_dim(v, k, k + 1, axis=n), (n,))

    def minor(k: int, m: int) -> Any:
        left = multiply(component(a, k), component(b, m))
        return subtract(left, multiply(component(a, m), component(b, k)))

    if sizes == {2}:
        return minor(0, 1)
    a, b = (_with_third(v) for v in (a, b))
    parts = [minor(1, 2), minor(2, 0), minor(0, 1)]
    stacked = lax.concatenate(
        [lax.expand_dims(p, (typeof(p).ndim,)) for p in parts], typeof(parts[0]).ndim
    )
    return moveaxis(stacked, -1, axisc)


def _with_third(v: Any) -> Any:
    """A vector of 3 components: the third is 0 if it had 2."""
    shape = typeof(v).shape
    if shape[-1] == 3:
        return v
    return lax.pad(v, constant_like(v, 0), [(0, 0, 0)] * (len(shape) - 1) + [(0, 1, 0)])


def trace(
    a: ArrayLike,
    offset: int = 0,
    axis1: int = 0,
    axis2: int = 1,
    dtype: Any = None,
    out: None = None,
) -> Array:
    """The sum along a diagonal of matrices, the dims `axis1` and `axis2` of `a`.

    Diagonal `offset` lies that many columns to the right of the main one. The other dims stay. The
    dtype is `dtype`, or that of `sum`: small integers become the default integer. Raises an
    `ArgumentError` if the two dims are the same.

    >>> snp.trace(np.array([[1, 2], [3, 4]]))
    Array(5, dtype=int32)
    """
    a = operand("trace", a, out)
    n = typeof(a).ndim
    d1, d2 = canonical_axis(axis1, n, "trace"), canonical_axis(axis2, n, "trace")
    if d1 == d2:
        raise ArgumentError(f"trace: axis1={axis1} and axis2={axis2} must be different dims")
    a = moveaxis(a, (d1, d2), (-2, -1))
    shape = typeof(a).shape
    on_diagonal = eye(shape[-2], shape[-1], offset, np.bool_)
    return _sum(select(on_diagonal, a, constant_like(a, 0)), (-2, -1), dtype)
