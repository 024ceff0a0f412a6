"""Ufunc objects: `add.reduce`, `maximum.accumulate`, `multiply.outer`, `subtract.at`, `frompyfunc`.

The public `add`, `maximum`, ... are those made here; inside the package the plain functions of
`ufuncs.py` and `logic.py` are used, so that no call goes through an object.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from spmd import lax
from spmd.api.inspect import eval_shape
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, DtypeError, RefusedError, ShapeError
from spmd.base.traceback_filter import simplify
from spmd.base.util import handles
from spmd.core.aval import ShapedArray, typeof
from spmd.numpy import floats, indexing, logic, reductions, ufuncs
from spmd.numpy.functional import vectorize
from spmd.numpy.manipulation import moveaxis, ravel, reshape
from spmd.numpy.promotion import (
    as_array,
    broadcast_to,
    check_arraylike,
    plain,
    promote_dtypes_inexact,
    refuse_out,
    select,
)
from spmd.numpy.reductions import canonical_axes, canonical_axis, check_where, keep_dims

if TYPE_CHECKING:
    from spmd.sharding.array import Array, ArrayLike

Method = Callable[..., Any]


class ufunc:
    """A function of elements, with NumPy's methods for two operands: `reduce`, `accumulate`, ...

    `nin` and `nout` are the numbers of arguments and results, `identity` the value that changes
    nothing, or None. `nargs` is `nin`, as in JAX (NumPy counts results too). Where no special
    method is given, a method applies the function element after element, from left to right.

    >>> spmd.numpy.multiply.outer(np.array([1, 2]), np.array([3, 4]))
    Array([[3, 4],
           [6, 8]], dtype=int32)
    """

    def __init__(
        self,
        func: Method,
        /,
        nin: int,
        nout: int,
        *,
        name: str | None = None,
        nargs: int | None = None,
        identity: Any = None,
        call: Method | None = None,
        reduce: Method | None = None,
        accumulate: Method | None = None,
        at: Method | None = None,
        reduceat: Method | None = None,
    ):
        self.__name__ = self.__qualname__ = name or func.__name__
        self.__doc__ = func.__doc__
        self.__module__ = func.__module__
        self.__signature__ = inspect.signature(func)
        self._func = func
        self._call = call or vectorize(func)
        self._counts = (operator.index(nin), operator.index(nout), operator.index(nargs or nin))
        self._identity = identity
        self._reduce = reduce or functools.partial(_fold, self)
        self._accumulate = accumulate or functools.partial(_running_fold, self)
        self._at = at or functools.partial(_update_in_turn, self)
        self._reduceat = reduceat or functools.partial(_fold_parts, self)

    @property
    def nin(self) -> int:
        """The number of arguments the function takes."""
        return self._counts[0]

    @property
    def nout(self) -> int:
        """The number of results the function has."""
        return self._counts[1]

    @property
    def nargs(self) -> int:
        """As `nin`: results are never passed in."""
        return self._counts[2]

    @property
    def identity(self) -> Any:
        """The operand that changes nothing, or None."""
        return self._identity

    def _key(self) -> tuple[Any, ...]:
        return self._func, self.__name__, self._counts, self._identity

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ufunc) and self._key() == other._key()

    def __repr__(self) -> str:
        return f"<spmd.numpy.ufunc {self.__name__!r}>"

    def __reduce__(self) -> Any:
        if self.__module__ == "spmd.numpy":
            return self.__name__
        nin, nout, _ = self._counts
        return functools.partial(frompyfunc, identity=self._identity), (self._func, nin, nout)

    @handles
    def __call__(self, *args: Any, out: None = None, where: None = None) -> Any:
        """The function of arrays, which are broadcast."""
        try:
            if out is not None or where is not None:
                refuse_out(self.__name__, out)
                raise ArgumentError(
                    f"{self.__name__}: where= is not supported; select with where()"
                )
            return self._call(*args)
        except Exception as error:
            simplify(error)
            raise

    def _binary(self, method: str, *arrays: Any) -> str:
        """The method's name for messages, after a check that the ufunc can have it."""
        name = f"{self.__name__}.{method}"
        if self._counts[:2] != (2, 1):
            nin, nout, _ = self._counts
            raise ArgumentError(
                f"{name}: only functions of 2 arguments with 1 result have this method; "
                f"{self.__name__} has nin={nin}, nout={nout}"
            )
        check_arraylike(name, *arrays)
        return name

    def reduce(
        self,
        a: Any,
        axis: Any = 0,
        dtype: Any = None,
        out: None = None,
        keepdims: bool = False,
        initial: Any = None,
        where: Any = None,
    ) -> Any:
        """All elements along a dim, combined from left to right; `axis=None` takes all dims.

        >>> spmd.numpy.maximum.reduce(np.array([[1, 5], [7, 2]]))
        Array([7, 5], dtype=int32)
        """
        name = self._binary("reduce", a, *(v for v in (initial, where) if v is not None))
        refuse_out(name, out)
        if check_where(name, where) is not None and self.identity is None and initial is None:
            raise ArgumentError(
                f"{name} has no identity, so a where mask needs initial=, the result where "
                "nothing is selected"
            )
        given = (plain(v) for v in (a, initial, where))
        a, initial, where = given
        return self._reduce(
            a, axis=axis, dtype=dtype, keepdims=keepdims, initial=initial, where=where
        )

    def accumulate(self, a: Any, axis: int | None = 0, dtype: Any = None, out: None = None) -> Any:
        """The results of `reduce` up to each element along a dim.

        With `axis=None` sums and products go through the elements of the flattened array.
        """
        name = self._binary("accumulate", a)
        refuse_out(name, out)
        a = as_array(plain(a))
        if axis is None and self.__name__ in ("add", "multiply"):  # as cumsum and cumprod
            a, axis = ravel(a), 0
        if axis is None or isinstance(axis, tuple):
            raise ArgumentError(f"{name}: axis must be one integer, got {axis!r}")
        return self._accumulate(a, axis=canonical_axis(axis, a.ndim, name), dtype=dtype)

    def at(self, a: Any, indices: Any, b: Any = None, /, *, inplace: bool = True) -> Any:
        """A copy of `a` with the function applied at indices, once for each time one occurs.

        As arrays are immutable, `inplace=False` must be given.

        >>> spmd.numpy.add.at(np.zeros(3), np.array([0, 0, 2]), 1.0, inplace=False)
        Array([2., 0., 1.], dtype=float32)
        """
        name = f"{self.__name__}.at"
        if inplace:
            raise RefusedError(f"{name}: arrays are immutable; pass inplace=False for a new one")
        if (self.nin, self.nout) != (1 if b is None else 2, 1):
            raise ArgumentError(f"{name}: {self.nin} operands are needed, and one result")
        check_arraylike(name, a, *(() if b is None else (b,)))
        a, indices = as_array(plain(a)), _index(indices)
        return self._at(a, indices) if b is None else self._at(a, indices, plain(b))

    def reduceat(
        self, a: Any, indices: Any, axis: int = 0, dtype: Any = None, out: None = None
    ) -> Any:
        """`reduce` over the parts of a dim that begin at `indices`; the last goes to the end.

        A part that would end where it begins or earlier is its first element.
        """
        name = self._binary("reduceat", a, indices)
        refuse_out(name, out)
        a, indices = as_array(plain(a)), as_array(plain(indices))
        if indices.ndim != 1 or not dtypes.is_integer(indices.dtype):
            raise ShapeError(f"{name}: indices must be a vector of integers, got {typeof(indices)}")
        if axis is None or isinstance(axis, (tuple, list)):
            raise ArgumentError(f"{name}: axis must be one integer, got {axis!r}")
        d = canonical_axis(axis, a.ndim, name)
        return self._reduceat(a, indices, axis=d, dtype=dtype)

    def outer(self, A: Any, B: Any, /) -> Any:
        """The function of all pairs: the result has shape `A.shape + B.shape`."""
        self._binary("outer", A, B)
        a, b = as_array(plain(A)), as_array(plain(B))
        return self(reshape(a, (*a.shape, *[1] * b.ndim)), b)


