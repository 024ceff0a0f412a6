"""dtypes: their names, their promotion, and the dtypes of Python scalars.

Promotion follows JAX's documented lattice. A bare Python number has a *weak* type: it takes
part in promotion as `int`, `float` or `complex` without a width and so never widens an array.

Typed PRNG keys are elements too (`base/key_dtypes.py`), so that every structural operation
(reshape, gather, concatenate, ...) moves them like any other element.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import ml_dtypes
import numpy as np

from spmd.base.config import config
from spmd.base.errors import (
    ArgumentError,
    DtypeError,
    IntegerRangeError,
    TypePromotionError,
)
from spmd.base.key_dtypes import is_key, key_name, prng_key
from spmd.base.key_dtypes import key_dtype as key_dtype

bfloat16 = np.dtype(ml_dtypes.bfloat16)
bool_ = np.dtype(np.bool_)
int32 = np.dtype(np.int32)
uint32 = np.dtype(np.uint32)
float32 = np.dtype(np.float32)

# The tangent dtype of integers and booleans: carries no information (and one byte a element, as
# NumPy's void types may have no size at all, which breaks indexing).
float0 = np.dtype([("float0", np.void, 0)])


def _small(names: str) -> tuple[np.dtype, ...]:
    """The small dtypes of these names that this version of ml_dtypes has."""
    found = (getattr(ml_dtypes, name, None) for name in names.split())
    return tuple(np.dtype(t) for t in found if t is not None)


# Small dtypes are for storage. Operations compute in a wider dtype and round the result.
SMALL_SIGNED = _small("int1 int2 int4")
SMALL_UNSIGNED = _small("uint1 uint2 uint4")
SMALL_FLOATING = _small(
    "float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 "
    "float8_e5m2fnuz float8_e8m0fnu float6_e2m3fn float6_e3m2fn float4_e2m1fn"
)
SMALL = frozenset((*SMALL_SIGNED, *SMALL_UNSIGNED, *SMALL_FLOATING))
_SMALL_INTEGER = frozenset((*SMALL_SIGNED, *SMALL_UNSIGNED))

SIGNED = (*(np.dtype(t) for t in (np.int8, np.int16, np.int32, np.int64)), *SMALL_SIGNED)
UNSIGNED = (*(np.dtype(t) for t in (np.uint8, np.uint16, np.uint32, np.uint64)), *SMALL_UNSIGNED)
FLOATING = (
    bfloat16,
    *(np.dtype(t) for t in (np.float16, np.float32, np.float64)),
    *SMALL_FLOATING,
)
COMPLEX = tuple(np.dtype(t) for t in (np.complex64, np.complex128))
BOOL = (bool_,)
INTEGER = SIGNED + UNSIGNED
INEXACT = FLOATING + COMPLEX
NUMERIC = INTEGER + INEXACT
ANY = BOOL + NUMERIC
ORDERED = BOOL + INTEGER + FLOATING

_KNOWN = frozenset((*ANY, float0))

_NARROW = {
    np.dtype(np.int64): np.dtype(np.int32),
    np.dtype(np.uint64): np.dtype(np.uint32),
    np.dtype(np.float64): np.dtype(np.float32),
    np.dtype(np.complex128): np.dtype(np.complex64),
}

_SHORT = {"bfloat": "bf", "uint": "u", "int": "i", "float": "f", "complex": "c"}

python_scalar_dtypes = {bool: bool_, int: np.dtype(np.int64), float: np.dtype(np.float64)}
python_scalar_dtypes[complex] = np.dtype(np.complex128)


@functools.lru_cache(maxsize=512)
def short_name(dtype: Any) -> str:
    """`f32` for float32, as jaxprs print it; of a scalar type, too."""
    dtype = np.dtype(dtype)
    if is_key(dtype):
        return key_name(dtype)
    name = long_name(dtype)
    kind = next((kind for kind in _SHORT if name.startswith(kind)), None)
    if kind is None or dtype == float0:
        return name
    return _SHORT[kind] + name.removeprefix(kind)


def long_name(dtype: np.dtype) -> str:
    """`float32`; `key<fry>` for typed keys."""
    if dtype.kind != "V":
        return dtype.name
    if is_key(dtype):
        return key_name(dtype)
    return "float0" if dtype == float0 else dtype.name  # bfloat16 is of kind "V" too


def canonical(dtype: Any) -> np.dtype:
    """The dtype that arrays of `dtype` have here: 64-bit ones are halved unless x64 is on."""
    try:
        return _canonical(dtype, config.enable_x64)
    except DtypeError:
        raise
    except TypeError:  # not hashable, so neither a dtype nor its name
        raise ArgumentError(
            f"dtype= takes a dtype, its name or a scalar type, got {type(dtype).__name__}; of an "
            "array, give x.dtype"
        ) from None


@functools.lru_cache(maxsize=512)
def _canonical(dtype: Any, x64: bool) -> np.dtype:
    try:
        d = python_scalar_dtypes.get(dtype) or np.dtype(dtype)
    except TypeError as error:
        raise DtypeError(f"{dtype!r} is not a dtype: {error}") from None
    d = d.newbyteorder("=") if d.byteorder == ">" else d
    if d not in _KNOWN and not is_key(d):
        raise DtypeError(
            f"dtype {d} is not supported; use bool, (u)int8-64, bfloat16, float16-64, "
            "complex64/128, or for storage (u)int1, (u)int2, (u)int4, float8_e4m3fn, ..."
        )
    return d if x64 else _NARROW.get(d, d)


def is_float0(dtype: np.dtype) -> bool:
    # Comparing structured dtypes takes longer than asking for the kind.
    return dtype.kind == "V" and dtype == float0


def is_float(dtype: np.dtype) -> bool:
    return dtype in _FLOATING_SET


def is_complex(dtype: np.dtype) -> bool:
    return dtype.kind == "c"


def is_inexact(dtype: np.dtype) -> bool:
    return dtype.kind == "c" or dtype in _FLOATING_SET


def is_integer(dtype: np.dtype) -> bool:
    return dtype.kind in "iu" or (dtype.kind == "V" and dtype in _SMALL_INTEGER)


def is_unsigned(dtype: np.dtype) -> bool:
    return dtype.kind == "u" or (dtype.kind == "V" and dtype in SMALL_UNSIGNED)


def is_small(dtype: np.dtype) -> bool:
    """Whether a dtype is for storage: one of `SMALL`."""
    return dtype.itemsize == 1 and dtype in SMALL


def wide_of(dtype: np.dtype) -> np.dtype:
    """The dtype in which operations on a small dtype are computed."""
    if dtype in SMALL_FLOATING:
        return float32
    return int32 if dtype in SMALL_SIGNED else uint32


def bits_of(dtype: np.dtype) -> int:
    """The number of bits that an element has; small ones are stored in a byte each."""
    if not is_small(dtype):
        return 8 * dtype.itemsize
    return (finfo if is_float(dtype) else iinfo)(dtype).bits


def is_bool(dtype: np.dtype) -> bool:
    return dtype.kind == "b"


_FLOATING_SET = frozenset(FLOATING)

# ---- abstract classes, as in issubdtype --------------------------------------------------------


extended = prng_key


def _class_of(dtype: np.dtype) -> type[np.generic]:
    """NumPy's abstract class of a dtype that it does not know."""
    if is_float(dtype):
        return np.floating
    return np.signedinteger if dtype in SMALL_SIGNED else np.unsignedinteger


