"""Rendered products: tiles and narrow ones, emulated and compiled."""

from __future__ import annotations

import math

import numpy as np
import pytest

import spmd
from spmd import numpy as snp
from spmd.compile.cuda.kernel import module_text, render_product
from spmd.compile.cuda.launch import MOST_SHARED
from spmd.compile.cuda.matmul import as_rows, is_narrow, plan_tiles
from spmd.compile.cuda.nvrtc import compile_cubin
from spmd.compile.cuda.tensor_product import takes
from spmd.compile.kernel.dtypes import DTYPES
from spmd.compile.kernel.matmul import Operand, Product, store_epilogue
from tests.compile.cuda.corpus import program_products
from tests.compile.cuda.emulated import Emulator
from tests.compile.kernel.interpret import interpret
from tests.compile.kernel.interpret_products import interpret_product
from tests.compile.kernel.op_kernels import assert_close
from tests.compile.kernel.random_products import ProductCase, random_product

# Sizes around the edges of all tiles, then random ones.
SIZES = [(1, 40, 70), (40, 1, 300), (129, 64, 16), (130, 260, 33), (16, 16, 1), (64, 9, 0)]
CASES = [random_product(seed, sizes) for seed, sizes in enumerate(SIZES)]
CASES += [random_product(seed) for seed in range(100, 130)]


def of_programs() -> list[ProductCase]:
    """The products of programs, with numbers for the arguments of their loop nests."""
    rng = np.random.default_rng(1)
    return [
        ProductCase(
            product,
            [
                rng.uniform(-1, 1, arg.size).astype(DTYPES[arg.dtype].numpy)
                for arg in as_rows(product).args
            ],
        )
        for product in program_products()
    ]


def assert_same(case: ProductCase, expected, got) -> None:
    with np.errstate(all="ignore"):
        # Sums of up to 300 products, in another order than NumPy's.
        assert_close(case.product.epilogue, expected[1:], got[1:], loose=4)


@pytest.mark.parametrize("mode", ["plain", "checked"])
def test_products_give_the_values_of_the_interpreter(mode):
    # Those on tensor cores are tested in test_tensor_product.py.
    cases = [case for case in CASES + of_programs() if not takes(case.product)]
    assert len(cases) > 25
    rendered = [render_product(case.product) for case in cases]
    functions = [function for each in rendered for function in each.functions]
    emulator = Emulator(functions, mode=mode)
    for case, each in zip(cases, rendered, strict=True):
        expected, got = [x.copy() for x in case.arrays], [x.copy() for x in case.arrays]
        interpret_product(case.product, *expected)
        emulator.run(each, got)
        assert_same(case, expected, got)


def test_a_narrow_product_as_a_row_kernel_means_the_same():
    narrow = [case for case in CASES if is_narrow(case.product)]
    assert len(narrow) > 5
    for case in narrow:
        expected, got = [x.copy() for x in case.arrays], [x.copy() for x in case.arrays]
        interpret_product(case.product, *expected)
        interpret(as_rows(case.product), [x[: a.size] for x, a in _arguments(case, got)])
        assert_same(case, expected, got)


def _arguments(case: ProductCase, arrays):
    return zip(arrays, as_rows(case.product).args, strict=True)


def plain(m: int, n: int, k: int, dtype: str = "f32") -> Product:
    """A product of contiguous matrices that only stores."""
    epilogue = store_epilogue((), m, n, dtype, dtype, (n, 1))
    return Product(m, n, k, Operand(dtype, k, 1), Operand(dtype, n, 1), dtype, epilogue)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_products_compile_without_spills(arch):
    large = [plain(4096, 4096, 4096, dtype) for dtype in ("f32", "f64")]
    functions = {
        function.symbol: function
        for product in [case.product for case in CASES[:12]] + large
        for function in render_product(product).functions
    }
    usage = compile_cubin(module_text(functions.values()), arch).usage
    for symbol, function in functions.items():
        assert usage[symbol].spill_stores == 0, function.text
        assert function.launch.shared <= MOST_SHARED


