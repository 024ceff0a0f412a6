"""Layouts in memory: `Layout`, `Format`, and what takes them."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import P
from spmd.errors import ArgumentError, ShapeError
from spmd.experimental.layout import Format, Layout

ROWS = spmd.NamedSharding(spmd.make_mesh((4,), ("x",)), P("x"))
X = np.arange(8.0).reshape(4, 2)


def test_formats_lay_arrays_out():
    made = spmd.device_put(X, Format(Layout((0, 1)), ROWS))
    assert made.sharding == ROWS and made.format == Format(Layout((0, 1), ()), ROWS)
    for free in (Format(Layout.AUTO, ROWS), Format(None, ROWS)):
        assert spmd.jit(lambda x: x * 2, out_shardings=free)(X).sharding == ROWS
    assert repr(Format(Layout.AUTO)) == "Format(layout=AUTO, sharding=None)"
    assert Layout((0, 1)) != Layout((1, 0)) and Layout([0, 1]).update(tiling=[[2]]).tiling == (
        (2,),
    )


def test_structures_keep_their_format():
    whole = Format(Layout((0, 1)), ROWS)
    made = spmd.ShapeDtypeStruct((4, 2), np.float32, sharding=whole)
    assert made.sharding == ROWS and made.format == whole and made.update(shape=(8, 2)).format
    assert "format=Layout(" in repr(made)
    assert spmd.jit(lambda x: x).lower(made).compile().input_shardings == ((ROWS,), {})


def test_errors_of_formats():
    with pytest.raises(ArgumentError, match=r"must be a Layout, Layout\.AUTO or None, got 1"):
        Format(1)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="sharding must be a Sharding or None"):
        Format(None, P("x"))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="has no sharding"):
        Format(Layout((0, 1)))
    with pytest.raises(ArgumentError, match="arrays lie in row-major order"):
        spmd.device_put(X, Format(Layout((1, 0)), ROWS))
    with pytest.raises(ShapeError, match="names 3 dims"):
        spmd.device_put(X, Format(Layout((0, 1, 2)), ROWS))