# The scalar types of NumPy that are kinds of others.
_ABSTRACT = (
    np.generic, np.number, np.inexact, np.floating, np.complexfloating, np.integer,
    np.signedinteger, np.unsignedinteger, np.character, np.flexible,
)  # fmt: skip


def issubdtype(a: Any, b: Any) -> bool:
    """Like `numpy.issubdtype`, and it knows bfloat16 and typed keys."""
    if b is prng_key:
        return a is prng_key or is_key(a)
    if is_key(a):
        return a == b or b is np.generic
    if any(a is kind for kind in _ABSTRACT):  # these have no dtype
        return np.issubdtype(a, b)
    a_dtype = a if isinstance(a, type) and issubclass(a, np.generic) else np.dtype(a)
    if a_dtype == bfloat16 or np.dtype(a_dtype) in SMALL:
        of_numpy = _class_of(np.dtype(a_dtype))
        if isinstance(b, type) and issubclass(b, np.generic):
            return b is np.dtype(a_dtype).type or issubclass(of_numpy, b)
        return np.dtype(b) == a_dtype
    if isinstance(b, type) and issubclass(b, np.generic):
        return np.issubdtype(a_dtype, b)
    return np.issubdtype(a_dtype, b)


def _limited(x: Any, *numbers: type) -> np.dtype:
    """The dtype whose limits are asked for: `x`, or that of the array or Python number `x`."""
    if isinstance(x, (np.ndarray, np.generic)):
        return x.dtype
    return np.dtype(type(x) if isinstance(x, numbers) else x)


