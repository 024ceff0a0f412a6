"""Exchanges of boxes between virtual devices, against NumPy: dims, dtypes, widths, groups, gaps."""

from __future__ import annotations

import numpy as np
import pytest

from spmd.base.config import config
from spmd.collectives.exchange import exchange_p
from spmd.collectives.rectangles import Copies, Copy, copies_between, held, part_sizes
from spmd.compile.lower.collective import boxes_of
from spmd.compile.native.program.encode_collectives import PIECE_BYTES, boxes
from spmd.compile.native.program.steps import Box, Exchange, Slot
from spmd.transport.strided import Strided, strided
from tests.compile.native.programs import run
from tests.compile.native.runtime.ir.test_local_collectives import dtype_of, example

CASES = {
    "rows to columns": ((16, 24), [("x",), ()], [(), ("x",)], {"x": 4}),
    "columns of single numbers": ((16, 4), [("x",), ()], [(), ("x",)], {"x": 4}),
    "uneven": ((10, 7), [("x",), ()], [(), ("x",)], {"x": 4}),
    "five dims": ((4, 3, 8, 2, 6), [("x",), (), (), (), ()], [(), (), ("x",), (), ()], {"x": 4}),
    "two axes": ((8, 12, 5), [("x", "y"), (), ()], [("y",), ("x",), ()], {"x": 4, "y": 2}),
    "gathered": ((8, 12), [("x",), ("y",)], [(), ()], {"x": 4, "y": 2}),
    "large": ((512, 1024), [("x",), ()], [(), ("x",)], {"x": 4}),
    "large rows": ((8, 100_003), [("x",), ()], [("y",), ()], {"x": 4, "y": 2}),
    "empty": ((0, 4), [("x",), ()], [(), ("x",)], {"x": 4}),
    "a scalar": ((), [], [], {"x": 4}),
}


@pytest.fixture(params=[1, 3], ids=lambda n: f"{n}threads", autouse=True)
def threads(request):
    with config.override("num_threads", request.param):
        yield


def check(copies, inputs, shape, groups) -> None:
    """Run one exchange, whose outputs hold rubbish before, and compare with its meaning."""
    inputs = [np.array(x) for x in inputs]
    dtype = inputs[0].dtype
    assert exchange_p.members is not None
    out = [np.full(shape, 1, dtype) for _ in inputs]
    step = Exchange(
        "exchange", Slot(0), Slot(1), dtype, out[0].size, groups,
        boxes=boxes_of(copies, inputs[0].shape, shape, dtype.itemsize, len(groups[0])),
    )  # fmt: skip
    run([step], [[x, y] for x, y in zip(inputs, out, strict=True)])
    for group in groups:
        params = {"copies": copies, "shape": shape}
        found = exchange_p.members([inputs[k] for k in group], **params)
        for k, expected in zip(group, found, strict=True):
            assert out[k].tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ["bool", "int16", "float32", "complex64", "complex128"])
@pytest.mark.parametrize("case", CASES)
def test_an_exchange_is_that_of_numpy(case, name):
    shape, before, after, sizes = CASES[case]
    copies = copies_between(held(shape, before, sizes), held(shape, after, sizes))
    n = int(np.prod(list(sizes.values())))
    rng = np.random.default_rng(0)
    given, made = (tuple(part_sizes(shape, split, sizes)) for split in (before, after))
    inputs = [example(name, given, rng) for _ in range(n)]
    check(copies, inputs, made, (tuple(range(n)),))
    twice = [example(name, given, rng) for _ in range(2 * n)]
    order = np.random.default_rng(1).permutation(2 * n).tolist()
    check(copies, twice, made, (tuple(order[:n]), tuple(order[n:])))


def test_rectangles_without_a_sender_are_zero():
    copies = Copies((Copy(0, 1, (0, 0), (1, 1), (2, 1)), Copy(1, 1, (1, 1), (3, 0), (1, 2))))
    inputs = [np.arange(9, dtype=dtype_of("int32")).reshape(3, 3) + 10 * k for k in range(3)]
    check(copies, inputs, (4, 3), ((2, 0, 1),))


def test_long_rows_and_deep_boxes_are_cut():
    long = Strided(0, 0, 5 * PIECE_BYTES + 3)
    words, pieces = boxes([Box(0, 1, long)], 2, long.width)
    assert len(words) == 2 * 17 and pieces == 5
    deep = strided((3,) * 7, (0,) * 7, (2,) * 7, (0,) * 7, (2,) * 7, 4)
    assert len(deep.loops) == 6
    words, pieces = boxes([Box(0, 1, deep)], 2, 4 * 2**7)
    assert len(words) == 4 * 17 and pieces == 1


def test_a_box_must_stay_inside():
    for wrong in (Box(2, 0, Strided(0, 0, 4)), Box(0, 0, Strided(0, 8, 4, ((2, 4, 4),)))):
        with pytest.raises(ValueError, match="no box of 2 devices with outputs of 12 bytes"):
            boxes([wrong], 2, 12)
