"""Products with epilogues: the law, the meaning, and how kernels are joined to products."""

import numpy as np
import pytest

from spmd.compile.kernel.builder import Builder
from spmd.compile.kernel.check import KernelError
from spmd.compile.kernel.matmul import (
    Operand,
    Product,
    Result,
    attach,
    block_epilogue,
    c_strides,
    check_epilogue,
    check_product,
    plain_store,
    product_dtype,
    store_epilogue,
)
from tests.compile.kernel.interpret_products import interpret_product


def plain(m, n, k, **changes) -> Product:
    epilogue = store_epilogue((), m, n, "f32", "f32", (n, 1))
    fields = {"a": Operand("f32", k, 1), "b": Operand("f32", n, 1), "carried": "f32"}
    return Product(m, n, k, **({"epilogue": epilogue} | fields | changes))


def bias_kernel(shape):
    """relu(c + bias) over an array of a shape, in the dims of that shape."""
    b = Builder(shape, ())
    strides = c_strides(shape[:-2], *shape[-2:])
    size = int(np.prod(shape))
    c, bias = b.arg("f32", size), b.arg("f32", shape[-1])
    out = b.arg("f32", size, "out")
    with b.row():
        total = b.op("add", b.load(c, strides), b.load(bias, (*(0,) * (len(shape) - 1), 1)))
        b.store(out, strides, b.op("max", total, b.const(0.0, "f32")))
    return b.build()


def test_a_plain_product_is_that_of_numpy():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((4, 6)).astype("f4"), rng.standard_normal((6, 5)).astype("f4")
    out = np.zeros(20, np.float32)
    interpret_product(plain(4, 5, 6), a.reshape(-1), b.reshape(-1), out)
    np.testing.assert_array_equal(out.reshape(4, 5), a @ b)


def test_the_transposed_product_gives_the_same_values():
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((4, 6)).astype("f4"), rng.standard_normal((6, 5)).astype("f4")
    p = plain(4, 5, 6)
    out = np.zeros(20, np.float32)
    interpret_product(p.transposed, b.reshape(-1), a.reshape(-1), out)
    np.testing.assert_allclose(out.reshape(4, 5), a @ b, rtol=1e-5, atol=1e-5)
    assert p.transposed.transposed == p


@pytest.mark.parametrize("shape, sizes", [((6, 5), (6, 5)), ((2, 3, 5), (6, 5)), ((30,), (6, 5))])
def test_a_kernel_of_any_dims_becomes_an_epilogue(shape, sizes):
    """Dims are cut and joined; the strides of other arguments follow."""
    if len(shape) == 1:
        b = Builder(shape, ())
        c, out = b.arg("f32", 30), b.arg("f32", 30, "out")
        with b.row():
            b.store(out, (1,), b.op("neg", b.load(c, (1,))))
        kernel, rest = b.build(), []
    else:
        kernel = bias_kernel(shape)
        rest = [np.arange(shape[-1], dtype=np.float32) - 2]
    found = attach(kernel, 0, Result(sizes, (sizes[1], 1), "f32"), "f32")
    assert found is not None
    epilogue, origins = found
    assert origins == tuple(range(1, len(kernel.args)))
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((6, 4)).astype("f4"), rng.standard_normal((4, 5)).astype("f4")
    out = np.zeros(30, np.float32)
    p = plain(6, 5, 4, epilogue=epilogue)
    interpret_product(p, a.reshape(-1), b.reshape(-1), *rest, out)
    expected = np.maximum(a @ b + rest[0], 0) if rest else -(a @ b)
    np.testing.assert_array_equal(out.reshape(6, 5), expected)


def test_a_product_with_other_readers_is_kept():
    kernel = bias_kernel((6, 5))
    found = attach(kernel, 0, Result((6, 5), (5, 1), "f32"), "f32", keep=True)
    assert found is not None
    epilogue, origins = found
    assert origins == (1, 2, 0)
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((6, 4)).astype("f4"), rng.standard_normal((4, 5)).astype("f4")
    out, c = np.zeros(30, np.float32), np.zeros(30, np.float32)
    bias = np.ones(5, np.float32)
    p = plain(6, 5, 4, epilogue=epilogue)
    interpret_product(p, a.reshape(-1), b.reshape(-1), bias, out, c)
    np.testing.assert_array_equal(c.reshape(6, 5), a @ b)
    np.testing.assert_array_equal(out.reshape(6, 5), np.maximum(a @ b + 1, 0))


