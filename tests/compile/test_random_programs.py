"""Random programs: compiled, after each pass, and kernel by kernel, they are what `impl` says."""

from __future__ import annotations

import numpy as np
import pytest

from spmd.compile.executable.executable import compile_jaxpr
from spmd.compile.lower.in_place import group_kernel
from spmd.compile.passes.pipeline import PASSES, run_passes
from spmd.compile.schedule import memory_plan
from spmd.core.check import check_jaxpr
from spmd.core.ir import Literal
from tests.compile.kernel.interpret import interpret
from tests.compile.programs import by_impl, random_program

SEEDS = range(60)


def assert_close(found, wanted):
    for got, expected in zip(found, wanted, strict=True):
        got = np.asarray(got)
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_compiled_is_impl(seed):
    closed, args = random_program(seed)
    assert_close(compile_jaxpr(closed)(args), by_impl(closed, args))


@pytest.mark.parametrize("seed", SEEDS)
def test_passes_keep_the_meaning(seed):
    closed, args = random_program(seed, length=25)
    wanted = by_impl(closed, args)
    for step in PASSES:
        closed = step(closed)
        check_jaxpr(closed, after=step.__name__)
        assert_close(by_impl(closed, args), wanted)


@pytest.mark.parametrize("seed", range(100, 130))
def test_kernels_of_fused_groups_are_impl(seed):
    closed, args = random_program(seed, length=20)
    optimised = run_passes(closed)
    values = dict(zip(optimised.jaxpr.invars, args, strict=True))
    values.update(zip(optimised.jaxpr.constvars, optimised.consts, strict=True))
    kernels = 0
    for eqn in optimised.eqns:
        operands = [a.val if isinstance(a, Literal) else values[a] for a in eqn.invars]
        with np.errstate(all="ignore"):
            outs = eqn.prim.impl(np, *operands, **eqn.params)
        wanted = list(outs) if eqn.prim.multiple else [outs]
        values.update(zip(eqn.outvars, wanted, strict=True))
        if eqn.prim.name != "fused":
            continue
        kernel = group_kernel(eqn)
        assert kernel is not None, f"{eqn} has no kernel"
        flat = [np.ascontiguousarray(x).reshape(-1) for x in operands]
        made = [np.zeros(v.aval.size, v.aval.dtype) for v in eqn.outvars]
        interpret(kernel, [*flat, *made])
        assert_close(
            [m.reshape(v.aval.shape) for m, v in zip(made, eqn.outvars, strict=True)], wanted
        )
        kernels += 1
    assert kernels or not optimised.eqns


@pytest.mark.parametrize("seed", range(200, 220))
def test_donated_inputs_change_nothing_but_themselves(seed):
    closed, args = random_program(seed)
    donated = compile_jaxpr(closed, [True] * len(args))
    assert_close(donated(args), by_impl(closed, args))


@pytest.mark.parametrize("seed", range(300, 340))
def test_temporaries_in_results_change_nothing(seed, monkeypatch):
    monkeypatch.setattr(memory_plan, "SHARED_BYTES", 1)
    closed, args = random_program(seed, length=25)
    executable = compile_jaxpr(closed, [k % 3 == 0 for k in range(len(args))])
    wanted = by_impl(closed, args)
    assert_close(executable(args), wanted)


def test_random_programs_do_have_temporaries_in_results(monkeypatch):
    monkeypatch.setattr(memory_plan, "SHARED_BYTES", 1)
    plans = [compile_jaxpr(random_program(seed, length=25)[0]).plan for seed in range(300, 310)]
    assert any(plan.aliased_into for plan in plans)
