"""The executor: kernels, copies, callbacks, loops and branches, on one device and on several."""

import ctypes

import numpy as np
import pytest

from spmd.base.config import config
from spmd.base.errors import CollectiveError, SpmdError
from spmd.compile.native.llvm.compiler import compile_texts
from spmd.compile.native.llvm.function_builder import Function
from spmd.compile.native.program.steps import (
    Branch,
    Copy,
    Host,
    KernelStep,
    Loop,
    Program,
    Slot,
    View,
    While,
)
from spmd.compile.native.runtime.run import build_program
from tests.compile.native.programs import F32, I32, address, binary, compile_for, run
from tests.threads import in_threads

DEVICES = (1, 2, 4, 8)
I32_ONE = np.ones(1, I32)


@pytest.fixture(params=[1, 2, 3], ids=lambda n: f"{n}threads", autouse=True)
def threads(request):
    with config.override("num_threads", request.param):
        yield request.param


# ---- kernels and copies --------------------------------------------------------------------------


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("count", [0, 1, 7, 40_000])
def test_a_chain_of_kernels_runs_in_order(devices, count):
    rng = np.random.default_rng(count)
    arrays = [
        [rng.random(count, F32), rng.random(count, F32), np.zeros(count, F32)]
        for _ in range(devices)
    ]
    x, y, z = Slot(0), Slot(1), Slot(2)
    run(
        [binary("fadd", "float", x, y, z, count), binary("fmul", "float", z, y, z, count)],
        arrays,
    )
    for a, b, c in arrays:
        np.testing.assert_array_equal(c, (a + b) * b)


def test_expensive_units_are_spread_over_threads_and_devices():
    arrays = [[np.full(300, d, F32), np.ones(300, F32), np.zeros(300, F32)] for d in range(3)]
    run([binary("fadd", "float", Slot(0), Slot(1), Slot(2), 300, cost_ns=1e6)], arrays)
    for d in range(3):
        assert (arrays[d][2] == d + 1).all()


@pytest.mark.parametrize("devices", DEVICES)
def test_copies_take_offsets_and_may_overlap(devices):
    arrays = [[np.arange(100, dtype=F32) + d] for d in range(devices)]
    run([Copy(Slot(0, 40), Slot(0, 0), 200), Copy(Slot(0), Slot(0, 396), 4)], arrays)
    for d, (a,) in enumerate(arrays):
        expected = np.arange(100, dtype=F32) + d
        expected[10:60] = expected[:50].copy()
        expected[0] = 99 + d
        np.testing.assert_array_equal(a, expected)


@pytest.mark.parametrize("shift", [0, 1, 70_000, 300_000, -70_000, -300_000])
def test_long_copies_may_overlap(shift):
    nbytes, start = 300_000, 350_000
    rng = np.random.default_rng(0)
    arrays = [[rng.integers(0, 256, 1_000_000).astype(np.uint8)] for _ in range(2)]
    expected = [a.copy() for (a,) in arrays]
    for e in expected:
        e[start + shift : start + shift + nbytes] = e[start : start + nbytes].copy()
    run([Copy(Slot(0, start + shift), Slot(0, start), nbytes)], arrays)
    for (a,), e in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(a, e)


def test_sizes_reach_the_kernel():
    f = Function("test_sizes", "void", ["ptr", "ptr", "i64", "i64"])
    args, sizes, begin, end = f.params
    with f.range(begin, end) as unit:
        f.store(f.load("i64", sizes, unit * 8), f.load("ptr", args), unit * 8)
    kernel = compile_texts([f.text()], optimize=True)["test_sizes"]
    out = np.zeros(3, np.int64)
    run([KernelStep(kernel, (Slot(0),), 3, 1.0, sizes=(5, -6, 2**40))], [[out]])
    assert out.tolist() == [5, -6, 2**40]


