"""Accuracy of the vector math: largest error in ulp over samples, and special values.

The references are NumPy's functions in long double, or mpmath's where it has no others.
"""

import math

import mpmath
import numpy as np
import pytest

from spmd.compile.kernel.builder import Builder
from spmd.compile.native.llvm.vector_emitter import Target
from tests.compile.cpu.native import run_native
from tests.compile.kernel.scalar_reference import scalar_op

LONG = np.longdouble
TARGETS = {"host": None, "plain": Target(128, False)}
NUMPY = {"f32": np.float32, "f64": np.float64}


def precise(name):
    """Return mpmath's function on arrays, rounded to long double in two parts."""
    function = {"lgamma": lambda x: mpmath.loggamma(x).real, "erf_inv": mpmath.erfinv}.get(
        name, getattr(mpmath, name, None)
    )

    def one(x):
        if not abs(x) < 1e300 or (name in ("lgamma", "digamma") and x <= 0 and x == int(x)):
            limits = scalar_op(name, ("f64",), "f64", None)
            return LONG(limits(np.float64(x)))
        if name == "erf_inv" and abs(x) >= 1:
            return LONG(math.copysign(math.inf, x) if abs(x) == 1 else math.nan)
        if x == 0 and name in ("erf", "erf_inv"):
            return LONG(x)
        with mpmath.workdps(30 if name != "erfc" or x < 5 else 60):
            value = function(mpmath.mpf(x))
            high = float(value)
            return LONG(high) + LONG(float(value - high)) if math.isfinite(high) else LONG(high)

    return lambda x: np.array([one(float(value)) for value in x], LONG)


def cbrt(x):
    # NumPy's long double cbrt is libm's, which is good to double only on some machines.
    root = np.cbrt(x)
    with np.errstate(all="ignore"):
        better = root - (root * root * root - x) / (3 * root * root)
    return np.where(np.isfinite(better), better, root)


# name: reference, interval in f32, interval in f64, allowed ulp in f32 and f64
FUNCTIONS = {
    "exp": (np.exp, (-104, 89), (-745, 710), 1.5, 1.5),
    "exp2": (np.exp2, (-150, 129), (-1076, 1025), 1.5, 1.5),
    "expm1": (np.expm1, (-20, 89), (-40, 710), 2, 2),
    "log": (np.log, (0, 3e38), (0, 1e308), 1, 1),
    "log1p": (np.log1p, (-1, 1e4), (-1, 1e4), 1.75, 1.75),
    "tanh": (np.tanh, (-10, 10), (-22, 22), 2, 2),
    "sinh": (np.sinh, (-90, 90), (-711, 711), 2, 2),
    "cosh": (np.cosh, (-90, 90), (-711, 711), 2, 2),
    "sin": (np.sin, (-1e5, 1e5), (-1e6, 1e6), 1.5, 2),
    "cos": (np.cos, (-1e5, 1e5), (-1e6, 1e6), 1.5, 2),
    "tan": (np.tan, (-1e3, 1e3), (-1e3, 1e3), 2, 3),
    "asin": (np.arcsin, (-1, 1), (-1, 1), 1.5, 1.5),
    "acos": (np.arccos, (-1, 1), (-1, 1), 1.5, 1.5),
    "atan": (np.arctan, (-100, 100), (-100, 100), 1.5, 2.5),
    "asinh": (np.arcsinh, (-1e3, 1e3), (-1e3, 1e3), 2, 2.5),
    "acosh": (np.arccosh, (1, 1e3), (1, 1e3), 2, 2.5),
    "atanh": (np.arctanh, (-1, 1), (-1, 1), 2, 2),
    "logistic": (lambda x: 1 / (1 + np.exp(-x)), (-80, 90), (-700, 700), 2, 2),
    "erf": (precise("erf"), (-5, 5), (-6, 6), 2, 2),
    "erfc": (precise("erfc"), (-5, 11), (-6, 27), 1, 4),
    "erf_inv": (precise("erf_inv"), (-1, 1), (-1, 1), 1.5, 4),
    "lgamma": (precise("lgamma"), (0, 1e3), (0, 1e3), 1, 4),
    "digamma": (precise("digamma"), (0, 1e3), (0, 1e3), 1, 4),
    "cbrt": (cbrt, (-1e9, 1e9), (-1e9, 1e9), 1, 1),
}
SLOW_REFERENCES = ("erf", "erfc", "erf_inv", "lgamma", "digamma")


def apply(op: str, dtype: str, *operands: np.ndarray, target: Target | None = None) -> np.ndarray:
    count = operands[0].size
    b = Builder((), (count,))
    given = [b.arg(dtype, count) for _ in operands]
    out = b.arg(dtype, count, "out")
    with b.row():
        b.store(out, (1,), b.op(op, *(b.load(arg, (1,)) for arg in given)))
    result = np.zeros(count, NUMPY[dtype])
    run_native(b.build(), [*operands, result], target=target)
    return result


