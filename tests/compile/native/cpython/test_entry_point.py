"""Entry points: programs as built-in functions of addresses, buffers and numbers."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import numpy as np
import pytest

from spmd.compile.native.cpython import builtin_function, entry_point
from spmd.compile.native.cpython.entry_point import (
    ADDRESS,
    BUFFER,
    BYTES,
    NUMBERS,
    UNFIT,
    make_entry_point,
)
from spmd.compile.native.program.steps import CallbackStep, CopyStep, Program, Slot
from spmd.compile.native.runtime.run import build_program
from tests.compile.native.programs import F32, address, binary, compile_for

ONE = np.ones(1, F32)


def adder(count=1, cost_ns=0.3):
    """z = x + y, from bases 0 and 1 to base 2."""
    arrays = [[np.ones(count, F32)] * 3]
    return compile_for([binary("fadd", "float", Slot(0), Slot(1), Slot(2), count, cost_ns)], arrays)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_addresses(devices):
    arrays = [[np.full(5, d, F32), np.ones(5, F32), np.zeros(5, F32)] for d in range(devices)]
    native = compile_for([binary("fadd", "float", Slot(0), Slot(1), Slot(2), 5)], arrays)
    words = range(3 * devices)
    opened = make_entry_point(native, [0] * len(words), [(ADDRESS, w) for w in words])
    given = [address(a) for device in arrays for a in device]
    assert opened(*given) == given[-1]
    assert [a[2][4] for a in arrays] == [d + 1 for d in range(devices)]
    assert opened(*given[:-1]) == UNFIT == opened()


def test_constant_words_and_offsets():
    x, out = np.arange(4, dtype=F32), np.zeros(2, F32)
    opened = make_entry_point(
        adder(), [0, address(ONE), 0], [(ADDRESS, 0), (ADDRESS, 2)], [(0, 0, 8), (2, 2, 4)]
    )
    assert opened(address(x), address(out)) == address(out)
    np.testing.assert_array_equal(out, [0, x[2] + 1])


@pytest.mark.parametrize("cost_ns", [0.3, 1e6], ids=["keeps the GIL", "releases the GIL"])
def test_bytes_and_buffers(cost_ns):
    native = adder(4, cost_ns)
    assert native.keeps_gil == (cost_ns < 1)
    opened = make_entry_point(native, [0] * 3, [(BUFFER, 0), (BUFFER, 1), (BYTES, 2)])
    x, y, out = np.arange(4, dtype=F32), np.full(4, 2, F32), b"\0" * len("a result of it's")
    before = sys.getrefcount(x), sys.getrefcount(out)
    for _ in range(100):
        assert opened(x, y, out) > 0
    np.testing.assert_array_equal(np.frombuffer(out, F32), x + y)
    assert (sys.getrefcount(x), sys.getrefcount(out)) == before
    assert opened(np.arange(8, dtype=F32)[::2], y, out) == UNFIT
    assert opened(x, None, out) == UNFIT
    assert opened(x, y, 5) == UNFIT
    assert sys.getrefcount(x) == before[0]
    x.resize(5, refcheck=False)  # refused while somebody holds the buffer


@pytest.mark.parametrize("number", [1.5, 7, -3, np.float32(0.1), True, float("inf")])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name, number):
    dtype = np.dtype(name)
    if dtype.kind in "ib" and isinstance(number, (float, np.floating)):
        pytest.skip("guarded by type")
    native = build_program(
        Program((dtype.itemsize,) * 2, (CopyStep(Slot(1), Slot(0), dtype.itemsize),))
    )
    opened = make_entry_point(native, [0, 0], [(NUMBERS[name], 0), (ADDRESS, 1)])
    out = np.zeros(1, dtype)
    assert opened(number, address(out)) == address(out)
    np.testing.assert_array_equal(out[0], np.asarray(number).astype(dtype))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("int32", 2**31),
        ("int32", -(2**40)),
        ("int64", 2**63),
        ("int32", "1"),
        ("float32", "1.5"),
        ("float64", None),
        ("float64", 10**400),
    ],
)
def test_numbers_that_do_not_fit(name, wrong):
    native = build_program(Program((8, 8), (CopyStep(Slot(1), Slot(0), 8),)))
    opened = make_entry_point(native, [0, 0], [(NUMBERS[name], 0), (ADDRESS, 1)])
    out = np.zeros(1)
    assert opened(wrong, address(out)) == UNFIT
    assert out[0] == 0


def test_an_address_of_nothing_is_unfit():
    opened = make_entry_point(adder(), [0] * 3, [(ADDRESS, 0), (ADDRESS, 1), (ADDRESS, 2)])
    here = address(ONE)
    for given in ((0, here, here), (here, here, -1), (here, "x", here)):
        assert opened(*given) == UNFIT


def test_a_failure_is_reported():
    def fail(device, inputs, outputs):
        raise ZeroDivisionError

    native = compile_for([CopyStep(Slot(0), Slot(0), 4), CallbackStep(fail, (), ())], [[ONE]])
    assert not native.is_alone
    opened = make_entry_point(native, [0], [(ADDRESS, 0)])
    status = opened(address(ONE))
    assert status < 0 and status != UNFIT
    with pytest.raises(ZeroDivisionError):
        native.fail(-status)


def test_threads_share_an_entry_point():
    count = 1000
    opened = make_entry_point(adder(count, 1e4), [0] * 3, [(BUFFER, 0), (BUFFER, 1), (ADDRESS, 2)])
    wrong = []

    def work(k):
        x, out = np.full(count, k, F32), np.zeros(count, F32)
        for _ in range(200):
            opened(x, x, address(out))
            if out[0] != 2 * k or out[-1] != 2 * k:
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_impossible_entry_points_are_refused():
    with pytest.raises(ValueError, match="2 words for frames of 3"):
        make_entry_point(adder(), [0, 0], [])
    with pytest.raises(ValueError, match="do not have all of"):
        make_entry_point(adder(), [0] * 3, [(entry_point.ADDRESS, 3)])
    with pytest.raises(ValueError, match="do not have all of"):
        make_entry_point(adder(), [0] * 3, [], [(0, -1, 8)])


def test_definitions_outlive_what_knows_them():
    """At exit modules are emptied before the functions that they made are gone."""
    definition, _ = builtin_function._definition("a name", 4096)
    alive = weakref.ref(definition)
    del definition
    builtin_function._definition.cache_clear()
    gc.collect()
    assert alive() is not None
