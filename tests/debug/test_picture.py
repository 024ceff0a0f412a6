"""Tables of shardings: a cell for each part, with the devices that hold it."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.debug.picture import sharding_table
from spmd.errors import ArgumentError


def cells(spec, shape=(4, 8)):
    mesh = spmd.make_mesh((2, 2), ("a", "b"))
    text = sharding_table(shape, spmd.NamedSharding(mesh, spec))
    rows = [line.strip("│").split("│") for line in text.splitlines() if line.startswith("│")]
    assert len({len(line) for line in text.splitlines()}) == 1
    return [[cell.strip() for cell in row] for row in rows]


@pytest.mark.parametrize(
    "spec, wanted",
    [
        (spmd.P("a", "b"), [["CPU 0", "CPU 1"], ["CPU 2", "CPU 3"]]),
        (spmd.P("b"), [["CPU 0,2"], ["CPU 1,3"]]),
        (spmd.P(None, ("b", "a")), [["CPU 0", "CPU 2", "CPU 1", "CPU 3"]]),
        (spmd.P(), [["CPU 0,1,2,3"]]),
    ],
)
def test_cells(spec, wanted):
    assert cells(spec) == wanted


def test_one_dim_and_one_device(capsys):
    assert cells(spmd.P("a"), (4,)) == [["CPU 0,1", "CPU 2,3"]]
    spmd.debug.visualize_array_sharding(snp.ones((2, 2)))
    assert "CPU 0" in capsys.readouterr().out


def test_mistakes():
    with pytest.raises(ArgumentError, match="1 or 2 dims"):
        spmd.debug.visualize_array_sharding(snp.ones((1, 1, 1)))
    with pytest.raises(ArgumentError, match="needs arrays, got 'x'"):
        spmd.debug.inspect_array_sharding(["x"], callback=print)


def test_shardings_of_traced_values():
    seen = []

    def f(x):
        y = {"a": x * 2, "b": snp.sin(x)}
        spmd.debug.inspect_array_sharding(y, callback=seen.append)
        return y["a"]

    spmd.jit(f)(snp.ones(4))
    assert [s.device_set for s in seen] == [{spmd.devices()[0]}] * 2
    seen.clear()
    spmd.pmap(f)(snp.ones((4, 2)))
    assert [s.device_set for s in seen] == [{d} for _ in range(2) for d in spmd.devices()[:4]]


ASKED = {
    "an argument": (lambda look, x: look(x) * 2, spmd.P("a", "b")),
    "transposed": (lambda look, x: look(x.T), spmd.P("b", "a")),
    "summed": (lambda look, x: look(x.sum(0)), spmd.P("b")),
    "constrained": (
        lambda look, x: look(spmd.lax.with_sharding_constraint(x * 2, spmd.P(None, "a"))),
        spmd.P(None, "a"),
    ),
    "in a loop": (
        lambda look, x: spmd.lax.scan(lambda c, _: (look(c) * 2, None), x, None, length=3)[0],
        spmd.P("a", "b"),
    ),
    "a gradient's": (
        lambda look, x: spmd.grad(lambda x: (look(x) ** 2).sum())(x),
        spmd.P("a", "b"),
    ),
    "of examples": (lambda look, x: spmd.vmap(lambda r: look(r) * 2)(x), spmd.P("a", "b")),
    "in checkpoint": (lambda look, x: spmd.checkpoint(lambda x: look(x) * 2)(x), spmd.P("a", "b")),
}


@pytest.mark.parametrize("case", ASKED)
def test_programs_over_meshes_tell_the_layout_that_is_compiled(case):
    seen = []

    def look(x):
        spmd.debug.inspect_array_sharding(x, callback=seen.append)
        return x

    ask, spec = ASKED[case]
    mesh = spmd.make_mesh((2, 2), ("a", "b"), axis_types=(spmd.sharding.AxisType.Auto,) * 2)
    x = spmd.device_put(snp.arange(32.0).reshape(4, 8), spmd.NamedSharding(mesh, spmd.P("a", "b")))
    f = spmd.jit(lambda x: ask(look, x))
    with spmd.set_mesh(mesh):
        out = f(x)
        assert {s.spec for s in seen} == {spec} and all(s.mesh == mesh for s in seen)
        count = len(seen)
        np.testing.assert_array_equal(f(x), out)
        assert len(seen) == count  # once for a program
        np.testing.assert_allclose(out, spmd.jit(lambda x: ask(lambda x: x, x))(x))


def test_pictures_of_traced_values(capsys):
    mesh = spmd.make_mesh((2, 2), ("a", "b"), axis_types=(spmd.sharding.AxisType.Auto,) * 2)
    x = spmd.device_put(snp.ones((4, 8)), spmd.NamedSharding(mesh, spmd.P("a", "b")))
    spmd.debug.visualize_array_sharding(x)
    want = capsys.readouterr().out
    spmd.jit(lambda x: (spmd.debug.visualize_array_sharding(x), x * 2)[1])(x)
    assert capsys.readouterr().out == want
