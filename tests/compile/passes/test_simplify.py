"""Simplify: what an equation is equal to."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.compile.passes.inline_calls import inline_calls
from spmd.compile.passes.simplify import simplify


@pytest.mark.parametrize("wide, narrow", [("int32", "uint8"), ("uint8", "int32")])
def test_bits_of_one_number_everywhere_keep_their_shape(wide, narrow):
    for size in (0, 4):

        def f(x, size=size):
            return lax.bitcast_convert_type(snp.full((size, 4), x[0]), narrow)

        x = np.array([3], wide)
        np.testing.assert_array_equal(spmd.jit(f)(x), f(x))


@pytest.mark.parametrize(
    "spec, is_product",
    [
        ("ij,ij->j", False),
        ("bij,bij->j", False),
        ("ikj,ikj->ij", False),
        ("ij,ij->i", False),
        ("ih,ih->i", True),  # long sums along memory
        ("ij,ij->", True),
        ("ij,jk->ik", True),
        # many small ones: matrices by matrices and by vectors, from either side
        ("bij,bjk->bik", False),
        ("bji,bjk->bik", False),
        ("bij,bkj->bik", True),
        ("bij,bkj->bki", True),
        ("bij,bj->bi", False),
        ("bij,bi->bj", False),
        ("bi,bij->bj", False),
        ("bj,bij->bi", False),
        ("abij,abjk->abik", False),
        ("bil,bl->bi", False),
        ("bim,bm->bi", True),
        ("hil,hl->hi", False),
        ("hij,hj->hi", False),
        ("bli,bl->bi", False),
        ("bijk,bk->bij", True),
        ("bhi,bij->bhj", True),
        ("bi,bih->bh", True),
    ],
)
def test_small_and_inner_products_are_sums(spec, is_product):
    sizes = {"a": 2, "b": 3, "i": 5, "j": 5, "k": 5, "l": 9, "m": 12, "h": 5000}
    x, y = (
        np.random.default_rng(k).normal(size=[sizes[c] for c in names]).astype(np.float32)
        for k, names in enumerate(spec.split("->")[0].split(","))
    )
    program = spmd.jit(lambda x, y: snp.einsum(spec, x, y))
    assert ("product" in program.lower(x, y).compile().as_text()) == is_product
    np.testing.assert_allclose(program(x, y), np.einsum(spec, x, y), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "spec, is_product",
    [("ij,jk->ik", True), ("bji,bkj->bki", True), ("ij,jl->il", False), ("ij,j->i", False)],
)
def test_complex_products_are_four_of_real_numbers(spec, is_product):
    sizes = {"b": 3, "i": 40, "j": 33, "k": 48, "l": 3}
    numbers = np.random.default_rng(0).normal
    x, y = (
        (numbers(size=shape) + 1j * numbers(size=shape)).astype(np.complex64)
        for shape in ([sizes[c] for c in names] for names in spec.split("->")[0].split(","))
    )
    program = spmd.jit(lambda x, y: snp.einsum(spec, x, y))
    assert program.lower(x, y).compile().as_text().count("product") == 4 * is_product
    np.testing.assert_allclose(program(x, y), np.einsum(spec, x, y), rtol=1e-4, atol=1e-3)
    slope = spmd.jit(spmd.grad(lambda x: abs(snp.einsum(spec, x, y)).sum()))(x)
    with spmd.disable_jit():
        expected = spmd.grad(lambda x: abs(snp.einsum(spec, x, y)).sum())(snp.asarray(x))
    np.testing.assert_allclose(slope, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "left, right, out",
    [("int8", "int8", "int8"), ("int8", "int8", "int32"), ("uint8", "int8", "int32"),
     ("uint8", "uint8", "uint32"), ("int16", "uint16", "int32")],
)  # fmt: skip
@pytest.mark.parametrize("depth", [40, 3000])
def test_narrow_integers_are_multiplied_as_floats(left, right, out, depth):
    """Also where they are widened first; sums wrap as before."""
    rng = np.random.default_rng(0)
    x, y = (
        rng.integers(np.iinfo(d).min, np.iinfo(d).max, shape, d, endpoint=True)
        for d, shape in ((left, (33, depth)), (right, (depth, 31)))
    )
    program = spmd.jit(lambda x, y: x.astype(out) @ y.astype(out))
    assert "product" in program.lower(x, y).compile().as_text()
    expected = (x.astype(np.int64) @ y.astype(np.int64)).astype(out)
    np.testing.assert_array_equal(program(x, y), expected)


@pytest.mark.parametrize("apart", range(2, 9))
def test_lanes_that_are_some_elements_apart(apart):
    x = np.random.default_rng(0).normal(size=(77, apart)).astype(np.float32)
    found = spmd.jit(lambda x: (x[:, apart - 1] * 2, x[:, 0] + 1, x.sum(1)))(x)
    for one, other in zip(found, (x[:, apart - 1] * 2, x[:, 0] + 1, x.sum(1)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def _joined(x, y):
    return snp.concatenate([x, y * 2, x[:, :1]], axis=1)


REDUCTIONS = {
    "sum of both": lambda x, y: _joined(x, y).sum(),
    "sum along": lambda x, y: _joined(x, y).sum(1),
    "sum across": lambda x, y: _joined(x, y).sum(0),
    "max along": lambda x, y: _joined(x, y).max(1),
    "min across": lambda x, y: _joined(x, y).min(0),
    "product": lambda x, y: (1 + _joined(x, y) / 100).prod(1),
    "all": lambda x, y: (_joined(x, y) > -3).all(1),
    "any": lambda x, y: snp.concatenate([x > 2, y > 2]).any(0),
    "stacked": lambda x, y: snp.stack([x, y, x], axis=2).sum(2),
    "padded": lambda x, y: snp.pad(x, 2, mode="edge").sum(1),
    "mirrored": lambda x, y: snp.pad(x, 3, mode="reflect").max(0),
    "wrapped": lambda x, y: snp.pad(x, ((0, 9), (30, 1)), mode="wrap").sum(0),
    "narrow": lambda x, y: _joined(x.astype(snp.bfloat16), y.astype(snp.bfloat16)).max(1),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_parts_of_a_concatenation_are_reduced_one_by_one(name):
    x, y = np.random.default_rng(1).normal(size=(2, 7, 12)).astype(np.float32)
    f = REDUCTIONS[name]
    found = spmd.make_jaxpr(f)(x, y)
    before = [e for e in found.eqns if e.prim.name == "concatenate"]
    after = simplify(inline_calls(found))
    assert before and not any(
        e.prim.name.startswith("reduce") and e.invars[0] in _concatenations(after)
        for e in after.eqns
    )
    with spmd.disable_jit():
        expected = f(snp.asarray(x), snp.asarray(y))
    found = spmd.jit(f)(x, y)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(
        found.astype(np.float32), expected.astype(np.float32), rtol=1e-5, atol=1e-5
    )


def _concatenations(closed):
    return {v for e in closed.eqns if e.prim.name == "concatenate" for v in e.outvars}


def test_a_concatenation_with_other_readers_is_reduced_as_a_whole():
    x = np.ones((4, 3), np.float32)
    softmax = spmd.make_jaxpr(lambda x: spmd.nn.softmax(snp.concatenate([x, 2 * x], 1), -1))(x)
    many = spmd.make_jaxpr(lambda x: snp.concatenate([x * k for k in range(20)], 1).sum(1))(x)
    for closed in (softmax, many):
        made = simplify(inline_calls(closed))
        assert any(
            e.prim.name.startswith("reduce") and e.invars[0] in _concatenations(made)
            for e in made.eqns
        )
