"""Entry points: programs as built-in functions of addresses, buffers and numbers."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from spmd.base.tree import TreeDef
from spmd.base.util import MISS
from spmd.compile.native.cpython import entry_layout
from spmd.compile.native.cpython.entry_layout import ADDRESS, BUFFER
from spmd.compile.native.cpython.entry_point import NUMBERS, Results, make_entry_point
from spmd.compile.native.program.steps import Copy, Host, Program, Slot
from spmd.compile.native.runtime.run import build_program
from tests.compile.native.programs import F32, address, binary, compile_for
from tests.threads import in_threads

ONE = np.ones(1, F32)


def opened_program(native, template, operands, offsets=()):
    """An entry point that writes where it is told, and gives no arrays."""
    nothing = Results((), TreeDef(tuple, None, ()))
    return make_entry_point(native, template, operands, offsets, nothing)


def adder(count=1, cost_ns=0.3):
    """z = x + y, from bases 0 and 1 to base 2."""
    arrays = [[np.ones(count, F32)] * 3]
    return compile_for([binary("fadd", "float", Slot(0), Slot(1), Slot(2), count, cost_ns)], arrays)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_entry_points_take_addresses(devices):
    arrays = [[np.full(5, d, F32), np.ones(5, F32), np.zeros(5, F32)] for d in range(devices)]
    native = compile_for([binary("fadd", "float", Slot(0), Slot(1), Slot(2), 5)], arrays)
    words = range(3 * devices)
    opened = opened_program(native, [0] * len(words), [(ADDRESS, w) for w in words])
    given = [address(a) for device in arrays for a in device]
    assert opened(*given) == ()
    assert [a[2][4] for a in arrays] == [d + 1 for d in range(devices)]
    assert opened(*given[:-1]) is opened() is MISS


def test_frames_have_constant_words_and_offsets():
    x, out = np.arange(4, dtype=F32), np.zeros(2, F32)
    opened = opened_program(
        adder(), [0, address(ONE), 0], [(ADDRESS, 0), (ADDRESS, 2)], [(0, 0, 8), (2, 2, 4)]
    )
    assert opened(address(x), address(out)) == ()
    np.testing.assert_array_equal(out, [0, x[2] + 1])


@pytest.mark.parametrize("cost_ns", [0.3, 1e6], ids=["keeps the GIL", "releases the GIL"])
def test_entry_points_take_buffers(cost_ns):
    native = adder(4, cost_ns)
    assert native.keeps_gil == (cost_ns < 1)
    opened = opened_program(native, [0] * 3, [(BUFFER, 0), (BUFFER, 1), (BUFFER, 2)])
    x, y, out = np.arange(4, dtype=F32), np.full(4, 2, F32), b"\0" * len("a result of it's")
    before = sys.getrefcount(x), sys.getrefcount(out)
    for _ in range(100):
        assert opened(x, y, out) == ()
    np.testing.assert_array_equal(np.frombuffer(out, F32), x + y)
    assert (sys.getrefcount(x), sys.getrefcount(out)) == before
    assert opened(np.arange(8, dtype=F32)[::2], y, out) is MISS
    assert opened(x, None, out) is MISS
    assert opened(x, y, 5) is MISS
    assert sys.getrefcount(x) == before[0]
    x.resize(5, refcheck=False)  # refused while somebody holds the buffer


@pytest.mark.parametrize("number", [1.5, 7, -3, np.float32(0.1), True, float("inf")])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_every_dtype_are_passed(name, number):
    dtype = np.dtype(name)
    if dtype.kind in "ib" and isinstance(number, (float, np.floating)):
        pytest.skip("guarded by type")
    native = build_program(
        Program((dtype.itemsize,) * 2, (Copy(Slot(1), Slot(0), dtype.itemsize),))
    )
    opened = opened_program(native, [0, 0], [(NUMBERS[name], 0), (ADDRESS, 1)])
    out = np.zeros(1, dtype)
    assert opened(number, address(out)) == ()
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
def test_numbers_that_do_not_fit_are_unfit(name, wrong):
    native = build_program(Program((8, 8), (Copy(Slot(1), Slot(0), 8),)))
    opened = opened_program(native, [0, 0], [(NUMBERS[name], 0), (ADDRESS, 1)])
    out = np.zeros(1)
    assert opened(wrong, address(out)) is MISS
    assert out[0] == 0


def test_a_null_address_is_unfit():
    opened = opened_program(adder(), [0] * 3, [(ADDRESS, 0), (ADDRESS, 1), (ADDRESS, 2)])
    here = address(ONE)
    for given in ((0, here, here), (here, here, -1), (here, "x", here)):
        assert opened(*given) is MISS


def test_a_failure_is_raised():
    def fail(device, inputs, outputs):
        raise ZeroDivisionError

    native = compile_for([Copy(Slot(0), Slot(0), 4), Host(fail, (), ())], [[ONE]])
    assert not native.is_alone
    opened = opened_program(native, [0], [(ADDRESS, 0)])
    with pytest.raises(ZeroDivisionError):
        opened(address(ONE))


def test_threads_share_an_entry_point():
    count = 1000
    opened = opened_program(adder(count, 1e4), [0] * 3, [(BUFFER, 0), (BUFFER, 1), (ADDRESS, 2)])
    wrong = []

    def work(k):
        x, out = np.full(count, k, F32), np.zeros(count, F32)
        for _ in range(200):
            opened(x, x, address(out))
            if out[0] != 2 * k or out[-1] != 2 * k:
                wrong.append(k)

    in_threads(work, range(1, 4))
    assert not wrong


def test_impossible_entry_points_are_refused():
    with pytest.raises(ValueError, match="2 words for frames of 3"):
        opened_program(adder(), [0, 0], [])
    with pytest.raises(ValueError, match="do not have all of"):
        opened_program(adder(), [0] * 3, [(entry_layout.ADDRESS, 3)])
    with pytest.raises(ValueError, match="do not have all of"):
        opened_program(adder(), [0] * 3, [], [(0, -1, 8)])


_EMPTIED = """
import gc
from spmd.compile.native.cpython import builtin_function
function = builtin_function.make_builtin("a name", 4096, None)
vars(builtin_function).clear()
gc.collect()
print(function.__name__)
"""


def test_definitions_outlive_the_module_that_made_them(run_python):
    """At exit modules are emptied before the functions that they made are gone.

    The debug allocator of Python overwrites what is freed, so that a lost definition is noticed.
    """
    done = run_python(["-c", _EMPTIED], env={"PYTHONMALLOC": "debug"})
    assert done.stdout == "a name\n", done.stderr
