"""Rendered products: tiles and narrow ones, emulated and compiled."""

from __future__ import annotations

import math

import numpy as np
import pytest

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
