"""Products, convolutions, pooling and attention as ONNX operators.

ONNX knows one order of dims for each (batches, rows, columns; batch, features, space), so operands
are permuted to it and results back.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.util import inverse_permutation
from spmd.core.ir import Eqn
from spmd.export.onnx_graph import Graph, product, refused, rule, write_program
from spmd.export.onnx_rules import in_wider, padded
from spmd.lax.attention import attention_formula

# ---- products ----------------------------------------------------------------------------------


@rule("dot_general")
def _dot_general(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    numbers, out = eqn.params["dimension_numbers"], eqn.outvars[0].aval
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers.contract, numbers.batch
    lhs, rhs = (v.aval for v in eqn.invars)
    narrow = out.dtype.kind in "bu" or (out.dtype.kind == "i" and out.dtype.itemsize < 4)
    wide = np.dtype(np.int32) if narrow else out.dtype
    x, y = (
        x if aval.dtype == wide else g.cast(x, wide) for x, aval in zip(xs, (lhs, rhs), strict=True)
    )
    lhs_free = [d for d in range(lhs.ndim) if d not in (*lhs_contract, *lhs_batch)]
    rhs_free = [d for d in range(rhs.ndim) if d not in (*rhs_contract, *rhs_batch)]
    x = g.transpose(x, [*lhs_batch, *lhs_free, *lhs_contract])
    y = g.transpose(y, [*rhs_batch, *rhs_contract, *rhs_free])
    batch = [lhs.shape[d] for d in lhs_batch]
    rows, columns = [lhs.shape[d] for d in lhs_free], [rhs.shape[d] for d in rhs_free]
    inner = [lhs.shape[d] for d in lhs_contract]
    if len(rows) != 1 or len(inner) != 1:
        x = g.reshape(x, [*batch, product(rows), product(inner)])
    if len(columns) != 1 or len(inner) != 1:
        y = g.reshape(y, [*batch, product(inner), product(columns)])
    found = g.op("MatMul", x, y)
    if len(rows) != 1 or len(columns) != 1:
        found = g.reshape(found, out.shape)
    return found if wide == out.dtype else g.cast(found, out.dtype)


# ---- convolutions ------------------------------------------------------------------------------


@rule("conv_general_dilated")
def _conv(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    p = eqn.params
    if p["batch_group_count"] != 1:
        raise refused(eqn, "with batch_group_count has no form in ONNX")
    if not dtypes.is_float(eqn.outvars[0].aval.dtype):
        raise refused(eqn, "of integers has no form in ONNX")
    dims = p["dimension_numbers"]
    lhs, rhs = (v.aval for v in eqn.invars)
    dtype = eqn.outvars[0].aval.dtype
    x, w = (
        x if v.aval.dtype == dtype else g.cast(x, dtype)
        for x, v in zip(xs, eqn.invars, strict=True)
    )
    x, w = g.transpose(x, dims.lhs_spec), g.transpose(w, dims.rhs_spec)
    shape = [lhs.shape[d] for d in dims.lhs_spec]
    space = len(shape) - 2
    if not space:
        raise refused(eqn, "without spatial dims has no form in ONNX")
    config = [(0, 0, 0), (0, 0, 0)]
    config += [
        (low, high, n - 1) for (low, high), n in zip(p["padding"], p["lhs_dilation"], strict=True)
    ]
    simple = all(low >= 0 and high >= 0 and not n for low, high, n in config)
    pads = [row[k] for k in (0, 1) for row in config[2:]] if simple else [0] * 2 * space
    if not simple:
        x = padded(g, x, shape, g.scalar(0, dtype), config)
    out = g.op(
        "Conv",
        x,
        w,
        dilations=list(p["rhs_dilation"]),
        group=int(p["feature_group_count"]),
        kernel_shape=[rhs.shape[d] for d in dims.rhs_spec[2:]],
        pads=[int(n) for n in pads],
        strides=list(p["window_strides"]),
    )
    return g.transpose(out, inverse_permutation(dims.out_spec))


# ---- pooling -----------------------------------------------------------------------------------


def _identity(name: str, dtype: np.dtype) -> float:
    """The result of a window of padding alone, before it is turned around for `min`."""
    if name == "sum" or (dtypes.is_bool(dtype) and name == "max"):
        return 0
    if dtypes.is_bool(dtype):
        return -1
    if dtypes.is_float(dtype):
        return -np.inf
    return float(np.iinfo(dtype).min if name == "max" else -int(np.iinfo(dtype).max))


@rule("reduce_window_max", "reduce_window_min", "reduce_window_sum")
def _reduce_window(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    windows, aval, out = eqn.params["windows"], eqn.invars[0].aval, eqn.outvars[0].aval
    name = eqn.prim.name.removeprefix("reduce_window_")
    if dtypes.is_integer(aval.dtype) and aval.dtype.itemsize == 8:
        raise refused(eqn, f"of {aval.dtype} has no form in ONNX; of 32 bits and floats it has")
    # Integers of 32 bits are exact in float64; `min` is the largest of the negated operand.
    dtype = aval.dtype if dtypes.is_float(aval.dtype) else np.dtype(np.float64)
    x = xs[0] if dtype == aval.dtype else g.cast(xs[0], dtype)
    x = g.op("Neg", x) if name == "min" else x
    nothing = g.scalar(_identity(name, aval.dtype), dtype)
    gaps = [n - 1 for n in windows.base_dilation]
    config = [(low, high, n) for (low, high), n in zip(windows.padding, gaps, strict=True)]
    x = padded(g, x, aval.shape, nothing, config)
    shape = windows.padded(aval.shape)

    moving = [d for d in range(aval.ndim) if windows.sizes[d] != 1 or windows.strides[d] != 1] or [
        aval.ndim - 1
    ]
    if len(moving) > 3:
        raise refused(eqn, f"over windows in {len(moving)} dims has no form in ONNX; up to 3 has")
    still = [d for d in range(aval.ndim) if d not in moving]
    x = g.transpose(x, [*still, *moving])
    x = g.reshape(x, [product([shape[d] for d in still]), 1, *(shape[d] for d in moving)])
    options: dict[str, Any] = {
        "kernel_shape": [windows.sizes[d] for d in moving],
        "strides": [windows.strides[d] for d in moving],
        "dilations": [windows.dilation[d] for d in moving],
    }
    if name == "sum":
        x = g.op("AveragePool", x, count_include_pad=1, **options)
        x = g.op("Mul", x, g.scalar(product([windows.sizes[d] for d in moving]), dtype))
        x = g.op("Round", x) if dtype != aval.dtype else x
    else:
        x = g.op("MaxPool", x, **options)
    x = g.reshape(x, [out.shape[d] for d in (*still, *moving)])
    x = g.transpose(x, inverse_permutation([*still, *moving]))
    x = g.op("Neg", x) if name == "min" else x
    return x if dtype == aval.dtype else g.cast(x, aval.dtype)


# ---- attention ---------------------------------------------------------------------------------


@rule("attention")
def _attention(g: Graph, eqn: Eqn, xs: list[str]) -> list[str]:
    # The formula over all scores; the compiler works block by block.
    avals = tuple(v.aval for v in eqn.invars)
    return write_program(g, attention_formula(eqn.params["spec"], avals), xs)


@rule("cumlogsumexp")
def _cumlogsumexp(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    axis = eqn.params["axis"]
    top = g.op("ReduceMax", xs[0], g.ints(axis), keepdims=1)
    parts = g.op("Exp", g.op("Sub", xs[0], top))
    where, backwards = g.scalar(int(axis), np.int64), int(eqn.params["reverse"])
    total = in_wider(
        g, eqn.invars[0].aval.dtype, parts, lambda x: g.op("CumSum", x, where, reverse=backwards)
    )
    return g.op("Add", g.op("Log", total), top)
