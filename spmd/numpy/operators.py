"""Operators, properties and methods of arrays and tracers, in tables.

The classes themselves know no operation; `install(cls)` gives them `x + y`, `x.T`, `x.sum()`,
`x[i]` and `x.at[i]`. A method is the function of `spmd.numpy` that has the array as its first
parameter, so both have one docstring and one meaning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, KeyOperationError, RefusedError, ShapeError
from spmd.base.source import current_source
from spmd.compile.dispatch.eager_cache import cached_binary, cached_index, cached_unary
from spmd.core.aval import is_arraylike, typeof
from spmd.numpy import (
    creation,
    floats,
    joining,
    logic,
    manipulation,
    products,
    reductions,
    repeating,
    searching,
    selection,
    sorting,
    standard,
    statistics,
    ufuncs,
)
from spmd.numpy.indexing import IndexUpdateHelper, getitem
from spmd.numpy.promotion import user_dtype
from spmd.numpy.taking import take
from spmd.sharding.array import Array

# ---- operators ---------------------------------------------------------------------------------

_ARITHMETIC: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "add": ("+", ufuncs.add),
    "sub": ("-", ufuncs.subtract),
    "mul": ("*", ufuncs.multiply),
    "truediv": ("/", ufuncs.divide),
    "floordiv": ("//", ufuncs.floor_divide),
    "mod": ("%", ufuncs.remainder),
    "divmod": ("divmod()", ufuncs.divmod),
    "pow": ("**", ufuncs.power),
    # The function beneath: an operator has no `out_sharding`.
    "matmul": ("@", vars(products.matmul)["__wrapped__"]),
    "and": ("&", logic.bitwise_and),
    "or": ("|", logic.bitwise_or),
    "xor": ("^", logic.bitwise_xor),
    "lshift": ("<<", logic.left_shift),
    "rshift": (">>", logic.right_shift),
}

_COMPARISON: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "eq": ("==", logic.equal),
    "ne": ("!=", logic.not_equal),
    "lt": ("<", logic.less),
    "le": ("<=", logic.less_equal),
    "gt": (">", logic.greater),
    "ge": (">=", logic.greater_equal),
}

_UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": ufuncs.negative,
    "pos": ufuncs.positive,
    "abs": ufuncs.absolute,
    "invert": logic.bitwise_not,
}


def _refuses(symbol: str, x: Any, y: Any) -> bool:
    """Whether Python shall ask `y`, which is no array; containers are an error at once.

    A list would otherwise be silently unequal to every array, or repeated by `*`.
    """
    if isinstance(y, (list, tuple, dict, set)):
        raise ArgumentError(
            f"unsupported operand type(s) for {symbol}: {type(x).__name__!r} and "
            f"{type(y).__name__!r}; convert it to an array first: asarray(...)"
        )
    return True


def _forward(symbol: str, f: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if not is_arraylike(other) and _refuses(symbol, self, other):
            convert = getattr(other, "__jax_array__", None)
            return NotImplemented if convert is None else f(self, convert())
        return f(self, other)

    return method


def _reflected(symbol: str, f: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if not is_arraylike(other) and _refuses(symbol, self, other):
            convert = getattr(other, "__jax_array__", None)
            return NotImplemented if convert is None else f(convert(), self)
        return f(other, self)

    return method


def _operators() -> dict[str, Callable[..., Any]]:
    table: dict[str, Callable[..., Any]] = {}
    for name, (symbol, f) in _ARITHMETIC.items():
        table[f"__{name}__"] = _forward(symbol, f)
        table[f"__r{name}__"] = _reflected(symbol, f)
    for name, (symbol, f) in _COMPARISON.items():
        table[f"__{name}__"] = _forward(symbol, f)
    for name, f in _UNARY.items():
        # A Python function, not the ufunc itself, so that `self` is bound whatever `f` is.
        table[f"__{name}__"] = lambda self, f=f: f(self)
    return table


# Their meaning depends on the value of a Python number.
_NEVER_HOT = frozenset(("__pow__", "__rpow__", "__divmod__", "__rdivmod__"))


def _cached_operator(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """An operator of concrete arrays, compiled when it is used again and again."""
    if name in _NEVER_HOT:
        return method
    if name[2:-2] in _UNARY:
        return cached_unary(method)
    return cached_binary(method)


def _getitem(self: Any, index: Any) -> Any:
    """`x[i]` of a concrete array: an integer is an operand, so that a loop compiles once.

    A slice that comes again and again, with the same bounds, is a program of its own.
    """
    if type(index) is not int:
        return _part(self, index)
    shape = self.aval.shape
    if shape and -shape[0] <= index < shape[0]:
        return _element(self, index)
    return getitem(self, index)


# ---- special methods ---------------------------------------------------------------------------


def _round(self: Any, ndigits: int | None = None) -> Any:
    # As for Python's floats: without a number of digits, the result is an integer.
    rounded = floats.round(self, ndigits or 0)
    return creation.astype(rounded, int) if ndigits is None else rounded


def _contains(self: Any, item: Any) -> Any:
    if typeof(self).ndim != 1 or not is_arraylike(item) or typeof(item).ndim:
        raise ArgumentError("`x in array` needs an array of one dim and a scalar x")
    return reductions.any(logic.equal(self, item))


def _iter(self: Any) -> Iterator[Any]:
    if not typeof(self).ndim:
        raise TypeError("iteration over an array without dimensions")
    return (getitem(self, k) for k in range(typeof(self).shape[0]))


# ---- methods that are no functions of spmd.numpy -----------------------------------------------


def _reshape(self: Any, *args: Any, order: str = "C", out_sharding: Any = None) -> Any:
    """Give the elements another shape: `x.reshape(2, 3)` or `x.reshape((2, 3))`."""
    shape = args[0] if len(args) == 1 else args
    return manipulation.reshape(self, shape, order, out_sharding=out_sharding)


def _transpose(self: Any, *args: Any) -> Any:
    """Reorder dims: `x.transpose()`, `x.transpose(1, 0)` or `x.transpose((1, 0))`."""
    axes: Any = args or None
    if len(args) == 1 and (args[0] is None or np.iterable(args[0])):
        axes = args[0]
    return manipulation.transpose(self, axes)


def _flatten(self: Any, order: str = "C", *, out_sharding: Any = None) -> Any:
    """All elements in one dim."""
    return manipulation.ravel(self, order, out_sharding=out_sharding)


def _compress(
    self: Any,
    condition: Any,
    axis: int | None = None,
    *,
    out: None = None,
    size: int | None = None,
    fill_value: Any = 0,
) -> Any:
    """The slices along `axis` where the condition holds."""
    return searching.compress(condition, self, axis, size=size, fill_value=fill_value, out=out)


def _to_device(self: Any, device: Any, *, stream: None = None) -> Any:
    """The array on another device or with another sharding; there are no streams to choose from."""
    if stream is not None:
        raise ArgumentError(
            f"to_device: stream={stream!r} must be None, devices here have no streams"
        )
    return creation.placed(self, device)


def _view(self: Any, dtype: Any = None, type: None = None) -> Any:
    """The same bits read as another dtype; the last dim grows or shrinks accordingly.

    Booleans count as bytes, and a complex number as its real and imaginary part.
    """
    if type is not None:
        raise ArgumentError(
            f"{current_source()}: view: type={type!r} must be None: arrays have one class; "
            "dtype= says how to read the bits"
        )
    if dtype is None:
        return self
    if isinstance(dtype, (int, tuple)):
        raise ArgumentError(
            f"{current_source()}: view: {dtype!r} is no dtype; x.view(dtype) reads the same bits "
            f"as another dtype, and x.reshape({dtype!r}) gives another shape"
        )
    found = user_dtype(dtype, "view")
    old, new = 8 * self.dtype.itemsize, 8 * found.itemsize
    if not self.ndim:
        if old != new:
            raise ShapeError(
                f"view: one {self.dtype} is read as one {found} only if both have as many bits, "
                f"and they have {old} and {new}; give it a dim first: x[None]"
            )
        return _reshape(_view(_reshape(self, 1), found), ())
    if self.shape[-1] * old % new:
        raise ShapeError(
            f"view: one {found} has {new} bits, and the last dim of shape {self.shape} has "
            f"{self.shape[-1]} * {old} = {self.shape[-1] * old}, which is no multiple"
        )
    if found == self.dtype:
        return self
    if self.dtype == np.bool_:
        return _view(_astype(self, np.uint8), found)
    if dtypes.is_complex(self.dtype):
        parts = joining.stack([ufuncs.real(self), ufuncs.imag(self)], axis=-1)
        return _view(_reshape(parts, *self.shape[:-1], self.shape[-1] * 2), found)
    if found == np.bool_:
        return _astype(_view(self, np.uint8), found)
    if dtypes.is_complex(found):
        parts = _view(self, dtypes.real_of(found))
        return lax.complex(parts[..., ::2], parts[..., 1::2])
    if old < new:
        rows = _reshape(self, *self.shape[:-1], self.shape[-1] * old // new, new // old)
        return lax.bitcast_convert_type(rows, found)
    out = lax.bitcast_convert_type(self, found)
    return _reshape(out, *self.shape[:-1], self.shape[-1] * old // new) if old > new else out


def _byteswap(self: Any) -> Any:
    """The same elements with their bytes in the opposite order; of a complex number each part's."""
    if dtypes.is_complex(self.dtype):
        return lax.complex(_byteswap(ufuncs.real(self)), _byteswap(ufuncs.imag(self)))
    if self.dtype.itemsize == 1:
        return creation.copy(self)
    parts = lax.bitcast_convert_type(self, np.dtype(np.uint8))
    return lax.bitcast_convert_type(lax.rev(parts, (self.ndim,)), self.dtype)


