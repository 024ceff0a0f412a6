"""Rendered kernels against the interpreter: random ones, and the shapes users meet."""

import numpy as np
import pytest

from spmd.compile.cpu.emit import Target
from spmd.compile.cpu.render import render
from spmd.compile.cpu.render_ops import supports
from spmd.compile.kernel.build import Builder
from spmd.compile.kernel.dtypes import DTYPES, kind
from spmd.compile.kernel.interpret import interpret
from spmd.compile.kernel.ir import Kernel
from spmd.compile.kernel.ops import OPS, result_dtype
from spmd.compile.kernel.print import format_kernel
from tests.compile.cpu.native import host_target, run_native
from tests.compile.kernel.random_kernels import random_case

TOLERANCE = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-5, "complex64": 2e-5}


def assert_close(kernel: Kernel, expected, got) -> None:
    """Compare all arrays: integers exactly, floats relative to the largest value around."""
    for number, (x, y) in enumerate(zip(expected, got, strict=True)):
        if x.dtype.kind in "biu":
            np.testing.assert_array_equal(y, x, f"arg {number} of\n{format_kernel(kernel)}")
            continue
        tolerance = TOLERANCE.get(x.dtype.name, 1e-11)
        wide_x, wide_y = x.astype(np.complex128), y.astype(np.complex128)
        finite = np.abs(wide_x[np.isfinite(wide_x)])
        scale = max(finite.max(initial=0), 1)
        np.testing.assert_allclose(
            wide_y,
            wide_x,
            rtol=tolerance,
            atol=tolerance * scale,
            err_msg=f"arg {number} of\n{format_kernel(kernel)}",
        )


def assert_renders(kernel: Kernel, arrays, splits: int = 1, target: Target | None = None) -> None:
    expected, got = [a.copy() for a in arrays], [a.copy() for a in arrays]
    interpret(kernel, expected)
    run_native(kernel, got, splits, target)
    with np.errstate(all="ignore"):
        assert_close(kernel, expected, got)


# Small registers and no FMA must give right results too: any x86-64 runs that code.
TARGETS = {"host": None, "avx2": Target(256, True), "plain": Target(128, False)}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("seed", range(0, 150, 10))
def test_random_kernels(seed, target):
    for each in range(seed, seed + 10):
        case = random_case(each + 1000 * list(TARGETS).index(target))
        assert_renders(case.kernel, case.arrays, splits=2, target=TARGETS[target])


# ---- each operation on each dtype --------------------------------------------------------------


def operands_for(dtype: str, count: int, rng: np.random.Generator) -> np.ndarray:
    numpy_dtype = DTYPES[dtype].numpy
    if kind(dtype) == "b":
        return rng.integers(0, 2, count).astype(bool)
    if kind(dtype) in "iu":
        info = np.iinfo(numpy_dtype)
        corners = np.array([0, 1, 2, 7, info.max, info.min, info.max - 1], numpy_dtype)
        raw = rng.integers(0, 256, count * numpy_dtype.itemsize).astype(np.uint8)
        return np.where(rng.random(count) < 0.5, raw.view(numpy_dtype), rng.choice(corners, count))
    values = rng.uniform(-0.95, 0.95, count) * rng.choice([1, 1, 3], count)
    if kind(dtype) == "c":
        return (values + 1j * rng.uniform(-2, 2, count)).astype(numpy_dtype)
    corners = rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 2.0], count)
    return np.where(rng.random(count) < 0.8, values, corners).astype(numpy_dtype)


def op_cases():
    for name, info in OPS.items():
        for dtype in DTYPES:
            dtypes = ("bool", dtype, dtype) if name == "select" else (dtype,) * info.arity
            if info.result == "free" or result_dtype(name, dtypes, "") is None:
                continue
            if supports(name, dtypes, result_dtype(name, dtypes, "")):
                yield name, dtypes


@pytest.mark.parametrize("name", sorted({name for name, _ in op_cases()}))
def test_each_operation(name):
    rng = np.random.default_rng(0)
    count = 203
    b = Builder((), (count,))
    arrays = []
    with b.row():
        for op, dtypes in op_cases():
            if op != name:
                continue
            values = []
            for dtype in dtypes:
                values.append(b.load(b.arg(dtype, count), (1,)))
                arrays.append(operands_for(dtype, count, rng))
            for attr in (-2, 0, 5) if name == "integer_pow" else (None,):
                result = b.op(op, *values, attr=attr)
                arrays.append(np.zeros(count, DTYPES[b.dtype(result)].numpy))
                b.store(b.arg(b.dtype(result), count, "out"), (1,), result)
    assert_renders(b.build(), arrays)


@pytest.mark.parametrize("source", DTYPES)
def test_convert_between_all_dtypes(source):
    rng = np.random.default_rng(1)
    count = 131
    b = Builder((), (count,))
    arrays = [operands_for(source, count, rng)]
    if kind(source) == "f":
        arrays[0][:40] = (rng.standard_normal(40) * 2e4).astype(arrays[0].dtype)
    given = b.arg(source, count)
    with b.row():
        value = b.load(given, (1,))
        for target in DTYPES:
            arrays.append(np.zeros(count, DTYPES[target].numpy))
            b.store(b.arg(target, count, "out"), (1,), b.convert(value, target))
    assert_renders(b.build(), arrays)


