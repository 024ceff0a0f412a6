"""jit of arrays over all ranks' devices: every local shard is a slice of one device's result."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import spmd
import spmd.numpy as snp
from spmd import checkify, lax, nn
from tests.partition.programs import draw, draw_spec


def check(found: Any, expected: Any, what: str) -> None:
    """Raise if a local shard differs from the slice of the whole value."""
    pairs = zip(spmd.tree.leaves(found), spmd.tree.leaves(expected), strict=True)
    for one, other in pairs:
        assert one.shape == other.shape and one.dtype == other.dtype, what
        whole = np.asarray(other)
        for shard in one.addressable_shards:
            np.testing.assert_allclose(
                shard.data, whole[shard.index], rtol=2e-3, atol=2e-4, err_msg=what
            )


# Functions of 24 rows that are split over all devices.
STRATEGIES: dict[str, Callable[[Any], Any]] = {
    "rows of a map": lambda a: lax.map(lambda r: snp.sin(r) * r.sum(), a),
    "the gradient of a map": spmd.grad(
        lambda a: (lax.map(lambda r: snp.sin(r * a[0]), a) ** 2).sum()
    ),
    "attention": lambda a: nn.dot_product_attention(
        *[snp.sin(a * k).reshape(1, 24, 3, 4) for k in (1, 2, 3)], is_causal=True
    ),
    "the gradient of attention": spmd.grad(
        lambda a: (
            nn.dot_product_attention(
                *[snp.sin(a * k).reshape(1, 24, 3, 4) for k in (1, 2, 3)], is_causal=True
            )
            ** 2
        ).sum()
    ),
    "rolled over devices": lambda a: snp.roll(a, 13, 0) - snp.roll(a, -1, 0),
    "the gradient of a roll": spmd.grad(lambda a: (snp.roll(a, 5, 0) ** 3 * a).sum()),
    "sorted": lambda a: snp.sort(
        (snp.tile(a.reshape(-1), 1024) * snp.arange(294912) % 977).astype(np.int32)
    ),
    "a sum in a scan": lambda a: lax.scan(lambda c, r: (c + r * r, r[0]), snp.zeros(12), a),
}


def untyped_maps(mesh: spmd.Mesh, x: np.ndarray, y: Any) -> None:
    """A map without types, whose rows all ranks add up, with work around it."""
    axes, count = mesh.axis_names, mesh.size

    def body(a: Any) -> Any:
        return a * lax.axis_index(axes) + lax.psum(a, axes)

    rows = spmd.P(axes)
    total = spmd.shard_map(body, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    blocks = 2 * x.reshape(count, -1, x.shape[1])
    place = np.arange(count, dtype=np.float32)[:, None, None]
    expected = (blocks * place + blocks.sum(0)).reshape(x.shape) + 1
    check(spmd.jit(lambda a: total(a * 2) + 1)(y), expected, "a map without types")


def checks(x: np.ndarray, y: Any) -> None:
    """All ranks stop at the check that fails first, with the same words."""

    def f(a: Any, least: Any) -> Any:
        checkify.check(snp.all(a >= -1), "the first, {m}", m=snp.min(a))
        b = a * 2
        checkify.check(snp.all(b >= least), "the second, {b}", b=b[:2, :3])
        checkify.check(snp.all(b > 1), "the third, {b}", b=b)
        return b

    texts = f"the second, {(2 * x)[:2, :3]}", f"the third, {2 * x}"
    for least, words in zip((5, 0), texts, strict=True):
        try:
            spmd.jit(f)(y, least)
        except checkify.CheckError as error:
            assert words in str(error), (str(error), words)
        else:
            raise AssertionError(words)
    check(spmd.jit(f)(y + 1, 0), (x + 1) * 2, "checks that hold")


def nans(x: np.ndarray, y: Any) -> None:
    """All ranks name the index in the whole value."""
    with spmd.config.override("debug_nans", True):
        try:
            spmd.jit(lambda a: snp.sqrt(a.T - 287).sum())(y)
        except FloatingPointError as error:
            assert "sqrt made a NaN at [0, 0] of f32[12,24], on rank 0, cpu:0" in str(error), error
        else:
            raise AssertionError("no NaN was found")


def main(programs: int) -> None:
    """Random programs, their gradients, and operations one by one."""
    count = spmd.device_count()
    axes = {"x": count // 2, "y": 2} if count % 2 == 0 else {"x": count}
    auto = spmd.sharding.AxisType.Auto
    mesh = spmd.make_mesh(tuple(axes.values()), tuple(axes), auto)
    for seed in range(programs):
        program, arguments = draw(seed, steps=5)
        rng = np.random.default_rng(seed)
        placed = [
            spmd.device_put(x, spmd.NamedSharding(mesh, draw_spec(rng, x.shape, axes)))
            for x in arguments
        ]

        def loss(*args: Any, program: Any = program) -> Any:
            return sum(snp.cos(x).sum() / x.size for x in program(*args))

        for f in (program, spmd.grad(loss, (0, 1, 2))):
            check(spmd.jit(f)(*placed), spmd.jit(f)(*arguments), f"program {seed}")
    x = np.arange(24 * 12, dtype=np.float32).reshape(24, 12)
    y = spmd.device_put(x, spmd.NamedSharding(mesh, spmd.P(tuple(axes))))
    for f in (lambda a: a.T, lambda a: a.sum(), lambda a: a[3], lambda a: a @ a.T, snp.sort):
        check(f(y), f(snp.asarray(x)), "op by op")
    windows = {
        "neighbours": lambda a: (a[1:-1] + a[2:] + a[:-2]).sum(0),
        "padded": lambda a: snp.pad(a[1:-1] * 2, ((1, 1), (0, 0)))[::2],
        "rolled": lambda a: snp.roll(a, 1, 0) * a,
        "a gradient": spmd.grad(lambda a: ((a[1:] - a[:-1]) ** 2).sum()),
    }
    for name, f in windows.items():
        check(spmd.jit(f)(y), spmd.jit(f)(x), name)
    for name, f in STRATEGIES.items():
        check(spmd.jit(f)(y), spmd.jit(f)(x), name)
    untyped_maps(mesh, x, y)
    checks(x, y)
    nans(x, y)
    if spmd.process_index() == 0:
        print(f"partitioned over {spmd.process_count()} ranks, {count} devices: all right")


if __name__ == "__main__":
    main(int(sys.argv[1]))