@pytest.mark.parametrize("cost_ns", [0.1, 1e6])
def test_scratch_is_private_aligned_and_large_enough(cost_ns):
    f = Function("test_scratch", "void", ["ptr", "ptr", "i64", "i64"])
    args, _, begin, end = f.params
    out, scratch = f.load("ptr", args), f.load("ptr", args, 8)
    with f.range(begin, end) as unit:
        with f.range(0, 1000) as i:
            f.store(unit, scratch, i * 8)
        total = f.var("i64", 0)
        with f.range(0, 1000) as i:
            total.set(total.get() + f.load("i64", scratch, i * 8))
        f.store(total.get(), out, unit * 16)
        f.store(f.convert("ptrtoint", scratch, "i64") & 63, out, unit * 16 + 8)
    kernel = compile_texts([f.text()], optimize=True)["test_scratch"]
    arrays = [[np.full((200, 2), -1)] for _ in range(2)]
    run([KernelStep(kernel, (Slot(0),), 200, cost_ns, scratch=8000)], arrays)
    for (out,) in arrays:
        assert (out[:, 0] == np.arange(200) * 1000).all()
        assert (out[:, 1] == 0).all()


def test_programs_run_in_many_threads_at_once():
    native = build_program(
        Program(
            (400, 400, 400),
            tuple(binary("fadd", "float", Slot(0), Slot(1), Slot(2), 100, 50) for _ in range(9)),
        )
    )
    wrong = []

    def call(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(200):
            x, y, z = rng.random(100, F32), rng.random(100, F32), np.zeros(100, F32)
            frames = native.new_frames()
            frames[:3] = [address(x), address(y), address(z)]
            native.run(frames)
            if not (z == x + y).all():
                wrong.append(seed)

    in_threads(call, range(4))
    assert not wrong


# ---- callbacks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", DEVICES)
def test_callbacks_see_and_fill_arrays(devices):
    arrays = [[np.arange(6, dtype=F32) + d, np.zeros((3, 2), I32)] for d in range(devices)]
    seen = []

    def double(device, inputs, outputs):
        seen.append(device)
        assert not inputs[0].flags.writeable
        outputs[0][...] = inputs[0].T * 2

    step = Host(double, (View(Slot(0), (2, 3), F32),), (View(Slot(1), (3, 2), I32),))
    run([step], arrays)
    assert seen == list(range(devices))
    for x, out in arrays:
        np.testing.assert_array_equal(out, x.reshape(2, 3).T * 2)


@pytest.mark.parametrize("devices", DEVICES)
def test_one_callback_sees_all_devices(devices):
    arrays = [[np.full(4, d, F32), np.zeros(4, F32)] for d in range(devices)]

    def total(who, inputs, outputs):
        assert who == tuple(range(devices))
        for (out,) in outputs:
            out[...] = sum(x for (x,) in inputs)

    view = View(Slot(0), (4,), F32), View(Slot(1), (4,), F32)
    run([Host(total, view[:1], view[1:], together=True)], arrays)
    for _, out in arrays:
        assert (out == sum(range(devices))).all()


def test_an_exception_in_a_callback_stops_the_program():
    arrays = [[np.zeros(1, F32), np.ones(1, F32)] for _ in range(3)]

    def fail(device, inputs, outputs):
        if device == 1:
            raise ZeroDivisionError("device 1 divides")

    steps = [
        binary("fadd", "float", Slot(0), Slot(1), Slot(0)),
        Host(fail, (), ()),
        binary("fadd", "float", Slot(0), Slot(1), Slot(0)),
    ]
    native = compile_for(steps, arrays)
    frames = native.new_frames()
    frames[:6] = [address(a) for device in arrays for a in device]
    for calls in (1, 2):
        with pytest.raises(ZeroDivisionError, match="device 1 divides"):
            native.run(frames)
        assert [a[0] for a, _ in arrays] == [calls] * 3


def test_a_callback_may_run_another_program():
    inner = [np.ones(2, F32), np.ones(2, F32), np.zeros(2, F32)]
    native = compile_for([binary("fadd", "float", Slot(0), Slot(1), Slot(2), 2)], [inner])
    frames = native.new_frames()
    frames[:3] = [address(a) for a in inner]
    out = np.zeros(2, F32)

    def nest(device, inputs, outputs):
        native.run(frames)
        outputs[0][...] = inner[2]

    run([Host(nest, (), (View(Slot(0), (2,), F32),))], [[out]])
    assert (out == 2).all()


# ---- loops and branches --------------------------------------------------------------------------


def add_at(x: Slot, total: Slot) -> KernelStep:
    return binary("fadd", "float", x, total, total)


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("reverse", [False, True])
def test_scan_reads_and_writes_its_rows_in_place(devices, reverse):
    rng = np.random.default_rng(1)
    arrays = [[rng.random(50, F32), np.zeros(50, F32), np.zeros(1, F32)] for _ in range(devices)]
    xs, ys, carry = Slot(0, 0, ((0, 4),)), Slot(1, 0, ((0, 4),)), Slot(2)
    body = (add_at(xs, carry), Copy(ys, carry, 4))
    run([Loop(50, body, reverse=reverse)], arrays)
    for x, y, _ in arrays:
        expected = np.cumsum(x[::-1] if reverse else x, dtype=F32)
        np.testing.assert_array_equal(y, expected[::-1] if reverse else expected)


def test_nested_loops_have_two_strides():
    x = np.arange(12, dtype=F32).reshape(3, 4)
    out = np.zeros((4, 3), F32)
    inner = Copy(Slot(1, 0, ((0, 4), (1, 12))), Slot(0, 0, ((0, 16), (1, 4))), 4)
    run([Loop(3, (Loop(4, (inner,)),))], [[x, out]])
    np.testing.assert_array_equal(out, x.T)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_devices_may_loop_for_different_times(reverse, dtype):
    trips = (3, 0, 5, 1)
    arrays = [[np.array([n], dtype), np.arange(5, dtype=F32), np.zeros(5, F32)] for n in trips]
    copy = Copy(Slot(2, 0, ((0, 4),)), Slot(1, 0, ((0, 4),)), 4)
    loop = Loop(Slot(0), (copy,), reverse, np.dtype(dtype), max_trips=5)
    run([loop], arrays)
    for n, x, out in arrays:
        np.testing.assert_array_equal(out, np.where(np.arange(5) < n[0], x, 0))


def test_more_trips_than_promised_are_an_error():
    arrays = [[np.array([6], np.int32), np.zeros(1, F32)]]
    loop = Loop(Slot(0), (add_at(Slot(1), Slot(1)),), max_trips=5)
    with pytest.raises(SpmdError, match="more than its 5 trips"):
        run([loop], arrays)


def countdown(devices: int):
    """Each device adds its step until its counter reaches zero; the test is a callback-free one."""
    arrays = [
        [np.array([d * 3], I32), np.array([-1, 0], I32), np.zeros(1, np.bool_), np.zeros(2, I32)]
        for d in range(devices)
    ]
    zero, minus = Slot(1, 4), Slot(1)
    loop = While(
        test=(binary("icmp sgt", "i32", Slot(0), zero, Slot(2)),),
        predicate=Slot(2),
        body=(
            binary("add", "i32", Slot(0), minus, Slot(0)),
            binary("sub", "i32", Slot(3), minus, Slot(3)),
        ),
    )
    return arrays, loop


@pytest.mark.parametrize("devices", DEVICES)
def test_devices_leave_a_while_loop_one_after_the_other(devices):
    arrays, loop = countdown(devices)
    run([loop], arrays)
    assert [a[3][0] for a in arrays] == [3 * d for d in range(devices)]
    assert all(a[0][0] == 0 for a in arrays)


def test_a_while_loop_counts_its_level():
    arrays, loop = countdown(3)
    trace = Copy(Slot(3, 4), Slot(0), 4)
    rows = [[*a, np.zeros(9, I32)] for a in arrays]
    body = (*loop.body, Copy(Slot(4, 0, ((0, 4),)), Slot(3), 4), trace)
    run([While(loop.test, loop.predicate, body)], rows)
    for d, a in enumerate(rows):
        np.testing.assert_array_equal(a[4][: 3 * d], np.arange(1, 3 * d + 1))


@pytest.mark.parametrize("devices", DEVICES)
def test_branches_differ_between_devices(devices):
    choices = [2, 0, 1, -5, 9, 1, 0, 2][:devices]
    arrays = [[np.array([c], I32), np.array([10, 20, 30], F32), np.zeros(1, F32)] for c in choices]
    branches = tuple((add_at(Slot(1, 4 * b), Slot(2)),) for b in range(3))
    # The first branch overwrites the index; the choice must be made by then.
    spoil = Copy(Slot(0), Slot(1), 4)
    run([Branch(Slot(0), ((*branches[0], spoil), *branches[1:]))], arrays)
    for choice, (_, values, out) in zip(choices, arrays, strict=True):
        assert out[0] == values[min(max(choice, 0), 2)]


@pytest.mark.parametrize("value", [False, True])
def test_a_bool_chooses_between_two_branches(value):
    arrays = [[np.array([value]), np.array([10, 20], F32), np.zeros(1, F32)]]
    branches = tuple((Copy(Slot(2), Slot(1, 4 * b), 4),) for b in range(2))
    run([Branch(Slot(0), branches, np.dtype(bool))], arrays)
    assert arrays[0][2][0] == (20 if value else 10)


def test_callbacks_in_a_branch_see_only_their_devices():
    arrays = [[np.array([d % 2], I32)] for d in range(6)]
    seen = []
    note = Host(lambda device, inputs, outputs: seen.append(device), (), ())
    run([Branch(Slot(0), ((), (note,)))], arrays)
    assert seen == [1, 3, 5]


def test_a_common_callback_that_not_all_reach_is_an_error():
    arrays = [[np.array([d == 2], I32)] for d in range(3)]
    note = Host(lambda *_: None, (), (), together=True, name="psum at train.py:41")
    expected = r"psum at train.py:41: devices \[2\] reached it, devices \[0, 1\] did not"
    with pytest.raises(CollectiveError, match=expected):
        run([Branch(Slot(0), ((), (note,)))], arrays)


# ---- what the builder refuses --------------------------------------------------------------------


@pytest.mark.parametrize(
    "step, message",
    [
        (Copy(Slot(0, 8), Slot(1), 93), r"\[8, 101\) of base 0, which holds 100"),
        (Copy(Slot(0, -1), Slot(1), 4), r"\[-1, 3\) of base 0"),
        (Copy(Slot(2), Slot(1), 4), "base 2 of a frame with 2 bases"),
        (Copy(Slot(0, 0, ((0, 4),)), Slot(1), 4), "level 0 inside 0 loops"),
        (Loop(26, (Copy(Slot(0, 0, ((0, 4),)), Slot(1), 4),)), r"\[0, 104\)"),
        (Loop(3, (Copy(Slot(0, 4, ((0, -4),)), Slot(1), 4),)), r"\[-4, 8\)"),
        (Loop(-1, ()), "-1 trips"),
        (Loop(Slot(0), (), trips_dtype=np.dtype("f4")), "float32"),
        (Branch(Slot(0), ()), "without branches"),
        (Branch(Slot(0, 97), ((), ())), r"\[97, 101\)"),
        (KernelStep(0, (), 1, 1.0), "null"),
        (KernelStep(1, (Slot(0),), 1, 1.0, extents=(104,)), r"\[0, 104\)"),
        (KernelStep(1, (Slot(0),), 1, 1.0, extents=()), None),
        (KernelStep(1, (Slot(0),), 1, 1.0, extents=(1, 2)), "1 slots, but extents for 2"),
        (KernelStep(1, (), -1, 1.0), "must not be negative"),
        (Host(print, (View(Slot(0), (5, 6), F32),), ()), r"\[0, 120\)"),
    ],
)
def test_malformed_programs_are_refused(step, message):
    program = Program((100, None), (step,))
    if message is None:
        build_program(program)
        return
    with pytest.raises(ValueError, match=message):
        build_program(program)


def test_frames_are_checked():
    native = build_program(Program((4, 4), (Copy(Slot(0), Slot(1), 4),), 2))
    assert native.words_needed == 2 * 2 + 3
    with pytest.raises(ValueError, match="frames of 3 words"):
        native.run(np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="float64"):
        native.run(np.zeros(99))


def test_short_programs_keep_the_gil_and_long_ones_do_not():
    def program(cost_ns):
        step = binary("fadd", "float", Slot(0), Slot(1), Slot(2), 1, cost_ns)
        return build_program(Program((4, 4, 4), (step,)))

    endless = While((), Slot(0), (Copy(Slot(0), Slot(1), 4),))
    assert not build_program(Program((4, 4), (endless,))).keeps_gil
    assert program(1.0).keeps_gil
    assert not program(1e6).keeps_gil


def test_a_step_costs_little(threads):
    """Not a benchmark: an upper bound that only a broken executor would miss."""
    x = np.zeros(3, F32)
    slots = [Slot(0, 4 * i) for i in range(3)]
    native = compile_for([Loop(100_000, (binary("fadd", "float", *slots),))], [[x]])
    frames = native.new_frames()
    frames[0] = address(x)
    clock = ctypes.CDLL(None).clock  # CPU time, so that a busy machine does not matter
    begin = clock()
    native.run(frames)
    assert (clock() - begin) / 100_000 < 1, "more than 1 us a step"
