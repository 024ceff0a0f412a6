"""Matrix products against NumPy: shapes, strides, batches, dtypes, threads, processors."""

from collections.abc import Sequence
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

from spmd.base.config import config
from spmd.compile.cpu.matmul import plan as matmul_plan
from spmd.compile.cpu.matmul.plan import orient, plan_product, product_step
from spmd.compile.cpu.matmul.tile_asm import can_assemble
from spmd.compile.kernel.builder import Builder
from spmd.compile.kernel.dtypes import kernel_dtype
from spmd.compile.kernel.matmul import (
    Operand,
    Product,
    argument_maps,
    c_strides,
    product_dtype,
    store_epilogue,
)
from spmd.compile.native.llvm.compiler import Host, compile_texts, loader
from spmd.compile.native.llvm.modules import CONTROL, is_control, symbols_of
from spmd.compile.native.program.steps import KernelStep, Program, Slot
from spmd.compile.native.runtime.run import build_program
from tests.compile.kernel.interpret_products import interpret_product
from tests.compile.native.programs import address

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [
    (np.dtype(np.float32), np.dtype(np.float32)),
    (np.dtype(np.float64), np.dtype(np.float64)),
    (BF16, BF16),
    (BF16, np.dtype(np.float32)),
    (np.dtype(np.float16), np.dtype(np.float16)),
    (np.dtype(np.float16), np.dtype(np.float32)),
]

# m, n, k: around register tiles (6 x 64, 8 x 48, 8 x 32; 6 x 16), blocks (192, 256), vectors and
# nothing.
SHAPES = [
    (1, 1, 1),
    (2, 3, 4),
    (12, 32, 8),
    (13, 33, 17),
    (24, 64, 9),
    (25, 48, 2),
    (31, 129, 35),
    (11, 31, 513),
    (5, 16, 1100),
    (200, 10, 64),
    (193, 65, 530),
    (3, 1300, 20),
    (1, 200, 75),
    (2, 200, 75),
    (200, 1, 75),
    (64, 1, 1000),
    (0, 4, 3),
    (4, 0, 3),
    (7, 5, 0),
]


