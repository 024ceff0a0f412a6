"""Contractions over windows as launches on an emulated GPU, in checked mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd import numpy as snp
from spmd.base.config import config
from spmd.compile.cuda.kernel import module_text, render_contraction
from spmd.compile.cuda.launch import MOST_SHARED, SHARED_WITHOUT_ASKING, Rendered
from spmd.compile.cuda.nvrtc import compile_cubin
from spmd.compile.cuda.windows import is_narrow
from spmd.compile.kernel.builder import Builder
from spmd.compile.kernel.window_contraction import Contraction, Dims
from tests.compile.cpu.matmul.test_window_plan import image_case
from tests.compile.cuda.emulated import Emulator
from tests.compile.cuda.test_tensor_product import in_tf32
from tests.compile.kernel.interpret_products import interpret_contraction

# Images, their size, features, side of the window, columns: narrow ones, the edges of tiles, depths
# of less than a slab and of several.
IMAGES = [(1, 4, 1, 2, 1), (2, 6, 3, 3, 5), (1, 9, 4, 2, 16), (2, 7, 8, 3, 33), (1, 5, 30, 2, 66)]


@dataclass(eq=False)
class Case:
    """A contraction as launches, its arrays, and what they are to be afterwards."""

    given: Contraction
    rendered: Rendered
    arrays: list[np.ndarray]
    wanted: list[np.ndarray]

    def check(self, got: list[np.ndarray]) -> None:
        # Behind an epilogue the contraction's own result is nowhere.
        first = 2 if self.given.epilogue is None else 3
        for x, y in zip(got[first:], self.wanted[first:], strict=True):
            tolerance = 1e-4 if self.given.dtype == "f32" else 1e-12
            np.testing.assert_allclose(x, y, tolerance, tolerance)


def case(given: Contraction, a: np.ndarray, b: np.ndarray, size: int, *rest: np.ndarray) -> Case:
    arrays = [a, b, np.full(size, np.nan, a.dtype), *rest]
    wanted = [x.copy() for x in arrays]
    interpret_contraction(given, *wanted)
    return Case(given, render_contraction(given), arrays, wanted)


def epilogue(rows: int, columns: int):
    """Add a bias for each column, and what a second result has; keep both."""
    b = Builder((rows,), (columns,))
    c, bias, first, second = (
        b.arg("f32", rows * columns),
        b.arg("f32", columns),
        b.arg("f32", rows * columns, "inout"),
        b.arg("f64", rows * columns, "out"),
    )
    with b.row():
        x = b.op("add", b.load(c, (columns, 1)), b.load(bias, (0, 1)))
        y = b.op("add", x, b.load(first, (columns, 1)))
        b.store(first, (columns, 1), y)
        b.store(second, (columns, 1), b.convert(x, "f64"))
    return b.build()


def cases() -> list[Case]:
    rng = np.random.default_rng(0)
    found = []
    for dtype in ("float32", "float64"):
        for sizes in IMAGES:
            given, a, b = image_case(rng, dtype, *sizes)
            found.append(case(given, a, b, given.rows.count * given.columns))
    for sizes in ((2, 6, 3, 3, 5), (1, 7, 5, 2, 40)):
        given, a, b = image_case(rng, "float32", *sizes)
        rows, columns = given.rows.count, given.columns
        rest = [rng.normal(size=n).astype("f4") for n in (columns, rows * columns)]
        after = epilogue(rows, columns)
        given = Contraction(given.dtype, given.rows, given.depth, columns, epilogue=after)
        found.append(case(given, a, b, rows * columns, *rest, np.zeros(rows * columns)))
    for columns in (3, 9):  # groups side by side, and rows with gaps between
        given = Contraction(
            "f32",
            Dims((2, 9), (60, 2), (400, 10)),
            Dims((2, 3), (30, 1), (27, 9)),
            columns,
            (2, 120, 81, 200),
        )
        a, b = (rng.normal(size=n).astype("f4") for n in (300, 200))
        found.append(case(given, a, b, 700))
    # Only the outermost depth has any size: nothing is read, the sums are zero.
    nothing = Contraction("f32", Dims((3, 9), (9, 1), (90, 10)), Dims((0,), (1,), (1,)), 9)
    return [*found, case(nothing, a, b, 300)]


@pytest.mark.parametrize("mode", ["plain", "checked"])
def test_contractions_give_the_values_of_the_interpreter(mode):
    made = cases()
    narrow = sum(is_narrow(each.given) for each in made)
    assert 5 <= narrow <= len(made) - 5
    emulator = Emulator([f for each in made for f in each.rendered.functions], mode=mode)
    for each in made:
        got = [x.copy() for x in each.arrays]
        emulator.run(each.rendered, got)
        each.check(got)


def test_tensor_cores_give_the_values_of_factors_in_tf32():
    rng = np.random.default_rng(1)
    made = [each for each in cases() if each.given.dtype == "f32" and not is_narrow(each.given)]
    for sizes in ((2, 6, 8, 3, 16), (1, 9, 4, 3, 32)):
        given, a, b = image_case(rng, "float32", *sizes)
        made.append(case(given, a, b, given.rows.count * given.columns))
    # Rows side by side in A, as in images whose features come first.
    first = Contraction("f32", Dims((8, 8), (12, 1), (80, 10)), Dims((3, 4), (144, 12), (36, 9)), 9)
    made.append(case(first, *(rng.normal(size=n).astype("f4") for n in (600, 120)), 640))
    pairs = [*((each, 16) for each in made), *((each, 4) for each in made[-3:])]
    found = [
        (each, render_contraction(replace(each.given, tf32=True), alignment))
        for each, alignment in pairs
    ]
    texts = [function.text for _, rendered in found for function in rendered.functions]
    assert all("on tensor cores" in text for text in texts)
    for nbytes in (16, 8, 4):
        assert any(f"copy_async<{nbytes}>" in text for text in texts)
    assert any("load_tf32_fragment<8, true, true>" in text for text in texts)
    emulator = Emulator([f for _, rendered in found for f in rendered.functions])
    for each, rendered in found:
        got = [x.copy() for x in each.arrays]
        emulator.run(rendered, got)
        wanted = [*map(in_tf32, each.arrays[:2]), *(x.copy() for x in each.arrays[2:])]
        interpret_contraction(each.given, *wanted)
        replace(each, wanted=wanted).check(got)


@pytest.mark.parametrize("mode", ["plain", "checked"])
def test_strides_may_run_backwards_from_where_a_begins(mode):
    given = Contraction("f32", Dims((9, 2), (-4, 1), (20, 10)), Dims((3,), (1,), (9,)), 9)
    assert not is_narrow(given)
    (function,) = render_contraction(given).functions
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=n).astype("f4") for n in (36, 27))
    # Index zero of A is its element 32; NumPy takes the negative offsets from the end.
    wanted = np.zeros(180, "f4")
    interpret_contraction(given, np.roll(a, -32), b, wanted)
    emulator = Emulator([function], mode=mode)
    memory = emulator.gpu.memory
    places = [memory.allocate(x.nbytes) for x in (a, b, wanted)]
    views = [memory.view(p, x.nbytes, "") for p, x in zip(places, (a, b, wanted), strict=True)]
    for view, x in zip(views, (a, b, np.zeros_like(wanted)), strict=True):
        view[:] = x.view(np.uint8)
    places[0] += 4 * 32
    emulator.gpu.launch(emulator.kernels[function.symbol], function.launch, places)
    found = views[2].view("f4").copy()
    places[0] -= 4 * 32
    for place in places:
        memory.free(place)
    np.testing.assert_allclose(found, wanted, 1e-5, 1e-5)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_contractions_compile_without_spills(arch):
    rng = np.random.default_rng(0)
    large = [image_case(rng, dtype, 1, 66, 64, 3, 128)[0] for dtype in ("float32", "float64")]
    large += [
        replace(image_case(rng, "float32", *sizes)[0], tf32=True)
        for sizes in ((32, 66, 64, 3, 128), (8, 35, 3, 7, 64))
    ]
    rendered = [each.rendered for each in cases()] + [render_contraction(x) for x in large]
    functions = {f.symbol: f for each in rendered for f in each.functions}
    usage = compile_cubin(module_text(functions.values()), arch).usage
    for symbol, function in functions.items():
        assert usage[symbol].spill_stores == 0, function.text
        most = MOST_SHARED if "on tensor cores" in function.text else SHARED_WITHOUT_ASKING
        assert function.launch.shared <= most


def test_addresses_that_no_int_holds_are_long():
    far = Contraction("f32", Dims((9, 9), (1 << 30, 64), (90, 9)), Dims((3,), (1,), (9,)), 9)
    (function,) = render_contraction(far).functions
    assert "i64 *rows_at" in function.text


# ---- programs ----------------------------------------------------------------------------------

RNG = np.random.default_rng(0)


def conv(strides: tuple[int, ...], dilation: tuple[int, ...], groups: int) -> Callable[..., Any]:
    def call(x: Any, k: Any) -> Any:
        out = lax.conv_general_dilated(
            x, k, strides, "SAME", rhs_dilation=dilation, feature_group_count=groups
        )
        return snp.tanh(out) + 1

    return call


def last(x: Any, k: Any, bias: Any) -> Any:
    out = lax.conv_general_dilated(
        x, k, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return snp.maximum(out + bias, 0)


def pools(x: Any) -> Any:
    window, steps = (1, 1, 2, 3), (1, 1, 2, 2)
    most = lax.reduce_window(x, -np.inf, lax.max, window, steps, "SAME")
    return most, lax.reduce_window(x, 0.0, lax.add, window, steps, "VALID")


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


IMAGE, KERNEL, HALF = normal(2, 4, 7, 9), normal(6, 4, 3, 2), normal(6, 2, 3, 2)

PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "convolution": (conv((1, 1), (1, 1), 1), (IMAGE, KERNEL)),
    "with strides": (conv((2, 1), (1, 2), 1), (IMAGE, KERNEL)),
    "in groups": (conv((1, 1), (1, 1), 2), (IMAGE, HALF)),
    "of each channel": (conv((1, 1), (1, 1), 4), (IMAGE, normal(4, 1, 3, 3))),
    "with features last and an epilogue": (
        last,
        (normal(2, 6, 7, 5), normal(3, 2, 5, 20), normal(20)),
    ),
    "in bfloat16": (
        lambda x, k: conv((1, 1), (1, 1), 1)(x.astype(snp.bfloat16), k.astype(snp.bfloat16)),
        (IMAGE, KERNEL),
    ),
    "in one dim": (
        lambda x, k: lax.conv_general_dilated(x, k, (1,), [(2, 2)], lhs_dilation=(2,)),
        (normal(2, 3, 20), normal(8, 3, 4)),
    ),
    "transposed": (
        lambda x, k: lax.conv_transpose(
            x, k, (2, 2), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW")
        ),
        (IMAGE, KERNEL),
    ),
    "gradient": (
        spmd.grad(lambda x, k: conv((2, 1), (1, 1), 1)(x, k).sum(), (0, 1)),
        (IMAGE, KERNEL),
    ),
    "vmapped": (spmd.vmap(conv((1, 1), (1, 1), 1)), (normal(3, 2, 4, 5, 5), normal(3, 8, 4, 3, 3))),
    "pooling": (pools, (IMAGE,)),
    "gradient of pooling": (spmd.grad(lambda x: sum(y.sum() for y in pools(x))), (IMAGE,)),
}


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("precision", ["default", "highest"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_give_the_values_of_the_cpu_without_a_step_of_the_host(name, precision):
    function, args = PROGRAMS[name]
    with config.override("default_matmul_precision", precision):
        compiled = spmd.jit(function).lower(*args).compile()
    assert compiled.runtime_executable().backend.platform == "cuda"
    text = compiled.as_text()
    assert "host" not in text, text
    assert ("contract" in text) == ("pool" not in name and "each channel" not in name)
    with config.override("platform", "cpu"):
        wanted = spmd.jit(function)(*args)
    pairs = zip(*map(spmd.tree_util.tree_leaves, (compiled(*args), wanted)), strict=True)
    for found, value in pairs:
        assert found.device.platform == "gpu"
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        exact = precision == "highest" or "pool" in name
        tolerance = 2e-5 if value.dtype == np.float32 and exact else 2e-2
        single = np.asarray(found, np.float32), np.asarray(value, np.float32)
        np.testing.assert_allclose(*single, tolerance, tolerance)
