"""Calls of every function of the standard that is not elementwise, with each of its parameters.

`xp` is the namespace: spmd's or NumPy's, which follows the standard and is the second opinion.
"""

from __future__ import annotations

from typing import Any

import numpy as np

RANDOM = np.random.default_rng(7)
V = np.array([3.0, -1.0, 2.0, 2.0, 0.0])
M = RANDOM.normal(size=(3, 4))
S = RANDOM.normal(size=(2, 3, 3)) + 3 * np.eye(3)
PD = S @ S.transpose(0, 2, 1)
N = np.array([[5, 1, 4], [2, 2, 0]])
Z = M + 1j * M[::-1]
B = np.array([[True, False, True], [False, False, True]])

# A line is one test; the functions that it is about are those that it names after `xp.`.
CALLS = """
xp.all(a(B)), xp.all(a(B), axis=0), xp.all(a(B), axis=(0, 1), keepdims=True), xp.all(a(B[:0]))
xp.any(a(B)), xp.any(a(B), axis=-1), xp.any(a(B), axis=(0, 1), keepdims=True), xp.any(a(B[:0]))
xp.arange(5), xp.arange(2, 9), xp.arange(9.0, 2, -2), xp.arange(1, stop=4, step=2, dtype=xp.int8)
xp.argmax(a(M)), xp.argmax(a(M), axis=0), xp.argmax(a(M), axis=-1, keepdims=True)
xp.argmin(a(M)), xp.argmin(a(M), axis=0), xp.argmin(a(M), axis=-1, keepdims=True)
xp.argsort(a(V), stable=True), xp.argsort(a(M), axis=0), xp.argsort(a(N), axis=-1, stable=True)
xp.asarray([[1, 2]]), xp.asarray(1.5, dtype=xp.float32), xp.asarray(True)
xp.asarray(a(N), copy=True)
xp.astype(a(V), xp.int8), xp.astype(a(N), xp.complex64, copy=True), xp.astype(a(N), xp.bool)
xp.broadcast_arrays(a(V), a(V)[:, None], a(2))
xp.broadcast_shapes((3, 1), (1, 4), (4,)), xp.broadcast_shapes()
xp.broadcast_shapes((0, 1), (2,))
xp.broadcast_to(a(V), (2, 5)), xp.broadcast_to(a(3), shape=(0, 2))
xp.can_cast(xp.int8, xp.int16), xp.can_cast(xp.int64, xp.int8), xp.can_cast(xp.bool, xp.bool)
xp.clip(a(V), 0, 2), xp.clip(a(N), min=2), xp.clip(a(M), max=a(M)[0]), xp.clip(a(V))
xp.concat([a(M), a(M)]), xp.concat((a(N), a(B)[:, :1].astype(xp.int64)), axis=1)
xp.concat([a(M), a(V)], axis=None)
xp.count_nonzero(a(N)), xp.count_nonzero(a(B), axis=0)
xp.count_nonzero(a(Z), axis=(0,), keepdims=True)
xp.cumulative_prod(a(V)), xp.cumulative_prod(a(N), axis=1, dtype=xp.float32, include_initial=True)
xp.cumulative_sum(a(V)), xp.cumulative_sum(a(N), axis=0, dtype=xp.int16, include_initial=True)
xp.diff(a(V)), xp.diff(a(M), axis=0, n=2), xp.diff(a(V), prepend=a(V)[:2], append=a(V)[:1])
xp.empty((2, 0)), xp.empty(0, dtype=xp.int8), xp.empty_like(a(N)[:0])
xp.empty_like(a(N)[:0], dtype=xp.bool)
xp.expand_dims(a(V), 0), xp.expand_dims(a(M), axis=-1), xp.expand_dims(a(M), axis=(0, 2))
xp.eye(2), xp.eye(2, 3, k=1, dtype=xp.int8), xp.eye(3, None, k=-1)
xp.finfo(xp.float32).eps, xp.finfo(xp.complex128).max, xp.finfo(xp.float64).smallest_normal
xp.finfo(xp.float64).bits
xp.flip(a(M)), xp.flip(a(M), axis=0), xp.flip(a(M), axis=(-1,))
xp.full(3, 2.5), xp.full((2, 2), True), xp.full((1,), 3, dtype=xp.uint8), xp.full((), 1j)
xp.full_like(a(N), 7), xp.full_like(a(N), 1, dtype=xp.float32)
xp.iinfo(xp.int8).min, xp.iinfo(xp.uint64).max, xp.iinfo(xp.int16).bits
xp.isdtype(xp.int8, "integral"), xp.isdtype(xp.float32, ("bool", xp.float32))
xp.isdtype(xp.bool, "numeric")
xp.isin(a(N), a([2, 5])), xp.isin(a(V), 2.0, invert=True), xp.isin(2.0, a(V))
xp.linspace(0, 1, 5), xp.linspace(2.0, -1, num=3, endpoint=False, dtype=xp.float32)
xp.linspace(1, 2, 1)
xp.matmul(a(M), a(M).T), xp.matmul(a(S), a(S)[0]), xp.matmul(a(V), a(V)), xp.matmul(a(M), a(M)[0])
xp.matrix_transpose(a(S)), xp.matrix_transpose(a(M))
xp.max(a(M)), xp.max(a(N), axis=0), xp.max(a(M), axis=(0, 1), keepdims=True)
xp.mean(a(M)), xp.mean(a(Z), axis=0), xp.mean(a(M), axis=(0, 1), keepdims=True)
xp.mean(a(M), axis=())
xp.meshgrid(a(V), a(V)[:2]), xp.meshgrid(a(V), a(V)[:2], indexing="ij"), xp.meshgrid(a(V))
xp.min(a(M)), xp.min(a(N), axis=0), xp.min(a(M), axis=(0, 1), keepdims=True)
xp.moveaxis(a(S), 0, 2), xp.moveaxis(a(S), (0, 1), (-1, 0))
xp.nonzero(a(N)), xp.nonzero(a(B))
xp.ones(3), xp.ones((2, 0), dtype=xp.bool), xp.ones_like(a(N)), xp.ones_like(a(V), dtype=xp.int8)
xp.permute_dims(a(S), (2, 0, 1)), xp.permute_dims(a(M), axes=(1, 0))
xp.prod(a(V)), xp.prod(a(N), axis=0), xp.prod(a(M), axis=(0,), dtype=xp.float32, keepdims=True)
xp.prod(a(V)[:0])
xp.repeat(a(V), 2), xp.repeat(a(M), a([1, 0, 2]), axis=0), xp.repeat(a(N), 3, axis=1)
xp.reshape(a(M), (4, 3)), xp.reshape(a(M), (-1,), copy=True), xp.reshape(a(M), shape=(2, -1))
xp.result_type(xp.int8, xp.uint8), xp.result_type(a(V), xp.complex64), xp.result_type(a(N), 2)
xp.roll(a(V), 2), xp.roll(a(M), (1, -1), axis=(0, 1)), xp.roll(a(M), -1, axis=1), xp.roll(a(M), 5)
xp.searchsorted(xp.sort(a(V)), a(M))
xp.searchsorted(a(V), a([2.0]), side="right", sorter=xp.argsort(a(V)))
xp.searchsorted(a([1.0, 2]), 1.5)
xp.sort(a(V)), xp.sort(a(M), axis=0), xp.sort(a(N), stable=True)
xp.squeeze(a(M)[None], 0), xp.squeeze(a(M)[:, :1, None], axis=(1, 2))
xp.stack([a(V), a(V)]), xp.stack((a(N), a(N)), axis=-1)
xp.std(a(M)), xp.std(a(M), axis=0, correction=1.0), xp.std(a(M), axis=(0, 1), keepdims=True)
xp.sum(a(M)), xp.sum(a(N), axis=0), xp.sum(a(M), axis=(0, 1), dtype=xp.float32, keepdims=True)
xp.sum(a(V)[:0])
xp.take(a(V), a([4, 0])), xp.take(a(M), a([1, 1]), axis=0), xp.take(a(M), a([2]), axis=-1)
xp.take_along_axis(a(N), a([[2, 0], [1, 1]])), xp.take_along_axis(a(N), a([[1, 0, 1]]), axis=0)
xp.tensordot(a(M), a(M), axes=2), xp.tensordot(a(S), a(M), axes=((1,), (0,)))
xp.tensordot(a(V), a(V), axes=0)
xp.tile(a(N), (2, 1)), xp.tile(a(V), (3,)), xp.tile(a(N), (2, 1, 2))
xp.tril(a(S)), xp.tril(a(M), k=1), xp.triu(a(S)), xp.triu(a(M), k=-1)
xp.unique_all(a(N)), xp.unique_counts(a(V)), xp.unique_inverse(a(N))
xp.sort(xp.unique_values(a(B)))
xp.unstack(a(M)), xp.unstack(a(M), axis=-1)
xp.var(a(M)), xp.var(a(M), axis=0, correction=1.0), xp.var(a(M), axis=(0, 1), keepdims=True)
xp.vecdot(a(M), a(M)), xp.vecdot(a(Z), a(Z), axis=0), xp.vecdot(a(M), a(M)[0])
xp.where(a(B), a(N), 0), xp.where(a(B), 1.5, a(N).astype(xp.float32))
xp.where(a(B), a(N), a(N)[0])
xp.zeros(3), xp.zeros((2, 0), dtype=xp.bool), xp.zeros_like(a(N))
xp.zeros_like(a(V), dtype=xp.int8)
xp.linalg.cholesky(a(PD)), xp.linalg.cholesky(a(PD), upper=True)
xp.linalg.cross(a(M)[:, :3], a(M)[0, :3]), xp.linalg.cross(a(M), a(M)[::-1], axis=0)
xp.linalg.det(a(S)), xp.linalg.inv(a(S)), xp.linalg.inv(a(S)[0])
xp.linalg.diagonal(a(S)), xp.linalg.diagonal(a(M), offset=-1), xp.linalg.trace(a(S))
xp.linalg.trace(a(M), offset=1, dtype=xp.float32)
abs(xp.linalg.eigh(a(PD)).eigenvalues), xp.linalg.eigvalsh(a(PD))
xp.sort(abs(xp.linalg.eigvals(a(S)))), xp.sort(abs(xp.linalg.eig(a(S)).eigenvalues))
xp.linalg.matmul(a(M), a(M).T), xp.linalg.matrix_transpose(a(S)), xp.linalg.outer(a(V), a(V)[:2])
xp.linalg.matrix_norm(a(S)), xp.linalg.matrix_norm(a(S), ord=1, keepdims=True)
xp.linalg.matrix_norm(a(M), ord="nuc"), xp.linalg.matrix_norm(a(M), ord=-2)
xp.linalg.matrix_power(a(S), 3), xp.linalg.matrix_power(a(S), -2), xp.linalg.matrix_power(a(S), 0)
xp.linalg.matrix_rank(a(S)), xp.linalg.matrix_rank(a(M), rtol=0.5), xp.linalg.pinv(a(M))
xp.linalg.pinv(a(M), rtol=0.5)
abs(xp.linalg.qr(a(M)).R), abs(xp.linalg.qr(a(S), mode="complete").Q), xp.linalg.slogdet(a(S))
xp.linalg.solve(a(S), a(S)[0]), xp.linalg.solve(a(S)[0], a(V)[:3])
xp.linalg.svd(a(M)).S, xp.linalg.svd(a(M), full_matrices=False).S
abs(xp.linalg.svd(a(S), full_matrices=True).U), xp.linalg.svdvals(a(S))
xp.linalg.tensordot(a(M), a(M), axes=2), xp.linalg.vecdot(a(Z), a(Z), axis=0)
xp.linalg.vector_norm(a(M)), xp.linalg.vector_norm(a(M), axis=0, ord=1)
xp.linalg.vector_norm(a(Z), axis=(0, 1), keepdims=True, ord=xp.inf)
xp.linalg.vector_norm(a(M), axis=1, ord=3)
xp.fft.fft(a(Z)), xp.fft.fft(a(Z), n=3, axis=0, norm="ortho"), xp.fft.ifft(a(Z))
xp.fft.ifft(a(Z), n=5, norm="forward")
xp.fft.fftn(a(Z)), xp.fft.fftn(a(Z), s=(2, 2), axes=(0, 1), norm="ortho")
xp.fft.ifftn(a(Z), axes=(0,))
xp.fft.rfft(a(M)), xp.fft.rfft(a(M), n=3, axis=0, norm="forward"), xp.fft.irfft(a(Z))
xp.fft.irfft(a(Z), n=5)
xp.fft.rfftn(a(M)), xp.fft.rfftn(a(M), s=(2, 4), axes=(0, 1))
xp.fft.irfftn(a(Z), s=(3, 5), axes=(0, 1))
xp.fft.hfft(a(Z)), xp.fft.hfft(a(Z), n=5, norm="ortho"), xp.fft.ihfft(a(M))
xp.fft.ihfft(a(M), n=3, axis=0)
xp.fft.fftfreq(5), xp.fft.fftfreq(4, d=0.5), xp.fft.rfftfreq(5), xp.fft.rfftfreq(4, d=0.5)
xp.fft.fftshift(a(M)), xp.fft.fftshift(a(M), axes=0), xp.fft.ifftshift(a(M))
xp.fft.ifftshift(a(M), axes=(1,))
"""

# What NumPy has no equal of: its sorts do not go down, for one.
ALONE = {
    "xp.sort(a(N), descending=True)": [[5, 4, 1], [2, 2, 0]],
    "xp.argsort(a(N), descending=True)": [[0, 2, 1], [0, 1, 2]],
    "xp.argsort(a(N), axis=0, descending=True, stable=False)": [[0, 1, 0], [1, 0, 1]],
    "xp.iinfo(a(N)).bits": 64,
    "xp.finfo(a(V)).eps": 2.0**-52,
    "xp.from_dlpack(V, device=xp.asarray(0).device, copy=True)": V,
}


def evaluate(text: str, xp: Any) -> list[Any]:
    """The values of one line of calls in a namespace."""
    names = {"a": xp.asarray, "V": V, "M": M, "S": S, "PD": PD, "N": N, "Z": Z, "B": B}
    return eval(f"[{text}]", {"xp": xp, **names})
