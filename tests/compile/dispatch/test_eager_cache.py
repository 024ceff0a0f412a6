"""Operations outside jit that come again and again: compiled once, with the same bits."""

from __future__ import annotations

import operator

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.base.config import config
from spmd.compile.dispatch import eager_cache
from spmd.compile.dispatch.eager_cache import (
    COMPILE_AFTER,
    EagerCache,
    is_determined,
)
from spmd.sharding.array import Array
from tests.compile.dispatch.fast_calls import cached, forget, linked

OPERATORS = [
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod,
    operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
]  # fmt: skip


@pytest.fixture(autouse=True)
def cold():
    forget()


def bits(x):
    value = np.asarray(x)
    return x.dtype, x.weak_type, x.shape, value.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint32, np.float16], ids=str)
@pytest.mark.parametrize("f", OPERATORS, ids=lambda f: f.__name__)
def test_every_call_gives_the_same_bits(f, dtype):
    rng = np.random.default_rng(0)
    x, y = (snp.asarray(rng.normal(size=(3, 5)) * 9).astype(dtype) for _ in range(2))
    row = y[0]
    for other in (y, row, 3, 2.5, True):
        first, swapped = bits(f(x, other)), bits(f(other, x))
        for _ in range(COMPILE_AFTER + 3):
            assert bits(f(x, other)) == first
            assert bits(f(other, x)) == swapped


def test_a_repeated_operation_is_compiled_once_for_all_numbers():
    x = snp.arange(5.0)
    with cached() as closures:
        for k in range(COMPILE_AFTER):
            x + float(k)
    assert closures and None not in closures
    with cached() as closures, linked() as code:
        for k in range(3 * COMPILE_AFTER):
            wanted = np.arange(5, dtype=np.float32) + np.float32(k)
            np.testing.assert_array_equal(x + float(k), wanted)
    assert not closures and not code


def test_elements_by_number_share_one_program():
    x = snp.asarray(np.arange(12, dtype=np.int32).reshape(4, 3))
    with cached() as closures:
        for _ in range(COMPILE_AFTER):
            for k in range(-4, 4):
                np.testing.assert_array_equal(x[k], np.asarray(x)[k])
    assert len(closures) == 1 and None not in closures
    np.testing.assert_array_equal(x[7], np.asarray(x)[3])  # clamped, as cold


PARTS = [
    slice(1, 3), slice(None), slice(-2, None), slice(None, None, -1), slice(7, 9), None, ..., (),
    (slice(1, 3), slice(0, 2)), (slice(None), None), (..., slice(1, 2)), (None, ..., None),
]  # fmt: skip


@pytest.mark.parametrize("index", PARTS, ids=str)
def test_slices_become_a_program_and_read_other_arrays(index):
    values = np.arange(12, dtype=np.int32).reshape(4, 3)
    x, again = snp.asarray(values), snp.asarray(values[::-1].copy())
    with cached() as closures:
        for _ in range(COMPILE_AFTER + 2):
            np.testing.assert_array_equal(x[index], values[index])
    assert len(closures) == 1 and None not in closures
    np.testing.assert_array_equal(again[index], values[::-1][index])


def test_indices_of_different_types_are_told_apart():
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    x = snp.asarray(values)
    rows = np.array([2, 0])
    for _ in range(COMPILE_AFTER + 2):
        for index in (
            *(slice(0, 1), slice(False, True), slice(np.int64(0), 1), (slice(0, 1),), (0, 1)),
            *((True,), (slice(None), 1), (slice(None), rows), rows, values > 3),
        ):
            np.testing.assert_array_equal(x[index], values[index], err_msg=str(index))


def test_a_program_that_rounds_twice_is_not_determined():
    assert is_determined(spmd.make_jaxpr(lambda x, y: x * y)(1.0, 2.0))
    assert not is_determined(spmd.make_jaxpr(lambda x, y: x * y + x)(1.0, 2.0))
    assert not is_determined(spmd.make_jaxpr(snp.exp)(1.0))
    assert not is_determined(spmd.make_jaxpr(snp.sum)(np.ones(3, np.float32)))
    assert not is_determined(spmd.make_jaxpr(lambda x: x.astype(np.int32))(1.0))
    assert not is_determined(spmd.make_jaxpr(lambda x: x + x)(np.ones(1 << 17, np.float32)))


def test_other_operands_take_the_general_path():
    x = snp.arange(3.0)
    for _ in range(COMPILE_AFTER + 2):
        x + x, x + 1
    np.testing.assert_array_equal(x + np.ones(3, np.float32), [1, 2, 3])
    np.testing.assert_array_equal(x + snp.ones(()), [1, 2, 3])
    with pytest.raises(spmd.errors.ArgumentError):
        operator.add(x, [1, 2, 3])
    with pytest.raises(TypeError):
        x + object()
    with pytest.raises(OverflowError):
        snp.arange(3) + 2**40
    x.delete()
    with pytest.raises(spmd.errors.DeletedError):
        x + 1


def test_committed_results_stay_committed():
    device = spmd.devices()[1]
    x, free = spmd.device_put(np.ones(3, np.float32), device), snp.ones(3)
    for _ in range(COMPILE_AFTER + 3):
        free + free
        assert (x + x).devices() == {device}
        assert (free + x).devices() == {device}


def test_transformations_and_settings_are_respected():
    x = snp.arange(3.0)
    for _ in range(COMPILE_AFTER + 2):
        x * x
    assert "mul" in str(spmd.make_jaxpr(lambda y: x * y)(x))
    np.testing.assert_array_equal(spmd.grad(lambda y: (x * y).sum())(x), x)
    with config.override("enable_x64", True):
        for _ in range(COMPILE_AFTER + 2):
            assert (snp.arange(3.0) * 2.0).dtype == np.float64
    assert (snp.arange(3.0) * 2.0).dtype == np.float32


def test_the_number_of_compiled_kinds_is_bounded(monkeypatch):
    monkeypatch.setattr(eager_cache, "MOST_KINDS", 4)
    cache = EagerCache(operator.add)
    for n in range(10):
        for _ in range(COMPILE_AFTER):
            assert type(cache(n, (snp.ones(n), 1))) is Array
    assert list(cache.table) == [0, 1, 2, 3]


def test_counts_begin_again_when_there_are_too_many_kinds(monkeypatch):
    monkeypatch.setattr(eager_cache, "MOST_KINDS", 4)
    cache, x = EagerCache(operator.add), snp.ones(3)
    for _ in range(COMPILE_AFTER - 1):
        cache("counted", (x, 1))
    for other in range(4):
        cache(other, (x, 1))
    for _ in range(COMPILE_AFTER - 1):
        cache("counted", (x, 1))
    assert not cache.table
    cache("counted", (x, 1))
    assert list(cache.table) == ["counted"]
