"""Sparse arrays: each operation beside the dense one, and beside JAX's."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.base.errors import ArgumentError, RefusedError, ShapeError
from spmd.experimental import sparse

RANDOM = np.random.RandomState(0)


def some(*shape):
    return (RANDOM.randn(*shape) * (RANDOM.rand(*shape) < 0.5)).astype(np.float32)


A, B, T = some(3, 4), some(4, 5), some(2, 3, 4)
V, W, D = (RANDOM.randn(*s).astype(np.float32) for s in ((4,), (3,), (4, 2)))
TWICE = np.array([1.0, 2, 3, 4], np.float32), np.array([[0, 1], [0, 1], [2, 3], [3, 4]])

# In each, `s` is the module, `m` and `n` matrices, `t*` batched ones, `c` a BCSR.
EXPRESSIONS = """
m @ V, m @ D, m.T @ W, m @ n, D.T @ m.T.todense()
m.astype('int8'), m.astype(dtype='float16')
m + m, m - 2 * m, m * A, m * V, m * m, m / 2.0, -m, abs(m)
m.sum(), m.sum(0), m.sum(axis=1), t1.sum(0), t1.sum(1), td.sum(2), t0.sum((0, 2))
m[0], m[:, 1], m[1:3], m[1, 2], m[::2, ::-1], m[None], t0[0], t1[1], td[0, 1]
m.reshape(2, 6), m.reshape(12), t0.reshape(6, 4), t1.reshape(2, 12), t0.transpose((2, 0, 1))
twice, twice @ V, twice.sum_duplicates(), twice.sort_indices(), twice.sum_duplicates(nse=4)
m.update_layout(n_batch=1, on_inefficient=None), m.update_layout(n_dense=1, on_inefficient=None)
t1.update_layout(n_batch=0), td.update_layout(n_dense=0)
j.vmap(lambda x: x @ V)(t1), j.vmap(lambda x: x.T)(t1), t1 @ V
s.bcoo_dot_general(t1, np.ones((2, 4, 3)), dimension_numbers=(((2,), (1,)), ((0,), (0,))))
s.bcoo_dot_general(np.ones((2, 4, 3)), t1, dimension_numbers=(((1,), (2,)), ((0,), (0,))))
s.bcoo_dot_general(t1, t1.transpose((0, 2, 1)), dimension_numbers=(((2,), (1,)), ((0,), (0,))))
s.bcoo_dot_general(t0, np.ones((3, 4, 3)), dimension_numbers=(((1, 2), (0, 1)), ((), ())))
s.bcoo_dot_general_sampled(A, B, TWICE[1][:3], dimension_numbers=(((1,), (0,)), ((), ())))
s.bcoo_extract(m, A + 1), s.bcoo_extract(twice, A + 1).data, s.bcoo_multiply_dense(t1, V)
s.bcoo_broadcast_in_dim(m, shape=(2, 3, 4), broadcast_dimensions=(1, 2))
s.bcoo_concatenate([m, m], dimension=0), s.bcoo_concatenate([t1, t1], dimension=0)
s.bcoo_rev(m, (0,)), s.bcoo_dynamic_slice(m, (1, 7), (2, 2))
s.bcoo_slice(m, start_indices=(0, 1), limit_indices=(3, 4), strides=(2, 1))
j.jit(lambda x, v: x @ v)(m, V), j.jit(lambda x: x.T @ x)(m)
s.grad(lambda x: ((x @ V) ** 2).sum())(m), s.jacfwd(lambda x: x @ V)(m)
s.jacrev(lambda x: x @ V)(m), s.value_and_grad(lambda x: (x.todense() ** 3).sum())(m)
j.grad(lambda v: ((m @ v) ** 2).sum())(V), j.jvp(lambda v: m @ v, (V,), (V,))
s.sparsify(lambda x: j.numpy.sin(x) + j.numpy.tanh(x) * 2)(m), s.sparsify(lambda x: x**2)(m)
s.sparsify(lambda x: j.lax.fori_loop(0, 3, lambda i, y: y * 2, x))(m)
s.sparsify(lambda x, p: j.lax.cond(p, lambda y: y @ V, lambda y: (2 * y) @ V, x))(m, True)
s.sparsify(lambda x: j.numpy.einsum("ij,j->i", x, V))(m)
c, c @ V, c @ D, c.indptr, c.to_bcoo(), j.jit(lambda x: x @ V)(c)
s.BCSR.from_bcoo(twice), s.bcsr_fromdense(A, nse=9), s.bcsr_concatenate([c, c], dimension=0)
s.COO.fromdense(A) @ V, s.COO.fromdense(A).T @ D[:3], s.CSR.fromdense(A) @ D
s.CSR.fromdense(A).T @ W, s.CSC.fromdense(A) @ V, s.CSC.fromdense(A).indptr
s.eye(3, 4, 1), s.eye(3, sparse_format="csc"), s.empty((2, 3), nse=4)
""".strip().splitlines()


def plain(x):
    """A value as a nested list of what both libraries must agree in."""
    if isinstance(x, (tuple, list)):
        return [plain(y) for y in x]
    if hasattr(x, "todense"):
        kind = [type(x).__name__, str(x.dtype), list(x.shape)]
        return [kind, getattr(x, "n_batch", 0), getattr(x, "n_dense", 0), plain(x.todense())]
    return [str(x.dtype), np.round(np.asarray(x, np.float64), 3).tolist()]


def side(j, s, text):
    names = {
        "j": j, "s": s, "np": np, "A": A, "B": B, "V": V, "W": W, "D": D, "TWICE": TWICE,
        "m": s.BCOO.fromdense(A), "n": s.BCOO.fromdense(B), "t0": s.BCOO.fromdense(T),
        "t1": s.BCOO.fromdense(T, n_batch=1), "td": s.BCOO.fromdense(T, n_dense=1),
        "twice": s.BCOO(TWICE, shape=(3, 4)), "c": s.BCSR.fromdense(A),
    }  # fmt: skip
    return plain(eval(text, names))


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_as_in_jax(text, from_jax):
    def ask():
        return side(
            importlib.import_module("jax"), importlib.import_module("jax.experimental.sparse"), text
        )

    wanted = from_jax(ask, of=text)
    found = side(spmd, sparse, text)
    assert str(found) == str(wanted)


def test_scan_takes_batches():
    stacked = sparse.BCOO.fromdense(T, n_batch=1)
    total, _ = spmd.lax.scan(lambda c, m: (c + m @ V, None), snp.zeros(3), stacked)
    np.testing.assert_allclose(total, (T @ V).sum(0), rtol=1e-5)


def test_gradients_are_those_of_finite_differences():
    m = sparse.BCOO.fromdense(A)

    def loss(m):
        return snp.sum(snp.sin(m @ D)) + snp.sum((m * m).data)

    found = sparse.grad(loss)(m)
    assert found.indices is m.indices
    for k in range(m.nse):
        ends = [loss(sparse.BCOO((m.data.at[k].add(h), m.indices), shape=m.shape))
                for h in (1e-2, -1e-2)]  # fmt: skip
        assert abs((ends[0] - ends[1]) / 2e-2 - found.data[k]) < 2e-2


def test_random_and_solved():
    key = spmd.random.key(0)
    m = sparse.random_bcoo(key, (2, 5, 4), nse=0.3, n_batch=1)
    assert (m.nse, m.n_batch, m.shape) == (6, 1, (2, 5, 4))
    assert len({tuple(row) for row in m.indices[0].tolist()}) == 6
    square = sparse.CSR.fromdense(np.eye(4) * 2 + some(4, 4) / 9)
    x = sparse.linalg.spsolve(square.data, square.indices, square.indptr, V)
    np.testing.assert_allclose(square @ x, V, atol=1e-5)


def test_mistakes():
    m = sparse.BCOO.fromdense(A)
    with pytest.raises(NotImplementedError, match="call todense"):
        m + 1
    with pytest.raises(RefusedError, match="sparse rule for exp is not implemented"):
        sparse.sparsify(snp.exp)(m)
    with pytest.raises(ShapeError, match=r"dims \(1,\) of \(3, 4\) and \(0,\) of \(3,\)"):
        sparse.bcoo_dot_general(m, W, dimension_numbers=(((1,), (0,)), ((), ())))
    with pytest.raises(ShapeError, match="data of shape"):
        sparse.BCOO((np.ones(3), np.ones((2, 2), int)), shape=(3, 3))
    with pytest.raises(sparse.SparseEfficiencyError, match="on_inefficient=None"):
        m.update_layout(n_batch=1)
    with pytest.raises(ArgumentError, match="n_batch=3"):
        sparse.BCOO.fromdense(A, n_batch=3)
    with pytest.raises(TypeError, match="give nse"):
        spmd.jit(lambda x: sparse.BCOO.fromdense(x).data)(A)
