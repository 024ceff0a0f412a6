"""Definitions of elementwise functions, Fourier transforms and random bits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import spmd
from spmd import lax
from tests.compile.definitions.compiled import by_definition

NAMES = (
    "acos acosh asin asinh atan atanh cos cosh exp2 expm1 log1p logistic rsqrt sign sin sinh tan "
    "tanh"
).split()
IN_NUMPY = {"logistic": lambda z: 1 / (1 + np.exp(-z)), "rsqrt": lambda z: 1 / np.sqrt(z)}
# Where products with infinite numbers count for less than the function's limit.
PARTS = (0.0, -0.0, 1, -1, 0.5, -0.5, 2, -3, 1e-3, 1e-9, -1e-6, 0.99, 1.01, 10, -20, 50, -1e4)


@pytest.mark.parametrize("name", NAMES)
def test_complex_functions_are_those_of_numpy(name):
    z = np.array([complex(x, y) for x, y in itertools.product(PARTS, PARTS)])
    wanted_of = IN_NUMPY.get(name) or getattr(np, name.replace("a", "arc", name[0] == "a"))
    with np.errstate(all="ignore"):
        wanted = wanted_of(z.astype(np.complex64).astype(np.complex128)).astype(np.complex64)
    (found,) = by_definition(getattr(lax, name), name, z.astype(np.complex64))
    known = np.isfinite(wanted) & (np.abs(wanted) > 0)
    found, wanted, z = (np.asarray(x)[known] for x in (found, wanted, z))
    error = np.abs(found - wanted) / np.abs(wanted)
    # The angle of exp2, a product with log 2, is rounded.
    limit = 4e-7 if name != "exp2" else 4e-7 + 6e-8 * np.abs(np.imag(z))
    assert np.all(error < limit), z[error.argmax()]
    # Both sides of a branch cut.
    for x, y in (map(np.real, (found, wanted)), map(np.imag, (found, wanted))):
        large = np.abs(y) > 1e-6 * np.abs(wanted)
        np.testing.assert_array_equal(np.signbit(x)[large], np.signbit(y)[large])


@pytest.mark.parametrize("size", [1, 32, 33, 37, 64, 74, 360])
def test_fourier_transforms_of_all_kinds_of_sizes(size):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(2, size)) + 1j * rng.normal(size=(2, size))).astype(np.complex64)
    half = x[:, : size // 2 + 1]
    for kind, given in (("fft", x), ("ifft", x), ("rfft", x.real.copy()), ("irfft", half)):
        (found,) = by_definition(lambda x, kind=kind: lax.fft(x, kind, (size,)), "fft", given)
        sizes = (size,) if kind == "irfft" else ()
        wanted = getattr(np.fft, kind)(given.astype(np.result_type(given, np.float64)), *sizes)
        np.testing.assert_allclose(found, wanted, 0, 1e-6 * np.abs(wanted).max())


def test_quarter_turns_of_fourier_transforms_are_exact():
    x = np.array([1, 2, 1, 2], np.complex64)
    (found,) = by_definition(lambda x: lax.fft(x, "fft", (4,)), "fft", x)
    np.testing.assert_array_equal(found, [6, 0, -2, 0])


@pytest.mark.parametrize(
    "algorithm", [lax.RandomAlgorithm.RNG_PHILOX, lax.RandomAlgorithm.RNG_THREE_FRY]
)
def test_random_bits_are_those_of_the_host(algorithm):
    with spmd.enable_x64(True):
        states = [
            np.array([1, 2, 2**32 - 2, 2**32 - 1], np.uint32),
            np.array([5, 2**64 - 2], np.uint64),
        ]
        kinds = [("u1", ()), ("u2", (3,)), ("u4", (3, 5)), ("u4", (2, 4)), ("u8", (3, 2))]
        for state, (dtype, shape) in itertools.product(states, kinds):

            def draw(state, dtype=dtype, shape=shape):
                return lax.rng_bit_generator(state, shape, dtype, algorithm)

            found = by_definition(draw, "rng_bit_generator", state)
            for x, y in zip(found, draw(state), strict=True):
                np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("window", [(), (5,)])
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_updates_of_one_element_are_multiplied(dtype, window):
    rng = np.random.default_rng(0)
    with spmd.enable_x64(True):

        def numbers(*shape):
            return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(dtype)

        # Some updates meet, some elements have none, and some indices are outside.
        given, updates, to = numbers(6, *window), numbers(13, *window), rng.integers(-1, 8, (13, 1))
        numbers_of = lax.ScatterDimensionNumbers(tuple(range(1, 1 + len(window))), (0,), (0,))

        def call(given, to, updates):
            return lax.scatter_mul(given, to, updates, numbers_of)

        (found,) = by_definition(call, "scatter_mul", given, to, updates)
        wanted = given.copy()
        for k, update in zip(to[:, 0], updates, strict=True):
            if 0 <= k < 6:
                wanted[k] *= update
    np.testing.assert_allclose(found, wanted, 3e-6 if dtype == "complex64" else 1e-14)
