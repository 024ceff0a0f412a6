"""`jax._src.public_test_util`: the names of `jax.test_util`, and values that are nearly equal."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.as_jax.jax.test_util import check_grads, check_jvp, check_vjp
from spmd.as_jax.refuse import missing
from spmd.base import dtypes
from spmd.dtypes import canonicalize_dtype
from spmd.tree import map as tree_map

__all__ = ["check_close", "check_grads", "check_jvp", "check_vjp", "tolerance"]
__getattr__ = missing("jax._src.public_test_util")

# By the name of a dtype; integers and bools are equal or not.
_TOLERANCE = {
    "bfloat16": 1e-2,
    "float16": 1e-3,
    "float32": 1e-6,
    "float64": 1e-15,
    "complex64": 1e-6,
    "complex128": 1e-15,
}


def tolerance(dtype: Any, tol: Any = None) -> float:
    """The tolerance of a dtype: a number for all, or that of a dict by dtype, or the default."""
    if tol is not None and not isinstance(tol, dict):
        return tol
    wanted = canonicalize_dtype(dtype)
    given = {np.dtype(key): value for key, value in (tol or {}).items()}
    if wanted in given:
        return given[wanted]
    small = 1e-1 if dtypes.is_float(wanted) else 0.0  # floats of 8 bits and fewer
    return _TOLERANCE.get(wanted.name, small)


def check_close(xs: Any, ys: Any, atol: Any = None, rtol: Any = None, err_msg: str = "") -> None:
    """Raise an AssertionError if leaves of two pytrees are not nearly equal.

    `atol` and `rtol` are numbers, or dicts from dtypes to numbers; a leaf's number of elements
    multiplies them, as in JAX.
    """

    def check(x: Any, y: Any) -> None:
        x, y = np.asarray(x), np.asarray(y)
        assert x.shape == y.shape, f"{err_msg}: shapes {x.shape} and {y.shape}"
        most = {
            name: max(tolerance(x.dtype, tol), tolerance(y.dtype, tol)) * x.size
            for name, tol in (("atol", atol), ("rtol", rtol))
        }
        # NumPy's default stands for zero, as in JAX.
        most = {name: value for name, value in most.items() if value}
        if dtypes.float0 in (x.dtype, y.dtype):
            assert x.dtype == y.dtype, f"{err_msg}: dtypes {x.dtype} and {y.dtype}"
            return
        wide = [z.astype(np.float32) if z.dtype.kind == "V" else z for z in (x, y)]
        np.testing.assert_allclose(*wide, **most, err_msg=err_msg)

    tree_map(check, xs, ys)
