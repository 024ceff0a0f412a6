"""B packed in a step of its own: the panels, and the products that read them."""

import numpy as np
import pytest

from spmd.base.config import config
from spmd.compile.cpu.matmul import plan as matmul_plan
from spmd.compile.cpu.matmul.plan import packing_step, plan_packing, plan_product, prefers_packed
from spmd.compile.kernel.check import KernelError
from spmd.compile.kernel.dtypes import DTYPES as KERNEL_DTYPES
from spmd.compile.kernel.matmul import Product, check_product
from spmd.compile.kernel.packing import Packing
from spmd.compile.native.llvm.compiler import compile_texts
from spmd.compile.native.program.steps import KernelStep, Program, Slot
from spmd.compile.native.runtime.run import build_program
from tests.compile.cpu.matmul.test_plan import (
    BF16,
    DTYPES,
    LAYOUTS,
    assert_product,
    matmul_step,
    matrix,
    operand,
    product_of,
)
from tests.compile.kernel.interpret_products import interpret_packing, interpret_product
from tests.compile.native.programs import address


def run(steps: tuple[KernelStep, ...], arrays: list[np.ndarray]) -> None:
    native = build_program(Program((None,) * len(arrays), steps))
    frames = native.new_frames()
    frames[: len(arrays)] = [address(array) for array in arrays]
    native.run(frames)


def native_packing(packing: Packing, source: np.ndarray) -> np.ndarray:
    """The panels as the generated code writes them."""
    target = np.zeros(packing.size, KERNEL_DTYPES[packing.carried].numpy)
    plan = plan_packing(packing)
    addresses = compile_texts(plan.texts, optimize=True)
    run((packing_step(plan, addresses, (Slot(0), Slot(1))),), [source, target])
    return target


def defined(packing: Packing, panels: np.ndarray) -> np.ndarray:
    """The columns of panels that are those of B: what is behind the last may be anything."""
    whole = panels.reshape(-1, packing.panels, packing.k, packing.panel).swapaxes(-2, -3)
    return whole.reshape(-1, packing.k, packing.panels * packing.panel)[..., : packing.n]


