"""Random wide programs mean what NumPy says, however they are run."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from tests.compile.wide_programs import WideProgram


def by_numpy(program, args):
    """The oracle: every primitive's `impl`, one after the other."""
    with spmd.disable_jit(), np.errstate(all="ignore"):
        return [np.asarray(x) for x in program(*args)]


def assert_close(found, wanted):
    for x, y in zip(map(np.asarray, found), wanted, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if y.dtype.kind != "f":
            np.testing.assert_array_equal(x, y)
            continue
        scale = max(1.0, float(np.abs(y).max(initial=0)))
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=2e-4 * scale)


def bits(arrays):
    return [np.asarray(x).tobytes() for x in arrays]


@pytest.mark.parametrize("seed", range(16))
def test_compiled_is_numpy(seed):
    program = WideProgram(seed, length=(10, 25, 50)[seed % 3])
    args = program.arguments()
    wanted = by_numpy(program, args)
    f = spmd.jit(program)
    found = f(*args)
    assert_close(found, wanted)
    for threads in (1, 3):
        with spmd.config.override("num_threads", threads):
            assert bits(f(*args)) == bits(found), f"{threads} threads"
    if seed % 2:
        return
    donated = spmd.jit(program, donate_argnums=tuple(range(len(args))))
    for _ in range(2):
        assert_close(donated(*map(snp.array, args)), wanted)


@pytest.mark.parametrize("seed", range(100, 108))
def test_vmap_is_a_loop(seed):
    """Over any dim of each argument, or none of it."""
    program = WideProgram(seed, length=15, small=True)
    args, rng = program.arguments(), np.random.default_rng(seed)
    axes = [0, *(None if rng.integers(4) == 0 else int(rng.integers(-1, 1)) for _ in args[1:])]
    rows = [args, [0.5 * x if x.dtype.kind == "f" else x + 1 for x in args]]
    rows = [[x.astype(a.dtype) for x, a in zip(row, args, strict=True)] for row in rows]
    columns = list(zip(*rows, axes, strict=True))
    stacked = [a if axis is None else np.stack([a, b], axis) for a, b, axis in columns]
    found = spmd.jit(spmd.vmap(program, tuple(axes)))(*stacked)
    own = [a for a, _, _ in columns], [a if axis is None else b for a, b, axis in columns]
    results = [by_numpy(program, list(x)) for x in own]
    assert_close(found, [np.stack(pair) for pair in zip(*results, strict=True)])
