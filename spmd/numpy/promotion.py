"""Promotion: operands of different dtypes and shapes made ready for one `lax` operation.

The one idea: promotion happens here, once, so that the primitives can demand operands of one dtype
and of one shape (or rank 0). Python numbers never cost an equation: they become literals of the
common dtype, and scalars stay rank 0.
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.base.config import config
from spmd.base.errors import (
    ArgumentError,
    DtypeArgumentError,
    RefusedError,
    ShapeError,
    SpmdError,
)
from spmd.base.key_dtypes import visible
from spmd.base.source import current_source
from spmd.core.aval import ShapedArray, is_arraylike, typeof
from spmd.core.jvp import JVPTracer
from spmd.core.stage import JaxprTracer
from spmd.core.trace import Tracer
from spmd.core.vmap import BatchTracer
from spmd.sharding.array import Array, array_of

F = TypeVar("F", bound=Callable[..., Any])

PYTHON_SCALARS = (bool, int, float, complex)
_PYTHON_KIND: dict[str, type] = {"b": bool, "i": int, "u": int, "f": float, "c": complex}


# ---- what may be an operand --------------------------------------------------------------------


def check_arraylike(name: str, *args: Any) -> None:
    """Raise an ArgumentError that names the function and the first argument that is no array."""
    for position, x in enumerate(args):
        if not is_arraylike(x) and not hasattr(x, "__jax_array__"):
            raise ArgumentError(
                f"{name} requires ndarray or scalar arguments, got {type(x)} at position "
                f"{position}.{_advice(x)}"
            )


def check_arraylike_or_none(name: str, *args: Any) -> None:
    """Like `check_arraylike`, for functions some of whose arguments may be left out."""
    check_arraylike(name, *(0 if x is None else x for x in args))


def _advice(x: Any) -> str:
    if isinstance(x, (list, tuple)):
        return f" Convert the {type(x).__name__} first: asarray(...)"
    return ""


def whole_number(name: str, argument: str, value: Any) -> int:
    """An argument that must be an integer, such as a size; the error names it."""
    try:
        return operator.index(value)
    except SpmdError:  # a traced value, whose own error says more
        raise
    except TypeError:
        raise ArgumentError(
            f"{current_source()}: {name}: {argument}={value!r} must be an integer, got "
            f"{type(value).__name__}"
        ) from None


def plain(x: Any) -> Any:
    """`x` itself, or the array that an object with `__spmd_array__` or `__jax_array__` is for."""
    convert = getattr(x, "__spmd_array__", None) or getattr(x, "__jax_array__", None)
    return x if convert is None else convert()


def refuse_out(name: str, out: Any) -> None:
    """Arrays are immutable, so there is nothing to write to."""
    if out is not None:
        raise RefusedError(f"{name}: out= is not supported, as arrays are immutable")


def operand(name: str, x: Any, out: Any = None) -> Any:
    """The array that an argument of the function `name` stands for, checked to be one.

    `out` is the function's argument of that name, if it has one.
    """
    if out is not None:
        refuse_out(name, out)
    if type(x) in _PLAIN_TYPES:
        return x
    check_arraylike(name, x)
    return plain(x)


# ---- dtypes ------------------------------------------------------------------------------------


def lattice_type(*xs: Any) -> tuple[np.dtype, bool]:
    """The common (dtype, weak) of operands, dtypes among them counting as strong."""
    pairs = []
    for x in xs:
        if is_arraylike(x):
            aval = typeof(x)
            pairs.append((aval.dtype, aval.weak_type))
        else:
            # By identity: np.dtype("int64") == int.
            is_weak = any(x is kind for kind in (int, float, complex))
            # A container that has a dtype of its own counts as an array of it.
            own = None if isinstance(x, type) else getattr(x, "dtype", None)
            pairs.append((dtypes.canonical(x if own is None else own), is_weak))
    return dtypes.promote(tuple(pairs))


def result_type(*args: Any) -> np.dtype:
    """The dtype to which arrays, numbers and dtypes are promoted.

    Python numbers among the `args` are weak: they do not widen the dtype of an array of their kind.
    Shapes and values have no influence. Raises an `ArgumentError` if nothing is given.

    >>> snp.result_type(np.float16(1), 2.0), snp.result_type(np.int8, np.uint8)
    (dtype('float16'), dtype('int16'))
    """
    if not args:
        raise ArgumentError("result_type: give at least one array, number or dtype")
    return visible(lattice_type(*args)[0])


def user_dtype(dtype: Any, name: str) -> np.dtype:
    """A dtype that the user asked for by name, canonicalised; a warning tells if it was halved."""
    found = dtypes.canonical(dtype)
    wanted = dtypes.python_scalar_dtypes.get(dtype)
    if wanted is None and np.dtype(dtype).itemsize != found.itemsize:
        warnings.warn(
            f"{name}: dtype {np.dtype(dtype).name} was asked for, but arrays have at most 32 bits "
            f"(64 for complex) unless x64 is enabled, so it became {found.name}. Set "
            "SPMD_ENABLE_X64=1 or spmd.config.update('enable_x64', True) to have 64 bits.",
            stacklevel=3,
        )
    return found


def optional_dtype(dtype: Any, name: str) -> np.dtype | None:
    """`user_dtype` for an argument that may be left out."""
    return None if dtype is None else user_dtype(dtype, name)


def default_float() -> np.dtype:
    """float32, or float64 if x64 is on."""
    return dtypes.canonical(np.float64)


def default_int() -> np.dtype:
    """int32, or int64 if x64 is on."""
    return dtypes.canonical(np.int64)


def convert(x: Any, dtype: np.dtype, weak: bool = False) -> Any:
    """`x` with the given dtype; Python and NumPy values are converted without an equation."""
    kind = type(x)
    if kind in PYTHON_SCALARS:
        if weak and dtypes.canonical(_PYTHON_KIND.get(dtype.kind, float)) == dtype:
            return _PYTHON_KIND[dtype.kind](x)
        return dtypes.number(x, dtype)
    aval = typeof(x)
    if aval.dtype == dtype and (aval.weak_type or not weak):
        return x
    if isinstance(x, (np.ndarray, np.generic)) and not weak and _widens(aval.dtype, dtype):
        return np.asarray(x, dtype)
    if weak:
        return lax.convert_element_type(x, dtype, weak_type=True)
    return lax.convert_element_type(x, dtype)


def _widens(old: np.dtype, new: np.dtype) -> bool:
    """Whether NumPy's conversion is surely ours: it is not for float to int, or complex to real."""
    return "biufc".find(old.kind) <= "biufc".find(new.kind) and old.kind in "biufc"


