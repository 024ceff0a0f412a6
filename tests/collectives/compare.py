"""How results are compared: bit by bit, or to the rounding of their dtype."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.base.tree import tree_leaves

TOLERANCE = {"float32": 1e-5, "complex64": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}


def assert_same(found: Any, wanted: Any, what: str = "") -> None:
    """Equal shapes, dtypes and bits, leaf by leaf."""
    for x, y in _pairs(found, wanted, what):
        assert x.tobytes() == y.tobytes(), f"{what}:\n{x}\nis not\n{y}"


def assert_close(found: Any, wanted: Any, what: str = "", factor: float = 1.0) -> None:
    """Equal shapes and dtypes, and values equal but for rounding, leaf by leaf."""
    for x, y in _pairs(found, wanted, what):
        tolerance = factor * TOLERANCE.get(x.dtype.name, 0.0)
        if tolerance:
            wide = np.complex128 if x.dtype.kind == "c" else np.float64
            x, y = x.astype(wide), y.astype(wide)
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance, err_msg=what)


def _pairs(found: Any, wanted: Any, what: str) -> Any:
    for x, y in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.shape, x.dtype) == (y.shape, y.dtype), f"{what}: {x!r} is not like {y!r}"
        yield x, y
