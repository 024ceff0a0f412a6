"""Rendered kernels against the interpreter: random ones, and the shapes users meet."""

import ctypes
import mmap

import numpy as np
import pytest

from spmd.compile.cpu.codegen.kernel import render
from spmd.compile.kernel.builder import Builder
from spmd.compile.kernel.dtypes import DTYPES
from spmd.compile.kernel.ir import Kernel
from spmd.compile.kernel.ops import supports
from spmd.compile.native.llvm.vector_emitter import Emitter, Module, Target
from tests.compile.cpu.native import host_target, run_native
from tests.compile.kernel.interpret import interpret
from tests.compile.kernel.op_kernels import (
    BITCASTS,
    OP_NAMES,
    assert_close,
    bitcast_case,
    conversion_case,
    op_case,
    renumbered,
    row_sum,
    spread_case,
    stacked_case,
    transposed_case,
)
from tests.compile.kernel.random_kernels import random_case


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
def test_random_kernels_give_the_values_of_the_interpreter(seed, target):
    for each in range(seed, seed + 10):
        case = random_case(each + 1000 * list(TARGETS).index(target))
        assert_renders(case.kernel, case.arrays, splits=2, target=TARGETS[target])


# ---- stores past the caches --------------------------------------------------------------------


def placed(array: np.ndarray, behind: int) -> np.ndarray:
    """A copy of a flat array that begins so many elements behind a cache line."""
    memory = np.zeros(array.nbytes + 128 + behind * array.itemsize, np.uint8)
    start = -memory.ctypes.data % 64 + behind * array.itemsize
    found = memory[start : start + array.nbytes].view(array.dtype)
    found[...] = array
    return found


def square_kernel(rows: int, size: int, dtype: str = "f32") -> Kernel:
    """y[i, j] = x[i, j] * x[i, j] for rows that lie one behind the other."""
    b = Builder((rows,), (size,))
    x = b.arg(dtype, rows * size)
    y = b.arg(dtype, rows * size, "out")
    with b.row():
        value = b.load(x, (size, 1))
        b.store(y, (size, 1), b.op("mul", value, value))
    return b.build()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "i8", "c64"])
def test_streaming_stores_give_the_same_values(dtype, target):
    kernel = square_kernel(3, 320, dtype)
    chosen = TARGETS[target] or host_target()
    # Vectors of 8 bytes have no such stores.
    streams = (dtype, target) != ("bf16", "plain")
    assert ("!nontemporal" in render(kernel, chosen, stream_from=0).text) == streams
    numbers = np.random.default_rng(0).integers(-9, 9, 3 * 320)
    x = numbers.astype(DTYPES[dtype].numpy)
    for behind in (0, 1):
        expected = [x.copy(), np.zeros_like(x)]
        got = [placed(each, behind) for each in expected]
        interpret(kernel, expected)
        run_native(kernel, got, 2, chosen, stream_from=0)
        assert_close(kernel, expected, got)


def test_rows_that_are_read_twice_fetch_the_next():
    assert "@llvm.prefetch" in render(normalised_rows(7, 256), host_target()).text
    assert "@llvm.prefetch" not in render(normalised_rows(7, 100_000), host_target()).text
    assert "@llvm.prefetch" not in render(square_kernel(7, 256), host_target()).text


def test_rows_larger_than_caches_give_the_same_values():
    kernel = normalised_rows(7, 96)
    assert "!nontemporal" in render(kernel, host_target(), stream_from=0).text
    x = np.random.default_rng(0).normal(size=7 * 96).astype(np.float32)
    expected, got = [x, np.zeros_like(x)], [placed(x, 0), placed(np.zeros_like(x), 0)]
    interpret(kernel, expected)
    run_native(kernel, got, 3, stream_from=0)
    assert_close(kernel, expected, got)


def normalised_rows(rows: int, columns: int) -> Kernel:
    """y = x / sum(x) for each row."""
    b = Builder((rows,), (columns,))
    x, y = b.arg("f32", rows * columns), b.arg("f32", rows * columns, "out")
    with b.row():
        total = b.reduce("add", b.load(x, (columns, 1)))
    with b.row():
        b.store(y, (columns, 1), b.op("div", b.load(x, (columns, 1)), total))
    return b.build()


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 31, 33, 64, 1000])
@pytest.mark.parametrize("behind", [0, 1, 8, 15])
def test_streaming_stores_take_odd_sizes(size, behind):
    kernel = square_kernel(1, size)
    x = np.arange(1, size + 1, dtype=np.float32)
    got = [placed(x, 3), placed(np.zeros_like(x), behind)]
    run_native(kernel, got, stream_from=0)
    np.testing.assert_array_equal(got[1], x * x)


