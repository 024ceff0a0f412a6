"""Kernel IR: the computation of one compiled loop nest, without its execution on a machine.

A kernel is an iteration space, some flat arrays, and a list of passes. The space has *outer* dims
(their points are independent of each other and may run in parallel) and *inner* dims, which
together are "the row" of an outer point:

    for point in outer:                    # parallel
        for pass in passes:                # in order
            ROW pass:    for element in inner: instrs, stores, reductions
            POINT pass:  once: instrs, stores

An elementwise kernel is one ROW pass. Softmax is ROW (max), ROW (exp, kept in a row buffer, and its
sum), ROW (divide). A row sum is ROW (reduce), POINT (store). A sum over columns has the same shape:
the summed dim is inner even though it is not the contiguous one; `Kernel.vector_dim` says along
which dim a backend should put its lanes.

The one idea: every value is a scalar with a number. Values made in a ROW pass live in that pass
only; to reach a later pass they go through a row buffer (`StoreRow`/`LoadRow`) or are reduced.
Values made in a POINT pass, and results of reductions, belong to the outer point and may be used in
every later pass.

The law of the IR is `check.py`, its meaning is the interpreter of tests/compile/kernel, its
operations are listed in `ops.py`, and `builder.py` helps to write kernels without counting values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from spmd.base.record import field, kept_hash, record

ROW = "row"
POINT = "point"


# ---- arguments and index maps -----------------------------------------------------


@record
class Arg:
    """One flat array the kernel is given: `size` elements of `dtype`, read and/or written.

    `dtype` is a name of `dtypes.DTYPES` ("f32", "bool", ...). `role` is "in", "out" or "inout"
    (a scatter updates an array whose old contents count). An "in" and an "out" may be the same
    memory only if each element is read at no other point of the space than the one that writes it.
    """

    dtype: str
    size: int
    role: str = "in"


@record
class Map:
    """The place in an argument that a point of the space reads or writes, counted in elements.

    `offset + sum(strides[d] * index[d]) + sum(stride * value for value, stride in gathered)`.
    `strides` has one entry per dim: outer then inner dims in a ROW pass, outer dims only in a POINT
    pass. Stride 0 broadcasts, a negative one reverses, any other order of strides transposes.
    `gathered` holds (value number, stride) pairs of integer values computed in the kernel; the
    kernel's builder clamps or guards them, so that the address always lies inside the argument.
    """

    strides: tuple[int, ...]
    offset: int = 0
    gathered: tuple[tuple[int, int], ...] = ()


# ---- instructions: each defines the value `out` -------------------------------------


@record
class Const:
    """A constant, kept as its bit pattern so that NaNs and -0.0 compare and hash exactly.

    Make the bits with `dtypes.to_bits(value, dtype)`. Complex: the real part is in the low half.
    """

    out: int
    dtype: str
    bits: int


@record
class Iota:
    """The index of dim `dim` (numbered through outer, then inner dims) at the current point."""

    out: int
    dtype: str
    dim: int


@record
class Op:
    """A scalar operation of `ops.OPS` on earlier values; `attr` is integer_pow's exponent."""

    out: int
    dtype: str
    op: str
    operands: tuple[int, ...]
    attr: int | None = None


@record
class Load:
    """Read argument `arg` at `map`.

    With a `guard` (a bool value) nothing is read where it is false and the result is the value
    `fill` there (zero without one); this is how pad, concatenate and out-of-bounds fills are
    written. A guarded load may have addresses outside the argument where its guard is false.
    """

    out: int
    dtype: str
    arg: int
    map: Map
    guard: int | None = None
    fill: int | None = None


@record
class LoadRow:
    """Read the value of an earlier pass in row buffer `buffer` for this element of the row."""

    out: int
    dtype: str
    buffer: int


@record
class Scan:
    """The running combination of `operand` along the row, this element included (cumsum, cummax).

    Only in a ROW pass of a kernel with exactly one inner dim. `op` is add, mul, max or min;
    `reverse` runs from the last element back; all scans of a pass run in one direction. It is an
    instruction, so later ones may use it.
    """

    out: int
    dtype: str
    op: str
    operand: int
    reverse: bool = False


Instr: TypeAlias = Const | Iota | Op | Load | LoadRow | Scan


# ---- ends of a pass -------------------------------------------------------------------


