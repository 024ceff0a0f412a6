"""Scaled dot product attention, with masks, biases, grouped heads and sequence lengths.

Shapes: B batch, T queries, S keys, N query heads, K key heads (N is a multiple of K), H features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, ShapeError
from spmd.core.aval import typeof
from spmd.lax.attention import attention_and_residual
from spmd.numpy.creation import asarray
from spmd.numpy.promotion import as_array, check_arraylike, constant_like, operand, plain
from spmd.numpy.searching import where

if TYPE_CHECKING:
    from spmd.sharding.array import Array


@overload
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
    return_residual: Literal[False] = False,
) -> Array: ...


@overload
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
    return_residual: Literal[True],
) -> tuple[Array, Array]: ...


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
    return_residual: bool = False,
) -> Any:
    """Compute attention, `softmax(query @ key.T * scale + bias) @ value`, for each head.

    `query` (B, T, N, H), `key` and `value` (B, S, K, H) may lack the batch dim; N is a multiple of
    K. The result has the shape and dtype of `query`. `mask` (bool) and `bias` broadcast to (B, N,
    T, S); a query sees the keys where the mask is true. `scale` is by default `1 / sqrt(H)`. With
    `is_causal` a query sees no later keys, and with `local_window_size` (one integer, or a pair:
    keys before, keys after) only near ones; `query_seq_lengths` and `key_value_seq_lengths` (B,)
    end the sequences. `implementation` is None or "xla". With `return_residual` the result is a
    pair: the attention, and for each query the logsumexp of its scores, (B, T, N), through which,
    as in JAX, nothing is differentiated.

    Raises `ShapeError` if sizes do not fit, and `ArgumentError` if `mask` is not boolean, for
    another implementation, or if an argument is no array.

    >>> q = np.ones((1, 2, 1, 4), np.float32)
    >>> k, v = np.ones((1, 3, 1, 4), np.float32), np.arange(12.0).reshape(1, 3, 1, 4)
    >>> spmd.nn.dot_product_attention(q, k, v.astype(np.float32), is_causal=True)[0, :, 0]
    Array([[0., 1., 2., 3.],
           [2., 3., 4., 5.]], dtype=float32)
    """
    check_arraylike("dot_product_attention", query, key, value)
    if implementation not in (None, "xla"):
        raise ArgumentError(f"dot_product_attention: unknown implementation {implementation!r}")
    shape = typeof(plain(query)).shape
    q_BTNH, k_BSKH, v_BSKH = (_four_dims(x) for x in (query, key, value))
    _check_shapes(typeof(q_BTNH).shape, typeof(k_BSKH).shape, typeof(v_BSKH).shape)
    b, t, n, h = typeof(q_BTNH).shape
    s, k = typeof(k_BSKH).shape[1:3]
    q_BKGTH = lax.permute_dims(lax.reshape(q_BTNH, (b, t, k, n // k, h)), (0, 2, 3, 1, 4))
    k_BKSH, v_BKSH = (lax.permute_dims(x, (0, 2, 1, 3)) for x in (k_BSKH, v_BSKH))
    masks = _length_masks(query_seq_lengths, key_value_seq_lengths, (b, t, s))
    if mask is not None:
        if not dtypes.is_bool(typeof(operand("dot_product_attention", mask)).dtype):
            raise ArgumentError(
                f"dot_product_attention: mask must be bool, got {typeof(plain(mask))}"
            )
        masks.append(_by_heads("mask", mask, (b, n, t, s), k))
    window = local_window_size
    out_BKGTH, lse_BKGT = attention_and_residual(
        q_BKGTH,
        k_BKSH,
        v_BKSH,
        None if bias is None else _by_heads("bias", bias, (b, n, t, s), k),
        masks,
        scale=1 / np.sqrt(h) if scale is None else scale,
        causal=is_causal,
        window=(window, window) if isinstance(window, int) else window,
    )
    out = lax.reshape(lax.permute_dims(out_BKGTH, (0, 3, 1, 2, 4)), (b, t, n, h))
    if query_seq_lengths is not None:
        inside = lax.lt(_positions((b, t, n, h), 1), _lengths(query_seq_lengths, (b, t, n, h)))
        out = where(inside, out, constant_like(out, 0))
    out = lax.reshape(out, shape)
    if not return_residual:
        return out
    lse = lax.reshape(lax.permute_dims(lse_BKGT, (0, 3, 1, 2)), shape[:-1])
    narrow = lax.convert_element_type(lse, typeof(k_BSKH).dtype)
    return out, lax.stop_gradient(narrow)


def _by_heads(name: str, x: Any, shape: tuple[int, ...], key_heads: int) -> Any:
    """A bias or mask that broadcasts to (B, N, T, S), as (B, K, G, T, S) with dims of 1 kept."""
    x = _four_dims(x)
    b, n, t, s = own = typeof(x).shape
    if len(own) != 4 or any(d not in (1, whole) for d, whole in zip(own, shape, strict=True)):
        raise ShapeError(
            f"dot_product_attention: {name} of shape {own} does not broadcast to "
            f"(B, N, T, S) = {shape}"
        )
    heads = (1, 1) if n == 1 else (key_heads, n // key_heads)
    return lax.reshape(x, (b, *heads, t, s))


def _length_masks(query_lengths: Any, key_lengths: Any, shape: tuple[int, int, int]) -> list[Any]:
    """Masks of queries and keys within their sequences, to broadcast to (B, K, G, T, S)."""
    b, t, s = shape
    masks = []
    for lengths, size, at in ((query_lengths, t, 3), (key_lengths, s, 4)):
        if lengths is not None:
            inside = lax.lt(_positions((b, size), 1), _lengths(lengths, (b, size)))
            masks.append(lax.reshape(inside, [b if d == 0 else size if d == at else 1
                                              for d in range(5)]))  # fmt: skip
    return masks


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