def finfo(dtype: Any) -> Any:
    """The limits of a floating dtype, as of `numpy.finfo`, for bfloat16 too.

    `dtype` is a dtype, its name, or a scalar type. The result is an object with `bits`, `eps`,
    `max`, `min`, `tiny` and others. Raises a `ValueError` if the dtype is not floating or complex.

    >>> snp.finfo(snp.bfloat16).bits
    16
    """
    return ml_dtypes.finfo(_limited(dtype))


def iinfo(int_type: Any) -> Any:
    """The limits of an integer dtype, as of `numpy.iinfo`.

    `int_type` is a dtype, its name, or a scalar type. The result is an object with `bits`, `max`
    and `min`. Raises a `ValueError` if the dtype is no integer dtype.

    >>> snp.iinfo(snp.int8).max
    127
    """
    dtype: Any = _limited(int_type, int)
    return ml_dtypes.iinfo(dtype) if dtype in SMALL else np.iinfo(dtype)


def max_value(dtype: np.dtype) -> Any:
    """The largest value of an ordered dtype (infinity for floats): the identity of `min`."""
    if is_bool(dtype):
        return np.array(True)
    if is_integer(dtype):
        return np.array(iinfo(dtype).max, dtype)
    return np.array(_largest(dtype), dtype)


def min_value(dtype: np.dtype) -> Any:
    """The smallest value of an ordered dtype (minus infinity for floats): the identity of `max`."""
    if is_bool(dtype):
        return np.array(False)
    if is_integer(dtype):
        return np.array(iinfo(dtype).min, dtype)
    if is_small(dtype) and not np.array(-1.0, dtype) < 0:
        return np.array(finfo(dtype).tiny, dtype)
    return np.array(-_largest(dtype), dtype)


def _largest(dtype: np.dtype) -> float:
    """Infinity, or the largest number of a small dtype that has no infinity."""
    if is_small(dtype) and not np.isinf(np.array(np.inf, dtype).astype(float32)):
        return float(finfo(dtype).max)
    return np.inf


def real_of(dtype: np.dtype) -> np.dtype:
    """The dtype of the real part: float32 for complex64, itself for real dtypes."""
    return np.dtype(f"f{dtype.itemsize // 2}") if is_complex(dtype) else dtype


def complex_of(dtype: np.dtype) -> np.dtype:
    """The complex dtype whose parts hold `dtype`."""
    return np.dtype(np.complex128 if dtype == np.float64 else np.complex64)


def to_inexact(dtype: np.dtype) -> np.dtype:
    """The dtype of `sin` of this one: itself if inexact, else the float of as many bits (or 32)."""
    if is_inexact(dtype):
        return dtype
    return canonical(np.float64 if dtype.itemsize == 8 else np.float32)