@record
class Store:
    """Write `value` to argument `arg` at `map` (nothing where `guard` is false).

    Without `gathered` indices, different points must write different elements, except that a kernel
    may write one element from a POINT pass only once per outer point. With them this is a scatter:
    `unique` promises that no two points write the same element; otherwise points act one after
    the other in row-major order, and `combine` (add, mul, max, min or None for plain overwriting)
    says how to use the old contents. `combine` needs an "inout" argument. `apart` promises
    that points of different outer indices write different elements: only rows are in order.
    """

    arg: int
    map: Map
    value: int
    guard: int | None = None
    combine: str | None = None
    unique: bool = False
    apart: bool = False


@record
class StoreRow:
    """Keep `value` in row buffer `buffer`, for later passes over the same row."""

    buffer: int
    value: int


@record
class Reduce:
    """Combine `operand` over the row of a ROW pass into `out`, a value of the outer point.

    `op` is add, mul, max, min, and, or, xor (starting from its identity), or argmax/argmin: then
    `out` is the row-major position of the first largest/smallest element (NaN counts as the largest
    and the smallest, as in NumPy) in the integer type `dtype`. The order of a float sum is the
    backend's, but fixed: it never depends on threads or on how the units are divided.
    """

    out: int
    dtype: str
    op: str
    operand: int


# ---- passes and the kernel --------------------------------------------------------------


@record
class Pass:
    """One sweep: `level` ROW runs for each element of the row, POINT once for the outer point."""

    level: str
    instrs: tuple[Instr, ...]
    stores: tuple[Store | StoreRow, ...] = ()
    reductions: tuple[Reduce, ...] = ()


@record
class Kernel:
    """A loop nest over `outer` x `inner` points; see the module's docstring.

    `args` in the order in which a native call passes their pointers. `buffers` are the dtypes of
    the row buffers, each as long as the row. `vector_dim` numbers the dim (outer, then inner) along
    which lanes run; None leaves it to `space.normalise`, which every renderer applies first. Each
    value number is defined once, before its uses. Rendered code does not depend on the numbers, so
    kernels that differ only in them share their compiled code.
    """

    args: tuple[Arg, ...]
    outer: tuple[int, ...]
    inner: tuple[int, ...]
    passes: tuple[Pass, ...]
    buffers: tuple[str, ...] = ()
    vector_dim: int | None = None
    # Kernels are keys of many tables, and their parts are many.
    _hash: int = kept_hash()
    # Whether it keeps the law: it never changes.
    is_checked: bool = field(default=False, init=False, repr=False, compare=False)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of all dims: outer, then inner."""
        return self.outer + self.inner


def definitions(kernel: Kernel) -> dict[int, Instr | Reduce]:
    """Return the instruction that defines each value number of `kernel`."""
    found: dict[int, Instr | Reduce] = {}
    for step in kernel.passes:
        for item in (*step.instrs, *step.reductions):
            found[item.out] = item
    return found


def operands_of(item: Instr | Store | StoreRow | Reduce) -> tuple[int, ...]:
    """Return the value numbers that `item` reads, in a fixed order."""
    match item:
        case Op():
            return item.operands
        case Load():
            read = [value for value, _ in item.map.gathered]
            read += [value for value in (item.guard, item.fill) if value is not None]
            return tuple(read)
        case Store():
            read = [item.value, *(value for value, _ in item.map.gathered)]
            return tuple(read if item.guard is None else [*read, item.guard])
        case Scan() | Reduce():
            return (item.operand,)
        case StoreRow():
            return (item.value,)
    return ()


def reads_of(items: Iterable[Instr | Store | StoreRow | Reduce]) -> list[tuple[int, ...]]:
    """Return the value numbers that each of some items reads."""
    return [operands_of(item) for item in items]


def is_sequential(kernel: Kernel) -> bool:
    """Say whether points must run in row-major order: some scatter may hit an element twice."""
    return any(
        isinstance(store, Store) and store.map.gathered and not store.unique
        for step in kernel.passes
        for store in step.stores
    )


def is_serial(kernel: Kernel) -> bool:
    """Say whether also outer points must run in order, so that the kernel is one unit of work."""
    return is_sequential(kernel) and not all(
        store.apart
        for step in kernel.passes
        for store in step.stores
        if isinstance(store, Store) and store.map.gathered and not store.unique
    )
