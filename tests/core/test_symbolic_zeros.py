"""Rules of one's own that are told which tangents and cotangents are zero."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import numpy as snp
from spmd.custom_derivatives import (
    CustomVJPPrimal,
    SymbolicZero,
    custom_vjp_primal_tree_values,
    zero_from_primal,
)


def _product(seen: list[object]):
    """`x * y` with a forward rule that notes the tangents it gets."""

    @spmd.custom_jvp
    def f(x, y):
        return x * y

    def rule(primals, tangents):
        (x, y), (tx, ty) = primals, tangents
        seen.append((type(tx) is SymbolicZero, type(ty) is SymbolicZero))
        if type(tx) is SymbolicZero and type(ty) is SymbolicZero:
            return f(x, y), zero_from_primal(x * y, symbolic_zeros=True)
        parts = [u * t for u, t in ((y, tx), (x, ty)) if type(t) is not SymbolicZero]
        return f(x, y), sum(parts[1:], parts[0])

    f.defjvp(rule, symbolic_zeros=True)
    return f


_run = {
    "eager": lambda f: f,
    "jit": spmd.jit,
    "vmap": lambda f: lambda x: spmd.vmap(f)(x[None])[0],
    "jit of vmap": lambda f: spmd.jit(lambda x: spmd.vmap(f)(x[None])[0]),
}


@pytest.mark.parametrize("how", _run)
def test_a_forward_rule_sees_what_does_not_move(how):
    seen: list[object] = []
    f = _product(seen)
    x = np.float32(3)
    assert _run[how](spmd.grad(lambda x: f(x, 2.0)))(x) == 2
    assert set(seen) == {(False, True)}
    assert _run[how](spmd.grad(lambda x: f(x, x)))(x) == 6
    assert seen[-1] == (False, False)
    assert _run[how](spmd.grad(spmd.grad(lambda x: f(x, x))))(x) == 2


def test_a_rule_may_return_a_symbolic_zero():
    @spmd.custom_jvp
    def stop(x):
        return x

    stop.defjvp(
        lambda p, t: (stop(*p), zero_from_primal(p[0], symbolic_zeros=True)), symbolic_zeros=True
    )
    assert spmd.grad(lambda x: stop(x) * x)(3.0) == 3
    assert spmd.jit(spmd.vmap(spmd.grad(lambda x: stop(x) * x)))(np.array([3.0])) == 3


def test_zeros_have_a_type_but_no_values():
    zero = zero_from_primal(np.ones((2, 3), np.float32), symbolic_zeros=True)
    assert (zero.shape, zero.dtype, zero.ndim) == ((2, 3), np.float32, 2)
    np.testing.assert_array_equal(zero.instantiate(), np.zeros((2, 3)))
    assert zero_from_primal(np.int32(1)).dtype == spmd.float0


# ---- reverse rules -----------------------------------------------------------------------------


def _pair(perturbed: list[object], cotangents: list[object]):
    """`(x * y, x + y)` with rules that note what they are told."""

    @spmd.custom_vjp
    def f(x, y):
        return x * y, x + y

    def fwd(x, y):
        assert type(x) is CustomVJPPrimal
        perturbed.append((x.perturbed, y.perturbed))
        x, y = custom_vjp_primal_tree_values((x, y))
        return f(x, y), (x, y)

    def bwd(residuals, cts):
        (x, y), (a, b) = residuals, cts
        cotangents.append((type(a) is SymbolicZero, type(b) is SymbolicZero))
        a, b = (snp.zeros(()) if type(t) is SymbolicZero else t for t in (a, b))
        return a * y + b, a * x + b

    f.defvjp(fwd, bwd, symbolic_zeros=True, optimize_remat=True)
    return f


@pytest.mark.parametrize("how", _run)
def test_reverse_rules_see_what_does_not_move(how):
    perturbed, cotangents = [], []
    f = _pair(perturbed, cotangents)
    x = np.float32(3)
    assert _run[how](spmd.grad(lambda x: f(x, 2.0)[0]))(x) == 2
    assert set(perturbed) == {(True, False)} and set(cotangents) == {(False, True)}
    assert _run[how](spmd.grad(lambda x: sum(f(x, x))))(x) == 8
    assert perturbed[-1] == (True, True) and cotangents[-1] == (False, False)


def test_a_reverse_rule_may_return_symbolic_zeros():
    @spmd.custom_vjp
    def f(x, y):
        return x * y

    f.defvjp(
        lambda x, y: (x * y, (x, y)),
        lambda res, ct: (ct * res[1], zero_from_primal(res[1], symbolic_zeros=True)),
    )
    assert spmd.grad(f, (0, 1))(2.0, 5.0) == (5, 0)
