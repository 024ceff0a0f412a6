"""Equations of one kind share what the partitioner finds out about them."""

from __future__ import annotations

from typing import Any

import numpy as np

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.core.ir import Eqn
from spmd.partition.kinds import kind_of
from spmd.partition.rules import rule_of


def equations(f: Any, *args: Any) -> tuple[Eqn, ...]:
    return spmd.jit(f).trace(*args).jaxpr.eqns


def test_equations_that_differ_in_their_values_alone_share_a_kind():
    x = np.ones((4, 6), np.float32)
    first, second = equations(lambda x: snp.exp(snp.exp(x)), x)
    assert kind_of(first) is kind_of(second)
    slices = equations(lambda x: (x[1:3], x[1:3], x[2:4], x[:, 1:3]), x)
    kinds = [kind_of(eqn) for eqn in slices if eqn.prim.name == "slice"]
    assert [kinds.index(kind) for kind in kinds] == [0, 0, 2, 3]


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
