"""Explicit mode and maps over some axes, over all ranks' devices: each shard is as it must be."""

from __future__ import annotations

from typing import Any

import numpy as np

import spmd
import spmd.numpy as snp
from spmd import P, lax
from spmd.errors import ShardingTypeError
from tests.multiprocess.programs.partition import check


def sums(X: np.ndarray, W: np.ndarray) -> None:
    """Sums that are not made yet, and gradients of values that are reduced."""
    along = P(None, "x"), P("x", None)
    a, b = spmd.device_put(X[:, :12].T, along[0]), spmd.device_put(X, along[1])
    terms = snp.matmul(a, b, out_sharding=P(unreduced={"x"}))
    check(spmd.reshard(terms + terms, P()), 2 * X.T @ X, "a sum of terms")
    check(spmd.jit(lambda t: spmd.reshard(2.0 * t, P("y")))(terms), 2 * X.T @ X, "scattered")
    w = spmd.device_put(W, P(reduced={"x"}))

    def loss(w: Any) -> Any:
        layer = lambda x, w: x @ w  # noqa: E731
        specs = P("x"), P(reduced={"x"})
        return (spmd.shard_map(layer, in_specs=specs, out_specs=P("x"))(b, w) ** 2).sum()

    for f in (spmd.grad(loss), spmd.jit(spmd.grad(loss))):
        slope = f(w)
        assert spmd.typeof(slope).sharding.spec.unreduced == {"x"}
        check(spmd.reshard(slope, P()), 2 * X.T @ (X @ W), "an unreduced gradient")


def main() -> None:
    """Products, reductions, gradients, resharding, and a partly manual map."""
    count = spmd.device_count()
    split = 2 if count % 2 == 0 else 1
    mesh = spmd.make_mesh((count // split, split), ("x", "y"))
    rng = np.random.default_rng(0)
    X, W = (rng.standard_normal(shape).astype(np.float32) for shape in ((24, 12), (12, 24)))
    with spmd.set_mesh(mesh):
        x, w = spmd.device_put(X, P("x", "y")), spmd.device_put(W, P("y", "x"))
        assert spmd.typeof(x).short() == "f32[24@x,12@y]"
        check(snp.sin(x).sum(0), np.sin(X).sum(0), "a sum op by op")
        check(spmd.reshard(x, P("y", "x")), X, "resharded op by op")
        check(spmd.reshard(x, P()), X, "whole op by op")
        for spec in (P("y", "x"), P(None, "x"), P(("x", "y")), P()):
            check(spmd.device_put(x, spec), X, f"device_put to {spec}")

        def product(x: Any, w: Any) -> Any:
            return snp.matmul(x, w, out_sharding=P("x", None))

        for f in (product, spmd.jit(product)):
            out = f(x, w)
            assert spmd.typeof(out).short() == "f32[24@x,24]"
            check(out, X @ W, "a product")
        slope = spmd.jit(spmd.grad(lambda w: (product(x, w) ** 2).sum()))(w)
        assert spmd.typeof(slope) is spmd.typeof(w)
        check(slope, 2 * X.T @ (X @ W), "a gradient")
        if split > 1:
            try:
                x @ w
            except ShardingTypeError:
                pass
            else:
                raise AssertionError("an ambiguous product is no error")
        sums(X, W)
        total = spmd.shard_map(lambda x: lax.psum(x, "x"), out_specs=P(), axis_names={"x"})
        check(spmd.jit(total)(x), X.reshape(count // split, -1, 12).sum(0), "a partly manual map")
        rows = lambda x: lax.all_gather(snp.sin(x), "x", tiled=True)  # noqa: E731
        whole = spmd.shard_map(rows, out_specs=P(), axis_names={"x"}, check_vma=False)
        check(spmd.jit(whole)(x), np.sin(X), "a map whose results are trusted")
        slope = spmd.jit(spmd.grad(lambda x: (whole(x) ** 2).sum()))(x)
        check(slope, 2 * np.sin(X) * np.cos(X), "its gradient")
    if spmd.process_index() == 0:
        print(f"explicit over {spmd.process_count()} ranks, {count} devices: all right")


if __name__ == "__main__":
    main()
