"""The interpreter against NumPy, on kernels written by hand."""

import numpy as np
import pytest

from spmd.compile.kernel.builder import Builder
from spmd.compile.kernel.dtypes import DTYPES
from spmd.compile.kernel.ir import Kernel
from tests.compile.kernel.interpret import interpret
from tests.compile.kernel.scalar_reference import scalar_op


def run(kernel: Kernel, *inputs: np.ndarray) -> list[np.ndarray]:
    """Return the contents of the "out" arguments."""
    given = iter(inputs)
    arrays = [
        np.zeros(arg.size, DTYPES[arg.dtype].numpy) if arg.role == "out" else next(given).copy()
        for arg in kernel.args
    ]
    interpret(kernel, arrays)
    return [array for arg, array in zip(kernel.args, arrays, strict=True) if arg.role != "in"]


def test_elementwise_work_reads_broadcast_transposed_and_reversed():
    b = Builder((3,), (4,))
    x, y, z, out = b.arg("f32", 12), b.arg("f32", 4), b.arg("f32", 12), b.arg("f32", 12, "out")
    with b.row():
        product = b.op("mul", b.load(x, (1, 3)), b.load(y, (0, 1)))
        b.store(out, (4, 1), b.op("add", product, b.load(z, (-4, 1), offset=8)))
    x_43 = np.arange(12, dtype=np.float32).reshape(4, 3)
    y_4 = np.arange(4, dtype=np.float32)
    z_34 = np.arange(12, dtype=np.float32).reshape(3, 4) * 100
    (got,) = run(b.build(), x_43.ravel(), y_4, z_34.ravel())
    np.testing.assert_array_equal(got.reshape(3, 4), x_43.T * y_4 + z_34[::-1])


def test_softmax_is_one_kernel():
    rows, columns = 5, 7
    b = Builder((rows,), (columns,))
    x, out = b.arg("f32", rows * columns), b.arg("f32", rows * columns, "out")
    kept = b.buffer("f32")
    with b.row():
        largest = b.reduce("max", b.load(x, (columns, 1)))
    with b.row():
        grown = b.op("exp", b.op("sub", b.load(x, (columns, 1)), largest))
        b.store_row(kept, grown)
        total = b.reduce("add", grown)
    with b.row():
        b.store(out, (columns, 1), b.op("div", b.load_row(kept), total))
    x_RC = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    (got,) = run(b.build(), x_RC.ravel())
    grown_RC = np.exp(x_RC - x_RC.max(1, keepdims=True))
    expected = grown_RC / grown_RC.sum(1, keepdims=True)
    np.testing.assert_allclose(got.reshape(rows, columns), expected, rtol=1e-6)


@pytest.mark.parametrize("op", ["argmax", "argmin"])
def test_positions_are_numpys_also_with_nan_and_ties(op):
    x = np.array([[1, 3, 3, 0], [1, np.nan, 9, np.nan], [-np.inf] * 4], np.float32)
    b = Builder((3,), (4,))
    source, out = b.arg("f32", 12), b.arg("i32", 3, "out")
    with b.row():
        found = b.reduce(op, b.load(source, (4, 1)), "i32")
    with b.point():
        b.store(out, (1,), found)
    (got,) = run(b.build(), x.ravel())
    np.testing.assert_array_equal(got, getattr(np, op)(x, axis=1))


def test_pad_is_a_guarded_load():
    b = Builder((), (6,))
    x, out = b.arg("i32", 3), b.arg("i32", 6, "out")
    with b.row():
        index = b.iota(0, "i32")
        inside = b.op(
            "and",
            b.op("ge", index, b.const(2, "i32")),
            b.op("lt", index, b.const(5, "i32")),
        )
        b.store(out, (1,), b.load(x, (1,), -2, guard=inside, fill=b.const(7, "i32")))
    (got,) = run(b.build(), np.array([1, 2, 3], np.int32))
    np.testing.assert_array_equal(got, [7, 7, 1, 2, 3, 7])


def test_scatter_add_adds_twice_to_a_repeated_element():
    b = Builder((), (4,))
    index, values, table = b.arg("i32", 4), b.arg("f32", 4), b.arg("f32", 3, "inout")
    with b.row():
        where = b.load(index, (1,))
        b.store(table, (0,), b.load(values, (1,)), gathered=((where, 1),), combine="add")
    (got,) = run(
        b.build(),
        np.array([2, 0, 2, 2], np.int32),
        np.array([1, 10, 100, 1000], np.float32),
        np.array([5, 6, 7], np.float32),
    )
    np.testing.assert_array_equal(got, [15, 6, 1108])


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_accumulates_along_the_row(reverse):
    b = Builder((2,), (5,))
    x, out = b.arg("i64", 10), b.arg("i64", 10, "out")
    with b.row():
        b.store(out, (5, 1), b.scan("add", b.load(x, (5, 1)), reverse))
    x_25 = np.arange(10).reshape(2, 5)
    (got,) = run(b.build(), x_25.ravel())
    step = -1 if reverse else 1
    expected = np.cumsum(x_25[:, ::step], axis=1)[:, ::step]
    np.testing.assert_array_equal(got.reshape(2, 5), expected)


def test_narrow_floats_round_when_stored():
    b = Builder((), (1,))
    x, out = b.arg("bf16", 1), b.arg("bf16", 1, "out")
    with b.row():
        value = b.load(x, (1,))
        # 1 + 2**-9 is no bf16; the excess survives in the carrier until it is doubled back.
        tiny = b.const(2.0**-9, "bf16")
        b.store(out, (1,), b.op("sub", b.op("add", value, tiny), value))
    (got,) = run(b.build(), np.ones(1, DTYPES["bf16"].numpy))
    assert float(got[0]) == 2.0**-9


@pytest.mark.parametrize(
    ("op", "x", "y", "expected"),
    [
        ("div", [7, -7, 5, -128], [2, 2, 0, -1], [3, -3, -1, -128]),
        ("rem", [7, -7, 5, -128], [2, 2, 0, -1], [1, -1, 5, 0]),
        ("shl", [1, 1, 3, 1], [3, 8, 7, -1], [8, 0, -128, 0]),
        ("shr_logical", [-1, -1, -128, 4], [1, 8, 7, -1], [127, 0, 1, 0]),
        ("shr_arith", [-1, -128, 64, -5], [9, 1, 9, -1], [-1, -64, 0, -1]),
    ],
)
def test_integer_operations_wrap_at_their_limits(op, x, y, expected):
    operation = scalar_op(op, ("i8", "i8"), "i8", None)
    got = operation(np.array(x, np.int8), np.array(y, np.int8))
    np.testing.assert_array_equal(got, np.array(expected, np.int8))


def test_float_to_integer_saturates():
    x = np.array([np.nan, np.inf, -np.inf, 3e9, -3e9, 2.9, -2.9, -0.0], np.float32)
    to_i32 = scalar_op("convert", ("f32",), "i32", None)
    top, low = 2**31 - 1, -(2**31)
    np.testing.assert_array_equal(to_i32(x), [0, top, low, top, low, 2, -2, 0])
    to_u8 = scalar_op("convert", ("f32",), "u8", None)
    np.testing.assert_array_equal(to_u8(x), [0, 255, 0, 255, 0, 2, 0, 0])
    to_i64 = scalar_op("convert", ("f64",), "i64", None)
    np.testing.assert_array_equal(
        to_i64(np.array([2.0**63, -(2.0**63), 1e300])), [2**63 - 1, -(2**63), 2**63 - 1]
    )
