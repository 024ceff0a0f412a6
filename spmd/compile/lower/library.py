"""Rules for equations that become library steps: matrix products.

A `dot_general` is a batch of products of matrices whose rows, columns and depth are groups of
operand dims. Groups that one stride walks through become one dim; what does not collapse is
repacked by a small kernel first. Transposes of operands cost nothing: they are strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spmd.compile.cpu.gemm import supports
from spmd.compile.kernel.build import Builder
from spmd.compile.lower.expression import storage_dtype
from spmd.compile.lower.index import strides_of
from spmd.compile.lower.lowering import Lowering, host, rule
from spmd.compile.lower.schedule import Launch, Product, Ref
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
    lhs, rhs = eqn.invars
    out = eqn.outvars[0]
    if not supports(lhs.aval.dtype, out.aval.dtype):
        host(lowering, eqn)
        return
    numbers = eqn.params["dimension_numbers"]
    sides = [_Side(lowering, lhs), _Side(lowering, rhs)]
    free = [numbers.free(s, x.aval.ndim) for s, x in enumerate((lhs, rhs))]
    orders = (
        (*numbers.batch[0], *free[0], *numbers.contract[0]),
        (*numbers.batch[1], *numbers.contract[1], *free[1]),
    )
    step = _step(eqn, sides, numbers, free, lowering)
    if step is None:
        for side, order in zip(sides, orders, strict=True):
            side.repack(order)
        step = _step(eqn, sides, numbers, free, lowering)
        assert step is not None, "repacked operands collapse"
    lowering.steps.append(step)


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


def _step(
    eqn: Eqn,
    sides: Sequence[_Side],
    numbers: DimensionNumbers,
    free: Sequence[Sequence[int]],
    lowering: Lowering,
) -> Product | None:
    """The product step if all groups of dims collapse."""
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
    return Product(
        source_dtype=a.atom.aval.dtype,
        result_dtype=out.dtype,
        m=row.size,
        n=column.size,
        k=along.size if product(a.shape) and product(b.shape) else 0,
        batch=tuple(d.size for d in batch),
        a_strides=(row.strides[0], along.strides[0], *(d.strides[0] for d in batch)),
        b_strides=(along.strides[1], column.strides[0], *(d.strides[1] for d in batch)),
        out_strides=(row.strides[1], column.strides[1], *(d.strides[2] for d in batch)),
        a=a.ref,
        b=b.ref,
        out=lowering.place(eqn.outvars[0]),
        source=eqn.source,
    )
