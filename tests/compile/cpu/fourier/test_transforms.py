"""Native transforms against their meaning, and `fft` as a program against NumPy's in float64."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.base.config import config
from spmd.base.record import replace
from spmd.compile.cpu.fourier.plan import plan_transform
from spmd.compile.executable.executable import compile_jaxpr
from spmd.compile.kernel.dtypes import DTYPES
from spmd.compile.kernel.fourier import (
    COMPLEX,
    FROM_REAL,
    TO_REAL,
    Along,
    Transform,
    evaluate,
    radices_of,
    roots,
    roots_of,
)
from spmd.compile.native.llvm.compiler import compile_texts, host
from spmd.compile.native.program.steps import Host, KernelStep, walk

RNG = np.random.default_rng(5)
TOLERANCE = {"f32": 1e-6, "f64": 2e-15}


def _numbers(count: int, dtype: str) -> np.ndarray:
    return RNG.standard_normal(2 * count).astype(DTYPES[dtype].numpy)


def _run(t: Transform, width: int, operand: np.ndarray, result: np.ndarray) -> None:
    """Run a transform natively, unit by unit, the last one first."""
    plan = plan_transform(t, width)
    addresses = compile_texts(plan.texts, optimize=True)
    words = list(plan.words)
    for number, symbol in plan.functions:
        words[number] = addresses[symbol]
    sizes = (ctypes.c_int64 * len(words))(*words)
    table, room = roots_of(t), np.full(plan.scratch + 64, 0xFF, np.uint8)
    places = [a.ctypes.data for a in (operand, result, table)]
    places.append(room.ctypes.data + -room.ctypes.data % 64)
    args = (ctypes.c_void_p * 4)(*places)
    signature = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2)
    function = signature(addresses[plan.symbol])
    for unit in reversed(range(plan.units)):
        function(ctypes.addressof(args), ctypes.addressof(sizes), unit, unit + 1)


def _agrees(t: Transform, width: int, read: int, written: int) -> None:
    operand = _numbers(read, t.dtype)
    found = _numbers(written, t.dtype)
    complex_dtype = np.dtype(np.complex64 if t.dtype == "f32" else np.complex128)
    expected = found.view(complex_dtype).astype(np.complex128)
    evaluate(t, operand.view(complex_dtype), expected)
    _run(t, width, operand, found)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(
        found.view(complex_dtype), expected, rtol=0, atol=TOLERANCE[t.dtype] * scale
    )


@pytest.mark.parametrize("width", sorted({32, host().vector_bytes}))
@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("inverse", [False, True])
def test_native_transforms_are_what_they_mean(dtype: str, inverse: bool, width: int):
    one = Along(1, 0, 0)
    for size, count in ((1, 3), (4, 1), (30, 17), (64, 33), (77, 5), (104, 9)):
        rows = Along(count, size, size)
        t = Transform(dtype, size, COMPLEX, inverse, 0.5, one, rows, (1, 1))
        _agrees(t, width, size * count, size * count)
        # Lanes that lie together, with other elements between the points.
        whole, lanes, apart = Along(2, size * (count + 2), size * count), Along(count, 1, 1), count
        t = replace(t, outer=whole, lanes=lanes, points=(apart + 2, apart))
        _agrees(t, width, 2 * size * (count + 2), 2 * size * count)
        # From rows to columns, and the first step of two.
        t = replace(t, outer=one, lanes=Along(count, size, 1), points=(1, count))
        _agrees(t, width, size * count, size * count)
        t = replace(t, lanes=lanes, points=(count, count), turned=True)
        _agrees(t, width, size * count, size * count)


@pytest.mark.parametrize("width", sorted({32, host().vector_bytes}))
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_native_transforms_of_reals(dtype: str, width: int):
    one = Along(1, 0, 0)
    for size, count in ((1, 2), (2, 1), (15, 20), (32, 3)):
        there = Transform(
            dtype, size, FROM_REAL, False, 1.0, one, Along(count, size, size + 1), (1, 1)
        )
        _agrees(there, width, size * count, (size + 1) * count)
        back = replace(there, kind=TO_REAL, inverse=True, lanes=Along(count, size + 1, size))
        _agrees(back, width, (size + 1) * count, size * count)


def test_roots_lie_on_the_axes_exactly():
    for size in (1, 2, 3, 4, 8, 12, 1000):
        found = roots(np.arange(2 * size), size)
        angles = np.longdouble(2) * np.pi * np.arange(2 * size) / size
        np.testing.assert_allclose(found.real, np.cos(angles).astype(float), atol=2e-15)
        np.testing.assert_allclose(found.imag, -np.sin(angles).astype(float), atol=2e-15)
        if size % 4 == 0:
            assert found[size // 4] == -1j and found[size // 2] == -1


def test_radices_multiply_to_the_size():
    for size in (1, 2, 4, 8, 16, 32, 64, 96, 1000, 1001):
        assert np.prod(radices_of(size), initial=1) == size


# ---- programs ----------------------------------------------------------------------------------


def _program(f: Any, x: np.ndarray) -> tuple[np.ndarray, list[Any]]:
    program = compile_jaxpr(spmd.make_jaxpr(f)(x))
    (found,) = program([snp.asarray(x)])
    return np.asarray(found), list(walk(program.native.program.steps))


# Sizes in one step and in two, odd ones, rows by themselves and beside others.
SHAPES = [(1,), (6,), (15,), (256,), (1001,), (4096,), (18, 12), (3, 600), (5, 4, 6), (2, 0)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("wide", [False, True])
def test_programs_transform_natively(shape: tuple[int, ...], wide: bool):
    last, tolerance = shape[-1], 1e-14 if wide else 2e-6
    with config.override("enable_x64", wide):
        real = RNG.standard_normal(shape).astype("d" if wide else "f")
        number = real + 1j * RNG.standard_normal(shape).astype(real.dtype)
        halved = number[..., : last // 2 + 1]
        cases = [(name, number, {}) for name in ("fft", "ifft", "fftn", "ifftn")]
        cases += [(name, real, {}) for name in ("rfft", "rfftn")]
        cases += [("irfft", halved, {"n": last}), ("irfft2", halved, {})]
        for name, x, how in cases:
            if not x.size or (name == "irfft2" and (x.ndim < 2 or x.shape[-1] < 2)):
                continue
            found, steps = _program(lambda x, n=name, h=how: getattr(snp.fft, n)(x, **h), x)
            wanted = getattr(np.fft, name)(x.astype(np.result_type(x, "d")), **how)
            assert any(isinstance(s, KernelStep) for s in steps)
            assert not any(isinstance(s, Host) for s in steps), name
            error = np.abs(found - wanted).max() / max(np.abs(wanted).max(), 1e-30)
            assert found.shape == wanted.shape and error < tolerance, (name, error)


def test_sizes_with_a_large_prime_run_through_numpy():
    x = RNG.standard_normal((3, 34)).astype(np.complex64)
    found, steps = _program(snp.fft.fft, x)
    assert any(isinstance(s, Host) for s in steps)
    np.testing.assert_allclose(found, np.fft.fft(x), rtol=1e-4, atol=1e-4)