def operand(array: np.ndarray) -> Operand:
    strides = [s // array.itemsize for s in array.strides]
    return Operand(kernel_dtype(array.dtype), strides[-2], strides[-1], tuple(strides[:-2]))


def product_of(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> Product:
    """The product that stores into c, which may be laid out in any way but backwards."""
    *batch, m, n = c.shape
    carried = product_dtype(kernel_dtype(a.dtype), kernel_dtype(c.dtype))
    strides = [s // c.itemsize for s in c.strides]
    epilogue = store_epilogue(batch, m, n, carried, kernel_dtype(c.dtype), strides)
    return Product(m, n, a.shape[-1], operand(a), operand(b), carried, epilogue, tuple(batch))


def matmul_step(product: Product, slots: Sequence[Slot]) -> KernelStep:
    """The step of one product, compiled.

    The slots are the addresses of the elements [0, 0] of A and B (with negative strides not the
    lowest) and of the epilogue's arguments. Its results must not overlap A or B.
    """
    plan = plan_product(product)
    addresses = compile_texts(plan.texts, optimize=True)
    addresses = addresses | compile_texts([r.text for r in plan.epilogues])
    return product_step(plan, addresses, slots, "dot")


def multiply(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    """c[...] = a @ b by the generated kernel."""
    step = matmul_step(product_of(a, b, c), (Slot(0), Slot(1), Slot(2)))
    native = build_program(Program((None, None, None), (step,)))
    frames = native.new_frames()
    frames[:3] = [address(a), address(b), address(c)]
    native.run(frames)


def matrix(rng, shape, dtype, layout: str) -> np.ndarray:
    """Random numbers laid out by rows, by columns, in a larger array, or backwards."""
    *batch, rows, columns = shape
    if layout == "columns":
        return rng.standard_normal((*batch, columns, rows)).astype(dtype).swapaxes(-1, -2)
    if layout == "sliced":
        larger = rng.standard_normal((*batch, 2 * rows + 1, 3 * columns + 1)).astype(dtype)
        return larger[..., 1 : 2 * rows + 1 : 2, 1 : 3 * columns + 1 : 3]
    values = rng.standard_normal(shape).astype(dtype)
    return values[..., ::-1, ::-1] if layout == "backwards" else values


def assert_product(actual: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    exact = a.astype(np.float64) @ b.astype(np.float64)
    # A bound on the sum's rounding from the magnitudes, and one rounding of the result.
    scale = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64))
    summed = np.finfo(np.float64 if a.dtype == np.float64 else np.float32).eps
    rounded = float(ml_dtypes.finfo(actual.dtype).eps)
    bound = summed * np.sqrt(a.shape[-1] + 1) * 4 * scale + rounded * np.abs(exact)
    difference = np.abs(actual.astype(np.float64) - exact)
    assert (difference <= bound).all(), f"off by {np.max(difference - bound)} over the bound"


@pytest.mark.parametrize("m, n, k", SHAPES)
@pytest.mark.parametrize("source, result", DTYPES, ids=lambda d: d.name)
def test_products_of_all_shapes_and_dtypes_are_those_of_numpy(m, n, k, source, result):
    rng = np.random.default_rng(m + n + k)
    a, b = matrix(rng, (m, k), source, "rows"), matrix(rng, (k, n), source, "rows")
    c = np.full((m, n), np.nan, result)
    multiply(a, b, c)
    assert_product(c, a, b)


LAYOUTS = ("rows", "columns", "sliced", "backwards")


@pytest.mark.parametrize("a_layout", LAYOUTS)
@pytest.mark.parametrize("b_layout", LAYOUTS)
@pytest.mark.parametrize("c_layout", LAYOUTS[:3])
def test_products_of_any_strides_are_those_of_numpy(a_layout, b_layout, c_layout):
    rng = np.random.default_rng(7)
    for m, n, k in ((14, 35, 21), (1, 40, 33), (40, 1, 33), (70, 90, 600)):
        a, b = matrix(rng, (m, k), np.float32, a_layout), matrix(rng, (k, n), np.float32, b_layout)
        c = matrix(rng, (m, n), np.float32, c_layout)
        multiply(a, b, c)
        assert_product(c, a, b)


@pytest.mark.parametrize(
    "m, n, k, layout, packed",
    [
        (200, 200, 700, "rows", False),
        (800, 200, 1500, "rows", True),  # rows lie too far apart
        (300, 100, 41, "columns", False),
        (900, 100, 41, "columns", True),
        (900, 90, 41, "columns", False),  # too few columns of B to be worth packing A
    ],
)
def test_a_is_read_where_it_lies_or_packed(m, n, k, layout, packed):
    rng = np.random.default_rng(m + k)
    a, b = matrix(rng, (m, k), np.float32, layout), matrix(rng, (k, n), np.float32, "rows")
    c = np.full((m, n), np.nan, np.float32)
    plan = plan_product(product_of(a, b, c))
    assert ("lay_a" in plan.functions) == packed
    multiply(a, b, c)
    assert_product(c, a, b)


def test_random_products_are_those_of_numpy():
    rng = np.random.default_rng(11)
    for _ in range(150):
        m, n, k = (int(2 ** rng.uniform(0, 7.5)) for _ in range(3))
        source, result = DTYPES[rng.integers(len(DTYPES))]
        a_layout, b_layout = rng.choice(LAYOUTS, 2)
        c_layout = rng.choice(LAYOUTS[:3])
        a, b = matrix(rng, (m, k), source, a_layout), matrix(rng, (k, n), source, b_layout)
        c = matrix(rng, (m, n), result, c_layout)
        multiply(a, b, c)
        assert_product(c, a, b)


@pytest.mark.parametrize("batch", [(0,), (1,), (5,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("m, n, k", [(9, 20, 8), (1, 30, 6), (30, 1, 6)])
def test_batches_of_products_are_those_of_numpy(batch, m, n, k):
    rng = np.random.default_rng(3)
    a, b = (
        matrix(rng, (*batch, m, k), np.float32, "rows"),
        matrix(rng, (*batch, k, n), "f4", "rows"),
    )
    c = np.zeros((*batch, m, n), np.float32)
    multiply(a, b, c)
    assert_product(c, a, b)


def test_batch_dims_may_be_in_the_middle_or_broadcast():
    """The products of attention: heads lie between sequence and feature, keys are shared."""
    rng = np.random.default_rng(5)
    queries = rng.standard_normal((2, 10, 4, 16)).astype(np.float32).transpose(0, 2, 1, 3)
    keys = rng.standard_normal((2, 12, 1, 16)).astype(np.float32).transpose(0, 2, 3, 1)
    keys = np.broadcast_to(keys, (2, 4, 16, 12))
    scores = np.zeros((2, 10, 4, 12), np.float32).transpose(0, 2, 1, 3)
    multiply(queries, keys, scores)
    assert_product(scores, queries, keys)


def test_nothing_outside_the_result_is_written():
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((2, 37, 41)).astype(np.float32)[:, :, :29], None
    b = rng.standard_normal((2, 29, 53)).astype(np.float32)
    frame = np.full((2, 45, 61), np.float32(-7))
    multiply(a, b, frame[:, 4:41, 4:57])
    inside = np.zeros(frame.shape, bool)
    inside[:, 4:41, 4:57] = True
    assert (frame[~inside] == -7).all()
    assert_product(frame[:, 4:41, 4:57], a, b)


def test_nan_and_inf_stay_in_their_rows_and_columns():
    a, b = np.ones((40, 20), np.float32), np.ones((20, 50), np.float32)
    a[3, 5], b[7, 11] = np.nan, np.inf
    c = np.zeros((40, 50), np.float32)
    multiply(a, b, c)
    expected = np.full((40, 50), 20, np.float32)
    expected[:, 11] = np.inf
    expected[3] = np.nan
    np.testing.assert_array_equal(c, expected)


@pytest.mark.parametrize(
    "m, n, k",
    [
        (300, 280, 600),
        (1, 5000, 300),
        (3000, 1, 300),
        (8, 1000, 530),
        (20, 700, 530),
        (300, 900, 16),
    ],
)
def test_the_bits_do_not_depend_on_threads(m, n, k, monkeypatch):
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((m, k)).astype("f4"), rng.standard_normal((k, n)).astype("f4")
    results = set()
    for threads in (1, 2, 4):
        monkeypatch.setattr(matmul_plan, "available_cores", lambda threads=threads: threads)
        with config.override("num_threads", threads):
            c = np.zeros((m, n), np.float32)
            multiply(a, b, c)
            results.add(c.tobytes())
    assert len(results) == 1


@pytest.mark.parametrize(
    "features, vector_bytes", [("+avx2,+fma", 32), ("+avx2", 32), ("+sse4.2", 16)]
)
def test_code_for_smaller_processors_gives_the_same_products(features, vector_bytes, monkeypatch):
    """The tiles of other processors run here too, on wider registers than they need."""
    machine = Host("x86-64", features, loader.host.llvm_version)
    assert machine.vector_bytes == vector_bytes
    monkeypatch.setattr(matmul_plan, "host", lambda: machine)
    rng = np.random.default_rng(9)
    for source, result in ((np.float32, np.float32), (np.float64, np.float64), (BF16, BF16)):
        for m, n, k in ((25, 40, 70), (1, 70, 20), (70, 1, 45)):
            for layout in ("rows", "columns"):
                a, b = matrix(rng, (m, k), source, layout), matrix(rng, (k, n), source, layout)
                c = np.zeros((m, n), result)
                multiply(a, b, c)
                assert_product(c, a, b)


def test_the_transpose_is_chosen_for_columns():
    x = np.zeros((64, 64), np.float32)
    assert orient(product_of(x, x, x)).a.column == 1
    turned = orient(product_of(x, x, x.T))
    assert argument_maps(turned.epilogue)[1].strides == (64, 1)


def test_blocks_share_large_products_and_leave_small_ones_whole():
    small, large = np.zeros((16, 16), np.float32), np.zeros((512, 512), np.float32)
    assert plan_product(product_of(small, small, small)).units == 1
    plan = plan_product(product_of(large, large, large))
    assert plan.units >= 4
    assert plan.sizes["mb"] * plan.sizes["m_blocks"] >= 512
    assert plan.sizes["nb"] * plan.sizes["n_blocks"] >= 512


def squares(size: int, *batch: int, dtype=np.float32) -> Product:
    a = np.zeros((*batch, size, size), dtype)
    return product_of(a, a, a)


@pytest.mark.parametrize("size", [32, 64])
def test_the_first_product_waits_for_one_tile_and_two_quick_texts(size):
    plan = plan_product(squares(size))
    (tile,) = [text for text in plan.texts if not text.startswith(CONTROL)]
    assert len(plan.texts) == 3
    assert {plan.functions["tile_whole"], plan.functions["tile_last"]} == set(symbols_of(tile))
    assert is_control((tile, True)) == can_assemble(loader.host)


def tiles_of(*products: Product) -> set[str]:
    """The register tiles that some products need."""
    plans = [plan_product(p) for p in products]
    return {plan.functions[name] for plan in plans for name in ("tile_whole", "tile_last")}


def test_products_of_a_program_share_their_tiles():
    """A training step of 64-256-128-10 on 128 examples, whatever lies by rows or by columns."""
    sizes, batch = (64, 256, 128, 10), 128
    x = [np.zeros((batch, size), np.float32) for size in sizes]
    w = [np.zeros((m, n), np.float32) for m, n in pairwise(sizes)]
    forward = [product_of(x[i], w[i], x[i + 1]) for i in range(3)]
    weights = [product_of(x[i].T, x[i + 1], w[i]) for i in range(3)]
    back = [product_of(x[i + 1], w[i].T, x[i]) for i in range(3)]
    assert len(tiles_of(*forward[:2], *weights[:2], *back)) == 1
    assert len(tiles_of(*forward, *weights, *back)) == 2


@pytest.mark.parametrize("layout", ["rows", "columns", "sliced"])
def test_a_tile_computes_fewer_rows_than_it_has(layout):
    """Rows that are missing are the last again, which is not added to C twice."""
    rng = np.random.default_rng(4)
    for m in range(1, 30):
        for k in (33, 600):
            a, b = matrix(rng, (m, k), np.float32, layout), matrix(rng, (k, 70), "f4", "rows")
            frame = np.full((m + 8, 70), np.float32(-7))
            multiply(a, b, frame[:m])
            assert_product(frame[:m], a, b)
            assert (frame[m:] == -7).all()


def test_long_products_of_even_depth_take_two_elements_a_round():
    def twice(m: int, n: int, k: int) -> bool:
        a, b, c = (np.zeros(shape, np.float32) for shape in ((m, k), (k, n), (m, n)))
        plan = plan_product(product_of(a, b, c))
        assert plan.sizes["kc"] % 2 == 0 or not plan.functions["tile_whole"].endswith("_by2")
        return plan.functions["tile_whole"].endswith("_by2")

    assert twice(512, 512, 512) and twice(512, 512, 514)
    assert not twice(512, 512, 513) and not twice(32, 32, 32)


@pytest.mark.parametrize("m", [3, 8, 13, 32])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_few_rows_stream_whole_rows_of_a_far_operand(m, dtype, monkeypatch):
    monkeypatch.setattr(matmul_plan, "available_cores", lambda: 2)
    rng = np.random.default_rng(m)
    for n, k, threads in ((602, 531, 2), (70_000, 9, 9)):
        a, b = matrix(rng, (m, k), dtype, "rows"), matrix(rng, (k, n), dtype, "rows")
        c = np.full((m, n), np.nan, dtype)
        sizes = plan_product(product_of(a, b, c)).sizes
        deep = 32 if m <= sizes["mr"] else 64  # the tile's rows depend on the vectors
        assert 0.9 * deep <= sizes["kc"] <= deep or sizes["kc"] >= k
        assert sizes["n_blocks"] <= threads * m and sizes["m_blocks"] == 1
        assert n > 602 or sizes["n_blocks"] == 2
        # Sums go to C all the time: a unit's part of it stays in a cache, however wide B is.
        assert m * sizes["nb"] * a.itemsize <= 2**19
        multiply(a, b, c)
        assert_product(c, a, b)
    near = np.zeros((200, 200), dtype)
    assert plan_product(product_of(near[:m], near, near[:m])).sizes["kc"] > 64


@pytest.mark.parametrize("n, packed", [(127, False), (128, False), (129, True)])
def test_a_small_operand_is_read_where_it_lies(n, packed):
    rng = np.random.default_rng(n)
    a, b = matrix(rng, (2, 130, 64), "f4", "rows"), matrix(rng, (2, 64, n), "f4", "rows")
    c = np.full((2, 130, n), np.nan, np.float32)
    assert ("pack_b" in plan_product(product_of(a, b, c)).functions) == packed
    multiply(a, b, c)
    assert_product(c, a, b)


def test_shallow_products_write_whole_rows():
    rng = np.random.default_rng(4)
    a, b = matrix(rng, (301, 16), "f4", "rows"), matrix(rng, (16, 1030), "f4", "rows")
    c = np.full((301, 1030), np.nan, np.float32)
    sizes = plan_product(product_of(a, b, c)).sizes
    assert sizes["n_blocks"] == 1 and sizes["mc"] <= 2 * sizes["mr"]
    multiply(a, b, c)
    assert_product(c, a, b)


def test_many_tiny_products_have_loops_that_are_optimized():
    tiny, larger = plan_product(squares(8, 1000)), plan_product(squares(64, 1000))
    assert not any(text.startswith(CONTROL) for text in tiny.texts)
    assert sum(text.startswith(CONTROL) for text in larger.texts) >= 2
    assert tiny.symbol != larger.symbol and tiny.functions["tiles"] != larger.functions["tiles"]


@pytest.mark.parametrize("m, n, k", [(32, 32, 5), (40, 70, 33), (64, 64, 64), (18, 20, 300)])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_small_products_have_the_bits_of_large_ones(m, n, k, batch, monkeypatch):
    rng = np.random.default_rng(m)
    a = matrix(rng, (*batch, m, k), np.float32, "rows")
    b = matrix(rng, (*batch, k, n), np.float32, "rows")
    results = []
    for long, tiny in ((2**40, 2**13), (0, 0), (2**40, 2**40)):
        monkeypatch.setattr(matmul_plan, "LONG_PRODUCT", long)
        monkeypatch.setattr(matmul_plan, "TINY_PRODUCT", tiny)
        c = np.full((*batch, m, n), np.nan, np.float32)
        multiply(a, b, c)
        assert_product(c, a, b)
        results.append(c.tobytes())
    assert len(set(results)) == 1


# ---- epilogues ---------------------------------------------------------------------------------


def random_epilogue(rng, batch, m, n, carried: str, result: str):
    """An epilogue over C, a vector or matrix in any layout, with one or two results."""
    space = (*batch, m, n)
    size = int(np.prod(space))
    dense = c_strides(batch, m, n)
    turned = (*dense[:-2], 1, m)
    b = Builder((*batch, m), (n,))
    c = b.arg(carried, size)
    layouts = [dense, turned, (*(0,) * len(batch), 0, 1), (*(0,) * len(batch), 1, 0)]
    strides = layouts[rng.integers(len(layouts))]
    other = b.arg(result, size)
    outs = [b.arg(result, size, "out") for _ in range(1 + rng.integers(2))]
    with b.row():
        value = b.op("add", b.load(c, dense), b.convert(b.load(other, strides), carried))
        b.store(outs[0], turned if rng.integers(3) == 0 else dense, b.convert(value, result))
        for out in outs[1:]:
            b.store(out, dense, b.convert(b.op("tanh", value), result))
    return b.build()


def run_native(p: Product, arrays: list[np.ndarray]) -> None:
    step = matmul_step(p, [Slot(k) for k in range(len(arrays))])
    native = build_program(Program((None,) * len(arrays), (step,)))
    frames = native.new_frames()
    frames[: len(arrays)] = [address(array) for array in arrays]
    native.run(frames)


@pytest.mark.parametrize("seed", range(24))
def test_epilogues_are_what_the_interpreter_says(seed):
    rng = np.random.default_rng(seed)
    batch = ((), (3,), (2, 2))[seed % 3]
    m, n, k = (int(2 ** rng.uniform(0, 7)) for _ in range(3))
    if seed == 5:
        m, n, k = 500, 700, 40  # several blocks, the last ones cut
    source, result = DTYPES[seed % len(DTYPES)]
    carried = product_dtype(kernel_dtype(source), kernel_dtype(result))
    a = matrix(rng, (*batch, m, k), source, LAYOUTS[seed % 2])
    b = matrix(rng, (*batch, k, n), source, LAYOUTS[(seed // 2) % 2])
    epilogue = random_epilogue(rng, batch, m, n, carried, kernel_dtype(result))
    p = Product(m, n, k, operand(a), operand(b), carried, epilogue, batch)
    other = rng.standard_normal(m * n * int(np.prod(batch))).astype(result)
    outs = [np.zeros(other.size, result) for _ in epilogue.args[2:]]
    expected = [out.copy() for out in outs]
    run_native(p, [a, b, other, *outs])
    flat = [x.base if x.base is not None else x for x in (a, b)]
    interpret_product(p, *(x.reshape(-1) for x in flat), other, *expected)
    eps = float(ml_dtypes.finfo(result).eps)
    for out, wanted in zip(outs, expected, strict=True):
        actual, exact = out.astype(np.float64), wanted.astype(np.float64)
        bound = 4 * eps * np.abs(exact) + 1e-5 * np.sqrt(k + 1) * (carried == "f32") + 1e-12
        assert (np.abs(actual - exact) <= bound).all()


def test_a_bias_and_an_activation_cost_no_bits():
    """What the epilogue does to a block is what a kernel would do to the whole result."""
    rng = np.random.default_rng(6)
    a, b = rng.standard_normal((150, 90)).astype("f4"), rng.standard_normal((90, 70)).astype("f4")
    c = np.zeros((150, 70), np.float32)
    multiply(a, b, c)
    builder = Builder((150,), (70,))
    source, bias = builder.arg("f32", c.size), builder.arg("f32", 70)
    target = builder.arg("f32", c.size, "out")
    with builder.row():
        total = builder.op("add", builder.load(source, (70, 1)), builder.load(bias, (0, 1)))
        zero = builder.const(0.0, "f32")
        builder.store(target, (70, 1), builder.op("max", total, zero))
    p = Product(150, 70, 90, operand(a), operand(b), "f32", builder.build())
    bias = rng.standard_normal(70).astype(np.float32)
    out = np.zeros_like(c)
    run_native(p, [a, b, bias, out])
    np.testing.assert_array_equal(out, np.maximum(c + bias, 0))


@pytest.mark.parametrize("m", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("source", [np.dtype("f4"), BF16, np.dtype("f8")], ids=str)
def test_products_of_few_rows_take_every_layout(m, source):
    rng = np.random.default_rng(m)
    for n, k in ((77, 130), (1, 64), (300, 17), (9, 3)):
        for a_layout in LAYOUTS[:2]:
            for b_layout in LAYOUTS[:2]:
                a, b = matrix(rng, (m, k), source, a_layout), matrix(rng, (k, n), source, b_layout)
                c = np.full((m, n), np.nan, source)
                multiply(a, b, c)
                assert_product(c, a, b)
                turned = np.full((n, m), np.nan, source)
                multiply(b.T, a.T, turned)
                assert_product(turned, b.T, a.T)