def test_kernels_that_cannot_be_an_epilogue_are_refused():
    result = Result((6, 5), (5, 1), "f32")
    turned = Builder((6, 5), ())
    c, out = turned.arg("f32", 30), turned.arg("f32", 30, "out")
    with turned.row():
        turned.store(out, (5, 1), turned.load(c, (1, 6)))  # reads C as its transpose
    assert attach(turned.build(), 0, result, "f32") is None
    found = attach(turned.build(), 0, Result((5, 6), (6, 1), "f32"), "f32")
    assert found is not None and found[0].passes[0].stores[0].map.strides == (1, 5)
    placed = Builder((6, 5), ())
    c, out = placed.arg("f32", 30), placed.arg("f32", 30, "out")
    with placed.row():
        where = placed.convert(placed.iota(1, "i32"), "f32")
        placed.store(out, (5, 1), placed.op("add", placed.load(c, (5, 1)), where))
    assert attach(placed.build(), 0, result, "f32") is None
    summed = Builder((6,), (5,))
    c, out = summed.arg("f32", 30), summed.arg("f32", 6, "out")
    with summed.row():
        total = summed.reduce("add", summed.load(c, (5, 1)))
    with summed.point():
        summed.store(out, (1,), total)
    assert attach(summed.build(), 0, result, "f32") is None


def test_a_narrow_result_is_rounded_before_the_epilogue():
    b = Builder((6, 5), ())
    c, out = b.arg("bf16", 30), b.arg("f32", 30, "out")
    with b.row():
        b.store(out, (5, 1), b.convert(b.load(c, (5, 1)), "f32"))
    found = attach(b.build(), 0, Result((6, 5), (5, 1), "bf16"), "f32")
    assert found is not None
    p = plain(6, 5, 4, epilogue=found[0])
    rng = np.random.default_rng(4)
    x, y = rng.standard_normal((6, 4)).astype("f4"), rng.standard_normal((4, 5)).astype("f4")
    out = np.zeros(30, np.float32)
    interpret_product(p, x.reshape(-1), y.reshape(-1), out)
    assert not np.array_equal(out.reshape(6, 5), x @ y)
    np.testing.assert_allclose(out.reshape(6, 5), x @ y, rtol=1e-2)


def test_products_that_break_the_law_are_refused():
    check_product(plain(4, 5, 6))
    with pytest.raises(KernelError, match="batch strides"):
        check_product(plain(4, 5, 6, a=Operand("f32", 6, 1, (3,))))
    with pytest.raises(KernelError, match="space"):
        check_epilogue(store_epilogue((), 4, 5, "f32", "f32", (5, 1)), (), 4, 6, "f32")
    with pytest.raises(KernelError, match="C is f64"):
        check_epilogue(store_epilogue((), 4, 5, "f32", "f32", (5, 1)), (), 4, 5, "f64")


def test_plain_stores_are_recognised():
    assert plain_store(store_epilogue((), 4, 5, "f32", "f32", (5, 1))) is not None
    assert plain_store(store_epilogue((), 4, 5, "f32", "bf16", (5, 1))) is None
    block = block_epilogue(store_epilogue((), 40, 50, "f32", "bf16", (1, 40)), 8, 16, 24)
    assert (block.outer, block.inner) == ((8,), (16,))
    assert block.passes[0].stores[0].map.strides == (1, 40)


@pytest.mark.parametrize(
    "source, result, carried",
    [
        ("f32", "f32", "f32"),
        ("bf16", "bf16", "f32"),
        ("f32", "f64", "f64"),
        ("i32", "i32", None),
        ("c64", "c64", None),
    ],
)
def test_product_dtype_is_the_dtype_of_the_sum(source, result, carried):
    assert product_dtype(source, result) == carried


@pytest.mark.parametrize(
    ("source", "result", "carried"),
    [("i8", "i32", "i32"), ("u8", "u8", "u32"), ("i16", "i64", "i64"), ("i8", "f32", None)],
)
def test_where_integers_have_tiles_their_sums_have_32_bits_or_more(source, result, carried):
    assert product_dtype(source, result, tiles_integers=True) == carried
    assert product_dtype(source, result) is None