def ulps(got: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Return the distance to the exact value in units of the result's last place."""
    rounded = exact.astype(got.dtype)
    distance = np.abs(got.astype(LONG) - exact) / np.spacing(np.abs(rounded)).astype(LONG)
    same = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
    distance = np.where(same & ~np.isfinite(distance), 0, distance)
    return np.where(np.isnan(distance), np.inf, distance)


def samples(low: float, high: float, dtype: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [
            rng.uniform(low, high, 8000),
            rng.standard_normal(4000) * 0.3,
            rng.standard_normal(2000) * 1e-3,
            rng.standard_normal(2000) * 1e-9,
            np.exp(rng.uniform(-80, 80, 4000)) * rng.choice([-1, 1], 4000),
        ]
    )
    x = x[(x >= low) & (x <= high)]
    return x.astype(NUMPY[dtype])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_errors_stay_below_their_bounds_in_ulp(name, dtype, target):
    reference, narrow, wide, allowed_32, allowed_64 = FUNCTIONS[name]
    x = samples(*(narrow if dtype == "f32" else wide), dtype)
    x = x[::20].copy() if name in SLOW_REFERENCES else x
    with np.errstate(all="ignore"):
        got = apply(name, dtype, x, target=TARGETS[target])
        error = ulps(got, reference(x.astype(LONG)))
    worst = int(np.argmax(error))
    allowed = allowed_32 if dtype == "f32" else allowed_64
    assert error[worst] <= allowed, f"{error[worst]:.2f} ulp at {x[worst]!r}: {got[worst]!r}"


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_values_give_those_of_numpy(name, dtype):
    kind = NUMPY[dtype]
    info = np.finfo(kind)
    tiny = [info.tiny, -info.tiny, info.smallest_subnormal, -info.smallest_subnormal]
    x = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 2, -2, 0.5, info.max, -info.max, *tiny])
    x = x.astype(kind)
    with np.errstate(all="ignore"):
        got, want = apply(name, dtype, x), FUNCTIONS[name][0](x.astype(LONG)).astype(kind)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want), str(x))
        zero = want == 0
        np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(want[zero]), str(x[zero]))
        error = ulps(got, want.astype(LONG))
    assert error.max() <= 6, f"{x[np.argmax(error)]}: {got[np.argmax(error)]}"


@pytest.mark.parametrize("name", ["exp", "exp2", "tanh", "logistic"])
def test_all_vector_widths_give_the_same_bits(name):
    # A scalar, and vectors that are less than a register, look up the same tables.
    x = np.array([0.0, -0.0, 1e-40, 3.7, -0.06, 0.4, np.inf, -np.inf, np.nan, -2.5], np.float32)
    x = np.concatenate([x, np.random.default_rng(1).normal(0, 4, 118).astype(np.float32)])
    many = apply(name, "f32", x)
    for count in (1, 2, 3, 7, 8, 15):
        for start in range(0, 60, count):
            few = x[start : start + count].copy()
            np.testing.assert_array_equal(apply(name, "f32", few), many[start : start + count])
            if start > 2 * count:
                break


@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_large_angles_are_reduced_exactly(name, dtype):
    x = np.exp(np.random.default_rng(1).uniform(5, 85, 500)).astype(NUMPY[dtype])
    got = apply(name, dtype, x)
    exact = np.array([getattr(math, name)(float(value)) for value in x])
    assert ulps(got, exact.astype(LONG)).max() <= 4


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_pow_is_accurate_and_gives_the_special_values_of_numpy(dtype):
    rng = np.random.default_rng(2)
    corners = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 0.5, -0.5]
    grid = np.array([(x, y) for x in corners for y in corners])
    x = np.concatenate([grid[:, 0], np.exp(rng.uniform(-20, 20, 4000))]).astype(NUMPY[dtype])
    y = np.concatenate([grid[:, 1], rng.uniform(-4, 4, 4000)]).astype(NUMPY[dtype])
    with np.errstate(all="ignore"):
        got, want = apply("pow", dtype, x, y), np.power(x.astype(LONG), y.astype(LONG))
        narrow = want.astype(NUMPY[dtype])
        np.testing.assert_array_equal(np.isnan(got), np.isnan(narrow))
        np.testing.assert_array_equal(np.signbit(got[narrow == 0]), np.signbit(narrow[narrow == 0]))
        assert ulps(got, want).max() <= 2


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_pow_of_large_exponents_is_accurate(dtype):
    # The exponent multiplies the error of the logarithm: it has to have far more digits than f64.
    rng = np.random.default_rng(3)
    limit = {"f32": 85, "f64": 700}[dtype]
    x = np.exp(rng.uniform(-1, 1, 2000)).astype(NUMPY[dtype])
    x[:4] = 1.5, 0.75, 1.0000001, 1.41421
    y = (rng.uniform(-limit, limit, 2000) / np.abs(np.log(x.astype(LONG)))).astype(NUMPY[dtype])

    def exact(a, b):
        with mpmath.workdps(40):
            power = mpmath.mpf(float(a)) ** mpmath.mpf(float(b))
            return LONG(float(power)) + LONG(float(power - float(power)))

    want = np.array([exact(a, b) for a, b in zip(x, y, strict=True)], LONG)
    assert ulps(apply("pow", dtype, x, y), want).max() <= 2


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_sine_and_cosine_of_one_kernel_are_those_of_two(dtype, target):
    # They share one function then. Large arguments are libm's, those of whole vectors too.
    x = samples(-1e4, 1e4, dtype)[:4096].copy()
    x[:100] *= 1e9
    x[200:206] = [0.0, -0.0, np.inf, np.nan, 3e6, -1e30]
    b = Builder((), (x.size,))
    given, sine, cosine = b.arg(dtype, x.size), *(b.arg(dtype, x.size, "out") for _ in range(2))
    with b.row():
        value = b.load(given, (1,))
        b.store(sine, (1,), b.op("sin", value))
        b.store(cosine, (1,), b.op("cos", value))
    both = [np.zeros_like(x) for _ in range(2)]
    with np.errstate(invalid="ignore"):
        run_native(b.build(), [x, *both], target=TARGETS[target])
        for name, got in zip(("sin", "cos"), both, strict=True):
            np.testing.assert_array_equal(got, apply(name, dtype, x, target=TARGETS[target]))
            np.testing.assert_allclose(got, getattr(np, name)(x.astype(LONG)), atol=1e-6)
    assert np.signbit(both[0][201])
