"""Windows along split dims: devices exchange the rows that they lack, values are those of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, debug, lax, nn
from spmd.partition.halos import Window
from spmd.sharding import AxisType

A = np.random.default_rng(0).standard_normal((1024, 64)).astype(np.float32)
ROW = A[0].nbytes
IMAGES = np.random.default_rng(1).standard_normal((2, 64, 64, 3)).astype(np.float32)
KERNEL = np.random.default_rng(2).standard_normal((3, 3, 3, 5)).astype(np.float32)
LINE = IMAGES[:, 0].nbytes


def mesh_of(count: int) -> spmd.Mesh:
    return spmd.make_mesh((count,), ("x",), AxisType.Auto, devices=spmd.devices()[:count])


def put(x: np.ndarray, count: int, *spec: Any) -> spmd.Array:
    return spmd.device_put(x, NamedSharding(mesh_of(count), P(*spec)))


def convolved(pad: str, stride: int = 1) -> Callable[[Any, Any], Any]:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lambda x, k: lax.conv_general_dilated(
        x, k, (stride, stride), pad, dimension_numbers=numbers
    )


def pooled(x: Any, kind: Any, start: Any, size: int, stride: int, pad: str) -> Any:
    return lax.reduce_window(x, start, kind, (1, size, size, 1), (1, stride, stride, 1), pad)


def same(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-4, atol=1e-4)


# What is computed of rows split over 4 devices, and the rows that a device receives.
ROWS: dict[str, tuple[Callable[[Any], Any], list[float]]] = {
    "three neighbours": (lambda a: snp.abs(a[1:-1] + a[2:] + a[:-2]).sum(0), [2]),
    "a step of the heat equation": (
        lambda a: snp.pad(a[1:-1] + 0.1 * (a[2:] - 2 * a[1:-1] + a[:-2]), ((1, 1), (0, 0))),
        [2, 1],
    ),
    "differences": (lambda a: (snp.diff(a, axis=0) ** 2).max(0), [1]),
    "a maximum of most rows": (lambda a: (-a[3:]).max(0), [3]),
    "a minimum of most rows": (lambda a: a[:-3].min(0), []),
    "the gradient of differences": (
        spmd.grad(lambda a: ((a[1:] - a[:-1]) ** 2).sum()),
        [1, 1],
    ),
    "every second row": (lambda a: a[::2] * a[1::2], []),
    "a product of shifted rows": (lambda a: a[1:].T @ a[:-1], [1]),
    "a padding with ones": (
        lambda a: snp.pad(a, ((2, 2), (0, 0)), constant_values=1.0)[2:-2], [2, 2, 1, 1],
    ),
    "a variance of most rows": (lambda a: snp.var(a[1:], axis=0), [1]),
    "a count": (lambda a: (a[1:] > a[:-1]).sum(0), [1]),
    "a softmax over most rows": (lambda a: (nn.softmax(a[2:], axis=0) ** 2).sum(0), [2]),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_devices_receive_the_rows_that_they_lack(name: str):
    f, rows = ROWS[name]
    given = put(A, 4, "x")
    moved = [c.received / ROW for c in debug.collectives(f)(given) if c.kind == "permute"]
    assert sorted(moved) == sorted(rows)
    others = [c for c in debug.collectives(f)(given) if c.kind != "permute"]
    assert all(c.kind == "all_reduce" for c in others)
    same(spmd.jit(f)(given), f(A))


PICTURES: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {
    "a convolution": (convolved("SAME"), {"permute": 2}),
    "with steps": (convolved("SAME", 2), {"permute": 1}),
    "two, with what follows": (
        lambda x, k: convolved("SAME")(nn.relu(convolved("SAME")(x, k))[..., :3], k),
        {"permute": 4},
    ),
    "the gradient of pictures": (
        spmd.grad(lambda x, k: (convolved("SAME")(x, k) ** 2).sum()),
        {"permute": 4},
    ),
    "the gradient with steps": (
        spmd.grad(lambda x, k: (convolved("SAME", 2)(x, k) ** 2).sum()),
        {"permute": 2},
    ),
    "without padding": (lambda x, k: convolved("VALID")(x, k).sum((0, 1)), {"permute": 1}),
    "pooling": (lambda x, k: pooled(x, lax.max, -np.inf, 2, 2, "VALID"), {}),
    "wide pooling": (lambda x, k: pooled(x, lax.max, -np.inf, 3, 1, "SAME"), {"permute": 2}),
    "averages": (lambda x, k: pooled(x, lax.add, 0.0, 3, 1, "SAME"), {"permute": 2}),
    "the gradient of averages": (
        spmd.grad(lambda x, k: (pooled(x, lax.add, 0.0, 3, 1, "SAME") ** 2).sum()),
        {"permute": 4},
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_that_are_split_along_their_height(name: str):
    f, expected = PICTURES[name]
    pictures = np.tile(IMAGES, (1, 4, 1, 1))
    given = put(pictures, 4, None, "x")
    found = Counter(c.kind for c in debug.collectives(f)(given, KERNEL))
    found.pop("all_reduce", None)
    assert found == expected
    same(spmd.jit(f)(given, KERNEL), f(pictures, KERNEL))


# The gradient of the kernel, of pictures split along their height over 4 devices: what is exchanged
# forward is not exchanged again.
KERNELS: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {
    "a convolution": (convolved("SAME"), {"permute": 2, "all_reduce": 1}),
    "with steps": (convolved("SAME", 2), {"permute": 1, "all_reduce": 1}),
    "with holes": (
        lambda x, k: lax.conv_general_dilated(
            x, k, (1, 1), "SAME", rhs_dilation=(2, 1), dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        {"permute": 2, "all_reduce": 1},
    ),
    "transposed": (
        lambda x, k: lax.conv_general_dilated(
            x, k, (1, 1), ((2, 1), (1, 1)), lhs_dilation=(2, 1),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        ),
        {"permute": 1, "all_reduce": 1},
    ),
    "by groups": (
        lambda x, k: lax.conv_general_dilated(
            x, k[:, :, :1, :3], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=3,
        ),
        {"permute": 2, "all_reduce": 1},
    ),
    "two": (
        lambda x, k: convolved("SAME")(nn.relu(convolved("SAME")(x, k))[..., :3], k),
        {"permute": 6, "all_reduce": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_the_gradient_of_a_kernel_is_one_sum(name: str):
    f, expected = KERNELS[name]
    slope = spmd.grad(lambda x, k: (f(x, k) ** 2).mean(), 1)
    given = put(IMAGES, 4, None, "x")
    assert Counter(c.kind for c in debug.collectives(slope)(given, KERNEL)) == expected
    for count in (2, 3, 4):
        pictures = IMAGES[:, : 60 if count == 3 else 64]
        given = put(pictures, count, None, "x")
        found = spmd.jit(slope)(given, KERNEL)
        np.testing.assert_allclose(found, spmd.jit(slope)(pictures, KERNEL), rtol=2e-4, atol=1e-5)


def test_a_nan_reaches_the_places_of_the_kernel_that_read_it():
    """Without padding parts of the result have different sizes, and the last row is read once."""
    pictures = IMAGES.copy()
    pictures[0, -1, 5, 1] = np.nan
    for pad in ("VALID", "SAME"):
        slope = spmd.grad(lambda x, k, pad=pad: (convolved(pad)(x, k) * 2.0).sum(), 1)
        found = np.asarray(spmd.jit(slope)(put(pictures, 4, None, "x"), KERNEL))
        expected = np.asarray(spmd.jit(slope)(pictures, KERNEL))
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
        assert 0 < np.isnan(found).sum() < found.size
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


def test_a_roll_moves_the_rows_that_leave_a_device():
    f = lambda a: snp.roll(a, 1, 0) + a  # noqa: E731
    given = put(A, 4, "x")
    found = {c.kind: c.received for c in debug.collectives(f)(given)}
    assert found == {"permute": ROW}
    same(spmd.jit(f)(given), f(A))
    assert spmd.jit(f)(given).sharding.spec == P("x")


def test_a_result_that_cannot_be_cut_evenly_leaves_the_program_whole_or_split_otherwise():
    column = put(A[:, 0].copy(), 4, "x")
    out = spmd.jit(lambda a: a[1:-1] * 2)(column)
    same(out, A[1:-1, 0] * 2)
    assert out.sharding.is_fully_replicated
    assert len(debug.collectives(lambda a: a[1:-1] + a[2:] + a[:-2])(column)) == 1
    rows = spmd.jit(lambda a: a[1:-1] * 2)(put(A, 4, "x"))
    same(rows, A[1:-1] * 2)


def test_an_inner_grid_is_updated_with_halos_alone():
    """Each step of Jacobi's method, and of its gradient, moves rows and columns of neighbours."""
    mesh = spmd.make_mesh((2, 2), ("x", "y"), AxisType.Auto, devices=spmd.devices()[:4])
    whole = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)

    def relaxed(u: Any) -> Any:
        def step(u: Any, _: Any) -> Any:
            near = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
            return u.at[1:-1, 1:-1].set(near / 4), None

        return lax.scan(step, u, None, 2)[0]

    u = spmd.device_put(whole, NamedSharding(mesh, P("x", "y")))
    for f in (relaxed, spmd.grad(lambda u: (relaxed(u) ** 2).sum())):
        found = debug.collectives(spmd.jit(f))(u)
        assert {c.kind for c in found} == {"permute"}
        # At most 26 rows or columns of 128 elements a step, forward and backward.
        assert sum(c.received * c.times for c in found) <= 2 * 26 * 128 * 4
        np.testing.assert_allclose(spmd.jit(f)(u), spmd.jit(f)(whole), rtol=1e-5, atol=1e-6)