def frompyfunc(func: Method, /, nin: int, nout: int, *, identity: Any = None) -> ufunc:
    """Make a ufunc of a function of scalars that spmd can trace.

    `func` takes `nin` scalars and returns `nout` results. The arguments of the ufunc broadcast to
    one shape, which the results have; they have the dtypes that `func` gives. `identity` is the
    operand that changes nothing, with which `reduce` begins; without one it begins with the first
    element.

    >>> hypotenuse = frompyfunc(lambda x, y: (x * x + y * y) ** 0.5, 2, 1, identity=0)
    >>> hypotenuse.reduce(np.array([2.0, 3.0, 6.0]))
    Array(7., dtype=float32)
    """
    return ufunc(func, nin, nout, identity=identity)


# ---- methods for any function, one element after the other --------------------------------------


def _index(indices: Any) -> Any:
    """Lists, which NumPy takes for arrays of positions, as such arrays."""
    if isinstance(indices, list):
        return np.asarray(indices)
    return indices


def _result_dtype(f: ufunc, dtype: Any, *operands: Any) -> np.dtype:
    """The dtype asked for, or that of the function's result for such elements."""
    if dtype is not None:
        return dtypes.canonical(dtype)
    scalars = [ShapedArray((), typeof(x).dtype) for x in operands]
    return eval_shape(f._func, *scalars).dtype


