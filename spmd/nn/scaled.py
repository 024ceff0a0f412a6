"""Products of operands in block-scaled formats: small floats, and one factor for each block.

A block is so many neighbours along the contracted dims. Its factor makes the largest of them the
largest number of the small format, and has a small format of its own.
"""

from __future__ import annotations

import math
import typing as _typing
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

import spmd.lax as lax
import spmd.numpy as snp
from spmd.base.errors import ArgumentError, DtypeError, ShapeError
from spmd.core.aval import typeof
from spmd.core.custom_vjp import custom_vjp
from spmd.nn.functions import scaled_matmul

if _typing.TYPE_CHECKING:
    from spmd.numpy.array_type import Array

Dims: TypeAlias = tuple[int, ...]
Pair: TypeAlias = tuple[Dims, Dims]

# The dtypes that a product may have.
_RESULTS = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
_LEAST_SCALE = 2.0**-126


@dataclass(slots=True)
class BlockScaleConfig:
    """A block-scaled format: how an operand, or a cotangent, is rounded."""

    mode: str
    block_size: int
    data_type: Any
    scale_type: Any
    global_scale: Any
    infer_only: bool = False


def get_scaled_dot_general_config(mode: str, global_scale: Any = None) -> BlockScaleConfig:
    """Make the description of a block-scaled format for `scaled_dot_general`.

    `mode` is "mxfp8", blocks of 32 float8_e4m3fn with a power of two for each, or "nvfp4", blocks
    of 16 float4_e2m1fn with a float8_e4m3fn for each, and the float32 `global_scale` of shape (1,)
    for all blocks, by default 1. Raises `ArgumentError` for another mode.

    >>> spmd.nn.get_scaled_dot_general_config("mxfp8").block_size
    32
    """
    if mode == "mxfp8":
        kinds = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
        return BlockScaleConfig(mode, 32, *kinds, None)
    if mode == "nvfp4":
        kinds = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn
        whole = snp.ones((1,), np.float32) if global_scale is None else global_scale
        return BlockScaleConfig(mode, 16, *kinds, whole)
    raise ArgumentError(
        f"get_scaled_dot_general_config: mode must be 'nvfp4' or 'mxfp8', got {mode!r}"
    )


def scaled_dot_general(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    preferred_element_type: Any = np.float32,
    configs: Sequence[BlockScaleConfig] | None = None,
    implementation: str | None = None,
) -> Array:
    """Multiply as `lax.dot_general` does, with operands rounded to block-scaled formats.

    `dimension_numbers` are those of `dot_general`, and so is the shape of the result, whose dtype
    is `preferred_element_type`. `configs` holds three formats, of `lhs`, of `rhs`, and of the
    result's cotangent; without them nothing is rounded. The product of the sizes of the contracted
    dims is a multiple of the block's size, and in the gradient so are those of the other dims of
    both operands. Rounding passes cotangents through: with "nvfp4" they are not rounded, and are
    zero for elements that are out of its range. `implementation` is deprecated. Raises `ShapeError`
    for sizes that are no multiples, and `DtypeError` for a result that is neither float32, bfloat16
    nor float16.

    >>> mxfp8 = spmd.nn.get_scaled_dot_general_config("mxfp8")
    >>> x, numbers = np.full((2, 32), 0.3, np.float32), (((1,), (1,)), ((), ()))
    >>> spmd.nn.scaled_dot_general(x, np.ones((1, 32)), numbers, configs=[mxfp8] * 3)
    Array([[10.],
           [10.]], dtype=float32)
    """
    if implementation is not None:
        text = "scaled_dot_general: implementation is ignored, and deprecated"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
    if configs is None:
        return lax.dot_general(
            lhs, rhs, dimension_numbers, preferred_element_type=preferred_element_type
        )
    dtype = np.dtype(preferred_element_type)
    if dtype not in _RESULTS:
        raise DtypeError(
            "scaled_dot_general: preferred_element_type must be float32, bfloat16 or float16, "
            f"got {dtype.name}"
        )
    if len(configs) != 3:
        raise ArgumentError(
            f"scaled_dot_general: configs must hold three formats, of lhs, rhs and the result's "
            f"cotangent; got {len(configs)}"
        )
    (lc, rc), (lb, rb) = dimension_numbers
    numbers = (tuple(lc), tuple(rc)), (tuple(lb), tuple(rb))
    whole = [config.global_scale for config in configs]
    return _rounded_product(numbers, dtype, configs)(snp.asarray(lhs), snp.asarray(rhs), whole)


