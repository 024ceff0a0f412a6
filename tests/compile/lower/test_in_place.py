"""Which arguments of a kernel may be written over."""

from spmd.compile.kernel.builder import Builder
from spmd.compile.lower.in_place import read_in_place


def test_sharing_memory_needs_the_same_point():
    b = Builder((3,), (4,))
    x, y, out = b.arg("f32", 12), b.arg("f32", 12), b.arg("f32", 12, "out")
    with b.row():
        left, right = b.load(x, (4, 1)), b.load(y, (1, 3))
        b.store(out, (4, 1), b.op("add", left, right))
    kernel = b.build()
    assert x in read_in_place(kernel, out)
    assert y not in read_in_place(kernel, out)


def test_sharing_memory_needs_the_last_pass():
    b = Builder((), (4,))
    x, out = b.arg("f32", 4), b.arg("f32", 4, "out")
    with b.row():
        b.store(out, (1,), b.op("exp", b.load(x, (1,))))
    with b.row():
        total = b.reduce("add", b.load(x, (1,)))
    with b.point():
        b.store(b.arg("f32", 1, "out"), (), total)
    assert x not in read_in_place(b.build(), out)