def test_large_products_have_large_tiles_and_small_ones_enough_blocks():
    def tile(m: int, n: int, k: int) -> tuple[int, int, int]:
        tiling = plan_tiles(plain(m, n, k))
        return tiling.tall, tiling.wide, math.prod(tiling.grid)

    assert tile(4096, 4096, 64) == (128, 128, 1024)
    assert tile(1024, 1024, 64) == (32, 32, 1024)
    assert tile(2048, 1024, 64) == (64, 64, 512)
    assert tile(20, 20, 64) == (32, 32, 1)
    assert tile(9, 4096, 64) == (16, 16, 256)


# ---- integers ----------------------------------------------------------------------------------


def of_integers(
    dtype: str, carried: str, left: str, right: str, sizes: tuple[int, int, int]
) -> ProductCase:
    """A product of integers of all values, by rows or columns, with numbers."""
    m, n, k = sizes
    a, b = (
        Operand(dtype, *((columns, 1) if by == "rows" else (1, rows)))
        for by, rows, columns in ((left, m, k), (right, k, n))
    )
    product = Product(m, n, k, a, b, carried, store_epilogue((), m, n, carried, carried, (n, 1)))
    rng, narrow = np.random.default_rng(k), np.iinfo(DTYPES[dtype].numpy)
    drawn = [rng.integers(narrow.min, narrow.max, x, endpoint=True) for x in (m * k, k * n)]
    arrays = [x.astype(DTYPES[dtype].numpy) for x in drawn]
    return ProductCase(product, [*arrays, np.zeros(m * n, DTYPES[carried].numpy)])


INTEGERS = [
    of_integers("i8", "i32", "rows", "columns", (33, 40, 68)),  # a word is one access
    of_integers("i8", "i32", "rows", "rows", (33, 40, 70)),
    of_integers("u8", "i32", "columns", "rows", (20, 33, 9)),
    of_integers("u8", "u32", "columns", "columns", (16, 16, 130)),
    of_integers("i32", "i32", "rows", "rows", (17, 40, 33)),
    of_integers("i16", "i64", "rows", "columns", (17, 18, 19)),
    of_integers("i8", "i64", "rows", "rows", (9, 20, 40)),
]


def test_products_of_integers_wrap_in_tiles():
    rendered = [render_product(case.product) for case in INTEGERS]
    functions = [function for each in rendered for function in each.functions]
    assert ["dot_of_" in f.text for f in functions] == [True] * 4 + [False] * 3
    assert "*(const u32 *)&a[" in functions[0].text and "*(const u32 *)&b[" in functions[0].text
    emulator = Emulator(functions)
    for case, each in zip(INTEGERS, rendered, strict=True):
        expected, got = [x.copy() for x in case.arrays], [x.copy() for x in case.arrays]
        interpret_product(case.product, *expected)
        emulator.run(each, got)
        np.testing.assert_array_equal(got[2], expected[2])


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint16"])
def test_programs_multiply_integers_in_tiles(dtype):
    rng, info = np.random.default_rng(0), np.iinfo(dtype)
    x, y = (
        rng.integers(info.min, info.max, s, dtype, endpoint=True) for s in ((2, 20, 30), (30, 24))
    )
    scale = np.float32(0.5)

    def scaled(x, y):
        wide = snp.matmul(x, y, preferred_element_type=np.int32)
        return wide * scale, x @ y

    lines = spmd.jit(scaled).lower(x, y).compile().as_text().splitlines()
    # Where both have one dtype, they are one product.
    assert len(lines) == 1 + (dtype != "int32") and all(
        "product 40x24x30 dot" in line for line in lines
    )
    found, narrow = spmd.jit(scaled)(x, y)
    wide = np.matmul(x, y, dtype=np.int64)
    np.testing.assert_array_equal(found, wide.astype(np.int32).astype(np.float32) * scale)
    np.testing.assert_array_equal(narrow, wide.astype(dtype))
