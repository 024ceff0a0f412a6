"""Tables of shardings: a cell for each part, with the devices that hold it."""

from __future__ import annotations

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
    assert [s.device_set for s in seen] == [{d} for d in spmd.devices()[:4] for _ in range(2)] or [
        s.device_set for s in seen
    ] == [{d} for _ in range(2) for d in spmd.devices()[:4]]