def _fold(
    f: ufunc, a: Any, *, axis: Any, dtype: Any, keepdims: bool, initial: Any, where: Any
) -> Any:
    """Reduce by calling the ufunc in a loop, for ufuncs without a reduction of their own."""
    a = as_array(a)
    shape, found = a.shape, _result_dtype(f, dtype, a, a)
    dims = canonical_axes(axis, a.ndim, f"{f.__name__}.reduce")
    mask = None if where is None else broadcast_to(where, shape)
    # The reduced dims as one in front, in their order.
    a, mask = (None if x is None else _in_front(x, dims) for x in (a, mask))
    a = lax.convert_element_type(a, found)
    count, rest = typeof(a).shape[0], typeof(a).shape[1:]
    start = f.identity if initial is None else initial
    if start is None and not count:
        raise ShapeError(f"{f.__name__}.reduce: no elements along {axis=}, and no identity")
    if start is None:
        total, first = lax.index_in_dim(a, 0, 0, keepdims=False), 1
    else:
        total, first = broadcast_to(lax.convert_element_type(start, found), rest), 0

    if not count:
        return keep_dims(total, shape, dims) if keepdims else total

    def step(k: Any, total: Any) -> Any:
        item = lax.dynamic_index_in_dim(a, k, 0, keepdims=False)
        combined = lax.convert_element_type(f._call(total, item), found)
        if mask is None:
            return combined
        return lax.select(lax.dynamic_index_in_dim(mask, k, 0, keepdims=False), combined, total)

    result = lax.fori_loop(first, count, step, total)
    return keep_dims(result, shape, dims) if keepdims else result


def _in_front(x: Any, dims: tuple[int, ...]) -> Any:
    moved = moveaxis(x, dims, tuple(range(len(dims))))
    shape = typeof(moved).shape
    return lax.reshape(moved, (math.prod(shape[: len(dims)]), *shape[len(dims) :]))


def _running_fold(f: ufunc, a: Any, *, axis: int, dtype: Any) -> Any:
    found = _result_dtype(f, dtype, a, a)
    items = moveaxis(lax.convert_element_type(a, found), axis, 0)
    count = typeof(items).shape[0]
    if not count:
        return lax.convert_element_type(a, found)
    first = lax.slice_in_dim(items, 0, 1)

    def step(total: Any, item: Any) -> Any:
        total = lax.convert_element_type(f._call(total, item), found)
        return total, total

    start = lax.index_in_dim(items, 0, 0, keepdims=False)
    rest = lax.scan(step, start, lax.slice_in_dim(items, 1, count))[1]
    return moveaxis(lax.concatenate([first, rest], 0), 0, axis)


