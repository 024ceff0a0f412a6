"""Every primitive's rules, checked on the table of op records.

Value: `impl` against jax.lax. Shape: the abstract rule against `impl`. Derivatives: finite
differences. Batch rule: a Python loop. `dims`: cutting operands along a label and joining.
"""

from __future__ import annotations

import importlib

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.base import dtypes
from spmd.base.config import config
from spmd.core.aval import typeof
from spmd.core.call import impl_jaxpr
from spmd.core.primitive import all_primitives, is_refused
from spmd.core.stage import trace_to_jaxpr
from spmd.testing import check_grads
from tests.lax.records import RECORDS

EPS = {
    dtypes.bfloat16: 2.0**-8,
    np.dtype(np.float16): 2.0**-11,
    np.dtype(np.float32): 2.0**-24,
    np.dtype(np.complex64): 2.0**-24,
    np.dtype(np.float64): 2.0**-53,
    np.dtype(np.complex128): 2.0**-53,
}


@pytest.fixture(autouse=True)
def wide_dtypes():
    with config.override("enable_x64", True):
        yield


def traced(record, operands):
    """The record's program at the operands' avals."""
    avals = [typeof(x) for x in operands]
    return trace_to_jaxpr(lambda *xs: [record.function(lax, *xs)], avals)


def computed(record, operands):
    """The record's value by the `impl` rules alone."""
    (out,) = impl_jaxpr(np, traced(record, operands), *operands)
    return out


def value_in_jax(record, operands):
    """The record's value in JAX."""
    jax = importlib.import_module("jax")
    with jax.enable_x64(True):
        return np.asarray(record.function(jax.lax, *map(jax.numpy.asarray, operands)))


def assert_close(found, wanted, factor):
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    if found.dtype not in EPS:
        np.testing.assert_array_equal(found, wanted)
        return
    tolerance = factor * EPS[found.dtype]
    wide = np.complex128 if found.dtype.kind == "c" else np.float64
    found, wanted = found.astype(wide), wanted.astype(wide)
    # Sums in another order differ by their terms' rounding, however small they are themselves.
    scale = np.abs(wanted[np.isfinite(wanted)]).max(initial=1.0)
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance * scale)


def each_dtype(records):
    """Every dtype of a record; where only a scalar differs from another record, the first."""
    return [
        pytest.param(r, d, id=f"{r}-{dtypes.short_name(d)}")
        for r in records
        for d in (r.dtypes[:1] if r.case.startswith("scalar") else r.dtypes)
    ]


# ---- value and shape ---------------------------------------------------------------------------


@pytest.mark.parametrize("record, dtype", each_dtype(RECORDS))
def test_value_and_shape(record, dtype, from_jax):
    operands = record.make(dtype)
    closed = traced(record, operands)
    (out,) = impl_jaxpr(np, closed, *operands)
    (aval,) = closed.out_avals
    assert (np.shape(out), np.asarray(out).dtype) == (aval.shape, aval.dtype)
    if dtype in record.skip_oracle:
        return
    if record.reference is not None:
        assert_close(out, record.reference(*operands), record.tolerance)
        return
    assert_close(out, from_jax(lambda: value_in_jax(record, operands)), record.tolerance)


@pytest.mark.parametrize("record", RECORDS, ids=str)
def test_eager_is_impl(record):
    operands = record.make(record.dtypes[0])
    found = record.function(lax, *operands)
    assert_close(found, computed(record, operands), record.tolerance)


# ---- derivatives -------------------------------------------------------------------------------


def differentiated():
    return [
        pytest.param(r, d, id=f"{r}-{dtypes.short_name(d)}")
        for r in RECORDS
        for d in r.gradient_dtypes
        if r.order and r.operands
    ]


@pytest.mark.parametrize("record, dtype", differentiated())
def test_derivatives(record, dtype):
    operands = record.make(dtype)
    at = record.differentiable
    if at is None:
        at = [k for k, x in enumerate(operands) if dtypes.is_inexact(x.dtype)]

    def f(*chosen):
        full = list(operands)
        for k, x in zip(at, chosen, strict=True):
            full[k] = x
        return record.function(lax, *full)

    check_grads(f, [operands[k] for k in at], record.order)


# ---- vmap --------------------------------------------------------------------------------------


def batchings(record):
    """Which operands to batch, where: each alone, and all together, first and last dim."""
    count = len(record.operands)
    subsets = {(k,) for k in range(count)} | {tuple(range(count))}
    for subset in sorted(subsets):
        for last in (False, True):
            yield [
                (len(o.shape) if last else 0) if k in subset else None
                for k, o in enumerate(record.operands)
            ]
    if count > 1:  # dims that differ
        yield [len(o.shape) if k else 0 for k, o in enumerate(record.operands)]