def tangent_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of tangents: the same for floats, `float0` for dtypes without a derivative."""
    return dtype if is_inexact(dtype) else float0


# ---- Python numbers ----------------------------------------------------------------------------


def number(x: Any, dtype: np.dtype) -> np.ndarray:
    """A Python number as a rank-0 NumPy array of a dtype, which an integer need not fit.

    An integer that an array without a dtype could have wraps around, so that -1 beside uint8 is
    255; for others an `IntegerRangeError` is raised. Floats may take any integer.
    """
    try:
        return np.asarray(x, dtype)
    except (OverflowError, TypeError):
        pass
    if not is_integer(dtype):
        return np.asarray(float(x)).astype(dtype)
    return exact_integer(x, canonical(int)).astype(dtype)


def exact_integer(x: int, dtype: np.dtype) -> np.ndarray:
    """A Python integer as a rank-0 NumPy array; an IntegerRangeError if the dtype can't hold it."""
    limits = iinfo(dtype)
    if limits.min <= x <= limits.max:
        return np.asarray(x, dtype)
    raise IntegerRangeError(
        f"the integer {x} does not fit {dtype.name}, which holds {limits.min} to {limits.max}. "
        "Give a dtype that holds it (64 bits need SPMD_ENABLE_X64=1), or make it a float"
    )


def exact(x: Any, dtype: np.dtype) -> Any:
    """`x`; an error if it is a Python number whose integer part `dtype` can't hold."""
    kind = type(x)
    if kind not in (int, float, complex) or is_bool(dtype):
        return x
    if kind is complex and not is_complex(dtype):
        raise ArgumentError(f"{x!r} is no {dtype}; take its .real, .imag or abs() first")
    if is_integer(dtype) and math.isfinite(x):
        return exact_integer(int(x), dtype)
    return x


# ---- promotion ---------------------------------------------------------------------------------

_INT, _FLOAT, _COMPLEX = "int*", "float*", "complex*"  # the weak types, as lattice nodes


def _lattice() -> dict[Any, tuple[Any, ...]]:
    i1, i2, i4, i8 = SIGNED[:4]
    u1, u2, u4, u8 = UNSIGNED[:4]
    bf, f2, f4, f8 = FLOATING[:4]
    c4, c8 = COMPLEX
    return {
        bool_: (_INT,),
        _INT: (u1, i1, *SMALL_SIGNED, *SMALL_UNSIGNED),
        u1: (i2, u2),
        u2: (i4, u4),
        u4: (i8, u8),
        u8: (_FLOAT,),
        i1: (i2,),
        i2: (i4,),
        i4: (i8,),
        i8: (_FLOAT,),
        _FLOAT: (bf, f2, _COMPLEX, *SMALL_FLOATING),
        bf: (f4,),
        f2: (f4,),
        f4: (f8, c4),
        f8: (c8,),
        _COMPLEX: (c4,),
        c4: (c8,),
        c8: (),
        **dict.fromkeys(SMALL, ()),
    }


def _upper_bounds() -> dict[Any, frozenset[Any]]:
    bounds: dict[Any, frozenset[Any]] = {}
    # A node stands above those that follow it in the lattice, so its own bounds are known first.
    for node, above in reversed(_lattice().items()):
        bounds[node] = frozenset((node,)).union(*[bounds[other] for other in above])
    return bounds


_UPPER = _upper_bounds()
_WEAK_NODE = {
    **dict.fromkeys(INTEGER, _INT),
    **dict.fromkeys(FLOATING, _FLOAT),
    **dict.fromkeys(COMPLEX, _COMPLEX),
}
_WEAK_DTYPE = {_INT: np.int64, _FLOAT: np.float64, _COMPLEX: np.complex128}


@functools.lru_cache(maxsize=4096)
def _least_upper_bound(nodes: frozenset[Any]) -> Any:
    common = frozenset.intersection(*(_UPPER[n] for n in nodes))
    best = [n for n in common if common <= _UPPER[n]]
    if len(best) != 1:
        names = ", ".join(sorted(str(n) for n in nodes))
        raise TypePromotionError(
            f"dtypes {names} have no common type; convert one with .astype(...)"
        )
    return best[0]