def test_loops_over_parts_of_different_sizes():
    def f(a: Any) -> Any:
        def step(c: Any, _: Any) -> Any:
            return snp.pad((c[2:] + c[:-2]) / 2, ((1, 1), (0, 0))), c[1:-1]

        return lax.scan(step, a, None, length=3)

    given = put(A[:64], 4, "x")
    for found, expected in zip(spmd.jit(f)(given), f(A[:64]), strict=True):
        same(found, expected)
    g = lambda a: lax.cond(a[0, 0] > 0, lambda a: a[1:], lambda a: a[:-1] * 2, a)  # noqa: E731
    same(spmd.jit(g)(given), g(A[:64]))

    def h(a: Any) -> Any:
        return lax.fori_loop(0, 3, lambda k, c: snp.pad(c[1:], ((0, 1), (0, 0))), a)

    same(spmd.jit(h)(given), h(A[:64]))


# ---- against a slow twin -----------------------------------------------------------------------


@hypothesis.given(
    rows=st.integers(1, 40),
    first=st.integers(-4, 6),
    stride=st.integers(1, 3),
    span=st.integers(1, 4),
    count=st.integers(1, 8),
    data=st.data(),
)
def test_halos_are_what_results_read_and_no_more(
    rows: int, first: int, stride: int, span: int, count: int, data: Any
):
    results = data.draw(st.integers(1, 40))
    window = Window(0, rows, results, first, stride, span)
    own, made = window.parts(count)
    found = window.halos(count)
    assert found is not None
    before, behind = found
    lowest, highest = 0, 0
    for k in range(count):
        for row in range(k * made, min((k + 1) * made, results)):
            lowest = min(lowest, row * stride + first - k * own)
        if k * made < results:  # its part is computed whole, whatever is in the last rows
            last = ((k + 1) * made - 1) * stride + first + span
            highest = max(highest, last - (k + 1) * own)
    assert (before, behind) == (-lowest, highest)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_random_windows_on_parts_give_the_values_of_one_device(count: int):
    rng = np.random.default_rng(count)
    for _ in range(25):
        rows = int(rng.integers(2, 9)) * count
        x = rng.integers(-9, 9, (rows, 3)).astype(np.float32)
        low, high = (int(n) for n in rng.integers(0, max(2, rows // 5), 2))
        step, size = int(rng.integers(1, 3)), int(rng.integers(1, 4))
        weights = rng.integers(-3, 3, (4 * rows, 3)).astype(np.float32)

        def f(x: Any, step: int = step, low: int = low, high: int = high, size: int = size) -> Any:
            taken = x[low : len(x) - high : step] * 2
            padded = snp.pad(taken, ((high, low), (0, 0)), constant_values=3.0)
            sums = lax.reduce_window(padded, 0.0, lax.add, (size, 1), (1, 1), "SAME")
            joined = snp.concatenate([sums, padded[:1], x[:low]], axis=0)
            return joined, (joined * weights[: len(joined)]).sum(0), joined.max(0)  # noqa: B023

        def slope(x: Any) -> Any:
            return spmd.grad(lambda x: (f(x)[1] ** 2).sum())(x)

        given = put(x, count, "x")
        for found, expected in zip(spmd.jit(f)(given), f(x), strict=True):
            same(found, expected)
        same(spmd.jit(slope)(given), slope(x))