def _flat(self: Any) -> Any:
    """Refused: an iterator over the elements of an array that cannot be written to."""
    raise RefusedError("x.flat: arrays have no flat iterator; take x.flatten() or x.ravel()")


def _astype(self: Any, dtype: Any, copy: bool = False, device: Any = None) -> Any:
    """The values converted to a dtype."""
    return creation.astype(self, dtype, copy=copy, device=device)


def _put_at(self: Any) -> IndexUpdateHelper:
    """`x.at[i].set(v)`: a changed copy; also add, multiply, divide, power, min, max, apply, get."""
    return IndexUpdateHelper(self)


_element = cached_binary(getitem)
_part = cached_index(getitem)

_SPECIAL: dict[str, Callable[..., Any]] = {
    "__array_namespace__": standard.namespace_of,
    "__dlpack__": standard.to_dlpack,
    "__dlpack_device__": standard.dlpack_device,
    "__getitem__": getitem,
    "__round__": _round,
    "__contains__": _contains,
    "__iter__": _iter,
}

_PROPERTIES: dict[str, Callable[[Any], Any]] = {
    "T": manipulation.transpose,
    "mT": manipulation.matrix_transpose,
    "real": ufuncs.real,
    "imag": ufuncs.imag,
    "at": _put_at,
    "flat": _flat,
    "itemsize": lambda self: self.dtype.itemsize,
    "nbytes": lambda self: self.size * self.dtype.itemsize,
}

