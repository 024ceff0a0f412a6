"""The rules of convolutions and windowed reductions, checked on their table of op records."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from spmd.base import dtypes
from spmd.base.config import config
from tests.lax import test_records as suite
from tests.lax.records_windows import RECORDS

# These have no equal in jax.lax; test_reduce_window.py compares the gradients they make.
WITHOUT_ORACLE = ("select_and_gather_add", "select_and_scatter_add")


@pytest.fixture(autouse=True)
def wide_dtypes():
    with config.override("enable_x64", True):
        yield


def each_dtype():
    return [
        pytest.param(r, d, id=f"{r}-{dtypes.short_name(d)}")
        for r in RECORDS
        for d in r.dtypes
        if r.primitive not in WITHOUT_ORACLE
    ]


@pytest.mark.parametrize("record, dtype", each_dtype())
def test_value_and_shape(record, dtype, from_jax):
    suite.test_value_and_shape(record, dtype, from_jax)


@pytest.mark.parametrize("record", RECORDS, ids=str)
def test_eager_is_impl(record):
    suite.test_eager_is_impl(record)


@pytest.mark.parametrize("record", RECORDS, ids=str)
def test_derivatives(record):
    if np.dtype(np.float64) in record.dtypes:
        suite.test_derivatives(record, np.dtype(np.float64))


@pytest.mark.parametrize("record", RECORDS, ids=str)
def test_vmap_is_a_loop(record):
    suite.test_vmap_is_a_loop(record)


@pytest.mark.parametrize("record", RECORDS, ids=str)
def test_dims_law(record):
    suite.test_dims_law(record)


def test_every_primitive_of_these_files_has_a_record():
    modules = ("conv", "reduce_window", "reduce_window_select")
    exported = {
        value.name
        for module in modules
        for name, value in vars(importlib.import_module(f"spmd.lax.{module}")).items()
        if name.endswith("_p")
    }
    missing = exported - {r.primitive for r in RECORDS}
    assert not missing, f"add a record in tests/lax/records_windows.py for {sorted(missing)}"
