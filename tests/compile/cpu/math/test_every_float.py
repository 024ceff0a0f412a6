"""The error of every unary f32 function: sampled here, over all 2**32 arguments at night.

    pytest -m nightly tests/compile/cpu/math/test_every_float.py

prints the table of docs/accuracy.md. Two minutes a function on one core; `-n 2` halves it.
"""

import numpy as np
import pytest

import spmd
from spmd import lax
from tests.compile.cpu.math.every_float import PATTERNS, worst_error

# The largest error that is allowed, in units of the last place; 0.5 is correct rounding.
ALLOWED = {
    "exp": 1.1,
    "exp2": 1.1,
    "expm1": 1.5,
    "log": 1.0,
    "log1p": 1.6,
    "tanh": 1.5,
    "logistic": 2.0,
    "sinh": 2.0,
    "cosh": 1.5,
    "asinh": 2.0,
    "acosh": 2.0,
    "atanh": 2.0,
    "sin": 1.9,
    "cos": 1.9,
    "tan": 2.0,
    "asin": 1.25,
    "acos": 1.25,
    "atan": 1.4,
    "erf": 1.75,
    "erfc": 0.75,
    "erf_inv": 1.5,
    "lgamma": 0.5,
    "digamma": 0.5,
    "cbrt": 0.51,
    "rsqrt": 1.51,
    "sqrt": 0.5,
    "floor": 0.0,
    "ceil": 0.0,
    "round": 0.0,
    "sign": 0.0,
    "neg": 0.0,
    "abs": 0.0,
}


@pytest.mark.parametrize("name", ALLOWED)
def test_samples_of_all_exponents_stay_below_their_bounds(name):
    # A prime stride visits every exponent, sign and kind of number with other mantissas.
    worst = worst_error(getattr(lax, name), 0, PATTERNS, step=4093)
    assert worst.ulps <= ALLOWED[name], f"{name}: {worst}"


@pytest.mark.nightly
@pytest.mark.parametrize("name", ALLOWED)
def test_all_arguments_stay_below_their_bounds(name, capsys):
    worst = worst_error(getattr(lax, name), 0, PATTERNS)
    with capsys.disabled():
        print(f"\n| {name} | {worst.ulps:.3f} | `{worst.argument!r}` |", end="")
    assert worst.ulps <= ALLOWED[name], f"{name}: {worst}"


def test_a_wrong_function_is_found():
    assert worst_error(lambda x: lax.add(x, x.dtype.type(1e-7)), 0, PATTERNS, step=4093).ulps > 1e3
    off_at_one = worst_error(
        lambda x: lax.select(x == 1, x * x + x, x) if x.dtype == np.float32 else x,
        0x3F7F0000,
        0x3F810000,
    )
    assert off_at_one.argument == np.float32(1) and off_at_one.ulps == 2.0**23
    assert worst_error(lambda x: lax.abs(x) if x.dtype == np.float32 else x, 0, PATTERNS, 4093)
    assert spmd.config.enable_x64 is False
