"""Collectives between virtual devices, against NumPy: kinds, dtypes, groups, partial arrival."""

import ml_dtypes
import numpy as np
import pytest

from spmd.base.config import config
from spmd.base.errors import CollectiveError, DtypeError
from spmd.compile.native.program import encode
from spmd.compile.native.program.encode import needed_reductions
from spmd.compile.native.program.reduction_kernels import OPERATORS, supports
from spmd.compile.native.program.steps import (
    Branch,
    Copy,
    Exchange,
    Program,
    Slot,
    While,
)
from spmd.compile.native.runtime.run import build_program
from tests.compile.native.programs import F32, I32, binary, run

INTEGERS = [f"{u}int{b}" for u in ("", "u") for b in (8, 16, 32, 64)]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
DTYPES = ["bool", *INTEGERS, *FLOATS, "complex64", "complex128"]

UFUNCS = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}

# Groups over the devices: everybody, halves, interleaved, one each, in another order.
GROUPS = [
    ((0, 1),),
    ((0, 1, 2, 3),),
    ((0, 1), (2, 3)),
    ((0, 2), (3, 1)),
    ((0,), (1,), (2,)),
    ((5, 3, 1, 7), (0, 2, 4, 6)),
]


@pytest.fixture(params=[1, 2], ids=lambda n: f"{n}threads", autouse=True)
def threads(request):
    with config.override("num_threads", request.param):
        yield request.param


def dtype_of(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def example(name: str, shape, rng) -> np.ndarray:
    dtype = dtype_of(name)
    if name == "bool":
        return rng.random(shape) < 0.5
    if name in INTEGERS:
        return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]
    values = rng.standard_normal(shape)
    if name.startswith("complex"):
        values = values + 1j * rng.standard_normal(shape)
    return values.astype(dtype)


def reduce_in_order(op: str, inputs) -> np.ndarray:
    """The meaning: from the left, in f32 for the narrow floats."""
    dtype = inputs[0].dtype
    wide = np.float32 if dtype.name in ("float16", "bfloat16") else dtype
    total = inputs[0].astype(wide)
    with np.errstate(all="ignore"):
        for other in inputs[1:]:
            total = UFUNCS[op](total, other.astype(wide))
        return total.astype(dtype)


def devices_of(groups) -> int:
    return max(max(group) for group in groups) + 1


def collective(kind, name, count, groups, rows=1, **more) -> Exchange:
    dtype = dtype_of(name)
    return Exchange(kind, Slot(0), Slot(1), dtype, count, groups, rows, **more)


