"""A user's own primitive and kernel: what docs/extending.md does not show."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as jnp
from spmd import extend
from spmd.errors import ArgumentError
from spmd.testing import check_grads


@pytest.fixture(scope="module")
def leaky():
    """max(x, slope * x), with a kernel that reads its parameter."""
    prim = extend.elementwise(
        "test_leaky",
        ("x",),
        accepts=extend.FLOAT,
        impl=lambda xp, x, *, slope: xp.maximum(x, x * x.dtype.type(slope)),
        jvp=(lambda t, x, out, *, slope: jnp.where(x > 0, t, slope * t),),
    )
    extend.register_lowering(
        prim, lambda k, x, *, slope: k.op("max", x, k.op("mul", x, k.const(slope, like=x)))
    )
    return lambda x, slope=0.25: prim.bind(x, slope=slope)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_the_kernel_is_the_impl(leaky, dtype):
    x = jnp.asarray(np.linspace(-2, 2, 37), dtype)
    found = spmd.jit(lambda x: leaky(x) + 1)(x)
    with spmd.disable_jit():
        wanted = leaky(x) + 1
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))


def test_its_parameter_is_part_of_the_program(leaky):
    x = np.array([-4.0, 2.0], np.float32)
    for slope in (0.25, 0.5):
        found = spmd.jit(lambda x, s=slope: leaky(x, s))(x)
        np.testing.assert_array_equal(found, [-4 * slope, 2])


def test_it_is_differentiated_and_batched(leaky):
    x = np.array([[-1.0, 2.0, -3.0], [0.5, -0.25, 4.0]], np.float32)
    check_grads(lambda x: leaky(x) ** 2, (x,), order=2)
    rows = jnp.stack([leaky(row) for row in x.T])
    np.testing.assert_array_equal(spmd.vmap(leaky, in_axes=1)(x), rows)
    np.testing.assert_array_equal(spmd.jit(leaky)(x[:, :0]).shape, (2, 0))


def test_an_operation_without_the_dtype_falls_back():
    prim = extend.elementwise(
        "test_twice",
        ("x",),
        accepts=extend.NUMERIC,
        impl=lambda xp, x: x + x,
        jvp=extend.linear,
        transpose=(lambda ct, x: ct + ct,),
    )
    extend.register_lowering(prim, lambda k, x: k.op("exp", k.op("log", k.op("add", x, x))))
    f = spmd.jit(lambda x: prim.bind(x) + 1)
    np.testing.assert_allclose(f(np.array([1.5], np.float32)), [4.0], rtol=1e-6)
    whole = np.array([3], np.int32)
    np.testing.assert_array_equal(f(whole), [7])
    assert "host test_twice" in f.lower(whole).compile().as_text()


def test_a_second_kernel_is_refused(leaky):
    (eqn,) = spmd.make_jaxpr(leaky)(1.0).eqns
    with pytest.raises(ArgumentError, match="register_lowering: test_leaky has a kernel already"):
        extend.register_lowering(eqn.primitive, lambda k, x, *, slope: x)