def test_results_may_be_written_over_their_operands():
    kernel = square_kernel(3, 1000)
    x = placed(np.arange(3000, dtype=np.float32), 0)
    expected = x * x
    run_native(kernel, [x, x], stream_from=0)
    np.testing.assert_array_equal(x, expected)


def test_only_large_results_go_past_the_caches():
    limit = 24 * 2**20 // 4
    assert "!nontemporal" not in render(square_kernel(1, limit - 1), host_target()).text
    assert "!nontemporal" in render(square_kernel(1, limit), host_target()).text


# ---- each operation on each dtype --------------------------------------------------------------


@pytest.mark.parametrize("name", OP_NAMES)
def test_each_operation_gives_the_values_of_the_interpreter(name):
    case = op_case(name)
    assert_renders(case.kernel, case.arrays)


@pytest.mark.parametrize("source", DTYPES)
def test_conversions_between_all_dtypes_give_the_values_of_the_interpreter(source):
    case = conversion_case(source)
    assert_renders(case.kernel, case.arrays)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", ["f32", "f64", "f16", "bf16"])
def test_a_float_outside_an_integer_dtype_becomes_its_nearest_value(source, target):
    bounds = [sign * 2.0**k for k in (0, 7, 8, 15, 16, 31, 32, 63, 64) for sign in (1, -1)]
    numpy_dtype = DTYPES[source].numpy
    with np.errstate(over="ignore"):
        edges = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 0.99, -0.99, *bounds], numpy_dtype)
        around = [np.nextafter(edges, numpy_dtype.type(way)) for way in (-np.inf, np.inf)]
    x = np.concatenate([edges, *around, edges + numpy_dtype.type(1)])
    size = len(x)
    for whole in ("i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64"):
        b = Builder((size,), ())
        given, out = b.arg(source, size), b.arg(whole, size, "out")
        with b.row():
            b.store(out, (1,), b.convert(b.load(given, (1,)), whole))
        arrays = [x, np.zeros(size, DTYPES[whole].numpy)]
        assert_renders(b.build(), arrays, target=TARGETS[target])


@pytest.mark.parametrize("pair", BITCASTS)
def test_a_bitcast_keeps_the_bits(pair):
    case = bitcast_case(pair)
    expected = case.arrays[0].view(case.arrays[1].dtype).copy()
    run_native(case.kernel, case.arrays)
    np.testing.assert_array_equal(case.arrays[1].view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["f32", "f64", "i8", "bool", "bf16", "u64", "c64"])
@pytest.mark.parametrize("shape", [(16, 16), (17, 33), (8, 100), (64, 9), (3, 5)])
def test_transposed_and_reversed_reads_give_the_values_of_the_interpreter(shape, dtype, target):
    case = transposed_case(shape, dtype)
    assert_renders(case.kernel, case.arrays, splits=2, target=TARGETS[target])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["f32", "f64", "i8", "bool", "bf16", "c64"])
@pytest.mark.parametrize("stride", [2, 3, 4, 5, 10])
@pytest.mark.parametrize("shape", [(1, 64), (1, 1000), (3, 37), (2, 5), (40, 129)])
def test_strided_reads_give_the_values_of_the_interpreter(shape, stride, dtype, target):
    case = spread_case(*shape, stride, dtype)
    assert_renders(case.kernel, case.arrays, splits=2, target=TARGETS[target])


def test_lanes_at_a_distance_are_gathered_where_an_instruction_does_it():
    case, few = spread_case(3, 64, 10, "f32"), spread_case(3, 64, 10, "i8")
    widest = Target(512, True)
    assert "@llvm.masked.gather.v16f32" in render(case.kernel, widest).text
    assert "gather" not in render(case.kernel, Target(256, True)).text
    assert "gather" not in render(few.kernel, widest).text
    assert "gather" not in render(spread_case(3, 64, 10, "c64").kernel, widest).text


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["f32", "f64", "i8", "bool", "bf16", "u64"])
@pytest.mark.parametrize("shape", [(5, 64), (3, 83), (4, 5), (300, 32)])
def test_rows_of_which_each_lies_in_one_array_give_the_values_of_the_interpreter(
    shape, dtype, target
):
    case = stacked_case(*shape, dtype)
    assert_renders(case.kernel, case.arrays, splits=2, target=TARGETS[target])


def test_a_guard_that_all_lanes_share_is_a_branch():
    whole, short = (render(stacked_case(5, n, "f32").kernel, Target(256, True)) for n in (64, 83))
    assert "masked" not in whole.text
    assert "masked.load" in short.text