def promote(pairs: tuple[tuple[np.dtype, bool], ...]) -> tuple[np.dtype, bool]:
    """The common type of (dtype, weak) pairs: again a pair.

    >>> promote(((np.dtype("float16"), False), (np.dtype("float32"), True)))
    (dtype('float16'), False)
    """
    if config.numpy_dtype_promotion == "strict":
        _check_strictly(pairs)
    return _promote(pairs, config.enable_x64)


def _check_strictly(pairs: tuple[tuple[np.dtype, bool], ...]) -> None:
    """Raise an error for dtypes of which one would have to change (numpy_dtype_promotion)."""
    strong = dict.fromkeys(d for d, weak in pairs if not weak)
    kinds = {_kind_rank(d) for d, weak in pairs if weak}
    first = next(iter(strong), None)
    if len(strong) < 2 and (first is None or _weak_fit(kinds, _kind_rank(first))):
        return
    shown = ", ".join(long_name(d) + (" (a number)" if weak else "") for d, weak in pairs)
    raise TypePromotionError(
        f"dtypes {shown} differ, and numpy_dtype_promotion is 'strict'; convert with .astype, or "
        "allow it with spmd.numpy_dtype_promotion('standard')"
    )


def _weak_fit(kinds: set[int], strong: int) -> bool:
    """Whether numbers of these kinds take a dtype of kind `strong`; only bools become bools."""
    return all(k <= strong for k in kinds) if strong else kinds <= {0}


def _kind_rank(dtype: np.dtype) -> int:
    """Numbers may take a dtype of their kind, or of one that comes later."""
    if is_bool(dtype):
        return 0
    return 1 if is_integer(dtype) else 2 if is_float(dtype) else 3


@functools.lru_cache(maxsize=4096)
def _promote(pairs: tuple[tuple[np.dtype, bool], ...], x64: bool) -> tuple[np.dtype, bool]:
    first = pairs[0][0]
    if first.kind == "V" and (is_key(first) or first == float0):
        if all(d == first for d, _ in pairs):
            return first, False
        names = ", ".join(long_name(d) for d, _ in pairs)
        raise TypePromotionError(f"dtypes {names} have no common type: keys and numbers do not mix")
    if all(p == pairs[0] for p in pairs):
        return pairs[0]
    for d, _ in pairs:
        if d not in _UPPER:
            raise TypePromotionError(f"dtype {long_name(d)} takes no part in promotion")
    if all(weak for _, weak in pairs):
        # Weak values may have any width: they promote among themselves as if they were strong.
        return _canonical(_least_upper_bound(frozenset(d for d, _ in pairs)), x64), True
    nodes = frozenset(_WEAK_NODE.get(d, d) if weak else d for d, weak in pairs)
    node = _least_upper_bound(nodes)
    if isinstance(node, str):
        return _canonical(_WEAK_DTYPE[node], x64), True
    return _canonical(node, x64), False


def _as_dtype(x: Any) -> np.dtype:
    try:
        return np.dtype(x)
    except TypeError as error:
        raise DtypeError(f"{x!r} is not a dtype: {error}") from None


def promote_types(a: Any, b: Any) -> np.dtype:
    """The dtype to which two dtypes are promoted.

    `a` and `b` are dtypes, their names, scalar types, of which Python's are weak, or arrays, which
    stand for their dtypes (NumPy's do not). 64-bit dtypes that are given stay, x64 or not, as in
    JAX; others become 64-bit ones under x64 only. Raises a `DtypeError` for dtypes without a
    common one.

    >>> snp.promote_types(snp.int8, snp.uint8)
    dtype('int16')
    """
    weak = [any(x is kind for kind in (int, float, complex)) for x in (a, b)]
    pairs = tuple((_canonical(_as_dtype(x), True), w) for x, w in zip((a, b), weak, strict=True))
    if config.numpy_dtype_promotion == "strict":
        _check_strictly(pairs)
    wide = any(d in _NARROW for d, _ in pairs)
    return _promote(pairs, wide or config.enable_x64)[0]
