"""The rules of the moving and selecting primitives, checked on their table of op records.

As tests/lax/test_records.py; here primitives may have several results, and their parameters hold
sizes, which must be cut with the operands when the `dims` rule is put to the test.
"""

from __future__ import annotations

import importlib

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.base import dtypes
from spmd.base.config import config
from spmd.core.call import impl_jaxpr
from spmd.core.ir import ClosedJaxpr, Jaxpr
from spmd.testing import check_grads
from tests.lax.records_indexing import RECORDS
from tests.lax.test_records import (
    assert_close,
    batchings,
    computed,
    split_along,
    traced,
    value_in_jax,
)


@pytest.fixture(autouse=True)
def wide_dtypes():
    with config.override("enable_x64", True):
        yield


def each_dtype():
    return [pytest.param(r, d, id=f"{r}-{dtypes.short_name(d)}") for r in RECORDS for d in r.dtypes]


@pytest.mark.parametrize("record, dtype", each_dtype())
def test_value_and_shape(record, dtype, from_jax):
    operands = record.make(dtype)
    closed = traced(record, operands)
    (out,) = impl_jaxpr(np, closed, *operands)
    (aval,) = closed.out_avals
    assert (np.shape(out), np.asarray(out).dtype) == (aval.shape, aval.dtype)
    assert_close(record.function(lax, *operands), out, 1)
    if dtype in record.skip_oracle:
        return
    assert_close(out, from_jax(lambda: value_in_jax(record, operands)), record.tolerance)


@pytest.mark.parametrize("record", RECORDS, ids=str)
def test_compiled_is_impl(record):
    for dtype in record.dtypes:
        operands = record.make(dtype)
        found = spmd.jit(lambda *xs: record.function(lax, *xs))(*operands)
        assert_close(found, computed(record, operands), record.tolerance)


@pytest.mark.parametrize("record", [r for r in RECORDS if r.order], ids=str)
def test_derivatives(record):
    for dtype in record.gradient_dtypes:
        operands = record.make(dtype)
        at = record.differentiable
        if at is None:
            at = [k for k, x in enumerate(operands) if dtypes.is_inexact(x.dtype)]

        def f(*chosen, operands=operands, at=at):
            full = list(operands)
            for k, x in zip(at, chosen, strict=True):
                full[k] = x
            return record.function(lax, *full)

        check_grads(f, [operands[k] for k in at], record.order)


@pytest.mark.parametrize("record", RECORDS, ids=str)
def test_vmap_is_a_loop(record):
    dtype = np.dtype(np.float32) if np.dtype(np.float32) in record.dtypes else record.dtypes[0]
    size = 3
    examples = [record.make(dtype, seed) for seed in range(size)]
    for at in batchings(record):
        columns = list(zip(*examples, strict=True))
        operands = [
            column[0] if d is None else np.stack(column, d)
            for column, d in zip(columns, at, strict=True)
        ]
        chosen = [
            [columns[k][0 if d is None else i] for k, d in enumerate(at)] for i in range(size)
        ]
        found = spmd.vmap(lambda *xs: record.function(lax, *xs), in_axes=tuple(at))(*operands)
        assert_close(found, np.stack([computed(record, example) for example in chosen]), 4)


# ---- dims --------------------------------------------------------------------------------------


def local_params(prim, params, operand_labels, label, size):
    """Parameters for a part whose dims with this label have `size`: those that are sizes."""
    if label not in operand_labels[0]:
        return params
    d = operand_labels[0].index(label)
    changed = dict(params)
    if prim.name == "slice":
        limits = list(params["limit_indices"])
        limits[d] = size
        changed["limit_indices"] = tuple(limits)
    if prim.name == "dynamic_slice" or (
        prim.name == "gather" and d not in params["dimension_numbers"].operand_batching_dims
    ):
        sizes = list(params["slice_sizes"])
        sizes[d] = size
        changed["slice_sizes"] = tuple(sizes)
    return changed


def applied(prim, operands, params):
    out = prim.impl(np, *operands, **params)
    return list(out) if prim.multiple else [out]


@pytest.mark.parametrize("record", RECORDS, ids=str)
def test_dims_law(record):
    operands = record.make(record.dtypes[-1])
    eqn = next(e for e in traced(record, operands).eqns if e.prim.name == record.primitive)
    operands = operand_values(record, operands)
    rule = eqn.prim.dims(*[v.aval for v in eqn.invars], **eqn.params)
    assert [len(o) for o in rule.operands] == [v.aval.ndim for v in eqn.invars]
    assert [len(o) for o in rule.results] == [v.aval.ndim for v in eqn.outvars]
    whole = applied(eqn.prim, operands, eqn.params)
    shared = {x for labels in rule.results for x in labels if x >= 0} - rule.whole
    for label in shared & {x for labels in rule.operands for x in labels}:
        parts = []
        labelled = [split_along(x, o, label) for x, o in zip(operands, rule.operands, strict=True)]
        for half in zip(*labelled, strict=True):
            sizes = {
                x.shape[o.index(label)]
                for x, o in zip(half, rule.operands, strict=True)
                if label in o
            }
            assert len(sizes) == 1, f"label {label} has sizes {sizes}"
            params = local_params(eqn.prim, eqn.params, rule.operands, label, sizes.pop())
            parts.append(applied(eqn.prim, half, params))
        for k, labels in enumerate(rule.results):
            joined = np.concatenate([part[k] for part in parts], labels.index(label))
            assert_close(joined, whole[k], 16)


def operand_values(record, operands):
    """The values of the equation's operands: index arithmetic before it is evaluated."""
    closed = traced(record, operands)
    position = [e.prim.name for e in closed.eqns].index(record.primitive)
    inputs = closed.eqns[position].invars
    before = Jaxpr(
        closed.jaxpr.constvars, closed.jaxpr.invars, closed.eqns[:position], inputs, "before"
    )
    return [np.asarray(x) for x in impl_jaxpr(np, ClosedJaxpr(before, closed.consts), *operands)]


# ---- the table is complete ---------------------------------------------------------------------


def test_every_primitive_of_these_files_has_a_record():
    modules = ("concatenate", "dynamic", "gather", "scatter", "slicing", "sort")
    exported = {
        value.name
        for module in modules
        for name, value in vars(importlib.import_module(f"spmd.lax.{module}")).items()
        if name.endswith("_p")
    }
    missing = exported - {r.primitive for r in RECORDS}
    assert not missing, f"add a record in tests/lax/records_indexing.py for {sorted(missing)}"