def _rounded_product(
    numbers: tuple[Pair, Pair], dtype: np.dtype, configs: Sequence[BlockScaleConfig]
) -> Any:
    """The product, with cotangents that know nothing of the rounding but its range."""
    of_lhs, of_rhs, of_ct = configs

    @custom_vjp
    def product(lhs: Any, rhs: Any, whole: Any) -> Any:
        return _product(lhs, rhs, numbers, dtype, (of_lhs, of_rhs), whole[:2])

    def forward(lhs: Any, rhs: Any, whole: Any) -> Any:
        return product(lhs, rhs, whole), (lhs, rhs, whole)

    def backward(kept: Any, ct: Any) -> Any:
        lhs, rhs, whole = kept
        (lc, rc), (lb, rb) = numbers
        batch = tuple(range(len(lb)))
        free_lhs, free_rhs = _free(lhs, lc, lb), _free(rhs, rc, rb)
        at_lhs = tuple(len(batch) + k for k in range(len(free_lhs)))
        at_rhs = tuple(len(batch) + len(free_lhs) + k for k in range(len(free_rhs)))
        to_lhs = (at_rhs, free_rhs), (batch, rb)
        to_rhs = (at_lhs, free_lhs), (batch, lb)
        if of_ct.mode == "nvfp4":
            d_lhs = lax.dot_general(ct, rhs, to_lhs, preferred_element_type=lhs.dtype)
            d_rhs = lax.dot_general(ct, lhs, to_rhs, preferred_element_type=rhs.dtype)
        else:
            of_ct_scale = whole[2]
            d_lhs = _product(ct, rhs, to_lhs, lhs.dtype, (of_ct, of_rhs), (of_ct_scale, whole[1]))
            d_rhs = _product(ct, lhs, to_rhs, rhs.dtype, (of_ct, of_lhs), (of_ct_scale, whole[0]))
        # The dims are now those of the batch, the free ones, and the other side's contracted ones.
        d_lhs = snp.transpose(d_lhs, _order([*lb, *free_lhs, *_paired(lc, rc)]))
        d_rhs = snp.transpose(d_rhs, _order([*rb, *free_rhs, *_paired(rc, lc)]))
        if of_ct.mode == "nvfp4":
            d_lhs = snp.where(_is_in_range(lhs, of_lhs, whole[0]), d_lhs, 0)
            d_rhs = snp.where(_is_in_range(rhs, of_rhs, whole[1]), d_rhs, 0)
        return d_lhs, d_rhs, [None if s is None else snp.zeros_like(s) for s in whole]

    product.defvjp(forward, backward)
    return product


def _paired(ours: Dims, theirs: Dims) -> list[int]:
    """Our contracted dims in the order of those of the other side in its shape."""
    return [ours[k] for k in _order(theirs)]


def _order(dims: Sequence[int]) -> list[int]:
    return sorted(range(len(dims)), key=dims.__getitem__)


def _free(x: Any, contracted: Dims, batch: Dims) -> Dims:
    return tuple(d for d in range(typeof(x).ndim) if d not in contracted and d not in batch)


def _product(
    x: Any,
    y: Any,
    numbers: tuple[Pair, Pair],
    dtype: np.dtype,
    configs: tuple[BlockScaleConfig, BlockScaleConfig],
    whole: Sequence[Any],
) -> Any:
    """The product of two operands, each rounded to its format; dims as `dot_general` has them."""
    (xc, yc), (xb, yb) = numbers
    x3, x_free = _rows(x, xc, xb)
    y3, y_free = _rows(y, yc, yb)
    (xq, xs), (yq, ys) = (
        _quantize(v, config, s) for v, config, s in zip((x3, y3), configs, whole, strict=True)
    )
    out = scaled_matmul(xq, yq, xs, ys, np.float32)
    for s in whole:
        out = out if s is None else out * s
    batch = tuple(typeof(x).shape[d] for d in xb)
    return snp.reshape(out.astype(dtype), (*batch, *x_free, *y_free))


def _rows(x: Any, contracted: Dims, batch: Dims) -> tuple[Any, Dims]:
    """An operand as (batch, rows, contracted), and the sizes of the dims that are its rows."""
    shape, free = typeof(x).shape, _free(x, contracted, batch)
    sizes = [tuple(shape[d] for d in dims) for dims in (batch, free, contracted)]
    flat = snp.transpose(x, (*batch, *free, *contracted))
    return snp.reshape(flat, tuple(map(math.prod, sizes))), sizes[1]


def _quantize(x: Any, config: BlockScaleConfig, whole: Any) -> tuple[Any, Any]:
    """The elements of (batch, rows, contracted) in a small format, and the factors of blocks."""
    *rows, size = typeof(x).shape
    block = config.block_size
    if not size or size % block:
        raise ShapeError(
            f"scaled_dot_general: a contracted size of {size} is no multiple of the {block} "
            f"elements of a block of {config.mode}"
        )
    blocks = snp.reshape(x, (*rows, size // block, block)).astype(np.float32)
    largest = float(snp.finfo(config.data_type).max)
    if whole is not None:
        blocks = blocks / whole
    scales = snp.max(snp.abs(blocks), axis=-1, keepdims=True) / largest
    if config.mode == "mxfp8":  # the next power of two
        mantissa, exponent = snp.frexp(scales)
        exponent = snp.where(mantissa == 0.5, exponent - 1, exponent)
        scales = snp.maximum(snp.ldexp(np.float32(1), exponent), _LEAST_SCALE)
    else:
        scales = snp.minimum(scales, float(snp.finfo(config.scale_type).max))
    small = scales.astype(config.scale_type)
    scales = small.astype(np.float32)
    scaled = snp.where(scales == 0, 0, blocks / snp.where(scales == 0, 1, scales))
    elements = snp.clip(scaled, -largest, largest).astype(config.data_type)
    return snp.reshape(elements, (*rows, size)), small[..., 0]


def _is_in_range(x: Any, config: BlockScaleConfig, whole: Any) -> Any:
    """Which elements the largest factors can represent."""
    largest = float(snp.finfo(config.data_type).max) * float(snp.finfo(config.scale_type).max)
    return snp.abs(x) <= (largest if whole is None else whole * largest)
