"""Reductions between ranks in numbers that NCCL has: what becomes of which dtype."""

from __future__ import annotations

import re

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.compile.cuda.collectives import rank_numbers

P = spmd.sharding.PartitionSpec
_NAMES = "psum", "pmax", "pmin", "reduce_scatter"


@pytest.mark.parametrize(
    "reduce, dtype, found",
    [
        (lax.psum, "bfloat16", "f32"),
        (lax.psum, "int16", "i32"),
        (lax.psum, "float32", "f32"),
        (lax.psum_scatter, "float16", "f32"),
        (lax.pmax, "float32", "i32"),
        (lax.pmin, "bfloat16", "i32"),
        (lax.pmin, "uint16", "u32"),
        (lax.pmax, "int8", "i8"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_reduction_is_made_in(monkeypatch, reduce, dtype, found):
    monkeypatch.setattr(rank_numbers, "is_agreed", lambda origin: True)
    mesh = spmd.make_mesh((2,), ("i",))
    f = spmd.shard_map(lambda x: reduce(x, "i"), mesh=mesh, in_specs=P(), out_specs=P("i"))
    (inner,) = spmd.make_jaxpr(f)(np.zeros((2, 4), dtype)).eqns
    made = rank_numbers.in_numbers_of_nccl(inner.params["jaxpr"])
    reduction = next(e for e in made.eqns if e.prim.name in _NAMES)
    assert re.sub(r"\[.*", "", reduction.invars[0].aval.short()) == found
    assert made.out_avals[0].dtype == dtype
