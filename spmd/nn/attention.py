"""Scaled dot product attention, with masks, biases, grouped heads and sequence lengths.

Shapes: B batch, T queries, S keys, N query heads, K key heads (N is a multiple of K), H features.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd import lax
from spmd.core import dtypes
from spmd.core.aval import typeof
from spmd.core.errors import ArgumentError, ShapeError
from spmd.nn.functions import softmax
from spmd.numpy.creation import asarray
from spmd.numpy.einsum import einsum
from spmd.numpy.promotion import as_array, check_arraylike, constant_like, plain
from spmd.numpy.searching import where
from spmd.numpy.ufuncs import add, multiply


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
) -> Any:
    """`softmax(query @ key.T * scale + bias) @ value`, for each head.

    `query_BTNH`, `key_BSKH` and `value_BSKH` may lack the batch dim. `mask` and `bias` broadcast
    to (B, N, T, S); a query sees the keys where the mask is true.
    """
    check_arraylike("dot_product_attention", query, key, value)
    if implementation not in (None, "xla"):
        raise ArgumentError(f"dot_product_attention: unknown implementation {implementation!r}")
    shape = typeof(plain(query)).shape
    q_BTNH, k_BSKH, v_BSKH = (_four_dims(x) for x in (query, key, value))
    _check_shapes(typeof(q_BTNH).shape, typeof(k_BSKH).shape, typeof(v_BSKH).shape)
    b, t, n, h = typeof(q_BTNH).shape
    k = typeof(k_BSKH).shape[2]
    q_BTKGH = lax.reshape(q_BTNH, (b, t, k, n // k, h))
    wide = dtypes.promote_types(typeof(q_BTNH).dtype, np.float32)
    logits = einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=wide)
    logits = multiply(logits, constant_like(logits, 1 / np.sqrt(h) if scale is None else scale))
    s = typeof(k_BSKH).shape[1]
    logits_BNTS = lax.reshape(logits, (b, n, t, s))
    if bias is not None:
        with_bias = add(logits_BNTS, _four_dims(bias))
        logits_BNTS = lax.convert_element_type(with_bias, wide)
    seen = _seen(mask, (b, n, t, s), is_causal, local_window_size, query_seq_lengths,
                 key_value_seq_lengths)  # fmt: skip
    if seen is not None:
        # Finite, so that a query that sees nothing gives an average instead of NaN.
        hidden = np.array(-0.7 * float(np.finfo(np.float32).max), wide)
        logits_BNTS = where(seen, logits_BNTS, hidden)
    weights = softmax(lax.convert_element_type(logits_BNTS, np.dtype(np.float32)), -1)
    weights = lax.convert_element_type(weights, typeof(k_BSKH).dtype)
    weights = lax.reshape(weights, (b, k, n // k, t, s))
    out = lax.reshape(einsum("BKGTS,BSKH->BTKGH", weights, v_BSKH), (b, t, n, h))
    if query_seq_lengths is not None:
        inside = lax.lt(_positions((b, t, n, h), 1), _lengths(query_seq_lengths, (b, t, n, h)))
        out = where(inside, out, constant_like(out, 0))
    return lax.reshape(out, shape)


def _four_dims(x: Any) -> Any:
    x = asarray(x)
    own = typeof(x).shape
    return lax.reshape(x, (1,) * (4 - len(own)) + own) if len(own) < 4 else as_array(x)


def _check_shapes(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    if k != v or q[0] != k[0] or q[3] != k[3] or q[2] % k[2]:
        raise ShapeError(
            f"dot_product_attention: query (B, T, N, H) is {q}, key and value (B, S, K, H) are "
            f"{k} and {v}; B and H must agree, and N must be a multiple of K"
        )


def _positions(shape: tuple[int, ...], dim: int) -> Any:
    return lax.broadcasted_iota(np.dtype(np.int32), shape, dim)


def _lengths(lengths: Any, shape: tuple[int, ...]) -> Any:
    """One length for each element of the batch, in every element of `shape`."""
    whole = lax.convert_element_type(asarray(lengths), np.dtype(np.int32))
    if typeof(whole).shape != shape[:1]:
        raise ShapeError(
            f"dot_product_attention: lengths must have shape {shape[:1]}, got {typeof(whole).shape}"
        )
    return lax.broadcast_in_dim(whole, shape, (0,))


def _seen(
    mask: Any,
    shape: tuple[int, ...],
    is_causal: bool,
    window: int | tuple[int, int] | None,
    query_lengths: Any,
    key_lengths: Any,
) -> Any:
    """Which keys each query sees, in shape (B, N, T, S); None if all."""
    conditions = []
    if mask is not None:
        check_arraylike("dot_product_attention", mask)
        if not dtypes.is_bool(typeof(plain(mask)).dtype):
            raise ArgumentError(
                f"dot_product_attention: mask must be bool, got {typeof(plain(mask))}"
            )
        conditions.append(lax.broadcast_in_dim(_four_dims(mask), shape, range(4)))
    at_query, at_key = _positions(shape, 2), _positions(shape, 3)
    if is_causal:
        conditions.append(lax.ge(at_query, at_key))
    if window is not None:
        left, right = (window, window) if isinstance(window, int) else window
        conditions.append(lax.le(at_query, lax.add(at_key, np.int32(left))))
        conditions.append(lax.ge(at_query, lax.sub(at_key, np.int32(right))))
    if query_lengths is not None:
        conditions.append(lax.lt(at_query, _lengths(query_lengths, shape)))
    if key_lengths is not None:
        conditions.append(lax.lt(at_key, _lengths(key_lengths, shape)))
    seen = None
    for condition in conditions:
        seen = condition if seen is None else lax.bitwise_and(seen, condition)
    return seen
