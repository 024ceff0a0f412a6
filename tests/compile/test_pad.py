"""Padding between elements is native and gives what the primitive's `impl` gives."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.compile.executable.executable import compile_jaxpr
from spmd.compile.native.program.steps import Host, walk

CASES = [
    ((5,), [(0, 0, 1)]),
    ((4, 3), [(1, 0, 2), (0, 2, 0)]),
    ((4, 33), [(0, 0, 0), (2, 1, 1)]),
    ((3, 2, 4), [(1, 1, 1), (0, 0, 3), (0, 1, 0)]),
    ((1,), [(0, 3, 2)]),
    ((0, 3), [(2, 1, 1), (0, 0, 1)]),
]


@pytest.mark.parametrize("dtype", ["float32", "int32", "bool", "bfloat16", "complex64"])
@pytest.mark.parametrize(("shape", "config"), CASES, ids=str)
def test_interior_padding(shape, config, dtype):
    x = snp.asarray(np.arange(np.prod(shape)).reshape(shape) % 7).astype(dtype)
    value = snp.asarray(1).astype(dtype)

    def f(x, value):
        return lax.pad(x, value, config)

    program = compile_jaxpr(spmd.make_jaxpr(f)(x, value))
    assert not any(isinstance(s, Host) for s in walk(program.native.program.steps))
    with spmd.disable_jit():
        expected = f(x, value)
    np.testing.assert_array_equal(np.asarray(program([x, value])[0]), np.asarray(expected))