_METHODS: dict[str, Callable[..., Any]] = {
    "all": reductions.all,
    "any": reductions.any,
    "argmax": reductions.argmax,
    "argmin": reductions.argmin,
    "argpartition": sorting.argpartition,
    "argsort": sorting.argsort,
    "astype": _astype,
    "byteswap": _byteswap,
    "choose": selection.choose,
    "clip": selection.clip,
    "compress": _compress,
    "conj": ufuncs.conjugate,
    "conjugate": ufuncs.conjugate,
    "copy": creation.copy,
    "cumprod": reductions.cumprod,
    "cumsum": reductions.cumsum,
    "diagonal": searching.diagonal,
    "dot": products.dot,
    "flatten": _flatten,
    "max": reductions.max,
    "mean": statistics.mean,
    "min": reductions.min,
    "nonzero": searching.nonzero,
    "prod": reductions.prod,
    "ptp": reductions.ptp,
    "ravel": manipulation.ravel,
    "repeat": repeating.repeat,
    "reshape": _reshape,
    "round": floats.round,
    "searchsorted": sorting.searchsorted,
    "sort": sorting.sort,
    "squeeze": manipulation.squeeze,
    "std": statistics.std,
    "sum": reductions.sum,
    "swapaxes": manipulation.swapaxes,
    "take": take,
    "to_device": _to_device,
    "trace": products.trace,
    "transpose": _transpose,
    "var": statistics.var,
    "view": _view,
}


# Methods that arrays of keys don't have, though the functions of these names take keys.
_OF_NUMBERS = {"all", "any", "choose", "clip", "compress", "diagonal", "nonzero", "repeat", "round"}


def _of_numbers(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if dtypes.is_key(self.dtype):
            raise KeyOperationError(
                f"{current_source()}: an array of keys has no method {name}; "
                "random.key_data(keys) gives its words"
            )
        return method(self, *args, **kwargs)

    return checked


def install(cls: type) -> None:
    """Give a class of arrays all operators, properties and methods that it does not define."""

    operators = _operators()
    special = _SPECIAL
    if cls is Array:
        special = {**_SPECIAL, "__getitem__": _getitem}
        operators = {name: _cached_operator(name, method) for name, method in operators.items()}

    def define(name: str, value: Any) -> None:
        # Comparisons and `__getitem__` inherited from `object` or a base class are replaced.
        if name not in cls.__dict__:
            setattr(cls, name, value)

    if cls is Array:
        define("__cuda_array_interface__", property(standard.cuda_array_interface))
    for name, method in {**operators, **special}.items():
        method.__name__ = name if method.__name__ in ("method", "<lambda>") else method.__name__
        define(name, method)
    for name, f in _PROPERTIES.items():
        define(name, property(lambda self, f=f: f(self), doc=f.__doc__))
    for name, method in _METHODS.items():
        define(name, _of_numbers(name, method) if name in _OF_NUMBERS else method)


__all__ = ["install"]
# Used by tests: what every array class must have.
OPERATORS = tuple(_operators())
METHODS = tuple(_METHODS)
PROPERTIES = tuple(_PROPERTIES)
