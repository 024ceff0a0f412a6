"""The scalar operations of kernel IR: their names, and the types they take and give.

Meaning where Python, C and NumPy differ (the rules of XLA, which JAX users know):

* integers wrap around; `x div 0` is -1 (all ones if unsigned), `x rem 0` is x, and
  `lowest div -1` is lowest; integer div truncates, `rem` has the sign of the dividend
  (floats too: C's fmod);
* a shift by the bit width or more, or by a negative amount, gives 0, or the sign for shr_arith;
* float to integer truncates and saturates, NaN becomes 0; anything to bool asks whether it is not
  0;
* `max` and `min` give NaN if either side is NaN; `sign` keeps NaN and signed zeros;
* `round` is half away from zero, `round_even` half to even; `select` is (predicate, then, else);
* `complex` is (real, imaginary); a complex converts to a real by dropping the imaginary part;
* `erf_inv`, `lgamma`, `digamma` are the real functions;
* `threefry2x32` encrypts a counter of two words with a key of two words
  (`lax/keys/threefry.py`): its operands are the key's words and the counter's, and the second
  word of its result is the high one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from spmd.base.record import record
from spmd.compile.kernel.dtypes import COMPLEX_OF, DTYPES, REAL_OF, kind


@record
class OpInfo:
    """The signature of an operation: operand kinds, their number, and the rule of its result dtype.

    `result` is "same" (all operands and the result have one dtype), "bool" (a comparison),
    "real", "complex", or "free" (any result dtype: convert, bitcast), "select", or "words" (two
    u32 in a u64).
    """

    name: str
    arity: int
    kinds: str
    result: str = "same"


REDUCERS = ("add", "mul", "max", "min", "and", "or", "xor")
ARG_REDUCERS = ("argmax", "argmin")
SCANNERS = ("add", "mul", "max", "min")


def _table() -> dict[str, OpInfo]:
    rows = [
        (1, "iufc", "same", "neg integer_pow"),
        (1, "iuf", "same", "sign"),
        (1, "f", "same", "floor ceil round round_even trunc cbrt erf erfc erf_inv lgamma digamma"),
        (1, "fc", "same", "sqrt rsqrt exp exp2 expm1 log log1p sin cos tan asin acos atan"),
        (1, "fc", "same", "sinh cosh tanh asinh acosh atanh logistic"),
        (1, "biu", "same", "not"),
        (1, "iu", "same", "clz popcount"),
        (1, "iufc", "real", "abs"),
        (1, "c", "same", "conj"),
        (1, "c", "real", "real imag"),
        (1, "f", "bool", "is_finite"),
        (1, "biufc", "free", "convert bitcast"),
        (2, "iufc", "same", "add sub mul div"),
        (2, "iuf", "same", "rem"),
        (2, "biuf", "same", "max min"),
        (2, "fc", "same", "pow"),
        (2, "f", "same", "atan2 nextafter"),
        (2, "biu", "same", "and or xor"),
        (2, "iu", "same", "shl shr_logical shr_arith"),
        (2, "biufc", "bool", "eq ne"),
        (2, "biuf", "bool", "lt le gt ge"),
        (2, "f", "complex", "complex"),
        (3, "biufc", "select", "select"),
        (4, "u", "words", "threefry2x32"),
    ]
    return {
        name: OpInfo(name, arity, kinds, result)
        for arity, kinds, result, names in rows
        for name in names.split()
    }


OPS = _table()


@cache
def result_dtype(op: str, operands: tuple[str, ...], wanted: str) -> str | None:
    """Return the dtype that `op` gives for operand dtypes, or None if it does not take them.

    `wanted` is the dtype asked for; it decides only for convert and bitcast.
    """
    info = OPS.get(op)
    if info is None or len(operands) != info.arity:
        return None
    if info.result == "select":
        return operands[1] if operands[0] == "bool" and operands[1] == operands[2] else None
    if len(set(operands)) != 1 or kind(operands[0]) not in info.kinds:
        return None
    dtype = operands[0]
    match info.result:
        case "bool":
            return "bool"
        case "real":
            return REAL_OF.get(dtype, dtype)
        case "complex":
            return COMPLEX_OF.get(dtype)
        case "words":
            return "u64" if dtype == "u32" else None
        case "free":
            if op == "bitcast" and not _can_bitcast(dtype, wanted):
                return None
            return wanted
    return dtype


# Operations of kernels on complex numbers; programs that need others leave them to NumPy.
COMPLEX_OPS = frozenset(
    "add sub mul div neg conj real imag complex abs exp log sqrt eq ne select convert "
    "integer_pow".split()
)


def supports(op: str, operands: Sequence[str], dtype: str) -> bool:
    """Say whether kernels may contain `op` on these dtypes: then every renderer has code for it.

    The lowering asks before it puts an operation into a kernel.
    """
    if result_dtype(op, tuple(operands), dtype) != dtype:
        return False
    if "c" in (kind(dtype), kind(operands[-1])):
        return op in COMPLEX_OPS
    # The neighbours of a narrow float are not those of the f32 that carries it.
    return op != "nextafter" or dtype in ("f32", "f64")


def identity(op: str, dtype: str) -> np.generic:
    """Return the value that `op` starts a reduction of `dtype` from, in its carrier."""
    numpy_dtype = DTYPES[DTYPES[dtype].carrier].numpy
    if op in ("max", "min"):
        if kind(dtype) == "f":
            return numpy_dtype.type(-np.inf if op == "max" else np.inf)
        if kind(dtype) == "b":
            return np.bool_(op == "min")
        info = np.iinfo(numpy_dtype)
        return numpy_dtype.type(info.min if op == "max" else info.max)
    if op == "and":
        return np.bool_(True) if kind(dtype) == "b" else np.invert(numpy_dtype.type(0))
    return numpy_dtype.type(1 if op == "mul" else 0)


def _can_bitcast(source: str, target: str) -> bool:
    plain = kind(source) in "iuf" and kind(target) in "iuf"
    return source == target or (plain and DTYPES[source].bits == DTYPES[target].bits)