def zeros_at(shape, dtype: np.dtype, place: int) -> np.ndarray:
    """Zeros that begin so many bytes behind a multiple of 64."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    memory = np.zeros(nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + place
    return memory[start : start + nbytes].view(dtype).reshape(shape)


def exchange(kind, name, count, groups, rows=1, place=0, **more):
    """Run one collective on random inputs; give (inputs, outputs) of all devices."""
    rng = np.random.default_rng(count + rows)
    size = len(groups[0])
    in_cols = size if kind in ("reduce_scatter", "all_to_all") else 1
    out_cols = size if kind in ("all_gather", "all_to_all") else 1
    n = devices_of(groups)
    arrays = [
        [
            example(name, (rows, in_cols, count), rng),
            zeros_at((rows, out_cols, count), dtype_of(name), place),
        ]
        for _ in range(n)
    ]
    run([collective(kind, name, count, groups, rows, **more)], arrays)
    return [a[0] for a in arrays], [a[1] for a in arrays]


def assert_same(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.dtype == expected.dtype
    if actual.dtype.kind == "c":
        # NumPy and LLVM may fuse the products of a complex multiplication differently.
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    elif actual.dtype.name in FLOATS:
        # NumPy does not know that the NaNs of a bfloat16 are equal.
        np.testing.assert_array_equal(actual.astype(np.float64), expected.astype(np.float64))
    else:
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("name", DTYPES)
def test_all_reduce_gives_the_values_of_numpy_in_every_dtype(op, name):
    if not supports(op, name):
        with pytest.raises(DtypeError, match=f"is not defined for {name}"):
            exchange("all_reduce", name, 3, ((0, 1),), op=op)
        return
    for groups in (((0, 1, 2, 3),), ((2, 0), (1, 3))):
        inputs, outputs = exchange("all_reduce", name, 333, groups, op=op)
        for group in groups:
            expected = reduce_in_order(op, [inputs[d] for d in group])
            for d in group:
                assert_same(outputs[d], expected)


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("count", [0, 1, 31, 100_000])
def test_all_reduce_gives_the_values_of_numpy_at_every_size(groups, count):
    inputs, outputs = exchange("all_reduce", "float32", count, groups, rows=2, op="sum")
    for group in groups:
        for d in group:
            assert_same(outputs[d], reduce_in_order("sum", [inputs[g] for g in group]))


def test_all_reduce_runs_in_place():
    rng = np.random.default_rng(0)
    arrays = [[rng.random(50_000, F32)] for _ in range(4)]
    expected = reduce_in_order("sum", [a.copy() for (a,) in arrays])
    step = Exchange(
        "all_reduce", Slot(0), Slot(0), F32, 50_000, ((0, 1, 2, 3),), op="sum", name="psum"
    )
    run([step], arrays)
    for (a,) in arrays:
        assert_same(a, expected)


def test_special_values_survive_a_reduction():
    nan, inf = np.nan, np.inf
    values = np.array([[nan, 1, -0.0, inf, -inf], [1, nan, 0.0, -inf, -inf]], F32)
    for name in ("float32", "bfloat16", "float16", "float64"):
        for op in ("max", "min", "sum"):
            arrays = [[v.astype(dtype_of(name)), np.zeros(5, dtype_of(name))] for v in values]
            run([collective("all_reduce", name, 5, ((0, 1),), op=op)], arrays)
            expected = reduce_in_order(op, [a[0] for a in arrays])
            assert_same(arrays[0][1], expected)
            assert_same(arrays[1][1], expected)


def test_bfloat16_rounds_to_nearest_even_and_keeps_denormals():
    bits = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    other = np.full_like(bits, 1.0)
    other[::3] = 0
    arrays = [[bits, np.zeros_like(bits)], [other, np.zeros_like(bits)]]
    run([collective("all_reduce", "bfloat16", 2**16, ((0, 1),), op="sum")], arrays)
    assert_same(arrays[0][1], reduce_in_order("sum", [bits, other]))


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("rows, count", [(1, 1), (3, 5), (1, 40_000), (0, 4), (2, 0)])
@pytest.mark.parametrize("name", ["float32", "int8"])
def test_gather_scatter_and_exchange_give_the_values_of_numpy(groups, rows, count, name):
    inputs, outputs = exchange("all_gather", name, count, groups, rows)
    for group in groups:
        expected = np.concatenate([inputs[d] for d in group], axis=1)
        for d in group:
            assert_same(outputs[d], expected)
    inputs, outputs = exchange("reduce_scatter", name, count, groups, rows, op="sum")
    for group in groups:
        total = reduce_in_order("sum", [inputs[d] for d in group])
        for j, d in enumerate(group):
            assert_same(outputs[d], total[:, j : j + 1])
    inputs, outputs = exchange("all_to_all", name, count, groups, rows)
    for group in groups:
        for j, d in enumerate(group):
            expected = np.stack([inputs[g][:, j] for g in group], axis=1)
            assert_same(outputs[d], expected)


@pytest.mark.parametrize("place", [0, 16])
@pytest.mark.parametrize("name", ["bool", "int8", "bfloat16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
def test_streaming_stores_change_no_value(
    kind: str, name: str, place: int, monkeypatch: pytest.MonkeyPatch
):
    """Aligned outputs, odd rows behind them, and outputs that are not aligned at all."""
    op = {"op": "sum"} if kind in ("all_reduce", "reduce_scatter") else {}
    for count, rows in ((20_000, 1), (1111, 3)):
        case = (kind, name, count, ((0, 2), (3, 1)), rows, place)
        _, usual = exchange(*case, **op)
        with monkeypatch.context() as patch:
            patch.setattr(encode, "STREAM_FROM_BYTES", 0)
            step = collective(*case[:5], **op)
            assert [r[-1] for r in needed_reductions(Program((1, 1), (step,), 4))] == [True] * len(
                op
            )
            _, streamed = exchange(*case, **op)
        for a, b in zip(usual, streamed, strict=True):
            assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("count", [1, 40_000])
def test_permute_sends_and_fills_with_zeros(count):
    groups, pairs = ((0, 1, 2), (5, 4, 3)), ((0, 1), (1, 2))
    inputs, outputs = exchange("permute", "float64", count, groups, 2, pairs=pairs)
    for group in groups:
        assert (outputs[group[0]] == 0).all()
        assert_same(outputs[group[1]], inputs[group[0]])
        assert_same(outputs[group[2]], inputs[group[1]])


@pytest.mark.parametrize("root", [0, 2])
def test_broadcast_copies_the_values_of_the_root(root):
    groups = ((0, 1, 2), (5, 4, 3))
    inputs, outputs = exchange("broadcast", "int16", 777, groups, root=root)
    for group in groups:
        for d in group:
            assert_same(outputs[d], inputs[group[root]])


def test_results_do_not_depend_on_threads():
    results = []
    for threads in (1, 2, 4):
        with config.override("num_threads", threads):
            _, outputs = exchange("all_reduce", "float32", 300_000, GROUPS[5], op="sum")
            results.append(np.stack(outputs).tobytes())
    assert len(set(results)) == 1


# ---- partial arrival ----------------------------------------------------------------------------


def test_a_group_may_communicate_in_a_branch_without_the_others():
    arrays = [[np.array([d >= 2], I32), np.full(3, d, F32), np.zeros(3, F32)] for d in range(4)]
    meet = Exchange("all_reduce", Slot(1), Slot(2), F32, 3, ((0, 1), (2, 3)), op="sum", name="psum")
    run([Branch(Slot(0), ((), (meet,)))], arrays)
    assert [a[2][0] for a in arrays] == [0, 0, 5, 5]


def test_a_collective_without_all_members_is_an_error():
    arrays = [[np.array([d == 1], I32), np.full(3, d, F32), np.zeros(3, F32)] for d in range(4)]
    meet = Exchange(
        "all_reduce", Slot(1), Slot(2), F32, 3, ((0, 1), (2, 3)), op="sum", name="psum (a.py:3)"
    )
    expected = r"psum \(a.py:3\): devices \[1\] reached it, devices \[0, 2, 3\] did not"
    with pytest.raises(CollectiveError, match=expected):
        run([Branch(Slot(0), ((), (meet,)))], arrays)


def test_a_loop_that_all_devices_leave_together_may_hold_a_collective():
    """Repeat total = psum(x), x = x + total until the total passes a bound."""
    arrays = [
        [np.full(1, d + 1.0, F32), np.zeros(1, F32), np.array([100.0], F32), np.zeros(1, np.bool_)]
        for d in range(3)
    ]
    total = Exchange("all_reduce", Slot(0), Slot(1), F32, 1, ((0, 1, 2),), op="sum", name="psum")
    loop = While(
        test=(total, binary("fcmp olt", "float", Slot(1), Slot(2), Slot(3))),
        predicate=Slot(3),
        body=(binary("fadd", "float", Slot(0), Slot(1), Slot(0)),),
    )
    run([loop], arrays)
    x = np.array([1.0, 2.0, 3.0])
    while x.sum() < 100:
        x = x + x.sum()
    assert [a[0][0] for a in arrays] == x.tolist()


# ---- what the builder refuses --------------------------------------------------------------------


@pytest.mark.parametrize(
    "step, message",
    [
        (collective("all_reduce", "float32", 4, ((0, 1), (2,)), op="sum"), "equally large"),
        (collective("all_reduce", "float32", 4, ((0, 1), (1, 2)), op="sum"), "disjoint"),
        (collective("all_reduce", "float32", 4, ((0, 3),), op="sum"), "disjoint sets of the 3"),
        (collective("all_reduce", "float32", 26, ((0, 1),), op="sum"), r"\[0, 104\)"),
        (collective("all_gather", "float32", 13, ((0, 1),)), r"\[0, 104\)"),
        (collective("permute", "float32", 4, ((0, 1),), pairs=((0, 1), (1, 1))), "at most once"),
        (collective("permute", "float32", 4, ((0, 1),), pairs=((0, 2),)), "at most once"),
        (collective("broadcast", "float32", 4, ((0, 1),), root=2), "out of range"),
        (collective("gossip", "float32", 4, ((0, 1),)), "unknown kind 'gossip'"),
        (
            Exchange("all_gather", Slot(0), Slot(0), F32, 4, ((0, 1),)),
            "cannot work in place",
        ),
    ],
)
def test_malformed_collectives_are_refused(step, message):
    with pytest.raises(ValueError, match=message):
        build_program(Program((100, 100), (step, Copy(Slot(0), Slot(1), 1)), 3))


def test_an_unknown_operator_is_refused():
    step = collective("all_reduce", "float32", 4, ((0, 1),), op="mean")
    with pytest.raises(DtypeError, match="a mean over devices"):
        build_program(Program((100, 100), (step,), 2))
