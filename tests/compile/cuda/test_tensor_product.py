"""Products on tensor cores: emulated in all layouts, with waits and barriers removed; compiled."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from spmd.base.errors import CudaError
from spmd.compile.cuda import tensor_product
from spmd.compile.cuda.kernel import module_text, render_product
from spmd.compile.cuda.launch import MOST_SHARED, Function, Rendered
from spmd.compile.cuda.nvrtc import architectures, compile_cubin
from spmd.compile.kernel.dtypes import DTYPES
from spmd.compile.kernel.matmul import Operand, Product, c_strides, store_epilogue
from tests.compile.cuda.emulated import Emulator
from tests.compile.kernel.interpret_products import interpret_product
from tests.compile.kernel.op_kernels import assert_close
from tests.compile.kernel.random_products import ProductCase, random_product


def product_of(
    m: int,
    n: int,
    k: int,
    dtype: str = "bf16",
    left: str = "rows",
    right: str = "rows",
    result: str = "rows",
    stored: str = "f32",
    batch: tuple[int, ...] = (),
) -> Product:
    """A product of contiguous matrices, by rows or columns, that only stores."""

    def operand(by: str, rows: int, columns: int) -> Operand:
        strides = (columns, 1) if by == "rows" else (1, rows)
        return Operand(dtype, *strides, tuple(rows * columns for _ in batch))

    strides = c_strides(batch, m, n)
    strides = strides if result == "rows" else (*strides[:-2], 1, m)
    epilogue = store_epilogue(batch, m, n, "f32", stored, strides)
    return Product(m, n, k, operand(left, m, k), operand(right, k, n), "f32", epilogue, batch)


def case_of(product: Product) -> ProductCase:
    """A product with numbers."""
    rng, p = np.random.default_rng(0), product
    count = int(np.prod(p.batch))
    sizes = [(p.a.dtype, p.m * p.k), (p.b.dtype, p.k * p.n)]
    arrays = [rng.uniform(-1, 1, count * n).astype(DTYPES[dtype].numpy) for dtype, n in sizes]
    (_, out) = p.epilogue.args
    return ProductCase(p, [*arrays, np.zeros(out.size, DTYPES[out.dtype].numpy)])


def layouts(k: int) -> list[Product]:
    """Products whose operands and results lie by rows and by columns, in pairs of all kinds."""
    by = {"r": "rows", "c": "columns"}
    return [
        product_of(64, 32, k, left=by[left], right=by[right], result=by[result])
        for left, right, result in ("rrr", "rcc", "crc", "ccr")
    ]


LAYOUTS = layouts(40)
# Strides that allow copies of 16, 8, 4 and 2 bytes, and edges along all dims.
EDGES = [
    product_of(m, n, k, dtype, left, right, stored=dtype)
    for (m, n, k), dtype, left, right in (
        ((33, 40, 24), "bf16", "rows", "columns"),
        ((65, 36, 100), "f16", "rows", "rows"),
        ((37, 41, 35), "f16", "rows", "columns"),
        ((37, 41, 35), "f16", "columns", "rows"),
        ((8, 8, 1), "bf16", "rows", "rows"),
        ((9, 33, 0), "bf16", "rows", "rows"),
    )
]
BATCHES = [product_of(33, 32, 48, batch=batch) for batch in ((3,), (2, 3))]
# A depth of several rounds of the slabs, with padding behind the rows of A.
GAPS = replace(product_of(32, 32, 250), a=Operand("bf16", 256, 1))


# Random products of both dtypes, with epilogues of several results, biases and activations.
WITH_EPILOGUES = [
    random_product(203, (40, 70, 33)),
    random_product(205, (64, 9, 32)),
    random_product(228, (31, 64, 70)),
]


# Factors of float32 that may be rounded: all layouts, copies of 16 and 4 bytes, edges, no depth.
TF32 = [
    replace(product_of(m, n, k, "f32", left, right, batch=batch), tf32=True)
    for (m, n, k), left, right, batch in (
        ((64, 32, 40), "rows", "rows", ()),
        ((64, 32, 40), "columns", "columns", (2,)),
        ((37, 41, 35), "columns", "rows", ()),
        ((65, 36, 100), "rows", "columns", ()),
        ((9, 33, 0), "rows", "rows", ()),
    )
]


@functools.cache
def cases() -> list[ProductCase]:
    gaps = ProductCase(GAPS, case_of(replace(GAPS, k=256)).arrays)
    return [*map(case_of, (*LAYOUTS, *EDGES, *BATCHES, *TF32)), gaps, *WITH_EPILOGUES]


def in_tf32(x: np.ndarray) -> np.ndarray:
    """Numbers rounded to TF32."""
    bits = x.view(np.uint32) + np.uint32(1 << 12)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def assert_values(all_cases: list[ProductCase], rendered: list[Rendered], mode="checked") -> None:
    functions = [function for each in rendered for function in each.functions]
    emulator = Emulator(functions)
    for case, each in zip(all_cases, rendered, strict=True):
        expected, got = [x.copy() for x in case.arrays], [x.copy() for x in case.arrays]
        factors = map(in_tf32, expected[:2]) if case.product.tf32 else expected[:2]
        interpret_product(case.product, *factors, *expected[2:])
        emulator.run(each, got)
        with np.errstate(all="ignore"):
            assert_close(case.product.epilogue, expected[1:], got[1:], loose=4)


def test_products_give_the_values_of_the_interpreter():
    assert all(tensor_product.takes(case.product) for case in cases())
    rendered = [render_product(case.product) for case in cases()]
    texts = [function.text for each in rendered for function in each.functions]
    assert all("on tensor cores" in text for text in texts)
    for nbytes in (16, 8, 4):
        assert any(f"copy_async<{nbytes}>" in text for text in texts)
    assert any("? a[" in text and "? b[" in text for text in texts)
    assert_values(cases(), rendered)


@pytest.mark.parametrize("shape", tensor_product.SHAPES[:2])
def test_larger_tiles_give_them(shape, monkeypatch):
    monkeypatch.setattr(tensor_product, "SHAPES", (shape,))
    rows, columns = case_of(product_of(130, 140, 72, batch=(2,))), case_of(LAYOUTS[2])
    chosen = [rows, columns, case_of(TF32[3])]
    assert_values(chosen, [render_product(case.product) for case in chosen])


def test_operands_may_begin_anywhere():
    alignments = 8, 4, 2
    chosen = [case_of(LAYOUTS[number]) for number in (0, 1, 2)]
    rendered = [
        render_product(case.product, alignment)
        for case, alignment in zip(chosen, alignments, strict=True)
    ]
    for each, alignment in zip(rendered, alignments, strict=True):
        widths = re.findall(r"copy_async<(\d+)>", each.functions[0].text)
        assert set(widths) == {str(alignment)} - {"2"}
    assert_values(chosen, rendered)


def test_many_blocks_have_each_tile_once(monkeypatch):
    """More rows of tiles than run together, the last of them fewer."""
    monkeypatch.setattr(tensor_product, "ROWS_TOGETHER", 3)
    case = case_of(product_of(32 * 7, 32 * 3, 8, batch=(2,)))
    assert_values([case], [render_product(case.product)])


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_errors_are_those_of_sums_in_f32(dtype):
    """Products of two elements are exact in f32: `docs/accuracy.md` has the bound of their sum."""
    case = case_of(product_of(48, 40, 1000, dtype))
    rendered = render_product(case.product)
    got = [x.copy() for x in case.arrays]
    Emulator(rendered.functions, mode="plain").run(rendered, got)
    a, b = (x.astype(np.float64) for x in case.arrays[:2])
    a, b = a.reshape(48, 1000), b.reshape(1000, 40)
    bound = 1000 * 2.0**-23 * (abs(a) @ abs(b))
    assert np.all(abs(got[2].reshape(48, 40) - a @ b) <= bound)


# ---- mistakes ----------------------------------------------------------------------------------

_WAIT = re.compile(r"wait_for_copies<(\d)>\(\);")
_REMOVED = re.compile(r"__syncthreads\(\);|commit_copies\(\);|wait_for_copies<\d>\(\);")


def mutants(function: Function) -> Iterator[Function]:
    """The text without each barrier, wait, and end of a group; with a wait for fewer copies."""
    text = function.text
    cuts = [(match.start(), match.end(), "") for match in _REMOVED.finditer(text)]
    cuts += [(m.start(1), m.end(1), str(int(m[1]) + 1)) for m in _WAIT.finditer(text)]
    for number, (start, end, into) in enumerate(cuts):
        symbol = f"{function.symbol}_{number}"
        broken = text[:start] + into + text[end:]
        yield replace(function, symbol=symbol, text=broken.replace(function.symbol, symbol))


def test_each_barrier_and_each_wait_is_needed():
    # Five slabs, of which four are in shared memory at once, and two by elements.
    tf32 = replace(product_of(32, 32, 80, "f32"), tf32=True)
    chosen = [case_of(p) for p in (product_of(32, 32, 160), tf32, EDGES[2])]
    found = [
        (case, mutant)
        for case in chosen
        for mutant in mutants(*render_product(case.product).functions)
    ]
    assert len(found) == 6 + 6 + 3
    emulator = Emulator([mutant for _, mutant in found])
    for case, mutant in found:
        with pytest.raises(CudaError, match=r"no barrier between|nothing waits for that"):
            emulator.run(Rendered((mutant,)), [x.copy() for x in case.arrays])


# ---- costs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "tf32"])
@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_nothing_moves_twice(number, dtype):
    """Sectors and wavefronts are the least in each layout; each slab is read once a block."""
    p = layouts(32)[number]
    if dtype == "tf32":
        a, b = (replace(operand, dtype="f32") for operand in (p.a, p.b))
        p = replace(p, a=a, b=b, tf32=True)
    rendered = render_product(p)
    (traffic,) = Emulator(rendered.functions, mode="counted").run(rendered, case_of(p).arrays)
    assert traffic is not None and traffic.counted == traffic.accesses
    for space in ("global", "shared"):
        moved, least = traffic.total(space)
        assert moved == least
    blocks = rendered.functions[0].launch.grid
    read = blocks * (32 + 32) * p.k * (2 if dtype == "bf16" else 4)
    assert traffic.total("global")[0] * 32 == read + 4 * p.m * p.n


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "newest"])
def test_they_compile_without_spills(arch):
    arch = f"sm_{architectures()[-1]}" if arch == "newest" else arch
    large = [
        product_of(4096, 4096, 4096, dtype, left, right, stored=dtype)
        for dtype, left, right in (("bf16", "rows", "rows"), ("f16", "columns", "columns"))
    ]
    large += [product_of(4095, 4097, 4099), product_of(1024, 1024, 64)]
    large += [
        replace(product_of(n, n, n, "f32", by, by), tf32=True)
        for n in (4096, 4097)
        for by in ("rows", "columns")
    ]
    products = [*large, WITH_EPILOGUES[0].product]
    functions = [f for product in products for f in render_product(product).functions]
    usage = compile_cubin(module_text(functions), arch).usage
    for function in functions:
        found = usage[function.symbol]
        assert found.spill_stores == found.spill_loads == 0, function.text
        assert function.launch.shared <= MOST_SHARED
        # Two blocks of a multiprocessor run at the same time, one waits while one computes.
        assert 2 * found.registers * function.launch.threads <= 65536


def test_large_products_have_large_tiles_and_small_ones_enough_blocks():
    def tile(m: int, n: int) -> tuple[int, int, tuple[int, ...]]:
        tiling = tensor_product.plan_tiles(product_of(m, n, 64))
        return tiling.tall, tiling.wide, tiling.grid

    assert tile(8192, 8192) == (128, 128, (64, 64))
    assert tile(2048, 1024) == (64, 64, (32, 16))
    assert tile(512, 512) == (32, 32, (16, 16))
    assert tile(20, 4096) == (32, 32, (1, 128))


def test_other_dtypes_have_the_tiles_of_plain_arithmetic():
    for dtype, other in (("f32", "f32"), ("bf16", "f32"), ("f16", "bf16")):
        p = replace(product_of(64, 64, 64, dtype), b=Operand(other, 64, 1))
        (function,) = render_product(p).functions
        assert "multiply_tiles" not in function.text