def promote_dtypes(*xs: Any) -> list[Any]:
    """The operands, converted to their common dtype.

    A weak operand that already has the dtype stays as it is: the result of an operation is weak
    only if all operands are.
    """
    if len(xs) < 2:
        return list(xs)
    dtype, weak = lattice_type(*xs)
    return [convert(x, dtype, weak) for x in xs]


def promote_dtypes_inexact(*xs: Any) -> list[Any]:
    """Like `promote_dtypes`, integers and bools becoming floats: what `sin` or `/` needs."""
    dtype, weak = lattice_type(*xs)
    return [convert(x, dtypes.to_inexact(dtype), weak) for x in xs]


def promote_dtypes_numeric(*xs: Any) -> list[Any]:
    """Like `promote_dtypes`, bools becoming integers."""
    dtype, weak = lattice_type(*xs)
    if dtypes.is_bool(dtype):
        dtype = np.dtype(np.int32)
    return [convert(x, dtype, weak) for x in xs]


def promote_dtypes_complex(*xs: Any) -> list[Any]:
    """Like `promote_dtypes`, real numbers becoming complex."""
    dtype, weak = lattice_type(*xs)
    if not dtypes.is_complex(dtype):
        dtype = dtypes.complex_of(dtypes.to_inexact(dtype))
    return [convert(x, dtype, weak) for x in xs]


def check_real(name: str, *xs: Any) -> None:
    """Raise a DtypeError, also a ValueError, for complex operands of a function of reals."""
    for position, x in enumerate(xs):
        dtype = typeof(x).dtype
        if dtypes.is_complex(dtype):
            raise DtypeArgumentError(
                f"{name} does not support complex input, got {dtype} at position {position}; "
                "take .real, .imag or abs first"
            )


# ---- shapes ------------------------------------------------------------------------------------


