"""The table of op records: for every primitive, an example that all suites can run.

A record's `function` takes the module of operations first, so that the same line runs over
`spmd.lax` and over its oracle `jax.lax`. Suites: tests/lax/test_records.py (values, derivatives,
vmap, dims); the compilers run the same table against `impl`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.core.structural import add_any


def _computed(group: Sequence[np.dtype]) -> tuple[np.dtype, ...]:
    """The dtypes of a group that operations compute in; small ones are in `tests/jax`."""
    return tuple(d for d in group if not dtypes.is_small(d))


FLOAT = _computed(dtypes.FLOATING)
WIDE_FLOAT = (np.dtype(np.float32), np.dtype(np.float64))
INEXACT = _computed(dtypes.INEXACT)
COMPLEX = dtypes.COMPLEX
INTEGER = _computed(dtypes.INTEGER)
NUMERIC = _computed(dtypes.NUMERIC)
BITS = dtypes.BOOL + INTEGER
ORDERED = _computed(dtypes.ORDERED)
REAL = INTEGER + FLOAT
ANY = _computed(dtypes.ANY)

# ---- operands ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operand:
    """How to make an example operand: its shape, the range of its values, maybe a fixed dtype."""

    shape: tuple[int, ...]
    low: float = -2.0
    high: float = 2.0
    dtype: Any = None
    distinct: bool = False

    def make(self, rng: np.random.Generator, dtype: np.dtype) -> np.ndarray:
        """An array of the record's dtype (or this operand's own)."""
        dtype = np.dtype(self.dtype or dtype)
        if dtypes.is_bool(dtype):
            return rng.integers(0, 2, self.shape).astype(dtype)
        if dtypes.is_integer(dtype):
            return self._integers(rng, dtype)
        if self.distinct:
            size = int(np.prod(self.shape))
            values = np.linspace(self.low, self.high, size + 2)[1:-1]
            out = rng.permutation(values).reshape(self.shape)
        else:
            out = rng.uniform(self.low, self.high, self.shape)
        if dtypes.is_complex(dtype):
            out = out + 1j * rng.uniform(self.low, self.high, self.shape)
        return np.asarray(out).astype(dtype)

    def _integers(self, rng: np.random.Generator, dtype: np.dtype) -> np.ndarray:
        low = 0 if dtype.kind == "u" else int(np.floor(self.low))
        high = max(int(np.ceil(self.high)), low)
        low = max(low, int(np.floor(self.low)))
        return rng.integers(low, high, self.shape, endpoint=True).astype(dtype)


def between(low: float, high: float, *shape: int, dtype: Any = None) -> Operand:
    """Random values in a range."""
    return Operand(shape, low, high, dtype)


def some(*shape: int, dtype: Any = None) -> Operand:
    """Random values between -2 and 2."""
    return Operand(shape, dtype=dtype)


def distinct(*shape: int) -> Operand:
    """Values that all differ by more than finite differences step."""
    return Operand(shape, distinct=True)


# ---- the record --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """An example of one primitive.

    `differentiable` are the positions of operands to differentiate (None: all of inexact dtype);
    `order` to which order finite differences are compared; `reference` replaces jax.lax as oracle
    by a function of NumPy arrays; `jax_dtypes` are those that the oracle accepts too; `tolerance`
    multiplies the dtype's unit in the last place.
    """

    primitive: str
    function: Callable[..., Any]
    operands: tuple[Operand, ...]
    dtypes: Sequence[np.dtype]
    case: str = ""
    differentiable: tuple[int, ...] | None = None
    order: int = 2
    reference: Callable[..., Any] | None = None
    tolerance: float = 64.0
    skip_oracle: tuple[np.dtype, ...] = ()
    vmap: bool = True
    rng_seed: int = field(default=0)

    def __str__(self) -> str:
        return f"{self.primitive}-{self.case}" if self.case else self.primitive

    def make(self, dtype: Any, seed: int = 0) -> list[np.ndarray]:
        """Example operands of one dtype."""
        rng = np.random.default_rng(self.rng_seed + seed)
        return [o.make(rng, np.dtype(dtype)) for o in self.operands]

    @property
    def gradient_dtypes(self) -> list[np.dtype]:
        """The wide dtypes in which derivatives are compared with finite differences."""
        wide = (np.dtype(np.float64), np.dtype(np.complex128))
        return [d for d in wide if d in self.dtypes]


def record(
    primitive: str, function: Callable[..., Any], *operands: Operand, dtypes: Any, **more: Any
) -> Record:
    """A `Record`, with its operands as positional arguments."""
    return Record(primitive, function, operands, tuple(dtypes), **more)


def unary(name: str, low: float, high: float, accepted: Any, **more: Any) -> Record:
    """The record of an elementwise function of one operand, called `name` in lax."""
    return record(
        name,
        lambda lax, x: getattr(lax, name)(x),
        between(low, high, 2, 3),
        dtypes=accepted,
        **more,
    )


def binary(name: str, accepted: Any, x: Operand, y: Operand, **more: Any) -> list[Record]:
    """The records of an elementwise function of two operands: two arrays, and each a scalar."""

    def f(lax: Any, x: Any, y: Any) -> Any:
        return getattr(lax, more.get("function", name))(x, y)

    options = {k: v for k, v in more.items() if k != "function"}
    scalar_x, scalar_y = (Operand((), o.low, o.high, o.dtype) for o in (x, y))
    return [
        record(name, f, x, y, dtypes=accepted, **options),
        record(name, f, scalar_x, y, dtypes=accepted, case="scalar x", **options),
        record(name, f, x, scalar_y, dtypes=accepted, case="scalar y", **options),
    ]


# ---- arithmetic --------------------------------------------------------------------------------

AB = some(2, 3)
AWAY_FROM_ZERO = between(0.5, 3.0, 2, 3)

ARITHMETIC = [
    unary("neg", -2, 2, NUMERIC),
    unary("sign", 0.3, 2, REAL),
    # The derivative of a complex sign is zero by JAX's convention, which no difference confirms.
    unary("sign", 0.3, 2, COMPLEX, order=0, case="complex"),
    unary("abs", 0.3, 2, NUMERIC, skip_oracle=_computed(dtypes.UNSIGNED)),
    unary("square", -2, 2, NUMERIC),
    unary("sqrt", 0.5, 3, INEXACT),
    unary("rsqrt", 0.5, 3, INEXACT),
    unary("cbrt", 0.5, 3, FLOAT),
    unary("log", 0.5, 3, INEXACT),
    unary("floor", 0.1, 0.9, FLOAT),
    unary("ceil", 0.1, 0.9, FLOAT),
    unary("round", 0.6, 1.4, FLOAT),
    unary("is_finite", -2, 2, FLOAT),
    unary("real", -2, 2, COMPLEX),
    unary("imag", -2, 2, COMPLEX),
    unary("conj", -2, 2, COMPLEX),
    *binary("add", NUMERIC, AB, AB),
    *binary("sub", NUMERIC, AB, AB),
    *binary("mul", NUMERIC, AB, AB),
    *binary("div", NUMERIC, AB, AWAY_FROM_ZERO),
    *binary("rem", REAL, between(4.1, 4.9, 2, 3), between(1.1, 1.3, 2, 3)),
    *binary("pow", INEXACT, between(0.5, 2, 2, 3), AB),
    *binary("max", ANY, distinct(2, 3), distinct(2, 3), rng_seed=1),
    *binary("min", ANY, distinct(2, 3), distinct(2, 3), rng_seed=1),
    *binary("nextafter", FLOAT, AB, AB, order=0, reference=np.nextafter),
    *binary("complex", WIDE_FLOAT, AB, AB),
    record(
        "pow",
        lambda lax, x, y: lax.pow(x, y),
        between(0.5, 2, 2, 3),
        some(2, 3, dtype=np.int32),
        dtypes=INEXACT,
        case="integer power",
        differentiable=(0,),
    ),
    *(
        record(
            "integer_pow",
            lambda lax, x, y=y: lax.integer_pow(x, y),
            between(0.5, 2, 2, 3),
            dtypes=NUMERIC if y >= 0 else INEXACT,
            case=str(y),
        )
        for y in (-3, -1, 0, 1, 2, 3, 7)
    ),
]

# ---- elementwise -------------------------------------------------------------------------------

ELEMENTWISE = [
    unary("exp", -2, 2, INEXACT),
    unary("exp2", -2, 2, INEXACT),
    unary("expm1", -2, 2, INEXACT),
    unary("log1p", -0.5, 2, INEXACT),
    unary("logistic", -2, 2, INEXACT),
    unary("sin", -2, 2, INEXACT),
    unary("cos", -2, 2, INEXACT),
    unary("tan", -1, 1, INEXACT),
    unary("asin", -0.8, 0.8, INEXACT),
    unary("acos", -0.8, 0.8, INEXACT),
    unary("atan", -0.8, 0.8, INEXACT),
    unary("sinh", -2, 2, INEXACT),
    unary("cosh", -2, 2, INEXACT),
    unary("tanh", -2, 2, INEXACT),
    unary("asinh", -2, 2, INEXACT),
    unary("acosh", 1.5, 3, INEXACT),
    unary("atanh", -0.8, 0.8, INEXACT),
    *binary("atan2", FLOAT, AB, AWAY_FROM_ZERO),
]

SPECIAL = [
    unary("erf", -2, 2, FLOAT),
    unary("erfc", -2, 2, FLOAT),
    unary("erf_inv", -0.9, 0.9, FLOAT),
    unary("lgamma", 0.5, 5, FLOAT),
    unary("digamma", 0.5, 5, FLOAT),
    record(
        "polygamma",
        lambda lax, m, x: lax.polygamma(m, x),
        Operand((), 2, 2),
        between(0.5, 5, 2, 3),
        dtypes=WIDE_FLOAT,
        differentiable=(1,),
        tolerance=256,
    ),
    record(
        "zeta",
        lambda lax, x, q: lax.zeta(x, q),
        between(1.5, 4, 2, 3),
        between(0.5, 5, 2, 3),
        dtypes=WIDE_FLOAT,
        tolerance=256,
    ),
    *(
        record(
            name,
            lambda lax, a, x, name=name: getattr(lax, name)(a, x),
            between(0.5, 4, 2, 3),
            between(0.5, 6, 2, 3),
            dtypes=WIDE_FLOAT,
            differentiable=(1,),
            tolerance=512,
        )
        for name in ("igamma", "igammac")
    ),
    *(
        record(
            name,
            lambda lax, a, x, name=name: getattr(lax, name)(a, x),
            between(0.5, 4, 2, 3),
            between(0.5, 6, 2, 3),
            dtypes=WIDE_FLOAT,
            differentiable=(1,),
            tolerance=2048,
            # The oracle takes seconds to compile; tests/scipy compares with finite differences.
            skip_oracle=WIDE_FLOAT if name == "random_gamma_grad" else WIDE_FLOAT[:1],
        )
        for name in ("igamma_grad_a", "random_gamma_grad")
    ),
]

# ---- logic -------------------------------------------------------------------------------------

SMALL = between(0, 3, 2, 3)

LOGIC = [
    *binary("eq", ANY, SMALL, SMALL),
    *binary("ne", ANY, SMALL, SMALL),
    *binary("lt", ORDERED, SMALL, SMALL),
    *binary("le", ORDERED, SMALL, SMALL),
    *binary("gt", ORDERED, SMALL, SMALL),
    *binary("ge", ORDERED, SMALL, SMALL),
    *binary("and", BITS, between(-9, 9, 2, 3), between(-9, 9, 2, 3), function="bitwise_and"),
    *binary("or", BITS, between(-9, 9, 2, 3), between(-9, 9, 2, 3), function="bitwise_or"),
    *binary("xor", BITS, between(-9, 9, 2, 3), between(-9, 9, 2, 3), function="bitwise_xor"),
    record("not", lambda lax, x: lax.bitwise_not(x), between(-9, 9, 2, 3), dtypes=BITS),
    unary("population_count", -99, 99, INTEGER),
    unary("clz", -99, 99, INTEGER),
    *binary("shift_left", INTEGER, between(-9, 9, 2, 3), between(0, 9, 2, 3)),
    *binary("shift_right_logical", INTEGER, between(-9, 9, 2, 3), between(0, 9, 2, 3)),
    *binary("shift_right_arithmetic", INTEGER, between(-9, 9, 2, 3), between(0, 9, 2, 3)),
    record(
        "select_n",
        lambda lax, which, x, y: lax.select_n(which, x, y),
        some(2, 3, dtype=np.bool_),
        AB,
        AB,
        dtypes=ANY,
        differentiable=(1, 2),
    ),
    record(
        "select_n",
        lambda lax, which, x, y: lax.select_n(which, x, y),
        some(dtype=np.bool_),
        AB,
        AB,
        dtypes=ANY,
        differentiable=(1, 2),
        case="scalar which",
    ),
    record(
        "select_n",
        lambda lax, which, x, y, z: lax.select_n(which, x, y, z),
        between(0, 2, 2, 3, dtype=np.int32),
        AB,
        AB,
        AB,
        dtypes=ANY,
        differentiable=(1, 2, 3),
        case="three cases",
    ),
    *(
        record(
            "clamp",
            lambda lax, low, x, high: lax.clamp(low, x, high),
            between(-1.2, -0.7, *shape),
            between(-3.1, 3.1, 2, 3),
            between(0.7, 1.2, *shape),
            dtypes=INTEGER + FLOAT,
            case=case,
        )
        for shape, case in (((2, 3), ""), ((), "scalar bounds"))
    ),
]

# ---- conversion --------------------------------------------------------------------------------


def _converts_to(target: Any) -> Record:
    return record(
        "convert_element_type",
        lambda lax, x: lax.convert_element_type(x, target),
        between(-3.4, 3.4, 2, 3),
        # What leaves the integer's range is undefined in the oracle; see test_convert.py.
        dtypes=[d for d in ANY if np.dtype(target).kind != "u" or d.kind in "bu"],
        case=f"to {np.dtype(target).name}",
        # Narrow floats are coarser than the steps of finite differences.
        order=0 if np.dtype(target) in (dtypes.bfloat16, np.float16) else 2,
        # The oracle warns when it drops imaginary parts; test_convert.py has these.
        skip_oracle=() if np.dtype(target).kind == "c" else dtypes.COMPLEX,
    )


def _has_word(lax: Any, x: Any) -> Any:
    return lax.bitcast_convert_type(x, np.dtype(f"i{np.dtype(x.dtype).itemsize}"))


CONVERT = [
    *map(_converts_to, (np.bool_, np.int8, np.int32, np.uint8, np.float64, np.complex128)),
    *map(_converts_to, (dtypes.bfloat16, np.float16)),
    record("bitcast_convert_type", _has_word, AB, dtypes=REAL),
    record(
        "bitcast_convert_type",
        lambda lax, x: lax.bitcast_convert_type(x, np.uint8),
        AB,
        dtypes=[d for d in REAL if d.itemsize > 1],
        case="narrower",
    ),
    record(
        "bitcast_convert_type",
        lambda lax, x: lax.bitcast_convert_type(x, np.uint32),
        some(3, 4, dtype=np.int8),
        dtypes=[np.dtype(np.int8)],
        case="wider",
    ),
    record(
        "reduce_precision",
        lambda lax, x: lax.reduce_precision(x, exponent_bits=5, mantissa_bits=6),
        AB,
        dtypes=FLOAT,
        order=0,
    ),
    record(
        "stop_gradient",
        lambda lax, x: lax.stop_gradient(x),
        AB,
        dtypes=INEXACT,
        order=0,
        reference=np.array,
    ),
    record("copy", lambda lax, x: lax.copy(x), AB, dtypes=ANY, reference=np.array),
]

# ---- reductions --------------------------------------------------------------------------------


def _reduction(name: str, accepted: Any, operand: Operand, **more: Any) -> list[Record]:
    def over(axes: tuple[int, ...]) -> Record:
        return record(
            name,
            lambda lax, x: getattr(lax, name)(x, axes),
            operand,
            dtypes=accepted,
            case=f"over {axes}",
            **more,
        )

    return [over((1,)), over((0, 2))]


REDUCTIONS = [
    *_reduction("reduce_sum", NUMERIC, some(2, 3, 4)),
    *_reduction("reduce_prod", NUMERIC, between(0.5, 1.5, 2, 3, 4)),
    *_reduction("reduce_max", ORDERED, distinct(2, 3, 4)),
    *_reduction("reduce_min", ORDERED, distinct(2, 3, 4)),
    *_reduction("reduce_and", BITS, between(-9, 9, 2, 3, 4)),
    *_reduction("reduce_or", BITS, between(-9, 9, 2, 3, 4)),
    *_reduction("reduce_xor", INTEGER, between(-9, 9, 2, 3, 4)),
    *(
        record(
            name,
            lambda lax, x, name=name: getattr(lax, name)(x, 1, np.int32),
            distinct(2, 3, 4),
            dtypes=ORDERED,
        )
        for name in ("argmax", "argmin")
    ),
]


def _cumulative(name: str, accepted: Any, operand: Operand, **more: Any) -> list[Record]:
    return [
        record(
            name,
            lambda lax, x, reverse=reverse: getattr(lax, name)(x, axis=1, reverse=reverse),
            operand,
            dtypes=accepted,
            case="reverse" if reverse else "",
            # The oracle rounds narrow floats after each step, ours at the end.
            skip_oracle=(dtypes.bfloat16, np.dtype(np.float16)),
            **more,
        )
        for reverse in (False, True)
    ]


CUMULATIVE = [
    *_cumulative("cumsum", NUMERIC, some(2, 5)),
    *_cumulative("cumprod", NUMERIC, between(0.5, 1.5, 2, 5)),
    *_cumulative("cummax", REAL, distinct(2, 5)),
    *_cumulative("cummin", REAL, distinct(2, 5)),
    *_cumulative("cumlogsumexp", FLOAT, some(2, 5)),
]

# ---- dot_general -------------------------------------------------------------------------------


def _dot(case: str, lhs: Operand, rhs: Operand, numbers: Any, accepted: Any = NUMERIC) -> Record:
    return record(
        "dot_general",
        lambda lax, x, y: lax.dot_general(x, y, numbers),
        lhs,
        rhs,
        dtypes=accepted,
        case=case,
    )


DOT = [
    _dot("matrices", some(2, 3), some(3, 4), (((1,), (0,)), ((), ()))),
    _dot("vectors", some(3), some(3), (((0,), (0,)), ((), ()))),
    _dot("outer", some(2), some(3), (((), ()), ((), ()))),
    _dot("batched", some(2, 3, 4), some(4, 5, 2), (((2,), (0,)), ((0,), (2,)))),
    _dot("two pairs", some(3, 2, 4, 5), some(5, 3, 6), (((3, 0), (0, 1)), ((), ()))),
    _dot("mixed", some(2, 3, 4, 5), some(5, 2, 3, 6), (((3, 1), (0, 2)), ((0,), (1,)))),
    record(
        "dot_general",
        lambda lax, x, y: lax.dot(x, y, preferred_element_type=np.float32),
        some(2, 3),
        some(3, 4),
        dtypes=[dtypes.bfloat16, np.dtype(np.float16), np.dtype(np.int8), np.dtype(np.int32)],
        case="preferred",
    ),
]

# ---- arrays ------------------------------------------------------------------------------------

ARRAYS = [
    record(
        "iota",
        lambda lax: lax.broadcasted_iota(np.float32, (2, 3), 1),
        dtypes=[np.dtype(np.float32)],
        vmap=False,
    ),
    record("squeeze", lambda lax, x: lax.squeeze(x, (0, 2)), some(1, 3, 1, 2), dtypes=ANY),
    record("rev", lambda lax, x: lax.rev(x, (0, 2)), some(2, 3, 2), dtypes=ANY),
    record(
        "broadcast_in_dim",
        lambda lax, x: lax.broadcast_in_dim(x, (4, 2, 5, 3), (1, 3)),
        some(2, 1),
        dtypes=ANY,
        case="stretched",
    ),
    record(
        "broadcast_in_dim",
        lambda lax, x: lax.broadcast_in_dim(x, (2, 3), ()),
        some(),
        dtypes=ANY,
        case="scalar",
    ),
    record("reshape", lambda lax, x: lax.reshape(x, (2, 6, 2)), some(2, 3, 4), dtypes=ANY),
    record("permute_dims", lambda lax, x: lax.transpose(x, (2, 0, 1)), some(2, 3, 4), dtypes=ANY),
    record(
        "add_any",
        lambda lax, x, y: add_any(x, y),
        AB,
        AB,
        dtypes=INEXACT,
        reference=lambda x, y: x + y,
    ),
]

RECORDS = (
    *ARITHMETIC,
    *ELEMENTWISE,
    *SPECIAL,
    *LOGIC,
    *CONVERT,
    *REDUCTIONS,
    *CUMULATIVE,
    *DOT,
    *ARRAYS,
)
