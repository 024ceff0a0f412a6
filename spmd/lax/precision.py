"""How exact products and functions must be, in JAX's words.

Products are computed with full precision, and functions of one number within the bounds of
docs/accuracy.md. So these arguments are checked, and change nothing.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

from spmd.base.errors import ArgumentError, RefusedError


class Precision(enum.Enum):
    """How exact a product of floats must be; the CPU always computes with full precision."""

    DEFAULT = 0
    HIGH = 1
    HIGHEST = 2


class DotAlgorithmPreset(enum.Enum):
    """The algorithms of products that JAX names; the CPU always computes with full precision.

    A name says the dtypes of both operands and of sums, and how many products each stands for.
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
_PRECISIONS = frozenset(
    (
        *"default bfloat16 fastest high bfloat16_3x tensorfloat32 highest float32".split(),
        *(algorithm.name for algorithm in DotAlgorithmPreset),
    )
)


def check_precision(name: str, precision: Any) -> None:
    """Raise an `ArgumentError` for a precision, or a pair of them, that does not exist."""
    is_pair = isinstance(precision, (tuple, list)) and not isinstance(precision, DotAlgorithm)
    given = precision if is_pair else (precision,)
    if len(given) > 2 or not all(
        one is None
        or isinstance(one, (Precision, DotAlgorithm, DotAlgorithmPreset))
        or (isinstance(one, str) and one in _PRECISIONS)
        for one in given
    ):
        raise ArgumentError(
            f"{name}: precision={precision!r} must be None, a lax.Precision, a name such as "
            "'highest', 'high', 'default' or 'BF16_BF16_F32', or a pair of these",
        )
