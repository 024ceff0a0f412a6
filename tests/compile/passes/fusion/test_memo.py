"""Deep programs: the groups of repeated layers are those that would have grown one by one."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import spmd.numpy as snp
from spmd import nn
from spmd.api.compiled import jit
from spmd.api.reverse import value_and_grad
from spmd.base.tree import tree_leaves
from spmd.compile.cpu.assemble import compile_callees
from spmd.compile.executable.executable import compile_jaxpr
from spmd.compile.lower.lowering import lower
from spmd.compile.lower.steps import Launch
from spmd.compile.passes.fuse_epilogues import fuse_epilogues
from spmd.compile.passes.fusion import fuse, memo, merge_siblings
from spmd.compile.passes.inline_calls import inline_calls
from spmd.compile.passes.simplify import simplify
from spmd.core.check import check_jaxpr
from spmd.core.ir import Names
from tests.compile.fusion_programs import PROGRAMS, normal
from tests.compile.programs import by_impl, random_program

WIDTH = 16
STEPS = (
    lambda h, w: snp.tanh(h @ w),
    lambda h, w: h + nn.gelu(h),
    lambda h, w: nn.softmax(h, -1) * w[0],
    lambda h, w: (h - h.mean(-1, keepdims=True)) / snp.sqrt(h.var(-1, keepdims=True) + 1e-5),
    lambda h, w: h + snp.concatenate([h[:, 3:], h[:, :3]], 1) * w[1],
    lambda h, w: snp.where(snp.tril(snp.ones((8, WIDTH), bool)), h, 0.1 * h) @ w.T,
    lambda h, w: h * snp.exp(-snp.square(h)).sum(-1, keepdims=True),
    lambda h, w: h + snp.pad(h[1:], ((0, 1), (0, 0))),
)


def deep(layers, seed, told=()):
    """The gradient of a network of equal layers; it gives what the layers in `told` make, too."""
    chosen = np.random.default_rng(seed).integers(len(STEPS), size=5)

    def loss(params, x):
        seen = []
        for k in range(layers):
            before = x
            for step in chosen:
                x = STEPS[step](x, params[k])
            x = x + before
            seen += [x * 2] if k in told else []
        return snp.sum(x**2), seen

    params = [0.1 * normal(WIDTH, WIDTH, seed=k) for k in range(layers)]
    return value_and_grad(loss, has_aux=True), (params, normal(8, WIDTH, seed=99))


def simplified(function, args):
    return simplify(inline_calls(jit(function).trace(*args).jaxpr))


def groups(closed):
    """The equations of a fused jaxpr, whatever is said of the inside of groups."""
    names = Names()
    found = []
    for eqn in closed.eqns:
        operands = [names(a) for a in eqn.invars], [names(v) for v in eqn.outvars]
        inner = eqn.params.get("jaxpr") if eqn.prim.name == "fused" else None
        members = [e.prim.name for e in inner.eqns] if inner else None
        found.append((eqn.prim.name, *operands, members, eqn.params.get("space")))
    return found


def one_by_one(closed, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(fuse, "replay", lambda *_: None)
        return fuse.fuse(closed)


def assert_same_groups(closed, monkeypatch):
    found = fuse.fuse(closed)
    check_jaxpr(found, after="fuse")
    assert groups(found) == groups(one_by_one(closed, monkeypatch))
    return found


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("told", [(), (2,)], ids=["equal", "one read from outside"])
def test_deep_programs_have_the_groups_of_fusion_without_memo(seed, told, monkeypatch):
    function, args = deep(4, seed, told)
    closed = simplified(function, args)
    found = assert_same_groups(closed, monkeypatch)
    flat = tree_leaves(args)
    for got, want in zip(by_impl(found, flat), by_impl(closed, flat), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("seed", range(200, 230))
def test_random_programs_have_the_groups_of_fusion_without_memo(seed, monkeypatch):
    closed, _ = random_program(seed, length=60)
    assert_same_groups(simplify(closed), monkeypatch)


def test_fusion_programs_have_the_groups_of_fusion_without_memo(monkeypatch):
    for function, args in PROGRAMS.values():
        assert_same_groups(simplified(function, args), monkeypatch)


@pytest.mark.parametrize("told", [(), (2,)], ids=["equal", "one read from outside"])
def test_programs_fused_with_the_memo_compute_the_same_bits(told, monkeypatch):
    function, args = deep(5, 3, told)
    closed, flat = simplified(function, args), tree_leaves(args)
    found = compile_jaxpr(closed, optimised=fuse_epilogues(fuse.fuse(closed)))(flat)
    alone = compile_jaxpr(closed, optimised=fuse_epilogues(one_by_one(closed, monkeypatch)))(flat)
    for got, want in zip(found, alone, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("seed", range(4))
def test_neither_guesses_nor_remembered_pairs_change_groups(seed, monkeypatch):
    closed = simplified(*deep(5, seed, (1,)))
    found, tried = groups(fuse.fuse(closed)), Counter()
    traces_of, merge_all = memo.FusionTraces.of, merge_siblings._merge_all

    def counted(self, kind):
        for trace in traces_of(self, kind):
            tried[without] += 1
            yield trace

    for without in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(memo.FusionTraces, "of", counted)
            if without:
                patch.setattr(memo.FusionTraces, "follow", lambda self, growth: None)
                patch.setattr(
                    merge_siblings, "_merge_all", lambda *given: merge_all(*given[:3], set())
                )
            assert groups(fuse.fuse(closed)) == found
    assert tried[False] <= tried[True]


def work(layers, monkeypatch):
    """What is done for a network: groups grown, jaxprs of groups, kernels, texts."""
    done = Counter()
    add = memo.FusionTraces.add

    def counted(self, trace):
        done["grown"] += 1
        add(self, trace)

    with monkeypatch.context() as patch:
        patch.setattr(memo.FusionTraces, "add", counted)
        fused = fuse_epilogues(fuse.fuse(simplified(*deep(layers, 3))))
    bodies = {id(e.params["jaxpr"]) for e in fused.eqns if e.prim.name in ("fused", "product")}
    kernels = {step.kernel for step in lower(fused).steps if isinstance(step, Launch)}
    done["bodies"], done["kernels"] = len(bodies), len(kernels)
    done["texts"] = len({compile_callees.rendering(kernel).symbol for kernel in kernels})
    return done


def test_more_layers_are_no_more_work(monkeypatch):
    eight = work(8, monkeypatch)
    assert eight["grown"] and eight["texts"]
    assert eight == work(4, monkeypatch) == work(13, monkeypatch)


def test_a_program_fused_twice_gives_one_text(monkeypatch):
    function, args = deep(4, 5)
    texts = {str(fuse.fuse(simplified(function, args))) for _ in range(2)}
    assert len(texts) == 1
