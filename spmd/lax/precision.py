"""How exact products and functions must be, in JAX's words.

On CPUs products are computed with full precision, and functions of one number within the bounds of
docs/accuracy.md. So these arguments are checked and stand in equations, and change nothing there.
On GPUs a precision says what factors of float32 are rounded to, as in JAX.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from spmd.base.config import config
from spmd.base.errors import ArgumentError, RefusedError


class Precision(enum.Enum):
    """How exact a product of floats must be; the CPU always computes with full precision.

    On GPUs factors of float32 are rounded to TF32 where one is asked for that is not `HIGHEST`.
    """

    DEFAULT = 0
    HIGH = 1
    HIGHEST = 2

    def __repr__(self) -> str:
        return f"Precision.{self.name}"

    def __str__(self) -> str:
        return self.name


class DotAlgorithmPreset(enum.Enum):
    """The algorithms of products that JAX names; the CPU always computes with full precision.

    A name says the dtypes of both operands and of sums, and how many products each stands for. On
    GPUs factors of float32 are rounded to TF32, BF16 or F16 where it names one part of these.
    """

    DEFAULT = 0
    ANY_F8_ANY_F8_F32 = 1
    ANY_F8_ANY_F8_F32_FAST_ACCUM = 2
    ANY_F8_ANY_F8_ANY = 3
    ANY_F8_ANY_F8_ANY_FAST_ACCUM = 4
    F16_F16_F16 = 5
    F16_F16_F32 = 6
    BF16_BF16_BF16 = 7
    BF16_BF16_F32 = 8
    BF16_BF16_F32_X3 = 9
    BF16_BF16_F32_X6 = 10
    BF16_BF16_F32_X9 = 11
    TF32_TF32_F32 = 12
    TF32_TF32_F32_X3 = 13
    F32_F32_F32 = 14
    F64_F64_F64 = 15

    def __str__(self) -> str:
        return self.name


class DotAlgorithm(NamedTuple):
    """An algorithm of a product in parts, in JAX's words; the CPU computes with full precision.

    Operands may be rounded to `lhs_precision_type` and `rhs_precision_type`, each split into so
    many components, and products are added up in `accumulation_type`.

    >>> f32 = np.dtype("float32")
    >>> lax.dot(np.eye(2), np.eye(2), precision=lax.DotAlgorithm(f32, f32, f32)).dtype
    dtype('float32')
    """

    lhs_precision_type: Any
    rhs_precision_type: Any
    accumulation_type: Any
    lhs_component_count: int = 1
    rhs_component_count: int = 1
    num_primitive_operations: int = 1
    allow_imprecise_accumulation: bool = False


# The type of a product's `precision`, for annotations.
PrecisionLike: TypeAlias = (
    str
    | Precision
    | tuple[str, str]
    | tuple[Precision, Precision]
    | DotAlgorithm
    | DotAlgorithmPreset
    | None
)


class AccuracyMode(enum.Enum):
    """How exact a function of one number must be; docs/accuracy.md says how exact all are here."""

    HIGHEST = 1
    DEFAULT = 2


class Tolerance:
    """How far a function of one number may be off: absolute, relative, in units of the last place.

    Raises `ArgumentError` for a negative tolerance, and if all are 0.

    >>> lax.exp(np.float32(0), accuracy=lax.Tolerance(ulps=8))
    Array(1., dtype=float32)
    """

    def __init__(self, atol: float = 0.0, rtol: float = 0.0, ulps: int = 0):
        if min(atol, rtol, ulps) < 0 or atol == rtol == ulps == 0:
            raise ArgumentError(
                f"Tolerance: atol={atol}, rtol={rtol}, ulps={ulps}: none may be negative, and one "
                "must be positive"
            )
        self.atol, self.rtol, self.ulps = atol, rtol, ulps


def check_accuracy(name: str, accuracy: Any) -> None:
    """Raise a `RefusedError` for an accuracy that does not exist; all others are met anyway."""
    if not (accuracy is None or isinstance(accuracy, (AccuracyMode, Tolerance))):
        raise RefusedError(
            f"{name}: accuracy={accuracy!r} must be None, a lax.AccuracyMode or a lax.Tolerance"
        )


# The names of JAX's `Precision` and `DotAlgorithmPreset`, and their aliases.
_PRECISIONS: dict[Any, Precision | DotAlgorithmPreset | None] = {
    None: None,
    **dict.fromkeys(("default", "bfloat16", "fastest"), Precision.DEFAULT),
    **dict.fromkeys(("high", "bfloat16_3x", "tensorfloat32"), Precision.HIGH),
    **dict.fromkeys(("highest", "float32"), Precision.HIGHEST),
    **{algorithm.name: algorithm for algorithm in DotAlgorithmPreset if algorithm.value},
    **{known: known for known in (*Precision, *DotAlgorithmPreset)},
}


def precision_of(name: str, precision: Any) -> Any:
    """A precision as equations have it: None, a pair of `Precision`s, or an algorithm.

    None is that of the setting `default_matmul_precision`. Raises an `ArgumentError` for one, or a
    pair, that does not exist.
    """
    if precision is None:
        precision = config.default_matmul_precision
        if precision is None:
            return None
    if isinstance(precision, DotAlgorithm):
        # Sums of integers are exact: nothing is to be said of them.
        return None if np.dtype(precision.accumulation_type).kind in "iu" else precision
    given = precision if isinstance(precision, (tuple, list)) else (precision,)
    if len(given) > 2 or not all([_is_known(x) for x in given]):
        raise ArgumentError(
            f"{name}: precision={precision!r} must be None, a lax.Precision, a name such as "
            "'highest', 'high', 'default' or 'BF16_BF16_F32', or a pair of these",
        )
    found = [x if isinstance(x, DotAlgorithm) else _PRECISIONS[x] for x in given]
    if len(found) == 1:
        return found[0] if isinstance(found[0], DotAlgorithmPreset) else (found[0], found[0])
    return tuple(found)


def _is_known(x: Any) -> bool:
    return isinstance(x, DotAlgorithm) or (isinstance(x, Hashable) and x in _PRECISIONS)
