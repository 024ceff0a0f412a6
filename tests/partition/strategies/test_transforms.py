"""Fourier transforms over several split dims, and moves of values before they are cast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import P, debug
from spmd.base.config import config
from tests.partition.programs import auto_mesh


@pytest.fixture(scope="module", autouse=True)
def eight_devices() -> Iterator[None]:
    with config.override("num_cpu_devices", 8):
        yield


FLAT = np.random.default_rng(0).normal(size=(512, 256)).astype(np.float32)
STACK = np.random.default_rng(1).normal(size=(16, 64, 32)).astype(np.float32)


def mesh() -> spmd.Mesh:
    return auto_mesh((2, 4), ("x", "y"))


# What is transformed, how it is split, and what a gather of the operand would be.
CASES: dict[str, tuple[Callable[[Any], Any], np.ndarray, P]] = {
    "two dims": (snp.fft.fft2, FLAT, P("x", "y")),
    "one of two dims": (snp.fft.fft2, FLAT, P("x")),
    "back": (lambda x: snp.fft.ifft2(x + 1j), FLAT, P("x", "y")),
    "real": (snp.fft.rfft2, FLAT, P("x", "y")),
    "to real": (lambda x: snp.fft.irfft2(x + 0j), FLAT, P("x", "y")),
    "three dims": (snp.fft.fftn, STACK, P("x", "y")),
    "two dims of a stack": (snp.fft.fft2, STACK, P("x", "y")),
    "real, three dims": (snp.fft.rfftn, STACK, P("x", None, "y")),
    "a stack": (snp.fft.fft2, STACK, P(("x", "y"))),
}


def put(x: np.ndarray, spec: P) -> Any:
    return spmd.device_put(x, spmd.NamedSharding(mesh(), spec))


@pytest.mark.parametrize("name", CASES)
def test_dims_are_transformed_one_after_the_other(name: str):
    f, x, spec = CASES[name]
    given = put(x, spec)
    found = debug.collectives(spmd.jit(f))(given)
    result = np.asarray(spmd.jit(f)(given))
    most = 0 if name == "a stack" else result.nbytes // 2
    assert sum(c.received for c in found) <= most
    assert {c.kind for c in found} <= {"all_to_all", "exchange"}
    expected = np.asarray(spmd.jit(f)(x))
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(result, expected, atol=1e-5 * abs(expected).max())
    slope = spmd.grad(lambda x: (abs(f(x)) ** 2).sum())
    wanted = np.asarray(slope(x))
    np.testing.assert_allclose(
        spmd.jit(slope)(given), wanted, rtol=1e-4, atol=1e-5 * abs(wanted).max()
    )


@pytest.mark.parametrize("old, new", [("int8", "float32"), ("bfloat16", "float32")])
def test_values_move_before_they_are_cast_to_a_wider_type(old: str, new: str):
    x = put(FLAT, P("x")).astype(old)
    narrow = np.dtype(getattr(snp, old)).itemsize

    whole = spmd.NamedSharding(mesh(), P())
    widened = spmd.jit(lambda x: x.astype(new), out_shardings=whole)
    (gather,) = debug.collectives(widened)(x)
    assert (gather.kind, gather.received) == ("all_gather", FLAT.size * narrow // 2)
    np.testing.assert_array_equal(widened(x), np.asarray(x.astype(new)))