@pytest.mark.parametrize("record", [r for r in RECORDS if r.vmap], ids=str)
def test_vmap_is_a_loop(record):
    dtype = np.dtype(np.float32) if np.dtype(np.float32) in record.dtypes else record.dtypes[0]
    size = 3
    examples = [record.make(dtype, seed) for seed in range(size)]
    for at in batchings(record):
        operands = [
            column[0] if d is None else np.stack(column, d)
            for column, d in zip(zip(*examples, strict=True), at, strict=True)
        ]
        chosen = [
            [examples[0][k] if d is None else examples[i][k] for k, d in enumerate(at)]
            for i in range(size)
        ]
        found = spmd.vmap(lambda *xs: record.function(lax, *xs), in_axes=tuple(at))(*operands)
        wanted = np.stack([computed(record, example) for example in chosen])
        assert_close(found, wanted, 4)


# ---- dims --------------------------------------------------------------------------------------

COMBINE = {
    "add": np.add,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def part_params(prim, params, result_shape):
    """Parameters for a part: those of a few primitives contain the result's shape."""
    name = {"broadcast_in_dim": "shape", "reshape": "new_sizes"}.get(prim.name)
    return {**params, name: result_shape} if name else params


def split_along(x, labels, label):
    """The two unequal parts of an operand, or the operand twice if it has no such dim."""
    if label not in labels:
        return x, x
    return np.split(x, [1], labels.index(label))


def first_equation(record):
    """Operands, and the equation of the primitive: some dtypes need none, as nothing is to do."""
    for dtype in record.dtypes:
        operands = record.make(dtype)
        for eqn in traced(record, operands).eqns:
            if eqn.prim.name == record.primitive:
                return operands, eqn
    raise AssertionError(f"{record} never uses its primitive")


@pytest.mark.parametrize("record", [r for r in RECORDS if r.operands], ids=str)
def test_dims_law(record):
    operands, eqn = first_equation(record)
    if is_refused(eqn.prim.dims):
        return
    rule = eqn.prim.dims(*[v.aval for v in eqn.invars], **eqn.params)
    assert [len(o) for o in rule.operands] == [v.aval.ndim for v in eqn.invars]
    assert [len(o) for o in rule.results] == [v.aval.ndim for v in eqn.outvars]
    whole = eqn.prim.impl(np, *operands, **eqn.params)
    (result,) = rule.results
    for label in {x for o in rule.operands for x in o if x >= 0} - rule.whole:
        sizes = {
            x.shape[o.index(label)]
            for x, o in zip(operands, rule.operands, strict=True)
            if label in o
        }
        assert len(sizes) == 1, f"label {label} has sizes {sizes}"
        if label in result:
            assert whole.shape[result.index(label)] in sizes
        if label not in result and rule.reduces is None:
            continue
        labelled = zip(operands, rule.operands, strict=True)
        halves = zip(*(split_along(x, o, label) for x, o in labelled), strict=True)
        parts = []
        for half, size in zip(halves, (1, sizes.pop() - 1), strict=True):
            dims_and_sizes = zip(result, whole.shape, strict=True)
            shape = tuple(size if d == label else s for d, s in dims_and_sizes)
            params = part_params(eqn.prim, eqn.params, shape)
            parts.append(eqn.prim.impl(np, *half, **params))
        if label in result:
            joined = np.concatenate(parts, result.index(label))
        else:
            joined = COMBINE[rule.reduces](*parts)
        assert_close(joined, whole, 16)


# ---- the table is complete ---------------------------------------------------------------------


def test_every_primitive_of_these_files_has_a_record():
    modules = ("arithmetic", "array", "convert", "cumulative", "dot", "elementwise", "logic")
    modules += ("reduce", "special")
    exported = {
        value.name
        for module in modules
        for name, value in vars(getattr(lax, module)).items()
        if name.endswith("_p")
    }
    structural = {"add_any", "broadcast_in_dim", "reduce_sum", "reshape", "permute_dims"}
    missing = (exported | structural) - {r.primitive for r in RECORDS}
    assert not missing, f"add a record in tests/lax/records.py for {sorted(missing)}"


def test_records_name_primitives():
    known = {p.name for p in all_primitives()}
    assert {r.primitive for r in RECORDS} <= known
    assert len({str(r) for r in RECORDS}) == len(RECORDS), "two records have the same name"