def broadcast_shapes(*shapes: Sequence[int] | int) -> tuple[int, ...]:
    """The shape to which arrays of the given `shapes` broadcast, whatever their dtypes are.

    Raises a `ShapeError` if the shapes do not fit.

    >>> snp.broadcast_shapes((2, 1), (3,))
    (2, 3)
    """
    whole = [(s,) if isinstance(s, (int, np.integer)) else tuple(s) for s in shapes]
    return broadcast_shapes_of("broadcast_shapes", whole)


def broadcast_shapes_of(name: str, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """`broadcast_shapes` on behalf of the function `name`."""
    ndim = max((len(s) for s in shapes), default=0)
    result = [1] * ndim
    for d in range(-1, -ndim - 1, -1):
        sizes = {s[d] for s in shapes if len(s) >= -d} - {1}
        if len(sizes) > 1:
            raise ShapeError(_mismatch(name, shapes, d, ndim))
        if sizes:
            result[d] = sizes.pop()
    return tuple(result)


def _mismatch(name: str, shapes: Sequence[tuple[int, ...]], d: int, ndim: int) -> str:
    sizes = [s[d] for s in shapes if len(s) >= -d]
    seen = " and ".join(str(n) for n in dict.fromkeys(sizes) if n != 1)
    return (
        f"{name} got incompatible shapes for broadcasting: {', '.join(map(str, shapes))}. "
        f"Counted from the right, dim {d} has sizes {seen}: they must be equal, or 1.\n"
        f"At {current_source()}. Insert a dim of size 1 with x[:, None] or reshape where the "
        f"shapes shall align differently."
    )


def _check_ranks(name: str, shapes: Sequence[tuple[int, ...]]) -> None:
    """Warn of operands of different ranks, or raise, where numpy_rank_promotion says so."""
    if config.numpy_rank_promotion == "allow" or len({len(s) for s in shapes if s}) < 2:
        return
    text = (
        f"{current_source()}: {name}: operands of shapes {', '.join(map(str, shapes))} differ in "
        "rank; numpy_rank_promotion is set to find this. Insert dims of size 1, as in x[None, :]"
    )
    if config.numpy_rank_promotion == "raise":
        raise ShapeError(text)
    warnings.warn(text, stacklevel=2)


def promote_shapes(name: str, *xs: Any) -> list[Any]:
    """The operands broadcast to their common shape; scalars stay scalars."""
    if config.numpy_rank_promotion != "allow":
        _check_ranks(name, [typeof(x).shape for x in xs])
    return broadcast_operands(name, *xs)


def broadcast_operands(name: str, *xs: Any) -> list[Any]:
    """`promote_shapes` for functions that take operands of any ranks."""
    shapes = [typeof(x).shape for x in xs]
    first = next((s for s in shapes if s), ())
    if all(s == first or not s for s in shapes):
        return list(xs)
    shape = broadcast_shapes_of(name, shapes)
    return [x if not s else broadcast_to(x, shape) for x, s in zip(xs, shapes, strict=True)]


def promotes_inside(count: int = 1) -> Callable[[F], F]:
    """A decorator for functions that combine operands of their own with the caller's arrays.

    The settings `numpy_rank_promotion` and `numpy_dtype_promotion` are there to find promotions in
    the caller's program: they see the first `count` parameters, however these are given, but
    nothing that is computed inside.
    """

    def decorate(f: F) -> F:
        names = f.__code__.co_varnames[:count]

        @functools.wraps(f)
        def call(*args: Any, **kwargs: Any) -> Any:
            if config.numpy_dtype_promotion != "strict" and config.numpy_rank_promotion == "allow":
                return f(*args, **kwargs)
            given = [*args[:count], *(kwargs[name] for name in names if name in kwargs)]
            promote_dtypes(*(plain(x) for x in given if is_arraylike(x)))
            ranks = config.override("numpy_rank_promotion", "allow")
            with ranks, config.override("numpy_dtype_promotion", "standard"):
                return f(*args, **kwargs)

        return cast(F, call)

    return decorate


def broadcast_to(x: Any, shape: tuple[int, ...]) -> Any:
    """`x` stretched to a shape known to fit, aligned on the right."""
    ndim = typeof(x).ndim
    return lax.broadcast_in_dim(x, shape, range(len(shape) - ndim, len(shape)))


# Types that certainly have no `__spmd_array__`: asking them takes longer than all the rest.
_PLAIN_TYPES = frozenset((Array, np.ndarray, JaxprTracer, JVPTracer, BatchTracer, *PYTHON_SCALARS))


def operands_of(name: str, xs: Sequence[Any]) -> tuple[list[Any], list[ShapedArray]]:
    """The operands and their avals; an error names the function and the one that is no array."""
    operands = [x if type(x) in _PLAIN_TYPES else plain(x) for x in xs]
    try:
        return operands, [typeof(x) for x in operands]
    except ArgumentError:
        check_arraylike(name, *xs)
        raise


@functools.lru_cache(maxsize=4096)
def _plan(
    avals: tuple[ShapedArray, ...], adapt: Callable[[np.dtype], np.dtype], x64: bool
) -> tuple[np.dtype, bool, tuple[bool, ...], bool]:
    """How operands of these types are promoted, which is worked out once.

    Their common dtype, changed by `adapt`, and whether it is weak; which operands have it already;
    whether all that are not rank 0 have one shape.
    """
    dtype, weak = dtypes.promote(tuple([(a.dtype, a.weak_type) for a in avals]))
    dtype = adapt(dtype)
    fits = [a.dtype == dtype and a.weak_type == weak for a in avals]
    return dtype, weak, tuple(fits), len({a.shape for a in avals if a.shape}) < 2


def _promoted(name: str, adapt: Callable[[np.dtype], np.dtype], xs: Sequence[Any]) -> list[Any]:
    """Operands brought to one dtype and, those that are not rank 0, to one shape."""
    operands, avals = operands_of(name, xs)
    if config.numpy_dtype_promotion == "strict":
        dtypes.promote(tuple([(a.dtype, a.weak_type) for a in avals]))
    dtype, weak, fits, one_shape = _plan(tuple(avals), adapt, config.enable_x64)
    if False in fits:
        pairs = zip(operands, fits, strict=True)
        operands = [x if fit else convert(x, dtype, weak) for x, fit in pairs]
    if one_shape:
        return operands
    shapes = [a.shape for a in avals]
    _check_ranks(name, shapes)
    shape = broadcast_shapes_of(name, shapes)
    return [broadcast_to(x, shape) if s else x for x, s in zip(operands, shapes, strict=True)]


def _same(dtype: np.dtype) -> np.dtype:
    return dtype


def _numeric(dtype: np.dtype) -> np.dtype:
    return dtypes.int32 if dtypes.is_bool(dtype) else dtype


def promote_args(name: str, *xs: Any) -> list[Any]:
    """Operands checked, of one dtype, and of one shape or rank 0."""
    return _promoted(name, _same, xs)


def promote_args_inexact(name: str, *xs: Any) -> list[Any]:
    """`promote_args` for functions with floating or complex results."""
    return _promoted(name, dtypes.to_inexact, xs)


def promote_args_numeric(name: str, *xs: Any) -> list[Any]:
    """`promote_args` for functions that turn bools into integers."""
    return _promoted(name, _numeric, xs)


# ---- constants and choices that other files need ------------------------------------------------


def as_array(x: Any) -> Any:
    """`x` as an array or tracer; numbers and NumPy arrays become concrete arrays, traced or not."""
    x = plain(x)
    return x if isinstance(x, (Tracer, Array)) else array_of(x)


def constant_like(x: Any, value: Any) -> Any:
    """A rank-0 constant of the dtype (and weakness) of `x`."""
    aval = typeof(x)
    return convert(value, aval.dtype, aval.weak_type)


def strong_constant(x: Any, value: Any) -> np.ndarray:
    """A rank-0 constant of the dtype of `x` that makes results strongly typed."""
    return np.array(value, typeof(x).dtype)


def filled_like(x: Any, value: Any, dtype: Any = None) -> Any:
    """An array of the shape of `x` with one value in it."""
    return as_array(lax.full_like(x, value, dtype))


def select(condition: Any, x: Any, y: Any) -> Any:
    """`x` where the condition holds and `y` elsewhere; all three promoted and broadcast.

    As in JAX, operands of different ranks are not what `numpy_rank_promotion` is set to find.
    """
    x, y = promote_dtypes(x, y)
    condition, x, y = broadcast_operands("where", condition, x, y)
    return lax.select(condition, x, y)
