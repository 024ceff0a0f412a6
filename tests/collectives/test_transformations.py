"""Collectives under grad, vmap and jit, inside and outside of the map; vmap is the definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.sharding import PartitionSpec as P
from spmd.testing import check_grads
from tests.collectives.compare import assert_close
from tests.collectives.table import CASES, OURS, Case

N = 4
FLOAT_CASES = [c for c in (*CASES, *OURS) if "float32" in c.dtypes and c.fits(N)]
EACH = pytest.mark.parametrize("case", FLOAT_CASES, ids=str)
LOOSE = 10.0  # times the tolerance of one operation


def setup(case: Case) -> Any:
    """The per-device function of a case, and its stacked operand."""
    return (lambda x: case.body(lax, x, N)), case.example(N, "float32")


def weigh(y: Any, numpy: Any = snp) -> Any:
    """A nonlinear scalar function of a result, in which every element counts differently."""
    weights = np.arange(1, y.size + 1, dtype=np.float32).reshape(y.shape)
    return numpy.sum(numpy.sin(y) * weights)


def mapped_over_mesh(f: Any, typed: bool = True) -> Any:
    """`f` as a shard_map of rows."""
    return spmd.shard_map(
        lambda rows: f(rows[0])[None],
        mesh=spmd.make_mesh((N,), ("i",)),
        in_specs=P("i"),
        out_specs=P("i"),
        check_vma=typed,
    )


# ---- gradients ---------------------------------------------------------------------------------


@EACH
def test_grad_inside_pmap_is_grad_inside_vmap(case: Case):
    f, x = setup(case)
    gradient = spmd.grad(lambda x: weigh(f(x)))
    expected = spmd.vmap(gradient, axis_name="i")(x)
    assert_close(spmd.pmap(gradient, axis_name="i")(x), expected, factor=LOOSE)


# JAX's vmap has no rule for these: pmax and pmin have no derivative there, its all_to_all between
# different dims fails, and permutations must be whole.
_NOT_IN_JAX = ("pmax", "pmin", "all_to_all_0_1", "all_to_all_1_0", "groups", "_some", "_none")


IN_JAX = [c for c in FLOAT_CASES if c in CASES and not any(w in c.name for w in _NOT_IN_JAX)]


@pytest.mark.parametrize("case", IN_JAX, ids=str)
def test_grad_inside_is_jaxs(case: Case):
    jax = pytest.importorskip("jax")
    f, x = setup(case)
    theirs = jax.grad(lambda x: weigh(case.body(jax.lax, x, N), jax.numpy))
    expected = jax.vmap(theirs, axis_name="i")(x)
    found = spmd.pmap(spmd.grad(lambda x: weigh(f(x))), axis_name="i")(x)
    assert_close(found, expected, factor=LOOSE)


@EACH
def test_grad_of_pmap_is_grad_of_vmap(case: Case):
    f, x = setup(case)

    def gradient(mapped: Any) -> Any:
        return spmd.grad(lambda x: weigh(mapped(x)))(x)

    expected = gradient(spmd.vmap(f, axis_name="i"))
    assert_close(gradient(spmd.pmap(f, axis_name="i")), expected, "pmap", LOOSE)
    assert_close(gradient(mapped_over_mesh(f)), expected, "typed", LOOSE)
    assert_close(gradient(mapped_over_mesh(f, typed=False)), expected, "untyped", LOOSE)


@EACH
@pytest.mark.parametrize("kind", ["pmap", "shard_map"])
def test_second_derivatives_are_finite_differences(case: Case, kind: str):
    f, x = setup(case)
    mapped = spmd.pmap(f, axis_name="i") if kind == "pmap" else mapped_over_mesh(f)
    check_grads(mapped, (x,), 2, atol=3e-2, rtol=3e-2)


def test_psum_of_an_untyped_axis_transposes_to_psum():
    """As in JAX's pmap: the gradient inside counts every device's loss."""
    x = np.arange(4.0, dtype=np.float32)
    gradient = spmd.grad(lambda x: lax.psum(x, "i") * 3)
    np.testing.assert_array_equal(spmd.pmap(gradient, axis_name="i")(x), np.full(4, 12.0))


def test_psum_of_a_typed_axis_transposes_to_a_cast():
    """In shard_map the types know that the loss is one number, not one a device."""
    x = np.arange(4.0, dtype=np.float32)
    gradient = spmd.grad(lambda x: lax.psum(x[0], "i") * 3)
    mapped = spmd.shard_map(
        gradient, mesh=spmd.make_mesh((4,), ("i",)), in_specs=P("i"), out_specs=P("i")
    )
    np.testing.assert_array_equal(mapped(x), np.full(4, 3.0))


@pytest.mark.parametrize("op", ["pmax", "pmin"])
def test_extremes_share_the_gradient_of_ties(op: str):
    x = np.array([1.0, 1.0, 1.0, 1.0], np.float32)
    mapped = spmd.pmap(lambda x: getattr(lax, op)(x, "i"), axis_name="i")
    np.testing.assert_allclose(spmd.grad(lambda x: mapped(x)[0])(x), np.full(4, 0.25))


def test_gradients_of_complex_sums():
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(4, 2)) + 1j * rng.normal(size=(4, 2))).astype(np.complex64)
    check_grads(spmd.pmap(lambda x: lax.psum(x * x, "i"), axis_name="i"), (x,), 2, rtol=1e-1)


def test_integer_operands_have_no_gradient():
    def f(x, k):
        return x * lax.psum(k, "i")

    x, k = np.ones(4, np.float32), np.arange(4)
    out = spmd.grad(lambda x: spmd.pmap(f, axis_name="i")(x, k).sum())(x)
    np.testing.assert_array_equal(out, np.full(4, 6.0))


# ---- batching and compiling --------------------------------------------------------------------


@EACH
def test_vmap_and_pmap_commute(case: Case):
    f, x = setup(case)
    xs = np.stack([x, 2 * x, x - 1], 1)
    expected = spmd.vmap(spmd.vmap(f, axis_name="i"), in_axes=1, out_axes=1)(xs)
    assert_close(spmd.pmap(spmd.vmap(f), axis_name="i")(xs), expected, "pmap of vmap")
    over = {"in_axes": 1, "out_axes": 1}
    assert_close(spmd.vmap(spmd.pmap(f, axis_name="i"), **over)(xs), expected, "vmap of pmap")
    assert_close(spmd.vmap(mapped_over_mesh(f), **over)(xs), expected, "vmap of shard_map")


@EACH
def test_jit_inside_and_outside_of_pmap_changes_nothing(case: Case):
    f, x = setup(case)
    expected = spmd.pmap(f, axis_name="i")(x)
    assert_close(spmd.jit(spmd.pmap(f, axis_name="i"))(x), expected, "jit of pmap")
    assert_close(spmd.pmap(spmd.jit(f), axis_name="i")(x), expected, "pmap of jit")
    assert_close(spmd.jit(mapped_over_mesh(f))(x), expected, "jit of shard_map")


def test_vmap_with_a_name_inside_pmap_is_nested_vmap():
    x = np.arange(12.0, dtype=np.float32).reshape(4, 3)

    def f(x):
        return x - lax.pmean(x, ("i", "j")), lax.axis_index("j") + 10 * lax.axis_index("i")

    centred, index = spmd.pmap(spmd.vmap(f, axis_name="j"), axis_name="i")(x)
    np.testing.assert_allclose(centred, x - x.mean(), atol=1e-6)
    np.testing.assert_array_equal(index, 10 * np.arange(4)[:, None] + np.arange(3))


def test_grad_passes_through_jit_of_pmap_of_jit():
    x = np.arange(4.0, dtype=np.float32)
    f = spmd.jit(lambda x: snp.sin(x) * lax.pmean(x, "i"))
    mapped = spmd.jit(lambda x: spmd.pmap(f, axis_name="i")(x).sum())
    wanted = spmd.grad(lambda x: (snp.sin(x) * x.mean()).sum())(x)
    np.testing.assert_allclose(spmd.grad(mapped)(x), wanted, rtol=1e-5)
    np.testing.assert_allclose(
        spmd.hessian(mapped)(x),
        spmd.hessian(lambda x: (snp.sin(x) * x.mean()).sum())(x),
        rtol=1e-4,
        atol=1e-6,
    )


def test_jvp_and_jacobians_of_pmap_are_those_of_the_whole_function():
    x = np.arange(4.0, dtype=np.float32)
    mapped = spmd.pmap(lambda x: x * lax.psum(x, "i"), axis_name="i")
    plain = lambda x: x * x.sum()  # noqa: E731
    for transform in (spmd.jacfwd, spmd.jacrev):
        np.testing.assert_allclose(transform(mapped)(x), transform(plain)(x), rtol=1e-6)
    found, wanted = spmd.jvp(mapped, (x,), (x + 1,)), spmd.jvp(plain, (x,), (x + 1,))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