@pytest.mark.parametrize("pair", ["f32 i32", "u64 f64", "f16 u16", "i16 bf16", "i8 u8"])
def test_bitcast(pair):
    source, target = pair.split()
    rng = np.random.default_rng(2)
    b = Builder((), (37,))
    given, out = b.arg(source, 37), b.arg(target, 37, "out")
    with b.row():
        b.store(out, (1,), b.bitcast(b.load(given, (1,)), target))
    arrays = [operands_for(source, 37, rng), np.zeros(37, DTYPES[target].numpy)]
    if "bf16" in pair or "f16" in pair.split():
        # NaNs may come back with other payloads: only numbers are compared bit by bit.
        arrays[0] = np.arange(37).astype(arrays[0].dtype)
    expected = arrays[0].view(arrays[1].dtype).copy()
    run_native(b.build(), arrays)
    np.testing.assert_array_equal(arrays[1].view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["f32", "f64", "i8", "bool", "bf16", "u64", "c64"])
@pytest.mark.parametrize("shape", [(16, 16), (17, 33), (8, 100), (64, 9), (3, 5)])
def test_transposed_and_reversed_reads(shape, dtype, target):
    rows, columns = shape
    count = rows * columns
    b = Builder((2, rows), (columns,))
    x, y = b.arg(dtype, 2 * count), b.arg(dtype, columns)
    turned, flipped = b.arg(dtype, 2 * count, "out"), b.arg(dtype, 2 * count, "out")
    with b.row():
        b.store(turned, (count, columns, 1), b.load(x, (count, 1, rows)))
        b.store(flipped, (count, columns, 1), b.load(y, (0, 0, -1), columns - 1))
    data = operands_for(dtype, 2 * count, np.random.default_rng(6))
    arrays = [data, operands_for(dtype, columns, np.random.default_rng(7))]
    arrays += [np.zeros_like(data), np.zeros_like(data)]
    assert_renders(b.build(), arrays, splits=2, target=TARGETS[target])


# ---- promises ------------------------------------------------------------------------------------


def row_sum(rows: int, columns: int, dtype: str = "f32") -> Kernel:
    b = Builder((rows,), (columns,))
    x, out = b.arg(dtype, rows * columns), b.arg(dtype, rows, "out")
    with b.row():
        total = b.reduce("add", b.load(x, (columns, 1)))
    with b.point():
        b.store(out, (1,), total)
    return b.build()


@pytest.mark.parametrize("shape", [(7, 1000), (5, 33333), (1000, 3), (1, 1)])
def test_results_do_not_depend_on_how_units_are_divided(shape):
    rng = np.random.default_rng(3)
    x = rng.standard_normal(shape[0] * shape[1]).astype(np.float32)
    results = []
    for splits in (1, 2, 5):
        out = np.zeros(shape[0], np.float32)
        run_native(row_sum(*shape), [x, out], splits)
        results.append(out.tobytes())
    assert len(set(results)) == 1


def test_a_long_float_sum_is_as_accurate_as_numpys():
    count = 1 << 20
    x = np.random.default_rng(4).uniform(0, 1, count).astype(np.float32)
    out = np.zeros(1, np.float32)
    run_native(row_sum(1, count), [x, out])
    exact = x.astype(np.float64).sum()
    assert abs(out[0] - exact) <= max(abs(x.sum() - exact), 4 * np.spacing(np.float32(exact)))


def test_every_unit_alone_gives_the_whole():
    for seed in (3, 14, 27):
        case = random_case(seed)
        units = render(case.kernel, host_target()).units
        whole, single = [a.copy() for a in case.arrays], [a.copy() for a in case.arrays]
        run_native(case.kernel, whole)
        run_native(case.kernel, single, splits=max(units, 1))
        for x, y in zip(whole, single, strict=True):
            assert x.tobytes() == y.tobytes()


def test_equal_kernels_have_equal_text_whatever_their_value_numbers():
    first = random_case(11).kernel
    second = random_case(11).kernel
    assert render(first, host_target()) == render(second, host_target())
    assert (
        render(row_sum(3, 4), host_target()).symbol != render(row_sum(3, 5), host_target()).symbol
    )


def test_in_place_elementwise():
    count = 1001
    b = Builder((), (count,))
    x, out = b.arg("f32", count), b.arg("f32", count, "out")
    with b.row():
        value = b.load(x, (1,))
        b.store(out, (1,), b.op("add", b.op("mul", value, value), b.const(1, "f32")))
    data = np.arange(count, dtype=np.float32) / 100
    expected = data * data + 1
    run_native(b.build(), [data, data])
    np.testing.assert_allclose(data, expected, rtol=1e-6)


def test_unsupported_operations_say_so():
    assert supports("exp", ("f32",), "f32")
    assert supports("mul", ("c64", "c64"), "c64")
    assert not supports("tanh", ("c64",), "c64")
    assert not supports("popcount", ("f32",), "f32")
