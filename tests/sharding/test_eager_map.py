"""disable_jit inside pmap and shard_map: Python runs on the values of all devices at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.base.errors import TracerBoolConversionError
from spmd.sharding import PartitionSpec as P

X = np.arange(4, dtype=np.float32)


def test_print_shows_each_device(capsys: pytest.CaptureFixture[str]):
    def f(x: Any) -> Any:
        print(x)
        print("sum:", lax.psum(x, "i"))
        return x

    with spmd.disable_jit():
        spmd.pmap(f, axis_name="i")(X[:2])
    assert capsys.readouterr().out == (
        "Array float32[] on 2 devices:\n"
        "  cpu:0 (i=0): 0.\n"
        "  cpu:1 (i=1): 1.\n"
        "sum: Array float32[] on 2 devices:\n"
        "  cpu:0 (i=0): 1.\n"
        "  cpu:1 (i=1): 1.\n"
    )


def test_print_in_shard_map(capsys: pytest.CaptureFixture[str]):
    mesh = spmd.make_mesh((2, 2), ("x", "y"))
    f = spmd.shard_map(lambda v: print(v) or v, mesh=mesh, in_specs=P("y"), out_specs=P("y"))
    with spmd.disable_jit():
        np.testing.assert_array_equal(f(X), X)
    assert capsys.readouterr().out == (
        "Array float32[2] on 4 devices:\n"
        "  cpu:0 (x=0, y=0): [0., 1.]\n"
        "  cpu:1 (x=0, y=1): [2., 3.]\n"
        "  cpu:2 (x=1, y=0): [0., 1.]\n"
        "  cpu:3 (x=1, y=1): [2., 3.]\n"
    )


def test_python_may_branch_where_all_devices_agree():
    def f(x: Any) -> Any:
        if lax.pmax(x, "i") > 2:
            return x + float(lax.psum(x, "i"))
        return x

    with spmd.disable_jit():
        np.testing.assert_array_equal(spmd.pmap(f, axis_name="i")(X), X + 6)


def test_a_branch_where_devices_differ_shows_who():
    with spmd.disable_jit(), pytest.raises(TracerBoolConversionError) as caught:
        spmd.pmap(lambda x: 1 if x > 0 else 2, axis_name="i")(X)
    text = str(caught.value)
    assert "test_eager_map.py" in text
    assert "the devices hold different values:\n  cpu:0 (i=0): False\n  cpu:1 (i=1): True" in text


def test_values_are_those_of_the_compiled_program():
    def f(x: Any) -> Any:
        g = spmd.grad(lambda x: lax.psum(snp.sin(x) ** 2, "i") * 2)(x)
        v = spmd.vmap(lambda k: k * lax.pmean(x, "i"))(snp.arange(3.0))
        return g, v, spmd.jit(lambda x: x * 2)(x), lax.fori_loop(0, 3, lambda k, c: c + x, x)

    mapped = spmd.pmap(f, axis_name="i")
    with spmd.disable_jit():
        found = mapped(X)
    for a, b in zip(found, mapped(X), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_typed_gradients_inside_shard_map():
    """psum of a value that types say is shared has its own transpose, op by op too."""
    mesh = spmd.make_mesh((4,), ("i",))

    def f(w: Any, x: Any) -> Any:
        return spmd.grad(lambda w: lax.pmean((w * x).sum(), "i"))(w)

    mapped = spmd.shard_map(f, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
    with spmd.disable_jit():
        found = mapped(np.float32(2), X)
    assert float(found) == float(mapped(np.float32(2), X)) == X.mean()


def test_transformations_around_the_map():
    """Under grad and vmap the map is traced: what they need is more than its values."""
    mapped = spmd.pmap(lambda x: x * x, axis_name="i")
    with spmd.disable_jit():
        np.testing.assert_array_equal(spmd.grad(lambda x: mapped(x).sum())(X), 2 * X)
        np.testing.assert_array_equal(spmd.vmap(mapped)(X[None]), (X * X)[None])
