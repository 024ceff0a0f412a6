"""The checker refuses kernels that break the law, and says where."""

from dataclasses import replace

import pytest

from spmd.compile.kernel.builder import Builder
from spmd.compile.kernel.check import KernelError, check_kernel
from spmd.compile.kernel.format import format_kernel
from spmd.compile.kernel.ir import Kernel, Load, Map, Op, Pass, Reduce, Scan, Store, StoreRow


def good() -> Kernel:
    """Return a row sum: one ROW pass, one POINT pass."""
    b = Builder((3,), (4,))
    x, out = b.arg("f32", 12), b.arg("f32", 3, "out")
    with b.row():
        total = b.reduce("add", b.op("neg", b.load(x, (4, 1))))
    with b.point():
        b.store(out, (1,), total)
    return b.build()


def with_row(**changes: object) -> Kernel:
    """Return the good kernel with a changed ROW pass."""
    kernel = good()
    return replace(kernel, passes=(replace(kernel.passes[0], **changes), kernel.passes[1]))


def with_point(*stores: Store) -> Kernel:
    """Return the good kernel with other POINT stores."""
    kernel = good()
    return replace(kernel, passes=(kernel.passes[0], Pass("point", (), stores)))


LOAD = Load(0, "f32", 0, Map((4, 1)))
NEG = Op(1, "f32", "neg", (0,))

BROKEN = {
    "scans that run both ways": (
        with_row(instrs=(LOAD, Scan(1, "f32", "add", 0), Scan(3, "f32", "add", 0, reverse=True))),
        "scans of a pass run in one direction",
    ),
    "too few strides": (with_row(instrs=(replace(LOAD, map=Map((1,))), NEG)), "1 strides for 2"),
    "address beyond the end": (
        with_row(instrs=(replace(LOAD, map=Map((4, 1), 1)), NEG)),
        r"addresses 1\.\.12 leave arg 0 of 12",
    ),
    "address below zero": (
        with_row(instrs=(replace(LOAD, map=Map((-4, 1))), NEG)),
        r"addresses -8\.\.3",
    ),
    "used before it is defined": (with_row(instrs=(NEG, LOAD)), "%0 is not defined"),
    "defined twice": (with_row(instrs=(LOAD, NEG, NEG)), "%1 is defined twice"),
    "unknown operation": (
        with_row(instrs=(LOAD, replace(NEG, op="negate"))),
        "'negate' does not take",
    ),
    "wrong result dtype": (
        with_row(instrs=(LOAD, replace(NEG, dtype="f64"))),
        "neg gives f32, not f64",
    ),
    "integer operation on floats": (
        with_row(instrs=(LOAD, replace(NEG, op="popcount"))),
        "'popcount' does not take",
    ),
    "load with another dtype": (
        with_row(instrs=(replace(LOAD, dtype="i32"), NEG)),
        "arg 0 is f32, not i32",
    ),
    "load of an output": (
        with_row(instrs=(replace(LOAD, arg=1, map=Map((1, 0))), NEG)),
        "arg 1 is only written",
    ),
    "unknown reduction": (with_row(reductions=(Reduce(2, "f32", "sum", 1),)), "'sum'"),
    "bitwise reduction of floats": (
        with_row(reductions=(Reduce(2, "f32", "xor", 1),)),
        "xor does not take f32",
    ),
    "row value used outside": (with_point(Store(1, Map((1,)), 1)), "%1 is not defined or not vis"),
    "one element written twice": (with_point(Store(1, Map((0,)), 2)), "write some element"),
    "store to an input": (with_point(Store(0, Map((1,)), 2)), "arg 0 is only read"),
    "combine without inout": (
        with_point(Store(1, Map((1,)), 2, combine="add")),
        "combine reads arg 1",
    ),
    "row buffer at a point": (with_point(StoreRow(0, 2)), "ROW passes only"),
    "lanes along no dim": (replace(good(), vector_dim=2), "vector_dim 2"),
}


def test_a_correct_kernel_passes():
    check_kernel(good())


@pytest.mark.parametrize("name", BROKEN)
def test_broken_kernels_are_refused(name):
    kernel, message = BROKEN[name]
    with pytest.raises(KernelError, match=message):
        check_kernel(kernel)


def test_overlapping_strides_write_twice():
    b = Builder((), (3, 4))
    out = b.arg("f32", 12, "out")
    with b.row():
        b.store(out, (3, 1), b.const(0, "f32"))
    with pytest.raises(KernelError, match="twice"):
        b.build()


def test_a_kernel_is_printed_as_text():
    assert format_kernel(good()) == (
        "kernel(a0: f32[12] in, a1: f32[3] out) outer (3) inner (4)\n"
        "row:\n"
        "  %0 = f32 load a0[4*d0 + d1]\n"
        "  %1 = f32 neg %0\n"
        "  %2 = f32 reduce add %1\n"
        "point:\n"
        "  store a1[d0] <- %2"
    )
