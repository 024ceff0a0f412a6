"""The base of factorizations: stacks of matrices, their rules for vmap and dims, their algebra.

An operand is a stack of matrices (or vectors): its last dims are the *core*, all dims before them
count independent problems, equal for all operands. So `vmap` is one more leading dim, and leading
dims may be split over devices. LAPACK runs through NumPy, as a host step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.errors import DtypeArgumentError, ShapeError
from spmd.core.aval import ShapedArray, typeof
from spmd.core.primitive import Dims, Primitive, Refused, dims
from spmd.core.structural import broadcast_in_dim, permute_dims, reduce_sum, to_front
from spmd.lax.arithmetic import add, conj, div, mul, real
from spmd.lax.array import broadcasted_iota
from spmd.lax.convert import convert_element_type
from spmd.lax.dot import batch_matmul
from spmd.lax.families import fail
from spmd.lax.linalg.lapack import few_threads, in_own_precision
from spmd.lax.logic import bitwise_not, eq, ge, gt, le, lt, select
from spmd.lax.precision import Precision
from spmd.lax.sort import take_along

# LAPACK knows these four.
MATRIX = frozenset(map(np.dtype, (np.float32, np.float64, np.complex64, np.complex128)))

# ---- checks ------------------------------------------------------------------------------------


def check_matrices(
    name: str, x: ShapedArray, argument: str = "x", square: bool = False
) -> tuple[tuple[int, ...], int, int]:
    """The stack's shape, the rows and the columns; raises the user's error if it is no matrix."""
    if x.dtype not in MATRIX:
        fail(
            DtypeArgumentError,
            f"{name}: accepts float32, float64, complex64 and complex128, got {x} (argument "
            f"{argument}); convert with {argument}.astype(float)",
        )
    if x.ndim < 2:
        fail(ShapeError, f"{name}: {argument} must have at least two dims, (..., m, n); got {x}")
    rows, columns = x.shape[-2:]
    if square and rows != columns:
        fail(ShapeError, f"{name}: {argument} must be square, (..., n, n); got {x}")
    return x.shape[:-2], rows, columns


# ---- the constructor ---------------------------------------------------------------------------


def stacked(
    name: str,
    *,
    abstract: Callable[..., Any],
    impl: Callable[..., Any],
    jvp: Any,
    transpose: Any,
    cores: Sequence[int],
    multiple: bool = False,
    batch: Callable[..., Any] | None = None,
) -> Primitive:
    """A primitive over stacks: `cores[k]` dims of operand k are its matrix or vector."""

    def batch_rule(axis: Any, operands: Any, at: Any, **params: Any) -> Any:
        return stacked_batch(prim, axis, operands, at, params)

    def dims_rule(*avals: ShapedArray, **params: Any) -> Dims:
        outs = abstract(*avals, **params)
        leading = avals[0].ndim - cores[0]
        everything = [*avals, *(outs if multiple else [outs])]
        labels = [(*range(leading), *range(-1, leading - a.ndim - 1, -1)) for a in everything]
        return dims(labels[: len(avals)], labels[len(avals) :])

    def run(xp: Any, *operands: Any, **params: Any) -> Any:
        with few_threads(max(operands[0].shape[-2:])):
            return impl(xp, *operands, **params)

    prim = Primitive(
        name,
        abstract=abstract,
        impl=run,
        jvp=jvp,
        transpose=transpose,
        batch=batch or batch_rule,
        dims=dims_rule,
        multiple=multiple,
    )
    return prim


def stacked_batch(prim: Primitive, axis: Any, operands: Any, at: Any, params: Any) -> Any:
    """The batch rule of all stacks: the batched dim is one more leading dim."""
    fronts = [to_front(x, d, axis.size) for x, d in zip(operands, at, strict=True)]
    out = prim.bind(*fronts, **params)
    return out, [0] * len(out) if prim.multiple else 0


def not_linear(name: str) -> Refused:
    """The refusal of a transpose rule."""
    return Refused(
        f"{name} is not linear, so it has no transpose; grad and vjp differentiate it with its jvp"
    )


# ---- over NumPy --------------------------------------------------------------------------------


def each_or_nan(f: Callable[..., Any], *arrays: Any) -> Any:
    """`f` of a stack, or, where LAPACK fails on it, of each matrix, with NaN for those that fail.

    A failure in one example must not take down the others, nor a program that selects later.
    """
    try:
        return f(*arrays)
    except np.linalg.LinAlgError:
        pass
    leading = arrays[0].shape[:-2]
    if not leading:
        with np.errstate(all="ignore"):
            like = f(*(_harmless(a) for a in arrays))
        return _map(lambda y: np.full_like(y, np.nan), like)
    flat = [a.reshape((-1, *a.shape[len(leading) :])) for a in arrays]
    found = [each_or_nan(f, *(a[k] for a in flat)) for k in range(flat[0].shape[0])]
    if not isinstance(found[0], tuple):
        return np.stack(found).reshape((*leading, *found[0].shape))
    return tuple(
        np.stack(column).reshape((*leading, *column[0].shape))
        for column in zip(*found, strict=True)
    )


def lapack(name: str, public: Callable[..., Any], *arrays: Any) -> Any:
    """A ufunc under `numpy.linalg` on stacks, NaN for matrices on which LAPACK fails.

    Where NumPy has none of that name, the public function computes in float64.
    """
    found = in_own_precision(name, *arrays)
    return each_or_nan(public, *arrays) if found is None else found


def _harmless(a: Any) -> Any:
    """An array of the same shape and dtype on which nothing fails: ones on the diagonal."""
    return np.broadcast_to(np.eye(*a.shape[-2:], dtype=a.dtype), a.shape)


def _map(f: Callable[[Any], Any], x: Any) -> Any:
    return tuple(map(f, x)) if isinstance(x, tuple) else f(x)


def adjoint_of(x: Any) -> Any:
    """The conjugate transpose of NumPy matrices."""
    return np.conj(np.swapaxes(x, -1, -2))


# ---- algebra on traced stacks ------------------------------------------------------------------


def matmul(a: Any, b: Any) -> Any:
    """The product of two stacks of matrices."""
    return batch_matmul(a, b, Precision.HIGHEST)


def swapped(x: Any) -> Any:
    """The transposes of a stack of matrices."""
    n = typeof(x).ndim
    return permute_dims(x, (*range(n - 2), n - 1, n - 2))


def adjoint(x: Any) -> Any:
    """The conjugate transposes of a stack of matrices."""
    return conjugate(swapped(x))


def conjugate(x: Any) -> Any:
    """The complex conjugate; a real array as it is."""
    return conj(x) if dtypes.is_complex(typeof(x).dtype) else x


def real_part(x: Any) -> Any:
    """The real part; a real array as it is."""
    return real(x) if dtypes.is_complex(typeof(x).dtype) else x


def in_rows(v: Any, like: Any) -> Any:
    """Vectors (..., n) as matrices of the shape of `like` (..., m, n) whose rows are equal."""
    shape = typeof(like).shape
    return broadcast_in_dim(v, shape, (*range(len(shape) - 2), len(shape) - 1))


def in_columns(v: Any, like: Any) -> Any:
    """Vectors (..., m) as matrices of the shape of `like` (..., m, n) whose columns are equal."""
    shape = typeof(like).shape
    return broadcast_in_dim(v, shape, tuple(range(len(shape) - 1)))


def on_diagonal(x: Any) -> Any:
    """Whether an element of a matrix is on the diagonal, as a boolean stack of the shape of x."""
    row, column = _places(x)
    return eq(row, column)


def _places(x: Any) -> tuple[Any, Any]:
    """The row and the column of each element."""
    shape = typeof(x).shape
    row = broadcasted_iota(np.int32, shape, len(shape) - 2)
    return row, broadcasted_iota(np.int32, shape, len(shape) - 1)


def lower_part(x: Any, strict: bool = False) -> Any:
    """The elements on and below the diagonal (only below, if strict), zeros elsewhere."""
    row, column = _places(x)
    return zero_unless(gt(row, column) if strict else ge(row, column), x)


def upper_part(x: Any, strict: bool = False) -> Any:
    """The elements on and above the diagonal (only above, if strict), zeros elsewhere."""
    row, column = _places(x)
    return zero_unless(lt(row, column) if strict else le(row, column), x)


def zero_unless(mask: Any, x: Any) -> Any:
    """`x` where the mask is true, zeros elsewhere."""
    aval = typeof(x)
    return select(mask, x, broadcast_in_dim(np.zeros((), aval.dtype), aval.shape, ()))


def diagonal_part(x: Any) -> Any:
    """The elements on the diagonal, zeros elsewhere."""
    return zero_unless(on_diagonal(x), x)


def diagonal(x: Any) -> Any:
    """The main diagonals of matrices, as vectors."""
    *_, rows, columns = typeof(x).shape
    n = typeof(x).ndim
    return reduce_sum(diagonal_part(x), (n - 1 if rows <= columns else n - 2,))


def eye_like(x: Any) -> Any:
    """Unit matrices of the shape and dtype of a stack."""
    aval = typeof(x)
    return zero_unless(on_diagonal(x), broadcast_in_dim(np.ones((), aval.dtype), aval.shape, ()))


def hermitian_from(x: Any, lower: bool) -> Any:
    """The Hermitian matrices of which one triangle of x is given; the other is not read."""
    strict = lower_part(x, strict=True) if lower else upper_part(x, strict=True)
    middle = convert_element_type(real_part(diagonal_part(x)), typeof(x).dtype)
    return add(add(strict, adjoint(strict)), middle)


def symmetrize(x: Any) -> Any:
    """The Hermitian part of square matrices, `(x + adjoint(x)) / 2`."""
    return scale(add(x, adjoint(x)), 0.5)


def scale(x: Any, factor: float) -> Any:
    """`x` times a number, in the dtype of x."""
    return mul(x, np.asarray(factor, typeof(x).dtype))


def inverse_or_zero(x: Any) -> Any:
    """`1 / x`, and 0 where x is 0."""
    aval = typeof(x)
    zero = np.zeros((), aval.dtype)
    none = eq(x, zero)
    ones = broadcast_in_dim(np.ones((), aval.dtype), aval.shape, ())
    return zero_unless(bitwise_not(none), div(ones, select(none, ones, x)))


def take_rows(x: Any, places: Any) -> Any:
    """The rows of matrices (..., m, n) at int places (..., k), for each matrix its own."""
    shape = (*typeof(places).shape, typeof(x).shape[-1])
    spread = broadcast_in_dim(places, shape, tuple(range(len(shape) - 1)))
    return take_along(x, spread, len(shape) - 2)
