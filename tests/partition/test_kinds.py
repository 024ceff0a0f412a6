"""Equations of one kind share what the partitioner finds out about them."""

from __future__ import annotations

import cProfile
import pstats
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, lax
from spmd.compile.executable.select import partitioned
from spmd.core.ir import Eqn, all_eqns
from spmd.core.stage import JaxprTrace
from spmd.partition import equations as equations_of_parts
from spmd.partition import kinds, propagate, ways
from spmd.partition.kinds import kind_of
from spmd.partition.rules import rule_of
from spmd.sharding.operand_layouts import layouts_of
from tests.partition.programs import auto_mesh, draw
from tests.partition.test_random_programs import placed


def equations(f: Any, *args: Any) -> tuple[Eqn, ...]:
    return spmd.jit(f).trace(*args).jaxpr.eqns


def test_equations_that_differ_in_their_values_alone_share_a_kind():
    x = np.ones((4, 6), np.float32)
    first, second = equations(lambda x: snp.exp(snp.exp(x)), x)
    assert kind_of(first) is kind_of(second)
    slices = equations(lambda x: (x[1:3], x[1:3], x[2:4], x[:, 1:3]), x)
    found = [kind_of(eqn) for eqn in slices if eqn.prim.name == "slice"]
    assert [found.index(kind) for kind in found] == [0, 0, 2, 3]


def test_the_dims_of_a_kind_are_those_with_equal_labels_that_may_be_split():
    a, b = np.ones((4, 6), np.float32), np.ones((6, 8), np.float32)
    (product,) = [e for e in equations(lambda a, b: a @ b, a, b) if e.prim.name == "dot_general"]
    kind = kind_of(product)
    assert kind.rule == rule_of(product, kind.windows)
    assert set(kind.groups) == {((0, 0), (2, 0)), ((0, 1), (1, 0)), ((1, 1), (2, 1))}
    (taken,) = [e for e in equations(lambda a: lax.sort(a, dimension=1), a)]
    assert kind_of(taken).groups == (((0, 0), (1, 0)),), "rows that are sorted stay whole"


def test_what_a_user_made_is_not_kept_alive():
    def eqn(f: Any) -> Eqn:
        (found,) = equations(lambda x: lax.map(f, x), np.ones(3, np.float32))
        return found

    scan = eqn(lambda x: x * 2)
    assert kind_of(scan) is not kind_of(scan)


def partitioned_text(f: Any, *args: Any) -> str:
    traced = spmd.jit(f).trace(*args)
    made = partitioned(traced.jaxpr, layouts_of(spmd.tree.leaves(args)))
    assert made is not None
    return f"{made} {[eqn.source for eqn in all_eqns(made)]}"


def texts(seeds: range) -> list[str]:
    """Programs and gradients over meshes, as each device runs them."""
    found = []
    for seed in seeds:
        program, arguments = draw(seed)

        def loss(*args: Any, program: Any = program) -> Any:
            return sum(snp.cos(x).sum() for x in program(*args))

        over_mesh = placed(seed, arguments)
        found += [partitioned_text(f, *over_mesh) for f in (program, spmd.grad(loss))]
    return found


def test_what_is_kept_of_kinds_changes_no_program(monkeypatch: pytest.MonkeyPatch):
    """Twice with what is kept of all before, then with nothing that is kept."""
    with_kinds = texts(range(30))
    assert texts(range(30)) == with_kinds

    def process(trace: JaxprTrace, prim: Any, operands: Any, params: Any, known: Any) -> Any:
        found = trace.process(prim, operands, params)
        return list(found) if prim.multiple else [found]

    monkeypatch.setattr(propagate, "kind_of", kinds.new_kind)
    monkeypatch.setattr(JaxprTrace, "process_again", process)
    assert texts(range(30)) == with_kinds


def test_where_layouts_agree_costs_decide_alike(monkeypatch: pytest.MonkeyPatch):
    found = texts(range(30, 60))
    monkeypatch.setattr(propagate, "kind_of", kinds.new_kind)
    monkeypatch.setattr(ways, "agreed_axes", lambda rule, cells, sizes: None)
    assert texts(range(30, 60)) == found


def test_equal_parameters_of_other_types_stay_as_they_are():
    """0 and -0.0 are equal, and make one kind; what is written differs."""
    mesh = auto_mesh((4,), ("x",))
    x = spmd.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, P("x")))
    places = np.array([1, 9])

    def f(fill: float) -> Any:
        return spmd.jit(lambda x: x.T.at[places].get(mode="fill", fill_value=fill).T)

    for fill in (0.0, -0.0, 0.0):
        assert (np.signbit(np.asarray(f(fill)(x))[:, 1]) == np.signbit(fill)).all()


def test_equations_on_terms_of_sums_are_written_again(monkeypatch: pytest.MonkeyPatch):
    """Gradients of replicated weights are terms until they are scaled."""
    mesh = auto_mesh((4,), ("x",))
    weights = [spmd.device_put(np.ones((8, 8)), NamedSharding(mesh, P())) for _ in range(3)]
    x = spmd.device_put(np.ones((8, 8)), NamedSharding(mesh, P("x")))

    def loss(weights: Any, x: Any) -> Any:
        for w in weights:
            x = snp.tanh(x @ w)
        return x.sum()

    def step(weights: Any, x: Any) -> Any:
        return [w - 0.1 * -g.T for w, g in zip(weights, spmd.grad(loss)(weights, x), strict=True)]

    first = partitioned_text(step, weights, x)
    assert first.count("psum") == 3
    counted, on_terms = [], equations_of_parts.write_on_terms
    monkeypatch.setattr(
        equations_of_parts,
        "write_on_terms",
        lambda *args: counted.append(args[0]) or on_terms(*args),
    )
    assert partitioned_text(step, weights, x) == first
    assert not counted


def test_a_program_that_was_partitioned_before_takes_few_calls():
    """By 2x2 devices, a step of 3 layers; what kinds keep is found again."""
    mesh = auto_mesh((2, 2), ("x", "y"))

    def put(shape: tuple[int, ...], spec: P) -> Any:
        return spmd.device_put(np.ones(shape, np.float32), NamedSharding(mesh, spec))

    weights = [(put((16, 64), P("x", "y")), put((64, 16), P("y", "x"))) for _ in range(3)]

    def loss(weights: Any, x: Any) -> Any:
        for up, down in weights:
            x = x + snp.tanh((x - x.mean(-1, keepdims=True)) @ up) @ down
        return (x * x).mean()

    def step(weights: Any, x: Any) -> Any:
        return spmd.tree.map(lambda w, g: w - 0.1 * g, weights, spmd.grad(loss)(weights, x))

    args = (weights, put((8, 16), P("x")))
    traced, layouts = spmd.jit(step).trace(*args), layouts_of(spmd.tree.leaves(args))
    count = len(traced.jaxpr.eqns)
    assert count > 50, "the step is one program"

    def calls() -> float:
        with cProfile.Profile() as profile:
            assert partitioned(traced.jaxpr, layouts) is not None
        return pstats.Stats(profile).total_calls / count  # type: ignore[attr-defined]

    first, again = calls(), calls()
    assert again <= 0.9 * first
    assert again <= 90