@pytest.mark.parametrize("stride", [2, 3, 4])
@pytest.mark.parametrize("columns", [16, 64, 1003])
def test_no_element_after_the_last_is_read(columns, stride):
    case = spread_case(1, columns, stride, "f32")
    data, out = case.arrays
    expected = data[::stride].copy()
    room = -(-data.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, room + mmap.PAGESIZE)
    bytes_ = np.frombuffer(pages, np.uint8)
    last_page = ctypes.c_void_p(bytes_.ctypes.data + room)
    libc = ctypes.CDLL(None, use_errno=True)
    at_end = bytes_[room - data.nbytes : room].view(np.float32)
    at_end[:] = data
    assert libc.mprotect(last_page, mmap.PAGESIZE, 0) == 0
    run_native(case.kernel, [at_end, out])
    np.testing.assert_array_equal(out, expected)


# ---- promises ------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["f32", "i32", "u8", "f64"])
@pytest.mark.parametrize("along_rows", [True, False])
def test_the_first_extreme_wins(dtype, target, along_rows):
    rng, size = np.random.default_rng(3), 150
    values = [0, 1, 2] if dtype[0] != "f" else [-np.inf, np.inf, 1, np.nan]
    x = rng.choice(np.array(values, DTYPES[dtype].numpy), (12, size))
    for row, value in enumerate(values):
        x[row] = value  # all equal
        x[row + 4] = values[0]
        x[row + 4, rng.integers(0, size, 3)] = value
    b = (
        Builder((12,), (size,), vector_dim=1)
        if along_rows
        else Builder((12,), (size,), vector_dim=0)
    )
    source = b.arg(dtype, x.size)
    targets = [b.arg(t, 12, "out") for t in ("i32", "i64")]
    with b.row():
        value = b.load(source, (size, 1) if along_rows else (1, 12))
        found = [b.reduce("argmax", value, "i32"), b.reduce("argmin", value, "i64")]
    with b.point():
        for place, value in zip(targets, found, strict=True):
            b.store(place, (1,), value)
    given = x if along_rows else np.ascontiguousarray(x.T)
    outs = [np.zeros(12, np.int32), np.zeros(12, np.int64)]
    arrays = [given.reshape(-1), *outs]
    assert_renders(b.build(), arrays, target=TARGETS[target])
    run_native(b.build(), arrays, 1, TARGETS[target])
    np.testing.assert_array_equal(outs[0], np.argmax(x, 1))
    np.testing.assert_array_equal(outs[1], np.argmin(x, 1))


def test_every_unit_alone_gives_the_whole():
    for seed in (3, 14, 27):
        case = random_case(seed)
        units = render(case.kernel, host_target()).units
        whole, single = [a.copy() for a in case.arrays], [a.copy() for a in case.arrays]
        run_native(case.kernel, whole)
        run_native(case.kernel, single, splits=max(units, 1))
        for x, y in zip(whole, single, strict=True):
            assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize(
    ("addresses", "step", "hidden"), [(2, 1, False), (20, 1, True), (2, 16, True)]
)
def test_llvm_does_not_see_the_value_of_loop_counters(addresses, step, hidden):
    e = Emitter(Module(Target()), 1)

    def body(index, carried):
        for number in range(addresses):
            e.put(f"store i64 {index}, ptr {e.at('i64', f'%p{number}', index)}")
        return carried

    e.loop("0", "64", [], body, step)
    counter = e.body_text().split(" = phi i64")[0].split()[-1]
    assert (f"@llvm.expect.i64(i64 {counter}, i64 0)" in e.body_text()) == hidden
    assert (f"i64 {counter}\n" in e.body_text()) != hidden  # what addresses are made of


@pytest.mark.parametrize(("count", "called"), [(7, False), (300, True), (5000, False)])
def test_few_elements_call_a_function_that_is_there_where_many_have_it_in_place(count, called):
    b = Builder((), (count,))
    with b.row():
        value = b.op("tanh", b.load(b.arg("f32", count), (1,)))
        b.store(b.arg("f32", count, "out"), (1,), value)
    kernel = b.build()
    assert ("@spmd_shared_" in render(kernel, Target(vector_bits=512, fma=True)).text) == called
    arrays = [np.linspace(-12, 12, count, dtype=np.float32), np.zeros(count, np.float32)]
    for target in TARGETS.values():
        assert_renders(kernel, arrays, target=target)


def test_equal_kernels_have_equal_text_whatever_their_value_numbers():
    for seed in range(11, 21):
        kernel = random_case(seed).kernel
        assert render(renumbered(kernel, 3), host_target()) == render(kernel, host_target())
    assert (
        render(row_sum(3, 4), host_target()).symbol != render(row_sum(3, 5), host_target()).symbol
    )


def test_an_elementwise_kernel_runs_in_place():
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
