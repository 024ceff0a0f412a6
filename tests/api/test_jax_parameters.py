"""Calls with parameters as JAX names and orders them, where ours once were others."""

from __future__ import annotations

import jax.experimental.sparse as jax_sparse
import jax.numpy as jnp
import jax.scipy.stats as jax_stats
import numpy as np
import pytest
import scipy.stats as scipy_stats

import spmd
import spmd.numpy as snp
from spmd.base.config import config
from spmd.experimental import sparse
from spmd.scipy import stats
from spmd.testing import check_grads

ROWS = np.array([[0.0, 1.0, 2.0], [2.0, 1.0, 0.5]], np.float32)


def test_dtype_of_a_covariance_is_the_last_by_position():
    np.testing.assert_allclose(
        snp.cov(ROWS, None, True, False, None, None, None, np.float32),
        jnp.cov(ROWS, None, True, False, None, None, None, np.float32),
        rtol=1e-6,
    )
    found = snp.corrcoef(ROWS, None, True, np.float16)
    assert found.dtype == jnp.corrcoef(ROWS, None, True, np.float16).dtype == np.float16


def test_methods_of_arrays_take_jaxs_arguments():
    x, theirs = snp.arange(4), jnp.arange(4)
    mask = np.array([True, False, True, True])
    for options in ({"size": 2}, {"size": 3, "fill_value": 9}, {"axis": 0, "out": None}):
        found = np.asarray(x.compress(mask, **options))
        np.testing.assert_array_equal(found, theirs.compress(mask, **options))
    assert x.view(np.uint32, type=None).dtype == np.uint32
    with pytest.raises(ValueError, match=r"view: type=.* must be None: arrays have one class"):
        x.view(np.uint32, np.matrix)  # type: ignore[arg-type]


def test_take_along_axis_wraps_by_default():
    at = np.array([[-1], [0]])
    found = np.asarray(snp.take_along_axis(ROWS, at, 1, wrap_negative_indices=None))
    np.testing.assert_array_equal(found, jnp.take_along_axis(ROWS, at, 1))
    out = snp.take_along_axis(ROWS, at, 1, wrap_negative_indices=False)
    assert np.isnan(out[0, 0]) and out[1, 0] == 2


def test_callback_is_a_decorator_too():
    seen = []

    @spmd.debug.callback(ordered=True)
    def note(x, scale=1):
        """Keep a number."""
        seen.append(float(x) * float(scale))

    spmd.jit(lambda x: (note(x, scale=2.0), x)[1])(3.0)
    spmd.effects_barrier()
    assert seen == [6.0] and note.__doc__ == "Keep a number."
    with pytest.raises(ValueError, match="the first argument must be callable"):
        spmd.debug.callback(None, 1.0)


def test_arrays_of_other_libraries_by_jaxs_names():
    x = np.arange(3, dtype=np.float32)
    found = spmd.dlpack.from_dlpack(external_array=x, device=None, copy=True)
    np.testing.assert_array_equal(found, x)
    assert not np.shares_memory(np.asarray(found), x)


def test_no_axis_names_are_all_axes():
    with config.override("num_cpu_devices", 8):
        mesh = spmd.make_mesh((8,), ("i",))
        total = spmd.shard_map(
            lambda x: spmd.lax.psum(x, "i"),
            mesh=mesh,
            in_specs=spmd.P("i"),
            out_specs=spmd.P(),
            axis_names=frozenset(),
        )
        assert int(total(snp.arange(8))[0]) == 28


def test_quantiles_by_jaxs_names():
    q = np.array([0.1, 0.5, 0.9], np.float32)
    for name, method, argument in (
        ("gumbel_l", "ppf", "p"),
        ("gumbel_r", "ppf", "p"),
        ("logistic", "ppf", "x"),
        ("logistic", "isf", "x"),
        ("norm", "ppf", "q"),
    ):
        found, wanted = (
            getattr(getattr(s, name), method)(**{argument: q}) for s in (stats, jax_stats)
        )
        np.testing.assert_allclose(found, np.asarray(wanted), rtol=2e-5, atol=1e-6)


def test_entropy_of_poisson():
    mu = np.array([0.0, 1e-3, 0.5, 3.0, 10.0, 39.0, 41.0, 99.0, 101.0])
    with spmd.enable_x64(True):
        found = stats.poisson.entropy(mu)
        np.testing.assert_allclose(found, scipy_stats.poisson.entropy(mu), rtol=2e-8, atol=1e-12)
        check_grads(stats.poisson.entropy, (mu[1:],), 1)
        # Both ways agree where they meet.
        np.testing.assert_allclose(*stats.poisson.entropy(np.array([40.0, 40 + 1e-9])), rtol=2e-9)
    assert stats.poisson.entropy(mu.astype(np.float32), np.zeros((2, 1))).shape == (2, 9)
    assert np.isnan(stats.poisson.entropy(-1.0))
    np.testing.assert_allclose(
        stats.poisson.entropy(mu), np.asarray(jax_stats.poisson.entropy(mu)), rtol=1e-4, atol=1e-6
    )


def test_sparse_functions_take_jaxs_arguments():
    mat = np.array([[0, 1.0, 0], [2, 0, 3]], np.float32)
    ours, theirs = sparse.BCSR.fromdense(mat), jax_sparse.BCSR.fromdense(mat)
    new = np.arange(6, dtype=np.float32).reshape(2, 3)
    found = sparse.bcsr_extract(ours.indices, ours.indptr, new)
    wanted = jax_sparse.bcsr_extract(theirs.indices, theirs.indptr, new)
    np.testing.assert_array_equal(np.asarray(found), wanted)
    batch = np.stack([mat, mat[:, ::-1]])
    ours, theirs = (s.BCSR.fromdense(batch, n_batch=1) for s in (sparse, jax_sparse))
    news = np.stack([new, new + 10])
    found = sparse.bcsr_extract(ours.indices, ours.indptr, news)
    wanted = jax_sparse.bcsr_extract(theirs.indices, theirs.indptr, news)
    np.testing.assert_array_equal(np.asarray(found), wanted)
    made = sparse.random_bcoo(spmd.random.key(0), (4, 5), nse=0.5, sorted_indices=True)
    assert made.dtype == np.float32 and made.nse == 10
    coo = sparse.BCOO.fromdense(mat)
    with pytest.raises(NotImplementedError, match="sparse arrays lie on one device"):
        sparse.bcoo_reshape(coo, new_sizes=(6,), sharding=spmd.P())