@pytest.mark.parametrize("dtype", [np.dtype("f4"), np.dtype("f8"), BF16, np.dtype("f2")], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_panels_are_what_the_interpreter_says(dtype, layout):
    rng = np.random.default_rng(3)
    for shape in ((5, 7), (70, 90), (130, 33), (1, 200), (2, 9, 40), (2, 3, 1, 17, 50)):
        b = matrix(rng, shape, dtype, layout)
        *batch, k, n = shape
        carried = "f64" if dtype == np.float64 else "f32"
        packing = Packing(k, n, operand(b), carried, (16, 32, 64)[k % 3], tuple(batch[-3:]))
        expected = np.zeros(packing.size, KERNEL_DTYPES[carried].numpy)
        flat = b if b.base is None else b.base
        start = (address(b) - address(flat)) // b.itemsize
        if layout != "backwards":
            interpret_packing(packing, flat.reshape(-1)[start:], expected)
            found = native_packing(packing, b)
            np.testing.assert_array_equal(defined(packing, found), defined(packing, expected))
        else:
            found = defined(packing, native_packing(packing, b))
            np.testing.assert_array_equal(found.reshape(shape), b.astype(found.dtype))


def packed_product(a: np.ndarray, b: np.ndarray, c: np.ndarray, rounds: int = 100) -> bool:
    """c[...] = a @ b with B (or, in the transpose, A) packed first; whether that is wanted."""
    found = prefers_packed(product_of(a, b, c), rounds)
    if found is None:
        return False
    made, packing, swapped = found
    check_product(made)
    plans = plan_packing(packing), plan_product(made)
    texts = [text for plan in plans for text in plan.texts]
    addresses = compile_texts(texts, optimize=True)
    addresses |= compile_texts([r.text for r in plans[1].epilogues])
    left, right = (1, 0) if swapped else (0, 1)
    steps = (
        packing_step(plans[0], addresses, (Slot(right), Slot(3))),
        matmul_plan.product_step(plans[1], addresses, (Slot(left), Slot(3), Slot(2))),
    )
    panels = np.full(packing.size, np.nan, KERNEL_DTYPES[packing.carried].numpy)
    run(steps, [a, b, c, panels])
    return True


def test_products_of_panels():
    rng = np.random.default_rng(11)
    wanted = 0
    for _ in range(120):
        m, n, k = (int(2 ** rng.uniform(2, 8)) for _ in range(3))
        batch = ((), (), (3,), (2, 2))[rng.integers(4)]
        source, result = DTYPES[rng.integers(len(DTYPES))]
        a_layout, b_layout = rng.choice(LAYOUTS, 2)
        a = matrix(rng, (*batch, m, k), source, a_layout)
        b = matrix(rng, (*batch, k, n), source, b_layout)
        if batch and rng.integers(2):
            b = np.broadcast_to(b[(0,) * len(batch)], b.shape)
        c = matrix(rng, (*batch, m, n), result, rng.choice(LAYOUTS[:3]))
        if packed_product(a, b, c):
            wanted += 1
            assert_product(c, a, b)
    assert wanted > 40


def test_packing_changes_no_bit():
    rng = np.random.default_rng(2)
    for m, n, k in ((150, 90, 400), (97, 33, 1000), (30, 200, 70)):
        a, b = matrix(rng, (m, k), "f4", "rows"), matrix(rng, (k, n), "f4", "columns")
        plain, packed = np.zeros((m, n), np.float32), np.zeros((m, n), np.float32)
        p = product_of(a, b, plain)
        run((matmul_step(p, (Slot(0), Slot(1), Slot(2))),), [a, b, plain])
        assert packed_product(a, b, packed)
        np.testing.assert_array_equal(plain, packed)


def test_the_bits_do_not_depend_on_threads(monkeypatch):
    rng = np.random.default_rng(1)
    a, b = matrix(rng, (300, 600), "f4", "rows"), matrix(rng, (600, 280), "f4", "rows")
    results = set()
    for threads in (1, 2, 4):
        monkeypatch.setattr(matmul_plan, "available_cores", lambda threads=threads: threads)
        with config.override("num_threads", threads):
            c = np.zeros((300, 280), np.float32)
            assert packed_product(a, b, c)
            results.add(c.tobytes())
    assert len(results) == 1


def test_the_interpreter_reads_panels():
    rng = np.random.default_rng(4)
    a, b = matrix(rng, (40, 30), "f4", "rows"), matrix(rng, (30, 75), "f4", "columns")
    c = np.zeros((40, 75), np.float32)
    found = prefers_packed(product_of(a, b, c), 10)
    assert found is not None
    made, packing, swapped = found
    assert not swapped
    panels = np.zeros(packing.size, np.float32)
    interpret_packing(packing, b.ravel(order="K"), panels)
    interpret_product(made, a.reshape(-1), panels, c.reshape(-1))
    np.testing.assert_allclose(c, a @ b, rtol=1e-5, atol=1e-5)


def test_only_b_has_panels():
    x = np.zeros((40, 40), np.float32)
    p = product_of(x, x, x)
    panels = Packing(40, 40, p.b, "f32", 32).target
    check_product(Product(40, 40, 40, p.a, panels, "f32", p.epilogue))
    with pytest.raises(KernelError, match="only B has any"):
        check_product(Product(40, 40, 40, panels, p.b, "f32", p.epilogue))
    with pytest.raises(ValueError, match="no transpose"):
        _ = panels.transposed


def test_an_operand_that_one_block_reads_is_not_packed():
    small, large = np.zeros((64, 64), np.float32), np.zeros((2048, 2048), np.float32)
    assert prefers_packed(product_of(small, small, small), 1) is None
    assert prefers_packed(product_of(small, small.T, small), 1) is None
    assert prefers_packed(product_of(small, small.T, small), 50) is not None
    assert prefers_packed(product_of(large[:2], large, large[:2]), 50) is None
