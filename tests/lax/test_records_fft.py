"""The rules of Fourier transforms and further special functions, on their tables of op records."""

from __future__ import annotations

import importlib

import pytest

from spmd.base import dtypes
from spmd.base.config import config
from tests.lax import records_fft, records_special
from tests.lax import test_records as suite

RECORDS = [*records_fft.RECORDS, *records_special.RECORDS]


@pytest.fixture(autouse=True)
def wide_dtypes():
    with config.override("enable_x64", True):
        yield


def each(choose):
    return [
        pytest.param(r, d, id=f"{r}-{dtypes.short_name(d)}") for r in RECORDS for d in choose(r)
    ]


@pytest.mark.parametrize("record, dtype", each(lambda r: r.dtypes))
def test_value_and_shape(record, dtype, from_jax):
    suite.test_value_and_shape(record, dtype, from_jax)


@pytest.mark.parametrize("record", RECORDS, ids=str)
def test_eager_is_impl(record):
    suite.test_eager_is_impl(record)


@pytest.mark.parametrize("record, dtype", each(lambda r: r.gradient_dtypes if r.order else ()))
def test_derivatives(record, dtype):
    suite.test_derivatives(record, dtype)


@pytest.mark.parametrize("record", RECORDS, ids=str)
def test_vmap_is_a_loop(record):
    suite.test_vmap_is_a_loop(record)


@pytest.mark.parametrize("record", RECORDS, ids=str)
def test_dims_law(record):
    suite.test_dims_law(record)


@pytest.mark.parametrize("module", ["fft", "special_beta", "special_integrals"])
def test_every_primitive_of_these_files_has_a_record(module):
    contents = vars(importlib.import_module(f"spmd.lax.{module}"))
    own = {value.name for name, value in contents.items() if name.endswith("_p")}
    missing = own - {r.primitive for r in RECORDS}
    assert own
    assert not missing, f"add a record in tests/lax for {sorted(missing)}"
