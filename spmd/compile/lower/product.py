"""Rules for products: `dot_general` becomes a `Product`, or a loop nest where it cannot.

A `dot_general` is a batch of products of matrices whose rows, columns and depth are groups of
operand dims. Groups that one stride walks through become one dim; what does not collapse is
repacked by a small kernel first. Transposes of operands cost nothing: they are strides. Products of
integers and of complex numbers are ordinary kernels that reduce over the depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from spmd.compile.kernel.build import Builder
from spmd.compile.kernel.dtypes import kind
from spmd.compile.kernel.product import (
    NO_EPILOGUE,
    Operand,
    Product,
    product_dtype,
    store_epilogue,
)
from spmd.compile.lower.expression import need_dtype, storage_dtype
from spmd.compile.lower.index import strides_of
from spmd.compile.lower.kernels import launch
from spmd.compile.lower.lowering import Lowering, host, rule
from spmd.compile.lower.schedule import Launch, Multiply, Ref
from spmd.core.ir import Atom, Eqn
from spmd.core.util import product
from spmd.lax.dot import DimensionNumbers

MAX_BATCH_DIMS = 3


@dataclass(frozen=True, slots=True)
class Dim:
    """One dim of a product: its size, and the stride along it in each of some arrays."""

    size: int
    strides: tuple[int, ...]


def collapse(dims: Sequence[Dim]) -> list[Dim]:
    """Join neighbouring dims that every array walks through as one; drop those of size 1."""
    out: list[Dim] = []
    for d in dims:
        if d.size == 1:
            continue
        last = out[-1] if out else None
        if last is not None and all(
            a == b * d.size for a, b in zip(last.strides, d.strides, strict=True)
        ):
            out[-1] = Dim(last.size * d.size, d.strides)
        else:
            out.append(d)
    return out


@rule("dot_general")
def dot_general(lowering: Lowering, eqn: Eqn) -> None:
    """One product step, after repacking operands whose dims do not collapse."""
    out = eqn.outvars[0]
    found = find_product(lowering, eqn)
    if found is None:
        if not _loop_nest(lowering, eqn):
            host(lowering, eqn)
        return
    made, strides, refs = found
    kernel = storage_dtype(out.aval.dtype)
    assert kernel is not None
    epilogue = store_epilogue(made.batch, made.m, made.n, made.carried, kernel, strides)
    refs = (*refs, lowering.place(out))
    made = replace(made, epilogue=epilogue)
    lowering.steps.append(Multiply(made, refs, "dot", eqn.source))


def find_product(
    lowering: Lowering, eqn: Eqn
) -> tuple[Product, tuple[int, ...], tuple[Ref, Ref]] | None:
    """The product of an equation, without its epilogue; the strides of its result; its operands.

    None if its dtypes are not those of a `Product`.
    """
    lhs, rhs = eqn.invars
    source, result = (storage_dtype(v.aval.dtype) for v in (lhs, eqn.outvars[0]))
    carried = product_dtype(source, result) if source and result else None
    if carried is None:
        return None
    numbers = eqn.params["dimension_numbers"]
    sides = [_Side(lowering, lhs), _Side(lowering, rhs)]
    free = [numbers.free(s, x.aval.ndim) for s, x in enumerate((lhs, rhs))]
    orders = (
        (*numbers.batch[0], *free[0], *numbers.contract[0]),
        (*numbers.batch[1], *numbers.contract[1], *free[1]),
    )
    found = _collapsed(eqn, sides, numbers, free, carried)
    if found is None:
        for side, order in zip(sides, orders, strict=True):
            side.repack(order)
        found = _collapsed(eqn, sides, numbers, free, carried)
        assert found is not None, "repacked operands collapse"
    return *found, (sides[0].ref, sides[1].ref)


class _Side:
    """One operand: where it is and its strides, by its original dims."""

    def __init__(self, lowering: Lowering, atom: Atom):
        self.lowering = lowering
        self.atom = atom
        self.shape = atom.aval.shape
        self.ref: Ref = lowering.ref(atom)
        self.strides = strides_of(self.shape)

    def repack(self, order: Sequence[int]) -> None:
        """Copy the operand so that its dims lie in the given order."""
        aval = self.atom.aval
        dtype = storage_dtype(aval.dtype)
        assert dtype is not None
        sizes = [self.shape[d] for d in order]
        packed = strides_of(sizes)
        b = Builder(sizes, ())
        source, target = b.arg(dtype, aval.size), b.arg(dtype, aval.size, "out")
        with b.row():
            b.store(target, packed, b.load(source, [self.strides[d] for d in order]))
        place = self.lowering.temp(aval)
        self.lowering.steps.append(Launch(b.build(), (self.ref, place), "repack"))
        self.ref = place
        strides = [0] * len(order)
        for d, stride in zip(order, packed, strict=True):
            strides[d] = stride
        self.strides = tuple(strides)


def _collapsed(
    eqn: Eqn,
    sides: Sequence[_Side],
    numbers: DimensionNumbers,
    free: Sequence[Sequence[int]],
    carried: str,
) -> tuple[Product, tuple[int, ...]] | None:
    """The product and the strides of its result, if all groups of dims collapse."""
    a, b = sides
    out = eqn.outvars[0].aval
    c_strides = strides_of(out.shape)
    batch_pairs = list(zip(*numbers.batch, strict=True))
    rows, columns = free
    count = len(batch_pairs)
    batch = collapse(
        [
            Dim(a.shape[i], (a.strides[i], b.strides[j], c_strides[k]))
            for k, (i, j) in enumerate(batch_pairs)
        ]
    )
    m = collapse(
        [Dim(a.shape[i], (a.strides[i], c_strides[count + k])) for k, i in enumerate(rows)]
    )
    first = count + len(rows)
    n = collapse(
        [Dim(b.shape[j], (b.strides[j], c_strides[first + k])) for k, j in enumerate(columns)]
    )
    depth = collapse(
        [
            Dim(a.shape[i], (a.strides[i], b.strides[j]))
            for i, j in zip(*numbers.contract, strict=True)
        ]
    )
    # Rows and columns that do not collapse are further batches, of which one operand has one only.
    while len(m) > 1:
        d = m.pop(0)
        batch.append(Dim(d.size, (d.strides[0], 0, d.strides[1])))
    while len(n) > 1:
        d = n.pop(0)
        batch.append(Dim(d.size, (0, d.strides[0], d.strides[1])))
    if len(batch) > MAX_BATCH_DIMS or len(depth) > 1:
        return None
    row, column, along = (group[0] if group else Dim(1, (0, 0)) for group in (m, n, depth))
    left, right = (
        Operand(need_dtype(side.atom.aval.dtype), *strides, tuple(d.strides[k] for d in batch))
        for k, (side, strides) in enumerate(
            ((a, (row.strides[0], along.strides[0])), (b, (along.strides[1], column.strides[0])))
        )
    )
    found = Product(
        m=row.size,
        n=column.size,
        k=along.size if product(a.shape) and product(b.shape) else 0,
        a=left,
        b=right,
        carried=carried,
        epilogue=NO_EPILOGUE,
        batch=tuple(d.size for d in batch),
    )
    strides = (*(d.strides[2] for d in batch), row.strides[1], column.strides[1])
    return found, strides


# ---- products that are loop nests ----------------------------------------------------------------


def _loop_nest(lowering: Lowering, eqn: Eqn) -> bool:
    """Write a product as a kernel that sums over the contracted dims; says whether it could."""
    (lhs, rhs), (out,) = eqn.invars, eqn.outvars
    numbers: DimensionNumbers = eqn.params["dimension_numbers"]
    source, result = (storage_dtype(v.aval.dtype) for v in (lhs, out))
    if source is None or result is None or "b" in (kind(source), kind(result)):
        return False
    shapes, strides = (
        [v.aval.shape for v in (lhs, rhs)],
        [strides_of(v.aval.shape) for v in eqn.invars],
    )
    free = [numbers.free(s, len(shape)) for s, shape in enumerate(shapes)]
    inner = [shapes[0][d] for d in numbers.contract[0]] or [1]
    b = Builder(out.aval.shape, inner)
    args = [b.arg(source, v.aval.size) for v in (lhs, rhs)]
    target = b.arg(result, out.aval.size, "out")
    none = [[0] * len(free[s]) for s in range(2)]
    maps = []
    for s in range(2):
        own = [strides[s][d] for d in free[s]]
        batch = [strides[s][d] for d in numbers.batch[s]]
        outer = [*batch, *(own if s == 0 else none[0]), *(own if s == 1 else none[1])]
        maps.append([*outer, *([strides[s][d] for d in numbers.contract[s]] or [0])])
    with b.row():
        values = [
            b.convert(b.load(arg, where), result) for arg, where in zip(args, maps, strict=True)
        ]
        total = b.reduce("add", b.op("mul", *values))
    with b.point():
        b.store(target, strides_of(out.aval.shape), total)
    refs = (*(lowering.ref(v) for v in eqn.invars), lowering.place(out))
    launch(lowering, Launch(b.build(), refs, "dot", eqn.source))
    return True