def _update_in_turn(f: ufunc, a: Any, indices: Any, *operand: Any) -> Any:
    found = _result_dtype(f, None, a, *operand)
    # The positions in the flat array that an index of any kind means; `a.size` is outside.
    numbers = lax.reshape(lax.iota(dtypes.int32, a.size), a.shape)
    places = indexing.getitem(numbers, indices, mode="fill", fill_value=a.size)
    items = tuple(
        ravel(broadcast_to(lax.convert_element_type(x, found), typeof(places).shape))
        for x in operand
    )

    def step(flat: Any, given: Any) -> Any:
        place, rest = given
        old = lax.dynamic_index_in_dim(flat, place, 0, keepdims=False)
        new = lax.convert_element_type(f._call(old, *rest), found)
        inside = lax.lt(place, np.int32(a.size))
        new = lax.reshape(lax.select(inside, new, old), (1,))
        return lax.dynamic_update_slice(flat, new, (place,)), None

    flat = ravel(lax.convert_element_type(a, found))
    if not a.size:
        return lax.convert_element_type(a, found)
    return lax.reshape(lax.scan(step, flat, (ravel(places), items))[0], a.shape)


def _fold_parts(f: ufunc, a: Any, indices: Any, *, axis: int, dtype: Any) -> Any:
    found = typeof(a).dtype if dtype is None else dtypes.canonical(dtype)
    a = moveaxis(lax.convert_element_type(a, found), axis, 0)
    count, rest = typeof(a).shape[0], typeof(a).shape[1:]
    parts = typeof(indices).shape[0]
    starts = lax.convert_element_type(indices, dtypes.int32)
    ends = lax.concatenate(
        [lax.slice_in_dim(starts, min(1, parts), parts), np.array([count], np.int32)], 0
    )
    whole = (parts, *rest)

    def step(k: Any, total: Any) -> Any:
        item = lax.dynamic_index_in_dim(a, k, 0, keepdims=False)
        spread = lax.broadcast_in_dim(item, whole, range(1, len(whole)))
        combined = lax.convert_element_type(f._call(total, spread), found)
        inside = lax.bitwise_and(lax.gt(k, starts), lax.lt(k, ends))
        return lax.select(lax.broadcast_in_dim(inside, whole, (0,)), combined, total)

    first = indexing.getitem(a, starts)
    return moveaxis(lax.fori_loop(0, count, step, first), 0, axis)


# ---- methods that have an operation of their own ------------------------------------------------


def _with_dtype(reduce: Method) -> Method:
    """A reduction of `reductions.py` that has no dtype of its own: the operand is converted."""

    def method(a: Any, *, dtype: Any, **how: Any) -> Any:
        a = a if dtype is None else lax.convert_element_type(a, dtypes.canonical(dtype))
        return reduce(a, **how)

    return method


def _bits(reduce: Method, combine: Method, identity: int, prepare: Method | None = None) -> Method:
    """A reduction of integers or, after `prepare`, of truth values."""

    def method(a: Any, *, axis: Any, dtype: Any, keepdims: bool, initial: Any, where: Any) -> Any:
        a = a if dtype is None else lax.convert_element_type(a, dtypes.canonical(dtype))
        a = as_array(a if prepare is None else prepare(a))
        found = typeof(a).dtype
        if not dtypes.is_integer(found) and not dtypes.is_bool(found):
            raise DtypeError(f"{combine.__name__}.reduce: integers are needed, got {found}")
        if where is not None:
            a = select(where, a, np.array(identity).astype(found))
        dims = canonical_axes(axis, typeof(a).ndim, f"{combine.__name__}.reduce")
        result = reduce(a, dims)
        result = keep_dims(result, typeof(a).shape, dims) if keepdims else result
        if initial is None:
            return result
        initial = initial if prepare is None else prepare(initial)
        return combine(lax.convert_element_type(initial, found), result)

    return method


