"""Every op record, compiled, is what `impl` says; and what has a kernel keeps it."""

from __future__ import annotations

import numpy as np
import pytest

import spmd.compile.definitions.all  # noqa: F401  (it declares primitives of its own)
from spmd import lax
from spmd.base import dtypes
from spmd.base.config import config
from spmd.collectives import exchange  # noqa: F401  a primitive that few programs use
from spmd.compile.executable.executable import compile_jaxpr
from spmd.compile.expressions.expression import REDUCTIONS
from spmd.compile.expressions.index_map import MOVES
from spmd.compile.expressions.scalar_ops import ENTRIES
from spmd.compile.lower.lowering import ALIASES, RULES
from spmd.compile.lower.steps import Host
from spmd.compile.passes import pipeline  # noqa: F401  primitives of passes
from spmd.core.aval import typeof
from spmd.core.primitive import all_primitives
from spmd.core.stage import trace_to_jaxpr
from spmd.lax import special  # noqa: F401  primitives that few programs use
from tests.compile.programs import by_impl
from tests.lax.records import RECORDS

TOLERANCE = {"bfloat16": 2e-2, "float16": 2e-3, "float32": 2e-5, "complex64": 2e-5}

# What runs through NumPy in float32: of these nothing is expected to be fast.
WITHOUT_KERNEL = {
    "cumlogsumexp",
    "igamma",
    "igamma_grad_a",
    "igammac",
    "polygamma",
    "random_gamma_grad",
    "reduce_precision",
    "sort",
    "top_k",
    "zeta",
}


@pytest.fixture(autouse=True)
def wide_dtypes():
    with config.override("enable_x64", True):
        yield


def compiled(record, dtype):
    args = record.make(dtype)

    def f(*operands):
        out = record.function(lax, *operands)
        return list(out) if isinstance(out, (list, tuple)) else [out]

    closed = trace_to_jaxpr(f, [typeof(a) for a in args])
    return closed, compile_jaxpr(closed), args


@pytest.mark.parametrize("record", RECORDS, ids=str)
def test_compiled_records_give_the_values_of_impl(record):
    for dtype in record.dtypes:
        closed, executable, args = compiled(record, dtype)
        for found, wanted in zip(executable(args), by_impl(closed, args), strict=True):
            found = np.asarray(found)
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
            if not dtypes.is_inexact(wanted.dtype):
                np.testing.assert_array_equal(found, wanted)
                continue
            tolerance = TOLERANCE.get(wanted.dtype.name, 1e-11)
            np.testing.assert_allclose(
                found.astype(complex), wanted.astype(complex), rtol=tolerance, atol=tolerance
            )


@pytest.mark.parametrize(
    "record", [r for r in RECORDS if np.dtype(np.float32) in r.dtypes], ids=str
)
def test_float32_runs_natively(record):
    _, executable, _ = compiled(record, np.dtype(np.float32))
    hosts = {s.name for s in executable.schedule.steps if isinstance(s, Host)}
    allowed = {"bitcast_convert_type"}  # changes of width
    assert hosts <= WITHOUT_KERNEL | allowed


def test_tables_name_primitives():
    names = {p.name for p in all_primitives()}
    tables = (ENTRIES, MOVES, REDUCTIONS, RULES, ALIASES)
    unknown = {name for table in tables for name in table} - names
    assert not unknown, f"lowerings of unknown primitives: {sorted(unknown)}"