def _log_sums(combine: Method, base: float) -> Method:
    """The logarithm of a sum of powers, relative to the largest of them."""

    def method(a: Any, *, axis: Any, dtype: Any, keepdims: bool, initial: Any, where: Any) -> Any:
        (a,) = promote_dtypes_inexact(a if dtype is None else lax.convert_element_type(a, dtype))
        a = as_array(a)
        factor = np.array(np.log(base), a.dtype)
        largest = reductions.max(a, axis, keepdims=True, initial=-np.inf, where=where)
        largest = lax.stop_gradient(largest)
        largest = select(lax.is_finite(largest), largest, np.array(0, a.dtype))
        gaps = lax.sub(a, broadcast_to(largest, a.shape))
        total = reductions.sum(lax.exp(lax.mul(gaps, factor)), axis, keepdims=True, where=where)
        result = lax.add(lax.div(lax.log(total), factor), largest)
        if not keepdims:
            result = lax.squeeze(result, canonical_axes(axis, a.ndim, "logaddexp.reduce"))
        return result if initial is None else combine(initial, result)

    return method


def _by_update(name: str) -> Method:
    """`a.at[indices].add(b)` and its like; bools count as 0 and 1 meanwhile."""

    def method(a: Any, indices: Any, b: Any) -> Any:
        if not dtypes.is_bool(typeof(a).dtype):
            return getattr(indexing.IndexUpdateHelper(a)[indices], name)(b)
        b = lax.convert_element_type(logic.as_bool(b), dtypes.int32)
        counts = lax.convert_element_type(a, dtypes.int32)
        updated = getattr(indexing.IndexUpdateHelper(counts)[indices], name)(b)
        return lax.convert_element_type(updated, dtypes.bool_)

    return method


def _running(cumulate: Method) -> Method:
    def method(a: Any, *, axis: int, dtype: Any) -> Any:
        return cumulate(a if dtype is None else lax.convert_element_type(a, dtype), axis)

    return method


# ---- the ufuncs --------------------------------------------------------------------------------


if TYPE_CHECKING:

    class BinaryUfunc(ufunc):
        """A ufunc of two arrays with one result."""

        def __call__(  # type: ignore[override]
            self, x: ArrayLike, y: ArrayLike, /, *, out: None = None, where: None = None
        ) -> Array: ...


def _ufunc(func: Method, identity: Any = None, **methods: Any) -> BinaryUfunc:
    made = ufunc(func, 2, 1, call=func, identity=identity, **methods)
    made.__module__ = "spmd.numpy"
    return cast("BinaryUfunc", made)


_and = _bits(lax.reduce_and, logic.bitwise_and, -1)
_or = _bits(lax.reduce_or, logic.bitwise_or, 0)
_xor = _bits(lax.reduce_xor, logic.bitwise_xor, 0)

add = _ufunc(
    ufuncs.add, 0, reduce=reductions.sum, accumulate=reductions.cumsum, at=_by_update("add")
)
subtract = _ufunc(ufuncs.subtract, at=_by_update("subtract"))
multiply = _ufunc(
    ufuncs.multiply,
    1,
    reduce=reductions.prod,
    accumulate=reductions.cumprod,
    at=_by_update("multiply"),
)
maximum = _ufunc(
    ufuncs.maximum, reduce=_with_dtype(reductions.max), accumulate=_running(lax.cummax)
)
minimum = _ufunc(
    ufuncs.minimum, reduce=_with_dtype(reductions.min), accumulate=_running(lax.cummin)
)
bitwise_and = _ufunc(logic.bitwise_and, -1, reduce=_and)
bitwise_or = _ufunc(logic.bitwise_or, 0, reduce=_or)
bitwise_xor = _ufunc(logic.bitwise_xor, 0, reduce=_xor)
logical_and = _ufunc(
    logic.logical_and, True, reduce=_bits(lax.reduce_and, logic.logical_and, 1, logic.as_bool)
)
logical_or = _ufunc(
    logic.logical_or, False, reduce=_bits(lax.reduce_or, logic.logical_or, 0, logic.as_bool)
)
logical_xor = _ufunc(
    logic.logical_xor, False, reduce=_bits(lax.reduce_xor, logic.logical_xor, 0, logic.as_bool)
)
logaddexp = _ufunc(floats.logaddexp, -np.inf, reduce=_log_sums(floats.logaddexp, np.e))
logaddexp2 = _ufunc(floats.logaddexp2, -np.inf, reduce=_log_sums(floats.logaddexp2, 2.0))
